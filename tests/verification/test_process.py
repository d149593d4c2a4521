"""Ending a command ends it and all that it started, and no other process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchrepro.verification.runner import run_to_end

SLEEPER = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print(os.getpid(), child.pid, flush=True)
time.sleep(300)
"""
STUBBORN = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)  # the child inherits that
""" + SLEEPER.replace(
    "print(", "signal.signal(signal.SIGINT, lambda *_: open('asked', 'w').close())\nprint("
)
DRIVER = """
import sys
from torchrepro.verification import runner
from torchrepro.verification.runner import Interrupted
from torchrepro.verification.verifier import verify
try:
    runner.GRACE = 900  # who waits for it is late, however slow the machine
    verify(sys.argv[1], sys.argv[2:], say=sys.stderr.write, folder="recorded")
except Interrupted as stopped:
    sys.exit(stopped.exit_status)
"""


def lives(pid):
    """Whether a process is there and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=300):
    """Wait for something to become true, and fail if it does not."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def started(plain):
    """Start to verify a program; return the process and those of the program."""
    running = []

    def start(program):
        Path("program.py").write_text(program)
        command = [sys.executable, "-c", DRIVER, plain, sys.executable, "program.py"]
        driver = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        running.append(driver)
        log = Path("recorded/run-1.log")
        wait_until(lambda: log.exists() and len(log.read_text().split()) == 2)
        return driver, [int(pid) for pid in log.read_text().split()]

    yield start
    for driver in running:
        driver.kill()
        driver.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_command_and_its_children(started, number):
    """A signal to `verify` ends them too; the folder is named, the exit status is as usual."""
    driver, pids = started(SLEEPER)
    driver.send_signal(number)
    _, said = driver.communicate(timeout=300)

    assert driver.returncode == 128 + number
    assert str(Path("recorded").absolute()) in said
    wait_until(lambda: not any(map(lives, pids)))


def test_a_command_that_ignores_a_signal_is_killed_at_the_second_one(started):
    """A second Ctrl-C does not wait."""
    driver, pids = started(STUBBORN)
    driver.send_signal(signal.SIGINT)
    wait_until(Path("asked").exists)  # else the two signals could become one
    assert lives(pids[0])
    driver.send_signal(signal.SIGINT)
    driver.communicate(timeout=300)

    assert driver.returncode == 130
    wait_until(lambda: not any(map(lives, pids)))


def test_signal_handlers_are_restored(tmp_path):
    """After a run and after an error the process has its previous handlers."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    status = run_to_end("/bin/sh", ["sh", "-c", "exit 3"], os.environ, tmp_path / "log")

    assert status == 3
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_standard_input_is_empty():
    """In every run, so that all runs have the same."""
    program = (
        "import os; from pathlib import Path\n"
        "from torchrepro.verification.runner import run_to_end\n"
        "command = ['sh', '-c', 'wc -c; echo to-stderr >&2']\n"
        "run_to_end('/bin/sh', command, os.environ, Path('log'))"
    )
    subprocess.run([sys.executable, "-c", program], input="words", text=True, check=True)

    assert Path("log").read_text().split() == ["0", "to-stderr"]
