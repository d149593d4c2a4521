"""The exceptions that a caller may catch, and the status with which they end a process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

from torchrepro.ground.messages import MANY, Problem, printable, shown

INTERNAL = 70  # as EX_SOFTWARE of sysexits.h

EXIT_STATUSES = {
    0: "yes, or done",
    1: "the answer is no: the runs diverged, a knob has drifted, a lock is not met",
    2: "the request is wrong: an unknown profile, an illegal value, a damaged file, a command that "
    "fails in every run",
    3: "the profile could not be put in force",
    4: "cannot tell: the plain program does not agree with itself, nothing could be compared, or "
    "the lock holds no numbers of this kind of machine",
    INTERNAL: "an error of torchrepro's own, which is no answer: please report it",
}
"""What a command says with the status that it ends with."""


class TorchreproError(Exception):
    """Whatever torchrepro refuses; `exit_status` is what the command line ends with.

    A program that one of them ends prints a traceback down to its own call, and not of how that was
    found out: with the first of them, `sys.excepthook` becomes one that cuts it and goes on.
    """

    exit_status = 3

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if getattr(sys.excepthook, "func", None) is not _print_down_to_the_call:
            sys.excepthook = partial(_print_down_to_the_call, sys.excepthook)


def _print_down_to_the_call(
    hook: Any, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    theirs, frame = None, traceback if isinstance(error, TorchreproError) else None
    while frame:
        if frame.tb_frame.f_globals.get("__name__", "").partition(".")[0] != "torchrepro":
            theirs = frame
        frame = frame.tb_next
    if theirs:
        theirs.tb_next = None
    hook(kind, error, traceback)


class _WrongRequestError(TorchreproError, ValueError):
    """What is wrong with a request: one problem, or several."""

    exit_status = 2

    def __init__(self, problems: Problem | str | Sequence[Problem]) -> None:
        if isinstance(problems, str):  # what torch's loader makes of one that a worker has raised
            problems = Problem(problems)
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        lines = [str(problem) for problem in self.problems[:MANY]]
        rest = len(self.problems) - MANY
        super().__init__("\n".join(lines + [f"... and {rest} more problems"] * (rest > 0)))

    @classmethod
    def about(cls, what: str, *parts: str, **more: str) -> Self:
        """Return the error about one `Problem`, which is made of these parts."""
        return cls(Problem(what, *parts, **more))

    @property
    def problem(self) -> Problem:
        """The first problem."""
        return self.problems[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)


class ProfileError(_WrongRequestError):
    """The request is wrong: an unknown profile, an illegal value, a contradiction."""


class ApplyError(TorchreproError, RuntimeError):
    """The profile could not be put in force; the process is as it was before."""

    def __init__(self, message: str, report: Any = None) -> None:
        self.report = report
        """The `torchrepro.Report` on what was tried, where there is one."""
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.report)


class DriftError(TorchreproError, RuntimeError):
    """A knob is no longer what the profile in force has set: later code changed it."""

    exit_status = 1

    def __init__(self, drift: Sequence[Any]) -> None:
        self.drift = tuple(drift)
        """The `torchrepro.reporting.outcomes.KnobChange` of each knob that changed."""
        lines = ["knobs have changed since the profile was put in force (guard: error):"]
        for first, *others in by_write(self.drift):
            lines.append(str(first.problem))
            for each in others:
                had = f"the profile had set {shown(each.was)}"
                lines.append(f"    also: {each.knob} = {shown(each.now)}: {had}")
            if first.called:
                lines.append(f"    called from: {printable(first.called)}")
        lines.append(
            "    to do: let that code run before the profile is put in force, take the write out, "
            "or have the profile ask for the value"
        )
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.drift,)


def by_write(drift: Iterable[Any]) -> list[list[Any]]:
    """Return drift, all of it that one line wrote together; where no line was seen, each alone."""
    groups: dict[Any, list[Any]] = {}
    for number, each in enumerate(drift):
        one = (each.where, each.called, each.when) if each.where else number
        groups.setdefault(one, []).append(each)
    return list(groups.values())


class LateError(ApplyError):
    """A knob is past its phase and the profile asks to stop rather than to go on without it."""


class SeedingError(_WrongRequestError):
    """A request about random numbers is wrong: an argument, a snapshot; nothing was changed."""


class TraceError(_WrongRequestError):
    """A recording cannot be made or read: its folder, a full disk, another format."""


class ExitStatus:
    """Ends the process with the status `value`, if it has one, once nothing refers to it any more.

    It is made to be an argument of an exit handler. Python lets go of the arguments once all
    handlers have run, then flushes what is left in standard output
    (https://github.com/python/cpython/blob/main/Modules/atexitmodule.c). An exception in a handler
    is printed and changes no status, and leaving from within one would keep those of others from
    running.

    With which status the program was about to end cannot be known here: Python keeps that of
    ``sys.exit(5)`` to itself until the process is gone. A status of failure stays one, as `value`.
    """

    value: int | None = None

    def __del__(self) -> None:
        if self.value is None:
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed, or never there
                stream.flush()
        os._exit(self.value)


for _public in (
    *(TorchreproError, ProfileError, ApplyError, LateError),
    *(DriftError, SeedingError, TraceError),
):
    _public.__module__ = "torchrepro"  # tracebacks show the name that a caller imports
