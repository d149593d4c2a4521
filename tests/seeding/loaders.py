"""Datasets, samplers and runs for the laws about loaders, and how an epoch is read.

A run is seeded in one of three ways: `plain` (its loaders are not), `auto` (as
`dataloader.seeding: auto` does it), `named` (each loader is made with `dataloader_kwargs`).
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import torchrepro

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

AUTO = {"seed": 5, "dataloader": {"seeding": "auto"}}
LENGTH = 40  # more than the 32 that RandomSampler draws at a time
by_way = pytest.mark.parametrize("way", ["auto", "named"])
by_workers = pytest.mark.parametrize("workers", [0, 2])
by_life = pytest.mark.parametrize(("workers", "live_on"), [(0, False), (2, False), (2, True)])
"""No workers, new workers in each epoch, and persistent workers."""

Make = Any
"""Yielded by `run`: ``make(dataset, choice, name=..., kind=..., **options)`` returns a loader."""


def draws() -> tuple[float, ...]:
    """Draw from each global generator, as datasets do that know nothing of seeding."""
    return random.random(), np.random.random(), torch.rand((), dtype=torch.float64).item()


def all_draws() -> tuple[float, ...]:
    """Draw from each generator that a sample may use."""
    return *draws(), torchrepro.sample_rng().random()


def seed_plainly(seed: int = 3) -> None:
    """Seed the global generators, as a program does for itself."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Noisy(Dataset[Any]):
    """Sample `i` is `i` and the result of `draw`; sample `bad` raises."""

    def __init__(
        self, length: int = 8, draw: Callable[[], Any] = draws, bad: int | None = None
    ) -> None:
        self.length, self.draw, self.bad = length, draw, bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        drawn = self.draw()
        if self.bad is not None and index == self.bad:
            raise OSError("no such picture")
        return index, drawn


class Rows(Noisy):
    """A dataset that reads a complete batch at once, as a dataset of Hugging Face does."""

    def __getitems__(self, indices: Any) -> Any:
        return [(index, self.draw()) for index in indices]


class Items(IterableDataset[Any]):
    """Items with the results of `draw`, in a drawn order; workers share them.

    The item at position `bad` raises; -1 is the beginning.
    """

    def __init__(
        self, length: int = 8, draw: Callable[[], Any] = draws, bad: int | None = None
    ) -> None:
        self.length, self.draw, self.bad = length, draw, bad

    def __iter__(self) -> Iterator[Any]:
        if self.bad == -1:
            raise OSError("no such picture")
        return self._items()

    def _items(self) -> Iterator[Any]:
        info = get_worker_info()
        mine = list(range(info.id, self.length, info.num_workers) if info else range(self.length))
        if self.draw is not tuple:
            random.shuffle(mine)
        for place, item in enumerate(mine):
            if place == self.bad:
                raise OSError("no such picture")
            yield item, self.draw()


class Eager(Items):
    """Items whose iterator draws when it is made, and not at its first item."""

    def __iter__(self) -> Iterator[Any]:
        begun = self.draw()
        return ((*item, begun) for item in list(super().__iter__()))


@dataclass
class Compared:
    """A sampler that defines equality, and so has no hash."""

    length: int = LENGTH

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.length).tolist()


class Wandering:
    """A sampler that draws from Python's generator before each index, and from torch's."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        for _ in range(LENGTH):
            yield random.randrange(LENGTH) ^ int(torch.randint(2, ()))


class WanderingBatches(Wandering):
    """A batch sampler that draws the size and the indices of every batch."""

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
            yield random.randrange(8)
        random.seed(3)
        raise OSError("no such picture")


class Around:
    """A sampler that repeats all samples without end, for training by steps."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(8):
            yield from range(5)


@dataclass(frozen=True)
class Picture:
    """An index of a sample with its own `repr`."""

    number: int


def _data() -> Any:
    return range(LENGTH)


SAMPLERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "in order": lambda _: {},
    "shuffle": lambda _: {"shuffle": True},
    "replacement": lambda _: {"sampler": RandomSampler(_data(), replacement=True)},
    "replacement, generator": lambda own: {
        "sampler": RandomSampler(_data(), replacement=True, generator=own)
    },
    "several times over": lambda own: {
        "sampler": RandomSampler(range(30), num_samples=75, generator=own)
    },
    "weighted": lambda _: {"sampler": WeightedRandomSampler([1.0, 9.0, *[1.0] * 38], 50)},
    "subset": lambda _: {"sampler": SubsetRandomSampler(range(3, LENGTH))},
    "listed twice": lambda _: {"sampler": SubsetRandomSampler([3, 3, 3, 1] * 9)},
    "without a hash": lambda _: {"sampler": Compared()},
    "wandering": lambda _: {"sampler": Wandering()},
    "around": lambda _: {"sampler": Around()},
    "batches": lambda _: {"batch_sampler": WanderingBatches()},
    "batches of torch": lambda _: {"batch_sampler": BatchSampler(Wandering(), 3, drop_last=True)},
    "one by one": lambda _: {
        "sampler": RandomSampler(_data()), "batch_size": None, "collate_fn": lambda each: [each]
    },
}  # fmt: skip
"""Options of a loader by how its samples are chosen, given the generator of a named loader."""


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(4)


AUTHORS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "generator": lambda _: {"shuffle": True, "generator": _seeded()},
    "generator, in order": lambda _: {"generator": _seeded()},
    "sampler's generator": lambda _: {"sampler": RandomSampler(_data(), generator=_seeded())},
    "weighted, generator": lambda _: {
        "sampler": WeightedRandomSampler([1.0] * LENGTH, 50, generator=_seeded())
    },
    "distributed": lambda _: {"sampler": DistributedSampler(_data(), 2, 0)},
}
"""The same for loaders whose program has chosen the source of their order."""

DATASETS: dict[str, Callable[[Any], Any]] = {
    "a subset": lambda draw: Subset(Noisy(20, draw), range(5, 15)),
    "a subset of a subset": lambda draw: Subset(Subset(Noisy(30, draw), range(5, 25)), range(12)),
    "two in a row": lambda draw: ConcatDataset([Noisy(7, draw), Noisy(5, draw)]),
    "a subset of two": lambda draw: Subset(ConcatDataset([Noisy(7, draw)] * 2), range(3, 11)),
    "read in batches": lambda draw: Rows(20, draw),
    "a subset read in batches": lambda draw: Subset(Rows(20, draw), range(3, 20)),
}
"""Datasets that are shuffled, as functions of the draws of a sample."""

NAMES: dict[str, list[Any]] = {
    "texts": ["a", "b", "c"],
    "tuples": [("a", 1), ("a", 2), ("b", (1, 2))],
    "numbers of numpy": list(np.arange(3)),
    "numbers of torch": list(torch.arange(3)),
    "objects with their own repr": [Picture(1), Picture(2), Picture(3)],
}
"""Indices of samples by their type, in order."""

KINDS = [*SAMPLERS, *AUTHORS, *DATASETS, *NAMES]


@contextmanager
def run(way: str = "auto", **profile: Any) -> Iterator[Make]:
    """Be a run of a program; yield a function that makes its loaders, seeded as `way` says."""

    def make(
        dataset: Any = None,
        choice: str = "",
        *,
        draw: Any = draws,
        name: str = "train",
        epoch: int = 0,
        kind: Any = DataLoader,
        **options: Any,
    ) -> Any:
        own = torchrepro.dataloader_kwargs(name, epoch=epoch) if way == "named" else {}
        if choice in SAMPLERS | AUTHORS:
            options |= (SAMPLERS | AUTHORS)[choice](own.get("generator"))
        elif choice in DATASETS:
            dataset, options["shuffle"] = DATASETS[choice](draw), True
        elif choice:
            options["sampler"] = NAMES[choice]
        if dataset is None:
            dataset = Noisy(LENGTH if choice else 8, draw)
        if "batch_sampler" in options:
            options.pop("batch_size", None)
        else:
            options = {"batch_size": 3, **options}
        if not options.get("num_workers"):
            options.pop("persistent_workers", None)
        return kind(dataset, **{"collate_fn": list, **own, **options})

    seeding = {"dataloader": {"seeding": "auto"}} if way == "auto" else {}
    with torchrepro.apply({"seed": 5, **seeding, **profile}):
        yield make


def epoch(loader: Iterable[Any]) -> list[Any]:
    """Return the samples of an epoch."""
    return list(chain(*loader))


def order(samples: Iterable[Any]) -> list[Any]:
    """Return the indices of these samples."""
    return [sample[0] for sample in samples]


def drawn(samples: Iterable[Any]) -> list[Any]:
    """Return the drawn numbers of these samples."""
    return [sample[1] for sample in samples]


def some(loader: Any) -> Any:
    """Load two batches, and stop within the epoch."""
    batches = iter(loader)
    return next(batches), next(batches)


def fails(loader: Any) -> None:
    """Load until the dataset or the sampler raises."""
    batches = None
    with pytest.raises(OSError, match="no such picture"):  # noqa: PT012 - either line raises it
        batches = iter(loader)
        list(batches)
    if loader.num_workers and batches is not None:
        batches._shutdown_workers()  # torch waits 5 s for each if it finds them as garbage
