"""Finding the ops that a profile or a program names, as torch spells them.

An op has overloads: ``aten::median`` has ``aten::median.dim``, and others that take ``out=``
(https://docs.pytorch.org/docs/stable/library.html). A name without an overload means all of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrepro.errors import ProfileError
from torchrepro.messages import Problem, near
from torchrepro.policies.interposed import can_be_interposed, op_names

if TYPE_CHECKING:
    from collections.abc import Iterator


def packet_name(op: Any) -> str:
    """Return the name of the overload `op` without namespace and overload, as in ``median``."""
    return str(op.name()).partition("::")[2].partition(".")[0]


def overloads_named(spelled: str) -> tuple[Any, ...]:
    """Return the overloads that `spelled` means and that a function can be put in front of.

    It is spelled ``aten::median``, ``aten.median`` or ``median``, with an overload after another
    dot or without. Raises `ProfileError` if torch has no such op, or makes it of others.
    """
    found = next(filter(None, map(_overloads, _readings(spelled))), ())
    if not found:
        close = near(spelled.rpartition("::")[2], {_short(name) for name in op_names()})
        hint = f"; did you mean `{close}`?" if close else ""
        raise ProfileError(Problem(f"this torch has no op `{spelled}`{hint}"))
    usable = tuple(op for op in found if _is_whole(op))
    if not usable:
        raise ProfileError(
            Problem(f"torch makes `{spelled}` of other ops: name those that it calls instead")
        )
    return usable


def _is_whole(op: Any) -> bool:
    try:
        return can_be_interposed(op)
    except RuntimeError:  # one of TorchScript's own, such as aten::mul.left_t: not dispatched
        return False


def _readings(spelled: str) -> Iterator[tuple[str, str, str]]:
    """Yield what `spelled` may mean: namespace, name, and overload or an empty string."""
    namespace, separator, rest = spelled.partition("::")
    parts = (rest if separator else spelled).split(".")
    if separator:
        yield namespace, parts[0], ".".join(parts[1:])
        return
    if len(parts) > 1:
        yield parts[0], parts[1], ".".join(parts[2:])
    yield "aten", parts[0], ".".join(parts[1:])


def _overloads(reading: tuple[str, str, str]) -> tuple[Any, ...]:
    namespace, name, overload = reading
    packet: Any = getattr(getattr(import_module("torch").ops, namespace), name, None)
    list_names = getattr(packet, "overloads", None)
    names = list_names() if list_names else []
    wanted = [overload] if overload in names else [] if overload else names
    return tuple(getattr(packet, each) for each in wanted)


def _short(name: str) -> str:
    """Return an op's name as one would write it: that of torch's own without its namespace."""
    return name.removeprefix("aten::").partition(".")[0]
