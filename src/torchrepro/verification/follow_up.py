"""What follows a divergence: bisecting perturbations, re-recording in full, escalating settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torchrepro.errors import ProfileError
from torchrepro.profile.composition import flatten
from torchrepro.profile.load import resolve
from torchrepro.verdict.diagnosis import rungs
from torchrepro.verdict.wording import headline, place
from torchrepro.verification.agreement import failed_alike, status_in_words, verdict_of
from torchrepro.verification.result import EscalationTrial, Run, StressResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.verdict.diagnosis import EscalationLevel
    from torchrepro.verdict.value import Divergence, Verdict
    from torchrepro.verification.agreement import RunCriteria
    from torchrepro.verification.perturbations import RunEnvironment, StressPlan
    from torchrepro.verification.runner import Runner


def looked_closer(
    runner: Runner,
    resolved: ResolvedProfile | None,
    question: RunCriteria,
    verdict: Verdict,
    around: tuple[RunEnvironment, RunEnvironment],
) -> Verdict:
    """Return a verdict with what two more runs, recorded in detail, show of its divergence.

    Where they part at another place, or not at all, the verdict stays and a note says so.
    """
    first = verdict.first
    if first is None or not first.op or not verdict.compared.steps:
        return verdict  # there is no op to look at
    detailed = runner.recording(
        replace(
            runner.request,
            steps=(max(first.step - 1, 0), first.step + 1),
            keep=(*runner.request.keep, first.module),
            detail=True,
        )
    )
    runs = []
    for number, surroundings in enumerate(around, start=1):
        runner.say(f"a closer look at step {first.step}, run {number} of {len(around)} ...")
        runs.append(detailed.run(resolved, f"closer-{number}", surroundings))
    if not all(run.steps for run in runs):
        return _with_note(verdict, "a closer look showed nothing: its runs ended before that step")
    return _merged(verdict, verdict_of(question, runs[0], runs[1], runner.command))


def _merged(verdict: Verdict, closer: Verdict) -> Verdict:
    if closer.first is None:
        return _with_note(
            verdict,
            "two more runs, recorded in detail, were the same there: it varies from run to run",
        )
    if verdict.first is None or _spot(closer.first) != _spot(verdict.first):
        return _with_note(
            verdict,
            f"two more runs, recorded in detail, part {place(closer.first)}: it varies from run "
            "to run",
        )
    merged = replace(verdict, first=closer.first, advice=closer.advice)
    return _with_note(merged, "where they part is shown as two more runs have it, in detail")


def _spot(first: Divergence) -> tuple[object, ...]:
    return first.rank, first.step, first.phase, first.module, first.op


def _with_note(verdict: Verdict, note: str) -> Verdict:
    return replace(verdict, notes=(note, *verdict.notes))


@dataclass(frozen=True, slots=True)
class Bisection:
    """Runs a command under a part of a storm, to see whether that part is enough."""

    runner: Runner
    resolved: ResolvedProfile | None
    question: RunCriteria
    storm: StressPlan
    first: Run
    """The run that was not perturbed, which all others are compared with."""
    number: int
    """The number of the run that was not the same: the same perturbations are tried again."""

    def culprits(self) -> StressResult:
        """Return which perturbation alone makes the runs part, or which of them together.

        Takes a run without any, and two for each halving of the table at most.
        """
        storm = self.storm
        stressed = StressResult(storm.names, storm.skipped)
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
    verdict: Verdict, stressed: StressResult, storm: StressPlan, resolved: ResolvedProfile | None
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


def climb(  # noqa: PLR0913, PLR0917 - what a rung is tried with
    runner: Runner,
    resolved: ResolvedProfile,
    question: RunCriteria,
    divergence: Divergence | None,
    accelerator: str,
    around: Sequence[RunEnvironment],
) -> Iterator[EscalationTrial]:
    """Yield the rungs above a profile as they are tried, up to the one on which runs are the same.

    On each rung the command runs once in each of the surroundings `around`, the first of which the
    others are compared with.
    """
    for number, rung in enumerate(rungs(resolved.values, divergence, accelerator), start=1):
        tried = _tried(runner, resolved, question, rung, around, number)
        yield tried
        if tried.same:
            return


def _tried(  # noqa: PLR0913, PLR0917 - as above
    runner: Runner,
    resolved: ResolvedProfile,
    question: RunCriteria,
    rung: EscalationLevel,
    around: Sequence[RunEnvironment],
    number: int,
) -> EscalationTrial:
    try:
        stricter = resolve(resolved, rung.overrides)
    except ProfileError as refused:
        return EscalationTrial(rung, same=False, what=f"the profile does not take it: {refused}")
    runs = []
    for position, surroundings in enumerate(around, start=1):
        runner.say(f"with {rung.name}, run {position} of {len(around)} ...")
        runs.append(runner.run(stricter, f"rung-{number}-run-{position}", surroundings))
    if failed_alike(runs):
        ended = status_in_words(runs[0].status)
        return EscalationTrial(rung, same=False, what=f"it ended with {ended}: see {runs[0].log}")
    if not any(run.steps for run in runs):
        return EscalationTrial(rung, same=False, what="nothing was recorded")
    verdicts = [verdict_of(question, runs[0], run, runner.command) for run in runs[1:]]
    shown = next((verdict for verdict in verdicts if not verdict.same), verdicts[0])
    return EscalationTrial(rung, shown.same, headline(shown))
