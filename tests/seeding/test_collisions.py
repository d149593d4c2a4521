"""No two streams share a seed or a beginning, in numbers that a run can reach."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b
from itertools import islice, product

import numpy as np
import numpy.typing as npt
import pytest
import torch

from torchrepro.seeding.streams import Stream, derive

Words = npt.NDArray[np.uint64]
Halves = npt.NDArray[np.uint32]


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


# What follows works out many streams at a time, which alone take up to 0.3 ms each.


def _many_seeds(numbers: range) -> Words:
    keys = (
        blake2b(f"torchrepro/1/stream/1234/{rank}/{worker}/{epoch}/{step}/{name}".encode()).digest()
        for step, epoch, worker, rank, name in _grid(numbers)
    )
    return np.frombuffer(b"".join(key[:8] for key in keys), np.uint64)


def _material(purpose: str, numbers: range, words: int) -> Halves:
    drawn = b"".join(stream.bytes(purpose, 4 * words) for stream in _streams(numbers))
    return np.frombuffer(drawn, "<u4").reshape(-1, words)


def _seed_sequence(entropy: Halves) -> Callable[[int], Halves]:
    """The words of `SeedSequence.generate_state`, by their index; its entropy has 256 bits."""
    factor = 0x43B0D7E5

    def hashed(word: Halves, by: int = 0x931E8875) -> Halves:
        nonlocal factor
        word = word ^ np.uint32(factor)
        factor = factor * by & 0xFFFFFFFF
        word = word * np.uint32(factor)
        return word ^ (word >> 16)

    def mixed(into: Halves, word: Halves) -> Halves:
        word = into * np.uint32(0xCA01F9DD) - hashed(word) * np.uint32(0x4973F715)
        return word ^ (word >> 16)

    pool = [hashed(entropy[:, index]) for index in range(4)]
    for source, into in product(range(4), range(4)):
        if source != into:
            pool[into] = mixed(pool[into], pool[source])
    for source, into in product(range(4, 8), range(4)):
        pool[into] = mixed(pool[into], entropy[:, source])
    factors = [0x8B51F9DD]
    for _ in range(624):
        factors.append(factors[-1] * 0x58F38DED & 0xFFFFFFFF)

    def word(index: int) -> Halves:
        found = (pool[index % 4] ^ np.uint32(factors[index])) * np.uint32(factors[index + 1])
        return found ^ (found >> 16)

    return word


def _twisted(word: Callable[[int], Halves], index: int) -> Halves:
    """A word of MT19937 after its first twist, from the words before it; the first has one bit."""
    above = word(index) & 0x80000000 if index else np.uint32(0x80000000)
    pair = above | (word(index + 1) & 0x7FFFFFFF)
    return word(index + 397) ^ (pair >> 1) ^ ((pair & 1) * np.uint32(0x9908B0DF))


def _tempered(draws: Halves) -> Words:
    draws = draws ^ (draws >> 11)
    draws ^= (draws << 7) & 0x9D2C5680
    draws ^= (draws << 15) & 0xEFC60000
    return (draws ^ (draws >> 18)).astype(np.uint64)


def _many_of_numpy(numbers: range) -> Words:
    """PCG64 steps once as it is seeded, and once for each draw."""
    word = _seed_sequence(_material("numpy", numbers, 8))
    halves = [(word(2 * n) | word(2 * n + 1).astype(np.uint64) << 32).tolist() for n in range(4)]
    multiplier, all_ones, drawn = 0x2360ED051FC65DA44385DF649FCCF645, 2**64 - 1, []
    for start_high, start_low, step_high, step_low in zip(*halves, strict=True):
        step = (step_high << 64 | step_low) << 1 | 1
        state = ((step + (start_high << 64 | start_low)) * multiplier + step) * multiplier + step
        high, low = state >> 64 & all_ones, state & all_ones
        by, bits = high >> 58, high ^ low
        drawn.append((bits >> by | bits << 64 - by) & all_ones)
    return np.array(drawn, np.uint64)


def _many_of_numpy_legacy(numbers: range) -> Words:
    word = _seed_sequence(_material("numpy_legacy", numbers, 8))
    return _tempered(word(623)) | _tempered(_twisted(word, 0)) << 32


def _many_of_torch(numbers: range) -> Words:
    material = _material("torch", numbers, 399)
    first, second = (_twisted(lambda index: material[:, index], index) for index in range(2))
    return _tempered(first) << 32 | _tempered(second)


MANY = {
    "python": partial(_beginnings, "python"),
    "numpy": _many_of_numpy,
    "numpy_legacy": _many_of_numpy_legacy,
    "torch": _many_of_torch,
}


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
    numbers = range(200_000)
    seeds = _seeds(numbers)

    assert np.array_equal(_many_seeds(numbers), seeds)
    assert _repeated(seeds) == 0


@pytest.mark.parametrize("library", BEGINNINGS)
def test_streams_begin_differently(library: str) -> None:
    """20,000 streams differ in the first 64 bits drawn, whichever library draws.

    What is worked out for many streams at a time is what each of them draws.
    """
    numbers = range(20_000)
    beginnings = _beginnings(library, numbers)

    assert np.array_equal(MANY[library](numbers), beginnings)
    assert _repeated(beginnings) == 0


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
    seeds = _on_every_core(_many_seeds, count)
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
    """10**6 streams differ in the first 64 bits drawn, whichever library draws."""
    assert _repeated(_on_every_core(MANY[library], 10**6)) == 0
