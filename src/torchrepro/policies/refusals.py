"""What is done when a policy finds out during a run that it does not hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrepro.errors import ApplyError

_handlers: list[Callable[[ApplyError], None]] = []  # of the profiles in force, innermost last


def handle_with(handler: Callable[[ApplyError], None]) -> Callable[[], None]:
    """Hand what policies refuse from now on to `handler`; returns the way back."""
    _handlers.append(handler)
    return lambda: _handlers.remove(handler)


def refuse(error: ApplyError) -> None:
    """Hand `error` to the innermost profile in force; raises it where nobody handles it."""
    if not _handlers:
        raise error
    _handlers[-1](error)
