"""Loaders made with `dataloader_kwargs`: what a sample draws depends on what it is, alone."""

import copy
import gc
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, get_worker_info

import torchrepro

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

Sample = tuple[int, tuple[float, ...]]


def draws() -> tuple[float, ...]:
    """Draw from each generator that a sample may use."""
    ready = torchrepro.sample_rng().random()
    return random.random(), np.random.random(), torch.rand(()).item(), ready


class Noisy(Dataset[Sample]):
    """Sample `i` is `i` and what the generators gave; sample `bad` raises."""

    def __init__(self, length: int = 6, bad: int | None = None) -> None:
        self.length, self.bad = length, bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        drawn = draws()
        if index == self.bad:
            raise OSError("no such picture")
        return index, drawn


class Initialised(Noisy):
    """Sample `i` is `i`, the worker that loads it, what its init function left, and its seed."""

    mark = -1

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return index, (info.id, self.mark, info.seed)


def leave_a_mark(worker: int) -> None:
    """Be the init function of a user."""
    get_worker_info().dataset.mark = worker


def collate_noisily(samples: list[Sample]) -> list[Any]:
    """Collate a batch with an augmentation of its own."""
    return [*samples, ([index for index, _ in samples], draws())]


@pytest.fixture(autouse=True)
def _profile() -> Iterator[None]:
    with torchrepro.apply({"seed": 5}):
        yield


def _loader(dataset: Any = None, name: str = "train", epoch: int = 0, **options: Any) -> Any:
    kwargs = torchrepro.dataloader_kwargs(name, epoch=epoch)
    defaults = {"batch_size": 2, "shuffle": True, "collate_fn": list}
    return DataLoader(dataset or Noisy(), **{**defaults, **kwargs, **options})


def _epoch(loader: Any) -> list[Any]:
    return [sample for batch in loader for sample in batch]


WORKERS = st.sampled_from([0, 1, 2])


@settings(max_examples=12)
@given(
    length=st.integers(1, 12),
    batch=st.integers(1, 5),
    workers=WORKERS,
    live_on=st.booleans(),
    others=st.integers(0, 3),
)
def test_order_and_samples_depend_on_neither_workers_nor_batches(
    length: int, batch: int, workers: int, live_on: bool, others: int
) -> None:
    """Every epoch is the same, however many workers load it in batches of whatever size."""
    plain = _loader(Noisy(length), batch_size=1)
    _ = random.random(), torch.rand(others), np.random.random(others)
    loader = _loader(
        Noisy(length),
        batch_size=batch,
        num_workers=workers,
        persistent_workers=live_on and workers > 0,
    )

    assert [_epoch(plain) for _ in range(2)] == [_epoch(loader) for _ in range(2)]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_what_is_drawn_to_collate_a_batch_depends_on_the_batch_alone(workers: int) -> None:
    """Batches draw the same numbers on any number of workers, and each batch and epoch others."""
    here, there = (_loader(collate_fn=collate_noisily, num_workers=count) for count in (0, workers))
    first, second = _epoch(here), _epoch(here)

    assert [first, second] == [_epoch(there), _epoch(there)]
    assert len({drawn for _, drawn in first + second}) == len(first + second)


def test_samples_epochs_names_seeds_and_ranks_all_draw_other_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No generator gives one number twice among samples that differ in any coordinate."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = []
    for seed, rank, name, epoch in product((5, 6), (0, 1), ("train", "test"), (0, 1)):
        monkeypatch.setenv("RANK", str(rank))
        with torchrepro.apply({"seed": seed}):
            found += [drawn for _, drawn in _epoch(_loader(name=name, epoch=epoch))]

    assert len(found) == 16 * len(Noisy())
    for drawn in zip(*found, strict=True):
        assert len(set(drawn)) == len(found)


@pytest.mark.parametrize(("ranks", "agree"), [(None, False), ("distinct", False), ("same", True)])
def test_ranks_agree_on_the_order_and_on_samples_only_where_wanted(
    ranks: str | None, agree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank has the order of the others, and their numbers exactly under `ranks: same`."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = []
    with torchrepro.apply({"seed": 5} | ({"ranks": ranks} if ranks else {})):
        for rank in range(2):
            monkeypatch.setenv("RANK", str(rank))
            found.append(_epoch(_loader(num_workers=1)))
    orders = [[index for index, _ in samples] for samples in found]

    assert orders[0] == orders[1]
    assert (found[0] == found[1]) == agree


def test_the_order_depends_on_seed_name_and_epoch() -> None:
    """Another seed, another name or another epoch gives another order."""
    orders = set()
    for seed, name, epoch in product((5, 6), ("train", "test"), (0, 1)):
        with torchrepro.apply({"seed": seed}):
            samples = _epoch(_loader(Noisy(20), name=name, epoch=epoch))
        orders.add(tuple(index for index, _ in samples))

    assert len(orders) == 8


@settings(max_examples=10)
@given(epoch=st.integers(0, 3), workers=WORKERS, live_on=st.booleans())
def test_an_epoch_is_the_same_however_it_is_reached(
    epoch: int, workers: int, live_on: bool
) -> None:
    """Running to an epoch, naming it, going back to it and starting with it give its samples."""
    options = {"num_workers": workers, "persistent_workers": live_on and workers > 0}
    running, direct = _loader(**options), _loader(**options)
    run = [_epoch(running) for _ in range(epoch + 1)][-1]
    torchrepro.set_epoch(direct, epoch)
    named = _epoch(direct)
    torchrepro.set_epoch(running, epoch)

    assert run == named == _epoch(running) == _epoch(_loader(epoch=epoch, **options))
    assert _epoch(running) == _epoch(direct)


def test_what_a_worker_knows_as_its_seed_depends_on_the_epoch_alone() -> None:
    """`get_worker_info().seed` is one number per epoch and worker, however that was reached."""
    running, direct = (_loader(Initialised(), num_workers=2) for _ in range(2))
    run = [_epoch(running) for _ in range(3)]
    torchrepro.set_epoch(direct, 2)

    assert run[2] == _epoch(direct)
    assert run[0] != run[1]


def _break(loader: Any) -> None:
    for _ in loader:
        break


def _raise_outside(loader: Any) -> None:
    with suppress(KeyError):
        for _ in loader:
            raise KeyError


def _fail(loader: Any) -> None:
    iterator = iter(loader)
    with pytest.raises(OSError, match="no such picture"):
        list(iterator)
    if loader.num_workers:  # torch waits 5 s for each if it finds them as garbage
        iterator._shutdown_workers()


USES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "to its end": (_epoch, Noisy()),
    "not at all": (iter, Noisy()),
    "left early": (_break, Noisy()),
    "left by an error": (_raise_outside, Noisy()),
    "with a sample that raises": (_fail, Noisy(bad=3)),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("use", USES)
def test_iterating_moves_no_generator_of_the_program(
    use: str, workers: int, world: Callable[[], Any]
) -> None:
    """However an iteration ends, every global generator is where it was before."""
    act, dataset = USES[use]
    loader = _loader(dataset, num_workers=workers)
    before = world()
    act(loader)
    gc.collect()

    assert before == world()
    with pytest.raises(torchrepro.SeedingError):
        torchrepro.sample_rng()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_after_a_sample_that_raised(workers: int) -> None:
    """The epoch after one that an error ended is what it is after a whole one."""
    broken, whole = (_loader(Noisy(bad=bad), num_workers=workers) for bad in (3, None))
    _fail(broken)
    broken.dataset.bad = None
    _epoch(whole)

    assert _epoch(broken) == _epoch(whole)


def test_the_ready_generator_goes_on_within_a_sample_and_is_nowhere_else() -> None:
    """Within one sample `sample_rng` goes on; where no sample is loaded it raises."""

    class Twice(Noisy):
        def __getitem__(self, index: int) -> Any:
            both = torchrepro.sample_rng(), torchrepro.sample_rng()
            return index, (both[0] is both[1], both[0].random(), both[1].random())

    found = [drawn for _, drawn in _epoch(_loader(Twice()))]

    assert all(same and one != two for same, one, two in found)
    assert len({number for _, *numbers in found for number in numbers}) == 2 * len(found)
    with pytest.raises(torchrepro.SeedingError, match="no sample is being loaded"):
        torchrepro.sample_rng()


@pytest.mark.parametrize("live_on", [True, False])
def test_an_init_function_of_the_user_runs_in_each_worker(live_on: bool) -> None:
    """The `worker_init_fn` given to `dataloader_kwargs` runs in every worker with its number."""
    kwargs = torchrepro.dataloader_kwargs("train", worker_init_fn=leave_a_mark)
    loader = _loader(Initialised(), num_workers=2, persistent_workers=live_on, **kwargs)
    found = [place for _ in range(2) for _, place in _epoch(loader)]

    assert {worker for worker, *_ in found} == {0, 1}
    assert all(worker == mark for worker, mark, _ in found)


def test_nothing_is_wrapped_once_the_last_loader_is_gone() -> None:
    """`DataLoader.__iter__` is torch's own again when no loader made this way is alive."""
    gc.collect()
    original = DataLoader.__iter__
    loaders = [_loader(name=name) for name in ("train", "test")]
    _epoch(loaders[0])
    assert DataLoader.__iter__ is not original
    del loaders[0]
    gc.collect()
    assert DataLoader.__iter__ is not original
    loaders.clear()
    gc.collect()

    assert DataLoader.__iter__ is original


def test_a_copy_of_a_loader_loads_what_the_original_loads() -> None:
    """A deep copy is a loader of its own that goes on where the original is."""
    loader = _loader()
    _epoch(loader)
    copied = copy.deepcopy(loader)

    assert [_epoch(copied) for _ in range(2)] == [_epoch(loader) for _ in range(2)]
