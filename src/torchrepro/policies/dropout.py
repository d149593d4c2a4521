"""Dropout as the identity, for every caller in the process.

A stand-in at the composite ops reaches modules, functions, names imported earlier, recurrent
layers and attention alike. One at `native_dropout` reaches what compiled and scripted code calls.
Kernels that drop inside a larger computation are given a probability of 0
(https://docs.pytorch.org/docs/stable/library.html).

A mask that a module writes by hand looks like any other random number. Nothing is assumed about
it: every op that still draws is counted and named in the report. Code that inductor has compiled
draws inside kernels of its own, which is not seen here.
"""

from __future__ import annotations

import threading
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrepro.callers import frames, package
from torchrepro.policies import dropout_masks
from torchrepro.policies.interpose import (
    Priority,
    can_be_interposed,
    has_kernel,
    interpose,
    op_names,
    ops_named,
    override,
    packet_name,
    random_ops,
    withdraw,
)
from torchrepro.policies.policy import Toggle, count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import ExitStack


_COMPOSITE_KEYS = (
    "CompositeImplicitAutograd",
    "FuncTorchDynamicLayerFrontMode",  # torch.func takes these ops apart itself
    "FuncTorchVmapMode",
    "PrivateUse1",
    "AutogradPrivateUse1",
)
"""Where an op that torch makes of other ops can have a kernel of its own."""

_KERNEL_KEYS = ("Autograd", "FuncTorchVmapMode", "AutogradPrivateUse1")
"""Where an op with kernels is met by calls that autograd follows, as compiled ones."""

PROBABILITIES = {
    "dropout_p": 0.0,
    "dropout": 0.0,
    "dropout_prob": 0.0,
    "keep_prob": 1.0,
}
"""Arguments of larger kernels that drop inside, and the value with which they drop nothing."""

OF_ASCEND = {"p": 0.0, "prob": 0.0}
"""The same for the ops of torch_npu that have dropout in their name."""

_NAMESPACES = ("aten::", "npu::")

POLICY = "dropout"
_counting = threading.local()  # .inside: whether this thread is within an op that is counted


def _identity(tensor: Any, p: float, train: bool) -> Any:  # noqa: FBT001 - aten's schema
    # A copy, because code after dropout may write to its result in place.
    same = _identity_in_place(tensor, p, train)
    return same.clone() if p and train else same


def _identity_in_place(tensor: Any, p: float, train: bool) -> Any:  # noqa: FBT001 - aten's schema
    if not 0 <= p <= 1:  # torch checks it here as well, in these words
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    return tensor


def _identity_and_mask(tensor: Any, p: float, train: bool | None = True) -> Any:  # noqa: FBT001, FBT002
    torch = import_module("torch")
    return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)


def _identity_and_bytes(tensor: Any, p: float, generator: Any = None) -> Any:
    torch = import_module("torch")
    return tensor.clone(), torch.ones_like(tensor, dtype=torch.uint8)


def _gradient_unchanged(gradient: Any, mask: Any, scale: float) -> Any:
    # TorchScript saves a mask of ones and asks for 1 / (1 - p) times the gradient.
    return gradient.clone()


def _rrelu(tensor: Any, lower: float = 1 / 8, upper: float = 1 / 3, *rest: Any, **more: Any) -> Any:
    return import_module("torch").nn.functional.leaky_relu(tensor, (lower + upper) / 2)


def _rrelu_in_place(
    tensor: Any, lower: float = 1 / 8, upper: float = 1 / 3, *rest: Any, **more: Any
) -> Any:
    return import_module("torch").nn.functional.leaky_relu_(tensor, (lower + upper) / 2)


def _slopes(tensor: Any, lower: float = 1 / 8, upper: float = 1 / 3, *rest: Any) -> Any:
    """Return what backward multiplies a gradient with, as torch keeps it in `noise`."""
    torch = import_module("torch")
    with torch.no_grad():
        return torch.ones_like(tensor).masked_fill_(tensor <= 0, (lower + upper) / 2)


def _rrelu_with_noise(tensor: Any, noise: Any, *rest: Any, **more: Any) -> Any:
    noise.copy_(_slopes(tensor, *rest))
    return _rrelu(tensor, *rest)


def _rrelu_with_noise_in_place(tensor: Any, noise: Any, *rest: Any, **more: Any) -> Any:
    noise.copy_(_slopes(tensor, *rest))
    return _rrelu_in_place(tensor, *rest)


def _rrelu_with_noise_functional(tensor: Any, noise: Any, *rest: Any, **more: Any) -> Any:
    return _rrelu(tensor, *rest), _slopes(tensor, *rest)


COMPOSITE: dict[str, Callable[..., Any]] = {
    "dropout": _identity,
    "feature_dropout": _identity,
    "alpha_dropout": _identity,
    "feature_alpha_dropout": _identity,
    "dropout_": _identity_in_place,
    "feature_dropout_": _identity_in_place,
    "alpha_dropout_": _identity_in_place,
    "feature_alpha_dropout_": _identity_in_place,
    "rrelu": _rrelu,
    "rrelu_": _rrelu_in_place,
}
"""Ops that torch makes of other ops, and what stands in for them."""

WITH_KERNELS: dict[str, Callable[..., Any]] = {
    "native_dropout": _identity_and_mask,
    "native_dropout_backward": _gradient_unchanged,
    "_fused_dropout": _identity_and_bytes,
    "rrelu_with_noise": _rrelu_with_noise,
    "rrelu_with_noise_": _rrelu_with_noise_in_place,
    "rrelu_with_noise_functional": _rrelu_with_noise_functional,
}
"""Ops with kernels of their own, and what stands in for them."""


def _zero(undo: ExitStack) -> None:
    """Put the stand-ins in the place of torch's dropout, and count the ops that still draw."""

    def interpose_for_now(op: Any, priority: Priority, around: Callable[..., Any]) -> None:
        undo.callback(withdraw, op, priority)
        interpose(op, priority, around)

    for table, keys in ((COMPOSITE, _COMPOSITE_KEYS), (WITH_KERNELS, _KERNEL_KEYS)):
        for name, stand_in in table.items():
            for op in ops_named(f"aten::{name}"):
                for key in filter(partial(has_kernel, op), keys):
                    undo.callback(override(op, key, partial(_instead, stand_in)))
                if table is WITH_KERNELS:
                    interpose_for_now(op, Priority.DROPOUT, partial(_instead, stand_in))
                else:
                    _replace_in_python(undo, op, stand_in)
    for op, places in _larger_kernels():
        interpose_for_now(op, Priority.DROPOUT, partial(_without_dropout, places))
    undo.callback(dropout_masks.restore)
    dropout_masks.zero()
    for op in random_ops():
        arguments = {argument.name for argument in op._schema.arguments}  # noqa: SLF001 - the schema has no public reader
        # Dropout, and what drops inside, draws nothing when it is zeroed.
        if packet_name(op) not in WITH_KERNELS and arguments.isdisjoint(PROBABILITIES):
            interpose_for_now(op, Priority.RANDOM_OPS, partial(_count, op.name()))


policy = Toggle("keep", "zero", "dropout zero", _zero)
"""Whether dropout is zeroed: `keep` leaves torch alone, `zero` overrides its dropout."""


def _instead(
    stand_in: Callable[..., Any], proceed: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return stand_in(*args, **kwargs)


def _larger_kernels() -> Iterator[tuple[Any, tuple[tuple[int, str, float], ...]]]:
    """Yield every kernel that drops inside, with the arguments that say so."""
    names = (name for name in op_names() if name.startswith(_NAMESPACES))
    for op in ops_named(*names):
        of_ascend = op.name().startswith("npu::") and "dropout" in op.name()
        neutral = {**PROBABILITIES, **(OF_ASCEND if of_ascend else {})}
        places = tuple(
            (position, argument.name, neutral[argument.name])
            for position, argument in enumerate(op._schema.arguments)  # noqa: SLF001 - the schema has no public reader
            if argument.name in neutral and str(argument.type) == "float"
        )
        if places and can_be_interposed(op):
            yield op, places


def _without_dropout(
    places: tuple[tuple[int, str, float], ...],
    proceed: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a larger kernel with a probability that drops nothing."""
    positional = list(args)
    for position, name, neutral in places:
        if position < len(positional):
            positional[position] = neutral
        elif name in kwargs:
            kwargs[name] = neutral
    return proceed(*positional, **kwargs)


def _replace_in_python(undo: ExitStack, op: Any, stand_in: Callable[..., Any]) -> None:
    """Put the stand-in where torch.compile looks before the dispatcher.

    Private (``OpOverload.py_kernels``): the decompositions that torch writes in Python outrank
    its dispatcher while code is traced, and there is no public way to replace one. Where they are
    gone, nothing outranks the override.
    """
    kernels: dict[Any, Any] = getattr(op, "py_kernels", {})
    before = {key: kernel for key, kernel in kernels.items() if str(key) != "DispatchKey.Meta"}

    def put(present: dict[Any, Any]) -> None:
        kernels.update(present)
        getattr(op, "_dispatch_cache", {}).clear()

    undo.callback(put, before)
    put(dict.fromkeys(before, stand_in))


def _count(name: str, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if getattr(_counting, "inside", False):
        return proceed(*args, **kwargs)  # an op that draws by another is counted once
    _counting.inside = True
    try:
        count(POLICY, name, "drew random numbers", _caller())
        return proceed(*args, **kwargs)
    finally:
        _counting.inside = False


def _caller() -> str:
    """Return ``module.function:line`` of the nearest caller outside of torch."""
    for frame in frames():
        # Code that torch generates belongs to no module.
        if package(frame) not in ("torch", "torchrepro", ""):
            return f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}:{frame.f_lineno}"
    return "torch itself"
