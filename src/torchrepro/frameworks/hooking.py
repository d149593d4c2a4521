"""How a hook is put into a framework, and which profile it is for."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.report import Report


class InForce(NamedTuple):
    """A profile in force, as a framework's checkpoint tells of it."""

    resolved: ResolvedProfile
    report: Callable[[], Report]


class MissingHookError(Exception):
    """What a hook wraps is not where it was: the framework has another version."""


profiles: list[InForce] = []
"""Those in force, outermost first."""


def in_force() -> InForce | None:
    """Return the innermost profile in force, or None."""
    return profiles[-1] if profiles else None


def wrap(undo: ExitStack, owner: Any, name: str, wrapping: Callable[[Any], Any]) -> None:
    """Put ``wrapping(original)`` in the place of an attribute of `owner` until `undo` is closed.

    Raises `MissingHookError` where there is no such attribute.
    """
    original = vars(owner).get(name)
    if not callable(original):
        where = getattr(owner, "__qualname__", owner.__name__)
        raise MissingHookError(f"{where}.{name}")
    wrapper = wraps(original)(wrapping(original))
    setattr(owner, name, wrapper)

    def put_back() -> None:
        if vars(owner).get(name) is wrapper:  # somebody else's wrapper stays, with ours within
            setattr(owner, name, original)

    undo.callback(put_back)
