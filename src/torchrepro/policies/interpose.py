"""Functions between torch's dispatcher and the kernels of single ops, for every caller.

On its way to a kernel a call passes the dispatch key BackendSelect: below autograd, which keeps
its formulas, and above the kernels of every device
(https://github.com/pytorch/pytorch/wiki/PyTorch-dispatcher-walkthrough). A function registered
there for one op (https://docs.pytorch.org/docs/stable/library.html) gets the calls of Python, of
C++ and of backward alike, may change them, and hands them on. Other ops are not touched and cost
what they did.

A registration stays once it is made, and hands every call on where no policy wants it any longer.
Taking one back would free a kernel that another thread may be running at that moment: torch gives
up its interpreter lock within an op, and its dispatcher has no lock of its own for kernels.

An op has overloads: ``aten::median`` has ``aten::median.dim``, and others that take ``out=``. A
name without an overload means all of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import cache, partial, wraps
from importlib import import_module
from typing import Any

from torchrepro.ground.errors import ProfileError
from torchrepro.ground.fork_safety import fork_safe_lock
from torchrepro.ground.messages import Problem, near


class Priority(IntEnum):
    """Which of several functions at one op is asked first; the last is next to the kernel."""

    DROPOUT = 0
    FALLBACK = 1
    HOST_RNG = 2


_KEY = "BackendSelect"
_COMPOSITE_KEYS = ("CompositeImplicitAutograd", _KEY)
"""Keys whose kernels call other ops before BackendSelect is reached, or at it."""

_RUNTIME_KEYS = {"CompositeImplicitAutograd": "CPU", "Autograd": "AutogradCPU"}
"""Alias keys, and a key at which torch keeps the kernel that was registered at the alias."""

_lock = fork_safe_lock()
interposed: dict[Any, dict[Priority, Callable[..., Any]]] = {}  # op -> what is in front of it now
_libraries: dict[Any, Any] = {}  # op -> the torch.library.Library that holds its registration
_names: set[str] = set()  # of these ops, and of custom ones that were defined anew since
_overrides: dict[tuple[Any, str], tuple[list[Callable[..., Any]], Any]] = {}
"""Op and key -> what stands in for the kernel there, the latest last, and the registration."""


def interpose(op: Any, priority: Priority, around: Callable[..., Any]) -> Callable[[], None]:
    """Have every call of the overload `op` made through `around`; return the call that undoes it.

    `around(proceed, *args, **kwargs)` returns what the caller gets; `proceed` takes the arguments
    on towards the kernel. Calls with tensors of the device type `meta` do not reach it. Changes
    torch's dispatcher.
    """
    with _lock:
        if op not in _libraries:
            call = _with_tensors(op, partial(_call_through, op))
            _names.add(op.name())
            _libraries[op] = _registered(op, _KEY, partial(_enter, op, call, _keys_below()))
        interposed[op] = {**interposed.get(op, {}), priority: around}
    return partial(withdraw, op, priority)


def withdraw(op: Any, priority: Priority) -> None:
    """Take back what `interpose` has put at `op`; does nothing if there is none."""
    with _lock:
        left = {key: around for key, around in interposed.get(op, {}).items() if key != priority}
        if left:
            interposed[op] = left
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
    """Return the dispatch keys below BackendSelect.

    Private (``_dispatch_keyset_full_after``), as in torch's own examples of kernels that take a
    keyset. Where it is gone nothing is interposed and the policy's report says why.
    """
    c = import_module("torch")._C  # noqa: SLF001 - see above
    return c._dispatch_keyset_full_after(getattr(c.DispatchKey, _KEY))  # noqa: SLF001


def _with_tensors(op: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call`, of the overload `op`, with tensors for numbers where `op` takes tensors.

    Torch hands such a number to C++ as a tensor that does not take part in type promotion
    (https://docs.pytorch.org/docs/stable/tensor_attributes.html#type-promotion-doc), and to a
    function in Python as a plain number, which the kernels then refuse. The number is given the
    type with which the result is what torch's own promotion makes it.
    """
    schema = op._schema.arguments  # noqa: SLF001 - a schema has no public reader
    places = [place for place, argument in enumerate(schema) if str(argument.type) == "Tensor"]
    if len(places) < 2:  # noqa: PLR2004 - a number stands beside a tensor
        return call

    @wraps(call)
    def converted(proceed: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        found = [args[place] for place in places if place < len(args)]
        if any(isinstance(value, int | float | complex) for value in found):
            tensors = [value for value in found if hasattr(value, "dtype")]
            args = tuple(
                _as_tensor(value, tensors) if place in places else value
                for place, value in enumerate(args)
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
    beside = max(tensors, key=lambda tensor: bool(tensor.dim()))
    together = torch.result_type(beside, value)
    return wide if together == beside.dtype and beside.dim() else wide.to(together)


def override(op: Any, key: str, stand_in: Callable[..., Any]) -> Callable[[], None]:
    """Put `stand_in` in the place of the kernel of `op` at `key`; return the call that undoes it.

    `stand_in(original, *args, **kwargs)` returns what the caller gets; `original` takes the same
    arguments. Changes torch's dispatcher. Torch without ``torch.library.get_kernel`` cannot hand a
    call on to the kernel that was there: its registration is taken back, and another thread that
    runs the op at that moment may crash.
    """
    library = import_module("torch").library
    can_hand_on = hasattr(library, "get_kernel")
    with _lock:
        stand_ins, registration = _overrides.get((op, key), ([], None))
        if registration is None:
            where = _RUNTIME_KEYS.get(key, key)
            original = library.get_kernel(op, where).call_boxed if can_hand_on else None
            kernel = partial(_overridden, stand_ins, original)
            _overrides[op, key] = stand_ins, _registered(op, key, kernel)
        stand_ins.append(stand_in)

    def take_back() -> None:
        with _lock:
            stand_ins.remove(stand_in)
            if not can_hand_on and not stand_ins:
                del _overrides[op, key]  # dropping the library takes its registration back

    return take_back


def _overridden(
    stand_ins: list[Any], original: Any, keyset: Any, /, *args: Any, **kwargs: Any
) -> Any:
    latest = stand_ins[-1:]  # read once: another thread may take the stand-in back
    proceed = partial(original, keyset) if original is not None else None  # it takes a keyset first
    if latest:
        return latest[0](proceed, *args, **kwargs)
    if proceed is None:
        raise RuntimeError("this op was called while its override was being undone")
    return proceed(*args, **kwargs)


def _registered(op: Any, key: str, kernel: partial[Any]) -> Any:
    namespace, _, name = op.name().partition("::")
    library = import_module("torch").library.Library(namespace, "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns where there is a kernel already
        library.impl(name, _kept_from_dynamo(kernel), key, with_keyset=True)
    return library


def _kept_from_dynamo(kernel: partial[Any]) -> Callable[..., Any]:
    """Return `kernel` so that torch.compile runs it, with all it calls, and does not trace it.

    Older torch crashes where a function of ours was traced for a compiled one that is gone since
    (https://github.com/pytorch/pytorch/issues/155057).

    Private (``set_code_exec_strategy``; on older torch ``skip_code`` and ``set_eval_frame``): the
    public functions import torch._dynamo, which takes a second. Where they are gone, Dynamo may
    warn that it cannot trace the kernel at the end.
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
    """Whether calls of `op` reach BackendSelect as such: else torch makes them of other ops."""
    try:
        return not any(has_kernel(op, key) for key in _COMPOSITE_KEYS)
    except RuntimeError:  # one of TorchScript's own, such as aten::mul.left_t: not dispatched
        return False


def has_kernel(op: Any, key: str) -> bool:
    """Whether the overload `op` has a kernel at the dispatch key `key` that is not ours.

    Private (``_dispatch_has_kernel_for_dispatch_key``): torch offers no public way to ask. Where
    it is gone, a policy that asks fails, and its report says so.
    """
    if key == _KEY and op.name() in _names:
        return False  # only ops without one are interposed
    c = import_module("torch")._C  # noqa: SLF001 - see above
    return bool(c._dispatch_has_kernel_for_dispatch_key(op.name(), key))  # noqa: SLF001


def op_names() -> list[str]:
    """Return the name of every op in this process, as ``aten::uniform_``.

    Private (``_dispatch_get_all_op_names``): torch offers no public list of its ops. Where it is
    gone, a policy that needs the list fails, and its report says so.
    """
    names: list[str] = import_module("torch")._C._dispatch_get_all_op_names()  # noqa: SLF001 - see above
    return names


def ops_named(*names: str) -> Iterator[Any]:
    """Yield the overloads with these names, as ``aten::uniform_``, that this torch has."""
    for name in names:
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        found = getattr(getattr(import_module("torch").ops, namespace), packet, None)
        op = getattr(found, overload or "default", None) if found is not None else None
        if op is not None:
            yield op


@cache
def seeded_ops() -> tuple[Any, ...]:
    """Return the ops of torch that draw random numbers, as torch itself tags them."""
    seeded = import_module("torch").Tag.nondeterministic_seeded
    ops = ops_named(*(name for name in op_names() if name.startswith("aten::")))
    return tuple(op for op in ops if seeded in op.tags)


def random_ops() -> tuple[Any, ...]:
    """Return the ops of torch that draw random numbers in a kernel of their own."""
    return tuple(filter(can_be_interposed, seeded_ops()))


def packet_name(op: Any) -> str:
    """Return the name of the overload `op` without namespace and overload, as in ``median``."""
    return str(op.name()).partition("::")[2].partition(".")[0]


def overloads_named(spelled: str) -> tuple[Any, ...]:
    """Return the overloads that `spelled` means and that a function can be put in front of.

    It is spelled ``aten::median``, ``aten.median`` or ``median``, with an overload after another
    dot or without. Raises `ProfileError` if torch has no such op, or makes it of others.
    """
    found: list[Any] = []
    namespace, separator, rest = spelled.partition("::")
    for reading in [f"{namespace}.{rest}"] if separator else [spelled, f"aten.{spelled}"]:
        namespace, name, overload, *_ = *reading.split(".", 2), "", ""
        packet: Any = getattr(getattr(import_module("torch").ops, namespace), name or "-", None)
        names = packet.overloads() if hasattr(packet, "overloads") else []
        found = found or [getattr(packet, each) for each in names if overload in ("", each)]
    if not found:
        own = {name.removeprefix("aten::").partition(".")[0] for name in op_names()}
        close = near(spelled.rpartition("::")[2], own)
        hint = f"; did you mean `{close}`?" if close else ""
        raise ProfileError(Problem(f"this torch has no op `{spelled}`{hint}"))
    usable = tuple(filter(can_be_interposed, found))
    if not usable:
        raise ProfileError(Problem(f"torch makes `{spelled}` of other ops: name those instead"))
    return usable
