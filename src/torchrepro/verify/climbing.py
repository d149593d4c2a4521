"""Climbs the ladder: stricter and stricter profiles, until the runs of a command are the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrepro.errors import ProfileError
from torchrepro.profile.load import resolve
from torchrepro.verdict.ladder import rungs
from torchrepro.verdict.words import headline
from torchrepro.verify.judging import failed_alike, status_in_words, verdict_of
from torchrepro.verify.value import Tried

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torchrepro.profile.resolved import Resolved
    from torchrepro.verdict.ladder import Rung
    from torchrepro.verdict.value import Divergence
    from torchrepro.verify.question import Question
    from torchrepro.verify.runner import Runner
    from torchrepro.verify.surroundings import Surroundings


def climb(  # noqa: PLR0913, PLR0917 - what a rung is tried with
    runner: Runner,
    resolved: Resolved,
    question: Question,
    divergence: Divergence | None,
    accelerator: str,
    around: Sequence[Surroundings],
) -> Iterator[Tried]:
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
    resolved: Resolved,
    question: Question,
    rung: Rung,
    around: Sequence[Surroundings],
    number: int,
) -> Tried:
    try:
        stricter = resolve(resolved, rung.overrides)
    except ProfileError as refused:
        return Tried(rung, same=False, what=f"the profile does not take it: {refused}")
    runs = []
    for position, surroundings in enumerate(around, start=1):
        runner.say(f"with {rung.name}, run {position} of {len(around)} ...")
        runs.append(runner.run(stricter, f"rung-{number}-run-{position}", surroundings))
    if failed_alike(runs):
        ended = status_in_words(runs[0].status)
        return Tried(rung, same=False, what=f"it ended with {ended}: see {runs[0].log}")
    if not any(run.steps for run in runs):
        return Tried(rung, same=False, what="nothing was recorded")
    verdicts = [verdict_of(question, runs[0], run, runner.command) for run in runs[1:]]
    shown = next((verdict for verdict in verdicts if not verdict.same), verdicts[0])
    return Tried(rung, shown.same, headline(shown))
