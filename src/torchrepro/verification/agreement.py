"""Whether the runs of a command were the same, by the criteria that were asked for."""

from __future__ import annotations

import signal
from collections import deque
from dataclasses import dataclass, replace
from shlex import join
from typing import TYPE_CHECKING

from torchrepro.errors import ApplyError, TorchreproError, TraceError
from torchrepro.manifest.contents import secrets_here
from torchrepro.messages import Problem, printable
from torchrepro.redaction import shareable, shell_line
from torchrepro.trace.reader import read_run
from torchrepro.verdict.comparison import answer, tolerance_of
from torchrepro.verdict.diagnosis import advice
from torchrepro.verdict.records import ALIGNED
from torchrepro.verdict.value import Compared, Divergence, Kind, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrepro.verification.result import Run


@dataclass(frozen=True, slots=True)
class RunCriteria:
    """Whether two runs are the same."""

    tolerance: tuple[float, float] | None = None
    """rtol and atol; None asks for the same bits."""

    @property
    def name(self) -> str:
        """``bits`` or ``tolerance``."""
        return "bits" if self.tolerance is None else "tolerance"

    @property
    def statistics(self) -> bool:
        """Whether the runs have to be recorded with statistics."""
        return self.tolerance is not None

    def ask(self, left: str, right: str) -> Verdict:
        """Compare two runs of the command."""
        return answer(left, right, self.tolerance, one_program=True)


def question_of(
    guarantee: str, rtol: float | None = None, atol: float | None = None
) -> RunCriteria:
    """Return what is asked under a guarantee, which is empty without a profile.

    Only `aligned` asks for a tolerance; one that is given comes first.
    """
    given = tolerance_of(rtol, atol)
    return RunCriteria(ALIGNED if given is None and guarantee == "aligned" else given)


_LINES = 12
"""Lines that are shown of what a failed command printed last."""

_NOT_IN_FORCE = 3


def verdict_of(question: RunCriteria, first: Run, other: Run, command: Sequence[str]) -> Verdict:
    """Return what a comparison of two runs says, of which one at least was recorded.

    Runs that end with another exit status are not the same, whatever was recorded of them.
    """
    empty = next((run for run in (first, other) if not run.steps), None)
    if empty is not None:
        return _not_the_same(first, other, f"{empty.name} ended before its first step", 0)
    found = question.ask(first.folder, other.folder)
    if found.same and first.status != other.status:
        last = _not_the_same(
            first, other, "all that was recorded is the same", found.compared.steps
        )
        return replace(last, compared=found.compared, losses=found.losses, map=found.map)
    if first.status != other.status:
        found = replace(found, notes=(_ends(first, other), *found.notes))
    meta = read_run(first.folder, records=False)[0].meta
    shown = shell_line(shareable(command, secrets_here()))
    return replace(found, advice=advice(found, meta, shown))


def _ends(*runs: Run) -> str:
    ends = (f"{run.name} with {status_in_words(run.status)}" for run in runs)
    return f"they ended: {' and '.join(ends)}"


def _not_the_same(first: Run, other: Run, what: str, step: int) -> Verdict:
    return Verdict(
        same=False,
        left=first.folder,
        right=other.folder,
        compared=Compared(ranks=0, steps=0, ops=0, bytes=0, level="op"),
        first=Divergence.without_op(0, step, Kind.ENDED, f"{what}; {_ends(first, other)}"),
    )


def refuse_one_that_recorded_nothing(run: Run, command: Sequence[str]) -> None:
    """Raise `TraceError` for a command that ended well and of which nothing was recorded."""
    if run.status == 0 and not run.steps:
        raise TraceError(
            Problem(
                "nothing was recorded of it, so nothing can be said of its runs",
                found=join(command),
                todo="it has to import torch and compute something with it, in a Python in which "
                "torchrepro is installed",
            )
        )


def failed_alike(runs: Sequence[Run]) -> bool:
    """Whether a command has failed in every run, in the same way."""
    return runs[0].status != 0 and len({run.status for run in runs}) == 1


def failure(runs: Sequence[Run], command: Sequence[str]) -> TorchreproError:
    """Return the error that tells of a command that failed in all its runs alike."""
    run = runs[-1]
    lines = last_lines(run)
    if run.status == _NOT_IN_FORCE and any(line.startswith("torchrepro: ") for line in lines):
        return ApplyError("\n".join(line.removeprefix("torchrepro: ") for line in lines))
    said = [f"    {line}" for line in lines] or ["    (it printed nothing)"]
    ended = f"it ended with {status_in_words(run.status)} in each of {len(runs)} runs"
    return TraceError(Problem("\n".join([f"{ended}:", *said]), found=join(command)))


def status_in_words(status: int) -> str:
    """Return an exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    return f"signal {signal.Signals(-status).name}"


def last_lines(run: Run) -> list[str]:
    """Return the last lines that a run printed, without what would steer a terminal."""
    with open(run.log, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
        return [printable(line.rstrip("\n")) for line in deque(file, _LINES)]
