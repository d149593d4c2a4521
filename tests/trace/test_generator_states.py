"""States of the global generators: cached fingerprints are never out of date."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrepro.seeding.generators import States, host_slots
from torchrepro.trace import generator_states
from torchrepro.trace.generator_states import GeneratorStates

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

saved: list[Any] = []


def _put_back_python() -> None:
    if saved:
        random.setstate(saved[0][0])


def _put_back_numpy() -> None:
    if saved:
        np.random.set_state(saved[0][1])


DRAWS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "random.random": random.random,
    "random.gauss": lambda: random.gauss(0, 1),
    "random.seed": lambda: random.seed(3),
    "random.setstate": _put_back_python,
    "numpy.rand": np.random.rand,
    "numpy.normal": np.random.normal,
    "numpy.seed": lambda: np.random.seed(3),
    "numpy.set_state": _put_back_numpy,
    "torch.rand": lambda: torch.rand(1),
    "torch.manual_seed": lambda: torch.manual_seed(3),
    "save": lambda: saved.insert(0, (random.getstate(), np.random.get_state())),
}


def _states() -> dict[str, str]:
    return {
        "python": repr(random.getstate()),
        "numpy": repr([np.random.get_state()[1].tobytes(), *np.random.get_state()[2:]]),
        "torch": repr(torch.get_rng_state().numpy().tobytes()),
    }


@given(st.lists(st.sampled_from(sorted(DRAWS)), max_size=30))
def test_the_fingerprint_of_a_generator_changes_at_each_draw(draws: list[str]) -> None:
    """A fingerprint changes exactly if its generator does, and equals one without a cache."""
    before, reader = States(host_slots().values()), GeneratorStates()
    saved.clear()
    try:
        fingerprints, states = reader.read(), _states()
        for draw in draws:
            DRAWS[draw]()
            earlier, fingerprints = fingerprints, reader.read()
            before_it, states = states, _states()
            assert fingerprints == GeneratorStates().read()
            assert {name for name in states if before_it[name] != states[name]} == {
                name for name in earlier if earlier[name] != fingerprints[name]
            }
    finally:
        before.put_back()


def test_an_unused_generator_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps without a draw, numpy's state, which takes longest, is not read."""
    reader = GeneratorStates()
    before = reader.read()
    monkeypatch.setattr(generator_states.xxhash, "xxh3_128", None)

    assert reader.read() == before


def test_a_generator_with_an_unknown_memory_layout_is_read_in_full() -> None:
    """For another bit generator of numpy, a draw changes its fingerprint and no other."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        reader = GeneratorStates()
        first = reader.read()
        assert reader.read() == first
        np.random.rand()
        second = reader.read()
    finally:
        np.random.set_bit_generator(before)

    assert second["numpy"] != first["numpy"]
    assert {**second, "numpy": ""} == {**first, "numpy": ""}
