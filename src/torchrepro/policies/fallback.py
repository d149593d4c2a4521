"""What becomes of an op without a deterministic kernel, or of one that a profile names.

A function in front of each such op (see `interpose`) lets the kernel run and sees whether torch
refuses it (https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html).
Nothing is decided here about which kernels are deterministic: torch decides that, for each device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torchrepro.errors import ProfileError
from torchrepro.fork_safety import fork_safe_lock
from torchrepro.knobs.knob import MissingState
from torchrepro.knobs.legal_values import Value, is_pattern, per_op, waits_for_refusal
from torchrepro.messages import Problem, near
from torchrepro.policies.deterministic_ops import OPS
from torchrepro.policies.fallback_calls import (
    ALWAYS,
    KNOB,
    WHEN_REFUSED,
    filling_outputs,
    replaced,
    run_kernel,
)
from torchrepro.policies.interpose import Priority, interpose, overloads_named, withdraw
from torchrepro.policies.policy import Effect, add_effects

Action = Callable[..., Any]
"""What is done at a call of an op: takes `proceed` and the arguments of the call."""

_IDLE = {
    0: "torch's deterministic algorithms are off",
    1: "torch only warns about ops without a deterministic kernel",
}
"""What torch's debug mode means where no op is refused."""

_lock = fork_safe_lock()
_registered: dict[str, Callable[..., Any]] = {}


@dataclass(slots=True)
class _InForce:
    """The value in force and what it makes of each op."""

    value: Value = None
    actions: Mapping[Any, Action] = field(default_factory=dict)
    named: frozenset[Any] = frozenset()
    """The overloads that the profile decides about by name."""

    interposed: frozenset[Any] = frozenset()


_in_force = _InForce()


class FallbackPolicy:
    """What an op without a deterministic kernel does; None where nobody has said."""

    def read(self) -> Value:
        return _in_force.value

    def write(self, value: str | Mapping[str, Any]) -> None:
        asked = value if isinstance(value, str) else {"ops": dict(per_op(value))}
        mode = sys.modules["torch"].get_deterministic_debug_mode()
        if waits_for_refusal(asked) and mode in _IDLE:
            _decided(asked)  # a wrong name is wrong in any case
            raise MissingState(
                f"{_IDLE[mode]}, so that no op falls back: set "
                "backends.torch.deterministic_algorithms to error"
            )
        install(asked)

    save = read

    def restore(self, saved: Value) -> None:
        if saved != self.read():
            install(saved)


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
    name = str(op)
    overloads_named(name)
    with _lock:
        _registered[name] = fn
    _interpose_all()


def unregister_replacement(op: Any) -> None:
    """Forget the replacement of `op`, named as it was registered.

    Raises `ProfileError` if there is none.
    """
    name = str(op)
    with _lock:
        if name not in _registered:
            raise ProfileError(
                Problem(
                    "no replacement is registered for this op",
                    found=name,
                    legal=", ".join(sorted(_registered)),
                    near=near(name, _registered),
                )
            )
        del _registered[name]
    _interpose_all()


def install(value: Value) -> None:
    """Put `value` in force in place of the present one; None takes everything back.

    Raises `ProfileError` for an op that this torch does not have, and what torch raises where it
    refuses a kernel; nothing is changed then.
    """
    with _lock:
        actions, named = ({}, frozenset()) if value is None else _decided(value)
        before = _in_force.value, _in_force.actions, _in_force.named
        _in_force.value, _in_force.actions, _in_force.named = value, actions, named
        try:
            _interpose_all()
        except BaseException:
            _in_force.value, _in_force.actions, _in_force.named = before
            _interpose_all()
            raise


def _interpose_all() -> None:
    """Stand in front of every op that the value in force or a replacement is about."""
    with _lock:
        actions = dict(_in_force.actions)
        for op, fn in _replacements().items():
            otherwise = actions.get(op, run_kernel)
            actions[op] = partial(
                replaced, filling_outputs(op, fn), _replaced_by(fn), otherwise, op
            )
        for op in _in_force.interposed - actions.keys():
            withdraw(op, Priority.FALLBACK)
        _in_force.interposed |= actions.keys()  # what is half done can be taken back
        for op, action in actions.items():
            interpose(op, Priority.FALLBACK, action)
        _in_force.interposed = frozenset(actions)


def _replacements() -> dict[Any, Callable[..., Any]]:
    """Return the replacements in force: those of ops that the profile does not decide about."""
    if _in_force.value is None:
        return {}
    with _lock:
        every = {op: fn for name, fn in _registered.items() for op in overloads_named(name)}
        return {op: fn for op, fn in every.items() if op not in _in_force.named}


def _replaced_by(fn: Callable[..., Any]) -> str:
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    return f"replaced by {getattr(fn, '__module__', '')}.{name}"


def _uncalled_replacements(counted: list[Effect]) -> tuple[Effect, ...]:
    """Return an effect of no calls for every op that has a replacement in force, not called yet."""
    called = {effect.subject for effect in counted if effect.what.startswith("replaced by ")}
    return tuple(
        Effect(KNOB, op.name(), _replaced_by(fn), "", 0, 0)
        for op, fn in _replacements().items()
        if op.name() not in called
    )


add_effects(_uncalled_replacements)


def _decided(value: str | Mapping[str, Any]) -> tuple[dict[Any, Action], frozenset[Any]]:
    """Return what `value` makes of each op, and the ops that it names one by one.

    A name goes before a pattern and a long pattern before a short one, in whatever order they
    stand. Raises `ProfileError` for an op that this torch does not have.
    """
    everywhere = value if isinstance(value, str) else "error"
    choices = {row.name: everywhere for row in OPS}
    asked = per_op(value)
    for pattern in sorted(filter(is_pattern, asked), key=lambda text: (len(text), text)):
        choices |= dict.fromkeys(_matching(pattern), asked[pattern])
    actions = {
        op: partial(WHEN_REFUSED[choice], op)
        for name, choice in choices.items()
        for op in _present(f"aten::{name}")
    }
    named = {
        op: partial(ALWAYS[choice], op)
        for name, choice in asked.items()
        if not is_pattern(name)
        for op in _nameable(name, choice)
    }
    return {**actions, **named}, frozenset(named)


def _matching(pattern: str) -> list[str]:
    """Return the ops of the table that `pattern` matches; raises `ProfileError` if none does."""
    plain = pattern.replace("aten.", "aten::").removeprefix("aten::")
    names = [row.name for row in OPS]
    found = [name for name in names if fnmatchcase(name, plain)]
    if not found:
        close = near(plain, names)
        hint = f"; did you mean `{close}`?" if close else ""
        raise ProfileError(
            Problem(f"`{pattern}` matches none of the ops that torch refuses to run{hint}")
        )
    return found


def _present(name: str) -> tuple[Any, ...]:
    """Return the overloads called `name`; none for an op that only another torch has."""
    try:
        return overloads_named(name)
    except ProfileError:
        return ()


def _nameable(name: str, choice: str) -> tuple[Any, ...]:
    ops = overloads_named(name)
    if choice == "cpu" and any(_returns_a_view(op) for op in ops):
        raise ProfileError(
            Problem(f"`{name}` returns a view: it computes nothing that could run on the CPU")
        )
    return ops


def _returns_a_view(op: Any) -> bool:
    returned = [each.alias_info for each in op._schema.returns]  # noqa: SLF001 - no public reader
    return any(alias is not None and not alias.is_write for alias in returned)
