"""What a caller may catch, and the parts that a message is built from."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torchrepro.report import Drift, Report

WIDE = 80  # characters of a value that a message shows
MANY = 12  # above this a list of legal names helps nobody without a near match


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a request, and all that a reader needs to mend it."""

    what: str
    """The rule that is broken, in words."""

    where: str = ""
    """``file:line``, the override, or the argument that holds the value."""

    key: str = ""
    """The dotted key of the profile."""

    found: str = ""
    """The value found, as the user wrote it."""

    legal: str = ""
    """What would be legal."""

    near: str = ""
    """A legal value close to the one found."""

    todo: str = ""
    """What to do about it."""

    def __str__(self) -> str:
        from torchrepro.hidden import HIDDEN, sounds_secret

        where, found = self.where, self.found
        if sounds_secret(self.key.rpartition(".")[2]):
            where, found = where.partition("=")[0], found and HIDDEN
        subject = f"{self.key} = {found}" if self.key and found else self.key or found
        if where.startswith("override "):  # the override already shows key and value
            subject = ""
        head = printable(": ".join(part for part in (where, subject) if part))
        what = "\n".join(map(printable, self.what.split("\n")))
        lines = [f"{head}: {what}" if head else what]
        for label, text in (
            ("did you mean", self.near),
            ("legal", self.legal),
            ("to do", self.todo),
        ):
            if text:
                lines.append(f"    {label}: {printable(text)}")
        return "\n".join(lines)


class TorchreproError(Exception):
    """Whatever torchrepro refuses; `exit_status` is what the command line ends with."""

    exit_status = 3


class ProfileError(TorchreproError, ValueError):
    """The request is wrong: an unknown profile, an illegal value, a contradiction."""

    exit_status = 2

    def __init__(self, problems: Problem | Sequence[Problem]) -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        lines = [str(problem) for problem in self.problems[:MANY]]
        rest = len(self.problems) - MANY
        super().__init__("\n".join(lines + [f"... and {rest} more problems"] * (rest > 0)))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)


class ApplyError(TorchreproError, RuntimeError):
    """The profile could not be put in force; the process is as it was before."""

    def __init__(self, message: str, report: Report | None = None) -> None:
        self.report = report
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.report)


class DriftError(TorchreproError, RuntimeError):
    """A knob is no longer what the profile in force has set: later code changed it."""

    exit_status = 1

    def __init__(self, drift: Sequence[Drift]) -> None:
        self.drift = tuple(drift)
        lines = [str(drift.problem) for drift in self.drift]
        head = "knobs have changed since the profile was put in force (guard: error):"
        todo = (
            "    to do: let that code run before the profile is put in force, take the write out, "
            "or have the profile ask for the value"
        )
        super().__init__("\n".join([head, *lines, todo]))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.drift,)


class LateError(ApplyError):
    """A knob is past its phase and the profile asks to stop rather than to go on without it."""


class _WrongRequestError(TorchreproError, ValueError):
    """One thing that is wrong with a request."""

    exit_status = 2

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problem,)


class SeedingError(_WrongRequestError):
    """A request about random numbers is wrong: an argument, a snapshot; nothing was changed."""


class TraceError(_WrongRequestError):
    """A recording cannot be made or read: its folder, a full disk, another format."""


for _public in (
    *(TorchreproError, ProfileError, ApplyError, LateError),
    *(DriftError, SeedingError, TraceError),
):
    _public.__module__ = "torchrepro"  # tracebacks show the name that a caller imports


def near(word: str, words: Iterable[str], alike: float = 0.6) -> str:
    """Return the entry of `words` closest to `word`, or an empty string if none is so `alike`."""
    pool = list(words)
    folded = {entry.casefold(): entry for entry in pool}
    found = get_close_matches(word.casefold(), list(folded), n=1, cutoff=alike)
    return folded[found[0]] if found else ""


def some(words: Iterable[str]) -> str:
    """Return `words` as one line, cut after the first dozen."""
    pool = list(words)
    rest = len(pool) - MANY
    return ", ".join(pool[:MANY]) + (f", ... ({rest} more)" if rest > 0 else "")


def shown(value: Any) -> str:
    """Return `value` as a reader of YAML would write it, cut to a line."""
    text = {None: "null", True: "true", False: "false"}.get(value) if _plain(value) else None
    if text is None:
        text = value if isinstance(value, str) else _written(value)
    text = printable(text) or "''"
    return text if len(text) <= WIDE else text[: WIDE - 3] + "..."


def printable(text: str) -> str:
    """Return `text` with every control character escaped: a file must not steer a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _written(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # Python writes no integer of more than some thousand digits
        return "a number of thousands of digits"


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, bool)
