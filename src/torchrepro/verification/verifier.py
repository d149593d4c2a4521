"""Runs a command several times, and says whether its runs are the same."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torchrepro.errors import ProfileError
from torchrepro.manifest.contents import secrets_here
from torchrepro.messages import Problem
from torchrepro.profile.load import resolve
from torchrepro.redaction import HIDDEN, shareable, shell_line, sounds_secret, without_secrets
from torchrepro.trace.reader import read_run
from torchrepro.trace.request import Request
from torchrepro.verdict.comparison import tolerance_of
from torchrepro.verdict.criteria import ALIGNED
from torchrepro.verdict.diagnosis import next_level, next_level_of_recording
from torchrepro.verification import follow_up
from torchrepro.verification.perturbations import StressPlan
from torchrepro.verification.result import Run, StressResult, Verification
from torchrepro.verification.runner import (
    Runner,
    all_failed,
    failure,
    output_directory,
    refuse_without_recording,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.verification.perturbations import RunEnvironment

SETS_NOTHING = {"schema": 1, "name": "nothing", "guarantee": "seeded"}
"""The profile from which a command without one escalates."""

_DIFFER_ALREADY = "the profile sets it, and the runs differ without another one already"

FEWEST = 2
"""Runs that it takes to compare anything."""


def _nothing(text: str) -> None:
    """Say nothing."""


def verify(  # noqa: PLR0913 - each is an option of the command
    profile: Any,
    command: Sequence[str],
    *,
    overrides: Sequence[str] = (),
    runs: int = FEWEST,
    stress: Sequence[str] = (),
    escalate: bool = False,
    closer: bool = True,
    folder: str | os.PathLike[str] = "",
    level: str = "op",
    keep: Sequence[str] = (),
    rtol: float | None = None,
    atol: float | None = None,
    say: Callable[[str], object] = _nothing,
    meanwhile: Callable[[str], object] | None = None,
) -> Verification:
    """Run `command` under `profile` in fresh processes and say whether all runs are the same.

    Without a profile, which is None, the command runs as it is: recorded, and nothing set. The same
    means the same bits; `rtol` and `atol`, or the guarantee `aligned`, ask for the same numbers
    within a tolerance. Every run after the first is perturbed by the perturbations that `stress`
    names (`perturbations.EVERYTHING` are all). If runs diverge, two more record the divergence in
    detail unless `closer` is false, and `escalate` tries stricter settings level by level.
    Recordings go into `folder`, which is new or empty; without one into a temporary folder that
    stays only if runs diverge. `say` takes the progress as text, and `meanwhile` what is going on
    at the moment, such as the number of steps so far. Raises
    `ProfileError` for a wrong request, `ApplyError` where the profile cannot be put in force,
    `TraceError` if the command fails in all runs or nothing is recorded of it, and
    `runner.Interrupted` if a signal ends it.
    """
    if runs < FEWEST:
        raise ProfileError(
            Problem("too few to compare", key="runs", found=str(runs), legal=f"{FEWEST} or more")
        )
    resolved = _resolved(profile, overrides)
    tolerance = tolerance_of(rtol, atol)
    if tolerance is None and resolved is not None and resolved.guarantee == "aligned":
        tolerance = ALIGNED
    plan = StressPlan.of(stress, resolved)
    request = Request("", level=level, keep=tuple(keep), statistics=tolerance is not None)
    with output_directory(os.fspath(folder), say) as place:
        runner = Runner(tuple(command), place, request, tolerance, say, meanwhile)
        line = command_line(profile, resolved, overrides, command)
        verifier = _Verifier(runner, resolved, plan, line)
        found = verifier.verification(runs, closer=closer, escalate=escalate)
        if found.same and not folder:
            shutil.rmtree(place, ignore_errors=True)
            return found
        return replace(found, folder=str(place))


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
    """Return the command line that is verified, as a shell takes it.

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


@dataclass(frozen=True, slots=True)
class _Verifier:
    """What is verified: a command under a profile, and how its runs are perturbed."""

    runner: Runner
    resolved: ResolvedProfile | None
    plan: StressPlan
    certifies: str

    def verification(self, count: int, *, closer: bool, escalate: bool) -> Verification:
        """Run, compare, and follow up a divergence."""
        environments = self.plan.environments(count)
        done = self._runs(environments)
        verdicts = [self.runner.compare(done[0], run) for run in done[1:]]
        meta = _meta(done)
        found = Verification(
            asked="bits" if self.runner.tolerance is None else "tolerance",
            certifies=self.certifies,
            profile=self.resolved.name if self.resolved else None,
            own_profile=None if self.resolved else meta.get("profile"),
            runs=done,
            verdicts=tuple(verdicts),
            folder="",
            stressed=self.plan.summary,
        )
        number = next((at for at, run in enumerate(verdicts, start=1) if not run.same), None)
        if number is None:
            return self._overridden(found, environments[0], closer=closer)
        verdict = verdicts[number - 1]
        if closer:
            setups = (self.resolved, environments[0]), (self.resolved, environments[number])
            verdict = follow_up.look_closer(self.runner, verdict, setups)
        if self.plan.names:
            stressed = follow_up.bisect_perturbations(
                self.runner, self.resolved, self.plan, done[0], number
            )
            found = replace(found, stressed=stressed)
            verdict = follow_up.with_perturbation(verdict, stressed, self.plan, self.resolved)
        verdicts[number - 1] = verdict
        found = replace(found, verdicts=tuple(verdicts), stressed=self._not_overridden(found))
        return self._escalated(found, meta, environments[: number + 1], escalate=escalate)

    def _overridden(
        self, found: Verification, environment: RunEnvironment, *, closer: bool
    ) -> Verification:
        """Perturb what the profile sets as well, now that all runs are the same."""
        setup = self.resolved, environment
        for row in self.plan.overriding:
            if row.overriding is None or found.stressed is None or not found.same:
                break
            self.runner.say(f"with another {row.name} than that of the profile ...")
            other = follow_up.overridden(setup, row.overriding)
            run = self.runner.run(other[0], row.name.replace(" ", "-"), environment, (row.name,))
            verdict = self.runner.compare(found.runs[0], run)
            stressed = replace(found.stressed, perturbed=(*found.stressed.perturbed, row.name))
            if not verdict.same:
                stressed = replace(stressed, culprits=(row.name,), what=row.overriding.what)
                if closer:
                    verdict = follow_up.look_closer(self.runner, verdict, (setup, other))
                verdict = follow_up.with_overridden(verdict, row.overriding)
            found = replace(
                found,
                runs=(*found.runs, run),
                verdicts=(*found.verdicts, verdict),
                stressed=stressed,
            )
        return found

    def _not_overridden(self, found: Verification) -> StressResult | None:
        """Return the stress result of runs that differ, with what was therefore not perturbed."""
        left_out = tuple((row.name, _DIFFER_ALREADY) for row in self.plan.overriding)
        if found.stressed is None:
            return None
        return replace(found.stressed, skipped=(*found.stressed.skipped, *left_out))

    def _runs(self, environments: Sequence[RunEnvironment]) -> tuple[Run, ...]:
        """Run the command in each environment; only the first one is not perturbed."""
        done: list[Run] = []
        for number, environment in enumerate(environments):
            self.runner.say(f"run {number + 1} of {len(environments)} ...")
            perturbed = self.plan.names if number else ()
            done.append(self.runner.run(self.resolved, f"run-{number + 1}", environment, perturbed))
            refuse_without_recording(done[0], self.runner.command)
            if number and all_failed(done):
                raise failure(done, self.runner.command)
        return tuple(done)

    def _escalated(
        self,
        found: Verification,
        meta: Mapping[str, Any],
        environments: Sequence[RunEnvironment],
        *,
        escalate: bool,
    ) -> Verification:
        """Try stricter settings if that is asked for, or say which level is next.

        Nothing can be added to a profile that the command puts in force itself.
        """
        verdict = found.verdict
        if self.resolved is None and (found.own_profile or not escalate):
            return replace(found, next_level=next_level_of_recording(verdict, meta))
        base = self.resolved or resolve(SETS_NOTHING)
        if not escalate:
            level = next_level(base.values, verdict.first, verdict.program)
            return replace(found, next_level=level)
        trials = follow_up.escalate(self.runner, base, verdict, environments)
        return replace(found, escalation=tuple(trials))


def _meta(done: Sequence[Run]) -> Mapping[str, Any]:
    recorded = next((run for run in done if run.recorded), None)
    return read_run(recorded.folder, records=False)[0].meta if recorded else {}
