"""Seeded loaders over an `IterableDataset`: a worker draws from one stream per epoch."""

import random
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

import torchrepro


def draws() -> tuple[float, ...]:
    """Draw from each generator that an item may use."""
    ready = torchrepro.sample_rng().random()
    return random.random(), np.random.random(), torch.rand(()).item(), ready


class Items(IterableDataset[Any]):
    """Items in a drawn order, each with what the generators gave; workers share them out."""

    def __init__(self, length: int = 8, bad: int | None = None) -> None:
        self.length, self.bad = length, bad

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        mine = list(range(info.id, self.length, info.num_workers) if info else range(self.length))
        random.shuffle(mine)
        for place, item in enumerate(mine):
            if place == self.bad:
                raise OSError("no such line")
            yield item, draws()


class Eager(Items):
    """Items whose iterator draws when it is made, not when it is asked first."""

    def __iter__(self) -> Iterator[Any]:
        begun = draws()
        return ((*item, begun) for item in list(super().__iter__()))


class Unreadable(Items):
    """Items that cannot be begun."""

    def __iter__(self) -> Iterator[Any]:
        random.seed(3)
        raise OSError("no such line")


class Counted(Items):
    """Items that say how often their dataset has been begun in this process."""

    begun = 0

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        return iter([(self.begun, item) for item in range(self.length)])


@pytest.fixture(autouse=True)
def _profile() -> Iterator[None]:
    with torchrepro.apply({"seed": 5}):
        yield


def _loader(dataset: Any = None, name: str = "train", epoch: int = 0, **options: Any) -> Any:
    kwargs = torchrepro.dataloader_kwargs(name, epoch=epoch)
    options = {"batch_size": 2, "collate_fn": list, **options}
    return DataLoader(dataset or Items(), **options, **kwargs)


def _epoch(loader: Any) -> list[Any]:
    return list(chain(*loader))


@settings(max_examples=10)
@given(
    kind=st.sampled_from([Items, Eager]),
    length=st.integers(1, 9),
    batch=st.integers(1, 4),
    live_on=st.booleans(),
    noise=st.integers(0, 3),
)
def test_one_worker_reads_what_the_main_process_reads(
    kind: Any, length: int, batch: int, live_on: bool, noise: int
) -> None:
    """Items and what they draw are the same without workers and on one, in any batches."""
    here = _loader(kind(length), batch_size=1)
    _ = random.random(), torch.rand(noise), np.random.random(noise)
    there = _loader(kind(length), batch_size=batch, num_workers=1, persistent_workers=live_on)

    assert [_epoch(here) for _ in range(3)] == [_epoch(there) for _ in range(3)]


@pytest.mark.parametrize("kind", [Items, Eager])
def test_two_workers_read_the_same_in_every_run(kind: Any) -> None:
    """Two workers repeat themselves, live on or not; each draws other numbers than the other."""
    loaders = [_loader(kind(), num_workers=2, persistent_workers=on) for on in (True, False)]
    found, again = ([_epoch(loader) for _ in range(3)] for loader in loaders)

    assert found == again
    assert len({item[1] for item in chain(*found)}) == 3 * 8


@settings(max_examples=8)
@given(epoch=st.integers(0, 3), workers=st.sampled_from([0, 1, 2]), live_on=st.booleans())
def test_an_epoch_is_the_same_however_it_is_reached(
    epoch: int, workers: int, live_on: bool
) -> None:
    """Running to an epoch, naming it and starting with it give its items."""
    options = {"num_workers": workers, "persistent_workers": live_on and workers > 0}
    running, direct = _loader(**options), _loader(**options)
    run = [_epoch(running) for _ in range(epoch + 1)][-1]
    torchrepro.set_epoch(direct, epoch)
    named = _epoch(direct)
    torchrepro.set_epoch(running, epoch)

    assert run == named == _epoch(running) == _epoch(_loader(epoch=epoch, **options))


def test_names_seeds_and_ranks_all_draw_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Items draw other numbers under another seed, in another loader and on another rank."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = []
    for seed, rank, name in [(5, "0", "a"), (6, "0", "a"), (5, "1", "a"), (5, "0", "b")]:
        monkeypatch.setenv("RANK", rank)
        with torchrepro.apply({"seed": seed}):
            found += [drawn for _, drawn in _epoch(_loader(name=name))]

    assert len(set(found)) == len(found) == 4 * 8


def _some(loader: Any) -> None:
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)


def _fail(loader: Any) -> None:
    found = []
    with pytest.raises(OSError, match="no such line"):
        found.extend(_kept(loader, found))
    if loader.num_workers:  # torch waits 5 s for each if it finds them as garbage
        found[0]._shutdown_workers()


def _kept(loader: Any, found: list[Any]) -> list[Any]:
    found.append(iter(loader))
    return list(found[0])


USES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "to its end": (_epoch, Items()),
    "left early": (_some, Items()),
    "with an item that raises": (_fail, Items(bad=3)),
    "with the first item raising": (_fail, Items(bad=0)),
    "that cannot be begun": (_fail, Unreadable()),
    "begun eagerly": (_epoch, Eager()),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("use", USES)
def test_iterating_moves_no_generator_of_the_program(
    use: str, workers: int, world: Callable[[], Any]
) -> None:
    """However an iteration ends, every global generator is where it was before."""
    act, dataset = USES[use]
    loader = _loader(dataset, num_workers=workers)
    before = world()
    act(loader)

    assert before == world()
    with pytest.raises(torchrepro.SeedingError):
        torchrepro.sample_rng()


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_that_run_at_one_time_do_not_disturb_each_other(workers: int) -> None:
    """Interleaved, beside other draws, loaders give what they give one by one."""
    one, two = (_loader(name=name, num_workers=workers) for name in ("train", "test"))
    apart = [_epoch(loader) for loader in (one, two, one, one)]
    one, two = (_loader(name=name, num_workers=workers) for name in ("train", "test"))
    mixed = []
    for pair in ((one, two), (one, one)):
        found: Any = [], []
        for batches in zip(*pair, strict=True):
            torch.rand(2), random.random()
            for items, batch in zip(found, batches, strict=True):
                items.extend(batch)
        mixed += found

    assert apart == mixed


@pytest.mark.parametrize("live_on", [True, False])
def test_a_dataset_is_begun_once_for_each_epoch(live_on: bool) -> None:
    """Seeding asks for an iterator of the dataset exactly as often as torch alone does."""
    options = {"num_workers": 1, "persistent_workers": live_on, "collate_fn": list}
    plain = DataLoader(Counted(), **options)
    loader = _loader(Counted(), batch_size=1, **options)

    assert [_epoch(plain) for _ in range(3)] == [_epoch(loader) for _ in range(3)]


def test_batches_of_items_cannot_be_left_out() -> None:
    """Items have no names, so none is left out unread: `set_epoch` raises and changes nothing."""
    loader, untouched = _loader(), _loader()
    with pytest.raises(torchrepro.SeedingError, match="cannot be skipped"):
        torchrepro.set_epoch(loader, 4, start=1)

    assert _epoch(loader) == _epoch(untouched)


@pytest.mark.parametrize("bad", [-1, True, 1.5, "2"])
def test_an_epoch_is_a_whole_number(bad: Any) -> None:
    """What is no whole number of 0 or more is no epoch and no number of batches to leave out."""
    loader, untouched = _loader(), _loader()
    named = [] if bad is None else [lambda: torchrepro.dataloader_kwargs("train", epoch=bad)]
    for attempt in (
        lambda: torchrepro.set_epoch(loader, bad),
        lambda: torchrepro.set_epoch(loader, 0, start=bad),
        *named,
    ):
        with pytest.raises(torchrepro.SeedingError):
            attempt()

    assert _epoch(loader) == _epoch(untouched)


def test_a_pipe_shuffles_by_its_epoch_however_that_is_reached() -> None:
    """A pipe's own shuffling depends on (seed, name, epoch), as the order of samples does."""
    running, direct = (_loader(IterableWrapper(range(20)).shuffle()) for _ in range(2))
    run = [_epoch(running) for _ in range(3)]
    torchrepro.set_epoch(direct, 2)

    assert run[2] == _epoch(direct)
    assert len({tuple(order) for order in run}) == 3
