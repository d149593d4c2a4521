"""Other libraries that draw random numbers are seeded once the program has loaded them.

Libraries that torchrepro seeds itself, and seeders of installed packages, come last.
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
    """Register the library `name`, with or without functions to save and restore its state."""

    def save() -> Any:
        return sys.modules[name].rng.getstate()

    def restore(state: Any) -> None:
        sys.modules[name].rng.setstate(state)

    ways = (save, restore) if comes_back else ()
    torchrepro.register_seeder(name, _seed(name), *ways)


def _number(module: ModuleType) -> float:
    """Return the next number of `module`, without moving its generator."""
    state = module.rng.getstate()
    drawn: float = module.rng.random()
    module.rng.setstate(state)
    return drawn


def _from_seed(seed: int) -> float:
    return random.Random(seed).random()


def test_a_loaded_library_is_seeded_and_restored(library: Callable[..., str]) -> None:
    """A library that is loaded before the profile is seeded, and the undo restores its state."""
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


def test_a_library_that_is_loaded_later_is_seeded_at_its_import(
    library: Callable[..., str],
) -> None:
    """The profile seeds it once, and does not load it."""
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
    """Before, after and under a profile without a seed, libraries stay unchanged."""
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


def test_a_blocked_library_is_not_seeded(
    library: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sys.modules[name] = None` forbids an import, so there is no library to seed."""
    name = library()
    _register(name)
    monkeypatch.setitem(sys.modules, name, None)  # type: ignore[misc]

    with torchrepro.apply({"seed": 5}) as applied:
        assert applied.report["seed.libraries"].outcome == "applied"


def test_registering_under_a_profile_seeds_immediately(library: Callable[..., str]) -> None:
    """A library registered under a profile with a seed gets the seed, before or after loading."""
    loaded, later = library("drawer_loaded"), library("drawer_later")
    module = importlib.import_module(loaded)
    with torchrepro.apply({"seed": 5}):
        _register(loaded)
        _register(later)
        assert _number(module) == _number(importlib.import_module(later)) == _from_seed(5)

    assert _number(module) == _from_seed(99)


def test_a_second_seeder_replaces_the_first(library: Callable[..., str]) -> None:
    """The last registered seeder counts, and undo restores the state before the first one."""
    name = library()
    _register(name, comes_back=False)
    _register(name)
    module = importlib.import_module(name)
    with torchrepro.apply({"seed": 5}):
        assert module.seeds == [5]
        _register(name)
        assert module.seeds == [5, 5]

    assert _number(module) == _from_seed(99)


def test_a_library_without_a_restore_function_keeps_its_seed(library: Callable[..., str]) -> None:
    """Undo cannot restore a library that was registered without `save` and `restore`."""
    name = library()
    _register(name, comes_back=False)
    module = importlib.import_module(name)
    with torchrepro.apply({"seed": 5}):
        module.rng.random()
        drawn = _number(module)

    assert _number(module) == drawn


def test_nested_profiles_seed_and_restore_in_turn(library: Callable[..., str]) -> None:
    """The inner seed counts inside; afterwards a library has its state of the outer profile."""
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


def test_a_failing_seeder_is_named_and_stops_a_strict_profile(
    library: Callable[..., str],
) -> None:
    """The error of a seeder is the outcome of its knob; a strict profile is undone."""
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


def test_distinct_ranks_seed_their_libraries_differently(
    library: Callable[..., str], be: Callable[..., None]
) -> None:
    """Under `ranks: distinct` each rank gives libraries its own seed, as it does generators."""
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

class RandomState:  # numpy's replaces the one on a GPU
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


def test_cupy_is_seeded_and_restored(library: Callable[..., str]) -> None:
    """cupy's present random state is replaced, and undo restores the same object.

    The test uses a fake module with four functions, because cupy itself needs a GPU.
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

    The test uses a fake module, because tensorflow is not installed with the tests.
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
    """Environments and spaces without an explicit seed draw from streams of the profile's seed.

    Undo restores the original function that makes their generators.
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


def test_explicit_seeds_of_gymnasium_are_kept(gymnasium: Any) -> None:
    """`reset(seed=3)` draws the same as without a profile, and an invalid seed is refused."""
    expected = _drawn(gymnasium, 3)[:2]
    with torchrepro.apply({"seed": 5}):
        assert _drawn(gymnasium, 3)[:2] == expected
        assert _drawn(gymnasium, 3)[2:] != _drawn(gymnasium, 3)[2:]
        with pytest.raises(gymnasium.error.Error, match="greater or equal to zero"):
            gymnasium.Dice().reset(seed=-1)


def test_workers_of_a_vector_environment_draw_different_numbers(gymnasium: Any) -> None:
    """Environments in several processes differ from each other, and repeat in every run."""
    runs = []
    for _ in range(2):
        with torchrepro.apply({"seed": 5}):
            environments = gymnasium.vector.AsyncVectorEnv([gymnasium.Dice] * 2, context="fork")
            runs.append(environments.reset()[0].tolist())
            environments.close()

    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_an_entry_point_registers_a_seeder(
    library: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry point of `torchrepro.seeders` seeds its library at import, and is loaded then.

    The name of the entry point is the library's module.
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
def test_an_invalid_seeder_is_refused(arguments: tuple[Any, ...]) -> None:
    """A seeder has a module's name, a function, and both or none of `save` and `restore`."""
    before = dict(global_seeds._registered)

    with pytest.raises(torchrepro.SeedingError, match="not a seeder"):
        torchrepro.register_seeder(*arguments)

    assert global_seeds._registered == before


def test_pytest_randomly_loads_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch is not loaded, pytest-randomly's reseed does not load it."""
    monkeypatch.delitem(sys.modules, "torch")

    global_seeds.reseed(5)

    assert "torch" not in sys.modules
