"""Random numbers for devices, drawn on the host from the CPU's generator.

The same seed gives other numbers on every kind of device, because each has a generator of its own
(https://github.com/pytorch/pytorch/issues/84234). Under this policy every op that draws on the
accelerator draws on the host instead, in program order, as a run on the CPU would, and the result
is moved over. The ops are those that torch itself tags as seeded randomness. Code that inductor
compiles calls these ops too, by its option `fallback_random`.

Fused attention and the recurrent layers of cuDNN draw their masks themselves. A call of them that
drops is made of torch's other ops instead, as on a CPU.
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
    f"aten::{kind}.{form}"
    for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for form in ("input", "data")
)

_SEED_AND_OFFSET = 16  # bytes: how the generators of CUDA and of Ascend keep their state
_STEP = 4  # what a device's generator advances by at the least
_GENERATORS, _STATES = 256, 64  # kept at most; a state has 5 kB


def _host(undo: ExitStack) -> None:
    _draw_by_ops_when_compiled(undo)
    if not import_module("torch").accelerator.is_available():
        return
    _compose_fused_ops(undo)
    stand_in = partial(_stand_in, OrderedDict())
    of_device = [op for op in seeded_ops() if has_kernel(op, _OWN_DEVICE)]
    for op in of_device:
        # torch places the tensors that these make: no other key is between it and the kernel.
        if has_kernel(op, "BackendSelect"):
            undo.callback(override(op, _OWN_DEVICE, partial(_on_host, op, stand_in)))
    # Ops that torch makes of others, but a device of its own kind does not, are among them.
    for op in (*random_ops(), *(op for op in of_device if has_kernel(op, _COMPOSITE))):
        undo.callback(interpose(op, Priority.HOST_RNG, partial(_on_host, op, stand_in)))


policy = Toggle("native", "host", "host rng", _host)
"""Where random numbers come from: `native`, each device's generator, or `host`."""


def _on_host(
    op: Any,
    stand_in: Callable[[Any], Any],
    proceed: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not is_on_device(args, kwargs):
        return proceed(*args, **kwargs)
    result, moved = on_cpu(op, args, kwargs, stand_in)
    count(POLICY, op.name(), "drawn on the host", moved=moved)
    return result


@dataclass(slots=True)
class _Pair:
    """A device's generator, the one of the CPU that stands in for it, and where both have been."""

    own: Any
    stand_in: Any
    left: bytes = b""  # the state in which the device's generator was left
    states: OrderedDict[bytes, Any] = field(default_factory=OrderedDict)
    """State of the device's generator -> that of its stand-in, the latest ones."""


def _stand_in(pairs: OrderedDict[int, _Pair], generator: Any) -> Any:
    # A CPU generator of the same seed. A device's generator is moved on a little at every draw. A
    # change from outside is noticed by that: where it is seeded again or given back a state it had,
    # its stand-in goes there too.
    if generator.device.type == "cpu":
        return generator
    # Every call gets another Python object for one generator, whose address stays: each is kept
    # alive in its pair, so that no other generator can have that address.
    address = generator._cdata  # noqa: SLF001 - torch has no public identity
    pair = pairs.get(address) or _Pair(generator, import_module("torch").Generator())
    _keep(pairs, address, pair, _GENERATORS)
    state = bytes(generator.get_state().tolist())
    if state != pair.left:
        known = pair.states.get(state)
        if known is None:
            pair.stand_in.manual_seed(generator.initial_seed())
        else:
            pair.stand_in.set_state(known)
    _keep(pair.states, state, pair.stand_in.get_state(), _STATES)
    pair.left = _advanced(generator, state)
    return pair.stand_in


def _keep(kept: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)


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
    """Have attention and recurrent layers that drop made of other ops.

    Older torch has no ``torch.library.get_kernel``: there such calls draw on the device.
    """
    if not hasattr(import_module("torch").library, "get_kernel"):
        return
    for op in ops_named("aten::scaled_dot_product_attention", *_RECURRENT):
        arguments = op._schema.arguments  # noqa: SLF001 - the schema has no public reader
        names = [argument.name for argument in arguments]
        undo.callback(override(op, _COMPOSITE, partial(_composed, names)))


def _composed(names: list[str], original: Any, /, *args: Any, **kwargs: Any) -> Any:
    torch = import_module("torch")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    drops = given.get("dropout_p") or (given.get("dropout") and given.get("train"))
    if args[0].device.type == "cpu" or not drops:
        return original(*args, **kwargs)
    if "dropout_p" in given:  # attention
        math = torch.ops.aten._scaled_dot_product_attention_math  # noqa: SLF001 - an op of torch's
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
