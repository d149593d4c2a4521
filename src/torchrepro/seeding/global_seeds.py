"""Knobs that seed the global generators, and restore the generators' states at the undo.

`read` returns the seed of a generator if the generator stores it. Undo restores the full state, so
later draws are the same as without the profile. Other libraries that draw random numbers, such as
cupy, are seeded when the program imports them. torchrepro does not import them.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from importlib import import_module
from itertools import count
from multiprocessing import current_process
from typing import Any, NamedTuple

from torchrepro.ground.console import say
from torchrepro.ground.errors import SeedingError, shown
from torchrepro.ground.imports import AfterImport
from torchrepro.knobs.knob import MissingState
from torchrepro.seeding import generators, loader, streams
from torchrepro.seeding.seeding_calls import generators_set_by_program
from torchrepro.seeding.streams import Mesh, SeedPlan, derive, note_not_given, seed_of_rank


@dataclass(frozen=True, slots=True)
class PlanField:
    """A knob that sets one field of the seed plan. Undo restores the whole plan.

    A root seed also begins an empty register of loaders, so undo restores the register as well.
    """

    name: str
    unset: Any = None  # default of an unset field

    def read(self) -> Any:
        value = getattr(streams.current_plan(), self.name)
        return dict(value) if isinstance(value, Mapping) else value

    def holds(self, value: Any) -> bool:
        now = self.read()
        return bool((self.unset if now is None else now) == value)

    def write(self, value: Any) -> None:
        streams.drawn.clear()
        change: dict[str, Any] = {self.name: dict(value) if isinstance(value, Mapping) else value}
        streams.set_plan(replace(streams.current_plan(), **change))

    def save(self) -> Any:
        return streams.current_plan(), loader.loaders.register

    def restore(self, saved: Any) -> None:
        plan, loader.loaders.register = saved
        streams.set_plan(plan)


@dataclass(frozen=True, slots=True)
class RootSeed(PlanField):
    """A knob that sets the root seed, from which all streams derive, and notes the present rank."""

    name: str = "seed"

    def write(self, value: int) -> None:
        PlanField.write(self, value)
        loader.loaders.register = loader.Register()
        plan = replace(streams.current_plan(), agreed_seed=None)
        started_as = plan.coordinate() if plan.ranks_differ else plan.started_as
        streams.set_plan(replace(plan, started_as=started_as))


class SeedKnob:
    """A knob that starts generators from the seed of this rank, if ranks draw different numbers."""

    def read(self) -> Any:
        """Return the seed of the generators; None if they store no seed."""
        return None

    def write(self, value: int) -> None:
        self.start_from(streams.current_plan().started_from(value))

    def holds(self, value: int) -> bool:
        return self.is_from(streams.current_plan().started_from(value))

    @abstractmethod
    def start_from(self, seed: int) -> None:
        """Seed the generators with `seed`, the seed of this rank."""

    def is_from(self, seed: int) -> bool:
        return bool(self.read() == seed)


@dataclass(frozen=True, slots=True)
class HostSeed(SeedKnob):
    """A knob that seeds the global generator of a module. The generator stores no seed."""

    module: str
    name: str  # of the generator in `fresh_state`

    def start_from(self, seed: int) -> None:
        import_module(self.module).seed(seed)

    def is_from(self, seed: int) -> bool:
        plain = generators.plain_state
        return bool(plain(self.save()) == plain(generators.fresh_state(self.name, seed)))

    def save(self) -> Any:
        return generators.host_slot(self.name).read()

    def restore(self, saved: Any) -> None:
        generators.host_slot(self.name).write(saved)


class TorchSeed(HostSeed):
    def read(self) -> Any:
        return _torch().initial_seed()

    def start_from(self, seed: int) -> None:
        _torch().default_generator.manual_seed(seed)

    def is_from(self, seed: int) -> bool:
        return SeedKnob.is_from(self, seed)


@dataclass(frozen=True, slots=True)
class AcceleratorSeed(SeedKnob):
    """A knob that seeds all devices of one accelerator, through the module ``torch.<device>``.

    Before the first use of the devices, torch only queues a seed. The undo has three cases:

    - If the devices were in use before the seeding, it restores the states of the devices.
    - If the devices are still unused, it restores the queue.
    - If the first use came after the seeding, it seeds the devices with torch's default seed.
    """

    device: str

    def _module(self) -> Any:
        module = getattr(_torch(), self.device, None)
        if module is None or not hasattr(module, "manual_seed"):
            raise MissingState(f"this torch has no torch.{self.device}")
        if self.device not in generators.built_for():
            raise MissingState(f"this torch is not built for {self.device}")
        return module

    def read(self) -> Any:
        module = self._module()
        if not generators.initialised(module):
            return None
        seeds = sorted(generators.device_seeds(module))
        return seeds[0] if len(seeds) == 1 else seeds or None

    def start_from(self, seed: int) -> None:
        generators.seed_device(self._module(), seed)

    def save(self) -> Any:
        module = self._module()
        if not generators.initialised(module):
            return SeedQueue.of(module)
        return generators.device_states(module)

    def restore(self, saved: Any) -> None:
        module = self._module()
        if not isinstance(saved, SeedQueue):
            generators.set_device_states(module, saved)
        elif generators.initialised(module) or not saved.put_back(module):
            # torch starts every device with the seed of a fresh generator.
            self.start_from(_torch().Generator().initial_seed())

    def is_from(self, seed: int) -> bool:
        return self.read() in (None, seed)


class SeedQueue(NamedTuple):
    """A copy of torch's queue of calls and seeds that run when the devices are initialized.

    The queue is private (``_queued_calls``, ``_lazy_seed_tracker``): torch has no public function
    that removes a queued seed. If this torch has no such queue, `put_back` returns False, and undo
    seeds the devices instead.
    """

    calls: list[Any]
    seeds: dict[str, Any] | None

    @classmethod
    def of(cls, module: Any) -> SeedQueue:
        tracker = getattr(module, "_lazy_seed_tracker", None)
        calls = list(getattr(module, "_queued_calls", ()))
        return cls(calls, dict(vars(tracker)) if tracker else None)

    def put_back(self, module: Any) -> bool:
        if not isinstance(getattr(module, "_queued_calls", None), list):
            return False
        module._queued_calls[:] = self.calls  # noqa: SLF001 - see the class
        if self.seeds is not None:
            vars(module._lazy_seed_tracker).update(self.seeds)  # noqa: SLF001 - see the class
        return True


GROUP = "torchrepro.seeders"
"""Entry points of this group name a module to wait for and a function that takes a seed."""

_GYMNASIUM = "gymnasium.utils.seeding"


class Seeder(NamedTuple):
    module: str
    seed: Callable[[Any], Any]
    save: Callable[[], Any] = lambda: None
    restore: Callable[[Any], Any] = lambda _: None  # by default, undo does not restore the library


def _random(module: str) -> Any:
    return sys.modules[module].random  # read at the call, when the module is loaded


def _seed_gymnasium(root: int) -> None:
    """Replace gymnasium's `np_random`, which then seeds each new generator from a stream of `root`.

    Environments and spaces call the public function `gymnasium.utils.seeding.np_random` to create a
    generator. Without an explicit seed, the original takes a seed from the operating system.
    An explicit seed has the usual effect. In workers of a vector environment, the
    stream depends on the name of the process. Existing generators, and code that imported the
    function by name, are not affected.
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
        # Sets a new state object instead of seeding the present one, so that undo can restore it.
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
"""The libraries that need no `register_seeder`."""

_registered: dict[str, Seeder] = {seeder.module: seeder for seeder in SEEDERS}


def register_seeder(
    module: str,
    seed: Callable[[int], Any],
    save: Callable[[], Any] | None = None,
    restore: Callable[[Any], Any] | None = None,
) -> None:
    """Make profiles with a seed call ``seed(number)`` to seed the library `module`.

    If such a profile is active, the call happens now if `module` is loaded, else when the program
    imports it. torchrepro never imports it. With `save` and `restore`, undo restores the library's
    state. A second call for the same module replaces the first. Raises `SeedingError` if `module`
    is not a name, a function is not callable, or only one of `save` and `restore` is passed.
    """
    is_undoable = callable(save) and callable(restore)
    has_valid_undo = is_undoable or (save is None and restore is None)
    if not isinstance(module, str) or not module or not callable(seed) or not has_valid_undo:
        raise SeedingError.about(
            "not a seeder",
            found=f"register_seeder({shown(module)}, {shown(seed)})",
            legal="the name of a module, a function that takes a seed, and functions to save "
            "and restore or neither",
        )
    undo = () if save is None or restore is None else (save, restore)
    _registered[module] = Seeder(module, seed, *undo)
    if library_seeds.seed is not None:
        if sys.modules.get(module) is not None:
            library_seeds.seed_library(module)
        library_seeds.watch()


class LibrarySeeds(SeedKnob):
    def __init__(self) -> None:
        self.seed: int | None = None
        self.seeded: dict[str, Any] = {}  # library -> its state before it was seeded
        self._waiting = AfterImport((), self._seed_when_loaded)  # for libraries not loaded yet

    def read(self) -> Any:
        return self.seed

    def start_from(self, seed: int) -> None:
        self.seed, self.seeded = seed, {}
        self.watch()

    def save(self) -> Any:
        return self.seed, dict(self.seeded)

    def restore(self, saved: Any) -> None:
        self._waiting.unwatch()
        for module, state in self.seeded.items():
            _seeders()[module].restore(state)
        self.seed, self.seeded = saved
        if self.seed is not None:
            self.watch()

    def watch(self) -> None:
        seeders = _seeders()
        for module in seeders:
            if sys.modules.get(module) is not None and module not in self.seeded:
                self.seed_library(module)
        self._waiting.modules = dict.fromkeys(name for name in seeders if name not in sys.modules)
        self._waiting.watch()

    def seed_library(self, module: str) -> None:
        seeder = _seeders()[module]
        if self.seeded.get(module) is None:  # else an earlier seeder has saved the state
            self.seeded[module] = seeder.save()
        seeder.seed(self.seed)

    def _seed_when_loaded(self, module: str) -> None:
        try:
            if self.seed is not None:
                self.seed_library(module)
        except Exception as error:  # noqa: BLE001 - an error of a seeder must not fail the import
            why = f"{type(error).__name__}: {error}"
            say(f"the seeder of {module} failed, so it is not seeded: {why}")


library_seeds = LibrarySeeds()


def _seeders() -> dict[str, Seeder]:
    return {**_installed(), **_registered}


@cache
def _installed() -> dict[str, Seeder]:
    # Cached, because the search takes milliseconds.
    from importlib.metadata import entry_points  # takes 20 ms, and only a seed needs it

    # Loading an entry point may import the library, so it waits until the library is seeded.
    return {
        entry.name: Seeder(entry.name, partial(lambda entry, seed: entry.load()(seed), entry))
        for entry in entry_points(group=GROUP)
    }


def reseed(seed: int) -> None:
    """Seed torch if torch is loaded. pytest-randomly calls this entry point before every test.

    The group of the entry point is `pytest_randomly.random_seeder`. pytest-randomly seeds the
    generators of Python and numpy itself (https://github.com/pytest-dev/pytest-randomly).
    """
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed % 2**32)
        note_not_given(seed % 2**32)


def _torch() -> Any:
    return import_module("torch")


streams_field = PlanField("streams", {})
ranks_field = PlanField("ranks")
root_seed = RootSeed()
python_seed = HostSeed("random", "python")
numpy_seed = HostSeed("numpy.random", "numpy")
torch_seed = TorchSeed("torch", "torch")
cuda_seed = AcceleratorSeed("cuda")
npu_seed = AcceleratorSeed("npu")
mps_seed = AcceleratorSeed("mps")
xpu_seed = AcceleratorSeed("xpu")


def use_mesh(mesh: Any) -> Mesh:
    """Derive this process's streams from its coordinates in `mesh`, a torch `DeviceMesh`.

    From then on, ranks draw different numbers along each dimension that the profile's `ranks` sets
    to `distinct`. Dimensions without a policy are distinct too, except dimensions whose ranks share
    one sample (`tp`, `sp`, `cp`). If the profile makes ranks distinct, the global generators are
    seeded again, with this rank's seed. The profile's undo reverts this call. Raises `SeedingError`
    if the mesh has no names, does not contain this rank, or lacks a dimension in the profile.
    """
    if not hasattr(mesh, "mesh_dim_names"):
        raise SeedingError.about("not a device mesh", found=shown(mesh), legal="a torch DeviceMesh")
    names, position = mesh.mesh_dim_names, mesh.get_coordinate()
    if not names or position is None:
        problem = "does not contain this rank" if names else "has no names for its dimensions"
        raise SeedingError.about(
            f"the mesh {problem}",
            found=shown(mesh),
            todo="init_device_mesh(..., mesh_dim_names=('dp', 'tp'))",
        )
    plan = streams.current_plan()
    streams.check_dimensions(plan.ranks, names)
    sizes = tuple(mesh.size(dimension) for dimension in range(mesh.ndim))
    mesh_of_plan = Mesh(tuple(names), sizes, tuple(position))
    plan = replace(plan, mesh=mesh_of_plan)
    streams.set_plan(plan)
    _start(plan)
    return mesh_of_plan


def seed_as_this_rank() -> None:
    """Seed the global generators with this rank's seed, if they started from another rank's seed.

    A process may learn its rank only from the process group. Until then it counts as rank 0. A
    generator that the program itself has seeded or restored keeps its state.
    """
    plan = streams.current_plan()
    if plan.ranks_differ and plan.coordinate() != plan.started_as:
        _start(plan, generators_set_by_program())


def _start(plan: SeedPlan, moved: Collection[str] = ()) -> None:
    if plan.seed is None or not plan.ranks_differ:
        return
    rank = plan.coordinate()
    streams.set_plan(replace(plan, started_as=rank))
    seed = seed_of_rank(plan.seed, rank)
    for generator in (python_seed, numpy_seed, torch_seed):
        if generator.name not in moved:
            generator.start_from(seed)
    for name, module in generators.devices_in_use().items():
        if name not in moved:
            generators.seed_device(module, seed)
    if library_seeds.seed is not None:
        library_seeds.seed = seed
        for module in library_seeds.seeded:
            _seeders()[module].seed(seed)
