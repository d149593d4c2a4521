"""Loaders and threads: which samples are seeded while several threads load."""

import gc
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, _DatasetKind
from torch.utils.data.dataloader import _BaseDataLoaderIter

import torchrepro

from .loaders import AUTO, Noisy, draws, epoch, run, seed_plainly

ORIGINAL = _DatasetKind.create_fetcher
PATIENCE = 300


class Gate(Dataset[int]):
    """A dataset whose first sample waits until the test releases it."""

    def __init__(self) -> None:
        self.entered, self.let_go = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        self.entered.set()
        assert self.let_go.wait(PATIENCE)
        return index


def _hooked() -> list[Any]:
    iterator = _BaseDataLoaderIter
    return [DataLoader.__iter__, iterator.__init__, iterator.__next__]


ORIGINALS = _hooked()


@pytest.fixture
def switching() -> Iterator[None]:
    """Have Python change between threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def _in_threads(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as threads:
        started = [threads.submit(call) for call in calls]
        return [each.result(PATIENCE) for each in started]


def _shuffled(**options: Any) -> Any:
    return DataLoader(Noisy(20), batch_size=4, shuffle=True, collate_fn=list, **options)


@pytest.mark.parametrize("begun", [iter, lambda loader: loader], ids=["begun here", "begun there"])
def test_a_loader_in_another_thread_loads_as_without_a_profile(begun: Any) -> None:
    """Without workers, samples that are read outside the main thread are not seeded."""
    found = []
    for way in ("plain", "auto"):
        with run(way), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seed_plainly()
            batches = begun(_shuffled())
            found.append([*_in_threads(lambda batches=batches: epoch(batches)), draws()])

    assert found[0] == found[1]


def test_a_loader_with_workers_is_seeded_in_any_thread() -> None:
    """Workers load the same samples as for the main thread, without a warning."""
    found = []
    for call in (lambda load: load(), lambda load: _in_threads(load)[0]):
        with run(), warnings.catch_warnings():
            warnings.simplefilter("error")
            loader = _shuffled(num_workers=1)
            found.append([call(lambda loader=loader: epoch(loader)), draws()])

    assert found[0] == found[1]


def test_a_loader_in_another_thread_warns_once() -> None:
    """One iteration outside the main thread gives one `UserWarning` with the reason."""
    gc.collect()  # objects of other tests may warn when they are freed
    with torchrepro.apply(AUTO), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        _in_threads(lambda: epoch(_shuffled()))

    assert [warning.category for warning in warned] == [UserWarning]
    assert "outside of the main thread" in str(warned[0].message)
    assert "num_workers=1" in str(warned[0].message)


def test_a_loader_in_the_main_thread_does_not_warn() -> None:
    """Nor do loaders made with `dataloader_kwargs`, in any thread."""
    with torchrepro.apply(AUTO), warnings.catch_warnings():
        warnings.simplefilter("error")
        epoch(_shuffled())
        named = DataLoader(range(8), **torchrepro.dataloader_kwargs("elsewhere"))
        _in_threads(lambda: epoch(named))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_main_thread_draws_no_number_twice(switching: None, workers: int) -> None:
    """Loads in another thread do not set the generators of the main thread."""
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            epoch(DataLoader(range(23), batch_size=4, num_workers=workers))

    with torchrepro.apply(AUTO), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        thread = threading.Thread(target=load)
        thread.start()
        drawn = [tuple(torch.rand(4).tolist()) for _ in range(10_000)]
        stop.set()
        thread.join(PATIENCE)

    assert len(set(drawn)) == len(drawn)


def test_a_loader_keeps_its_order_while_another_thread_loads() -> None:
    """A sample that another thread loads does not change the loads of the main thread.

    Nor does the main thread take that sample for its own.
    """
    found = []
    for waiting in (False, True):
        gate = Gate()
        with torchrepro.apply(AUTO):
            batches = iter(DataLoader(gate, batch_size=4))
            thread = threading.Thread(target=lambda batches=batches: next(batches))
            if waiting:
                thread.start()
                assert gate.entered.wait(PATIENCE)
            try:
                with pytest.raises(torchrepro.SeedingError):
                    torchrepro.sample_rng()
                found.append([epoch(_shuffled()), epoch(_shuffled())])
            finally:
                gate.let_go.set()
            if waiting:
                thread.join(PATIENCE)

    assert found[0] == found[1]


def test_loaders_named_and_freed_in_parallel_leave_no_hook(switching: None) -> None:
    """While a thread has a named loader, its hooks are in place; after the last one, none is."""

    def name_and_free(name: str) -> bool:
        are_hooked = True
        for _ in range(300):
            named = torchrepro.dataloader_kwargs(name)
            are_hooked &= hasattr(DataLoader.__iter__, "__wrapped__")
            del named
        return are_hooked

    gc.collect()
    calls = [partial(name_and_free, name) for name in "abcd"]

    assert _in_threads(*calls) == [True] * len(calls)
    assert _hooked() == ORIGINALS


def test_loaders_started_in_parallel_restore_torch(switching: None) -> None:
    """Threads that start named loaders in parallel leave torch's own readers in place."""
    together = threading.Barrier(2)

    def load(name: str) -> set[bool]:
        left = set()
        for _ in range(60):
            together.wait(PATIENCE)
            epoch(DataLoader(range(12), batch_size=4, **torchrepro.dataloader_kwargs(name)))
            together.wait(PATIENCE)
            left.add(_DatasetKind.create_fetcher is ORIGINAL)
        return left

    with torchrepro.apply({"seed": 5}):
        assert _in_threads(lambda: load("a"), lambda: load("b")) == [{True}, {True}]

    assert _DatasetKind.create_fetcher is ORIGINAL
