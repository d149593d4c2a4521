"""Whom a policy reaches: every thread of the process, and data-loading workers of every kind."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import torchrepro

ZERO = {"dropout": "zero"}


PROGRAM = """
import sys, torch, torchrepro
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
    method, seeding = sys.argv[1:]
    before = drops(method)
    with torchrepro.apply({"dropout": "zero", "seed": 1, "dataloader": {"seeding": seeding}}):
        inside = drops(method), drops(method, worker_init_fn=mark)
    print(before, *inside, drops(method))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "seeding"),
    [("fork", "auto"), ("spawn", "auto"), ("spawn", "none"), ("forkserver", "auto")],
)
def test_workers_are_under_the_policy_however_they_are_started(
    method: str, seeding: str, tmp_path: Path
) -> None:
    """Forked or started afresh, a worker drops nothing in force, and drops before and after."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(program), method, seeding],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip

    assert done.stdout.split() == ["True", "False", "False", "True"], done.stderr


@contextmanager
def _thread(target: Callable[[threading.Event, threading.Event], None]) -> Iterator[None]:
    """Run `target` in another thread, from when it has begun until the block ends."""
    begun, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=target, args=(begun, ended), name="trainer", daemon=True)
    thread.start()
    begun.wait(300)
    try:
        yield
    finally:
        ended.set()
        thread.join(300)


def _trains(begun: threading.Event, ended: threading.Event) -> None:
    while not ended.is_set():
        torch.nn.functional.dropout(torch.ones(10))
        begun.set()


def _waits(begun: threading.Event, ended: threading.Event) -> None:
    begun.set()
    ended.wait(300)


def test_a_thread_that_runs_torch_is_reported() -> None:
    """A policy that another thread is reached by says so, with the thread's name."""
    with _thread(_trains), torchrepro.apply(ZERO) as applied:
        assert "trainer" in applied.report["dropout"].why

    with torchrepro.apply(ZERO) as applied:
        assert applied.report["dropout"].why == ""


def test_a_thread_whose_code_belongs_to_no_module_does_no_harm() -> None:
    """Code that was given no name at all is looked at like any other."""
    space: dict[str, Callable[..., None]] = {"__name__": None, "torch": torch}
    exec("def waits(begun, ended):\n    begun.set()\n    ended.wait(300)\n", space)

    with _thread(space["waits"]), torchrepro.apply(ZERO) as applied:
        assert "trainer" in applied.report["dropout"].why


def test_a_thread_without_torch_is_not_reported() -> None:
    """A thread whose code never refers to torch is no news."""
    space: dict[str, Callable[..., None]] = {"__name__": "elsewhere"}
    exec("def waits(begun, ended):\n    begun.set()\n    ended.wait(300)\n", space)

    with _thread(space["waits"]), torchrepro.apply(ZERO) as applied:
        assert applied.report["dropout"].why == ""


def test_another_thread_is_under_the_policy() -> None:
    """A thread that was started before the policy drops nothing while it is in force."""
    go, results = threading.Event(), []

    def drop() -> None:
        go.wait(300)
        results.append(torch.nn.functional.dropout(torch.ones(200)))

    thread = threading.Thread(target=drop)
    thread.start()
    with torchrepro.apply(ZERO):
        go.set()
        thread.join(300)

    assert (results[0] == 1).all()
