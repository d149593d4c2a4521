"""The policy `device.fallback`: replace or forbid nondeterministic ops, and ops in the profile.

A Python function wraps each of these ops (see `interpose`). It calls the kernel, and checks whether
torch refuses to run the kernel because it is nondeterministic
(https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from torchrepro.ground.callers import frames, program_line
from torchrepro.ground.errors import ProfileError, near
from torchrepro.ground.fork_safety import fork_safe_lock
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
"""A function that handles a call of an op. Its arguments are `proceed`, which calls the kernel of
the op, and the arguments of the call."""


class _Active(NamedTuple):
    value: Value = None
    actions: Mapping[Any, Action] = {}
    named: frozenset[Any] = frozenset()  # the overloads that the profile names


_lock = fork_safe_lock()
_active = _Active()
_registered: dict[str, Callable[..., Any]] = {}

_handled = threading.local()  # `.names` are the ops that this thread handles at the moment
_modes = fork_safe_lock()
_varying: list[int] = []  # the mode to restore, one entry per running call of `_native`


class FallbackPolicy:
    """The policy `device.fallback`. `read` returns None if no profile sets this knob."""

    def read(self) -> Value:
        return _active.value

    def write(self, value: Value) -> None:
        """Set the value of this policy to `value`. None makes all ops run as in torch again.

        Raises `ProfileError` for an op that this torch does not have. Errors of torch during the
        registration of a kernel propagate. After an error, the earlier value is active again.
        """
        global _active  # noqa: PLW0603 - one active value per process
        with _lock:
            before = _active
            _active = _Active() if value is None else _decided(value)
            try:
                _interpose_all()
            except BaseException:
                _active = before
                _interpose_all()
                raise

    save = read

    def restore(self, saved: Value) -> None:
        if saved != self.read():
            self.write(saved)


policy = FallbackPolicy()


def register_replacement(op: Any, fn: Callable[..., Any]) -> None:
    """Call `fn` instead of `op` while a profile that sets `device.fallback` is active.

    `op` is an op of torch or a custom op, such as ``"aten::cumsum"`` or ``torch.ops.aten.cumsum``.
    A name without an overload means all overloads. `fn` is called with the arguments of the op and
    must return the result of the op. For an in-place op, the result is the argument that the op
    changes. `fn` does not get ``out=`` arguments, because torchrepro copies the result into them.
    `fn` runs below autograd, so torch computes the gradient with a separate op. A call of `op`
    inside `fn` runs the original op. If a profile names the op in `device.fallback: {ops: ...}`,
    the profile overrides the replacement. A second registration for an op replaces the first.
    Raises `TypeError` if `fn` is not callable, and `ProfileError` if torch has no such op.
    """
    if not callable(fn):
        raise TypeError(f"a replacement of an op must be callable, but {fn!r} is not")
    overloads_named(str(op))
    with _lock:
        _registered[str(op)] = fn
    _interpose_all()


def unregister_replacement(op: Any) -> None:
    """Remove the replacement that `register_replacement` registered for `op`.

    `op` must be spelled as it was registered. Raises `ProfileError` if no such op is registered.
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
        actions = dict(_active.actions)
        for op, fn in _replacements().items():
            call, description = _filling_outputs(op, fn), _replaced_by(fn)
            actions[op] = partial(_replaced, op, call, description, actions.get(op))
        for op in list(interpose.interposed):
            if op not in actions:
                withdraw(op, Priority.FALLBACK)
        for op, action in actions.items():
            interpose.interpose(op, Priority.FALLBACK, action)


def _replacements() -> dict[Any, Callable[..., Any]]:
    if _active.value is None:
        return {}
    with _lock:
        registered = {op: fn for name, fn in _registered.items() for op in overloads_named(name)}
        return {op: fn for op, fn in registered.items() if op not in _active.named}


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


def _decided(value: str | Mapping[str, Any]) -> _Active:
    """Return the action for each op that `value` selects.

    A name overrides a pattern, and a longer pattern overrides a shorter one. The order in the
    profile does not matter. Raises `ProfileError` if a name or a pattern matches no op, or for an
    op that cannot run on the CPU.
    """
    words = per_op(value)
    choices = {row.name: value if isinstance(value, str) else "error" for row in OPS}
    for pattern in sorted(filter(is_pattern, words), key=lambda text: (len(text), text)):
        plain = pattern.replace("aten.", "aten::").removeprefix("aten::")
        matching = [row.name for row in OPS if fnmatchcase(row.name, plain)]
        if not matching:
            close = near(plain, [row.name for row in OPS])
            hint = f"; did you mean `{close}`?" if close else ""
            raise ProfileError.about(
                f"`{pattern}` matches none of the ops that torch refuses to run{hint}"
            )
        choices |= dict.fromkeys(matching, words[pattern])
    actions: dict[Any, Action] = {}
    for name, choice in choices.items():
        try:
            ops = overloads_named(f"aten::{name}")
        except ProfileError:  # only another version of torch has this op
            continue
        actions |= {op: partial(_where_refused, op, choice) for op in ops}
    named: dict[Any, Action] = {}
    for name in words:
        if not is_pattern(name):
            ops, choice = overloads_named(name), words[name]
            returns = [result for op in ops for result in op._schema.returns]  # noqa: SLF001 - no public reader
            aliases = [result.alias_info for result in returns if result.alias_info]
            if choice == "cpu" and any(not alias.is_write for alias in aliases):
                raise ProfileError.about(
                    f"`{name}` returns a view: it has no computation that could run on the CPU"
                )
            named |= {op: partial(_always, op, choice) for op in ops}
    return _Active(value, {**actions, **named}, frozenset(named))


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
        replacement = implementation(packet_name(op), args, kwargs)
        if replacement is not None:
            result = _filling_outputs(op, replacement)(*args, **kwargs)
            _count(op, "ran in a deterministic implementation of torchrepro's")
            return result
        if is_on_device(args, kwargs):
            return _moved(op, args, kwargs)
    raise RuntimeError(_with_advice(op, message))


def _always(op: Any, choice: str, proceed: Action, /, *args: Any, **kwargs: Any) -> Any:
    if choice == "error":
        message = f"{op.name()} may not run: the profile forbids it ({KNOB})"
        raise RuntimeError(_with_advice(op, message))
    if choice == "native":
        return _native(op, proceed, args, kwargs)
    if not is_on_device(args, kwargs):
        return _where_refused(op, choice, proceed, *args, **kwargs)
    if _is_handled(op):
        return proceed(*args, **kwargs)
    return _moved(op, args, kwargs)


def _native(op: Any, proceed: Action, args: Any, kwargs: Any) -> Any:
    """Run the op with any kernel of torch, deterministic or not.

    The deterministic mode of torch belongs to the process, so ops in other threads may run
    nondeterministic kernels during this call, too. If such calls of several threads overlap, the
    call that ends last restores the mode.
    """
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
    description: str,
    otherwise: Action | None,
    proceed: Action,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if _is_handled(op):
        return otherwise(proceed, *args, **kwargs) if otherwise else proceed(*args, **kwargs)
    with _handling(op), import_module("torch").no_grad():
        result = fn(*args, **kwargs)
    _count(op, description)
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
        advice.append(f"set {KNOB}: cpu to use a deterministic implementation of torchrepro")
    elif row is None:
        advice.append(f"set {KNOB}: {{ops: {{{name}: cpu}}}} to run it on the CPU")
    elif row.on_cpu:
        advice.append(f"set {KNOB}: cpu to run it on the CPU")
    advice.append(f"or allow it to vary with {KNOB}: {{ops: {{{name}: native}}}}")
    return f"{message}\ntorchrepro: {op.name()}: {'; '.join(advice)}"


def _count(op: Any, action: str, moved: int = 0) -> None:
    # The caller of the wrapper in `interpose` is a line of the program, or a thread of torch.
    inner = [frame for frame in frames() if frame.f_globals.get("__name__") == interpose.__name__]
    caller = inner[-1].f_back if inner else None
    count(KNOB, op.name(), action, program_line(caller) if caller is not None else "", moved)
