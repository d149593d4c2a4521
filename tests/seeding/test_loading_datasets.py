"""What a sample draws, whatever dataset it comes from and whatever names it."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

import torchrepro


def draws() -> tuple[float, ...]:
    """Draw from each generator that a sample may use."""
    return random.random(), np.random.random(), torch.rand(()).item()


class Noisy(Dataset[Any]):
    """A sample is what names it and what the generators gave, whatever names it."""

    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return index, draws()


class Rows(Noisy):
    """A dataset that reads a whole batch at once, as one of Hugging Face's does."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [(index, draws()) for index in indices]


@dataclass(frozen=True)
class Picture:
    """What names a sample, and says so."""

    number: int


class Anonymous:
    """What names a sample, and is shown by its address."""


@pytest.fixture(autouse=True)
def _profile() -> Iterator[None]:
    with torchrepro.apply({"seed": 5}):
        yield


def _loader(dataset: Any = None, name: str = "train", **options: Any) -> Any:
    kwargs = torchrepro.dataloader_kwargs(name)
    defaults = {} if "batch_sampler" in options else {"batch_size": 4}
    options = {"collate_fn": list, **defaults, **options}
    return DataLoader(dataset if dataset is not None else Noisy(), **options, **kwargs)


def _samples(loader: Any) -> list[Any]:
    return list(chain(*loader))


WRAPPED: dict[str, Callable[[], Any]] = {
    "a subset": lambda: Subset(Noisy(), range(5, 15)),
    "a subset of a subset": lambda: Subset(Subset(Noisy(), range(5, 25)), range(3, 12)),
    "two in a row": lambda: ConcatDataset([Noisy(7), Noisy(5)]),
    "a subset of two in a row": lambda: Subset(ConcatDataset([Noisy(7), Noisy(5)]), range(3, 11)),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_wrapped_dataset_draws_for_each_sample(kind: str) -> None:
    """Subsets and concatenations draw for every sample: the same on workers in any batches."""
    here = _loader(WRAPPED[kind](), shuffle=True, batch_size=1)
    there = _loader(WRAPPED[kind](), shuffle=True, batch_size=3, num_workers=2)
    found = _samples(here)

    assert found == _samples(there)
    assert len({drawn for _, drawn in found}) == len(found)


@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: Subset(rows, range(3, 20))])
def test_a_dataset_that_reads_whole_batches_draws_for_each_batch(wrap: Any) -> None:
    """With `__getitems__` a batch draws what it draws, the same on any number of workers."""
    here, there = (_loader(wrap(Rows()), shuffle=True, num_workers=count) for count in (0, 2))
    found = list(here)

    assert found == list(there)
    assert len({drawn for _, drawn in chain(*found)}) == sum(map(len, found))


def test_a_dataset_that_draws_nothing_comes_in_the_seeded_order() -> None:
    """Tensors come shuffled by (seed, name, epoch), whole in every epoch, collated as ever."""
    tensors = TensorDataset(torch.arange(20), torch.arange(20) * 2)
    orders = []
    for workers in (0, 2):
        kwargs = torchrepro.dataloader_kwargs("train")
        loader = DataLoader(tensors, 4, shuffle=True, num_workers=workers, **kwargs)
        orders.append([torch.cat([x for x, _ in loader]).tolist() for _ in range(2)])
    (first, second), again = orders

    assert [first, second] == again
    assert first != second
    assert sorted(first) == sorted(second) == list(range(20))


NAMES = {
    "texts": ["a", "b", "c"],
    "tuples": [("a", 1), ("a", 2), ("b", (1, 2))],
    "numbers of numpy": list(np.arange(3)),
    "numbers of torch": list(torch.arange(3)),
    "objects that say what they are": [Picture(1), Picture(2), Picture(3)],
}


@pytest.mark.parametrize("kind", NAMES)
def test_whatever_names_a_sample_decides_what_it_draws(kind: str) -> None:
    """Samples named by texts, tuples or numbers draw the same on workers, and each its own."""
    here, there = (_loader(sampler=NAMES[kind], num_workers=count) for count in (0, 1))
    found = [drawn for _, drawn in _samples(here)]

    assert found == [drawn for _, drawn in _samples(there)]
    assert len(set(found)) == 3


def test_one_number_names_one_sample_whatever_type_it_has() -> None:
    """The sample 2 draws the same whether it is named by an int, numpy or torch."""
    kinds = [[2], [np.int64(2)], [np.uint8(2)], [torch.tensor(2)]]
    found = [[drawn for _, drawn in _samples(_loader(sampler=names))] for names in kinds]

    assert found == [found[0]] * 4


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "name",
    [Anonymous(), ("a", Anonymous()), {"id": Anonymous()}],
    ids=["alone", "in a tuple", "in a dict"],
)
def test_a_name_that_is_an_address_is_refused(name: Any, workers: int) -> None:
    """What is shown by its address, another in every process, names no sample: an error says so."""
    with pytest.raises(torchrepro.SeedingError, match="text differs between processes"):
        list(_loader(sampler=[name], num_workers=workers))


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_batches_named_by_arrays_draw_for_all_that_is_in_them(kind: Any) -> None:
    """Two long arrays that differ in one number are two batches, and draw other numbers."""
    one, two = list(range(1500)), list(range(1500))
    two[700] = 3
    loader = _loader(Rows(), batch_sampler=[kind(one), kind(two), kind([4])])
    drawn = [batch[0][1] for batch in loader]

    assert len(set(drawn)) == 3
