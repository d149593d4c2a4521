"""`unchanged` and `applied` of a variable mean that it is in effect, or the row says who knows."""

import json

import pytest
from torch._inductor import config as inductor

ASKED = {
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OMP_DYNAMIC": "true",
    "MKL_NUM_THREADS": "1",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
}
APPLY = """
import json, os, sys
asked = json.loads(sys.argv[1])
{before}
import torchrepro
with torchrepro.apply({{"name": "asked", "env": asked}}) as applied:
    rows = {{row["knob"][4:]: row for row in applied.report.to_json()["knobs"]}}
    text = str(applied.report)
    import torch
    shows = {{
        "PYTHONHASHSEED": sys.flags.hash_randomization == 0,
        "OMP_NUM_THREADS": torch.get_num_threads() == 1,
        "MKL_NUM_THREADS": "mkl_get_max_threads() : 1" in torch.__config__.parallel_info(),
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": torch.get_float32_matmul_precision() == "high",
        "ATEN_CPU_CAPABILITY": torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    }}
    marked = [name for name in rows if f"unchanged, unverified  env.{{name}}: " in text]
print(json.dumps([rows, shows, marked]))
"""
TORCH = "import torch; torch.ones(9).exp(); torch.mm(*[torch.ones(9, 9)] * 2)"
WRITE = "os.environ.update(asked)"


def applied(answer_of, before, *, asked=ASKED, flags=(), env=None):
    """Apply the variables after `before` has run; returns rows, what shows, and what is marked."""
    return answer_of(*flags, "-c", APPLY.format(before=before), json.dumps(asked), env=env)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("before", "env", "unverified", "in_effect"),
    [
        (f"{TORCH}\n{WRITE}", None, {"MKL_CBWR"}, set()),
        (f"{WRITE}\n{TORCH}", None, {"MKL_CBWR"}, {"OMP_NUM_THREADS"}),
        (WRITE, None, set(), {"OMP_NUM_THREADS"}),
        (TORCH, ASKED, set(), {"OMP_NUM_THREADS", "PYTHONHASHSEED"}),
    ],
    ids=["after torch has computed", "before torch", "torch not loaded", "exported"],
)
def test_unchanged_means_in_effect_or_is_marked(answer_of, before, env, unverified, in_effect):
    """What is not in effect is too late; where nobody can tell, the row is marked, and only there.

    What was set in time is unchanged; after the start, what Python itself reads is late. Some of
    what was set in time shows on every machine, and is in effect.
    """
    rows, shows, marked = applied(answer_of, before, env=env)
    late = {name for name, row in rows.items() if row["outcome"] == "too_late"}
    hidden = {name for name, shown in shows.items() if not shown}

    assert {row["outcome"] for row in rows.values()} <= {"unchanged", "too_late"}
    assert {name for name, row in rows.items() if row["unverified"]} == unverified == set(marked)
    assert unverified.isdisjoint(late)
    assert in_effect.isdisjoint(hidden | late)
    if before.endswith(WRITE) and before != WRITE:
        assert hidden <= late
    elif env is None:
        assert late == {"PYTHONHASHSEED"}
    else:
        assert late <= hidden


@pytest.mark.slow
def test_a_number_of_threads_that_openmp_has_settled_is_too_late(answer_of):
    """With torch's OpenMP loaded before torch, nothing says applied that is not in effect."""
    before = """
import ctypes, importlib.util, pathlib
torch_files = pathlib.Path(importlib.util.find_spec("torch").origin).parent
own = [*torch_files.glob("lib/lib*omp*.so*"), *torch_files.parent.glob("torch.libs/lib*omp*.so*")]
for path in own:
    ctypes.CDLL(str(path))
"""
    asked = {"OMP_NUM_THREADS": "1"}
    rows, shows, _ = applied(answer_of, before, asked=asked)

    assert (rows["OMP_NUM_THREADS"]["outcome"] == "applied") == shows["OMP_NUM_THREADS"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("flag", ["-E", "-R"])
@pytest.mark.parametrize("seed", ["0", "7"])
def test_a_hash_seed_that_python_ignores_is_too_late(answer_of, flag, seed):
    """PYTHONHASHSEED is unchanged if the hashes are those of the seed, and else too late."""
    asked = {"PYTHONHASHSEED": "0"}
    source = APPLY.replace("import torch\n", "torch = None\n").format(before="")
    source = source.partition("    text =")[0] + "print(json.dumps(rows))\n"
    plain, ignored = (
        answer_of(*flags, "-c", source, json.dumps(asked), env={"PYTHONHASHSEED": seed})
        for flags in ([], [flag])
    )

    assert plain["PYTHONHASHSEED"]["outcome"] == "unchanged"
    assert ignored["PYTHONHASHSEED"]["outcome"] == "too_late"


EXPORTED = """
import json, os, torchrepro
name, found = "backends.torch.inductor_deterministic", []
for profile in ("train-fast", "debug-strict"):
    try:
        with torchrepro.apply(profile) as applied:
            found.append([applied.report[name].outcome, os.environ["TORCHINDUCTOR_DETERMINISTIC"]])
    except torchrepro.ApplyError as error:
        found.append([error.report[name].outcome, os.environ["TORCHINDUCTOR_DETERMINISTIC"]])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_an_exported_variable_contradicts_the_switch_that_starts_from_it(answer_of):
    """An exported TORCHINDUCTOR_DETERMINISTIC is kept, and is a conflict where it contradicts."""
    fast, strict = answer_of("-c", EXPORTED, env={"TORCHINDUCTOR_DETERMINISTIC": "0"})

    here = hasattr(inductor, "deterministic")  # since torch 2.10
    assert fast == ["unchanged" if here else "unsupported", "0"]
    assert strict == ["conflict" if here else "unsupported", "0"]


INDUCTOR = """
import json, os, sys, threading
import torch, torchrepro
from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.knobs.torch_state import InductorVariable
options = {
    knob.variable: knob.access.option
    for knob in CATALOGUE
    if knob.variable and isinstance(knob.access, InductorVariable)
}
def state():
    from torch._inductor import config
    def read():
        return {name: getattr(config, o) for name, o in options.items() if hasattr(config, o)}
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(read()))
    thread.start()
    thread.join()
    return [read(), elsewhere[0], sorted(os.environ.keys() & options.keys())]
def under(value):
    with torchrepro.apply({"env": dict.fromkeys(options, value)}) as applied:
        inside = state()
        rows = {row.knob[4:]: row.outcome for row in applied.report}
    return [rows, inside, state()]
print(json.dumps([under("1"), under("1"), under("0")]))
"""


@pytest.mark.slow
def test_what_inductor_took_from_a_variable_is_undone(answer_of):
    """Options of inductor are what was asked within a profile, and after it as if it never was."""
    first, again, off = answer_of("-c", INDUCTOR)

    for (rows, inside, after), value in ((first, True), (again, True), (off, False)):
        assert {outcome for name, outcome in rows.items() if name in inside[0]} == {"applied"}
        assert [set(each.values()) for each in inside[:2]] == [{value}, {value}]
        assert [set(each.values()) for each in after[:2]] == [{False}, {False}]
        assert after[2] == []


SWEPT = """
import hydra
@hydra.main(version_base=None, config_path=None)
def main(config):
    from torch._inductor import config
    print("task", config.FAST, config.max_autotune)
if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_inductor_imported_in_a_job_starts_the_next_one_afresh(write, run_python):
    """The options of inductor in a job of a sweep are those that this job asks for."""
    fast = "use_fast_math" if hasattr(inductor, "use_fast_math") else "coordinate_descent_tuning"
    write({"app.py": SWEPT.replace("FAST", fast)})
    overrides = [
        f'repro.env.TORCHINDUCTOR_{fast.upper()}="1",null',
        'repro.env.TORCHINDUCTOR_MAX_AUTOTUNE="1",null',
    ]
    result = run_python("app.py", "-m", "+repro=seed-only", *overrides)
    tasks = [line for line in result.stdout.splitlines() if line.startswith("task")]

    assert tasks == ["task True True", "task True False", "task False True", "task False False"]


@pytest.mark.slow
def test_a_variable_that_is_ignored_lowers_the_guarantee_with_the_reason_of_its_row(answer_of):
    """A seed of hashes that is exported and ignored is not called one that came too late."""
    code = (
        "import json, torchrepro; "
        "report = torchrepro.apply('debug-strict').report; "
        "print(json.dumps([report['env.PYTHONHASHSEED'].why, report.guarantee.to_json()]))"
    )
    why, guarantee = answer_of("-E", "-c", code, env={"PYTHONHASHSEED": "0"})
    told = {each["knob"]: each["why"] for each in guarantee["lowered"]}

    assert why in told["env.PYTHONHASHSEED"]
