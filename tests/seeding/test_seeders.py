"""The seeders that come along: cupy, tensorflow, gymnasium, installed packages, pytest-randomly."""

import importlib
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import torchrepro
from torchrepro.seeding import global_seeds

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


ASK = """
import json, sys, torchrepro
with torchrepro.apply({"seed": 5}):
    before = "drawer_of_others" in sys.modules, "seeds_for_drawer" in sys.modules
    import drawer_of_others
    print(json.dumps([before, drawer_of_others.seeds]))
"""


def test_an_installed_package_brings_a_seeder(
    library: Callable[..., str], tmp_path: Path, answer_of: Callable[..., Any]
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

    assert answer_of(ASK, PYTHONPATH=str(tmp_path)) == [[False, False], [5]]


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


def test_pytest_randomly_loads_no_torch(answer_of: Callable[..., Any]) -> None:
    """Where torch is not loaded there is nothing to seed, and it stays away."""
    program = (
        "import json, sys\nfrom torchrepro.seeding.global_seeds import reseed\n"
        "reseed(5)\nprint(json.dumps('torch' in sys.modules))"
    )

    assert answer_of(program) is False
