"""The arguments of a stream: found where they are not given, refused where they are wrong."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

import torchrepro
from torchrepro.seeding import streams

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
    """The message names argument, value and what is legal; nothing has changed."""
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


def test_a_refused_call_draws_nothing() -> None:
    """A stream with a seed of its own counts as never drawn after a call that was refused."""
    with torchrepro.apply({"seed": 1, "streams": {"augment": 3}}):
        with pytest.raises(torchrepro.SeedingError):
            torchrepro.stream("augment", rank=-1)
        assert streams.never_drawn() == ("augment",)
        torchrepro.stream("augment", rank=1)
        assert streams.never_drawn() == ()


def test_text_that_looks_like_a_number_is_told_from_a_number(seed_1234: Any) -> None:
    """A message about the text "1" does not show it as the number 1, which would be legal."""
    with pytest.raises(torchrepro.SeedingError) as refused:
        torchrepro.stream("augment", rank="1")

    assert "rank = 1:" not in str(refused.value)


@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("case", GOOD)
def test_whole_numbers_of_numpy_and_torch_are_taken(
    argument: str, case: str, seed_1234: Any
) -> None:
    """An integer of numpy or torch names the same stream as the same int."""
    given = torchrepro.stream("augment", **{argument: GOOD[case]})

    assert given == torchrepro.stream("augment", **{argument: 7})


@pytest.mark.parametrize("name", NO_NAMES.values(), ids=NO_NAMES)
def test_what_is_no_name_is_refused(name: Any, seed_1234: Any) -> None:
    """A stream has a name: any text that is not empty."""
    with pytest.raises(torchrepro.SeedingError, match=r"name = .*: not the name of a stream"):
        torchrepro.stream(name)


@pytest.mark.parametrize("profile", [None, {}, {"dropout": "keep"}, {"streams": {"split": 3}}])
def test_without_a_seed_a_stream_is_that_of_the_programs_own(profile: Any) -> None:
    """Where no profile gives a seed, a stream is that of a profile with torch's seed."""
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


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
@pytest.mark.parametrize("guarantee", ["seeded", "repeatable"])
def test_the_first_and_the_last_seed_are_seeds(seed: int, guarantee: str) -> None:
    """0 and 2**32-1 are seeds like any other, for a strict profile too."""
    with torchrepro.apply({"seed": seed, "guarantee": guarantee}) as applied:
        stream = torchrepro.stream("augment")

    assert applied.report["seed.streams"].outcome == "applied"
    with torchrepro.apply({"seed": 1}):
        assert torchrepro.stream("augment") != stream


@pytest.mark.parametrize("device", ["nonsense", "meta", [], "cpu:7:8"])
def test_a_device_that_is_not_there_is_refused(device: Any, seed_1234: Any) -> None:
    """No generator for a device that this torch lacks, and the message names it."""
    with pytest.raises(torchrepro.SeedingError) as refused:
        torchrepro.stream("augment").torch(device)

    assert str(device) in str(refused.value)
    assert "no generator for this device" in str(refused.value)


class Workers(Dataset[list[int]]):
    """Says who read a sample, and which seeds the streams have there."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> list[int]:
        info = get_worker_info()
        given_0 = torchrepro.stream("augment", worker=0)
        return [info.id if info else -1, torchrepro.stream("augment").seed, given_0.seed]


def test_the_worker_is_found_and_can_be_given(seed_1234: Any) -> None:
    """In a data-loading worker a stream is that worker's; the main process is no worker."""
    loader = DataLoader(Workers(), num_workers=2, multiprocessing_context="fork", batch_size=None)
    expected = {worker: torchrepro.stream("augment", worker=worker).seed for worker in (0, 1)}
    first = expected[0]

    for worker, found, given_0 in loader:
        assert (found, given_0) == (expected[worker], first)
    assert Workers()[0] == [-1, torchrepro.stream("augment").seed, first]
    assert torchrepro.stream("augment").seed not in expected.values()
