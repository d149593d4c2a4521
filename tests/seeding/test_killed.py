"""Killed at any moment and started again, a run ends with the weights of one left in peace."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

DIGITS = Path(__file__).parent.parent.parent / "examples" / "digits.py"
HIDDEN = ("CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED", "PYTEST_VERSION")
LONGEST = 900  # seconds that a run may take on a busy machine


def _command(checkpoints: Path) -> list[str]:
    words = ["+repro=debug-strict", "epochs=3", "batch_size=16", "checkpoint_every=1"]
    return [sys.executable, str(DIGITS), *words, f"checkpoint={checkpoints}"]


@contextmanager
def _started(checkpoints: Path) -> Iterator[subprocess.Popen[str]]:
    """Start the example, which keeps its checkpoints in `checkpoints`; end it with the block."""
    process = subprocess.Popen(
        _command(checkpoints),
        cwd=checkpoints.parent,
        env={name: value for name, value in os.environ.items() if name not in HIDDEN},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def _finished(checkpoints: Path) -> str:
    """Run the example to its end, from where the checkpoints say; return what it printed."""
    with _started(checkpoints) as process:
        printed, errors = process.communicate(timeout=LONGEST)
    assert process.returncode == 0, errors
    return printed


def _steps(checkpoints: Path) -> int:
    """Return the latest step that is whole in `checkpoints`, 0 where there is none."""
    files = checkpoints.glob("step-*/rank-0-of-1.pt")
    return max((int(path.parent.name.removeprefix("step-")) for path in files), default=0)


def _wait_for(step: int, checkpoints: Path, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + LONGEST
    while _steps(checkpoints) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


def _workers(process: subprocess.Popen[str]) -> list[int]:
    """Return the ids of the processes that `process` has started and that are alive."""
    found: list[int] = []
    for path in Path(f"/proc/{process.pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended meanwhile
            found += map(int, path.read_text(encoding="ascii").split())
    return found


@pytest.fixture(scope="module")
def peaceful(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the example prints when nobody disturbs it."""
    return _finished(tmp_path_factory.mktemp("peaceful") / "kept")


@pytest.mark.parametrize("steps", [[1, 120], [86]])
def test_a_run_whose_main_process_is_killed_ends_with_the_same_weights(
    tmp_path: Path, peaceful: str, steps: list[int]
) -> None:
    """SIGKILL after whatever steps, in whatever epochs, changes nothing of the end."""
    checkpoints = tmp_path / "kept"
    for step in steps:
        with _started(checkpoints) as process:
            _wait_for(step, checkpoints, process)
            process.kill()
            process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert step <= _steps(checkpoints) < 3 * 85

    assert _finished(checkpoints) == peaceful


def test_a_run_whose_worker_is_killed_stops_and_ends_with_the_same_weights(
    tmp_path: Path, peaceful: str
) -> None:
    """SIGKILL of a loader's worker stops the run with an error; resumed, it ends as ever."""
    checkpoints = tmp_path / "kept"
    with _started(checkpoints) as process:
        _wait_for(20, checkpoints, process)
        workers = _workers(process)
        os.kill(workers[0], signal.SIGKILL)
        _, errors = process.communicate(timeout=LONGEST)

    assert len(workers) == 2
    assert process.returncode > 0
    assert f"DataLoader worker (pid {workers[0]}" in errors
    assert _finished(checkpoints) == peaceful
