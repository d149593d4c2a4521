"""Finds out which perturbation it is that makes the runs of a command part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torchrepro.profile.composition import flatten
from torchrepro.verify.judging import verdict_of
from torchrepro.verify.value import Run, Stressed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchrepro.profile.resolved import Resolved
    from torchrepro.verdict.value import Verdict
    from torchrepro.verify.question import Question
    from torchrepro.verify.runner import Runner
    from torchrepro.verify.storm import Storm


@dataclass(frozen=True, slots=True)
class Search:
    """Runs a command under a part of a storm, to see whether that part is enough."""

    runner: Runner
    resolved: Resolved | None
    question: Question
    storm: Storm
    first: Run
    """The run that was not perturbed, which all others are compared with."""
    number: int
    """The number of the run that was not the same: the same perturbations are tried again."""

    def culprits(self) -> Stressed:
        """Return which perturbation alone makes the runs part, or which of them together.

        Takes a run without any, and two for each halving of the table at most.
        """
        storm = self.storm
        stressed = Stressed(storm.names, storm.skipped)
        if self._parts(()):
            what = "they part without any perturbation as well"
            return replace(stressed, what=what)
        found = halved(storm.names, self._parts)
        alone = f"perturbing the {found[0]} alone makes them part"
        several = f"it takes several perturbations together: {', '.join(found)}"
        return replace(stressed, culprits=found, what=several if found[1:] else alone)

    def _parts(self, names: Sequence[str]) -> bool:
        label = f"perturbed by {', '.join(names) or 'nothing'}"
        self.runner.say(f"{label} ...")
        done = len(list(self.runner.folder.glob("stress-*.log")))
        run = self.runner.run(
            self.resolved,
            f"stress-{done + 1}",
            self.storm.around(self.number, names),
            tuple(names),
        )
        return not verdict_of(self.question, self.first, run, self.runner.command).same


def halved(names: Sequence[str], parts: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
    """Return one of `names` for which `parts` holds, or the fewest found for which it does.

    It holds for all of them together.
    """
    while len(names) > 1:
        middle = len(names) // 2
        halves = (names[:middle], names[middle:])
        half = next((half for half in halves if parts(half)), None)
        if half is None:
            break
        names = half
    return tuple(names)


def with_culprit(
    verdict: Verdict, stressed: Stressed, storm: Storm, resolved: Resolved | None
) -> Verdict:
    """Return a verdict that names what makes the runs part, and what helps against it."""
    verdict = replace(verdict, notes=(stressed.what, *verdict.notes))
    if len(stressed.culprits) != 1 or verdict.advice is None:
        return verdict
    row = next(row for row in storm.rows if row.name in stressed.culprits)
    key, _, value = row.fix.partition("=")
    given = str(flatten(resolved.values if resolved else {}).get(key, "")).lower()
    helps = bool(row.fix) and given != value
    advice = replace(
        verdict.advice,
        cause=f"{row.why}: {stressed.what} ({row.how})",
        knob=key if helps else "",
        setting=row.fix if helps else "",
    )
    return replace(verdict, advice=advice)
