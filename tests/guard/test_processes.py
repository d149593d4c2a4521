"""The end of a process whose knobs have drifted, and child processes, which report nothing."""

import sysconfig
from pathlib import Path

import pytest

TORCHREPRO = str(Path(sysconfig.get_path("scripts")) / "torchrepro")
TRAINING = """
import atexit, logging, sys
import torch
from torch import nn

def train(steps=2, flip_at=None):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(steps):
        print("step", number)
        model(torch.randn(2, 4)).sum().backward()
        if number == flip_at:
            torch.backends.cudnn.benchmark = True
        optimizer.step()

"""
APPLIED = TRAINING + "import torchrepro\ntorchrepro.apply('debug-strict', ['guard={mode}'])\n"
LATE = """
atexit.register(print, "registered late")
train()
torch.backends.cudnn.benchmark = True
sys.exit({status})
"""
SAID = "backends.cudnn.benchmark"


def _line(program, *, last=False):
    """Return the first, or the last, source line of `program` that sets the flag."""
    lines = enumerate(program.splitlines(), 1)
    places = [f"program.py:{at}" for at, line in lines if "benchmark = True" in line]
    return places[-1 if last else 0]


@pytest.mark.slow
def test_drift_at_exit_ends_with_status_1_after_every_exit_handler(run_program):
    """Under `error` a program that drifts after its last step fails, after all exit handlers."""
    early = "import atexit\natexit.register(print, 'registered early')\n"
    program = early + APPLIED.format(mode="error") + LATE.format(status=0)
    done = run_program(program)

    assert done.returncode == 1
    assert done.stdout.splitlines()[-2:] == ["registered late", "registered early"]
    assert done.stderr.count(SAID) == 1
    assert "was false, is true (after step 1; set at" in done.stderr
    assert _line(program, last=True) in done.stderr
    assert "Traceback" not in done.stderr


def test_a_warning_at_exit_changes_no_status(execute_forked):
    """Under `warn` the drift is reported, and the program keeps its exit status."""
    done = execute_forked(APPLIED.format(mode="warn") + LATE.format(status=5))

    assert done.returncode == 5
    assert f"torchrepro: drift: {SAID} was false, is true (after step 1; set at " in done.stderr


def test_an_uncaught_error_is_reported_once(execute_forked):
    """An uncaught DriftError ends the program with status 1, and is not reported again at exit."""
    done = execute_forked(APPLIED.format(mode="error") + "train(flip_at=1)\n")

    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "step 1"
    assert done.stderr.count(SAID) == 1
    assert "torchrepro.DriftError" in done.stderr


HYDRA = """
import hydra

@hydra.main(version_base=None)
def main(config):
    {calls}

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("start", ["run", "hydra"])
@pytest.mark.parametrize(
    "calls",
    ["train(flip_at=1)", "train(); torch.backends.cudnn.benchmark = True"],
    ids=["before a step", "after the last"],
)
def test_a_run_or_job_whose_knobs_drift_ends_with_status_1(execute_forked, calls, start):
    """Drift ends a process under `run`, or a Hydra job, with status 1 and its line only."""
    if start == "run":
        program = f"{TRAINING}{calls}\n"
        done = execute_forked(program, under=("debug-strict", "guard=error"))
    else:
        program = TRAINING + HYDRA.format(calls=calls)
        done = execute_forked(program, "+repro=debug-strict", "repro.guard=error")

    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "step 1"
    assert SAID in done.stderr
    assert _line(program, last="flip_at" not in calls) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_child_processes_of_a_guarded_run_report_no_drift(run_program):
    """Loader workers, pools, forks and other programs may change their knobs."""
    program = f"""{TRAINING}
import multiprocessing, os, subprocess
from torch.utils.data import DataLoader

def main():
    train()
    for how in ("fork", "spawn"):
        loader = DataLoader(list(range(8)), num_workers=1, multiprocessing_context=how)
        assert len(list(loader)) == 8
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.map(abs, [1])
    child = os.fork()
    if child == 0:
        os.environ["NCCL_ALGO"] = "Tree"  # this copy of the process is its own affair
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    model = torch.compile(nn.Linear(4, 4), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    print("done")

if __name__ == "__main__":
    main()
"""
    done = run_program(
        program,
        *(TORCHREPRO, "run", "debug-strict", "guard=error", "backends.cpu.num_threads=2", "--"),
    )

    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "done"), done.stderr
    assert "drift" not in done.stderr
