"""The errors that a caller may catch, the texts of their messages, and the exit statuses.

A message describes each problem with hints and near matches, and shows a value on one line.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self

from torchrepro.ground.redaction import HIDDEN, sounds_secret

WIDE = 80  # a message shows so many characters of a value
_ELLIPSIS = "..."
_SOURCE_LINE = re.compile(r"[^\s/\\]+:\d+[^\w\s]*$")  # file name, line, and closing punctuation
MANY = 12  # a list of more names is too long to read

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


class Problem(NamedTuple):
    """One problem of a request, with all that a user needs to fix it."""

    what: str
    """The rule that is broken."""

    where: str = ""
    """``file:line``, the override, or the argument that holds the value."""

    key: str = ""
    """The dotted key of the profile."""

    found: str = ""
    """The value found, as the user wrote it."""

    legal: str = ""
    """The legal values."""

    near: str = ""
    """A legal value close to the one found."""

    todo: str = ""
    """How to fix it."""

    def __str__(self) -> str:
        where, found = self.where, self.found
        if sounds_secret(self.key.rpartition(".")[2]):
            where, found = where.partition("=")[0], found and HIDDEN
        subject = f"{self.key} = {found}" if self.key and found else self.key or found
        if where.startswith("override "):  # the override already shows key and value
            subject = ""
        what = "\n".join(map(printable, self.what.split("\n")))
        lines = [": ".join(filter(None, (printable(where), printable(subject), what)))]
        hints = (("did you mean", self.near), ("legal", self.legal), ("to do", self.todo))
        lines += [f"    {label}: {printable(text)}" for label, text in hints if text]
        return "\n".join(lines)


def near(word: str, words: Iterable[str]) -> str:
    """Return the entry of `words` closest to `word`, or an empty string if none is close."""
    folded = {entry.casefold(): entry for entry in words}
    matches = get_close_matches(word.casefold(), folded, n=1)
    return folded[matches[0]] if matches else ""


def some(words: Iterable[str]) -> str:
    """Return `words` on one line; after the first dozen, only the number of the rest."""
    pool = list(words)
    rest = len(pool) - MANY
    return ", ".join(pool[:MANY]) + (f", ... ({rest} more)" if rest > 0 else "")


def shown(value: Any) -> str:
    """Return `value` as a user would write it in YAML, on a line of at most `WIDE` characters."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        text = value if isinstance(value, str) else repr(value)
    except ValueError:  # Python refuses to print integers of several thousand digits
        text = "a number of thousands of digits"
    return shortened(printable(text) or "''", WIDE)


def shortened(text: str, length: int) -> str:
    """Return `text` cut to `length`, in the middle if it ends in ``file:line``, else at its end."""
    if len(text) <= length:
        return text
    room = length - len(_ELLIPSIS)
    source_line = _SOURCE_LINE.search(text[-length:])
    end = source_line[0][-room:] if source_line else ""
    return text[: room - len(end)] + _ELLIPSIS + end


def ends_in_line_number(text: str) -> bool:
    """Whether `text` ends in ``file:line``, with or without a bracket or a full stop."""
    return _SOURCE_LINE.search(text[-WIDE:]) is not None


def printable(text: str) -> str:
    """Return `text` with control characters escaped, so that it cannot control a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def size(number: float) -> str:
    """Return a number of bytes as text with a unit, such as ``1.5 GB``."""
    for unit in _UNITS:
        if number < 1000 or unit == _UNITS[-1]:  # noqa: PLR2004 - the ratio of two units
            break
        number /= 1000
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.3g} {unit}"


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
