"""Other libraries that draw numbers: seeded once they are loaded, and never loaded for it."""

import importlib
import importlib.util
import random
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import torchrepro
from torchrepro.seeding.streams import seed_of_rank


def _seed(name: str) -> Callable[[int], None]:
    def seed(number: int) -> None:
        sys.modules[name].seeds.append(number)
        sys.modules[name].rng.seed(number)

    return seed


def _register(name: str, *, comes_back: bool = True) -> None:
    """Register the library `name`, with or without a way back."""

    def save() -> Any:
        return sys.modules[name].rng.getstate()

    def restore(state: Any) -> None:
        sys.modules[name].rng.setstate(state)

    ways = (save, restore) if comes_back else ()
    torchrepro.register_seeder(name, _seed(name), *ways)


def _number(module: ModuleType) -> float:
    """The next number of `module`, without moving its generator."""
    state = module.rng.getstate()
    drawn: float = module.rng.random()
    module.rng.setstate(state)
    return drawn


def _from_seed(seed: int) -> float:
    return random.Random(seed).random()


def test_a_loaded_library_is_seeded_and_comes_back(library: Callable[..., str]) -> None:
    """A library that is there when the profile comes gets its seed, and its state back on undo."""
    name = library()
    _register(name)
    module = importlib.import_module(name)
    module.rng.random()
    before = _number(module)

    with torchrepro.apply({"seed": 5}) as applied:
        assert _number(module) == _from_seed(5)
        assert applied.report["seed.libraries"].outcome == "applied"
        module.rng.random()

    assert _number(module) == before
    assert module.seeds == [5]


def test_a_library_that_is_loaded_later_is_seeded_then(library: Callable[..., str]) -> None:
    """A library is seeded at its import under the profile, once, and not loaded before."""
    name = library()
    _register(name)
    finders = list(sys.meta_path)
    with torchrepro.apply({"seed": 5}):
        assert name not in sys.modules
        assert importlib.util.find_spec(name) is not None
        assert name not in sys.modules
        module = importlib.import_module(name)
        assert _number(module) == _from_seed(5)
        importlib.import_module(name)

    assert module.seeds == [5]
    assert _number(module) == _from_seed(99)
    assert sys.meta_path == finders


def test_a_part_of_a_package_is_seeded_when_that_part_is_loaded(
    library: Callable[..., str],
) -> None:
    """A dotted name waits for that module, not for the package around it."""
    package = library("drawer_package.__init__", "")
    name = library("drawer_package.numbers")
    _register(name)
    with torchrepro.apply({"seed": 5}):
        importlib.import_module(package.partition(".")[0])
        assert _number(importlib.import_module(name)) == _from_seed(5)


def test_without_a_seed_no_library_is_seeded(library: Callable[..., str]) -> None:
    """Before, after and under a profile without a seed a library is left alone."""
    name = library()
    _register(name)
    with torchrepro.apply({"dropout": "keep"}):
        module = importlib.import_module(name)
    with torchrepro.apply({"seed": 5}):
        pass
    sys.modules.pop(name)
    again = importlib.import_module(name)

    assert module.seeds == [5]
    assert again.seeds == []


def test_a_library_that_is_never_loaded_costs_nothing(library: Callable[..., str]) -> None:
    """Neither registering nor applying nor undoing loads a library."""
    name = library(source="raise ImportError('must not be imported')")
    with torchrepro.apply({"seed": 5}):
        torchrepro.register_seeder(name, _seed(name))

    assert name not in sys.modules


def test_a_library_that_is_blocked_is_not_there(
    library: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sys.modules[name] = None`, which forbids an import, is no library to be seeded."""
    name = library()
    _register(name)
    monkeypatch.setitem(sys.modules, name, None)  # type: ignore[misc]

    with torchrepro.apply({"seed": 5}) as applied:
        assert applied.report["seed.libraries"].outcome == "applied"


def test_registering_under_a_profile_seeds_at_once(library: Callable[..., str]) -> None:
    """A library that registers itself while a seed is in force gets it, before or after loading."""
    loaded, later = library("drawer_loaded"), library("drawer_later")
    module = importlib.import_module(loaded)
    with torchrepro.apply({"seed": 5}):
        _register(loaded)
        _register(later)
        assert _number(module) == _number(importlib.import_module(later)) == _from_seed(5)

    assert _number(module) == _from_seed(99)


def test_a_second_seeder_replaces_the_first(library: Callable[..., str]) -> None:
    """The seeder registered last is the one that counts, and undo brings back the state before."""
    name = library()
    _register(name, comes_back=False)
    _register(name)
    module = importlib.import_module(name)
    with torchrepro.apply({"seed": 5}):
        assert module.seeds == [5]
        _register(name)
        assert module.seeds == [5, 5]

    assert _number(module) == _from_seed(99)


def test_a_library_without_a_way_back_keeps_its_seed(library: Callable[..., str]) -> None:
    """Where nobody said how to restore a library, undo leaves it where it is."""
    name = library()
    _register(name, comes_back=False)
    module = importlib.import_module(name)
    with torchrepro.apply({"seed": 5}):
        module.rng.random()
        drawn = _number(module)

    assert _number(module) == drawn


def test_nested_profiles_seed_and_restore_in_turn(library: Callable[..., str]) -> None:
    """The inner seed wins inside; afterwards a library is where the outer profile had it."""
    early, late = library("drawer_early"), library("drawer_late")
    _register(early)
    _register(late)
    first = importlib.import_module(early)
    with torchrepro.apply({"seed": 5}):
        first.rng.random()
        between = _number(first)
        with torchrepro.apply({"seed": 6}):
            second = importlib.import_module(late)
            assert _number(first) == _number(second) == _from_seed(6)
        assert _number(first) == between
        assert _number(second) == _from_seed(5)  # as if it had been loaded under this profile

    assert _number(first) == _number(second) == _from_seed(99)


def test_a_seeder_that_fails_is_named_and_stops_a_strict_profile(
    library: Callable[..., str],
) -> None:
    """A seeder's error is the outcome of its knob; a strict profile is undone."""
    name = library()
    importlib.import_module(name)

    def broken(number: int) -> None:
        raise OSError(f"no {number}")

    torchrepro.register_seeder(name, broken)
    with torchrepro.apply({"seed": 5}) as applied:
        assert applied.report["seed.libraries"].outcome == "failed"
        assert "no 5" in applied.report["seed.libraries"].why
    with pytest.raises(torchrepro.ApplyError, match="no 5"):
        torchrepro.apply({"seed": 5, "guarantee": "repeatable"})


def test_distinct_ranks_give_their_libraries_seeds_of_their_own(
    library: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library is one more global generator: under `ranks: distinct` each rank has its own."""
    name = library()
    _register(name)
    module = importlib.import_module(name)
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        with torchrepro.apply({"seed": 5, "ranks": "distinct"}):
            pass

    assert module.seeds == [seed_of_rank(5, rank) for rank in range(4)]
