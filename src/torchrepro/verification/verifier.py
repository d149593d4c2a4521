"""Runs a command several times, compares the runs, and looks for the cause of a difference.

After a divergence, two more runs record it in detail. Then each perturbation is applied alone.
Finally, trials look for the cause, and for a command that is repeatable.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torchrepro.ground.errors import ProfileError
from torchrepro.ground.imports import named
from torchrepro.profile.load import resolve
from torchrepro.seeding.nondeterministic_calls import HASH, UNINITIALIZED_MEMORY
from torchrepro.trace.request import RecordingRequest, bytes_of
from torchrepro.verdict.comparison import refuse_unknown_lines
from torchrepro.verdict.criteria import ALIGNED
from torchrepro.verdict.diagnosis import PAGES, cause_of
from torchrepro.verdict.program_text import edit_of
from torchrepro.verdict.render import moment, place
from torchrepro.verdict.value import Advice, Cause
from torchrepro.verification.copies import FolderState
from torchrepro.verification.leftovers import DivergedRuns, Leftovers, carried
from torchrepro.verification.perturbations import HASH_SEED, NO_CHANGE, StressPlan
from torchrepro.verification.result import ControlledRun, Run, StressResult, Verification
from torchrepro.verification.runner import RunRequest, traces_in

if TYPE_CHECKING:
    from torchrepro.verdict.value import Verdict
    from torchrepro.verification.runner import Runner, Setup

FEWEST = 2  # runs that a comparison needs

TRIALS = "advice.trials:answer"
"""The function that runs trials after a divergence. Its package can be left out."""


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
    size = bytes_of(max_size)
    recording = RecordingRequest("", level, keep=tuple(keep), every=every, max_size=size)
    request = RunRequest(
        tuple(command),
        profile=profile,
        overrides=overrides,
        folder=os.fspath(folder),
        recording=recording,
        rtol=rtol,
        atol=atol,
        ignore=tuple(ignore),
        say=say,
        meanwhile=meanwhile,
    )
    return verified(request, runs, stress, escalate=escalate, closer=closer)


def verified(
    request: RunRequest,
    runs: int = FEWEST,
    stress: Sequence[str] = (),
    *,
    escalate: bool = False,
    closer: bool = True,
) -> Verification:
    """Answer `request` as `verify` does, with the same `runs`, `stress`, `escalate`, `closer`."""
    if runs < FEWEST:
        problem, legal = "too few to compare", f"{FEWEST} or more"
        raise ProfileError.about(problem, key="runs", found=str(runs), legal=legal)
    tolerance, resolved = request.tolerance, request.resolved
    if tolerance is None and resolved is not None and resolved.guarantee == "aligned":
        tolerance = ALIGNED
    plan = StressPlan.of(stress, resolved)
    tried: tuple[ControlledRun, ...] = ()
    with request.runner(tolerance) as runner:
        stressed = StressResult(plan.names, plan.skipped) if stress else None
        repeated = _Repeated.of(request, runner, plan, runs)
        done = [*repeated.runs]
        verdicts = [runner.compare(done[0], run) for run in done[1:]]
        refuse_unknown_lines(verdicts[0])
        differing = (run for run, verdict in enumerate(verdicts, start=1) if not verdict.same)
        number = next(differing, 0)
        if number:
            verdicts[number - 1], stressed, tried = repeated.explained(
                verdicts[number - 1], number, stressed, escalate=escalate, closer=closer
            )
        elif plan.other_hash_seed:
            run, verdict, stressed = repeated.with_other_hash_seed(closer=closer)
            done.append(run)
            verdicts.append(verdict)
        verification = Verification(
            asked="bits" if tolerance is None else "tolerance",
            command=request.command_line,
            profile=resolved.name if resolved else None,
            own_profile=None if resolved else repeated.meta.get("profile"),
            runs=tuple(done),
            verdicts=tuple(verdicts),
            folder=str(runner.folder),
            stressed=stressed,
            tried=tried,
        )
    if verification.same and not request.folder:
        shutil.rmtree(runner.folder, ignore_errors=True)
        return replace(verification, folder="")
    return verification


@dataclass(frozen=True, slots=True)
class _Repeated:
    """All runs of one command that were made for a comparison, and how they were made."""

    request: RunRequest
    runner: Runner
    plan: StressPlan
    runs: Sequence[Run]
    before: FolderState  # the files before the first run
    after: FolderState  # the files after the first run
    meta: Mapping[str, Any]  # the metadata of the first run that was recorded

    @classmethod
    def of(cls, request: RunRequest, runner: Runner, plan: StressPlan, number: int) -> _Repeated:
        """Run the command `number` times. Stops if a run fails after a first run that did not."""
        done: list[Run] = []
        before = after = FolderState.now(runner.folder)
        for index in range(number):
            runner.say(f"run {index + 1} of {number} ...")
            perturbed = plan.names if index else ()
            environment = plan.environment(index, perturbed)
            done.append(runner.run(request.resolved, f"run-{index + 1}", environment, perturbed))
            runner.refuse_unrecorded(done[0])
            if index == 0:
                after = FolderState.now(runner.folder)
                continue
            runner.refuse_failed(done)
            if done[index].status and not done[0].status:
                break
        recorded = (trace.meta for run in done if run.recorded for trace in traces_in(run.folder))
        meta = next(recorded, {})
        return cls(request, runner, plan, done, before, after, meta)

    def explained(
        self,
        verdict: Verdict,
        number: int,
        stressed: StressResult | None,
        *,
        escalate: bool,
        closer: bool,
    ) -> tuple[Verdict, StressResult | None, tuple[ControlledRun, ...]]:
        """Return why run `number` differs from the first run.

        The answer is the verdict with a cause, `stressed` with the culprits, and the trials.
        """
        plan, between = self.plan, (self.runs[0], self.runs[number])
        environments = plan.environment(0, ()), plan.environment(number, plan.names)
        leftovers = Leftovers(self.before, self.after, between, carried(*between))
        verdict = leftovers.explained(verdict)
        tried: tuple[ControlledRun, ...] = ()
        if not leftovers.is_refused:
            if closer and not leftovers.carried:
                setups = [(self.request.resolved, environment) for environment in environments]
                verdict = _look_closer(self.runner, verdict, setups)
            if stressed and plan.names:
                stressed = self._culprits(number, stressed)
                verdict = _with_perturbation(verdict, stressed, plan)
            culprits = stressed.culprits if stressed else ()
            if escalate or (closer and culprits in ((), (HASH_SEED,))):
                question = "hash seed" if culprits else "cause"
                if escalate:
                    question = "settings"
                if question == "hash seed":
                    environments = NO_CHANGE, NO_CHANGE
                if find_spec("torchrepro.advice") is not None:
                    diverged = DivergedRuns(
                        self.request, self.runner, environments, verdict, self.meta, leftovers
                    )
                    verdict, tried = named(TRIALS)(question, diverged)
                if escalate and not tried:
                    verdict = _with_note(verdict, "no known stricter setting may help")
        if stressed and plan.other_hash_seed:
            reason = "the profile sets it, and the runs already differ with the same one"
            stressed = replace(stressed, skipped=(*stressed.skipped, (HASH_SEED, reason)))
        return verdict, stressed, tried

    def _culprits(self, number: int, stressed: StressResult) -> StressResult:
        # The perturbations of run `number` are tried one by one. A bisection would need as many
        # runs, because the most specific perturbations come first.
        def diverges(names: Sequence[str]) -> bool:
            self.runner.say(f"perturbed by {', '.join(names) or 'nothing'} ...")
            environment, name = self.plan.environment(number, names), f"stress-{next(numbers)}"
            run = self.runner.run(self.request.resolved, name, environment, tuple(names))
            return not self.runner.compare(self.runs[0], run).same

        names, numbers = self.plan.names, count(1)
        if diverges(()):
            return replace(stressed, what="the runs diverge without any perturbation too")
        alone = ((name,) for name in names if len(names) == 1 or diverges([name]))
        culprits = next(alone, names)
        what = f"perturbing the {culprits[0]} alone makes the runs diverge"
        if len(culprits) > 1:
            what = f"it takes several perturbations together: {', '.join(culprits)}"
        return replace(stressed, culprits=culprits, what=what)

    def with_other_hash_seed(self, *, closer: bool) -> tuple[Run, Verdict, StressResult]:
        """Run with another hash seed than the profile's, and compare with the first run."""
        environment = self.plan.environment(0, ())
        override = f'env.PYTHONHASHSEED="{self.plan.other_hash_seed}"'
        changed = resolve(self.request.resolved, (override,))
        self.runner.say(f"with a {HASH_SEED} that differs from the profile's ...")
        run = self.runner.run(changed, HASH_SEED.replace(" ", "-"), environment, (HASH_SEED,))
        verdict = self.runner.compare(self.runs[0], run)
        stressed = StressResult((*self.plan.names, HASH_SEED), self.plan.skipped)
        if verdict.same:
            return run, verdict, stressed
        if closer:
            setups = (self.request.resolved, environment), (changed, environment)
            verdict = _look_closer(self.runner, verdict, setups)
        what = (
            "the results depend on Python's hash seed: `torchrepro run` and `verify` fix it, "
            "`+repro=` alone does not"
        )
        cause = f"The order of a set of strings, or a hash of text, decides the result; {what}."
        advice = Advice(cause, cause_id=PAGES[HASH])
        stressed = replace(stressed, culprits=(HASH_SEED,), what=what)
        return run, _with_note(replace(verdict, advice=advice), what), stressed


_SPOT = attrgetter("rank", "step", "phase", "module", "op")


def _look_closer(runner: Runner, verdict: Verdict, setups: Sequence[Setup]) -> Verdict:
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
    runs = []
    for number, (resolved, environment) in enumerate(setups, start=1):
        look = f"a closer look {when}".rstrip()
        runner.say(f"{look}, run {number} of {len(setups)} ...")
        closely = replace(runner, request=request)
        runs.append(closely.run(resolved, f"closer-{number}", environment))
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
    # The advice must not propose the closer look again.
    advice = verdict.advice and replace(verdict.advice, closer="")
    return _with_note(replace(verdict, advice=advice), note)


def _with_note(verdict: Verdict, note: str) -> Verdict:
    return replace(verdict, notes=(note, *verdict.notes))


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
    sentence = f"{row.finding[:1].upper()}{row.finding[1:]}: {stressed.what} ({row.action})."
    cause = Cause(sentence, PAGES[row.name])
    if last:
        cause = cause_of(last, [seed] if seed else [])
    advice = replace(verdict.advice, cause=cause.sentence, edit=edit, cause_id=cause.page)
    return replace(verdict, advice=advice)
