"""A program's own implementations of ops, used while a profile decides about `device.fallback`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrepro.errors import ProfileError
from torchrepro.locks import fork_safe_lock
from torchrepro.messages import Problem, near
from torchrepro.policies.ops_by_name import overloads_named

if TYPE_CHECKING:
    from collections.abc import Callable

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
