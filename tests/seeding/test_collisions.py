"""No two streams share a seed or a beginning, in numbers that a run can reach."""

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import blake2b
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
import torch

from torchrepro.seeding.streams import Stream, derive

DRAWS = 16
Words = npt.NDArray[np.uint64]


def _python(stream: Stream) -> bytes:
    return stream.python().getrandbits(32 * DRAWS).to_bytes(4 * DRAWS, "little")


def _numpy(stream: Stream) -> bytes:
    return stream.numpy().bit_generator.random_raw(DRAWS).tobytes()


def _numpy_legacy(stream: Stream) -> bytes:
    return stream.numpy_legacy().bytes(4 * DRAWS)


def _torch(stream: Stream) -> bytes:
    return torch.randint(2**31, (DRAWS,), generator=stream.torch()).numpy().tobytes()


BEGINNINGS: dict[str, Callable[[Stream], bytes]] = {
    "python": _python,
    "numpy": _numpy,
    "numpy_legacy": _numpy_legacy,
    "torch": _torch,
}


def _grid(numbers: Iterable[int]) -> Iterator[Stream]:
    """Streams of neighbouring coordinates: 4 names, 10 ranks, 10 workers, 10 epochs, steps."""
    names = ("init", "augment", "dropout", "split")
    for number in numbers:
        rest, name = divmod(number, 4)
        rest, rank = divmod(rest, 10)
        rest, worker = divmod(rest, 10)
        step, epoch = divmod(rest, 10)
        yield derive(names[name], 1234, rank, worker, epoch, step)


def _seeds(numbers: range) -> Words:
    return np.fromiter((s.seed64 for s in _grid(numbers)), np.uint64, len(numbers))


def _hashes(name: str, numbers: range) -> Words:
    """64 bits for the first 16 draws of each stream."""
    return _hashed(map(BEGINNINGS[name], _grid(numbers)), len(numbers))


def _hashed(beginnings: Iterable[bytes], count: int) -> Words:
    digests = (blake2b(beginning, digest_size=8).digest() for beginning in beginnings)
    return np.fromiter((int.from_bytes(d, "little") for d in digests), np.uint64, count)


def _hashes_of_numpy_legacy(numbers: range) -> Words:
    """The same for numpy's MT19937, many streams at a time: alone each takes it 0.1 ms.

    MT19937 fills its key from the pool of a `SeedSequence` (`generate_state`, whose constants are
    0x8B51F9DD and 0x58F38DED), starts at the last word of it, and then twists.
    """
    entropies = (stream.entropy("numpy_legacy") for stream in _grid(numbers))
    pools = np.array([np.random.SeedSequence(entropy).pool for entropy in entropies])
    factors = [0x8B51F9DD]
    for _ in range(624):
        factors.append(factors[-1] * 0x58F38DED & 0xFFFFFFFF)

    def key(index: int) -> npt.NDArray[np.uint32]:
        if index == 0:
            return np.full(len(pools), 0x80000000, np.uint32)
        word = (pools[:, index % 4] ^ np.uint32(factors[index])) * np.uint32(factors[index + 1])
        return word ^ (word >> 16)

    def twisted(index: int) -> npt.NDArray[np.uint32]:
        pair = (key(index) & 0x80000000) | (key(index + 1) & 0x7FFFFFFF)
        return key(index + 397) ^ (pair >> 1) ^ ((pair & 1) * np.uint32(0x9908B0DF))

    draws = np.stack([key(623), *map(twisted, range(DRAWS - 1))], axis=1)
    draws ^= draws >> 11
    draws ^= (draws << 7) & 0x9D2C5680
    draws ^= (draws << 15) & 0xEFC60000
    draws ^= draws >> 18
    return _hashed(map(np.ndarray.tobytes, draws), len(numbers))


def _on_every_core(work: Callable[[range], Words], count: int) -> Words:
    """The result of `work` for 0 to `count`, a piece of it at a time on each core."""
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
    """20,000 streams differ in their first 16 draws, whichever library draws."""
    assert _repeated(_hashes(library, range(20_000))) == 0


def test_many_streams_of_numpy_legacy_begin_as_each_alone_does() -> None:
    """What is worked out for many streams at a time is what each of them draws."""
    numbers = range(5_000, 7_000)

    assert np.array_equal(_hashes_of_numpy_legacy(numbers), _hashes("numpy_legacy", numbers))


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
def test_a_million_streams_begin_differently(library: str) -> None:
    """10**6 streams differ in their first 16 draws, whichever library draws."""
    hashes = _hashes_of_numpy_legacy if library == "numpy_legacy" else partial(_hashes, library)

    assert _repeated(_on_every_core(hashes, 10**6)) == 0
