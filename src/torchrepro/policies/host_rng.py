"""Random numbers for devices, drawn on the host from the generator of the CPU.

One seed gives different random numbers on each type of device, because each type has its own
generator (https://github.com/pytorch/pytorch/issues/84234). Under this policy, every op that would
draw on the accelerator draws on the host, in program order like a run on the CPU. The result is
moved to the device. torch tags these ops as `nondeterministic_seeded`. Compiled code calls these
ops too, because the policy sets inductor's option `fallback_random`.

Fused attention and the recurrent layers of cuDNN draw masks inside their kernels. If such a call
drops elements, other ops of torch compute it instead, as on a CPU.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrepro.ground.imports import AfterImport
from torchrepro.policies.interpose import (
    Priority,
    has_kernel,
    interpose,
    ops_named,
    override,
    random_ops,
    seeded_ops,
)
from torchrepro.policies.policy import Toggle, count
from torchrepro.policies.run_on_cpu import is_on_device, on_cpu

if TYPE_CHECKING:
    from contextlib import ExitStack

POLICY = "device.rng"
_INDUCTOR = "torch._inductor.config"
_COMPOSITE = "CompositeImplicitAutograd"
_OWN_DEVICE = "PrivateUse1"
_RECURRENT = tuple(
    f"aten::{layer}.{form}"
    for layer in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for form in ("input", "data")
)

_SEED_AND_OFFSET = 16  # bytes: the size of the state of a CUDA or Ascend generator
_STEP = 4  # the smallest increment of the offset of a device generator
_GENERATORS, _STATES = 256, 64  # the most that are stored; a state has 5 kB


def _host(undo: ExitStack) -> None:
    _draw_by_ops_when_compiled(undo)
    if not import_module("torch").accelerator.is_available():
        return
    _compose_fused_ops(undo)
    cpu_generator = partial(_cpu_generator, OrderedDict())
    of_device = [op for op in seeded_ops() if has_kernel(op, _OWN_DEVICE)]
    for op in of_device:
        # `interpose` cannot wrap an op with a kernel at BackendSelect, such as `randn`.
        if has_kernel(op, "BackendSelect"):
            undo.callback(override(op, _OWN_DEVICE, partial(_on_host, op, cpu_generator)))
    # Includes ops that are composite in torch, but have a kernel on a custom device.
    for op in (*random_ops(), *(op for op in of_device if has_kernel(op, _COMPOSITE))):
        undo.callback(interpose(op, Priority.HOST_RNG, partial(_on_host, op, cpu_generator)))


policy = Toggle("native", "host", "host rng", _host)
"""The knob `device.rng`: `native` draws with the generator of each device, `host` on the CPU."""


def _on_host(
    op: Any,
    cpu_generator: Callable[[Any], Any],
    proceed: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not is_on_device(args, kwargs):
        return proceed(*args, **kwargs)
    result, moved = on_cpu(op, args, kwargs, cpu_generator)
    count(POLICY, op.name(), "drawn on the host", moved=moved)
    return result


@dataclass(slots=True)
class _Pair:
    """A device generator, the CPU generator that draws in its place, and recent states of both."""

    device: Any
    cpu: Any
    last_state: bytes = b""  # the state of the device generator after the last draw
    states: OrderedDict[bytes, Any] = field(default_factory=OrderedDict)
    """State of the device generator -> state of the CPU generator, for recent states."""


def _cpu_generator(pairs: OrderedDict[int, _Pair], generator: Any) -> Any:
    """Return the CPU generator that draws in place of `generator`, the generator of a device.

    Both start with the same seed. Each call advances the state of `generator`. If the state is
    not the state after the last call, the program has seeded or restored `generator`. The CPU
    generator is then seeded or restored, too.
    """
    if generator.device.type == "cpu":
        return generator
    # Each call gets a new Python object for the same C++ generator, so the key is the C++ address.
    # The pair keeps the generator alive, so that no other generator gets this address.
    address = generator._cdata  # noqa: SLF001 - torch has no public identity
    pair = pairs.get(address) or _Pair(generator, import_module("torch").Generator())
    _keep(pairs, address, pair, _GENERATORS)
    state = bytes(generator.get_state().tolist())
    if state != pair.last_state:
        known = pair.states.get(state)
        if known is None:
            pair.cpu.manual_seed(generator.initial_seed())
        else:
            pair.cpu.set_state(known)
    _keep(pair.states, state, pair.cpu.get_state(), _STATES)
    pair.last_state = _advanced(generator, state)
    return pair.cpu


def _keep(recent: OrderedDict[Any, Any], key: Any, value: Any, limit: int) -> None:
    recent[key] = value
    recent.move_to_end(key)
    if len(recent) > limit:
        recent.popitem(last=False)


def _advanced(generator: Any, state: bytes) -> bytes:
    if len(state) != _SEED_AND_OFFSET:
        return state
    offset = int.from_bytes(state[8:], "little") + _STEP
    torch = import_module("torch")
    generator.set_state(
        torch.tensor([*state[:8], *offset.to_bytes(8, "little")], dtype=torch.uint8)
    )
    return bytes(generator.get_state().tolist())


def _compose_fused_ops(undo: ExitStack) -> None:
    """Compute attention and recurrent layers with dropout by several ops, not a fused kernel.

    A fused kernel draws on the device. A torch without ``torch.library.get_kernel`` still uses it.
    """
    if not hasattr(import_module("torch").library, "get_kernel"):
        return
    for op in ops_named("aten::scaled_dot_product_attention", *_RECURRENT):
        arguments = op._schema.arguments  # noqa: SLF001 - the schema has no public reader
        names = [argument.name for argument in arguments]
        undo.callback(override(op, _COMPOSITE, partial(_composed, names)))


def _composed(names: list[str], original: Any, /, *args: Any, **kwargs: Any) -> Any:
    torch = import_module("torch")
    bound = {**dict(zip(names, args, strict=False)), **kwargs}
    drops = bound.get("dropout_p") or (bound.get("dropout") and bound.get("train"))
    if args[0].device.type == "cpu" or not drops:
        return original(*args, **kwargs)
    if "dropout_p" in bound:  # attention
        math = torch.ops.aten._scaled_dot_product_attention_math  # noqa: SLF001 - an op of torch
        return math(*args, **kwargs)[0]
    cudnn = torch.backends.cudnn
    if not cudnn.enabled:
        return original(*args, **kwargs)
    cudnn.enabled = False
    try:
        return original(*args, **kwargs)
    finally:
        cudnn.enabled = True


def _draw_by_ops_when_compiled(undo: ExitStack) -> None:
    def draw_by_ops(module: str) -> None:
        config: Any = sys.modules[module]
        undo.callback(setattr, config, "fallback_random", config.fallback_random)
        config.fallback_random = True

    finder = AfterImport([_INDUCTOR], draw_by_ops)
    finder.watch_all()
    undo.callback(finder.unwatch)
