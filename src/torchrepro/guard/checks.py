"""Reads knobs again while profiles are in force, and says or refuses what has drifted.

That is when a profile is taken back, whatever the guard; with a guard that warns or refuses, also
before optimizer steps and as the process ends.
"""

from __future__ import annotations

import atexit
import os
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrepro.console import say
from torchrepro.errors import DriftError
from torchrepro.guard.baseline import (
    Guard,
    expected,
    guards,
    guards_at_steps,
    guards_of,
    key,
    look,
    noting_writers,
    settle,
)
from torchrepro.knobs.catalogue import knobs_by_name
from torchrepro.process_state import LastWord
from torchrepro.report import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torchrepro.guard.baseline import InForce
    from torchrepro.knobs.knob import Knob
    from torchrepro.planner import Plan
    from torchrepro.report import Drift, Row


def mode() -> str:
    """Return what is done about drift: `none`, `warn` or `error`."""
    return str(knobs_by_name()["guard"].access.read())


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


_writers_watched: list[bool] = []


def hold_to(applied: InForce, plan: Plan, rows: Iterable[Row], moved: Iterable[Knob]) -> ExitStack:
    """Hold what `applied` has set: from now on it is to read what it reads now.

    That is the knobs of `plan` which `rows` say are set, and those that were `moved` with them.
    While a guard is on, the first call for a profile also imports ``torch.optim``, and adds a hook
    of torch's own before optimizer steps, one at exit, and with `guard: error` wraps the writers of
    knobs. Closing what is returned takes that back.
    """
    with ExitStack() as undo:
        if not guards_of([applied]):
            undo.enter_context(_in_force(Guard(applied)))
        (guard,) = guards_of([applied])
        knobs = {step.knob.name: step.knob for step in plan.steps}
        held = [knobs[row.knob] for row in rows if _can_be_held(knobs[row.knob], row.outcome)]
        guard.expected |= {knob.name: expected(knob) for knob in (*moved, *held)}
        settle()
        if mode() != "none" and not guard.at_steps:
            undo.enter_context(_at_steps(guard))
        return undo.pop_all()


def last_look(concerned: Iterable[InForce]) -> Callable[[], None]:
    """Read again what profiles have set that are about to be taken back.

    What is returned says or refuses what was found, once they are.
    """
    return partial(_act_on, look(guards_of(concerned)), mode())


def _can_be_held(knob: Knob, outcome: Outcome) -> bool:
    """Whether `knob`, after `outcome`, is to stay as it is: generators are there to move."""
    set_here = outcome in (Outcome.APPLIED, Outcome.UNCHANGED)
    return set_here and knob.guarded


def _act_on(found: list[tuple[Guard, Drift]], acting: str) -> None:
    """Say or refuse what was found, as `acting` says: `warn` or `error`."""
    if not found or acting == "none":
        return
    if acting != "error":
        _tell(found)
        return
    for guard, drift in found:
        guard.said.add(key(drift))
    # The profile may be held by something that ends the run in a way of its own.
    found[-1][0].applied.refuse(DriftError([drift for _, drift in found]))


def _tell(found: Iterable[tuple[Guard, Drift]]) -> None:
    """Tell standard error what has drifted, each knob and new value once."""
    for guard, drift in found:
        if key(drift) not in guard.said:
            guard.said.add(key(drift))
            say(f"drift: {drift}")


def _before_step(*_: Any) -> None:
    acting = mode()
    present = guards_at_steps()
    asked = present if acting != "none" else ()
    found = look(asked, lambda guard: f"before step {guard.steps}")
    for guard in present:
        guard.steps += 1
    _act_on(found, acting)


_before_step._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001 - see writers


def _at_exit(process: int, last_word: LastWord) -> None:
    if os.getpid() != process:
        return  # a copy of the process, which does with its knobs what it likes
    found = look(guards_at_steps()) if mode() != "none" else []
    _tell(found)
    if found and mode() == "error":
        last_word.status = DriftError.exit_status


@contextmanager
def _in_force(guard: Guard) -> Iterator[None]:
    guards.append(guard)
    try:
        yield
    finally:
        guards.remove(guard)
        settle()


@contextmanager
def _at_steps(guard: Guard) -> Iterator[None]:
    with ExitStack() as undo:
        if not guards_at_steps():
            undo.enter_context(_reading_again())
        guard.at_steps = True
        undo.callback(setattr, guard, "at_steps", False)  # noqa: FBT003 - as it was
        if mode() == "error" and not _writers_watched:
            undo.enter_context(_telling_writers())
        yield


@contextmanager
def _reading_again() -> Iterator[None]:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    hook = register_optimizer_step_pre_hook(_before_step)
    at_exit = partial(_at_exit, os.getpid())  # a function of its own, to be unregistered alone
    atexit.register(at_exit, LastWord())
    try:
        yield
    finally:
        atexit.unregister(at_exit)
        hook.remove()


@contextmanager
def _telling_writers() -> Iterator[None]:
    with noting_writers():
        _writers_watched.append(True)
        try:
            yield
        finally:
            _writers_watched.clear()
