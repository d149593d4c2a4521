"""Runs a command several times, compares the runs, and looks for the cause of a difference.

After a divergence, two more runs record it in detail. Then each perturbation is applied alone.
Finally, trials look for the cause, and for a command that is repeatable.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torchrepro.ground.errors import ProfileError
from torchrepro.ground.imports import named
from torchrepro.ground.redaction import (
    HIDDEN,
    shareable,
    shell_line,
    sounds_secret,
    without_secrets,
)
from torchrepro.manifest.contents import known_secrets
from torchrepro.profile.load import resolve
from torchrepro.seeding.nondeterministic_calls import UNINITIALIZED_MEMORY
from torchrepro.trace.reader import read_run
from torchrepro.trace.request import RecordingRequest, bytes_of
from torchrepro.verdict.comparison import refuse_malformed_lines, refuse_unknown_lines, tolerance_of
from torchrepro.verdict.criteria import ALIGNED
from torchrepro.verdict.diagnosis import cause_of
from torchrepro.verdict.program_text import edit_of
from torchrepro.verdict.render import moment, place
from torchrepro.verdict.value import Advice
from torchrepro.verification.copies import FolderState
from torchrepro.verification.leftovers import DivergedRuns, Leftovers
from torchrepro.verification.perturbations import HASH_SEED, RunEnvironment, StressPlan
from torchrepro.verification.result import ControlledRun, Run, StressResult, Verification
from torchrepro.verification.runner import Runner, output_directory

if TYPE_CHECKING:
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.verdict.value import Verdict
    from torchrepro.verification.runner import Setup

FEWEST = 2  # runs that a comparison needs

TRIALS = "advice.trials:answer"
"""The function that runs trials after a divergence. Its package can be left out."""


def request_for(
    level: str,
    keep: Sequence[str],
    every: int,
    max_size: int | str | None,
    tolerance: tuple[float, float] | None,
) -> RecordingRequest:
    """Return the request that records runs for a comparison. A tolerance needs statistics."""
    return RecordingRequest(
        *("", level, None, tuple(keep)),
        statistics=tolerance is not None,
        every=every,
        max_size=None if max_size is None else bytes_of(max_size),
    )


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
    every: int = 1,
    max_size: int | str | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    ignore: Sequence[str] = (),
    say: Callable[[str], object] = lambda text: None,
    meanwhile: Callable[[str], object] | None = None,
) -> Verification:
    """Run `command` under `profile` in fresh processes, and return whether all runs are the same.

    If `profile` is None, no settings are applied. By default, runs are the same if all recorded
    bits are equal. With `rtol` and `atol`, or under the guarantee `aligned`, they are compared
    within a tolerance instead. `ignore` names program lines as ``file:line``. Results of these
    lines are ignored, and also differences that only these lines cause. `level`, `keep`, `every`
    and `max_size` select what is recorded, as in `record`. `stress` names perturbations of
    `perturbations.EVERYTHING`, which change every run except the first. If runs diverge and
    `closer` is true, two more runs record the divergence in detail. With `escalate`, stricter
    settings are then tried level by level.

    Recordings are written to `folder`, which must be new or empty. Without a name they are written
    to a temporary folder, which is kept only if runs diverge. `say` receives the progress as text.
    `meanwhile` receives the state of the running command, such as the number of steps so far.

    Raises `ProfileError` for an invalid request, and `ApplyError` if the profile cannot be
    applied. Raises `TraceError` if the command fails in all runs, or if nothing is recorded.
    Raises `runner.Interrupted` if a signal ends this process.
    """
    if runs < FEWEST:
        raise ProfileError.about(
            "too few to compare", key="runs", found=str(runs), legal=f"{FEWEST} or more"
        )
    if profile is None and overrides:
        raise ProfileError.about(
            "overrides without a profile that they could change",
            found=" ".join(overrides),
            todo="name the profile before them",
        )
    resolved = None if profile is None else resolve(profile, overrides)
    tolerance = tolerance_of(rtol, atol)
    refuse_malformed_lines(ignore)
    if tolerance is None and resolved is not None and resolved.guarantee == "aligned":
        tolerance = ALIGNED
    plan = StressPlan.of(stress, resolved)
    request = request_for(level, keep, every, max_size, tolerance)
    with output_directory(os.fspath(folder), say) as output:
        runner = Runner(tuple(command), output, request, tolerance, say, meanwhile, tuple(ignore))
        # The first run is not perturbed. Each later run is perturbed differently.
        environments = [
            plan.environment(number, plan.names if number else ()) for number in range(runs)
        ]
        done: list[Run] = []
        before = after = FolderState.now(output)
        for number, environment in enumerate(environments):
            say(f"run {number + 1} of {runs} ...")
            perturbed = plan.names if number else ()
            done.append(runner.run(resolved, f"run-{number + 1}", environment, perturbed))
            runner.refuse_unrecorded(done[0])
            if number:
                runner.refuse_failed(done)
                if done[number].status and not done[0].status:
                    break
            else:
                after = FolderState.now(output)
        verdicts = [runner.compare(done[0], run) for run in done[1:]]
        refuse_unknown_lines(verdicts[0])
        stressed = StressResult(plan.names, plan.skipped) if stress else None
        recorded = next((run for run in done if run.recorded), None)
        meta = read_run(recorded.folder, records=False)[0].meta if recorded else {}
        tried: tuple[ControlledRun, ...] = ()
        differing = (run for run, verdict in enumerate(verdicts, start=1) if not verdict.same)
        number = next(differing, 0)
        if number:
            verdict = verdicts[number - 1]
            leftovers = Leftovers.of(before, after, done[0], done[number])
            verdict = leftovers.explained(verdict)
            if closer and not (leftovers.carried or leftovers.is_refused):
                setups = (resolved, environments[0]), (resolved, environments[number])
                verdict = _look_closer(runner, verdict, setups)
            if plan.names and not leftovers.is_refused:
                stressed = _culprits(runner, resolved, plan, done[0], number)
                verdict = _with_perturbation(verdict, stressed, plan)
            culprits = stressed.culprits if stressed else ()
            is_tried = escalate or (closer and culprits in ((), (HASH_SEED,)))
            if is_tried and not leftovers.is_refused:
                question = "hash seed" if culprits else "cause"
                if escalate:
                    question = "settings"
                trial_environments = environments[0], environments[number]
                if question == "hash seed":
                    trial_environments = RunEnvironment(), RunEnvironment()
                diverged = DivergedRuns(
                    runner=runner,
                    profile=profile,
                    overrides=overrides,
                    resolved=resolved,
                    between=(done[0], done[number]),
                    environments=trial_environments,
                    verdict=verdict,
                    meta=meta,
                    leftovers=leftovers,
                )
                verdict, tried = _tried(question, diverged)
                if escalate and not tried:
                    verdict = _with_note(verdict, "no known stricter setting may help")
            if stressed and plan.other_hash_seed:
                reason = "the profile sets it, and the runs already differ with the same one"
                stressed = replace(stressed, skipped=(*stressed.skipped, (HASH_SEED, reason)))
            verdicts[number - 1] = verdict
        elif plan.other_hash_seed and resolved is not None:
            run, verdict, stressed = _with_other_hash_seed(
                runner, plan, done[0], (resolved, environments[0]), closer=closer
            )
            done.append(run)
            verdicts.append(verdict)
        verification = Verification(
            asked="bits" if tolerance is None else "tolerance",
            command=command_line(profile, resolved, overrides, command),
            profile=resolved.name if resolved else None,
            own_profile=None if resolved else meta.get("profile"),
            runs=tuple(done),
            verdicts=tuple(verdicts),
            folder=str(output),
            stressed=stressed,
            tried=tried,
        )
    if verification.same and not folder:
        shutil.rmtree(output, ignore_errors=True)
        return replace(verification, folder="")
    return verification


def command_line(
    profile: Any, resolved: ResolvedProfile | None, overrides: Sequence[str], command: Sequence[str]
) -> str:
    """Return the verified command line as shell input, with possible secrets hidden."""
    secrets = known_secrets(*([resolved] if resolved else []))
    words = shareable(command, secrets)
    if resolved is not None:
        is_named = isinstance(profile, str | os.PathLike)
        launcher = ["torchrepro", "run", os.fspath(profile) if is_named else resolved.name]
        for text in overrides:
            key, equals, _ = text.partition("=")
            secret = equals and sounds_secret(key)
            launcher.append(f"{key}={HIDDEN}" if secret else without_secrets(text, secrets))
        words = [*launcher, "--", *words]
    return shell_line(words)


_SPOT = attrgetter("rank", "step", "phase", "module", "op")


def _look_closer(runner: Runner, verdict: Verdict, setups: tuple[Setup, Setup]) -> Verdict:
    """Return the verdict with details from two more runs, one in each of `setups`.

    These runs record the divergence in detail, or the loading of data if the data differed. If
    they diverge at another op, or if they agree, the verdict gets a note instead.
    """
    first = verdict.first
    if first is None or not first.op:
        return verdict  # only an op can be recorded in detail
    # If other threads end steps, the number of a step varies from run to run.
    steps = (max(first.step - 1, 0), first.step + 1) if verdict.compared.in_order else None
    keep = (*runner.request.keep, first.module)
    request = replace(runner.request, steps=steps, keep=keep, detail=True, every=1, max_size=None)
    when = moment(first.step, after_last=first.after_last)
    runs = _run_each(replace(runner, request=request), f"a closer look {when}".rstrip(), setups)
    note = "a closer look showed nothing: its runs ended before the divergence"
    if all(run.recorded for run in runs):
        closer = runner.compare(*runs)
        verdict = replace(verdict, program=closer.program)
        if closer.first is not None and _SPOT(closer.first) == _SPOT(first):
            verdict = replace(verdict, first=closer.first, origin=closer.origin)
            note = "the divergence is shown as two more runs recorded it in detail"
        else:
            if closer.first is not None and closer.first.source == first.source:
                verdict = replace(verdict, origin=closer.origin)
            what = f"diverge {place(closer.first)}" if closer.first else "were the same there"
            note = f"two more runs, recorded in detail, {what}: it varies from run to run"
        verdict = runner.advised(verdict, runs[0])
    return _with_note(_looked_closer(verdict), note)


def _tried(question: str, diverged: DivergedRuns) -> tuple[Verdict, tuple[ControlledRun, ...]]:
    """Return the verdict with what trials show, and the trials. Without `advice`, none are made."""
    if find_spec("torchrepro.advice") is None:
        return diverged.verdict, ()
    answered: tuple[Verdict, tuple[ControlledRun, ...]] = named(TRIALS)(question, diverged)
    return answered


def _run_each(runner: Runner, what: str, setups: Sequence[Setup]) -> list[Run]:
    runs = []
    for number, (resolved, environment) in enumerate(setups, start=1):
        runner.say(f"{what}, run {number} of {len(setups)} ...")
        runs.append(runner.run(resolved, f"closer-{number}", environment))
    return runs


def _looked_closer(verdict: Verdict) -> Verdict:
    # The advice must not propose the closer look again.
    return replace(verdict, advice=verdict.advice and replace(verdict.advice, closer=""))


def _with_note(verdict: Verdict, note: str) -> Verdict:
    return replace(verdict, notes=(note, *verdict.notes))


def _culprits(
    runner: Runner, resolved: ResolvedProfile | None, plan: StressPlan, first: Run, number: int
) -> StressResult:
    # The perturbations of run `number` are tried one by one. A bisection would need as many runs,
    # because the most specific perturbations come first.
    def diverges(names: Sequence[str]) -> bool:
        runner.say(f"perturbed by {', '.join(names) or 'nothing'} ...")
        done = len(list(runner.folder.glob("stress-*.log")))
        environment = plan.environment(number, names)
        run = runner.run(resolved, f"stress-{done + 1}", environment, tuple(names))
        return not runner.compare(first, run).same

    stressed = StressResult(plan.names, plan.skipped)
    if diverges(()):
        return replace(stressed, what="the runs diverge without any perturbation too")
    is_one = len(plan.names) == 1
    alone = ((name,) for name in plan.names if is_one or diverges([name]))
    culprits = next(alone, plan.names)
    what = f"perturbing the {culprits[0]} alone makes the runs diverge"
    if len(culprits) > 1:
        what = f"it takes several perturbations together: {', '.join(culprits)}"
    return replace(stressed, culprits=culprits, what=what)


def _with_perturbation(verdict: Verdict, stressed: StressResult, plan: StressPlan) -> Verdict:
    verdict = _with_note(verdict, stressed.what)
    if len(stressed.culprits) != 1 or verdict.advice is None:
        return verdict
    row = next(row for row in plan.rows if row.name in stressed.culprits)
    reads = verdict.program.reads
    seed = next((read for read in reads if read.is_differing_seed), None)
    last = next((read for read in reversed(reads) if read.what == row.source), None)
    edit = edit_of(last.what, last.name, last.where, is_seed=seed is not None) if last else None
    if row.reads_memory:
        for read in verdict.program.unwritten:
            edit = edit or edit_of(UNINITIALIZED_MEMORY, "torch.empty", read.allocated)
    cause = f"{row.finding[:1].upper()}{row.finding[1:]}: {stressed.what} ({row.action})."
    if last:
        cause = cause_of(last, [seed] if seed else [])
    return replace(verdict, advice=replace(verdict.advice, cause=cause, edit=edit))


def _with_other_hash_seed(
    runner: Runner,
    plan: StressPlan,
    first: Run,
    setup: tuple[ResolvedProfile, RunEnvironment],
    *,
    closer: bool,
) -> tuple[Run, Verdict, StressResult]:
    """Run once with another hash seed than the profile's, and compare the run with `first`."""
    resolved, environment = setup
    changed = resolve(resolved, (f'env.PYTHONHASHSEED="{plan.other_hash_seed}"',))
    runner.say(f"with a {HASH_SEED} that differs from the profile's ...")
    run = runner.run(changed, HASH_SEED.replace(" ", "-"), environment, (HASH_SEED,))
    verdict = runner.compare(first, run)
    stressed = StressResult((*plan.names, HASH_SEED), plan.skipped)
    if verdict.same:
        return run, verdict, stressed
    if closer:
        verdict = _look_closer(runner, verdict, (setup, (changed, environment)))
    what = (
        "the results depend on Python's hash seed: `torchrepro run` and `verify` fix it, "
        "`+repro=` alone does not"
    )
    advice = Advice(
        f"The order of a set of strings, or a hash of text, decides the result; {what}."
    )
    stressed = replace(stressed, culprits=(HASH_SEED,), what=what)
    return run, _with_note(replace(verdict, advice=advice), what), stressed
