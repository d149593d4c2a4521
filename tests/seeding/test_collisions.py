"""No two streams share a seed or a beginning, in numbers that a run can reach."""

from collections.abc import Callable, Iterator
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


def _streams(count: int) -> Iterator[Stream]:
    """Of neighbouring coordinates: steps, 10 epochs, 10 workers, 10 ranks and 4 names."""
    names = ("init", "augment", "dropout", "split")
    places = product(range(count // 4000 + 1), range(10), range(10), range(10), names)
    for step, epoch, worker, rank, name in islice(places, count):
        yield derive(name, 1234, rank, worker, epoch, step)


def _repeated(values: Words) -> int:
    """How many of `values` repeat an earlier one; sorts them."""
    values.sort()
    return int((values[1:] == values[:-1]).sum())


def test_seeds_collide_as_rarely_as_chance_has_it() -> None:
    """10**6 seeds differ at 64 bits, and at 32 repeat within 4 sigma of what chance expects."""
    count = 10**6
    seeds = np.fromiter((stream.seed64 for stream in _streams(count)), np.uint64, count)
    low = (seeds & np.uint64(2**32 - 1)).astype(np.uint32)
    at_64, at_32 = _repeated(seeds), _repeated(low)
    # Expected number of values drawn before: count - distinct, whose variance is about its mean.
    expected = count + 2**32 * np.expm1(count * np.log1p(-(2.0**-32)))
    sigma = (at_32 - expected) / np.sqrt(expected)

    assert at_64 == 0
    assert abs(sigma) <= 4


@pytest.mark.parametrize("library", BEGINNINGS)
def test_streams_begin_differently(library: str) -> None:
    """20,000 streams differ in the first 64 bits drawn, whichever library draws."""
    drawn = np.fromiter(map(BEGINNINGS[library], _streams(20_000)), np.uint64, 20_000)

    assert _repeated(drawn) == 0


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
