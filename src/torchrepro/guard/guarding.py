"""Reads knobs again while profiles are in force, and says or refuses what has drifted.

That is before optimizer steps, when a profile is taken back, and as the process ends.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrepro.errors import DriftError
from torchrepro.guard.ending import LastWord
from torchrepro.guard.expected import expected
from torchrepro.guard.held import Guard, guards, key, look, mode, note_writer, settle
from torchrepro.guard.writers import watch_writers
from torchrepro.report import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torchrepro.knobs.knob import Knob
    from torchrepro.planner import Plan
    from torchrepro.report import Drift, Row

_writers_watched: list[bool] = []


def hold_to(guard: Guard, plan: Plan, rows: Iterable[Row], moved: Iterable[Knob]) -> ExitStack:
    """Hold what `plan` has set, as `rows` say, and what that has `moved`, to what it reads now.

    Closing what is returned takes back what the first call for `guard` changes: a hook of torch's
    own before optimizer steps, one at exit, and with `guard: error` the wrapped writers of what is
    held. Does nothing while no guard is on.
    """
    with ExitStack() as undo:
        if guards or mode() != "none":
            if guard not in guards:
                undo.enter_context(_in_force(guard))
            knobs = {step.knob.name: step.knob for step in plan.steps}
            held = [knobs[row.knob] for row in rows if _can_be_held(knobs[row.knob], row.outcome)]
            guard.expected |= {knob.name: expected(knob) for knob in (*moved, *held)}
            settle()
        return undo.pop_all()


def last_look(concerned: Iterable[Guard]) -> Callable[[], None]:
    """Read again what profiles have set that are about to be taken back.

    What is returned says or refuses what was found, once they are.
    """
    return partial(_act_on, look(concerned), mode())


@contextmanager
def behind(error: BaseException | None) -> Iterator[None]:
    """Say the drift that is refused within the block instead of raising it over `error`."""
    try:
        yield
    except DriftError as drift:
        if error is None:
            raise
        if not isinstance(error, DriftError):  # that one has said it
            sys.stderr.write(f"torchrepro: {drift}\n")


def _can_be_held(knob: Knob, outcome: Outcome) -> bool:
    """Whether `knob`, after `outcome`, is to stay as it is: generators are there to move."""
    set_here = outcome in (Outcome.APPLIED, Outcome.UNCHANGED)
    return set_here and knob.key != "seed" and knob.name != "guard"


def _act_on(found: list[tuple[Guard, Drift]], acting: str) -> None:
    """Say or refuse what was found, as `acting` says: `warn` or `error`."""
    if not found:
        return
    if acting != "error":
        _tell(found)
        return
    for guard, drift in found:
        guard.told.add(key(drift))
    # The profile may be held by something that ends the run in a way of its own.
    found[-1][0].applied.refuse(DriftError([drift for _, drift in found]))


def _tell(found: Iterable[tuple[Guard, Drift]]) -> None:
    """Tell standard error what has drifted, each knob and new value once."""
    for guard, drift in found:
        if key(drift) not in guard.told:
            guard.told.add(key(drift))
            sys.stderr.write(f"torchrepro: drift: {drift}\n")


def _before_step(*_: Any) -> None:
    acting = mode()
    found = look(guards, lambda guard: f"before step {guard.steps}")
    for guard in guards:
        guard.steps += 1
    _act_on(found, acting)


_before_step._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001 - see writers


def _at_exit(process: int, last_word: LastWord) -> None:
    if os.getpid() != process:
        return  # a copy of the process, which does with its knobs what it likes
    found = look(guards)
    _tell(found)
    if found and mode() == "error":
        last_word.status = DriftError.exit_status


@contextmanager
def _in_force(guard: Guard) -> Iterator[None]:
    with ExitStack() as undo:
        if not guards:
            undo.enter_context(_reading_again())
        guards.append(guard)
        undo.callback(_forget, guard)
        if mode() == "error" and not _writers_watched:
            undo.enter_context(_telling_writers())
        yield


def _forget(guard: Guard) -> None:
    guards.remove(guard)
    settle()


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
    with watch_writers(note_writer):
        _writers_watched.append(True)
        try:
            yield
        finally:
            _writers_watched.clear()
