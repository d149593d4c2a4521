"""No two streams share a seed or a beginning, in numbers that a run can reach."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, product

import numpy as np
import numpy.typing as npt
import pytest
import torch

from torchrepro.seeding.streams import Stream, derive

Words = npt.NDArray[np.uint64]


def _torch(stream: Stream) -> int:
    drawn = torch.empty(1, dtype=torch.int64).random_(-(2**63), None, generator=stream.torch())
    return drawn.item() % 2**64


BEGINNINGS: dict[str, Callable[[Stream], int]] = {
    "python": lambda stream: stream.python().getrandbits(64),
    "numpy": lambda stream: stream.numpy().bit_generator.random_raw(),
    "numpy_legacy": lambda stream: int.from_bytes(stream.numpy_legacy().bytes(8), "little"),
    "torch": _torch,
}
"""The first 64 bits that each library draws from a stream."""


def _grid(numbers: range) -> Iterator[tuple[int, int, int, int, str]]:
    """Neighbouring coordinates: steps, 10 epochs, 10 workers, 10 ranks and 4 names."""
    names = ("init", "augment", "dropout", "split")
    steps = range(numbers.stop // 4000 + 1)
    places = product(steps, range(10), range(10), range(10), names)
    return islice(places, numbers.start, numbers.stop)


def _streams(numbers: range) -> Iterator[Stream]:
    for step, epoch, worker, rank, name in _grid(numbers):
        yield derive(name, 1234, rank, worker, epoch, step)


def _seeds(numbers: range) -> Words:
    return np.fromiter((s.seed64 for s in _streams(numbers)), np.uint64, len(numbers))


def _beginnings(library: str, numbers: range) -> Words:
    return np.fromiter(map(BEGINNINGS[library], _streams(numbers)), np.uint64, len(numbers))


def _on_every_core(work: Callable[[range], Words], count: int) -> Words:
    cores = len(os.sched_getaffinity(0))
    size = -(-count // (8 * cores))
    pieces = [range(start, min(start + size, count)) for start in range(0, count, size)]
    with multiprocessing.get_context("fork").Pool(cores) as pool:
        return np.concatenate(pool.map(work, pieces, chunksize=1))


def _repeated(values: Words) -> int:
    """How many of `values` repeat an earlier one; sorts them."""
    values.sort()
    return int((values[1:] == values[:-1]).sum())


def test_derived_seeds_differ() -> None:
    """200,000 streams of neighbouring coordinates have as many seeds of 64 bits."""
    assert _repeated(_seeds(range(200_000))) == 0


@pytest.mark.parametrize("library", BEGINNINGS)
def test_streams_begin_differently(library: str) -> None:
    """20,000 streams differ in the first 64 bits drawn, whichever library draws."""
    assert _repeated(_beginnings(library, range(20_000))) == 0


def test_the_published_scheme_collides_where_ours_does_not() -> None:
    """rank*100000 + worker*10000 + seed repeats itself from 10 workers on; streams do not.

    The formula is the one that people publish for `worker_init_fn`.
    """

    def published(rank: int, worker: int, seed: int) -> int:
        return rank * 100_000 + worker * 10_000 + seed

    def ours(rank: int, worker: int, seed: int) -> int:
        return derive("augment", seed, rank, worker).seed64

    grid = list(product(range(8), range(16), range(40)))
    theirs = {published(*place) for place in grid}

    assert published(0, 10, 0) == published(1, 0, 0)
    assert ours(0, 10, 0) != ours(1, 0, 0)
    assert (len(theirs), len({ours(*place) for place in grid})) == (3440, len(grid))


@pytest.mark.slow
def test_ten_million_seeds_collide_as_rarely_as_chance_has_it() -> None:
    """10**7 seeds differ at 64 bits, and at 32 repeat within 4 sigma of what chance expects."""
    count = 10**7
    seeds = _on_every_core(_seeds, count)
    low = (seeds & np.uint64(2**32 - 1)).astype(np.uint32)
    at_64, at_32 = _repeated(seeds), _repeated(low)
    # Expected number of values drawn before: count - distinct, whose variance is about its mean.
    expected = count + 2**32 * np.expm1(count * np.log1p(-(2.0**-32)))
    sigma = (at_32 - expected) / np.sqrt(expected)

    assert at_64 == 0
    assert abs(sigma) <= 4


@pytest.mark.slow
@pytest.mark.parametrize("library", BEGINNINGS)
def test_many_streams_begin_differently(library: str) -> None:
    """300,000 streams differ in the first 64 bits drawn, whichever library draws.

    Of 32 bits as many would repeat one: ten pairs are expected.
    """
    assert _repeated(_on_every_core(partial(_beginnings, library), 300_000)) == 0
