"""What is done at one call of an op that a profile decides about.

Each action stands in front of one op (see `interpose`). It takes the overload, `proceed`, which
goes on to the kernel, and the arguments of the call.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrepro.callers import frames, place
from torchrepro.fork_safety import fork_safe_lock
from torchrepro.policies import interpose
from torchrepro.policies.deterministic_ops import IMPLEMENTATIONS, implementation, is_alert, row_of
from torchrepro.policies.interpose import packet_name
from torchrepro.policies.on_cpu import fit_to, is_on_device, on_cpu
from torchrepro.policies.policy import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Proceed = Callable[..., Any]
    Action = Callable[..., Any]

KNOB = "device.fallback"
ON_CPU = "ran on the CPU"
OWN = "ran in a deterministic implementation of torchrepro's"
NATIVE = "ran non-deterministically, as the profile allows"

_handled = threading.local()  # .names: the ops that this thread is already handling
_modes = fork_safe_lock()
_varying: list[int] = []  # the mode to go back to, once for every call that may vary just now


def _when_refused(instead: Callable[..., Any]) -> Action:
    """Return the action that runs the kernel, and calls `instead` where torch refuses to."""

    def action(op: Any, proceed: Proceed, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return proceed(*args, **kwargs)
        except RuntimeError as error:
            if not is_alert(error):
                raise
            message = str(error)
        return instead(op, message, proceed, args, kwargs)

    return action


def _advise(op: Any, message: str, *_: Any) -> Any:
    """Say what to do instead after torch's own words."""
    raise RuntimeError(_with_advice(op, message))


def _compute_in_order(op: Any, message: str, _: Proceed, args: Any, kwargs: Any) -> Any:
    """Compute the same by an implementation of torchrepro's, or on the CPU."""
    own = implementation(packet_name(op), args, kwargs)
    if own is not None:
        result = filling_outputs(op, own)(*args, **kwargs)
        _count(op, OWN)
        return result
    if not is_on_device(args, kwargs):
        raise RuntimeError(_with_advice(op, message))
    return _moved(op, args, kwargs)


def _let_vary(op: Any, _: str, proceed: Proceed, args: Any, kwargs: Any) -> Any:
    return native(op, proceed, *args, **kwargs)


WHEN_REFUSED: dict[str, Action] = {
    "error": _when_refused(_advise),
    "cpu": _when_refused(_compute_in_order),
    "native": _when_refused(_let_vary),
}
"""The action of each choice for an op, at those calls that torch refuses."""


def cpu(op: Any, proceed: Proceed, /, *args: Any, **kwargs: Any) -> Any:
    """Compute on the CPU what a device is asked for, whether its kernel is deterministic or not."""
    if not is_on_device(args, kwargs):
        return WHEN_REFUSED["cpu"](op, proceed, *args, **kwargs)
    if _is_handled(op):
        return proceed(*args, **kwargs)
    return _moved(op, args, kwargs)


def native(op: Any, proceed: Proceed, /, *args: Any, **kwargs: Any) -> Any:
    """Run whatever kernel torch takes when nobody asks for a deterministic one."""
    with _may_vary():
        result = proceed(*args, **kwargs)
    _count(op, NATIVE)
    return result


def refuse(op: Any, _: Proceed, /, *args: Any, **kwargs: Any) -> Any:
    """Raise `RuntimeError` for whatever arguments."""
    del args, kwargs
    name = op.name()
    raise RuntimeError(_with_advice(op, f"{name} may not run: the profile refuses it ({KNOB})"))


def replaced(
    fn: Callable[..., Any],
    what: str,
    otherwise: Action,
    op: Any,
    proceed: Proceed,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call `fn` in place of the kernel, and `otherwise` where `fn` itself calls the op."""
    if _is_handled(op):
        return otherwise(proceed, *args, **kwargs)
    with _handling(op), import_module("torch").no_grad():
        result = fn(*args, **kwargs)
    _count(op, what)
    return result


def run_kernel(proceed: Proceed, /, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel, whatever it is."""
    return proceed(*args, **kwargs)


ALWAYS: dict[str, Action] = {"error": refuse, "cpu": cpu, "native": native}
"""The action of each choice for an op, at every call."""


def filling_outputs(op: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` for the overload `op`, whose ``out=`` is filled with what `fn` returns."""
    arguments = op._schema.arguments  # noqa: SLF001 - a schema has no public reader
    names = [argument.name for argument in arguments if argument.is_out]
    if not names:
        return fn

    def filling(*args: Any, **kwargs: Any) -> Any:
        outputs = tuple(kwargs.pop(name) for name in names)
        results = fn(*args, **kwargs)
        for output, result in zip(
            outputs, results if isinstance(results, list | tuple) else (results,), strict=True
        ):
            fit_to(output, result)
            output.copy_(result)
        return outputs if len(outputs) > 1 else outputs[0]

    return filling


def _moved(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with _handling(op):
        result, moved = on_cpu(op, args, kwargs)
    _count(op, ON_CPU, moved)
    return result


def _is_handled(op: Any) -> bool:
    """Whether this thread is within an action of `op` already."""
    return packet_name(op) in getattr(_handled, "names", ())


@contextmanager
def _handling(op: Any) -> Iterator[None]:
    """Mark `op` as being handled by this thread for the length of the block."""
    before = getattr(_handled, "names", ())
    _handled.names = (*before, packet_name(op))
    try:
        yield
    finally:
        _handled.names = before


@contextmanager
def _may_vary() -> Iterator[None]:
    """Let torch take any kernel within the block.

    The mode is the process's: an op that another thread runs meanwhile may vary as well. Of calls
    in several threads the last to end puts the mode back.
    """
    torch = import_module("torch")
    with _modes:
        before = _varying[0] if _varying else torch.get_deterministic_debug_mode()
        _varying.append(before)
        torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        with _modes:
            _varying.pop()
            if not _varying:
                torch.set_deterministic_debug_mode(before)


def _with_advice(op: Any, message: str) -> str:
    """Return `message` and what to do, unless an op within this one has said it already."""
    if "torchrepro:" in message:
        return message
    name = packet_name(op)
    row = row_of(name)
    ways = [row.instead] if row else []
    if name in IMPLEMENTATIONS:
        ways.append(f"set {KNOB}: cpu, and torchrepro computes it in order")
    elif row is None:
        ways.append(f"set {KNOB}: {{ops: {{{name}: cpu}}}}, and it runs on the CPU")
    elif row.on_cpu:
        ways.append(f"set {KNOB}: cpu, and it runs on the CPU")
    ways.append(f"or let it vary with {KNOB}: {{ops: {{{name}: native}}}}")
    return f"{message}\ntorchrepro: {op.name()}: {'; '.join(ways)}"


def _count(op: Any, what: str, moved: int = 0) -> None:
    count(KNOB, op.name(), what, _where(), moved)


def _where() -> str:
    """Return the line of the program that called the op; empty in a thread of torch's own."""
    of_ours = [each for each in frames() if each.f_globals.get("__name__") == interpose.__name__]
    caller = of_ours[-1].f_back if of_ours else None
    return place(caller) if caller is not None else ""
