"""A closer look at where two runs part: two more runs, recorded in full around that step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torchrepro.verdict.words import place
from torchrepro.verify.judging import verdict_of

if TYPE_CHECKING:
    from torchrepro.profile.resolved import Resolved
    from torchrepro.verdict.value import Divergence, Verdict
    from torchrepro.verify.question import Question
    from torchrepro.verify.runner import Runner
    from torchrepro.verify.surroundings import Surroundings


def looked_closer(
    runner: Runner,
    resolved: Resolved | None,
    question: Question,
    verdict: Verdict,
    around: tuple[Surroundings, Surroundings],
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
