"""How the knobs of the seed reach each generator, and how each keeps its state.

`read` shows the seed a generator was started from where the generator knows it; undo brings the
full state back, so the numbers drawn after it are those that would have come anyway.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from importlib import import_module
from inspect import getclosurevars, isfunction
from typing import TYPE_CHECKING, Any

from torchrepro.knobs.knob import MissingState
from torchrepro.seeding import generators as devices
from torchrepro.seeding import loader, streams
from torchrepro.seeding.libraries import LibrarySeeds
from torchrepro.seeding.seeding_calls import SeedingCalls
from torchrepro.seeding.streams import PlanField, seed_of_rank

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class PythonSeed:
    """The generator behind the functions of `random`."""

    def read(self) -> Any:
        return None  # the generator does not remember its seed

    def write(self, value: int) -> None:
        random.seed(value)

    def save(self) -> Any:
        return random.getstate()

    def restore(self, saved: Any) -> None:
        random.setstate(saved)

    def holds(self, value: int) -> bool:
        return random.getstate() == random.Random(value).getstate()  # noqa: S311 - compared only


@dataclass(frozen=True, slots=True)
class NumpySeed:
    """The legacy global generator behind ``numpy.random.rand`` and its like."""

    @property
    def _numpy_random(self) -> Any:
        return import_module("numpy.random")

    def read(self) -> Any:
        return None

    def write(self, value: int) -> None:
        self._numpy_random.seed(value)

    def save(self) -> Any:
        return self._numpy_random.get_state(legacy=False)

    def restore(self, saved: Any) -> None:
        self._numpy_random.set_state(saved)

    def holds(self, value: int) -> bool:
        fresh = self._numpy_random.RandomState(value).get_state()
        now = self._numpy_random.get_state()
        return bool((fresh[1] == now[1]).all() and fresh[2:] == now[2:])


@dataclass(frozen=True, slots=True)
class TorchSeed:
    """torch's default CPU generator; the accelerators have rows of their own."""

    def read(self) -> Any:
        return _torch().initial_seed()

    def write(self, value: int) -> None:
        _torch().default_generator.manual_seed(value)

    def save(self) -> Any:
        return _torch().get_rng_state()

    def restore(self, saved: Any) -> None:
        _torch().set_rng_state(saved)

    def holds(self, value: int) -> bool:
        return bool(_torch().initial_seed() == value)


@dataclass(frozen=True, slots=True)
class RootSeed(PlanField):
    """The root of every stream; with it comes the rank from whose seed this process starts."""

    name: str = "seed"

    def write(self, value: int) -> None:
        PlanField.write(self, value)
        loader.put_register(loader.Register())
        plan = streams.current_plan()
        if plan.ranks_differ:
            streams.put_plan(replace(plan, started_as=plan.coordinate()))

    def save(self) -> Any:
        return streams.current_plan(), loader.present_register()

    def restore(self, saved: Any) -> None:
        plan, register = saved
        streams.put_plan(plan)
        loader.put_register(register)


@dataclass(frozen=True, slots=True)
class OfRank:
    """A generator that starts from this rank's own seed where ranks draw differently."""

    of_one: Any
    """How to reach the generator, whatever the rank."""

    def write(self, value: int) -> None:
        self.of_one.write(_of_rank(value))

    def holds(self, value: int) -> bool:
        return bool(self.of_one.holds(_of_rank(value)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of_one, name)


def _of_rank(seed: int) -> int:
    plan = streams.current_plan()
    return seed_of_rank(seed, plan.started_as) if plan.ranks_differ else seed


@dataclass(frozen=True, slots=True)
class AcceleratorSeed:
    """Every device of one accelerator, through its module ``torch.<device>``.

    Before the first use of a device torch queues the seed and hands it over at device init; an
    undo that comes earlier takes the queue back, one that comes later gives the devices the seed
    with which an untouched process starts.
    """

    device: str

    def _module(self) -> Any:
        module = getattr(_torch(), self.device, None)
        if module is None or not hasattr(module, "manual_seed"):
            raise MissingState(f"this torch has no torch.{self.device}")
        if self.device not in devices.built_for():
            raise MissingState(f"this torch is not built for {self.device}")
        return module

    def read(self) -> Any:
        module = self._module()
        if not devices.initialised(module):
            return None
        generators = getattr(module, "default_generators", ())
        seeds = sorted({int(generator.initial_seed()) for generator in generators})
        return seeds[0] if len(seeds) == 1 else seeds or None

    def write(self, value: int) -> None:
        module = self._module()
        devices.seed_device(module, value)

    def save(self) -> Any:
        module = self._module()
        if not devices.initialised(module):
            return _Queued(_queue(module))
        return devices.device_states(module)

    def restore(self, saved: Any) -> None:
        module = self._module()
        if isinstance(saved, _Queued):
            if devices.initialised(module) or not _put_back_queue(module, saved.queue):
                # A fresh generator's seed is the one torch starts every device with.
                self.write(_torch().Generator().initial_seed())
        else:
            devices.set_device_states(module, saved)

    def holds(self, value: int) -> bool:
        now = self.read()
        return now is None or now == value

    def inert(self, value: int, asked: Mapping[str, Any]) -> str:
        seed = None if devices.initialised(self._module()) else _seed_out_of_range(self._module())
        if seed is None:
            return ""
        return (
            f"the program gave torch.{self.device} the seed {seed}, which is out of range and "
            "waits for device init, where it fails every time"
        )


@dataclass(frozen=True, slots=True)
class _Queued:
    """What waited for device init when the state was saved."""

    queue: Any


def _torch() -> Any:
    return import_module("torch")


def _queue(module: Any) -> Any:
    """Return a copy of the calls and seeds that wait for device init.

    Private (``_queued_calls``, ``_lazy_seed_tracker``), because torch offers no public way to take
    a queued seed back. Where they are gone, `_put_back_queue` says so and undo re-seeds instead.
    """
    tracker = getattr(module, "_lazy_seed_tracker", None)
    return list(getattr(module, "_queued_calls", ())), dict(vars(tracker)) if tracker else None


def _seed_out_of_range(module: Any) -> int | None:
    """Return a seed among those that wait for device init with which no generator can start.

    torch queues a seed before it looks at it, and raises only then. Private (``_queued_calls``),
    see `_queue`; where it is gone no such seed is found.
    """
    for call, _ in getattr(module, "_queued_calls", ()):
        seed = getclosurevars(call).nonlocals.get("seed") if isfunction(call) else None
        if isinstance(seed, int) and not -(2**63) <= seed < 2**64:
            return seed
    return None


def _put_back_queue(module: Any, queue: Any) -> bool:
    calls, tracked = queue
    if not isinstance(getattr(module, "_queued_calls", None), list):
        return False
    module._queued_calls[:] = calls  # noqa: SLF001 - see _queue
    if tracked is not None:
        vars(module._lazy_seed_tracker).update(tracked)  # noqa: SLF001 - see _queue
    return True


streams_field = PlanField("streams", {})
ranks_field = PlanField("ranks")
root_seed = RootSeed()
library_seeds = OfRank(LibrarySeeds())
python_seed = OfRank(PythonSeed())
numpy_seed = OfRank(NumpySeed())
torch_seed = OfRank(TorchSeed())
seeding_calls = SeedingCalls()
cuda_seed = OfRank(AcceleratorSeed("cuda"))
npu_seed = OfRank(AcceleratorSeed("npu"))
mps_seed = OfRank(AcceleratorSeed("mps"))
xpu_seed = OfRank(AcceleratorSeed("xpu"))
