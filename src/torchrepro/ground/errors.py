"""The exceptions that a caller may catch, and the exit statuses of the command line."""

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
    3: "the profile could not be applied",
    4: "no answer: two runs of the unchanged program differ, nothing could be compared, or the "
    "lock has no results for this platform",
    INTERNAL: "an internal error of torchrepro, and no answer: please report it",
}
"""The meaning of each exit status of a command."""


class TorchreproError(Exception):
    """Base class of all errors of torchrepro; the command line exits with `exit_status`.

    If such an error ends a program, the traceback stops at the call in the program and omits the
    frames of torchrepro. For this, the first error that is created wraps `sys.excepthook`.
    """

    exit_status = 3

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if getattr(sys.excepthook, "func", None) is not _print_down_to_the_call:
            sys.excepthook = partial(_print_down_to_the_call, sys.excepthook)


def _print_down_to_the_call(
    hook: Any, error_type: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Call `hook` with the traceback cut after the last frame that is not in torchrepro."""
    last_of_program, frame = None, trace if isinstance(error, TorchreproError) else None
    while frame:
        if frame.tb_frame.f_globals.get("__name__", "").partition(".")[0] != "torchrepro":
            last_of_program = frame
        frame = frame.tb_next
    if last_of_program:
        last_of_program.tb_next = None
    hook(error_type, error, trace)


class _WrongRequestError(TorchreproError, ValueError):
    """Base class of errors about a wrong request, which has one or several `problems`."""

    exit_status = 2

    def __init__(self, problems: Problem | str | Sequence[Problem]) -> None:
        if isinstance(problems, str):  # torch's loader re-raises a worker's error, with one text
            problems = Problem(problems)
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        lines = [str(problem) for problem in self.problems[:MANY]]
        rest = len(self.problems) - MANY
        super().__init__("\n".join(lines + [f"... and {rest} more problems"] * (rest > 0)))

    @classmethod
    def about(cls, what: str, *parts: str, **more: str) -> Self:
        """Return the error for one `Problem` with these fields."""
        return cls(Problem(what, *parts, **more))

    @property
    def problem(self) -> Problem:
        """The first problem."""
        return self.problems[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)


class ProfileError(_WrongRequestError):
    """A request is wrong: for example, it names an unknown profile or an illegal value."""


class ApplyError(TorchreproError, RuntimeError):
    """The profile could not be applied; the process is unchanged."""

    def __init__(self, message: str, report: Any = None) -> None:
        self.report = report
        """The `torchrepro.Report` of the attempt, if there is one."""
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.report)


class DriftError(TorchreproError, RuntimeError):
    """A knob no longer has the value that the active profile set: later code has changed it."""

    exit_status = 1

    def __init__(self, drift: Sequence[Any]) -> None:
        self.drift = tuple(drift)
        """The `torchrepro.reporting.outcomes.KnobChange` of each knob that changed."""
        lines = ["knobs have changed since the profile was applied (guard: error):"]
        for first, *rest in by_write(self.drift):
            lines.append(str(first.problem))
            for change in rest:
                had = f"the profile had set {shown(change.was)}"
                lines.append(f"    also: {change.knob} = {shown(change.now)}: {had}")
            if first.called:
                lines.append(f"    called from: {printable(first.called)}")
        lines.append(
            "    to do: run that code before the profile is applied, remove the write, or set the "
            "value in the profile"
        )
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.drift,)


def by_write(drift: Iterable[Any]) -> list[list[Any]]:
    """Return knob changes grouped by line. A change by an unknown line is in a separate group."""
    groups: dict[Any, list[Any]] = {}
    for number, change in enumerate(drift):
        write = (change.where, change.called, change.when) if change.where else number
        groups.setdefault(write, []).append(change)
    return list(groups.values())


class LateError(ApplyError):
    """It is too late to set a knob, and the profile requires an error in this case (`on_late`)."""


class SeedingError(_WrongRequestError):
    """A request about random numbers has a wrong argument or snapshot; nothing was changed."""


class TraceError(_WrongRequestError):
    """A recording cannot be made or read, for example because the disk is full."""


class ExitStatus:
    """When Python frees the object, ends the process with the status `value`, if it is set.

    Pass the object as an argument to an exit handler. Python frees the arguments after all handlers
    have run, and before it flushes standard output
    (https://github.com/python/cpython/blob/main/Modules/atexitmodule.c). An exception in a handler
    would be printed without changing the status, and `os._exit` in a handler would skip the other
    handlers.

    `value` also replaces the status of a program that ends with, say, ``sys.exit(5)``, because
    Python gives no access to that status. So a failed program still fails, but with another status.
    """

    value: int | None = None

    def __del__(self) -> None:
        if self.value is None:
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed, or None
                stream.flush()
        os._exit(self.value)


for _public in (
    *(TorchreproError, ProfileError, ApplyError, LateError),
    *(DriftError, SeedingError, TraceError),
):
    _public.__module__ = "torchrepro"  # tracebacks show the name that a caller imports
