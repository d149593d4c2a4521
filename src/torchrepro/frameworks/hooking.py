"""How a hook is put into a framework, and which profile it is for."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from torchrepro.console import say
from torchrepro.errors import TorchreproError
from torchrepro.patching import MissingHookError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.report import Report


class InForce(NamedTuple):
    """A profile in force, as a framework's checkpoint tells of it."""

    resolved: ResolvedProfile
    report: Callable[[], Report]


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
