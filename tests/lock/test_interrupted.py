"""An interrupted command leaves the lock unchanged and removes its temporary folders."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from torchrepro.ground.writing import write_in_place
from torchrepro.verification.copies import PREFIX, temporary_folder

from .training import COMMAND

OLD, NEW = "old\n" * 9_999, "new\n" * 9_999


def test_a_lock_is_the_old_one_or_the_new_one_at_any_moment(tmp_path):
    """Killed at whichever line of the writing, one of both is there as a whole."""
    # In a small Python: a fork of a process with torch takes half a second.
    code = f"import sys, {__name__} as module; module._write_killed_at_each_line(sys.argv[1])"
    words = [sys.executable, "-c", code, str(tmp_path / "repro.lock")]
    subprocess.run(words, cwd=Path(__file__).parents[2], check=True)

    assert [path.name for path in tmp_path.iterdir()] == ["repro.lock"]


def _write_killed_at_each_line(path):
    lock, found = Path(path), []
    lock.write_text(OLD)
    while not found or found[-1][0]:
        child = os.fork()
        if not child:
            _killed_at_line(len(found), lambda: write_in_place(lock, NEW))
        _, status = os.waitpid(child, 0)
        found.append((os.WIFSIGNALED(status), lock.read_text()))

    assert {text for _, text in found} == {OLD, NEW}
    assert found[-1] == (False, NEW)


def _killed_at_line(number, call):
    lines = itertools.count()

    def trace(_frame, event, _argument):
        if event == "line" and next(lines) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    call()
    sys.settrace(None)
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_checkout_of_an_ended_check_is_removed(training, tmp_path, number):
    """Interrupted while the locked code runs, it is removed; if killed, by the next check.

    The lock and the user's folder stay as they were.
    """
    # The code of the lock waits, where a file is named for a sign that it runs.
    wait = (
        "import os, time\n"
        "if 'SIGNS' in os.environ: open(os.environ['SIGNS'], 'w'); time.sleep(15)\n"
    )
    training.change("model.py", "LR = 0.1", f"{wait}LR = 0.1")
    training.lock()
    training.commit()
    training.change("model.py", f"{wait}LR = 0.1", "LR = 0.2")
    began, place = tmp_path / "began", tmp_path / "temporary"
    place.mkdir()
    before = {path: path.read_bytes() for path in training.folder.rglob("*") if path.is_file()}
    with subprocess.Popen(
        [sys.executable, "-m", "torchrepro", "check", "repro.lock", "--", *COMMAND],
        env={**os.environ, "TMPDIR": str(place), "SIGNS": str(began)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        until = time.monotonic() + 120
        while not began.exists() and time.monotonic() < until:
            time.sleep(0.1)
        there = [*place.glob(f"{PREFIX}*")]
        process.send_signal(number)
        process.communicate(timeout=60)
    left = [*place.glob(f"{PREFIX}*")]
    if left:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(place))
            with temporary_folder():
                pass

    assert len(there) == 1
    assert len(left) == (number == signal.SIGKILL)
    assert [*place.glob(f"{PREFIX}*")] == []
    now = {path: path.read_bytes() for path in training.folder.rglob("*") if path.is_file()}
    assert {path for path in now if before.get(path) != now[path]} <= {
        path for path in now if path.suffix == ".pyc"
    }
