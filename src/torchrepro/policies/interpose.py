"""Wrap Python functions around the kernels of single ops of torch, for every caller.

On its way to a kernel, a call passes the dispatch key BackendSelect. This key comes after
autograd, so gradients are not changed, and before the kernels of all devices
(https://github.com/pytorch/pytorch/wiki/PyTorch-dispatcher-walkthrough). A function registered at
this key for one op (https://docs.pytorch.org/docs/stable/library.html) receives the calls from
Python, C++ and backward. The function can change a call before it passes the call to the kernel.
Other ops are not changed and do not become slower.

A registration is never removed. If no policy needs it any more, it passes every call on. Removing
it would free a kernel that another thread may be running: torch releases the interpreter lock
inside an op, and the dispatcher of torch does not lock kernels.

An op can have several overloads: ``aten::median`` has ``aten::median.dim`` and others. In a
profile, a name without an overload means all overloads of the op.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import cache, partial, wraps
from importlib import import_module
from typing import Any

from torchrepro.ground.errors import ProfileError, near
from torchrepro.ground.fork_safety import fork_safe_lock


class Priority(IntEnum):
    """The order of the functions around an op. The last function calls the kernel."""

    DROPOUT = 0
    FALLBACK = 1
    HOST_RNG = 2


_KEY = "BackendSelect"
_COMPOSITE_KEYS = ("CompositeImplicitAutograd", _KEY)
"""Keys whose kernels call other ops at BackendSelect or before it."""

_RUNTIME_KEYS = {"CompositeImplicitAutograd": "CPU", "Autograd": "AutogradCPU"}
"""Alias key -> a key where torch stores the kernel registered at the alias."""

_lock = fork_safe_lock()
interposed: dict[Any, dict[Priority, Callable[..., Any]]] = {}  # op -> the functions around it
_libraries: dict[Any, Any] = {}  # op -> the torch.library.Library that holds its registration
_names: set[str] = set()  # names of these ops, even if a custom op was redefined later
_overrides: dict[tuple[Any, str], tuple[list[Callable[..., Any]], Any]] = {}
"""(Op, key) -> (replacements of its kernel, latest last; the registration)."""


def interpose(op: Any, priority: Priority, around: Callable[..., Any]) -> Callable[[], None]:
    """Route every call of the overload `op` through `around`, and return a function to undo this.

    `around(proceed, *args, **kwargs)` returns the result for the caller.
    `proceed(*args, **kwargs)` calls the next function, or the kernel. Calls with `meta` tensors
    skip `around`. Changes the dispatcher of torch.
    """
    with _lock:
        if op not in _libraries:
            call = _with_tensors(op, partial(_call_through, op))
            _names.add(op.name())
            _libraries[op] = _registered(op, _KEY, partial(_enter, op, call, _keys_below()))
        interposed[op] = {**interposed.get(op, {}), priority: around}
    return partial(withdraw, op, priority)


def withdraw(op: Any, priority: Priority) -> None:
    """Remove the function that `interpose` added for `op` and `priority`, if there is one."""
    with _lock:
        remaining = {**interposed.get(op, {})}
        remaining.pop(priority, None)
        if remaining:
            interposed[op] = remaining
        else:
            interposed.pop(op, None)


def _enter(op: Any, call: Any, below: Any, keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
    return call(partial(op.redispatch, keyset & below), *args, **kwargs)


def _call_through(op: Any, proceed: Any, /, *args: Any, **kwargs: Any) -> Any:
    if _is_meta(args, kwargs):
        return proceed(*args, **kwargs)
    around = interposed.get(op, {})
    for priority in sorted(around, reverse=True):
        proceed = partial(around[priority], proceed)
    return proceed(*args, **kwargs)


def _is_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    devices = (getattr(value, "device", None) for value in (*args, *kwargs.values()))
    return bool(getattr(next(filter(None, devices), None), "type", "") == "meta")


@cache
def _keys_below() -> Any:
    """Return the dispatch keys that come after BackendSelect.

    Uses private API (``_dispatch_keyset_full_after``), as torch's own examples of kernels with a
    keyset do. Without this API, no op is interposed, and the policy's report says why.
    """
    c = import_module("torch")._C  # noqa: SLF001 - see above
    return c._dispatch_keyset_full_after(getattr(c.DispatchKey, _KEY))  # noqa: SLF001


def _with_tensors(op: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call`, but with numbers converted to tensors where `op` has tensor parameters.

    For a call such as ``torch.mul(tensor, 2)``, torch passes the number to C++ as a tensor that
    does not take part in type promotion
    (https://docs.pytorch.org/docs/stable/tensor_attributes.html#type-promotion-doc). A function in
    Python gets the plain number, which the kernels refuse. This function makes a tensor with
    the dtype that leads to the same result type as in torch.
    """
    schema = op._schema.arguments  # noqa: SLF001 - a schema has no public reader
    positions = [i for i, argument in enumerate(schema) if str(argument.type) == "Tensor"]
    if len(positions) < 2:  # noqa: PLR2004 - a number is legal only next to a tensor
        return call

    @wraps(call)
    def converted(proceed: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        operands = [args[position] for position in positions if position < len(args)]
        if any(isinstance(operand, int | float | complex) for operand in operands):
            tensors = [operand for operand in operands if hasattr(operand, "dtype")]
            args = tuple(
                _as_tensor(argument, tensors) if position in positions else argument
                for position, argument in enumerate(args)
            )
        return call(proceed, *args, **kwargs)

    return converted


def _as_tensor(value: Any, tensors: list[Any]) -> Any:
    if not isinstance(value, int | float | complex):
        return value
    torch = import_module("torch")
    widest = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
    wide = torch.tensor(value, dtype=widest[type(value)])
    if not tensors:
        return wide
    partner = max(tensors, key=lambda tensor: bool(tensor.dim()))
    dtype = torch.result_type(partner, value)
    return wide if dtype == partner.dtype and partner.dim() else wide.to(dtype)


def override(op: Any, key: str, replacement: Callable[..., Any]) -> Callable[[], None]:
    """Replace the kernel of `op` at the dispatch key `key`, and return a function to undo this.

    `replacement(original, *args, **kwargs)` returns the result for the caller. `original` takes
    the arguments of the op. Changes the dispatcher of torch. A torch that
    lacks ``torch.library.get_kernel`` passes None as `original`, and the undo may crash another
    thread that runs the op at that moment.
    """
    library = import_module("torch").library
    can_call_original = hasattr(library, "get_kernel")
    with _lock:
        replacements, registration = _overrides.get((op, key), ([], None))
        if registration is None:
            runtime_key = _RUNTIME_KEYS.get(key, key)
            original = library.get_kernel(op, runtime_key).call_boxed if can_call_original else None
            kernel = partial(_overridden, replacements, original)
            _overrides[op, key] = replacements, _registered(op, key, kernel)
        replacements.append(replacement)

    def undo() -> None:
        with _lock:
            replacements.remove(replacement)
            if not can_call_original and not replacements:
                del _overrides[op, key]  # deleting the library removes its registration

    return undo


def _overridden(
    replacements: list[Any], original: Any, keyset: Any, /, *args: Any, **kwargs: Any
) -> Any:
    latest = replacements[-1:]  # read only once, as another thread may remove it
    proceed = partial(original, keyset) if original is not None else None  # keyset comes first
    if latest:
        return latest[0](proceed, *args, **kwargs)
    if proceed is None:
        raise RuntimeError("this op was called while its override was undone")
    return proceed(*args, **kwargs)


def _registered(op: Any, key: str, kernel: partial[Any]) -> Any:
    namespace, _, name = op.name().partition("::")
    library = import_module("torch").library.Library(namespace, "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns if a kernel exists already
        library.impl(name, _kept_from_dynamo(kernel), key, with_keyset=True)
    return library


def _kept_from_dynamo(kernel: partial[Any]) -> Callable[..., Any]:
    """Return `kernel`, marked so that torch.compile does not trace it or the functions it calls.

    If older torch traces our function, it crashes after the compiled code has been deleted
    (https://github.com/pytorch/pytorch/issues/155057).

    Uses private API (``set_code_exec_strategy``; on older torch ``skip_code`` and
    ``set_eval_frame``), because the public functions import torch._dynamo, which takes a second.
    Without this API, Dynamo may warn that it cannot trace the original kernel.
    """
    compiler = getattr(import_module("torch")._C, "_dynamo", None)  # noqa: SLF001 - see above
    frames: Any = getattr(compiler, "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP  # noqa: SLF001 - see above
        with_its_calls = frames._FrameExecStrategy(skip, skip)  # noqa: SLF001 - see above
        frames.set_code_exec_strategy(kernel.func.__code__, with_its_calls)
        return kernel
    if not (hasattr(frames, "skip_code") and hasattr(frames, "set_eval_frame")):
        return kernel

    def alone(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
        before = frames.set_eval_frame(None)
        try:
            return kernel(keyset, *args, **kwargs)
        finally:
            frames.set_eval_frame(before)

    frames.skip_code(alone.__code__)
    return alone


def can_be_interposed(op: Any) -> bool:
    """Return whether calls of `op` reach BackendSelect. torch decomposes some ops before it."""
    try:
        return not any(has_kernel(op, key) for key in _COMPOSITE_KEYS)
    except RuntimeError:  # an op of TorchScript that is not dispatched, such as aten::mul.left_t
        return False


def has_kernel(op: Any, key: str) -> bool:
    """Return whether the overload `op` has a kernel at `key` that `interpose` did not register.

    Uses private API (``_dispatch_has_kernel_for_dispatch_key``), because torch has no public
    check. Without this API, a policy that needs the check fails, and its report says so.
    """
    if key == _KEY and op.name() in _names:
        return False  # our kernel: an op with its own one here is never interposed
    c = import_module("torch")._C  # noqa: SLF001 - see above
    return bool(c._dispatch_has_kernel_for_dispatch_key(op.name(), key))  # noqa: SLF001


def op_names() -> list[str]:
    """Return the name of every op overload in this process, such as ``aten::add.Tensor``.

    Uses private API (``_dispatch_get_all_op_names``), because torch has no public list of its ops.
    Without this API, a policy that needs the list fails, and its report says so.
    """
    names: list[str] = import_module("torch")._C._dispatch_get_all_op_names()  # noqa: SLF001 - see above
    return names


def ops_named(*names: str) -> Iterator[Any]:
    """Yield the overloads in `names` that torch has. ``aten::relu`` means the default overload."""
    for full_name in names:
        namespace, _, rest = full_name.partition("::")
        name, _, overload = rest.partition(".")
        packet = getattr(getattr(import_module("torch").ops, namespace), name, None)
        op = getattr(packet, overload or "default", None) if packet is not None else None
        if op is not None:
            yield op


@cache
def seeded_ops() -> tuple[Any, ...]:
    """Return the ops of ``aten`` that torch tags as drawing from a seeded generator."""
    seeded = import_module("torch").Tag.nondeterministic_seeded
    ops = ops_named(*(name for name in op_names() if name.startswith("aten::")))
    return tuple(op for op in ops if seeded in op.tags)


def random_ops() -> tuple[Any, ...]:
    """Return the seeded ops that `interpose` can wrap, because torch does not decompose them."""
    return tuple(filter(can_be_interposed, seeded_ops()))


def packet_name(op: Any) -> str:
    """Return the name without namespace and overload: ``median`` for ``aten::median.dim``."""
    return str(op.name()).partition("::")[2].partition(".")[0]


def overloads_named(spelled: str) -> tuple[Any, ...]:
    """Return the overloads that the name `spelled` refers to, if `interpose` can wrap them.

    `spelled` is ``aten::median``, ``aten.median`` or ``median``, possibly with a dot and an
    overload after it. Raises `ProfileError` if torch has no such op, or decomposes it into others.
    """
    overloads: list[Any] = []
    namespace, separator, rest = spelled.partition("::")
    for reading in [f"{namespace}.{rest}"] if separator else [spelled, f"aten.{spelled}"]:
        namespace, name, overload, *_ = *reading.split(".", 2), "", ""
        packet: Any = getattr(getattr(import_module("torch").ops, namespace), name or "-", None)
        names = packet.overloads() if hasattr(packet, "overloads") else []
        overloads = overloads or [getattr(packet, n) for n in names if overload in ("", n)]
    if not overloads:
        known = {name.removeprefix("aten::").partition(".")[0] for name in op_names()}
        close = near(spelled.rpartition("::")[2], known)
        hint = f"; did you mean `{close}`?" if close else ""
        raise ProfileError.about(f"this torch has no op `{spelled}`{hint}")
    usable = tuple(filter(can_be_interposed, overloads))
    if not usable:
        raise ProfileError.about(f"torch decomposes `{spelled}` into other ops: name those instead")
    return usable
