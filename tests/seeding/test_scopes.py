"""Scopes: every generator has the same state before and after."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchrepro

from .drawing import DRAWS, GLOBAL, draw, own, register_own

State = Callable[[], dict[str, Any]]
SCOPES: dict[str, Callable[[], Any]] = {
    "isolated": torchrepro.isolated_rng,
    "seeded": lambda: torchrepro.seeded("init"),
    "seeded for a step": lambda: torchrepro.seeded("init", epoch=2, step=7),
    "seeded with same ranks": lambda: torchrepro.seeded("init", ranks="same"),
}
every_scope = pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES)


@pytest.fixture(autouse=True)
def _own_generators(seed_1234: Any) -> Iterator[None]:
    """Register one generator of each type; a profile with a seed is active."""
    register_own()
    yield
    own.clear()


@every_scope
@settings(max_examples=60)
@given(
    around=st.lists(st.sampled_from([*SCOPES]), max_size=3),
    before=DRAWS,
    inside=DRAWS,
    raised=st.none() | st.sampled_from([OSError, KeyboardInterrupt, SystemExit, StopIteration]),
)
def test_a_scope_restores_every_generator(
    scope: Callable[[], Any],
    around: list[str],
    before: list[str],
    inside: list[str],
    raised: type[BaseException] | None,
    generators: State,
) -> None:
    """Draws and seeds inside change no later draw, also within other scopes.

    An exception passes through unchanged.
    """
    error = raised and raised("from inside")

    def work() -> None:
        with scope():
            for name in inside:
                draw(name)
            if error is not None:
                raise error

    for name in before:
        draw(name)
    outermost = generators()
    with ExitStack() as scopes:
        for name in around:
            scopes.enter_context(SCOPES[name]())
            for each in before:
                draw(each)
        found = generators()
        with pytest.raises(raised) if raised else nullcontext() as left:
            work()

        assert left is None or left.value is error
        assert found == generators()
    assert outermost == generators()


@every_scope
def test_a_scope_is_a_decorator(scope: Callable[[], Any], generators: State) -> None:
    """A decorated function is a scope at every call, and keeps its result and name."""

    @scope()
    def noise(count: int) -> list[float]:
        return [random.random(), *np.random.rand(count), *torch.rand(count).tolist()]

    found = generators()
    first, second = noise(2), noise(2)

    assert found == generators()
    assert first == second
    assert noise.__name__ == "noise"


@settings(max_examples=40)
@given(
    name=st.text(min_size=1),
    earlier=DRAWS,
    drawn=DRAWS,
    epoch=st.none() | st.integers(0, 99),
    step=st.none() | st.integers(0, 99),
)
def test_a_seeded_scope_does_not_depend_on_earlier_draws(
    name: str, earlier: list[str], drawn: list[str], epoch: int | None, step: int | None
) -> None:
    """Its draws depend on its stream only."""
    scoped = [each for each in drawn if each in GLOBAL]

    def inside(again: str = name) -> list[str]:
        with torchrepro.seeded(again, epoch=epoch, step=step):
            return [repr(draw(each)) for each in scoped] + [repr(torch.rand(2).tolist())]

    first = inside()
    for each in earlier:
        draw(each)
    assert inside() == first
    with torchrepro.seeded("around"):
        assert inside() == first
    assert inside(name + "'") != first or "seed torch" in scoped


def test_a_seeded_scope_draws_from_its_stream() -> None:
    """The scope returns its stream, and starts every library from 256 bits of it."""
    with torchrepro.seeded("init", epoch=3) as source:
        assert source == torchrepro.stream("init", epoch=3)
        assert random.getstate() == source.python().getstate()
        assert torch.equal(torch.get_rng_state(), source.torch().get_state())
        assert torch.initial_seed() == source.seed64
        numbers = {random.random(), np.random.random_sample(), torch.rand(()).item()}
    assert len(numbers) == 3


def test_a_seeded_scope_does_not_seed_registered_generators() -> None:
    """They continue inside, and are restored afterwards."""
    expected = random.Random(5).random()
    with torchrepro.seeded("init"):
        assert own["own python"].random() == expected
    assert own["own python"].random() == expected


def test_a_generator_unregistered_inside_a_scope_is_restored(generators: State) -> None:
    """A scope restores the generators that were registered at its begin."""
    found = generators()
    with torchrepro.isolated_rng():
        forgotten = own["own torch"]
        torch.rand(3, generator=forgotten)
        torchrepro.unregister_generator("own torch")
        late = torchrepro.register_generator("late", random.Random(1))
        late.random()
    torchrepro.unregister_generator("late")
    torchrepro.register_generator("own torch", forgotten)

    assert found == generators()


def test_registering_refuses_other_objects() -> None:
    """It takes a name and a generator of a known type; unregistering takes a known name."""
    no_state = random.SystemRandom()  # the system's generator: it has no state to restore
    for value in (random, np.random, torch, "x", None, np.random.PCG64(1), no_state):
        with pytest.raises(torchrepro.SeedingError, match="not a generator that can be registered"):
            torchrepro.register_generator("bad", value)
    for name in ("", None, 3):
        with pytest.raises(torchrepro.SeedingError, match="not a name"):
            torchrepro.register_generator(name, random.Random(1))
    with pytest.raises(torchrepro.SeedingError, match="legal: own MT19937"):
        torchrepro.unregister_generator("bad")


@pytest.mark.parametrize("bad", [{"epoch": -1}, {"step": True}, {"name": ""}, {"epoch": 1.0}])
def test_a_bad_argument_is_refused_before_any_seeding(
    bad: dict[str, Any], generators: State
) -> None:
    """A seeded scope with a wrong argument does not begin."""
    found = generators()

    with pytest.raises(torchrepro.SeedingError):
        torchrepro.seeded(**{"name": "init"} | bad).__enter__()

    assert found == generators()


def test_streams_work_in_many_threads() -> None:
    """Each thread gets the same numbers from its stream as alone."""

    def drawn(step: int) -> Any:
        return torch.rand(4, generator=torchrepro.stream("t", step=step).torch()).tolist()

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(drawn, range(64))] == [*map(drawn, range(64))]
