"""Snapshots that do not fit: each is refused with its reason, and nothing changes."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import torchrepro
from torchrepro.seeding import state
from torchrepro.seeding.generators import registered

State = Callable[[], dict[str, Any]]
NO_SNAPSHOTS = {
    "nothing": None,
    "a number": 3,
    "bytes": b"rng.json",
    "a list": [],
    "empty": {},
    "a tensor": torch.zeros(3),
    "a state of torch": {"state": torch.zeros(3, dtype=torch.uint8)},
    "format alone": {"format": 1},
}


@pytest.fixture(autouse=True)
def _own() -> Iterator[None]:
    torchrepro.register_generator("own", np.random.default_rng(1))
    torchrepro.register_generator("other", random.Random(1))
    with torchrepro.apply({"seed": 1, "streams": {"split": 3}}):
        yield


def _moved() -> dict[str, Any]:
    snapshot = torchrepro.rng_state()
    random.random(), np.random.rand(), torch.rand(1)
    for _, generator in registered.values():
        generator.random()
    return snapshot


@pytest.mark.parametrize("value", NO_SNAPSHOTS.values(), ids=NO_SNAPSHOTS)
def test_a_value_that_is_no_snapshot_is_refused(value: Any, refused: Callable[[Any], str]) -> None:
    """Whatever `rng_state` did not return is refused."""
    assert "snapshot" in refused(value)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in items:
        if isinstance(part, dict | list | tuple) and part:
            yield from _places(part, (*path, key))
        else:
            yield (*path, key)


@pytest.mark.parametrize("top", [*state.PARTS, "checksum"])
def test_any_value_that_was_changed_is_noticed(top: str, refused: Callable[[Any], str]) -> None:
    """A snapshot in which any one value is another, or is gone, is refused."""
    snapshot = json.loads(json.dumps(_moved()))
    places = list(_places({top: snapshot[top]}))
    for *path, last in (places[0], places[-1]):
        damaged = copy.deepcopy(snapshot)
        owner = damaged
        for key in path:
            owner = owner[key]
        owner[last] = "changed"
        assert "damaged" in refused(damaged)
        del owner[last]
        assert "damaged" in refused(damaged)


def test_a_format_of_the_future_is_refused(refused: Callable[[Any], str]) -> None:
    """A snapshot of a newer format is told from a damaged one."""
    message = refused(_moved() | {"format": 2})

    assert "format = 2" in message
    assert "legal: 1" in message


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), (3, 4)])
def test_another_place_in_the_world_is_refused(
    rank: int, size: int, refused: Callable[[Any], str], be: Callable[..., None]
) -> None:
    """Neither another world size nor another rank takes a snapshot; the message names both."""
    alone = _moved()
    be(rank, size)
    message = refused(alone)
    assert "rank 0 of 1" in message
    assert f"rank {rank} of {size}" in message

    here = _moved()
    be((rank + 1) % size, size)
    assert f"rank {rank} of {size}" in refused(here)


@pytest.mark.parametrize(
    ("profile", "then", "now"),
    [
        ({"seed": 2}, "seed=1", "seed=2"),
        ({"streams": {"split": 4}}, "streams.split=3", "streams.split=4"),
        (
            {"streams": {"other": 3}},
            "no streams.other, streams.split=3",
            "streams.other=3, no streams.split",
        ),
        ({"ranks": "same"}, "no ranks", "ranks=same"),
        ({"ranks": {"dp": "same"}}, "no ranks.dp", "ranks.dp=same"),
    ],
)
def test_another_seed_plan_is_refused(
    profile: dict[str, Any], then: str, now: str, refused: Callable[[Any], str]
) -> None:
    """A snapshot belongs to the seeds that were in force: one line names both, and what to do."""
    sentence = (
        "the state was saved under {0}, and this run has {1}; to continue exactly, run with {0}"
    )
    snapshot = _moved()
    with torchrepro.apply(profile):
        message = refused(snapshot)
        inside = _moved()

    assert message == sentence.format(then, now)
    assert refused(inside) == sentence.format(now, then)


def test_the_same_seed_plan_from_another_profile_is_accepted(generators: State) -> None:
    """What counts is the seed plan in force, not the profile that said it."""
    snapshot = torchrepro.rng_state()
    with torchrepro.apply({"seed": 1, "dropout": "keep"}):
        torchrepro.set_rng_state(json.loads(json.dumps(snapshot)))
        assert torchrepro.rng_state()["generators"] == snapshot["generators"]


def test_other_registered_generators_are_refused(refused: Callable[[Any], str]) -> None:
    """A generator too many, one too few and one of another kind are each refused by name."""
    snapshot = _moved()

    torchrepro.register_generator("late", torch.Generator())
    assert "lacks a generator of this process" in (message := refused(snapshot))
    assert "registered/late" in message
    torchrepro.unregister_generator("late")
    torchrepro.unregister_generator("own")
    assert "has a generator that is unknown to this process" in (message := refused(snapshot))
    assert "registered/own" in message
    torchrepro.register_generator("own", np.random.RandomState(1))
    assert "own was of type numpy when" in (message := refused(snapshot))
    assert "now is of type numpy_legacy" in message


class Stubborn(random.Random):
    """Raises an error whenever it is given a state, the first times."""

    error: BaseException = RuntimeError("not with me")
    times = 0

    def setstate(self, state: Any) -> None:
        if self.times:
            self.times -= 1
            raise self.error
        super().setstate(state)


@pytest.mark.parametrize("name", ["a", "own", "zz"])
@pytest.mark.parametrize("times", [1, 100])
def test_a_generator_that_refuses_its_state_takes_everything_back(
    name: str, times: int, refused: Callable[[Any], str]
) -> None:
    """First or last, the others come back, even where it takes not even its own state again."""
    stubborn = torchrepro.register_generator(name, Stubborn(1))
    snapshot, stubborn.times = _moved(), times

    assert "a generator refused its state: not with me" in refused(snapshot)


def test_an_interrupt_halfway_takes_everything_back(generators: State) -> None:
    """Ctrl-C in the middle of a restore is passed on, and the state is as before."""
    stubborn = torchrepro.register_generator("stubborn", Stubborn(1))
    snapshot, before = _moved(), generators()
    stubborn.times, stubborn.error = 1, KeyboardInterrupt()

    with pytest.raises(KeyboardInterrupt):
        torchrepro.set_rng_state(snapshot)

    assert generators() == before


@pytest.mark.parametrize("part", state.PARTS)
def test_a_part_is_missed_even_where_the_checksum_fits(
    part: str, refused: Callable[[Any], str]
) -> None:
    """A snapshot that somebody edited, checksum and all, is refused where a part is gone."""
    edited = _moved()
    del edited[part]
    edited["checksum"] = state._checksum(edited)

    assert refused(edited)
