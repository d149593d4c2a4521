"""Streams: their numbers are fixed, any two are independent, and wrong arguments are refused."""

import math
import random
from collections.abc import Callable, Iterator
from itertools import islice, product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, get_worker_info

import torchrepro
from torchrepro.seeding import streams
from torchrepro.seeding.streams import WORDS, Stream, derive, seed_of_rank

NAMES = st.text(st.characters(exclude_categories=()), min_size=1)
NUMBERS = st.one_of(st.integers(0, 12), st.integers(0, 2**63 - 1))
COORDINATES = st.tuples(
    NAMES, st.integers(0, 2**32 - 1), NUMBERS, *[st.none() | NUMBERS for _ in range(3)]
)


def first_numbers(stream: Stream) -> tuple[float, ...]:
    """Return the first number that each library draws from `stream`."""
    drawn = torch.rand((), dtype=torch.float64, generator=stream.torch()).item()
    legacy = stream.numpy_legacy().random_sample()
    return stream.python().random(), stream.numpy().random(), legacy, drawn


@settings(max_examples=400)
@given(one=COORDINATES, other=COORDINATES, place=st.integers(0, 5))
def test_every_coordinate_changes_the_stream(one: Any, other: Any, place: int) -> None:
    """Streams that differ in any coordinate have different keys and seeds."""
    moved = (*one[:place], other[place], *one[place + 1 :])
    for different in (moved, other):
        assume(different != one)
        assert derive(*one).key != derive(*different).key
        assert derive(*one).seed64 != derive(*different).seed64


def _streams(count: int) -> Iterator[Stream]:
    """Return neighbouring streams: steps, 10 epochs, 10 workers, 10 ranks, 4 names."""
    names = ("init", "augment", "dropout", "split")
    places = product(range(count // 4000 + 1), range(10), range(10), range(10), names)
    for step, epoch, worker, rank, name in islice(places, count):
        yield derive(name, 1234, rank, worker, epoch, step)


def _repeated(values: npt.NDArray[Any]) -> int:
    return len(values) - len(np.unique(values))


@pytest.mark.slow
def test_seeds_collide_only_as_often_as_random_numbers() -> None:
    """10**6 seeds differ at 64 bits, and at 32 bits repeat within 4 sigma of the expectation."""
    count = 10**6
    seeds = np.fromiter((stream.seed64 for stream in _streams(count)), np.uint64, count)
    # Expected number of values drawn before: count - distinct, whose variance is about its mean.
    expected = count + 2**32 * np.expm1(count * np.log1p(-(2.0**-32)))

    assert _repeated(seeds) == 0
    assert abs(_repeated(seeds % np.uint64(2**32)) - expected) <= 4 * np.sqrt(expected)


def test_streams_begin_differently() -> None:
    """3,000 streams differ in the first number of every library."""
    for numbers in zip(*map(first_numbers, _streams(3000)), strict=True):
        assert len(set(numbers)) == 3000


@given(where=COORDINATES, kinds=st.lists(st.sampled_from(["stream", "order", "rank", "loader"])))
def test_equal_coordinates_give_equal_streams(where: Any, kinds: list[str]) -> None:
    """A stream depends only on its coordinates and its kind."""
    for kind in kinds:
        assert derive(*where, kind=kind) == derive(*where, kind=kind)
    assert len({derive(*where, kind=kind).key for kind in kinds}) == len(set(kinds))


def test_similar_names_are_different_names() -> None:
    """Case, spaces, accents, slashes and unencodable characters all count."""
    alike = ["a", "A", " a", "a/", "a/None", "\u00e9", "e\u0301", "?", "\udc80", "\udc81", "\ufffd"]

    assert len({derive(name, 0).key for name in alike}) == len(alike)


@given(where=COORDINATES)
def test_every_generator_starts_from_more_than_128_bits(where: Any) -> None:
    """numpy's and Python's generators start from 256 bits, whose first bit is not always 0."""
    stream = derive(*where)
    own = (stream.numpy().bit_generator, stream.numpy_legacy()._bit_generator)
    entropy = [generator.seed_seq.entropy for generator in own] + [stream.entropy("python")]

    assert min(map(int.bit_length, entropy)) > 128
    assert len(set(entropy)) == 3
    assert stream.python().getstate() == random.Random(entropy[2]).getstate()


@given(where=COORDINATES)
def test_torch_starts_from_its_whole_state(where: Any) -> None:
    """`.torch()` derives all 624 words of the state, so no `manual_seed` reaches it."""
    stream = derive(*where)
    generator = stream.torch()
    state = generator.get_state().numpy().copy()
    words = state[24 : 24 + 8 * WORDS].view(np.uint64)

    assert generator.initial_seed() == stream.seed64
    assert words[0] == 2**31
    assert np.array_equal(words[1:], np.frombuffer(stream.bytes("torch", 4 * WORDS), "<u4")[1:])
    for seed in (stream.seed64, stream.seed):
        seeded = torch.Generator().manual_seed(seed).get_state().numpy()
        assert not np.array_equal(seeded[24 : 24 + 8 * WORDS], state[24 : 24 + 8 * WORDS])


@given(where=COORDINATES)
def test_a_stream_has_no_state(where: Any) -> None:
    """Draws from its generators move neither the stream nor any global generator."""
    stream = derive(*where)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()

    assert first_numbers(stream) == first_numbers(stream)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()


@given(
    seed=st.integers(0, 2**32 - 1),
    own=st.integers(0, 2**32 - 1),
    name=NAMES.filter(lambda name: name != "split"),
)
@settings(max_examples=25)
def test_a_seed_for_one_stream_changes_only_that_stream(seed: int, own: int, name: str) -> None:
    """`streams: {split: 3}` gives the stream `split` that root, and no other stream."""
    with torchrepro.apply({"seed": own}):
        elsewhere = torchrepro.stream("split")
    with torchrepro.apply({"seed": seed}):
        usual = torchrepro.stream(name)
    with torchrepro.apply({"seed": seed, "streams": {"split": own}}):
        assert torchrepro.stream("split") == elsewhere
        assert torchrepro.stream(name) == usual
    with torchrepro.apply({"streams": {"split": own}}):
        assert torchrepro.stream("split") == elsewhere


FAR = {"rank": 1023, "worker": 15, "epoch": 99, "step": 2**63 - 1}
# fmt: off
KNOWN: list[tuple[int, str, dict[str, int], int, tuple[float, float, float, float]]] = [
    # seed, name, coordinates, seed64, first number of python, numpy, numpy_legacy, torch
    (0, "split", {}, 16586533184977876259,
     (0.44907535361715134, 0.11809299195312983, 0.3912281574119365, 0.17156468827386717)),
    (1234, "split", {}, 12866239345983445672,
     (0.8543210115460255, 0.553604734956002, 0.10589783109684991, 0.6263341391289424)),
    (4294967295, "split", {}, 6826111622816896034,
     (0.4998397723651511, 0.9398095752875026, 0.07081178947713274, 0.4507352634891667)),
    (0, "init", {"rank": 1}, 12466870200353869752,
     (0.45857772687865583, 0.6340926439588547, 0.16056399468373206, 0.6880048421596868)),
    (1234, "init", {"rank": 1}, 1570502103634312387,
     (0.6884813110326141, 0.17388574484033592, 0.49272213959363464, 0.7734277065353115)),
    (1234, "augment", {"rank": 7, "worker": 0}, 1800386925479895387,
     (0.7523858339384185, 0.357354424769327, 0.8059399926043339, 0.7778767524497538)),
    (1234, "augment", {"rank": 7, "worker": 3}, 12081782742226279474,
     (0.16273688518299712, 0.7681590356960964, 0.7918679830531768, 0.4162362354454717)),
    (1234, "augment", {"epoch": 0}, 9733927128449484574,
     (0.39475076312205715, 0.6850879727956581, 0.03701932624980242, 0.7090879513122456)),
    (1234, "augment", {"epoch": 12, "step": 345}, 10089258933990844965,
     (0.27250126855307466, 0.6272163578785485, 0.5756161315731305, 0.7930607806911703)),
    (1234, "augment", FAR, 13002262869825920581,
     (0.7378764692840016, 0.2899040031193749, 0.00017522918032486512, 0.8144438984041636)),
    (1234, "Zufällig 乱数 🎲", {}, 8430673246421105631,
     (0.23348466387047373, 0.8202841401055181, 0.5538610441543074, 0.7476529152739831)),
    (20261121, "a/b None", {"step": 0}, 18274432962580697626,
     (0.5269932134504974, 0.11030343499661499, 0.9675762620860924, 0.07182816376989154)),
]
# fmt: on
@pytest.mark.parametrize(("seed", "name", "where", "seed64", "numbers"), KNOWN)
def test_the_numbers_of_a_stream_are_fixed(
    seed: int, name: str, where: dict[str, int], seed64: int, numbers: tuple[float, ...]
) -> None:
    """Seed, name and coordinates fix every number, on any machine and in any version.

    0 and 2**32-1 are valid seeds, for a strict profile too.
    """
    with torchrepro.apply({"seed": seed, "guarantee": "repeatable"}):
        stream = torchrepro.stream(name, **where)

    assert (stream.seed64, stream.seed) == (seed64, seed64 % 2**32)
    assert numbers == first_numbers(stream)


def test_the_seeds_of_ranks_are_fixed() -> None:
    """Each rank always derives the same seed of its global generators."""
    ranks = [seed_of_rank(1234, rank) for rank in (0, 1, 2, 1023)]

    assert ranks == [1234, 1444415726, 691450759, 2642327485]


ARGUMENTS = ("rank", "worker", "epoch", "step")
LEGAL = "a whole number, 0 to 9223372036854775807"
BAD = {  # value, how a message shows it
    "negative": (-1, "-1"),
    "just too large": (2**63, "9223372036854775808"),
    "too large to write": (10**5000, "a number of thousands of digits"),
    "a truth": (True, "true"),
    "a truth of numpy": (np.True_, "True"),
    "a truth of torch": (torch.tensor(True), "tensor(True)"),
    "a float": (1.0, "1.0"),
    "a float of numpy": (np.float64(1), "1.0"),
    "a float of torch": (torch.tensor(1.0), "tensor(1.)"),
    "not a number": (math.nan, "nan"),
    "infinite": (math.inf, "inf"),
    "text": ("one", "one"),
    "text that looks like a number": ("1", "= '1'"),
    "a long text": ("1" * 10_000, "1111"),
    "bytes": (b"1", "b'1'"),
    "a list": ([1], "[1]"),
    "an array": (np.array([1, 2]), "array([1, 2])"),
    "a tensor": (torch.tensor([1, 2]), "tensor([1, 2])"),
    "a negative of numpy": (np.int64(-1), "-1"),
}
GOOD = {
    "numpy, signed": np.int8(7),
    "numpy, unsigned": np.uint64(7),
    "numpy, no dimensions": np.array(7),
    "torch": torch.tensor(7),
    "torch, 8 bits": torch.tensor(7, dtype=torch.uint8),
}
NO_NAMES = {"empty": "", "null": None, "a number": 3, "bytes": b"split", "a list": ["split"]}


@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("case", BAD)
def test_a_bad_coordinate_is_refused(
    argument: str, case: str, seed_1234: Any, generators: Callable[[], Any]
) -> None:
    """The message names argument, value and legal values; nothing changes."""
    value, words = BAD[case]
    before = generators()

    with pytest.raises(torchrepro.SeedingError) as refused:
        torchrepro.stream("augment", **{argument: value})

    message = str(refused.value)
    assert message.startswith(f"{argument} = ")
    assert words in message
    assert LEGAL in message
    assert len(message) < 200
    assert before == generators()


def test_a_refused_call_does_not_count_as_a_draw() -> None:
    """A stream with a seed in the profile still counts as unused after a refused call."""
    with torchrepro.apply({"seed": 1, "streams": {"augment": 3}}):
        with pytest.raises(torchrepro.SeedingError):
            torchrepro.stream("augment", rank=-1)
        assert streams.unused_streams() == ("augment",)
        torchrepro.stream("augment", rank=1)
        assert streams.unused_streams() == ()


@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("case", GOOD)
def test_integers_of_numpy_and_torch_are_accepted(argument: str, case: str, seed_1234: Any) -> None:
    """They give the same stream as the equal int."""
    given = torchrepro.stream("augment", **{argument: GOOD[case]})

    assert given == torchrepro.stream("augment", **{argument: 7})


@pytest.mark.parametrize("name", NO_NAMES.values(), ids=NO_NAMES)
def test_an_invalid_name_is_refused(name: Any, seed_1234: Any) -> None:
    """The name of a stream is a text that is not empty."""
    with pytest.raises(torchrepro.SeedingError, match=r"name = .*: not the name of a stream"):
        torchrepro.stream(name)


@pytest.mark.parametrize("profile", [None, {}, {"dropout": "keep"}, {"streams": {"split": 3}}])
def test_without_a_profile_streams_derive_from_the_programs_seed(profile: Any) -> None:
    """They equal the streams of a profile with torch's seed."""
    with torchrepro.isolated_rng():
        torch.manual_seed(77)
        found = {torchrepro.stream("augment")}
        if profile is not None:
            with torchrepro.apply(profile):
                found.add(torchrepro.stream("augment"))
        with torchrepro.apply({"seed": 1}):
            other = torchrepro.stream("augment")
        found.add(torchrepro.stream("augment"))
        with torchrepro.apply({"seed": 77}):
            found.add(torchrepro.stream("augment"))

    assert len(found) == 1
    assert other not in found


@pytest.mark.parametrize("device", ["nonsense", "meta", [], "cpu:7:8"])
def test_a_missing_device_is_refused(device: Any, seed_1234: Any) -> None:
    """The message names the device that this torch does not have."""
    with pytest.raises(torchrepro.SeedingError) as refused:
        torchrepro.stream("augment").torch(device)

    assert str(device) in str(refused.value)
    assert "no generator for this device" in str(refused.value)


class Workers(Dataset[list[int]]):
    """Samples with the number of their worker and the seeds of its streams."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> list[int]:
        info = get_worker_info()
        given_0 = torchrepro.stream("augment", worker=0)
        return [info.id if info else -1, torchrepro.stream("augment").seed, given_0.seed]


def test_the_default_worker_is_the_present_one(seed_1234: Any) -> None:
    """In a data-loading worker a stream is that worker's; the main process has no number."""
    loader = DataLoader(Workers(), num_workers=2, multiprocessing_context="fork", batch_size=None)
    expected = {worker: torchrepro.stream("augment", worker=worker).seed for worker in (0, 1)}
    first = expected[0]

    for worker, found, given_0 in loader:
        assert (found, given_0) == (expected[worker], first)
    assert Workers()[0] == [-1, torchrepro.stream("augment").seed, first]
    assert torchrepro.stream("augment").seed not in expected.values()
