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
from torchrepro.errors import DriftError, ExitStatus, by_write
from torchrepro.guard.baseline import (
    BaselineEntry,
    Guard,
    check,
    guards,
    guards_at_steps,
    key,
    noting_writers,
    settle,
)
from torchrepro.knobs.catalogue import knobs_by_name
from torchrepro.outcomes import in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from torchrepro.knobs.knob import Knob
    from torchrepro.outcomes import Change


def set_baseline(guard: Guard, knobs: Iterable[Knob]) -> ExitStack:
    """Hold `knobs` to what they read now.

    While the knob `guard` is on, the first call for a profile also imports ``torch.optim``, and
    adds a hook of torch's own before optimizer steps, one at exit, and with `guard: error` wraps
    the writers of knobs. Closing what is returned takes that back.
    """
    with ExitStack() as undo:
        if guard not in guards:
            guards.append(guard)
            undo.callback(_forget, guard)
        guard.baseline |= {knob.name: BaselineEntry.of(knob) for knob in knobs}
        settle()
        if _mode() != "none" and not guard.at_steps:
            if not guards_at_steps():
                undo.enter_context(_hooks())
            guard.at_steps = True
            undo.callback(setattr, guard, "at_steps", False)  # noqa: FBT003 - as it was
            if _mode() == "error":
                undo.enter_context(noting_writers())
        return undo.pop_all()


def final_check(concerned: Collection[Guard]) -> Callable[[], None]:
    """Read again what profiles have set that are about to be taken back.

    What is returned says or refuses what was found, once they are.
    """
    return partial(_act_on, check(concerned), _mode())


@contextmanager
def drift_behind(error: BaseException | None) -> Iterator[None]:
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


def _mode() -> str:
    """Return what is done about drift: `none`, `warn` or `error`."""
    return str(knobs_by_name()["guard"].access.read())


def _forget(guard: Guard) -> None:
    guards.remove(guard)
    settle()


@contextmanager
def _hooks() -> Iterator[None]:
    """Check before optimizer steps and at exit."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    hook = register_optimizer_step_pre_hook(_before_step)
    at_exit = partial(_at_exit, os.getpid())  # a function of its own, to be unregistered alone
    atexit.register(at_exit, ExitStatus())
    try:
        yield
    finally:
        atexit.unregister(at_exit)
        hook.remove()


def _before_step(*_: Any) -> None:
    mode, present = _mode(), guards_at_steps()
    found = check(present, lambda guard: f"before step {guard.steps}") if mode != "none" else []
    for guard in present:
        guard.steps += 1
    _act_on(found, mode)


_before_step._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001 - see writers


def _at_exit(process: int, status: ExitStatus) -> None:
    if os.getpid() != process:
        return  # a copy of the process, which does with its knobs what it likes
    mode = _mode()
    found = check(guards_at_steps()) if mode != "none" else []
    _say(found)
    if found and mode == "error":
        status.value = DriftError.exit_status


def _act_on(found: list[tuple[Guard, Change]], mode: str) -> None:
    """Say or refuse what was found, as `mode` says: `warn` or `error`."""
    if not found or mode == "none":
        return
    if mode != "error":
        _say(found)
        return
    for guard, drift in found:
        guard.said.add(key(drift))
    # The profile may be held by something that ends the run in a way of its own.
    found[-1][0].refuse(DriftError([drift for _, drift in found]))


def _say(found: Iterable[tuple[Guard, Change]]) -> None:
    """Say on standard error what has drifted, each knob and new value once, and each write once."""
    new = []
    for guard, drift in found:
        if key(drift) not in guard.said:
            guard.said.add(key(drift))
            new.append(drift)
    for written in by_write(new):
        say(f"drift: {in_words(written)}")
