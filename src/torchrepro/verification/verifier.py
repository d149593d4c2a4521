"""Runs a command several times, and says whether its runs are the same."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from shlex import join
from typing import TYPE_CHECKING, Any

from torchrepro.errors import ProfileError, TraceError
from torchrepro.manifest.contents import secrets_here
from torchrepro.profile.load import resolve
from torchrepro.redaction import HIDDEN, shareable, shell_line, sounds_secret, without_secrets
from torchrepro.trace.reader import read_run
from torchrepro.trace.request import Request
from torchrepro.verdict.comparison import tolerance_of
from torchrepro.verdict.criteria import ALIGNED
from torchrepro.verdict.diagnosis import next_level, next_level_of_recording
from torchrepro.verification import follow_up
from torchrepro.verification.perturbations import HASH_SEED, StressPlan
from torchrepro.verification.result import Run, Verification
from torchrepro.verification.runner import Runner, all_failed, failure, output_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchrepro.profile.resolved import ResolvedProfile

SETS_NOTHING = {"schema": 1, "name": "nothing", "guarantee": "seeded"}
"""The profile from which a command without one escalates."""

FEWEST = 2
"""Runs that it takes to compare anything."""


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
    say: Callable[[str], object] = lambda text: None,
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
        raise ProfileError.about(
            "too few to compare", key="runs", found=str(runs), legal=f"{FEWEST} or more"
        )
    if profile is None and overrides:
        raise ProfileError.about(
            "overrides, and no profile that they could change",
            found=" ".join(overrides),
            todo="name the profile before them",
        )
    resolved = None if profile is None else resolve(profile, overrides)
    tolerance = tolerance_of(rtol, atol)
    if tolerance is None and resolved is not None and resolved.guarantee == "aligned":
        tolerance = ALIGNED
    plan = StressPlan.of(stress, resolved)
    request = Request("", level=level, keep=tuple(keep), statistics=tolerance is not None)
    with output_directory(os.fspath(folder), say) as place:
        runner = Runner(tuple(command), place, request, tolerance, say, meanwhile)
        # Every run but the first is perturbed, each differently.
        environments = [plan.environment(at, plan.names if at else ()) for at in range(runs)]
        done: list[Run] = []
        for number, environment in enumerate(environments):
            say(f"run {number + 1} of {runs} ...")
            perturbed = plan.names if number else ()
            done.append(runner.run(resolved, f"run-{number + 1}", environment, perturbed))
            if done[0].status == 0 and not done[0].recorded:
                raise TraceError.about(
                    "nothing was recorded of it, so nothing can be said of its runs",
                    found=join(command),
                    todo="it has to import torch and compute something with it, in a Python in "
                    "which torchrepro is installed",
                )
            if number and all_failed(done):
                raise failure(done, command)
        verdicts = [runner.compare(done[0], run) for run in done[1:]]
        stressed = plan.summary
        recorded = next((run for run in done if run.recorded), None)
        meta = read_run(recorded.folder, records=False)[0].meta if recorded else {}
        number = next((at for at, each in enumerate(verdicts, start=1) if not each.same), 0)
        if number:
            verdict = verdicts[number - 1]
            if closer:
                setups = (resolved, environments[0]), (resolved, environments[number])
                verdict = follow_up.look_closer(runner, verdict, setups)
            if plan.names:
                stressed = follow_up.bisect_perturbations(runner, resolved, plan, done[0], number)
                verdict = follow_up.with_perturbation(verdict, stressed, plan, resolved)
            if stressed and plan.other_hash_seed:
                why = "the profile sets it, and the runs differ without another one already"
                stressed = replace(stressed, skipped=(*stressed.skipped, (HASH_SEED, why)))
            verdicts[number - 1] = verdict
        elif plan.other_hash_seed and resolved is not None:
            setup = resolved, environments[0]
            run, verdict, stressed = follow_up.with_other_hash_seed(
                runner, plan, done[0], setup, closer=closer
            )
            done.append(run)
            verdicts.append(verdict)
        found = Verification(
            asked="bits" if tolerance is None else "tolerance",
            certifies=command_line(profile, resolved, overrides, command),
            profile=resolved.name if resolved else None,
            own_profile=None if resolved else meta.get("profile"),
            runs=tuple(done),
            verdicts=tuple(verdicts),
            folder="",
            stressed=stressed,
        )
        if number:
            # Nothing can be added to a profile that the command puts in force itself.
            base = resolved or (
                resolve(SETS_NOTHING) if escalate and not found.own_profile else None
            )
            if base is None:
                found = replace(found, next_level=next_level_of_recording(verdict, meta))
            elif escalate:
                trials = follow_up.escalate(runner, base, verdict, environments[: number + 1])
                found = replace(found, escalation=tuple(trials))
            else:
                stricter = next_level(base.values, verdict.first, verdict.program)
                found = replace(found, next_level=stricter)
        if found.same and not folder:
            shutil.rmtree(place, ignore_errors=True)
            return found
        return replace(found, folder=str(place))


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
        for text in overrides:
            key, equals, _ = text.partition("=")
            secret = equals and sounds_secret(key)
            ours.append(f"{key}={HIDDEN}" if secret else without_secrets(text, secrets))
        words = [*ours, "--", *words]
    return shell_line(words)
