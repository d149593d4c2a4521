"""The knobs of the seed: how each global generator is seeded, and how its state is brought back.

`read` returns the seed of a generator where the generator knows it. Undo restores the full state,
so the numbers drawn after it are those that would have come anyway.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from torchrepro.knobs.knob import MissingState
from torchrepro.seeding import generators, libraries, loader, streams
from torchrepro.seeding.libraries import LibrarySeeds
from torchrepro.seeding.ranks import Mesh, mesh_place
from torchrepro.seeding.seeding_calls import SeedingCalls, moved_by_program
from torchrepro.seeding.streams import SeedPlan, seed_of_rank


@dataclass(frozen=True, slots=True)
class PlanField:
    """One field of the seed plan as a knob; undo brings the whole plan back."""

    name: str
    unset: Any = None  # the value that an unset field stands for

    def read(self) -> Any:
        value = getattr(streams.current_plan(), self.name)
        return dict(value) if isinstance(value, Mapping) else value

    def holds(self, value: Any) -> bool:
        now = self.read()
        return bool((self.unset if now is None else now) == value)

    def write(self, value: Any) -> None:
        streams.drawn.clear()
        its: dict[str, Any] = {self.name: dict(value) if isinstance(value, Mapping) else value}
        streams.put_plan(replace(streams.current_plan(), **its))

    def save(self) -> Any:
        return streams.current_plan()

    def restore(self, saved: Any) -> None:
        streams.put_plan(saved)


@dataclass(frozen=True, slots=True)
class RootSeed(PlanField):
    """The root of every stream; with it comes the rank from whose seed this process starts."""

    name: str = "seed"

    def write(self, value: int) -> None:
        PlanField.write(self, value)
        loader.put_register(loader.Register())
        plan = replace(streams.current_plan(), agreed_seed=None)
        started_as = plan.coordinate() if plan.ranks_differ else plan.started_as
        streams.put_plan(replace(plan, started_as=started_as))

    def save(self) -> Any:
        return streams.current_plan(), loader.loaders.register

    def restore(self, saved: Any) -> None:
        plan, register = saved
        streams.put_plan(plan)
        loader.put_register(register)


@dataclass(frozen=True, slots=True)
class HostSeed:
    """The global generator behind the functions of a module; it does not remember its seed."""

    module: str
    name: str  # of its state, as `fresh_state` takes it
    save: Callable[[], Any]
    restore: Callable[[Any], Any]

    def read(self) -> Any:
        return None

    def write(self, value: int) -> None:
        import_module(self.module).seed(value)

    def holds(self, value: int) -> bool:
        plain = generators.plain_state
        return bool(plain(self.save()) == plain(generators.fresh_state(self.name, value)))


class TorchSeed:
    """torch's default CPU generator; the accelerators have rows of their own."""

    __slots__ = ()

    def read(self) -> Any:
        return _torch().initial_seed()

    def write(self, value: int) -> None:
        _torch().default_generator.manual_seed(value)

    def save(self) -> Any:
        return _torch().get_rng_state()

    def restore(self, saved: Any) -> None:
        _torch().set_rng_state(saved)

    def holds(self, value: int) -> bool:
        return bool(self.read() == value)


@dataclass(frozen=True, slots=True)
class AcceleratorSeed:
    """Every device of one accelerator, through its module ``torch.<device>``.

    Before the first use of a device torch queues the seed and hands it over at device init. An
    undo that comes earlier takes the queue back. One that comes later gives the devices the seed
    with which an untouched process starts.
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

    def write(self, value: int) -> None:
        generators.seed_device(self._module(), value)

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
            # A fresh generator's seed is the one torch starts every device with.
            self.write(_torch().Generator().initial_seed())

    def holds(self, value: int) -> bool:
        now = self.read()
        return now is None or now == value


@dataclass(frozen=True, slots=True)
class SeedQueue:
    """A copy of the calls and seeds that wait for device init.

    Private (``_queued_calls``, ``_lazy_seed_tracker``), because torch offers no public way to take
    a queued seed back. Where they are gone, `put_back` says so and undo re-seeds instead.
    """

    calls: list[Any]
    seeds: dict[str, Any] | None

    @classmethod
    def of(cls, module: Any) -> SeedQueue:
        """Return a copy of what waits for the init of the devices of `module`."""
        tracker = getattr(module, "_lazy_seed_tracker", None)
        calls = list(getattr(module, "_queued_calls", ()))
        return cls(calls, dict(vars(tracker)) if tracker else None)

    def put_back(self, module: Any) -> bool:
        """Make this the queue of `module` again; return whether that was possible."""
        if not isinstance(getattr(module, "_queued_calls", None), list):
            return False
        module._queued_calls[:] = self.calls  # noqa: SLF001 - see above
        if self.seeds is not None:
            vars(module._lazy_seed_tracker).update(self.seeds)  # noqa: SLF001 - see above
        return True


@dataclass(frozen=True, slots=True)
class SeedByRank:
    """A generator that starts from this rank's own seed where ranks draw differently."""

    generator: Any  # the access to it, whatever the rank

    def write(self, value: int) -> None:
        self.generator.write(streams.current_plan().started_from(value))

    def holds(self, value: int) -> bool:
        return bool(self.generator.holds(streams.current_plan().started_from(value)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.generator, name)


def _torch() -> Any:
    return import_module("torch")


_PYTHON = HostSeed("random", "python", random.getstate, random.setstate)
_NUMPY = HostSeed(
    "numpy.random",
    "numpy",
    lambda: import_module("numpy.random").get_state(legacy=False),
    lambda saved: import_module("numpy.random").set_state(saved),
)
streams_field = PlanField("streams", {})
ranks_field = PlanField("ranks")
root_seed = RootSeed()
library_seeds = SeedByRank(LibrarySeeds())
python_seed = SeedByRank(_PYTHON)
numpy_seed = SeedByRank(_NUMPY)
torch_seed = SeedByRank(TorchSeed())
seeding_calls = SeedingCalls()
cuda_seed = SeedByRank(AcceleratorSeed("cuda"))
npu_seed = SeedByRank(AcceleratorSeed("npu"))
mps_seed = SeedByRank(AcceleratorSeed("mps"))
xpu_seed = SeedByRank(AcceleratorSeed("xpu"))


def use_mesh(mesh: Any) -> Mesh:
    """Tell the streams of this process where it stands in `mesh`, a torch `DeviceMesh`.

    From then on ranks differ along the dimensions that the profile's `ranks` calls distinct.
    Dimensions it does not name differ unless they share one sample (`tp`, `sp`, `cp`). Where the
    profile makes ranks distinct, the global generators start anew from this rank's seed. Undone
    with the profile. Raises `SeedingError` for a mesh without names, one that leaves this rank
    out, or one that lacks a dimension which the profile names.
    """
    plan = streams.current_plan()
    place = mesh_place(mesh, plan.ranks)
    plan = replace(plan, mesh=place)
    streams.put_plan(plan)
    _start(plan)
    return place


def seed_as_this_rank() -> None:
    """Start the global generators from this rank's seed, if they started from another rank's.

    A process that only learns its rank when the process group is made started as rank 0. What the
    program itself has seeded, or put back, since stays as it is.
    """
    plan = streams.current_plan()
    if plan.ranks_differ and plan.coordinate() != plan.started_as:
        _start(plan, moved_by_program())


def _start(plan: SeedPlan, own: Collection[str] = ()) -> None:
    """Start the global generators from the seed of this rank, if ranks have seeds of their own.

    Those whose names are in `own` stay where they are.
    """
    if plan.seed is None or not plan.ranks_differ:
        return
    rank = plan.coordinate()
    streams.put_plan(replace(plan, started_as=rank))
    seed = seed_of_rank(plan.seed, rank)
    for name, generator in (("python", _PYTHON), ("numpy", _NUMPY), ("torch", TorchSeed())):
        if name not in own:
            generator.write(seed)
    for name, module in generators.devices_in_use().items():
        if name not in own:
            generators.seed_device(module, seed)
    libraries.seed_again(seed)
