"""The order in which a seeded loader asks for samples: its samplers, and what names a sample."""

import random
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import torchrepro

LENGTH = 40  # more than the 32 that RandomSampler draws at a time


def draws() -> tuple[float, ...]:
    """Draw from each generator that a sample may use."""
    return random.random(), np.random.random(), torch.rand(()).item()


class Noisy(Dataset[Any]):
    """A sample is what names it and what the generators gave, whatever names it."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return index, draws()


class Wandering:
    """A sampler that draws from Python's generator before each index, and from torch's."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        for _ in range(LENGTH):
            yield random.randrange(LENGTH) ^ int(torch.randint(2, ()))


class WanderingBatches(Wandering):
    """A batch sampler that draws the size of every batch and what is in it."""

    batch_size: Any

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(12):
            yield np.random.randint(0, LENGTH, random.randrange(1, 4)).tolist()


class Failing(Wandering):
    """A sampler that draws, then raises."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.after):
            yield random.randrange(LENGTH)
        random.seed(3)
        raise OSError("no such list")


KINDS: dict[str, Callable[[torch.Generator], dict[str, Any]]] = {
    "shuffle": lambda _: {"shuffle": True},
    "replacement": lambda _: {"sampler": RandomSampler(Noisy(), replacement=True)},
    "replacement, generator given": lambda generator: {
        "sampler": RandomSampler(Noisy(), replacement=True, generator=generator)
    },
    "several times over": lambda generator: {
        "sampler": RandomSampler(Noisy(30), num_samples=75, generator=generator)
    },
    "weighted": lambda _: {"sampler": WeightedRandomSampler([1.0] * LENGTH, 50)},
    "subset": lambda _: {"sampler": SubsetRandomSampler(range(3, LENGTH))},
    "wandering": lambda _: {"sampler": Wandering()},
    "batches": lambda _: {"batch_sampler": WanderingBatches()},
    "batches of torch": lambda _: {"batch_sampler": BatchSampler(Wandering(), 3, drop_last=True)},
    "one by one": lambda _: {"sampler": RandomSampler(Noisy()), "batch_size": None},
}


@pytest.fixture(autouse=True)
def _profile() -> Iterator[None]:
    with torchrepro.apply({"seed": 5}):
        yield


def _loader(dataset: Any = None, name: str = "train", **options: Any) -> Any:
    kwargs = torchrepro.dataloader_kwargs(name)
    defaults = {} if "batch_sampler" in options else {"batch_size": 4}
    options = {"collate_fn": list, **defaults, **options}
    return DataLoader(dataset if dataset is not None else Noisy(), **options, **kwargs)


def _sampled(kind: str, workers: int = 0, name: str = "train") -> Any:
    kwargs = torchrepro.dataloader_kwargs(name)
    options = {"batch_size": 4, **KINDS[kind](kwargs["generator"])}
    if "batch_sampler" in options:
        del options["batch_size"]
    return DataLoader(Noisy(), num_workers=workers, collate_fn=list, **options, **kwargs)


def _batches(loader: Any, noise: int = 0) -> list[Any]:
    """Return what `loader` gives to a program that draws numbers of its own meanwhile."""
    found = []
    for batch in loader:
        _ = random.random(), np.random.random(noise), torch.rand(noise)
        found.append(batch)
    return found


def _names(batches: list[Any]) -> list[Any]:
    samples = batches if isinstance(batches[0][0], int) else chain(*batches)
    return [name for name, _ in samples]


@pytest.mark.parametrize("kind", KINDS)
def test_every_sampler_draws_what_belongs_to_the_epoch(kind: str) -> None:
    """An epoch's order is the same on workers, beside other draws and by name; the next is not."""
    one, two, told = _sampled(kind), _sampled(kind, workers=2), _sampled(kind)
    first, second = _batches(one), _batches(one)
    torchrepro.set_epoch(told, 1)

    assert [first, second] == [_batches(two, noise=3) for _ in range(2)]
    assert second == _batches(told)
    assert _names(first) != _names(second)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_that_run_at_one_time_do_not_disturb_each_other(kind: str, workers: int) -> None:
    """Two loaders, or two iterations of one, give interleaved what they give one by one."""
    one, two = _sampled(kind, workers), _sampled(kind, workers, "test")
    apart = [_batches(loader) for loader in (one, two, one, one)]
    one, two = _sampled(kind, workers), _sampled(kind, workers, "test")
    mixed = list(zip(one, two, strict=False)), list(zip(one, one, strict=False))
    together = [list(found) for pairs in mixed for found in zip(*pairs, strict=True)]

    assert [
        batches[: len(found)] for batches, found in zip(apart, together, strict=True)
    ] == together
    assert min(map(len, together)) >= 10


@pytest.mark.parametrize("after", [0, 1, 6])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_that_raises_leaves_the_generators_where_they_were(
    after: int, workers: int, world: Callable[[], Any]
) -> None:
    """An error in a sampler reaches the program, whose generators are where they were before."""
    loader = _loader(sampler=Failing(after), num_workers=workers)
    before = world()
    with pytest.raises(OSError, match="no such list"):
        list(loader)

    assert before == world()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_distributed_sampler_hears_the_epoch(rank: int) -> None:
    """`set_epoch` reaches a DistributedSampler, inside a batch sampler too."""
    expected = []
    for epoch in range(3):
        plain = DistributedSampler(Noisy(), 2, rank)
        plain.set_epoch(epoch)
        expected.append(list(plain))
    sampler = DistributedSampler(Noisy(), 2, rank)
    inside = BatchSampler(DistributedSampler(Noisy(), 2, rank), 4, drop_last=False)
    loaders = [_loader(sampler=sampler), _loader(batch_sampler=inside)]
    for epoch in (1, 2, 0):
        for loader in loaders:
            torchrepro.set_epoch(loader, epoch)
            assert [index for index, _ in chain(*loader)] == expected[epoch]


def test_epochs_reach_a_loader_that_is_not_seeded_through_its_sampler_alone() -> None:
    """Where only a sampler knows epochs it hears them; where nothing does, `set_epoch` raises."""
    sampler = DistributedSampler(Noisy(), 2, 0)
    torchrepro.set_epoch(DataLoader(Noisy(), sampler=sampler), 3)

    assert sampler.epoch == 3
    with pytest.raises(torchrepro.SeedingError, match="nothing in this loader knows epochs"):
        torchrepro.set_epoch(DataLoader(Noisy(), shuffle=True), 3)


def test_a_loader_that_does_not_shuffle_goes_from_the_first_to_the_last() -> None:
    """Without `shuffle` the samples come in the order of the dataset."""
    assert _names(_batches(_loader())) == list(range(LENGTH))


@pytest.mark.parametrize("batch_size", [np.array([1, 3]), [1, 3], torch.tensor([1.0, 3.0]), "3"])
def test_a_batch_sampler_may_call_anything_its_batch_size(batch_size: Any) -> None:
    """What a sampler of the program's own has under the name `batch_size` disturbs no epoch."""
    sampler = WanderingBatches()
    sampler.batch_size = batch_size
    auto = {"seed": 1, "dataloader": {"seeding": "auto"}}

    with torchrepro.apply(auto):
        found = list(DataLoader(Noisy(), batch_sampler=sampler, collate_fn=list))
    del sampler.batch_size
    with torchrepro.apply(auto):
        assert found == list(DataLoader(Noisy(), batch_sampler=sampler, collate_fn=list))


@settings(max_examples=10)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    epoch=st.integers(0, 2),
    start=st.integers(0, 15),
    workers=st.sampled_from([0, 2]),
)
def test_batches_that_are_left_out_change_no_other(
    kind: str, epoch: int, start: int, workers: int
) -> None:
    """`set_epoch(loader, e, start=n)` gives all but the first n batches, then whole epochs."""
    whole, cut = _sampled(kind), _sampled(kind, workers)
    epochs = [_batches(whole) for _ in range(epoch + 2)]
    torchrepro.set_epoch(cut, epoch, start=start)

    assert _batches(cut) == epochs[epoch][start:]
    assert _batches(cut) == epochs[epoch + 1]


class Endless:
    """A sampler that goes through the samples again and again, as training by steps does."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from range(5)


AGAIN = {
    "weighted": lambda: WeightedRandomSampler([1.0, 9.0, 1.0, 1.0, 1.0], 60),
    "with replacement": lambda: RandomSampler(range(5), replacement=True, num_samples=60),
    "several times over": lambda: RandomSampler(range(5), num_samples=60),
    "endless": Endless,
    "listed twice": lambda: SubsetRandomSampler([3, 3, 3, 1] * 15),
}


@pytest.mark.parametrize("kind", AGAIN)
def test_a_sample_that_comes_again_draws_other_numbers(kind: str) -> None:
    """However often an epoch has a sample, it never draws the same twice; the numbers repeat."""
    found = []
    for workers in (0, 2):
        named = torchrepro.dataloader_kwargs("train")
        options = {"batch_size": 7, "num_workers": workers, "collate_fn": list}
        batches = iter(DataLoader(Noisy(5), sampler=AGAIN[kind](), **options, **named))
        found.append([sample for _ in range(8) for sample in next(batches)])
        if workers:
            batches._shutdown_workers()

    assert found[0] == found[1]
    assert len({drawn for _, drawn in found[0]}) == 56
