"""Snapshots that do not fit this process: each is refused with its reason, and nothing changes."""

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
def test_other_values_than_snapshots_are_refused(value: Any, refused: Callable[[Any], str]) -> None:
    """Only the return value of `rng_state`, or a path, is accepted."""
    assert "snapshot" in refused(value)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in items:
        if isinstance(part, dict | list | tuple) and part:
            yield from _places(part, (*path, key))
        else:
            yield (*path, key)


@pytest.mark.parametrize("top", [*state.PARTS, "checksum"])
def test_any_changed_value_is_detected(top: str, refused: Callable[[Any], str]) -> None:
    """A snapshot with one changed or missing value is refused."""
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


def test_a_future_format_is_refused(refused: Callable[[Any], str]) -> None:
    """The message differs from that of a damaged snapshot."""
    message = refused(_moved() | {"format": 2})

    assert "format = 2" in message
    assert "legal: 1" in message


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), (3, 4)])
def test_another_rank_or_world_size_is_refused(
    rank: int, size: int, refused: Callable[[Any], str], be: Callable[..., None]
) -> None:
    """The message names both ranks and sizes."""
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
    """A snapshot belongs to the active seeds: one line names both and the remedy."""
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
    """Only the active seed plan counts, not the profile that set it."""
    snapshot = torchrepro.rng_state()
    with torchrepro.apply({"seed": 1, "dropout": "keep"}):
        torchrepro.set_rng_state(json.loads(json.dumps(snapshot)))
        assert torchrepro.rng_state()["generators"] == snapshot["generators"]


def test_other_registered_generators_are_refused(refused: Callable[[Any], str]) -> None:
    """An additional, a missing and a changed type of generator are each refused by name."""
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
    """A generator that refuses its state the first times."""

    error: BaseException = RuntimeError("not with me")
    times = 0

    def setstate(self, state: Any) -> None:
        if self.times:
            self.times -= 1
            raise self.error
        super().setstate(state)


@pytest.mark.parametrize("name", ["a", "own", "zz"])
@pytest.mark.parametrize("times", [1, 100])
def test_a_generator_that_refuses_its_state_undoes_the_restore(
    name: str, times: int, refused: Callable[[Any], str]
) -> None:
    """All other generators are restored, even if it refuses its own earlier state too."""
    stubborn = torchrepro.register_generator(name, Stubborn(1))
    snapshot, stubborn.times = _moved(), times

    assert "a generator refused its state: not with me" in refused(snapshot)


def test_an_interrupt_undoes_the_restore(generators: State) -> None:
    """Ctrl-C in the middle of a restore is passed on, and the state is the same as before."""
    stubborn = torchrepro.register_generator("stubborn", Stubborn(1))
    snapshot, before = _moved(), generators()
    stubborn.times, stubborn.error = 1, KeyboardInterrupt()

    with pytest.raises(KeyboardInterrupt):
        torchrepro.set_rng_state(snapshot)

    assert generators() == before


@pytest.mark.parametrize("part", state.PARTS)
def test_a_missing_part_is_refused_even_with_a_valid_checksum(
    part: str, refused: Callable[[Any], str]
) -> None:
    """A snapshot may have been edited together with its checksum."""
    edited = _moved()
    del edited[part]
    edited["checksum"] = state._checksum(edited)

    assert refused(edited)
