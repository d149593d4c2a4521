"""Killed at any moment and started again, a run ends with the weights of an undisturbed run."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ..typed_example import DIGITS, IN_FORCE_FROM_THE_START, typed

pytestmark = pytest.mark.slow

EPOCH, EPOCHS = 22, 3
"""Batches of an epoch, and how many epochs a run has."""

KILLED = """
import os, runpy, signal, sys, threading, time
from pathlib import Path

example, whom, step, kept = sys.argv.pop(1), sys.argv.pop(1), int(sys.argv.pop(1)), sys.argv[-1]
checkpoints = Path(kept.removeprefix("checkpoint="))

def workers():
    lists = Path("/proc/self/task").glob("*/children")
    return [int(word) for path in lists for word in path.read_text().split()]

def kill():
    while not any(checkpoints.glob(f"step-{step:09}/rank-0-of-1.pt")):
        time.sleep(0.001)
    victims = workers() if whom == "a worker" else [os.getpid()]
    print(len(victims), victims[0], flush=True)
    os.kill(victims[0], signal.SIGKILL)

threading.Thread(target=kill, daemon=True).start()
sys.path.insert(0, os.path.dirname(example))
runpy.run_path(example, run_name="__main__")
"""
"""The example, killed by one of its threads at any point after a step is saved."""


def words(kept: Path) -> list[str]:
    """Return the arguments of the example, which saves its checkpoints in this folder."""
    return [
        *("+repro=debug-strict", f"epochs={EPOCHS}", "batch_size=64", "checkpoint_every=1"),
        f"checkpoint={kept}",
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of the example if it is not killed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = typed(folder, *words(folder / "kept"))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def run(fork: Callable[..., int], tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """Run a program with the arguments of the example in a fork; return its status and output."""

    def run(*program: object) -> tuple[int, str, str]:
        streams = [tmp_path / name for name in ("in", "out", "err")]
        for path in streams:
            path.write_text("")
        environment = {k: v for k, v in os.environ.items() if k != "PYTEST_VERSION"}
        environment |= IN_FORCE_FROM_THE_START
        status = fork([*program, *words(tmp_path / "kept")], environment, tmp_path, streams)
        return status, streams[1].read_text(), streams[2].read_text()

    return run


@pytest.mark.parametrize(("whom", "steps"), [("itself", [1, EPOCH + 9]), ("a worker", [5])])
def test_a_killed_and_restarted_run_ends_with_the_same_weights(
    run: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    undisturbed: str,
    whom: str,
    steps: list[int],
) -> None:
    """SIGKILL after any steps in any epochs does not change the final weights.

    A killed worker of a loader stops the run with an error.
    """
    for step in steps:
        status, printed, errors = run("-c", KILLED, DIGITS, whom, step)
        kept = [path.parent.name for path in tmp_path.glob("kept/step-*/rank-0-of-1.pt")]

        assert f"step-{step:09}" <= max(kept) < f"step-{EPOCHS * EPOCH:09}"
        if whom == "itself":
            assert status == -signal.SIGKILL, errors
        else:
            workers, killed = printed.split()
            assert status > 0
            assert workers == "2"
            assert f"DataLoader worker (pid {killed}" in errors
    status, printed, errors = run(DIGITS)
    assert status == 0, errors
    assert printed == undisturbed
