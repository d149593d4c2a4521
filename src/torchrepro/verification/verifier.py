"""Runs a command several times and says whether its runs are the same; and what follows if not.

A divergence is followed by a closer look, by trying each perturbation alone, and by escalation.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torchrepro.ground.errors import ProfileError
from torchrepro.ground.redaction import (
    HIDDEN,
    shareable,
    shell_line,
    sounds_secret,
    without_secrets,
)
from torchrepro.manifest.contents import secrets_here
from torchrepro.profile.load import resolve
from torchrepro.seeding.nondeterministic_calls import UNWRITTEN
from torchrepro.trace.reader import read_run
from torchrepro.trace.request import RecordingRequest, bytes_of
from torchrepro.verdict.comparison import refuse_no_line, refuse_unknown_lines, tolerance_of
from torchrepro.verdict.criteria import ALIGNED
from torchrepro.verdict.diagnosis import cause_of
from torchrepro.verdict.program_text import edit_of
from torchrepro.verdict.render import moment, place
from torchrepro.verdict.value import Advice
from torchrepro.verification.copies import FolderState
from torchrepro.verification.leftovers import Leftovers
from torchrepro.verification.perturbations import HASH_SEED, RunEnvironment, StressPlan
from torchrepro.verification.result import ControlledRun, Run, StressResult, Verification
from torchrepro.verification.runner import Runner, output_directory
from torchrepro.verification.trials import MOST, Trials

if TYPE_CHECKING:
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.verdict.value import Verdict
    from torchrepro.verification.runner import Setup

FEWEST = 2  # runs that it takes to compare anything


def request_for(
    level: str,
    keep: Sequence[str],
    every: int,
    max_size: int | str | None,
    tolerance: tuple[float, float] | None,
) -> RecordingRequest:
    """Return what is recorded of runs that are compared, within a tolerance if there is one."""
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
    """Run `command` under `profile` in fresh processes and say whether all runs are the same.

    Without a profile, which is None, the command runs as it is: recorded, and nothing set. The same
    means the same bits; `rtol` and `atol`, or the guarantee `aligned`, ask for the same numbers
    within a tolerance. What the lines of `ignore` compute, each as ``file:line``, is left out, with
    what differs by that alone. `level`, `keep`, `every` and `max_size` say what is recorded, as of
    `record`. Every run after the first is perturbed by the perturbations that `stress`
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
    refuse_no_line(ignore)
    if tolerance is None and resolved is not None and resolved.guarantee == "aligned":
        tolerance = ALIGNED
    plan = StressPlan.of(stress, resolved)
    request = request_for(level, keep, every, max_size, tolerance)
    with output_directory(os.fspath(folder), say) as output:
        runner = Runner(tuple(command), output, request, tolerance, say, meanwhile, tuple(ignore))
        # Every run but the first is perturbed, each differently.
        environments = [plan.environment(at, plan.names if at else ()) for at in range(runs)]
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
        number = next((at for at, each in enumerate(verdicts, start=1) if not each.same), 0)
        if number:
            verdict = verdicts[number - 1]
            left = Leftovers.of(before, after, done[0], done[number])
            verdict = left.explained(verdict)
            if closer and not (left.carried or left.is_refused):
                setups = (resolved, environments[0]), (resolved, environments[number])
                verdict = _look_closer(runner, verdict, setups)
            if plan.names and not left.is_refused:
                stressed = _culprits(runner, resolved, plan, done[0], number)
                verdict = _with_perturbation(verdict, stressed, plan)
            culprits = stressed.culprits if stressed else ()
            is_tried = escalate or (closer and culprits in ((), (HASH_SEED,)))
            if is_tried and not left.is_refused:
                trials = Trials(
                    runner=runner,
                    profile=profile,
                    overrides=overrides,
                    resolved=resolved,
                    between=(done[0], done[number]),
                    environments=(environments[0], environments[number]),
                    verdict=verdict,
                    meta=meta,
                    left=left,
                    most=math.inf if escalate else MOST,
                )
                if escalate:
                    verdict = trials.escalated()
                    if not trials.done:
                        verdict = _with_note(verdict, "no stricter setting is known that may help")
                else:
                    verdict = trials.with_one_hash_seed() if culprits else trials.advised()
                tried = trials.tried
            if stressed and plan.other_hash_seed:
                why = "the profile sets it, and the runs differ without another one already"
                stressed = replace(stressed, skipped=(*stressed.skipped, (HASH_SEED, why)))
            verdicts[number - 1] = verdict
        elif plan.other_hash_seed and resolved is not None:
            run, verdict, stressed = _with_other_hash_seed(
                runner, plan, done[0], (resolved, environments[0]), closer=closer
            )
            done.append(run)
            verdicts.append(verdict)
        found = Verification(
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
    if found.same and not folder:
        shutil.rmtree(output, ignore_errors=True)
        return replace(found, folder="")
    return found


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


_SPOT = attrgetter("rank", "step", "phase", "module", "op")


def _look_closer(runner: Runner, verdict: Verdict, setups: tuple[Setup, Setup]) -> Verdict:
    """Return a verdict with what two more runs, one in each of `setups`, show of its divergence.

    Where other data was loaded these runs record the loading. Any other divergence they record in
    detail. The verdict stays, with a note, if these runs diverge at another place or not at all.
    """
    first = verdict.first
    if first is None or not first.op:
        return verdict  # it has no op
    # Where other threads end steps, which of them is step 3 is an accident.
    steps = (max(first.step - 1, 0), first.step + 1) if verdict.compared.in_order else None
    keep = (*runner.request.keep, first.module)
    request = replace(runner.request, steps=steps, keep=keep, detail=True, every=1, max_size=None)
    when = moment(first.step, after_last=first.after_last)
    runs = _run_each(replace(runner, request=request), f"a closer look {when}".rstrip(), setups)
    note = "a closer look showed nothing: its runs ended before they got there"
    if all(run.recorded for run in runs):
        closer = runner.compare(*runs)
        verdict = replace(verdict, program=closer.program)
        if closer.first is not None and _SPOT(closer.first) == _SPOT(first):
            verdict = replace(verdict, first=closer.first, origin=closer.origin)
            note = "the divergence is shown as two more runs recorded it, in detail"
        else:
            if closer.first is not None and closer.first.source == first.source:
                verdict = replace(verdict, origin=closer.origin)
            what = f"diverge {place(closer.first)}" if closer.first else "were the same there"
            note = f"two more runs, recorded in detail, {what}: it varies from run to run"
        verdict = runner.advised(verdict, runs[0])
    return _with_note(_looked_closer(verdict), note)


def _run_each(runner: Runner, what: str, setups: Sequence[Setup]) -> list[Run]:
    runs = []
    for number, (resolved, environment) in enumerate(setups, start=1):
        runner.say(f"{what}, run {number} of {len(setups)} ...")
        runs.append(runner.run(resolved, f"closer-{number}", environment))
    return runs


def _looked_closer(verdict: Verdict) -> Verdict:
    # The advice does not ask for the closer look that has been taken.
    return replace(verdict, advice=verdict.advice and replace(verdict.advice, closer=""))


def _with_note(verdict: Verdict, note: str) -> Verdict:
    return replace(verdict, notes=(note, *verdict.notes))


def _culprits(
    runner: Runner, resolved: ResolvedProfile | None, plan: StressPlan, first: Run, number: int
) -> StressResult:
    # Those of run `number`, which differs from `first`, are tried again one by one: to halve them
    # would take as many runs, as the most telling come first.
    def diverges(names: Sequence[str]) -> bool:
        runner.say(f"perturbed by {', '.join(names) or 'nothing'} ...")
        done = len(list(runner.folder.glob("stress-*.log")))
        environment = plan.environment(number, names)
        run = runner.run(resolved, f"stress-{done + 1}", environment, tuple(names))
        return not runner.compare(first, run).same

    stressed = StressResult(plan.names, plan.skipped)
    if diverges(()):
        return replace(stressed, what="the runs diverge without any perturbation as well")
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
    seed = next((each for each in reads if each.is_other_seed), None)
    last = next((each for each in reversed(reads) if each.what == row.source), None)
    edit = edit_of(last.what, last.name, last.where, is_seed=seed is not None) if last else None
    for read in verdict.program.unwritten if row.reads_memory else ():
        edit = edit or edit_of(UNWRITTEN, "torch.empty", read.allocated)
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
    """Run under another hash seed than that of the profile; all runs under the profile's agree."""
    resolved, environment = setup
    other = resolve(resolved, (f'env.PYTHONHASHSEED="{plan.other_hash_seed}"',))
    runner.say(f"with another {HASH_SEED} than that of the profile ...")
    run = runner.run(other, HASH_SEED.replace(" ", "-"), environment, (HASH_SEED,))
    verdict = runner.compare(first, run)
    stressed = StressResult((*plan.names, HASH_SEED), plan.skipped)
    if verdict.same:
        return run, verdict, stressed
    if closer:
        verdict = _look_closer(runner, verdict, (setup, (other, environment)))
    what = (
        "it differs when Python's hash seed does: `torchrepro run` and `verify` fix it, "
        "`+repro=` alone does not"
    )
    advice = Advice(
        f"The order of a set of strings, or a hash of text, decides the result; {what}."
    )
    stressed = replace(stressed, culprits=(HASH_SEED,), what=what)
    return run, _with_note(replace(verdict, advice=advice), what), stressed
