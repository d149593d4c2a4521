"""Random numbers that a device draws inside of a larger computation, out of reach as such.

Fused attention and the recurrent layers of cuDNN draw their masks themselves. While random
numbers come from the host, a call of them that drops is made of torch's other ops instead, as on
a CPU.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrepro.policies.interposed import has_kernel, ops_named, override, seeded_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_COMPOSITE = "CompositeImplicitAutograd"
_PLACED = "BackendSelect"
_RECURRENT = tuple(
    f"aten::{kind}.{form}"
    for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for form in ("input", "data")
)


def ops_with_device_kernels() -> Iterator[Any]:
    """Yield the random ops that torch makes of others, but a device of its own kind does not."""
    return _seeded_ops_with(_COMPOSITE)


def _seeded_ops_with(key: str) -> Iterator[Any]:
    """Yield the random ops with a kernel at `key` and another for a device of its own kind."""
    own = "PrivateUse1"
    return (op for op in seeded_ops() if has_kernel(op, key) and has_kernel(op, own))


def factories_of_devices() -> Iterator[Any]:
    """Yield the random ops that a device of its own kind makes tensors with, and torch places.

    Their calls reach no other place between torch, which finds the device, and the kernel.
    """
    return _seeded_ops_with(_PLACED)


def take_apart() -> Iterator[Callable[[], None]]:
    """Have attention and recurrent layers that drop made of other ops; yield what undoes it.

    Older torch has no ``torch.library.get_kernel``: there such calls draw on the device.
    """
    if not hasattr(import_module("torch").library, "get_kernel"):
        return
    stand_ins = {"aten::scaled_dot_product_attention": _attention}
    for name, stand_in in (stand_ins | dict.fromkeys(_RECURRENT, _recurrent)).items():
        for op in ops_named(name):
            yield override(op, _COMPOSITE, partial(stand_in, _positions(op)))


def _positions(op: Any) -> dict[str, int]:
    arguments = op._schema.arguments  # noqa: SLF001 - the schema has no public reader
    return {argument.name: position for position, argument in enumerate(arguments)}


def _given(positions: dict[str, int], args: Any, kwargs: Any, name: str) -> Any:
    position = positions[name]
    return args[position] if position < len(args) else kwargs.get(name)


def _attention(positions: Any, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    torch = import_module("torch")
    if args[0].device.type == "cpu" or not _given(positions, args, kwargs, "dropout_p"):
        return original(*args, **kwargs)
    return torch.ops.aten._scaled_dot_product_attention_math(*args, **kwargs)[0]  # noqa: SLF001 - an op of torch's


def _recurrent(positions: Any, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    drops = _given(positions, args, kwargs, "dropout") and _given(positions, args, kwargs, "train")
    cudnn = import_module("torch").backends.cudnn
    if args[0].device.type == "cpu" or not drops or not cudnn.enabled:
        return original(*args, **kwargs)
    cudnn.enabled = False
    try:
        return original(*args, **kwargs)
    finally:
        cudnn.enabled = True
