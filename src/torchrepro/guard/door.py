"""What a profile in force has to do with the guard, which is imported once there is a profile."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

from torchrepro.console import say
from torchrepro.errors import DriftError
from torchrepro.knobs.catalogue import knobs_by_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from torchrepro.guard.held import InForce
    from torchrepro.knobs.knob import Knob
    from torchrepro.planner import Plan
    from torchrepro.report import Drift, Row


def mode() -> str:
    """Return what is done about drift: `none`, `warn` or `error`."""
    return str(knobs_by_name()["guard"].access.read())


def by_a_profile() -> AbstractContextManager[Callable[[], tuple[Knob, ...]]]:
    """Yield a function that tells which knobs that are held were moved within the block so far."""
    if not _loaded():
        return nullcontext(tuple)
    from torchrepro.guard.held import by_a_profile

    return by_a_profile()


def hold_to(
    applied: InForce, plan: Plan, rows: Iterable[Row], moved: Iterable[Knob]
) -> AbstractContextManager[object]:
    """Hold what `applied` has set to what it reads now, as `guarding.hold_to` says."""
    from torchrepro.guard.guarding import hold_to

    return hold_to(applied, plan, rows, moved)


def drift_of(applied: InForce) -> tuple[Drift, ...]:
    """Return the drift from what `applied` has set that was seen up to now, at this moment too."""
    if not _loaded():
        return ()
    from torchrepro.guard.held import drift_of

    return drift_of(applied)


def last_look(concerned: Iterable[InForce]) -> Callable[[], object]:
    """Read again what profiles have set that are about to be taken back.

    What is returned says or refuses what was found, once they are.
    """
    if not _loaded():
        return ExitStack().close
    from torchrepro.guard.guarding import last_look

    return last_look(concerned)


@contextmanager
def behind(error: BaseException | None) -> Iterator[None]:
    """Say the drift that is refused within the block instead of raising it over `error`.

    An `error` that would end the process with status 0, as `sys.exit()` raises it, is raised over.
    """
    try:
        yield
    except DriftError as drift:
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            raise
        if not isinstance(error, DriftError):  # that one has said it
            say(drift)


def _loaded() -> bool:
    return "torchrepro.guard.guarding" in sys.modules
