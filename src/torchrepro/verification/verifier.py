"""Runs a command several times, and says whether its runs are the same."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torchrepro.console import parts
from torchrepro.errors import ProfileError
from torchrepro.manifest.contents import secrets_here
from torchrepro.messages import Problem
from torchrepro.profile.load import resolve
from torchrepro.redaction import HIDDEN, shareable, shell_line, sounds_secret, without_secrets
from torchrepro.trace.reader import read_run
from torchrepro.trace.request import Request
from torchrepro.verdict.diagnosis import accelerator, next_rung, rung_above_recording
from torchrepro.verification.agreement import (
    RunCriteria,
    failed_alike,
    failure,
    question_of,
    refuse_one_that_recorded_nothing,
    verdict_of,
)
from torchrepro.verification.follow_up import Bisection, looked_closer, with_culprit
from torchrepro.verification.follow_up import climb as climbed
from torchrepro.verification.perturbations import StressPlan
from torchrepro.verification.result import Run, Verification, verification_parts
from torchrepro.verification.runner import Runner, workplace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.verification.perturbations import RunEnvironment
    from torchrepro.verification.runner import OutputDirectory

FOOT_OF_THE_LADDER = {"schema": 1, "name": "nothing", "guarantee": "seeded"}
"""A profile that sets nothing."""

FEWEST = 2
"""Runs that it takes to compare anything."""

parts.register(Verification, verification_parts)


def _nothing(text: str) -> None:
    """Say nothing."""


def verify(  # noqa: PLR0913 - each is an option of the command
    profile: Any,
    command: Sequence[str],
    *,
    overrides: Sequence[str] = (),
    runs: int = FEWEST,
    stress: Sequence[str] = (),
    climb: bool = False,
    closer: bool = True,
    folder: str | os.PathLike[str] = "",
    level: str = "op",
    keep: Sequence[str] = (),
    rtol: float | None = None,
    atol: float | None = None,
    say: Callable[[str], object] = _nothing,
) -> Verification:
    """Run `command` under `profile` in fresh processes and say whether all runs are the same.

    Without a profile, which is None, the command runs as it is: recorded, and nothing set. The same
    means the same bits; `rtol` and `atol`, or the guarantee `aligned`, ask for the same numbers
    within a tolerance. Every run after the first is perturbed by the perturbations that `stress`
    names (`storm.EVERYTHING` are all). Where runs part, two more look closer at the divergence
    unless `closer` is false, and `climb` tries the rungs of the ladder. Recordings go into
    `folder`, which is new or empty; without one into a temporary folder that stays only if runs
    part. `say` takes the progress as text. Raises `ProfileError` for a wrong request, `ApplyError`
    where the profile cannot be put in force, `TraceError` if the command fails in all runs or
    nothing is recorded of it, and `process.Stopped` if a signal ends it.
    """
    if runs < FEWEST:
        raise ProfileError(
            Problem("too few to compare", key="runs", found=str(runs), legal=f"{FEWEST} or more")
        )
    resolved = _resolved(profile, overrides)
    question = question_of(resolved.guarantee if resolved else "", rtol, atol)
    storm = StressPlan.of(stress, resolved)
    request = Request("", level=level, keep=tuple(keep), statistics=question.statistics)
    with workplace(os.fspath(folder), say) as place:
        runner = Runner(tuple(command), place.folder, request, say)
        line = command_line(profile, resolved, overrides, command)
        found = _Verifying(runner, resolved, question, storm, line)
        return _finished(found.verification(runs, closer=closer, climb=climb), place)


def _resolved(profile: Any, overrides: Sequence[str]) -> ResolvedProfile | None:
    if profile is not None:
        return resolve(profile, overrides)
    if overrides:
        raise ProfileError(
            Problem(
                "overrides, and no profile that they could change",
                found=" ".join(overrides),
                todo="name the profile before them",
            )
        )
    return None


def command_line(
    profile: Any, resolved: ResolvedProfile | None, overrides: Sequence[str], command: Sequence[str]
) -> str:
    """Return what starts `command` in the way that is verified, as a shell takes it.

    What could be a secret is hidden, as it is in a manifest.
    """
    secrets = secrets_here(*([resolved] if resolved else []))
    words = shareable(command, secrets)
    if resolved is not None:
        named = isinstance(profile, str | os.PathLike)
        ours = ["torchrepro", "run", os.fspath(profile) if named else resolved.name]
        words = [*ours, *(_override(text, secrets) for text in overrides), "--", *words]
    return shell_line(words)


def _override(text: str, secrets: Sequence[str]) -> str:
    key, equals, _ = text.partition("=")
    if equals and sounds_secret(key):
        return f"{key}={HIDDEN}"
    shown: str = without_secrets(text, tuple(secrets))
    return shown


def _finished(found: Verification, place: OutputDirectory) -> Verification:
    return replace(found, folder=place.clear() if found.same else str(place.folder))


@dataclass(frozen=True, slots=True)
class _Verifying:
    """A verification that is under way."""

    runner: Runner
    resolved: ResolvedProfile | None
    question: RunCriteria
    storm: StressPlan
    certifies: str

    def verification(self, count: int, *, closer: bool, climb: bool) -> Verification:
        """Run, compare, and find out more where runs part."""
        done = self._runs(count)
        command = self.runner.command
        verdicts = [verdict_of(self.question, done[0], run, command) for run in done[1:]]
        parted = next((at for at, verdict in enumerate(verdicts) if not verdict.same), None)
        stressed = self.storm.used
        found = Verification(
            self.question.name,
            self.certifies,
            self.resolved.name if self.resolved else None,
            self._own_profile(done),
            done,
            tuple(verdicts),
            "",
            stressed,
        )
        if parted is None:
            return found
        around = self._around(parted + FEWEST)
        verdict = verdicts[parted]
        if closer:
            ends = (around[0], around[-1])
            verdict = looked_closer(self.runner, self.resolved, self.question, verdict, ends)
        if self.storm.names:
            search = Bisection(
                self.runner, self.resolved, self.question, self.storm, done[0], parted + 1
            )
            stressed = search.culprits()
            verdict = with_culprit(verdict, stressed, self.storm, self.resolved)
        verdicts[parted] = verdict
        found = replace(found, verdicts=tuple(verdicts), stressed=stressed)
        return self._on_the_ladder(found, done, around, climb=climb)

    def _own_profile(self, done: Sequence[Run]) -> str | None:
        """Return the profile that the command puts in force itself, where we put none."""
        return _meta(done).get("profile") if self.resolved is None else None

    def _runs(self, count: int) -> tuple[Run, ...]:
        done: list[Run] = []
        for number, around in enumerate(self._around(count)):
            self.runner.say(f"run {number + 1} of {count} ...")
            perturbed = self.storm.names if number else ()
            done.append(self.runner.run(self.resolved, f"run-{number + 1}", around, perturbed))
            refuse_one_that_recorded_nothing(done[0], self.runner.command)
            if number and failed_alike(done):
                raise failure(done, self.runner.command)
        return tuple(done)

    def _around(self, count: int) -> list[RunEnvironment]:
        """Return what surrounds each run: the first is calm, each other stormy in its own way."""
        storm = self.storm
        stormy = (storm.around(number, storm.names) for number in range(1, count))
        return [storm.calm, *stormy]

    def _on_the_ladder(
        self,
        found: Verification,
        done: Sequence[Run],
        around: Sequence[RunEnvironment],
        *,
        climb: bool,
    ) -> Verification:
        """Climb the ladder if that is asked for, or say which rung is next.

        Without a profile the climb begins at its foot. One that the command puts in force itself
        is out of reach.
        """
        meta, first = _meta(done), found.verdict.first
        if self.resolved is None and (found.own_profile or not climb):
            return replace(found, next_rung=rung_above_recording(meta, first))
        base, device = self.resolved or resolve(FOOT_OF_THE_LADDER), accelerator(meta)
        if not climb:
            return replace(found, next_rung=next_rung(base.values, first, device))
        tried = climbed(self.runner, base, self.question, first, device, around)
        return replace(found, climbed=tuple(tried))


def _meta(done: Sequence[Run]) -> Mapping[str, Any]:
    recorded = next(run for run in done if run.steps)
    return read_run(recorded.folder, records=False)[0].meta
