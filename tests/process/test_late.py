"""Knobs past their phase: said, never pretended, and relaunched once where that is asked for."""

import json
import sys

import pytest

LOG = "open('starts', 'a').write('started\\n')\n"
RELAUNCHING = f"""
import json, sys
{LOG}
import torchrepro
applied = torchrepro.apply("seed-only", ["on_late=relaunch"])
outcome = applied.report["env.PYTHONHASHSEED"].outcome
print(json.dumps([sys.argv[1:], sys.flags.utf8_mode, str(outcome), hash("abc")]))
"""
APP = f"""
import json
{LOG}
import hydra
@hydra.main(version_base=None, config_path=None)
def main(config):
    print("task", hash("abc"))
if __name__ == "__main__":
    main()
"""


@pytest.fixture
def starts(tmp_path):
    """How often a program has started."""
    return lambda: len((tmp_path / "starts").read_text().splitlines())


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("exported", "set_by_program", "outcome"),
    [
        (None, None, "too_late"),
        (None, "0", "too_late"),
        (None, "7", "too_late"),
        ("0", None, "unchanged"),
    ],
)
def test_a_variable_of_the_interpreter_is_in_time_only_from_the_start(
    answer_of, exported, set_by_program, outcome
):
    """PYTHONHASHSEED counts where it was exported; later it is too late, said and left alone."""
    source = """
import json, os, sys, torchrepro
os.environ.update(json.loads(sys.argv[1]))
planned = torchrepro.plan("seed-only").report["env.PYTHONHASHSEED"]
with torchrepro.apply("seed-only") as applied:
    row = applied.report["env.PYTHONHASHSEED"]
    print(json.dumps([str(planned.outcome), str(row.outcome), row.after, bool(row.why),
                      os.environ.get("PYTHONHASHSEED")]))
"""
    name, value = "PYTHONHASHSEED", exported or set_by_program
    own = {name: set_by_program} if set_by_program else {}
    env = {name: exported} if exported else {}
    answer = answer_of("-c", source, json.dumps(own), env=env)

    assert answer == [outcome, outcome, value, outcome == "too_late", value]


@pytest.mark.slow
def test_a_variable_that_torch_reads_while_loading(write, answer_of):
    """OMP_NUM_THREADS is applied before torch is loaded, and too late and unwritten after it."""
    profile = write({"threads.yaml": 'name: threads\nenv: {OMP_NUM_THREADS: "1"}\n'})
    source = """
import json, os, sys, torchrepro
def outcome():
    with torchrepro.apply(sys.argv[1]) as applied:
        return str(applied.report["env.OMP_NUM_THREADS"].outcome), os.environ.get("OMP_NUM_THREADS")
before = outcome()
import torch
print(json.dumps([*before, *outcome(), os.environ.get("OMP_NUM_THREADS")]))
"""

    assert answer_of("-c", source, profile) == ["applied", "1", "too_late", None, None]


def test_on_late_error_changes_nothing(answer_of):
    """on_late: error raises LateError with the report, before anything is set or imported."""
    source = """
import json, os, random, sys, torchrepro
before = dict(os.environ), random.getstate()
try:
    torchrepro.apply("debug-strict", ["on_late=error"])
except torchrepro.LateError as error:
    late = [row.knob for row in error.report if row.outcome == "too_late"]
    same = before == (dict(os.environ), random.getstate())
    print(json.dumps([late, "PYTHONHASHSEED" in str(error), same, "torch" in sys.modules]))
"""

    assert answer_of("-c", source) == [["env.PYTHONHASHSEED"], True, True, False]


@pytest.mark.sampled
@pytest.mark.parametrize("way", ["script", "module", "command"])
def test_relaunch_happens_once_with_the_same_command_line(
    write, answer_of, run_python, starts, way
):
    """A relaunch starts the same command line once more, and then the knob is in force."""
    write({"program.py": RELAUNCHING})
    program = {
        "script": ["program.py"],
        "module": ["-m", "program"],
        "command": ["-c", RELAUNCHING],
    }
    hashed = run_python("-c", "print(hash('abc'))", env={"PYTHONHASHSEED": "0"}).stdout
    words = ["--flag", "a b", "ä", ""]
    answer = answer_of("-X", "utf8", *program[way], *words)

    assert [words, 1, "unchanged", int(hashed)] == answer
    assert starts() == 2


@pytest.mark.sampled
@pytest.mark.parametrize(("exported", "outcome"), [("3", "unchanged"), ("many", "conflict")])
def test_a_relaunch_keeps_what_the_user_exported(write, answer_of, exported, outcome):
    """A relaunch sets what is too late and overrules no variable that the user exported."""
    source = """
import json, os, torchrepro
override = 'env.MKL_NUM_THREADS="1"'
applied = torchrepro.apply("seed-only", ["on_late=relaunch", override])
row = applied.report["env.MKL_NUM_THREADS"]
print(json.dumps([os.environ["PYTHONHASHSEED"], os.environ[row.knob[4:]], str(row.outcome)]))
"""
    write({"program.py": source})
    answer = answer_of("program.py", env={"MKL_NUM_THREADS": exported})

    assert answer == ["0", exported, outcome]


@pytest.mark.slow
def test_no_relaunch_where_nothing_is_late(write, answer_of, under, starts):
    """A program whose environment is already right starts once, below `run` as well."""
    write({"program.py": RELAUNCHING})

    assert answer_of("program.py", env={"PYTHONHASHSEED": "0"})[2] == "unchanged"
    result = under(["seed-only", "on_late=relaunch"], "program.py")
    assert json.loads(result.stdout)[2] == "unchanged", result.stderr
    assert starts() == 2


@pytest.mark.slow
def test_no_relaunch_of_a_script_that_is_read_once(write, run_python, execute, starts):
    """A script from standard input is gone: the profile stops. From a pipe a Hydra run goes on."""
    for arguments in ([], ["-"]):
        result = run_python(*arguments, stdin=RELAUNCHING)

        assert result.returncode == 1
        assert "LateError" in result.stderr
        assert "standard input" in result.stderr
    write({"app.py": APP})
    shell = f"exec {sys.executable} <(cat app.py) +repro=debug-strict hydra.run.dir=out"
    result = execute("bash", "-c", shell)

    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("task ")
    assert starts() == 3


@pytest.mark.slow
def test_no_relaunch_for_a_second_profile(run_python):
    """Once a profile was applied a relaunch would lose work, so a late knob stops instead."""
    call = "torchrepro.apply('seed-only', ['on_late={}'])"
    ended = run_python("-c", f"import torchrepro; {call.format('warn')}; {call.format('relaunch')}")

    assert ended.returncode == 1
    assert "LateError" in ended.stderr
    assert "applied before" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("words", [["seed-only", "repro.on_late=relaunch"], ["debug-strict"]])
def test_a_hydra_run_relaunches_before_the_task(write, run_python, starts, tmp_path, words):
    """Where it is asked for, and by a shipped strict profile, a Hydra run begins again in time.

    The task runs once and under the variable, and its output is said once.
    """
    write({"app.py": "print('begins')\n" + APP})
    options = [f"+repro={words[0]}", *words[1:], "hydra.run.dir=out"]
    result = run_python("app.py", *options, env={"PYTHONUNBUFFERED": ""})
    hashed = run_python("-c", "print(hash('abc'))", env={"PYTHONHASHSEED": "0"}).stdout
    manifest = json.loads((tmp_path / "out/.hydra/repro.json").read_text(encoding="utf-8"))

    assert result.returncode == 0, result.stderr
    assert ["begins", f"task {int(hashed)}"] == result.stdout.splitlines()
    assert starts() == 2
    assert "too_late" not in [row["outcome"] for row in manifest["report"]["knobs"]]


@pytest.mark.slow
def test_a_strict_hydra_run_that_may_have_read_its_input_goes_on(write, run_python, starts):
    """Where in doubt a Hydra run goes on, and says why, and what to type instead: all of it."""
    write({"app.py": f"import sys\nprint('read', sys.stdin.read())\n{APP}"})
    result = run_python("app.py", "+repro=debug-strict", "repro.seed=8", stdin="words")

    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("read words\ntask ")
    assert "standard input" in result.stderr
    assert "`torchrepro run debug-strict seed=8 -- COMMAND`" in " ".join(result.stderr.split())
    assert starts() == 1


@pytest.mark.slow
def test_a_strict_sweep_goes_on_where_a_knob_is_late(write, run_python, starts):
    """A sweep is never begun again by itself: its jobs may ask for different variables."""
    write({"app.py": APP})
    result = run_python("app.py", "-m", "+repro=debug-strict", "repro.seed=1,2")

    assert result.returncode == 0, result.stderr
    assert result.stdout.count("task") == 2
    assert starts() == 1


def test_code_never_begins_again_by_itself(write, run_python, starts):
    """`apply` goes on where a knob of a shipped strict profile is late."""
    write({"program.py": RELAUNCHING.replace('"seed-only", ["on_late=relaunch"]', '"npu-align"')})
    result = run_python("program.py")

    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)[2] == "too_late"
    assert starts() == 1


ASK = """
import json
from torchrepro.application.launch import obstacle_to_relaunch
print(json.dumps([obstacle_to_relaunch(insists=insists) for insists in (False, True)]), flush=True)
"""
PROCESS = """
import multiprocessing, sys
if __name__ == "__main__":
    worker = multiprocessing.get_context(sys.argv[1]).Process(target=__import__, args=("ask",))
    worker.start(), worker.join()
"""
NEVER = [  # a part of the reason, the words after `python`
    ("pytest", ["-m", "pytest", "-sq", "-p", "no:cacheprovider", "ask.py"]),
    ("worker", ["process.py", "spawn"]),
    ("worker", ["process.py", "fork"]),
    ("changed its folder", ["moved.py"]),
]

FIRST = {
    "a tracer": "import sys; sys.settrace(lambda *_: None)",
    "a profiler": "import sys; sys.setprofile(lambda *_: None)",
    "a debugger's module": "import sys, types; sys.modules['pydevd'] = types.ModuleType('pydevd')",
    "a communicator": "import torch.distributed as d\n"
    "d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)",
    "a thread": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    "another main": "import sys, types; sys.modules['__main__'] = types.ModuleType('__main__')",
}
AROUND = {
    "torchrun": {"RANK": "0", "WORLD_SIZE": "1"},
    "a local rank": {"LOCAL_RANK": "1"},
    "MPI": {"OMPI_COMM_WORLD_RANK": "0"},
    "PMI": {"PMI_RANK": "0"},
    "srun": {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
    "submitit": {"SUBMITIT_EXECUTOR": "local"},
}
RUNNERS = {
    "a command": ["-c", ASK],
    "cProfile": ["-m", "cProfile", "-o", "stats", "ask.py"],
    "pdb": ["-m", "pdb", "-c", "continue", "-c", "quit", "ask.py"],
    "trace": ["-m", "trace", "--count", "-C", "counts", "ask.py"],
    "ignored variables": ["-E", "ask.py"],
}


def obstacles(result):
    """What is in the way of a relaunch by itself, and of one that is insisted on."""
    answers = [line for line in result.stdout.splitlines() if line.startswith("[")]
    assert answers, result.stderr
    return json.loads(answers[0])


@pytest.mark.parametrize("words", [["ask.py"], ["-m", "ask"], ["-uB", "ask.py"], ["."]])
def test_a_plain_program_may_begin_again(write, run_python, words):
    """A script and a module that nobody else runs have no obstacle, in every folder.

    Parameters of an MPI, which images of containers set for all, are no sign of its launcher.
    """
    write({"ask.py": ASK, "__main__.py": ASK})
    parameters = {"OMPI_MCA_coll_hcoll_enable": "0", "PMIX_MCA_gds": "hash"}

    assert obstacles(run_python(*words, env=parameters)) == ["", ""]


@pytest.mark.parametrize(("reason", "words"), NEVER)
def test_nothing_begins_again_where_that_cannot_be(write, run_python, reason, words):
    """What runs tests, has a parent that waits, or is out of reach is relaunched for nobody."""
    moved = f"import os; os.mkdir('x'); os.chdir('x')\n{ASK}"
    write({"ask.py": ASK, "process.py": PROCESS, "moved.py": moved})
    found = obstacles(run_python(*words))

    assert [reason in each for each in found] == [True, True], found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", [*FIRST, *AROUND, *RUNNERS])
def test_nothing_begins_again_by_itself_where_that_is_not_safe(write, run_python, what):
    """What is not plainly the program's own start is no relaunch that nobody insists on."""
    write({"ask.py": f"{FIRST.get(what, '')}\n{ASK}"})
    result = run_python(*RUNNERS.get(what, ["ask.py"]), env=AROUND.get(what))

    assert obstacles(result)[0]


@pytest.mark.parametrize("reads", ["", "sys.stdin.read()"])
def test_a_file_on_standard_input_that_was_read_is_not_lost(write, execute, reads):
    """With a file on standard input a program may begin again just if it has read none of it."""
    write({"words": "a", "ask.py": f"import sys\n{reads}\n{ASK}"})
    result = execute("bash", "-c", f"exec {sys.executable} ask.py < words")

    assert [*map(bool, obstacles(result))] == [bool(reads), False]


@pytest.mark.parametrize("on_late", ["relaunch", "error"])
def test_a_hydra_sweep_stops_where_a_knob_is_late(write, run_python, starts, on_late):
    """Inside a sweep nothing is relaunched: it ends with status 3 before a task has run."""
    write({"app.py": APP})
    result = run_python(
        "app.py", "-m", "+repro=seed-only", "repro.seed=1,2", f"repro.on_late={on_late}"
    )

    assert result.returncode == 3
    assert "PYTHONHASHSEED" in result.stderr
    assert "task" not in result.stdout
    assert starts() == 1


@pytest.mark.slow
def test_a_relaunch_in_a_child_of_a_relaunched_process(write, answer_of):
    """A program started by a relaunched one may still relaunch itself, and ends."""
    write({"program.py": RELAUNCHING})
    source = """
import json, os, subprocess, sys, torchrepro
torchrepro.apply("seed-only", ["on_late=relaunch"])
del os.environ["PYTHONHASHSEED"]
print(subprocess.check_output([sys.executable, "program.py"], text=True))
"""
    write({"parent.py": source + "print(json.dumps('end'))\n"})

    assert answer_of("parent.py") == "end"
