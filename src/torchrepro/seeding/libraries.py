"""Other libraries that draw numbers: seeded when they are loaded, never imported for it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from itertools import count
from multiprocessing import current_process
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.console import say
from torchrepro.errors import SeedingError
from torchrepro.imports import AfterImport
from torchrepro.messages import shown
from torchrepro.seeding.streams import derive, note_not_given

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.metadata import EntryPoint

GROUP = "torchrepro.seeders"
"""Entry points of this group name a module to wait for and a function that takes a seed."""

_GYMNASIUM = "gymnasium.utils.seeding"


class Seeder(NamedTuple):
    """How to seed one library, once its module is loaded.

    `restore` is the undo of `seed`, from what `save` returned; without it the library keeps its
    seed.
    """

    module: str
    seed: Callable[[int], Any]
    save: Callable[[], Any] | None = None
    restore: Callable[[Any], Any] | None = None


def _random(module: str) -> Any:
    return sys.modules[module].random  # only once it is used is the module there


def _seed_gymnasium(root: int) -> None:
    """Have environments and spaces that get no seed start from streams of `root`, in turn.

    They ask `gymnasium.utils.seeding.np_random`, which is public, for a generator. Without a seed
    it would take one from the operating system; what the program seeds is left alone. Workers of
    a vector environment are told apart by the names of their processes. Generators that were made
    before are not reached, nor is code that has imported the function by its name before.
    https://gymnasium.farama.org/api/utils/#seeding
    """
    seeding = sys.modules[_GYMNASIUM]
    original = vars(seeding)["np_random"]
    numbers = count()

    @wraps(original)
    def np_random(seed: int | None = None) -> Any:
        if seed is not None:
            return original(seed)
        name = f"{current_process().name}/{next(numbers)}"
        return original(derive(name, root, kind="gymnasium").entropy("numpy"))

    vars(seeding)["np_random"] = np_random


SEEDERS = (
    Seeder(
        "cupy",
        # A new state rather than a new seed of the old one: so that the old one can come back.
        lambda seed: _random("cupy").set_random_state(_random("cupy").RandomState(seed)),
        lambda: _random("cupy").get_random_state(),
        lambda state: _random("cupy").set_random_state(state),
    ),
    Seeder("tensorflow", lambda seed: _random("tensorflow").set_seed(seed)),
    Seeder(
        "gymnasium",
        _seed_gymnasium,
        lambda: vars(sys.modules[_GYMNASIUM])["np_random"],
        lambda function: setattr(sys.modules[_GYMNASIUM], "np_random", function),
    ),
)
"""The libraries known without anybody registering them."""

_registered: dict[str, Seeder] = {seeder.module: seeder for seeder in SEEDERS}


@dataclass(slots=True)
class _State:
    """The seed in force, and what waits for the libraries that get it."""

    seed: int | None = None
    finder: AfterImport | None = None
    seeded: dict[str, Any] = field(default_factory=dict)  # library -> its own state before


_state = _State()


def register_seeder(
    module: str,
    seed: Callable[[int], Any],
    save: Callable[[], Any] | None = None,
    restore: Callable[[Any], Any] | None = None,
) -> None:
    """Have profiles seed the library `module` through ``seed(number)`` once it is loaded.

    Under a profile with a seed that happens now if `module` is loaded, else when it is imported;
    torchrepro never imports it. With `save` and `restore` its state comes back with the undo. A
    second call for the same module replaces the first. Raises `SeedingError` for a name that
    is none, and for functions that cannot be called.
    """
    way_back = (save is None and restore is None) or (callable(save) and callable(restore))
    if not isinstance(module, str) or not module or not callable(seed) or not way_back:
        raise SeedingError.about(
            "not a seeder",
            found=f"register_seeder({shown(module)}, {shown(seed)})",
            legal="the name of a module, a function that takes a seed, and functions to save "
            "and restore or neither",
        )
    _registered[module] = Seeder(module, seed, save, restore)
    if _state.seed is not None:
        if sys.modules.get(module) is not None:
            _seed(module)
        _watch()


class LibrarySeeds:
    """The seed that other libraries get when they are loaded."""

    __slots__ = ()

    def read(self) -> Any:
        return _state.seed

    def holds(self, value: int) -> bool:
        return _state.seed == value

    def write(self, value: int) -> None:
        _state.seed, _state.seeded = value, {}
        _watch()

    def save(self) -> Any:
        return _state.seed, dict(_state.seeded)

    def restore(self, saved: Any) -> None:
        _stop()
        for module, state in _state.seeded.items():
            seeder = _seeders().get(module)
            if seeder is not None and seeder.restore is not None:
                seeder.restore(state)
        _state.seed, _state.seeded = saved
        if _state.seed is not None:
            _watch()


def seed_again(seed: int) -> None:
    """Seed the libraries seeded so far, and those that come later, from another seed."""
    if _state.seed is not None:
        _state.seed = seed
        for module in _state.seeded:
            _seeders()[module].seed(seed)


def _watch() -> None:
    _stop()
    seeders = _seeders()
    for module in seeders:
        if sys.modules.get(module) is not None and module not in _state.seeded:
            _seed(module)
    waiting = [module for module in seeders if module not in sys.modules]
    _state.finder = AfterImport(waiting, _seed_when_loaded)
    _state.finder.watch()


def _stop() -> None:
    if _state.finder is not None:
        _state.finder.unwatch()
    _state.finder = None


def _seed(module: str) -> None:
    if _state.seed is None:
        return
    seeder = _seeders()[module]
    if _state.seeded.get(module) is None:  # the state that an earlier seeder saved is kept
        _state.seeded[module] = seeder.save() if seeder.save is not None else None
    seeder.seed(_state.seed)


def _seed_when_loaded(module: str) -> None:
    try:
        _seed(module)
    except Exception as error:  # noqa: BLE001 - whatever a seeder raises must not fail the import
        why = f"{type(error).__name__}: {error}"
        say(f"the seeder of {module} failed, so it is not seeded: {why}")


def _seeders() -> dict[str, Seeder]:
    return {**_installed(), **_registered}


@cache
def _installed() -> dict[str, Seeder]:
    # Searched once: that takes milliseconds.
    from importlib.metadata import entry_points  # takes 20 ms, and only a seed needs it

    def seed_by(entry: EntryPoint, seed: int) -> None:
        # Loading the entry point may import the library, so it happens no sooner than this.
        entry.load()(seed)

    found = entry_points(group=GROUP)
    return {entry.name: Seeder(entry.name, partial(seed_by, entry)) for entry in found}


def reseed(seed: int) -> None:
    """Seed torch, if it is loaded, as `pytest_randomly.random_seeder` asks of a plugin.

    pytest-randomly seeds Python's and numpy's generators itself, before every test
    (https://github.com/pytest-dev/pytest-randomly).
    """
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed % 2**32)
        note_not_given(seed % 2**32)
