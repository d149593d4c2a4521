"""How a hook is put into a framework, and which profile it is for."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.console import say
from torchrepro.errors import TorchreproError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
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


@contextmanager
def going_on_without(framework: str, what: str) -> Iterator[None]:
    """Say that `what` failed within the block, and let the program of the framework go on.

    An error that torchrepro itself has to say is raised.
    """
    try:
        yield
    except (TorchreproError, MissingHookError):
        raise
    except Exception as error:  # noqa: BLE001 - a program is not ended by what it did not ask for
        why = str(error).strip().partition("\n")[0]
        say(f"{framework}: {what} failed, and is left out: {type(error).__name__}: {why}")


def wrap(undo: ExitStack, owner: Any, name: str, wrapping: Callable[[Any], Any]) -> None:
    """Put ``wrapping(original)`` in the place of an attribute of `owner` until `undo` is closed.

    Raises `MissingHookError` where there is no such attribute.
    """
    original = vars(owner).get(name)
    if not callable(original):
        where = getattr(owner, "__qualname__", owner.__name__)
        raise MissingHookError(f"{where}.{name}")
    wrapper = wraps(original)(wrapping(original))
    undo.enter_context(_other_value(owner, name, wrapper, original))


def wrap_everywhere(
    undo: ExitStack, module: Any, name: str, wrapping: Callable[[Any], Any]
) -> None:
    """Do as `wrap` with a function of `module`, and where others have imported it by its name.

    So it is undone: who has imported the wrapper by that name gets the function back. Who keeps it
    under another one keeps the wrapper, which has to ask for itself whether a profile is in force.
    Raises `MissingHookError` where there is no such function.
    """
    original = vars(module).get(name)
    wrap(undo, module, name, wrapping)
    wrapper = vars(module)[name]
    undo.callback(_replace_everywhere, name, wrapper, original)
    _replace_everywhere(name, original, wrapper)


def _replace_everywhere(name: str, present: Any, value: Any) -> None:
    """Give every module whose `name` is `present` another `value` there."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is present:
            setattr(module, name, value)


@contextmanager
def _other_value(owner: Any, name: str, value: Any, before: Any) -> Iterator[None]:
    setattr(owner, name, value)
    try:
        yield
    finally:
        if vars(owner).get(name) is value:  # somebody else's wrapper stays, with ours within
            setattr(owner, name, before)
