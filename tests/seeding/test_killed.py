"""Killed at any moment and started again, a run ends with the weights of one left in peace."""

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
"""The example, killed by a thread of its own: wherever training is once a step is kept."""


def words(kept: Path) -> list[str]:
    """Return what the example is told, which keeps its checkpoints in this folder."""
    return [
        *("+repro=debug-strict", f"epochs={EPOCHS}", "batch_size=64", "checkpoint_every=1"),
        f"checkpoint={kept}",
    ]


class Runs:
    """Runs of the example in forks, which keep their checkpoints in one folder."""

    def __init__(self, fork: Callable[..., int], folder: Path) -> None:
        self.fork = fork
        self.folder = folder
        self.kept = folder / "kept"

    def _run(self, *program: object) -> tuple[int, str, str]:
        streams = [self.folder / name for name in ("in", "out", "err")]
        for path in streams:
            path.write_text("")
        environment = {k: v for k, v in os.environ.items() if k != "PYTEST_VERSION"}
        environment |= IN_FORCE_FROM_THE_START
        status = self.fork([*program, *words(self.kept)], environment, self.folder, streams)
        return status, streams[1].read_text(), streams[2].read_text()

    def killed(self, whom: str, step: int) -> tuple[int, str, str]:
        """Kill `whom` of a run once it has kept `step`."""
        return self._run("-c", KILLED, DIGITS, whom, step)

    def finished(self) -> str:
        """Run the example to its end, from where the checkpoints say; return what it printed."""
        status, printed, errors = self._run(DIGITS)
        assert status == 0, errors
        return printed

    def steps(self) -> int:
        """Return the latest step that is whole, 0 where there is none."""
        files = self.kept.glob("step-*/rank-0-of-1.pt")
        return max((int(path.parent.name.removeprefix("step-")) for path in files), default=0)


@pytest.fixture(scope="module")
def peaceful(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the example prints when a user types it and nobody disturbs it."""
    folder = tmp_path_factory.mktemp("peaceful")
    done = typed(folder, *words(folder / "kept"))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def runs(fork: Callable[..., int], tmp_path: Path) -> Runs:
    """Runs of the example in a folder of the test."""
    return Runs(fork, tmp_path)


@pytest.mark.parametrize("steps", [[1, EPOCH + 9], [EPOCH + 1]])
def test_a_run_whose_main_process_is_killed_ends_with_the_same_weights(
    runs: Runs, peaceful: str, steps: list[int]
) -> None:
    """SIGKILL after whatever steps, in whatever epochs, changes nothing of the end."""
    for step in steps:
        status, _, errors = runs.killed("itself", step)

        assert status == -signal.SIGKILL, errors
        assert step <= runs.steps() < EPOCHS * EPOCH

    assert runs.finished() == peaceful


def test_a_run_whose_worker_is_killed_stops_and_ends_with_the_same_weights(
    runs: Runs, peaceful: str
) -> None:
    """SIGKILL of a loader's worker stops the run with an error; resumed, it ends as ever."""
    status, printed, errors = runs.killed("a worker", 5)
    workers, killed = printed.split()

    assert workers == "2"
    assert status > 0
    assert f"DataLoader worker (pid {killed}" in errors
    assert runs.finished() == peaceful
