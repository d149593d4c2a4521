"""Streams: what each gives is fixed for ever, and no two of them share anything."""

import random
from typing import Any

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.model_selection import train_test_split

import torchrepro
from torchrepro.seeding.streams import WORDS, Stream, derive

NAMES = st.text(st.characters(exclude_categories=()), min_size=1)
NUMBERS = st.one_of(st.integers(0, 12), st.integers(0, 2**63 - 1))
COORDINATES = st.tuples(
    NAMES, st.integers(0, 2**32 - 1), NUMBERS, *[st.none() | NUMBERS for _ in range(3)]
)


def first_numbers(stream: Stream) -> tuple[float, float, float, float]:
    """The first number that each library draws from `stream`."""
    drawn = torch.rand((), dtype=torch.float64, generator=stream.torch()).item()
    legacy = stream.numpy_legacy().random_sample()
    return stream.python().random(), stream.numpy().random(), legacy, drawn


@settings(max_examples=400)
@given(one=COORDINATES, other=COORDINATES, place=st.integers(0, 5))
def test_every_coordinate_matters(one: Any, other: Any, place: int) -> None:
    """Streams that differ in any coordinate, however little, have other keys and seeds."""
    moved = (*one[:place], other[place], *one[place + 1 :])
    for different in (moved, other):
        assume(different != one)
        assert derive(*one).key != derive(*different).key
        assert derive(*one).seed64 != derive(*different).seed64


@given(where=COORDINATES, kinds=st.lists(st.sampled_from(["stream", "order", "rank", "loader"])))
def test_equal_coordinates_give_equal_streams(where: Any, kinds: list[str]) -> None:
    """A stream depends on its coordinates and its kind, and on nothing else."""
    for kind in kinds:
        assert derive(*where, kind=kind) == derive(*where, kind=kind)
    assert len({derive(*where, kind=kind).key for kind in kinds}) == len(set(kinds))


@given(where=COORDINATES)
def test_the_seed_is_the_low_half_of_seed64(where: Any) -> None:
    """`seed` has 32 bits, `seed64` 64, and the entropy is in the low ones of both."""
    stream = derive(*where)

    assert 0 <= stream.seed < 2**32
    assert 0 <= stream.seed64 < 2**64
    assert stream.seed64 % 2**32 == stream.seed


def test_names_that_look_alike_are_different_names() -> None:
    """Case, spaces, accents, slashes and characters that no text file can hold all count."""
    alike = ["a", "A", " a", "a/", "a/None", "\u00e9", "e\u0301", "?", "\udc80", "\udc81", "\ufffd"]

    assert len({derive(name, 0).key for name in alike}) == len(alike)


def test_every_bit_of_a_seed_is_used() -> None:
    """Each of the 64 bits of a seed is set in about half of all streams, the low ones too."""
    seeds = np.array([derive("bits", 0, step=n).seed64 for n in range(20_000)], dtype=np.uint64)
    shares = [(seeds >> np.uint64(bit) & np.uint64(1)).mean() for bit in range(64)]

    assert min(shares) > 0.48
    assert max(shares) < 0.52


@given(name=NAMES)
@settings(max_examples=20)
def test_scikit_learn_takes_the_seed(name: str) -> None:
    """`train_test_split` and its like accept `.seed`, and equal streams split equally."""
    one, again, other = (
        train_test_split(range(40), random_state=derive(name, root).seed) for root in (0, 0, 1)
    )

    assert one == again != other


def _words(stream: Stream) -> dict[str, list[int]]:
    raw = stream.numpy().bit_generator.random_raw(100).tolist()
    python = stream.python()
    return {
        "python": [python.getrandbits(32) for _ in range(200)],
        "numpy": [word for pair in raw for word in (pair % 2**32, pair >> 32)],
        "numpy_legacy": stream.numpy_legacy().randint(0, 2**32, 200, dtype=np.uint32).tolist(),
        "torch": _words_of_torch(stream, 200),
    }


def _words_of_torch(stream: Stream, count: int) -> list[int]:
    pairs = torch.empty(count // 2, dtype=torch.int64).random_(
        -(2**63), None, generator=stream.torch()
    )
    return [word % 2**32 for pair in pairs.tolist() for word in (pair >> 32, pair)]


@settings(max_examples=30)
@given(where=COORDINATES)
def test_the_generators_of_a_stream_share_no_numbers(where: Any) -> None:
    """No generator of a stream repeats another one, nor one that was started from its `seed`."""
    stream = derive(*where)
    drawn = _words(stream)
    for name, seed in (("from seed", stream.seed), ("from half", stream.seed64 >> 32)):
        legacy = np.random.RandomState(seed)
        drawn[name] = legacy.randint(0, 2**32, 200, dtype=np.uint32).tolist()
    every = [word for words in drawn.values() for word in words]

    # Six lists of 200 words out of 2**32: one word twice by chance is rare, two are a pattern.
    assert len(every) - len(set(every)) <= 1


@given(where=COORDINATES)
def test_every_generator_starts_from_more_than_128_bits(where: Any) -> None:
    """numpy's and Python's generators start from 256 bits, of which the first is not always 0."""
    stream = derive(*where)
    own = (stream.numpy().bit_generator, stream.numpy_legacy()._bit_generator)
    entropy = [generator.seed_seq.entropy for generator in own] + [stream.entropy("python")]

    assert min(map(int.bit_length, entropy)) > 128
    assert len(set(entropy)) == 3
    assert stream.python().getstate() == random.Random(entropy[2]).getstate()


@given(where=COORDINATES)
def test_torch_starts_from_its_whole_state(where: Any) -> None:
    """No `manual_seed` reaches the state of `.torch()`, whose 624 words are all derived."""
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


@given(where=COORDINATES, odd=st.integers(1, 40))
def test_torch_draws_what_a_twister_in_that_state_draws(where: Any, odd: int) -> None:
    """`.torch()` is numpy's Mersenne Twister from the same words, and starts with nothing left."""
    stream = derive(*where)
    words = stream.torch().get_state().numpy()[24 : 24 + 8 * WORDS].view(np.uint64)
    twister = np.random.RandomState()
    twister.set_state(("MT19937", words.astype(np.uint32), WORDS))

    expected = twister.randint(0, 2**32, 1500, dtype=np.uint32)
    assert _words_of_torch(stream, 1500) == expected.tolist()
    normal = torch.randn(odd, generator=stream.torch())
    assert torch.equal(normal, torch.randn(odd, generator=stream.torch()))


@given(where=COORDINATES)
def test_every_call_starts_from_the_beginning(where: Any) -> None:
    """A stream is a value: drawing from what it gave moves neither it nor anything global."""
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
def test_a_seed_of_its_own_changes_one_stream_alone(seed: int, own: int, name: str) -> None:
    """`streams: {split: 3}` moves the stream `split` to that root and no other stream."""
    with torchrepro.apply({"seed": own}):
        elsewhere = torchrepro.stream("split")
    with torchrepro.apply({"seed": seed}):
        usual = torchrepro.stream(name)
    with torchrepro.apply({"seed": seed, "streams": {"split": own}}):
        assert torchrepro.stream("split") == elsewhere
        assert torchrepro.stream(name) == usual
    with torchrepro.apply({"streams": {"split": own}}):
        assert torchrepro.stream("split") == elsewhere
