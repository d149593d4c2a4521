"""Policies come and go while other threads run torch, and in forked children."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

Run = Callable[..., subprocess.CompletedProcess[str]]
THREADS = """
import sys, threading, torch, torchrepro

errors, stop = [], threading.Event()

def guarded(work):
    try:
        work()
    except BaseException as error:
        errors.append(repr(error))

def draw():
    while not stop.is_set():
        torch.rand(3)
        torch.nn.functional.dropout(torch.ones(4), 0.5)
        torch.bernoulli(torch.full((3,), 0.5))

def apply():
    for _ in range(15):
        with torchrepro.apply(PROFILE):
            torch.rand(2)

drawing = [threading.Thread(target=guarded, args=[draw]) for _ in range(2)]
applying = [threading.Thread(target=guarded, args=[apply]) for _ in range(APPLYING)]
for thread in (*drawing, *applying):
    thread.start()
for thread in applying:
    thread.join()
stop.set()
for thread in drawing:
    thread.join()
assert not errors, errors
dropped = torch.dropout(torch.ones(1000), 0.5, True)
assert (dropped == 0).any() and (dropped == 2).any()
"""

PROFILES = {
    "dropout": {"dropout": "zero"},
    "dropout and rng": {"dropout": "zero", "device": {"rng": "host"}},
    "fallback": {
        "device": {"fallback": "cpu"},
        "backends": {"torch": {"deterministic_algorithms": "error"}},
    },
}


def _start_python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.parametrize(
    ("name", "applying"), [("dropout", 1), ("dropout and rng", 6), ("fallback", 1)]
)
def test_threads_that_run_ops_meanwhile_go_on(name: str, applying: int, fork_python: Run) -> None:
    """Threads that draw and drop run on while policies come and go, from one thread or from six.

    With six of them the process is one of its own, whose interpreter ends as well.
    """
    if "dropout" in name and not hasattr(torch.library, "get_kernel"):
        pytest.skip("this torch cannot hand a call on: what it documents may crash")
    run = fork_python if applying == 1 else _start_python
    done = run("-c", f"PROFILE, APPLYING = {PROFILES[name]!r}, {applying}\n{THREADS}")

    assert done.returncode == 0, done.stderr[-2000:]


FORKS = """
import os, signal, sys, threading, time, torch, torchrepro

stop = threading.Event()
FLAGS = {"torch": {"fill_uninitialized_memory": False}}
PROFILE = {"dropout": "zero", "seed": 1, "backends": FLAGS}

def apply():
    while not stop.is_set():
        with torchrepro.apply(PROFILE):
            pass

def child():
    signal.alarm(120)
    with torchrepro.apply({"dropout": "zero", "seed": 3}) as applied:
        assert torch.initial_seed() == 3, torch.initial_seed()
        assert torch.dropout(torch.ones(50), 0.5, True).sum() == 50
        assert not {"failed", "ineffective"} & set(applied.report.counts)
    os._exit(0)

thread = threading.Thread(target=apply)
thread.start()
while "torchrepro.applier" not in sys.modules:  # the first child begins while it is imported
    time.sleep(0)
statuses = []
for _ in range(8):
    process = os.fork()
    if process == 0:
        child()
    statuses.append(os.waitpid(process, 0)[1])
stop.set()
thread.join()
assert statuses == [0] * 8, statuses
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_forked_while_a_thread_applies_can_apply(fork_python: Run) -> None:
    """A child never waits for a profile that a thread of its parent loads or puts in force."""
    done = fork_python("-c", FORKS)

    assert done.returncode == 0, done.stderr[-2000:]
