"""A lock is met where it was taken, and names what has changed elsewhere."""

from __future__ import annotations

import json
import operator
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from torchrepro.knobs.variables import ROWS
from torchrepro.lock.diff import ENFORCED, IMPACTS, Impact, impact_of

from ..benchmarks.paired import compare, require

SCRIPT = str(Path(sys.executable).with_name("torchrepro"))
COMMIT = {"commit": "0" * 40, "changed_files": 0, "remotes": []}
PACK = {"package": "acme-profiles 1.2.0", "set_by": "acme:strict.yaml:3", "replaced": []}
CHANGED = (
    ("profile/seed", 8, "seed", Impact.CHANGES),
    ("profile/name", "another", None, None),
    ("versions/torch", "2.5.0", "torch", Impact.CHANGES),
    ("versions/cudnn", "1000", "cudnn", Impact.CHANGES),
    ("versions/blas", "open", "blas", Impact.CHANGES),
    ("versions/numpy", "1.26.0", "numpy", Impact.MAY),
    ("versions/python", "3.9.1", "python", Impact.MAY),
    ("versions/kernel", "5.4", "kernel", Impact.SHOULD_NOT),
    ("hardware/cpu", "another", "cpu", Impact.CHANGES),
    ("hardware/instruction set", "SVE", "instruction set", Impact.CHANGES),
    ("hardware/threads", 77, "threads", Impact.CHANGES),
    ("hardware/gpu", "a GPU", "gpu", Impact.CHANGES),
    ("hardware/gpus", 8, "gpus", Impact.MAY),
    ("report/guarantee/held", "none", "held", Impact.MAY),
    ("environment/MKL_CBWR", "AVX2", "MKL_CBWR", Impact.CHANGES),
    ("environment/CUDA_VISIBLE_DEVICES", "1", "CUDA_VISIBLE_DEVICES", Impact.MAY),
    ("origins/seed", PACK, "acme-profiles", Impact.SHOULD_NOT),
    ("repository", COMMIT, None, None),
)


def test_a_lock_is_met_on_the_machine_where_it_was_written(lock, command, answer):
    """`check` and `check --strict` end with status 0 on the machine of the lock."""
    status, out, err = command("check", lock, "--strict")

    assert (status, err) == (0, "")
    assert f"{lock} is met" in out
    assert answer("check", lock) == (
        0,
        {
            "met": True,
            "lock": str(lock),
            "strict": False,
            "differences": [],
            "not_held": [],
            "not_compared": [],
        },
    )


@pytest.mark.parametrize("change", CHANGED, ids=[row[0] for row in CHANGED])
def test_a_difference_is_reported_with_its_impact(lock, answer, edit, change):
    """One value that differs breaks the lock if its impact is forbidden; otherwise it is shown.

    Another commit of the program breaks no lock, not even strictly.
    """
    key, value, named, rank = change
    edit(lock, {key: value})
    status, found = answer("check", lock)
    strictly = answer("check", lock, "--strict")[0]
    rows = [*found["differences"], *found["not_held"]]
    keys = [(row["key"], row["rank"]) for row in rows if row["rank"] != str(Impact.PROGRAM)]

    assert keys == ([(named, str(rank))] if named else [])
    assert status == (1 if rank in ENFORCED else 0)
    assert strictly == (1 if named else 0)


def test_the_likeliest_to_change_numbers_comes_first(lock, command, edit):
    """The table is ordered by impact, and the last line counts the differences of each impact."""
    changes = {"versions/kernel": "1", "versions/numpy": "1", "hardware/cpu": "x"}
    edit(lock, {**changes, "profile/seed": 3})
    status, out, err = command("check", lock)
    lines = out.splitlines()

    assert (status, err) == (1, "")
    assert [line.split("  ")[0] for line in lines[1:4]] == [
        "changes numbers",
        "changes numbers",
        "may change numbers",
    ]
    assert lines[4] == f"{lock} is not met: 2 that change numbers, 1 that may change numbers"
    assert lines[5].startswith("allowed, should not change numbers: version of kernel (1 -> ")


def test_a_variable_that_is_exported_against_the_profile_breaks_the_lock(lock, answer, monkeypatch):
    """A knob with another outcome is named, although the profile is the same."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    status, found = answer("check", lock)

    assert status == 1
    assert [(row["key"], row["locked"], row["here"]) for row in found["differences"]] == [
        ("env.CUBLAS_WORKSPACE_CONFIG", ":4096:8", "conflict")
    ]


PREFIXES = (
    *("TORCH", "PYTORCH", "TORCHDYNAMO", "TRITON", "CUDA", "CUBLASLT", "CUDNN", "HIP", "ROCBLAS"),
    *("MIOPEN", "ASCEND", "HCCL", "ACLNN", "DNNL", "ONEDNN", "MKL", "OMP", "KMP", "GOMP", "BLIS"),
    *("OPENBLAS", "NPY"),
)
OF_KNOBS = {
    *("ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA", "OMP_DYNAMIC", "ATEN_CPU_CAPABILITY"),
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE"),
}


OTHERS = {
    "TORCHINDUCTOR_CPP_ENABLE_UNSAFE_MATH_OPT_FLAG": Impact.MAY,
    "TORCHINDUCTOR_CPP_ENABLE_FLOATING_POINT_CONTRACT_FLAG": Impact.MAY,
    "TORCHINDUCTOR_FREEZING": Impact.MAY,
    **dict.fromkeys(("CXX", "CC", *(f"{prefix}_NEW_SWITCH" for prefix in PREFIXES)), Impact.MAY),
    **dict.fromkeys(("CUDA_HOME", "TRITON_NEW_CACHE_DIR"), Impact.SHOULD_NOT),
    "NCCL_NEW_LOG_LEVEL": Impact.SHOULD_NOT,
}
"""Variables of libraries that compute, which no table has."""

NOT_SEEN = ("TORCHELASTIC_RUN_ID", "TORCHREPRO_SEED", "TORCH_ACCESS_TOKEN", "EDITOR")


def test_every_exported_variable_that_changes_results_breaks_the_lock(command, answer, tmp_path):
    """A variable of the table that the profile does not set is named when it is exported.

    One of a library that computes is named though nobody knows it, by four digits of a digest.
    """
    path = tmp_path / "repro.lock"
    command("lock", "seed-only", "-o", path)
    rows = {row["name"] for row in ROWS if row.get("recorded")}
    with pytest.MonkeyPatch.context() as exported:
        for name in (*rows, *OF_KNOBS, *OTHERS, *NOT_SEEN):
            exported.setenv(name, "1")
        status, found = answer("check", path)
    named = {row["key"] for row in found["differences"] if row["section"] == "environment"}
    seen = [*found["differences"], *found["not_held"]]
    others = [row for row in seen if row["section"] == "other variables"]

    assert {"DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "OMP_THREAD_LIMIT"} <= rows
    assert (status, named) == (1, rows | OF_KNOBS)
    assert {row["key"]: row["rank"] for row in others} == OTHERS
    assert all(len(row["here"]) == len("sha256:abcd") for row in others)


def test_settings_of_a_loaded_compiler_are_part_of_a_lock(command, answer, tmp_path):
    """A lock records values of inductor and dynamo that are not defaults; a change is named."""
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    lock = tmp_path / "repro.lock"
    with inductor.patch(epilogue_fusion=False), dynamo.patch(recompile_limit=3):
        command("lock", "seed-only", "-o", lock)
        same = answer("check", lock)
    held = json.loads(lock.read_text())
    _, found = answer("check", lock)

    own = {"inductor.epilogue_fusion": False, "dynamo.recompile_limit": 3}
    assert own.items() <= held["compiler"].items()
    assert same[0] == 0
    changed = {
        row["key"]: (row["here"], row["rank"])
        for row in (*found["differences"], *found["not_held"])
        if row["section"] == "compiler"
    }
    assert changed == dict.fromkeys(own, (None, "may change numbers"))


def test_an_exported_variable_that_the_profile_sets_makes_no_difference(
    command, tmp_path, monkeypatch
):
    """A run under the lock exports the values of the profile, as recorded in the lock."""
    path = tmp_path / "repro.lock"
    command("lock", "seed-only", "env_extra.DNNL_MAX_CPU_ISA=AVX2", "-o", path)
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")

    assert command("check", path)[0] == 0


def test_a_relative_profile_path_is_resolved_from_the_folder_of_the_lock(
    command, answer, tmp_path, monkeypatch
):
    """A relative path goes with the lock, not with the reader; what the file says now is named, and
    a file that is lost is said plainly.
    """
    monkeypatch.chdir(tmp_path)
    for folder in ("locks", "elsewhere"):
        (tmp_path / folder).mkdir()
    profile = tmp_path / "mine.yaml"
    profile.write_text("seed: 1\n", encoding="utf-8")
    command("lock", "mine.yaml", "-o", "locks/repro.lock")
    monkeypatch.chdir(tmp_path / "elsewhere")
    lock = "../locks/repro.lock"
    held = command("check", lock, "--strict")
    profile.write_text("seed: 2\ndropout: zero\n", encoding="utf-8")
    _, changed = answer("check", lock)
    profile.unlink()
    status, lost = answer("check", lock)

    assert held[0] == 0, held
    assert [(row["key"], row["locked"], row["here"]) for row in changed["differences"]] == [
        ("dropout", None, "zero"),
        ("seed", 1, 2),
    ]
    assert status == 1
    assert [row["key"] for row in lost["differences"]] == ["(the whole)"]
    assert "mine.yaml: the profile's file does not exist" in lost["differences"][0]["here"]


def test_locking_twice_gives_the_same_bytes(lock, command):
    """The contents of a lock do not depend on when it is written."""
    before = lock.read_bytes()
    torch.seed()  # as in a new process, whose generators begin anywhere
    command("lock", "debug-strict", "seed=7", "-o", lock)

    assert lock.read_bytes() == before


def test_lock_does_not_overwrite_other_files(command, tmp_path):
    """`lock` refuses to overwrite another file or a folder, and names it."""
    program = tmp_path / "train.py"
    program.write_text("print(1)\n", encoding="utf-8")
    results = [command("lock", "seed-only", "-o", place) for place in (program, tmp_path)]

    assert [status for status, _, _ in results] == [2, 2]
    assert "train.py: exists already and is not a lock" in results[0][2]
    assert program.read_text(encoding="utf-8") == "print(1)\n"


def test_an_override_with_a_secret_is_refused(command, tmp_path, monkeypatch):
    """A lock is shared, so an override with a secret is refused without showing the secret."""
    monkeypatch.setenv("SERVICE_TOKEN", "hunter7-4711")
    for text in ("env_extra.MY_MODE=hunter7-4711", "description=https://a:hunter7@b/c"):
        status, out, err = command("lock", "seed-only", text, "-o", tmp_path / "a.lock")

        assert status == 2
        assert "a lock is shared" in err
        assert "hunter" not in out + err
        assert list(tmp_path.iterdir()) == []


def test_every_impact_has_patterns_and_every_pattern_matches_something():
    """No pattern is shadowed by an earlier one, and each impact has a pattern."""
    rows = [(pattern, impact) for impact, patterns in IMPACTS for pattern in patterns]
    names = [(pattern.replace("*", "x").split("/", 1), impact) for pattern, impact in rows]

    assert [impact_of(*name) for name, _ in names] == [impact for _, impact in names]
    assert {impact for _, impact in names} == set(Impact) - {Impact.NOTHING_HERE}


SHOW = (
    "import json, os, torch;"
    "print(json.dumps([torch.initial_seed(), os.environ['CUBLAS_WORKSPACE_CONFIG'],"
    " sorted(os.environ.keys() - {'TORCHREPRO_LOCKED'}), len(os.sched_getaffinity(0))]))"
)


@pytest.mark.slow
def test_run_under_a_lock_equals_run_under_its_profile(execute):
    """The profile comes from the lock, and the command runs as without a lock."""
    asked = ("--", sys.executable, "-c", SHOW)
    binding = {"OMP_PROC_BIND": "true"}  # binds the thread that loads OpenMP
    execute(SCRIPT, "lock", "debug-strict", "seed=7", "-o", "repro.lock", env=binding)
    under_lock = execute(SCRIPT, "run", "--lock", "repro.lock", *asked, env=binding)
    plain = execute(SCRIPT, "run", "debug-strict", "seed=7", *asked, env=binding)

    assert under_lock.returncode == 0, under_lock.stderr
    assert json.loads(under_lock.stdout) == json.loads(plain.stdout)
    assert json.loads(plain.stdout)[0] == 7


@pytest.mark.slow
def test_run_starts_nothing_if_the_lock_is_not_met(lock, tmp_path, edit, command, execute):
    """`run --lock` ends with status 1 and the output of `check`; the command does not start."""
    edit(lock, {"versions/torch": "2.5.0"})
    touch = ("--", "touch", "started")
    ended = execute(SCRIPT, "run", "--lock", lock, *touch)
    other = execute(SCRIPT, "run", "--lock", lock, "seed-only", "seed=7", *touch)

    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == command("check", lock)[1]
    assert other.returncode == 1
    assert "backends.cudnn.deterministic" in other.stderr
    assert not (tmp_path / "started").exists()


@pytest.mark.benchmark
def test_check_takes_at_most_a_second_beyond_importing_torch(lock, tmp_path):
    """`torchrepro check` takes at most 1 s more than `import torch, numpy` in a new process.

    That is the time of a processor: what else runs on the machine is not counted.
    """

    def used():
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    def took(command):
        before = used()
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=300)
        return used() - before

    bare = partial(took, [sys.executable, "-c", "import torch, numpy"])
    whole = partial(took, [SCRIPT, "check", str(lock)])
    seen = compare(bare, whole, 1.0, by=operator.sub)
    print(f"\nimport torch: {seen.plain:.2f} s, torchrepro check: {seen.other:.2f} s")
    print(": ".join(seen.cells("added, in s", 1.0)))

    require(not seen.refutes(1.0), "1 s beyond importing torch")
