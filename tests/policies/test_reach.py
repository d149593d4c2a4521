"""Policies apply to every thread of the process, and to data-loading workers of all kinds."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrepro

ZERO = {"dropout": "zero"}


def _started(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=600, check=False
    )


PROGRAM = """
import multiprocessing, sys, torch, torchrepro
from torch.utils.data import DataLoader, Dataset

class Dropped(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.nn.functional.dropout(torch.ones(200))

def mark(worker):
    torch.manual_seed(worker)

def drops(method, **more):
    loader = DataLoader(Dropped(), num_workers=1, multiprocessing_context=method, **more)
    return bool((torch.cat(list(loader)) == 0).any())

if __name__ == "__main__":
    method, drops_there = sys.argv[1], []
    multiprocessing.set_forkserver_preload(["numpy", "torch"])
    drops_there.append(drops(method))
    for seeding in sys.argv[2:]:
        with torchrepro.apply({"dropout": "zero", "seed": 1, "dataloader": {"seeding": seeding}}):
            drops_there += drops(method), drops(method, worker_init_fn=mark)
    print(*drops_there, drops(method))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "seedings"),
    [("fork", ["auto"]), ("spawn", ["auto", "none"]), ("forkserver", ["auto"])],
)
def test_the_policy_applies_to_forked_and_spawned_workers(
    method: str, seedings: list[str], tmp_path: Path
) -> None:
    """Forked or spawned, a worker drops nothing under the policy, and drops before and after."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    done = _started(str(program), method, *seedings)

    inside = ["False", "False"] * len(seedings)
    assert done.stdout.split() == ["True", *inside, "True"], done.stderr


@contextmanager
def _thread(
    target: Callable[[threading.Event, threading.Event], None],
) -> Iterator[threading.Event]:
    """Run `target` in another thread, from its start until the block ends.

    The value that it sets at its start is passed to the block.
    """
    begun, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=target, args=(begun, ended), name="trainer", daemon=True)
    thread.start()
    begun.wait(300)
    try:
        yield begun
    finally:
        ended.set()
        thread.join(300)


def test_a_thread_that_runs_torch_is_reached_and_reported() -> None:
    """A thread started before the policy drops nothing under it; the report has its name."""
    last = torch.zeros(0)

    def trains(began: threading.Event, ended: threading.Event) -> None:
        nonlocal last
        while not ended.is_set():
            last = torch.nn.functional.dropout(torch.ones(200))
            began.set()

    with _thread(trains) as began, torchrepro.apply(ZERO) as applied:
        for _ in range(2):  # the second has begun under the policy
            began.clear()
            began.wait(300)
        assert (last == 1).all()
        assert "trainer" in applied.report["dropout"].why

    with torchrepro.apply(ZERO) as applied:
        assert applied.report["dropout"].why == ""


WAITS = "def waits(begun, ended):\n    begun.set()\n    ended.wait(300)\n"


@pytest.mark.parametrize(
    "space", [{"__name__": None, "torch": torch}, {"__name__": "elsewhere"}], ids=["torch", "none"]
)
def test_a_thread_is_reported_if_its_code_refers_to_torch(space: dict[str, Any]) -> None:
    """Code without a name is read like any other code."""
    space = dict(space)
    exec(WAITS, space)

    with _thread(space["waits"]), torchrepro.apply(ZERO) as applied:
        assert ("trainer" in applied.report["dropout"].why) == ("torch" in space)


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


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "applying"), [("dropout", 1), ("dropout and rng", 6), ("fallback", 1)]
)
def test_threads_that_run_ops_continue_while_policies_change(
    name: str, applying: int, fork_python: Run
) -> None:
    """Threads draw and drop while one or six threads apply and undo policies.

    With six threads the process is a separate one, whose interpreter must end too.
    """
    if "dropout" in name and not hasattr(torch.library, "get_kernel"):
        pytest.skip("this torch cannot hand a call on: what it documents may crash")
    run = fork_python if applying == 1 else _started
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
while "torchrepro.application.applier" not in sys.modules:  # the first child begins amid its import
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
    """A child never waits for a profile that a thread of its parent loads or applies."""
    done = fork_python("-c", FORKS)

    assert done.returncode == 0, done.stderr[-2000:]
