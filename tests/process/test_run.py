"""`torchrepro run`: a profile in force from before Python starts, in every process below."""

import json
import random
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from torchrepro.seeding import streams

PROBE = """
import json, os, random

def seen():
    return [random.random(), hash("abc"), os.environ.get("PYTHONHASHSEED")]

if __name__ == "__main__":
    print(json.dumps(seen()))
"""
NUMBERS = """
import importlib.util
for name in ("torch", "numpy", "numpy.random", "random"):  # probing, as libraries do
    importlib.util.find_spec(name)
import json, os, random, sys
import numpy
drawn = [random.random(), numpy.random.rand()]
early = "torch" in sys.modules
import torch
drawn.append(torch.rand(1).item())
flag = torch.are_deterministic_algorithms_enabled()
rank = os.environ.get("RANK", "-")
sys.stdout.write(json.dumps([rank, early, flag, *drawn, hash("abc")]) + "\\n")
"""
WORKERS = """
import json, multiprocessing, subprocess, sys

def draw():
    import random, numpy, torch
    flag = torch.are_deterministic_algorithms_enabled()
    return [flag, random.random(), numpy.random.rand(), torch.rand(1).item()]

if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(draw()))
    else:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            worker = pool.apply(draw)
        child = subprocess.check_output([sys.executable, __file__, "child"], text=True)
        print(json.dumps([worker, json.loads(child.splitlines()[-1]), draw()]))
"""
INTERPRETER = """
import json, os, sys
print(json.dumps([sys.path, sys.argv, sys.orig_argv, sorted(map(str, sys.flags)), os.getcwd()]))
"""
FIRST_OF_1234 = [random.Random(1234).random(), np.random.RandomState(1234).rand()]
WAYS = {
    "script": ["probe.py"],
    "module": ["-m", "pkg"],
    "command": ["-c", "import json, probe; print(json.dumps(probe.seen()))"],
    "options": ["-uB", "-X", "utf8", "-Wignore", "-W", "ignore", "probe.py", "-I", "-S"],
}


@pytest.fixture
def programs(write, tmp_path):
    write(
        {
            "probe.py": PROBE,
            "pkg/__init__.py": "",
            "pkg/__main__.py": "import json, probe; print(json.dumps(probe.seen()))",
            "numbers_.py": NUMBERS,
            "workers.py": WORKERS,
            "interpreter.py": INTERPRETER,
        }
    )
    return tmp_path


def last(result):
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_a_command_without_python_gets_only_the_variables_and_a_warning(torchrepro):
    """It gets the variables, and one line at its end reports that no Python applied the rest.

    A shell that starts a Python gets no warning.
    """
    names = ("PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG")
    result = torchrepro("run", "debug-strict", "--", "printenv", *names)
    shell = torchrepro("run", "debug-strict", "--", "sh", "-c", f"{sys.executable} -c ''; exit 7")

    assert (result.returncode, result.stdout) == (0, "0\n:4096:8\n")
    (line,) = result.stderr.splitlines()
    assert "debug-strict was applied in no Python: `printenv " in line
    assert (shell.returncode, shell.stderr) == (7, "")


@pytest.mark.parametrize("arguments", [*WAYS.values(), None], ids=[*WAYS, "console script"])
def test_the_profile_is_active_however_python_is_started(
    programs, under, torchrepro, script, run_python, arguments
):
    """The profile is active in every way to start a Python program.

    A script that names its Python in its first line is one of them.
    """
    hashed = run_python("-c", "print(hash('abc'))", env={"PYTHONHASHSEED": "0"}).stdout
    if arguments is None:
        ended = torchrepro("run", "seed-only", "--", script(f"#!{sys.executable}"))
    else:
        ended = under("seed-only", *arguments)

    assert [random.Random(1234).random(), int(hashed), "0"] == last(ended)


@pytest.mark.slow
def test_equal_seeds_draw_equal_random_numbers(programs, under):
    """Two runs draw the same random numbers from random, numpy and torch; another seed others."""
    first = last(under("debug-strict", "numbers_.py"))
    second = last(under("debug-strict", "numbers_.py"))
    other = last(under(["debug-strict", "seed=5"], "numbers_.py"))

    assert first == second
    assert first[:5] == ["-", False, True, *FIRST_OF_1234]
    assert [a != b for a, b in zip(first[3:6], other[3:6], strict=True)] == [True, True, True]


@pytest.mark.slow
def test_spawned_workers_and_children_compute_under_the_profile(programs, under):
    """Flags and generators of a worker and a child process equal those of the program."""
    worker, child, own = last(under("debug-strict", "workers.py"))

    assert own == worker == child
    assert own[0] is True


@pytest.mark.slow
def test_the_profile_is_active_in_every_rank_of_torchrun(programs, under):
    """Every rank that torchrun starts is under the profile."""
    result = under(
        "debug-strict",
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "numbers_.py"),
    )
    rows = sorted(json.loads(line) for line in result.stdout.splitlines() if line.startswith("["))

    assert result.returncode == 0, result.stderr
    assert [row[0] for row in rows] == ["0", "1"]
    assert [row[1:3] for row in rows] == [[False, True], [False, True]]
    assert rows[0][3:] == rows[1][3:]


def test_the_program_itself_is_not_changed(programs, under, run_python):
    """sys.path, the command line, the interpreter's flags and the folder are those without run."""
    without = last(run_python("-u", "interpreter.py", "--flag", "a b", env={"PYTHONHASHSEED": "0"}))
    below = last(under("seed-only", "-u", "interpreter.py", "--flag", "a b"))

    assert without == below


MARKING = "import sys; sys.marked = __name__"


@pytest.mark.parametrize(
    ("source", "program"),
    [
        (MARKING, "import sitecustomize as s; print(sys.marked, s.__file__)"),
        (f"{MARKING}; 1 / 0", "print(sys.marked)"),
    ],
)
def test_a_sitecustomize_runs_as_it_does_without_us(write, run_python, under, source, program):
    """A sitecustomize on PYTHONPATH runs under the profile; its error is shown and survived."""
    place = {"PYTHONPATH": str(write({"site/sitecustomize.py": source}).parent)}
    without = run_python("-c", f"import sys; {program}", env=place)
    below = under("seed-only", "-c", f"import sys; {program}", env=place)

    assert without.returncode == 0
    assert without.stdout.startswith("sitecustomize")
    assert (below.returncode, below.stdout) == (0, without.stdout)
    assert ("ZeroDivisionError" in below.stderr) == ("1 / 0" in source)


@pytest.mark.parametrize("imported", ["random", "torch, torch"])
def test_a_child_without_torchrepro_is_told_of_it_if_it_imports_torch(
    bare, write, torchrepro, imported
):
    """A child Python that has no torchrepro runs as ever, and silently unless it imports torch.

    Then it ends with one line that says so.
    """
    source = "import importlib.util as u; print(u.find_spec('torchrepro'))"
    write({"torch.py": "", "child.py": f"import {imported}\n{source}"})
    result = torchrepro("run", "seed-only", "--", "sh", "-c", '"$0" child.py', bare)

    assert (result.returncode, result.stdout) == (0, "None\n")
    lines = result.stderr.splitlines()
    assert len(lines) == ("torch" in imported)
    assert all(str(bare) in line for line in lines)


def test_only_a_seed_is_loaded_for_a_program_without_torch(run_python, under):
    """A program without torch loads three of our modules with their packages, and little else.

    It prints nothing from torchrepro.
    """
    source = "import random, sys, json; print(json.dumps(sorted(sys.modules)))"
    ended = under("debug-strict", "-c", source)
    more = {*last(ended)} - {*last(run_python("-c", source))}

    assert ended.stderr == ""
    assert {name for name in more if name.startswith("torchrepro")} == {
        "torchrepro",
        *("torchrepro.ground", "torchrepro.ground.fork_safety", "torchrepro.ground.imports"),
        *("torchrepro.start", "torchrepro.start.bootstrap"),
    }
    assert len(more) <= 12


@pytest.mark.slow
def test_importing_torch_does_not_seed_generators_again(under):
    """Importing torch later seeds no generator a second time, and the report lists the seeds."""
    source = """
import json, random, numpy
drawn = [random.random(), numpy.random.rand()]
import torch, torchrepro.start.bootstrap
drawn += [random.random(), numpy.random.rand()]
report = torchrepro.start.bootstrap.finish_applying().report
print(json.dumps([drawn, [str(report[f"seed.{name}"].outcome) for name in ("python", "numpy")]]))
"""
    plain, ours = random.Random(1234), np.random.RandomState(1234)
    drawn = [plain.random(), ours.rand(), plain.random(), ours.rand()]

    assert [drawn, ["applied", "applied"]] == last(under("seed-only", "-c", source))


def test_an_interrupt_while_python_starts_is_an_interrupt(write, under):
    """^C ends a Python by its signal, at whatever moment after our boot has begun it comes."""
    interrupt = "import os, sys\nif 'TORCHREPRO_PROFILE' in os.environ: os.kill(os.getpid(), 2)"
    folder = write({"site/sitecustomize.py": interrupt}).parent
    early = under("seed-only", "-c", "print('on')", env={"PYTHONPATH": str(folder)})
    later = under("seed-only", "-c", "import os; os.kill(os.getpid(), 2)")

    assert (early.returncode, early.stdout) == (-signal.SIGINT, "")
    assert "Fatal Python error" not in early.stderr
    assert later.returncode == -signal.SIGINT


def test_the_status_of_the_command_is_passed_on(torchrepro):
    """`run` ends with the exit status or the signal of the command."""
    exited = torchrepro("run", "seed-only", "--", "sh", "-c", "exit 7")
    killed = torchrepro("run", "seed-only", "--", "sh", "-c", "kill -TERM $$")

    assert (exited.returncode, killed.returncode) == (7, -signal.SIGTERM)


def test_standard_streams_reach_the_command(torchrepro):
    """Piped input and all arguments after `--`, including options, reach the command."""
    result = torchrepro(
        "run", "seed-only", "--", "sh", "-c", 'cat; echo "$@"', "x", "--", "--json", stdin="in\n"
    )

    assert (result.returncode, result.stdout) == (0, "in\n-- --json\n")


AGAIN = """
import torch, torchrepro
for _ in range(2):
    with torchrepro.apply("seed-only"):
        print(torch.initial_seed())
"""
REPORT = """
import json, torchrepro
rows = torchrepro.apply("seed-only").report.rows
print(json.dumps({r.knob: r.before for r in rows if isinstance(r.before, int)}))
"""


def test_apply_under_run_reports_the_keys_that_it_overrides(write, fork_under):
    """`apply` overrides `run`, and one line names the keys; the same profile prints nothing."""
    path = write({"again.py": AGAIN})
    other = fork_under(["seed-only", "seed=8"], path)
    same = fork_under("seed-only", path)
    said = "overrides `torchrepro run seed-only` while it is active: seed is 1234 instead of 8"

    assert other.stdout == same.stdout == "1234\n1234\n"
    assert other.stderr.count(said) == 1, other.stderr
    assert "goes before" not in same.stderr


def test_the_report_of_apply_under_run_starts_from_the_values_of_run(fork_under):
    """The value of a seed before `apply` is the seed of the run, even if one call sets both."""
    ended = fork_under(["seed-only", "seed=8"], "-c", REPORT)

    assert last(ended) == {"seed.streams": 8, "seed.libraries": 8, "seed.torch": 8}


INSIDE = """
import json, torchrepro
inner = {"seed": 8, "streams": {"a": 7}, "env": {"OMP_NUM_THREADS": "3"}}
with torchrepro.apply({"name": "inner", **inner}) as applied:
    late = [row.knob for row in applied.report.rows if row.outcome == "too_late"]
    inside = [torchrepro.stream(name).seed for name in "ab"]
print(json.dumps([late, inside, [torchrepro.stream(name).seed for name in "ab"]]))
"""


@pytest.mark.slow
def test_apply_under_run_ends_with_its_block_before_torch_is_imported(under):
    """Its streams are used while it is active, then the streams of the run; no knob is late."""
    ended = under(["seed-only", "streams.b=4"], "-c", INSIDE)
    inside = [streams.derive("a", 7).seed, streams.derive("b", 8).seed]
    after = [streams.derive("a", 1234).seed, streams.derive("b", 4).seed]

    assert last(ended) == [[], inside, after], ended.stderr


def test_a_nested_run_must_use_the_same_profile(programs, torchrepro):
    """Inside of a run, another profile ends with status 3; the same profile changes nothing."""
    tool = Path(sys.executable).parent / "torchrepro"
    command = ["--", sys.executable, "probe.py"]
    same = torchrepro(
        "run", "seed-only", "seed=5", "--", tool, "run", "seed-only", "seed=5", *command
    )
    other = torchrepro("run", "seed-only", "--", tool, "run", "seed-only", "seed=5", *command)

    assert random.Random(5).random() == last(same)[0]
    assert (other.returncode, other.stdout) == (3, "")
    assert "seed: run 1234" in other.stderr
