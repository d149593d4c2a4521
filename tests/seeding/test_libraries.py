"""Other libraries that draw numbers: seeded once they are loaded, and never loaded for it.

Those that torchrepro seeds by itself, and what installed packages bring, come last.
"""

import importlib
import importlib.util
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import torchrepro
from torchrepro.seeding import global_seeds
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
    library: Callable[..., str], be: Callable[..., None]
) -> None:
    """A library is one more global generator: under `ranks: distinct` each rank has its own."""
    name = library()
    _register(name)
    module = importlib.import_module(name)
    for rank in range(4):
        be(rank, 4)
        with torchrepro.apply({"seed": 5, "ranks": "distinct"}):
            pass

    assert module.seeds == [seed_of_rank(5, rank) for rank in range(4)]


CUPY = """
import types

class RandomState:  # numpy's stands in for the one on a GPU
    def __init__(self, seed=None):
        import numpy
        self.numpy = numpy.random.RandomState(seed)

current = RandomState(99)

def set_random_state(state):
    global current
    current = state

def get_random_state():
    return current

def random_sample():
    return current.numpy.random_sample()
"""
TENSORFLOW = "given = []\nset_seed = given.append\n"


def test_cupy_is_seeded_and_gets_its_own_state_back(library: Callable[..., str]) -> None:
    """cupy's current random state is replaced and put back, the same object as before.

    A stand-in with the four functions that are called, because cupy itself needs a GPU.
    """
    library("cupy.__init__", "from cupy import random")
    library("cupy.random", CUPY)
    cupy = importlib.import_module("cupy")
    own = cupy.random.get_random_state()
    expected = cupy.random.RandomState(5).numpy.random_sample()
    with torchrepro.apply({"seed": 5}):
        assert cupy.random.random_sample() == expected
    assert cupy.random.get_random_state() is own

    for name in ("cupy", "cupy.random"):
        sys.modules.pop(name)
    with torchrepro.apply({"seed": 5}):
        assert importlib.import_module("cupy").random.random_sample() == expected


def test_tensorflow_is_seeded(library: Callable[..., str]) -> None:
    """`tensorflow.random.set_seed` gets the seed when tensorflow is loaded.

    A stand-in with that function, because tensorflow is not installed with the tests.
    """
    library("tensorflow.__init__", "from tensorflow import random")
    library("tensorflow.random", TENSORFLOW)
    with torchrepro.apply({"seed": 5}):
        assert "tensorflow" not in sys.modules
        given = importlib.import_module("tensorflow").random.given

    assert given == [5]


@pytest.fixture(scope="module")
def gymnasium() -> Iterator[Any]:
    """Gymnasium itself, with an environment that draws from its own generator; unloaded after."""
    gymnasium = pytest.importorskip("gymnasium")

    class Dice(gymnasium.Env):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.action_space = gymnasium.spaces.Discrete(1000)
            self.observation_space = gymnasium.spaces.Box(0, 1, (2,))

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return self.np_random.random(2), {}

    gymnasium.Dice = Dice
    yield gymnasium
    for name in [name for name in sys.modules if name.partition(".")[0] == "gymnasium"]:
        del sys.modules[name]


def _drawn(gymnasium: Any, seed: int | None = None) -> list[float]:
    first, second = gymnasium.Dice(), gymnasium.Dice()
    space = gymnasium.spaces.Box(0, 1, (2,))
    drawn = [*first.reset(seed=seed)[0], *second.reset()[0], *space.sample()]
    return [float(each) for each in drawn]


def test_gymnasium_draws_the_same_from_the_same_seed(gymnasium: Any) -> None:
    """Environments and spaces without a seed draw what the profile's seed decides, each its own.

    The function that gives them their generators is the very same after the undo.
    """
    before = gymnasium.utils.seeding.np_random
    runs = []
    for seed in (5, 5, 6):
        with torchrepro.apply({"seed": seed}):
            runs.append(_drawn(gymnasium))
            with torchrepro.apply({"seed": 9}):
                inner = _drawn(gymnasium)
            assert not set(inner) & set(runs[-1])
        assert gymnasium.utils.seeding.np_random is before

    assert runs[0] == runs[1]
    assert not set(runs[0]) & set(runs[2])
    assert len(set(runs[0])) == len(runs[0])
    assert _drawn(gymnasium) != _drawn(gymnasium)


def test_what_the_program_seeds_in_gymnasium_is_left_alone(gymnasium: Any) -> None:
    """`reset(seed=3)` draws what it always drew, and a seed that is none is refused as ever."""
    expected = _drawn(gymnasium, 3)[:2]
    with torchrepro.apply({"seed": 5}):
        assert _drawn(gymnasium, 3)[:2] == expected
        assert _drawn(gymnasium, 3)[2:] != _drawn(gymnasium, 3)[2:]
        with pytest.raises(gymnasium.error.Error, match="greater or equal to zero"):
            gymnasium.Dice().reset(seed=-1)


def test_workers_of_a_vector_environment_draw_their_own_numbers(gymnasium: Any) -> None:
    """Environments in processes of their own differ from each other, in every run alike."""
    runs = []
    for _ in range(2):
        with torchrepro.apply({"seed": 5}):
            environments = gymnasium.vector.AsyncVectorEnv([gymnasium.Dice] * 2, context="fork")
            runs.append(environments.reset()[0].tolist())
            environments.close()

    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_an_installed_package_brings_a_seeder(
    library: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry point of `torchrepro.seeders` seeds its library at import, and is not loaded before.

    The entry point's name is the library's module.
    """
    name = library("drawer_of_others")
    library("seeds_for_drawer", f"import {name}\ndef seed(number):\n    {name}.seeds += [number]\n")
    info = tmp_path / "seeds_for_drawer-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: seeds-for-drawer\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{global_seeds.GROUP}]\n{name} = seeds_for_drawer:seed\n", encoding="utf-8"
    )
    monkeypatch.setattr(global_seeds, "_installed", global_seeds._installed.__wrapped__)

    with torchrepro.apply({"seed": 5}):
        assert not {name, "seeds_for_drawer"} & sys.modules.keys()
        module = importlib.import_module(name)

    assert module.seeds == [5]


BAD = {
    "no name": ("", print),
    "no text": (3, print),
    "a module": (random, print),
    "no function": ("drawer", 5),
    "nothing": ("drawer", None),
    "save is no function": ("drawer", print, 5, print),
    "restore is no function": ("drawer", print, print, 5),
    "restore without save": ("drawer", print, None, print),
}


@pytest.mark.parametrize("arguments", BAD.values(), ids=BAD)
def test_what_is_no_seeder_is_refused(arguments: tuple[Any, ...]) -> None:
    """A seeder is a module's name and a function, and no way back without a state to go to."""
    before = dict(global_seeds._registered)

    with pytest.raises(torchrepro.SeedingError, match="not a seeder"):
        torchrepro.register_seeder(*arguments)

    assert global_seeds._registered == before


def test_pytest_randomly_loads_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch is not loaded there is nothing to seed, and it stays away."""
    monkeypatch.delitem(sys.modules, "torch")

    global_seeds.reseed(5)

    assert "torch" not in sys.modules
