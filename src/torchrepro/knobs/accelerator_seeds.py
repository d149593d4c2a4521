"""How the seed of one accelerator is reached, before and after the first use of its devices."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from inspect import getclosurevars, isfunction
from typing import TYPE_CHECKING, Any

from torchrepro.knobs.knob import Missing
from torchrepro.seeding import devices

if TYPE_CHECKING:
    from collections.abc import Mapping


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
            raise Missing(f"this torch has no torch.{self.device}")
        if self.device not in devices.built_for():
            raise Missing(f"this torch is not built for {self.device}")
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
        devices.seed_all(module, value)

    def save(self) -> Any:
        module = self._module()
        if not devices.initialised(module):
            return _Queued(_queue(module))
        return devices.states(module)

    def restore(self, saved: Any) -> None:
        module = self._module()
        if isinstance(saved, _Queued):
            if devices.initialised(module) or not _put_back_queue(module, saved.queue):
                # A fresh generator's seed is the one torch starts every device with.
                self.write(_torch().Generator().initial_seed())
        else:
            devices.set_states(module, saved)

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
