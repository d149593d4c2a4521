"""Random numbers for a device drawn from the CPU's generator, at torch's dispatcher.

The same seed gives other numbers on every kind of device, because each has a generator of its own
(https://github.com/pytorch/pytorch/issues/84234). Under this policy every op that draws on the
accelerator draws on the host instead, in program order, as a run on the CPU would, and the result
is moved over. The ops are those that torch itself tags as seeded randomness. Code that inductor
compiles calls these ops too, by its option `fallback_random`.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrepro.imports import AfterImport
from torchrepro.policies.effects import count
from torchrepro.policies.host_rng import drawn_inside
from torchrepro.policies.host_rng.generators import HostGenerators
from torchrepro.policies.interposed import Place, interpose, override, random_ops, withdraw
from torchrepro.policies.on_cpu import is_on_device, on_cpu
from torchrepro.policies.toggle import Toggle

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

POLICY = "device.rng"
_INDUCTOR = "torch._inductor.config"


def _host(undo: ExitStack) -> None:
    if import_module("torch").accelerator.is_available():
        _draw_on_host(undo)
    _draw_by_ops_when_compiled(undo)


def _draw_on_host(undo: ExitStack) -> None:
    generators = HostGenerators()
    for op in drawn_inside.factories_of_devices():
        undo.callback(override(op, "PrivateUse1", partial(_on_host, op, generators)))
    for op in (*random_ops(), *drawn_inside.ops_with_device_kernels()):
        undo.callback(withdraw, op, Place.HOST_RNG)
        interpose(op, Place.HOST_RNG, partial(_on_host, op, generators))
    for take_back in drawn_inside.take_apart():
        undo.callback(take_back)


def _on_host(
    op: Any,
    generators: HostGenerators,
    proceed: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run `op` on the CPU if it is asked to draw on a device."""
    if not is_on_device(args, kwargs):
        return proceed(*args, **kwargs)
    result, moved = on_cpu(op, args, kwargs, generators.of)
    count(POLICY, op.name(), "drawn on the host", moved=moved)
    return result


def _draw_by_ops_when_compiled(undo: ExitStack) -> None:
    """Have inductor draw by torch's ops, now or once it is loaded."""

    def draw_by_ops(module: str) -> None:
        config: Any = sys.modules[module]
        undo.callback(setattr, config, "fallback_random", config.fallback_random)
        config.fallback_random = True

    if _INDUCTOR in sys.modules:
        draw_by_ops(_INDUCTOR)
        return
    finder = AfterImport([_INDUCTOR], draw_by_ops)
    finder.watch()
    undo.callback(finder.unwatch)


policy = Toggle("native", "host", "host rng", _host)
"""Where random numbers come from: `native`, each device's generator, or `host`."""
