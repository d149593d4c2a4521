"""What becomes of an op without a deterministic kernel, or of one that a profile names.

A function in front of each such op (see `interposed`) lets the kernel run and sees whether torch
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
from torchrepro.policies import fallback_calls as done
from torchrepro.policies.deterministic_ops import OPS
from torchrepro.policies.interpose import Place, interpose, overloads_named, withdraw
from torchrepro.policies.policy import Effect, tell_also

_lock = fork_safe_lock()
_registered: dict[str, Callable[..., Any]] = {}
_watchers: list[Callable[[], None]] = []


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
    _tell()


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
    _tell()


def replacements() -> dict[Any, Callable[..., Any]]:
    """Return the replacement of every overload that has one."""
    with _lock:
        return {op: fn for name, fn in _registered.items() for op in overloads_named(name)}


def watch(changed: Callable[[], None]) -> None:
    """Have `changed` called whenever a replacement comes or goes; a second time changes nothing."""
    if changed not in _watchers:
        _watchers.append(changed)


def qualified_name(fn: Callable[..., Any]) -> str:
    """Return ``package.function`` for a report."""
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    return f"{getattr(fn, '__module__', '')}.{name}"


def _tell() -> None:
    for changed in _watchers:
        changed()


Act = Callable[..., Any]


@dataclass(slots=True)
class _InForce:
    """The value in force and what it makes of each op."""

    value: Value = None
    acts: Mapping[Any, Act] = field(default_factory=dict)
    named: frozenset[Any] = frozenset()
    """The overloads that the profile decides about by name."""

    interposed: frozenset[Any] = frozenset()


_in_force = _InForce()


_IDLE = {
    0: "torch's deterministic algorithms are off",
    1: "torch only warns about ops without a deterministic kernel",
}
"""What torch's debug mode means where no op is refused."""


class FallbackPolicy:
    """What an op without a deterministic kernel does; None where nobody has said."""

    def read(self) -> Value:
        return _in_force.value

    def write(self, value: str | Mapping[str, Any]) -> None:
        asked = value if isinstance(value, str) else {"ops": dict(per_op(value))}
        mode = sys.modules["torch"].get_deterministic_debug_mode()
        if waits_for_refusal(asked) and mode in _IDLE:
            check(asked)  # a wrong name is wrong in any case
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


def install(value: Value) -> None:
    """Put `value` in force in place of the present one; None takes everything back.

    Raises `ProfileError`, with nothing changed, for an op that this torch does not have.
    """
    with _lock:
        acts, named = ({}, frozenset()) if value is None else _decided(value)
        _in_force.value, _in_force.acts, _in_force.named = value, acts, named
        watch(_interpose_all)
        _interpose_all()


def check(value: Value) -> None:
    """Raise `ProfileError` if `value` names an op that this torch does not have; change nothing."""
    if value is not None:
        _decided(value)


def _interpose_all() -> None:
    """Stand in front of every op that the value in force or a replacement is about."""
    with _lock:
        acts = dict(_in_force.acts)
        if _in_force.value is not None:
            acts |= {op: _replacing(op, fn, acts.get(op)) for op, fn in _replacements().items()}
        for op in _in_force.interposed - acts.keys():
            withdraw(op, Place.FALLBACK)
        for op, act in acts.items():
            interpose(op, Place.FALLBACK, act)
        _in_force.interposed = frozenset(acts)


def _replacements() -> dict[Any, Callable[..., Any]]:
    """Return the replacements in force: those of ops that the profile does not decide about."""
    return {op: fn for op, fn in replacements().items() if op not in _in_force.named}


def _replacing(op: Any, fn: Callable[..., Any], act: Act | None) -> Act:
    what = f"replaced by {qualified_name(fn)}"
    otherwise = act or partial(done.let_pass, op)
    return partial(done.replaced, done.filling_outputs(op, fn), what, otherwise, op)


def _uncalled_replacements(counted: list[Effect]) -> tuple[Effect, ...]:
    """Return an effect of no calls for every op that has a replacement in force, not called yet."""
    if _in_force.value is None:
        return ()
    called = {effect.subject for effect in counted if effect.what.startswith("replaced by ")}
    return tuple(
        Effect(done.KNOB, op.name(), f"replaced by {qualified_name(fn)}", "", 0, 0)
        for op, fn in _replacements().items()
        if op.name() not in called
    )


tell_also(_uncalled_replacements)


def _decided(value: str | Mapping[str, Any]) -> tuple[dict[Any, Act], frozenset[Any]]:
    """Return what `value` makes of each op, and the ops that it names one by one.

    A name goes before a pattern and a long pattern before a short one: their order is nothing.
    """
    everywhere = value if isinstance(value, str) else "error"
    words = {row.name: everywhere for row in OPS}
    asked = per_op(value)
    for pattern in sorted(filter(is_pattern, asked), key=lambda text: (len(text), text)):
        words |= dict.fromkeys(_matching(pattern), asked[pattern])
    acts = {
        op: partial(done.WHEN_REFUSED[word], op)
        for name, word in words.items()
        for op in _present(f"aten::{name}")
    }
    named = {
        op: partial(done.ALWAYS[word], op)
        for name, word in asked.items()
        if not is_pattern(name)
        for op in _nameable(name, word)
    }
    return {**acts, **named}, frozenset(named)


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


def _nameable(name: str, word: str) -> tuple[Any, ...]:
    ops = overloads_named(name)
    if word == "cpu" and any(_returns_a_view(op) for op in ops):
        raise ProfileError(Problem(f"`{name}` gives a view and computes nothing to move"))
    return ops


def _returns_a_view(op: Any) -> bool:
    returned = [each.alias_info for each in op._schema.returns]  # noqa: SLF001 - no public reader
    return any(alias is not None and not alias.is_write for alias in returned)
