"""The exceptions that a caller may catch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrepro.messages import MANY, Problem, printable, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Self


EXIT_STATUSES = {
    0: "yes, or done",
    1: "the answer is no: the runs diverged, a knob has drifted, a lock is not met",
    2: "the request is wrong: an unknown profile, an illegal value, a damaged file, a command that "
    "fails in every run",
    3: "the profile could not be put in force",
}
"""What a command says with the status that it ends with."""


class TorchreproError(Exception):
    """Whatever torchrepro refuses; `exit_status` is what the command line ends with."""

    exit_status = 3


class _WrongRequestError(TorchreproError, ValueError):
    """What is wrong with a request: one problem, or several."""

    exit_status = 2

    def __init__(self, problems: Problem | Sequence[Problem]) -> None:
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
        """The `torchrepro.outcomes.Change` of each knob that changed."""
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


for _public in (
    *(TorchreproError, ProfileError, ApplyError, LateError),
    *(DriftError, SeedingError, TraceError),
):
    _public.__module__ = "torchrepro"  # tracebacks show the name that a caller imports
