"""What follows a divergence: re-recording in detail, bisecting perturbations, and escalation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchrepro.errors import ProfileError
from torchrepro.profile.load import resolve
from torchrepro.profile.resolved import flatten
from torchrepro.verdict.diagnosis import edit_at, next_level
from torchrepro.verdict.render import headline, moment, place
from torchrepro.verdict.value import Advice
from torchrepro.verification.loading import (
    follow_into_dataset,
    loading_of,
    with_note,
)
from torchrepro.verification.result import EscalationTrial, Run, StressResult
from torchrepro.verification.runner import all_failed, status_in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.verdict.diagnosis import EscalationLevel
    from torchrepro.verdict.value import Divergence, Verdict
    from torchrepro.verification.perturbations import (
        OverridingRun,
        Perturbation,
        RunEnvironment,
        StressPlan,
    )
    from torchrepro.verification.runner import Runner, Setup


def look_closer(runner: Runner, verdict: Verdict, setups: tuple[Setup, Setup]) -> Verdict:
    """Return a verdict with what two more runs, one in each of `setups`, show of its divergence.

    Where other data was loaded these runs record the loading. Any other divergence they record in
    detail.
    """
    first = verdict.first
    if first is None or not first.op:
        return verdict  # there is no op to look at
    loading = loading_of(verdict)
    if loading is not None:
        return follow_into_dataset(runner, verdict, setups, loading)
    return _looked_at(_rerecord(runner, verdict, first, setups))


def _rerecord(
    runner: Runner, verdict: Verdict, first: Divergence, setups: tuple[Setup, Setup]
) -> Verdict:
    """Return a verdict with what two more runs, recorded in detail, show of its divergence.

    The verdict stays, with a note, if these runs diverge at another place or not at all.
    """
    steps = max(first.step - 1, 0), first.step + 1
    keep = (*runner.request.keep, first.module)
    detailed = replace(runner, request=replace(runner.request, steps=steps, keep=keep, detail=True))
    runs = []
    when = moment(first.step, after_last=first.after_last)
    look = f"a closer look {when}".rstrip()
    for number, (resolved, environment) in enumerate(setups, start=1):
        runner.say(f"{look}, run {number} of {len(setups)} ...")
        runs.append(detailed.run(resolved, f"closer-{number}", environment))
    if not all(run.recorded for run in runs):
        return with_note(
            verdict,
            "a closer look showed nothing: its runs ended before they got there",
        )
    closer = runner.compare(*runs)
    if closer.first is not None and _spot(closer.first) == _spot(first):
        merged = replace(verdict, first=closer.first, program=closer.program)
        return with_note(
            runner.advised(merged, runs[0]),
            "the divergence is shown as two more runs recorded it, in detail",
        )
    what = f"diverge {place(closer.first)}" if closer.first else "were the same there"
    return with_note(
        runner.advised(replace(verdict, program=closer.program), runs[0]),
        f"two more runs, recorded in detail, {what}: it varies from run to run",
    )


def _looked_at(verdict: Verdict) -> Verdict:
    """Return a verdict whose advice does not ask for the closer look that has been taken."""
    return replace(verdict, advice=verdict.advice and replace(verdict.advice, closer=""))


def _spot(first: Divergence) -> tuple[object, ...]:
    return first.rank, first.step, first.phase, first.module, first.op


def bisect_perturbations(
    runner: Runner, resolved: ResolvedProfile | None, plan: StressPlan, first: Run, number: int
) -> StressResult:
    """Return which perturbation alone makes the runs diverge, or which of them together.

    `first` is the run without perturbations. `number` is that of the run that differs from it: its
    perturbations are tried again, at most two runs for each halving.
    """

    def diverges(names: Sequence[str]) -> bool:
        runner.say(f"perturbed by {', '.join(names) or 'nothing'} ...")
        done = len(list(runner.folder.glob("stress-*.log")))
        environment = plan.environment(number, names)
        run = runner.run(resolved, f"stress-{done + 1}", environment, tuple(names))
        return not runner.compare(first, run).same

    stressed = StressResult(plan.names, plan.skipped)
    if diverges(()):
        return replace(stressed, what="the runs diverge without any perturbation as well")
    found = bisect(plan.names, diverges)
    alone = f"perturbing the {found[0]} alone makes the runs diverge"
    several = f"it takes several perturbations together: {', '.join(found)}"
    return replace(stressed, culprits=found, what=several if found[1:] else alone)


def bisect(names: Sequence[str], diverges: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
    """Return one of `names` for which `diverges` holds, or the fewest found for which it does.

    It holds for all of them together.
    """
    while len(names) > 1:
        middle = len(names) // 2
        halves = (names[:middle], names[middle:])
        half = next((half for half in halves if diverges(half)), None)
        if half is None:
            break
        names = half
    return tuple(names)


def with_perturbation(
    verdict: Verdict, stressed: StressResult, plan: StressPlan, resolved: ResolvedProfile | None
) -> Verdict:
    """Return a verdict that names the perturbation behind it, and what helps against it."""
    verdict = with_note(verdict, stressed.what)
    if len(stressed.culprits) != 1 or verdict.advice is None:
        return verdict
    row = next(row for row in plan.rows if row.name in stressed.culprits)
    given = flatten(resolved.values if resolved else {})
    fix = next((each for each in row.fixes if not _is_given(each, given)), "")
    advice = replace(
        verdict.advice,
        cause=f"{row.finding[:1].upper()}{row.finding[1:]}: {stressed.what} ({row.action}).",
        knob=fix.partition("=")[0],
        setting=fix,
        edit=_edit_against(row, verdict),
    )
    return replace(verdict, advice=advice)


def _is_given(fix: str, given: Mapping[str, Any]) -> bool:
    key, _, value = fix.partition("=")
    return str(given.get(key, "")).lower() == value


def _edit_against(row: Perturbation, verdict: Verdict) -> str:
    """Return the edit against what a perturbation changes: at a seed from it, or its last read.

    The advice keeps its edit where the perturbation changes nothing that a program reads.
    """
    if not row.source:
        return verdict.advice.edit if verdict.advice else ""
    reads = verdict.program.reads
    seed = next((each for each in reads if each.is_other_seed), None)
    last = next((each for each in reversed(reads) if each.what == row.source), None)
    found = seed or last
    return edit_at(found) if found else ""


def overridden(setup: Setup, overriding: OverridingRun) -> Setup:
    """Return a setup whose profile, which it has, sets something else as `overriding` asks."""
    resolved, environment = setup
    if resolved is None:
        raise ValueError("without a profile there is nothing to override")
    return resolve(resolved, overriding.overrides(resolved.environment())), environment


def with_overridden(verdict: Verdict, overriding: OverridingRun) -> Verdict:
    """Return the verdict of a run that differs under an override, with what that means."""
    advice = replace(
        verdict.advice or Advice("", "", "", ""),
        cause=overriding.cause,
        knob="",
        setting="",
        closer="",
        edit=overriding.edit,
    )
    return with_note(replace(verdict, advice=advice), overriding.what)


def escalate(
    runner: Runner,
    resolved: ResolvedProfile,
    verdict: Verdict,
    environments: Sequence[RunEnvironment],
) -> Iterator[EscalationTrial]:
    """Yield the levels above a profile as they are tried, up to one on which the runs are the same.

    Each level is chosen by the divergence that is left below it. On each the command runs once in
    each environment. The first run is compared with each of the others.
    """
    done: list[str] = []
    stricter = resolved
    overrides: tuple[str, ...] = ()
    while level := next_level(stricter.values, verdict.first, verdict.program, done):
        done.append(level.name)
        level = replace(level, overrides=(*overrides, *level.overrides))
        try:
            stricter = resolve(resolved, level.overrides)
        except ProfileError as refused:
            yield EscalationTrial(level, False, f"the profile does not take it: {refused}")  # noqa: FBT003 - a row
            continue
        overrides = level.overrides
        what, tried = _try(runner, stricter, level, len(done), environments)
        verdict = tried or verdict
        yield EscalationTrial(level, verdict.same, what)
        if verdict.same:
            return


def _try(
    runner: Runner,
    stricter: ResolvedProfile,
    level: EscalationLevel,
    number: int,
    environments: Sequence[RunEnvironment],
) -> tuple[str, Verdict | None]:
    """Return the answer of a level in words, and its verdict if it has one."""
    runs = []
    for position, environment in enumerate(environments, start=1):
        runner.say(f"with {level.name}, run {position} of {len(environments)} ...")
        runs.append(runner.run(stricter, f"level-{number}-run-{position}", environment))
    if all_failed(runs):
        status = status_in_words(runs[0].status)
        return f"it ended with {status}: see {runs[0].log}", None
    if not any(run.recorded for run in runs):
        return "nothing was recorded", None
    verdicts = [runner.compare(runs[0], run) for run in runs[1:]]
    shown = next((verdict for verdict in verdicts if not verdict.same), verdicts[0])
    return headline(shown), shown
