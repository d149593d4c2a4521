"""What becomes of an op without a deterministic kernel, or of one that a profile names.

A function in front of each such op (see `interpose`) lets the kernel run and sees whether torch
refuses it (https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html).
Nothing is decided here about which kernels are deterministic: torch decides that, for each device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from torchrepro.ground.callers import frames, program_place
from torchrepro.ground.errors import ProfileError
from torchrepro.ground.fork_safety import fork_safe_lock
from torchrepro.ground.messages import near
from torchrepro.knobs.knob import Value, is_pattern, per_op
from torchrepro.policies import interpose
from torchrepro.policies.deterministic_ops import (
    IMPLEMENTATIONS,
    OPS,
    implementation,
    is_alert,
    row_of,
)
from torchrepro.policies.interpose import Priority, overloads_named, packet_name, withdraw
from torchrepro.policies.policy import PolicyEffect, add_effects, count
from torchrepro.policies.run_on_cpu import fit_to, is_on_device, on_cpu

KNOB = "device.fallback"

Action = Callable[..., Any]
"""What is done at a call of an op: takes `proceed`, which goes on to the kernel, and arguments."""


class _InForce(NamedTuple):
    value: Value = None
    actions: Mapping[Any, Action] = {}
    named: frozenset[Any] = frozenset()  # the overloads that the profile decides about by name


_lock = fork_safe_lock()
_in_force = _InForce()
_registered: dict[str, Callable[..., Any]] = {}

_handled = threading.local()  # .names: the ops that this thread is already handling
_modes = fork_safe_lock()
_varying: list[int] = []  # the mode to go back to, once for every call that may vary just now


class FallbackPolicy:
    """What an op without a deterministic kernel does; None where no profile says."""

    def read(self) -> Value:
        return _in_force.value

    def write(self, value: Value) -> None:
        """Put `value` in force in place of the present one; None takes everything back.

        Raises `ProfileError` for an op that this torch does not have, and what torch raises where
        it refuses a kernel; nothing is changed then.
        """
        global _in_force  # noqa: PLW0603 - the one value in force in this process
        with _lock:
            before = _in_force
            _in_force = _InForce() if value is None else _decided(value)
            try:
                _interpose_all()
            except BaseException:
                _in_force = before
                _interpose_all()
                raise

    save = read

    def restore(self, saved: Value) -> None:
        if saved != self.read():
            self.write(saved)


policy = FallbackPolicy()


def register_replacement(op: Any, fn: Callable[..., Any]) -> None:
    """Have `fn` called in place of `op` while a profile that sets `device.fallback` is in force.

    `op` is an op of torch or a custom one, as ``"aten::cumsum"`` or ``torch.ops.aten.cumsum``;
    without an overload it means all of them. `fn` takes the op's arguments and returns what the
    op would; for one that writes to an argument, that argument. ``out=`` is filled for it. It runs
    below autograd: the gradient stays torch's, and the op that computes it has a name of its own.
    An op called within `fn` under its own name is the real one. A profile that names the op in
    `device.fallback: {ops: ...}` wins. A second call with the same name replaces the first. Raises
    `TypeError` if `fn` cannot be called and `ProfileError` if torch has no such op.
    """
    if not callable(fn):
        raise TypeError(f"a replacement is called in place of an op, and {fn!r} cannot be called")
    overloads_named(str(op))
    with _lock:
        _registered[str(op)] = fn
    _interpose_all()


def unregister_replacement(op: Any) -> None:
    """Forget the replacement of `op`, named as it was registered.

    Raises `ProfileError` if there is none.
    """
    name = str(op)
    with _lock:
        if name not in _registered:
            raise ProfileError.about(
                "no replacement is registered for this op",
                found=name,
                legal=", ".join(sorted(_registered)),
                near=near(name, _registered),
            )
        del _registered[name]
    _interpose_all()


def _interpose_all() -> None:
    with _lock:
        actions = dict(_in_force.actions)
        for op, fn in _replacements().items():
            call, what = _filling_outputs(op, fn), _replaced_by(fn)
            actions[op] = partial(_replaced, op, call, what, actions.get(op))
        for op in list(interpose.interposed):
            if op not in actions:
                withdraw(op, Priority.FALLBACK)
        for op, action in actions.items():
            interpose.interpose(op, Priority.FALLBACK, action)


def _replacements() -> dict[Any, Callable[..., Any]]:
    if _in_force.value is None:
        return {}
    with _lock:
        every = {op: fn for name, fn in _registered.items() for op in overloads_named(name)}
        return {op: fn for op, fn in every.items() if op not in _in_force.named}


def _replaced_by(fn: Callable[..., Any]) -> str:
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    return f"replaced by {getattr(fn, '__module__', '')}.{name}"


def _uncalled_replacements(counted: list[PolicyEffect]) -> tuple[PolicyEffect, ...]:
    called = {effect.subject for effect in counted if effect.what.startswith("replaced by ")}
    return tuple(
        PolicyEffect(KNOB, op.name(), _replaced_by(fn), "", 0, 0)
        for op, fn in _replacements().items()
        if op.name() not in called
    )


add_effects(_uncalled_replacements)


def _decided(value: str | Mapping[str, Any]) -> _InForce:
    """Return what `value` makes of each op.

    A name goes before a pattern and a long pattern before a short one, in whatever order they
    stand. Raises `ProfileError` for an op that this torch does not have.
    """
    asked = per_op(value)
    choices = {row.name: value if isinstance(value, str) else "error" for row in OPS}
    for pattern in sorted(filter(is_pattern, asked), key=lambda text: (len(text), text)):
        plain = pattern.replace("aten.", "aten::").removeprefix("aten::")
        found = [row.name for row in OPS if fnmatchcase(row.name, plain)]
        if not found:
            close = near(plain, [row.name for row in OPS])
            hint = f"; did you mean `{close}`?" if close else ""
            raise ProfileError.about(
                f"`{pattern}` matches none of the ops that torch refuses to run{hint}"
            )
        choices |= dict.fromkeys(found, asked[pattern])
    actions: dict[Any, Action] = {}
    for name, choice in choices.items():
        try:
            ops = overloads_named(f"aten::{name}")
        except ProfileError:  # only another torch has it
            continue
        actions |= {op: partial(_where_refused, op, choice) for op in ops}
    named: dict[Any, Action] = {}
    for name in asked:
        if not is_pattern(name):
            ops, choice = overloads_named(name), asked[name]
            returned = [each.alias_info for op in ops for each in op._schema.returns]  # noqa: SLF001 - no public reader
            if choice == "cpu" and any(info and not info.is_write for info in returned):
                raise ProfileError.about(
                    f"`{name}` returns a view: it computes nothing that could run on the CPU"
                )
            named |= {op: partial(_always, op, choice) for op in ops}
    return _InForce(value, {**actions, **named}, frozenset(named))


def _where_refused(op: Any, choice: str, proceed: Action, /, *args: Any, **kwargs: Any) -> Any:
    try:
        return proceed(*args, **kwargs)
    except RuntimeError as error:
        if not is_alert(error):
            raise
        message = str(error)
    if choice == "native":
        return _native(op, proceed, args, kwargs)
    if choice == "cpu":
        own = implementation(packet_name(op), args, kwargs)
        if own is not None:
            result = _filling_outputs(op, own)(*args, **kwargs)
            _count(op, "ran in a deterministic implementation of torchrepro's")
            return result
        if is_on_device(args, kwargs):
            return _moved(op, args, kwargs)
    raise RuntimeError(_with_advice(op, message))


def _always(op: Any, choice: str, proceed: Action, /, *args: Any, **kwargs: Any) -> Any:
    if choice == "error":
        words = f"{op.name()} may not run: the profile refuses it ({KNOB})"
        raise RuntimeError(_with_advice(op, words))
    if choice == "native":
        return _native(op, proceed, args, kwargs)
    if not is_on_device(args, kwargs):
        return _where_refused(op, choice, proceed, *args, **kwargs)
    if _is_handled(op):
        return proceed(*args, **kwargs)
    return _moved(op, args, kwargs)


def _native(op: Any, proceed: Action, args: Any, kwargs: Any) -> Any:
    # Lets torch take any kernel. The mode is the process's: an op that another thread runs
    # meanwhile may vary as well. Of calls in several threads the last to end puts the mode back.
    torch = import_module("torch")
    with _modes:
        before = _varying[0] if _varying else torch.get_deterministic_debug_mode()
        _varying.append(before)
        torch.set_deterministic_debug_mode("default")
    try:
        result = proceed(*args, **kwargs)
    finally:
        with _modes:
            _varying.pop()
            if not _varying:
                torch.set_deterministic_debug_mode(before)
    _count(op, "ran non-deterministically, as the profile allows")
    return result


def _moved(op: Any, args: Any, kwargs: Any) -> Any:
    with _handling(op):
        result, moved = on_cpu(op, args, kwargs)
    _count(op, "ran on the CPU", moved)
    return result


def _replaced(
    op: Any,
    fn: Callable[..., Any],
    what: str,
    otherwise: Action | None,
    proceed: Action,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if _is_handled(op):
        return (partial(otherwise, proceed) if otherwise else proceed)(*args, **kwargs)
    with _handling(op), import_module("torch").no_grad():
        result = fn(*args, **kwargs)
    _count(op, what)
    return result


def _filling_outputs(op: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
    arguments = op._schema.arguments  # noqa: SLF001 - a schema has no public reader
    names = [argument.name for argument in arguments if argument.is_out]
    if not names:
        return fn

    def filling(*args: Any, **kwargs: Any) -> Any:
        outputs = tuple(kwargs.pop(name) for name in names)
        results = fn(*args, **kwargs)
        results = results if isinstance(results, list | tuple) else (results,)
        for output, result in zip(outputs, results, strict=True):
            fit_to(output, result)
            output.copy_(result)
        return outputs if len(outputs) > 1 else outputs[0]

    return filling


def _is_handled(op: Any) -> bool:
    return packet_name(op) in getattr(_handled, "names", ())


@contextmanager
def _handling(op: Any) -> Iterator[None]:
    before = getattr(_handled, "names", ())
    _handled.names = (*before, packet_name(op))
    try:
        yield
    finally:
        _handled.names = before


def _with_advice(op: Any, message: str) -> str:
    if "torchrepro:" in message:
        return message
    name = packet_name(op)
    row = row_of(name)
    advice = [row.instead] if row else []
    if name in IMPLEMENTATIONS:
        advice.append(f"set {KNOB}: cpu, and torchrepro computes it in order")
    elif row is None:
        advice.append(f"set {KNOB}: {{ops: {{{name}: cpu}}}}, and it runs on the CPU")
    elif row.on_cpu:
        advice.append(f"set {KNOB}: cpu, and it runs on the CPU")
    advice.append(f"or let it vary with {KNOB}: {{ops: {{{name}: native}}}}")
    return f"{message}\ntorchrepro: {op.name()}: {'; '.join(advice)}"


def _count(op: Any, what: str, moved: int = 0) -> None:
    # The line of the program is what called `interpose`; a thread of torch's own has none.
    of_ours = [each for each in frames() if each.f_globals.get("__name__") == interpose.__name__]
    caller = of_ours[-1].f_back if of_ours else None
    count(KNOB, op.name(), what, program_place(caller) if caller is not None else "", moved)
