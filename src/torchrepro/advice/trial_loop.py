"""Runs the trials of a divergence one after another, within a limit of runs.

A trial makes one change: it adds a setting, pins a source of nondeterminism, or edits a line. If
the runs of a trial agree, the change shows the cause, or a command that is repeatable. A script is
a generator of trials, the likeliest first. It receives the outcome of each trial that it yields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from torchrepro.ground.errors import ApplyError
from torchrepro.lock.repository import CopyError
from torchrepro.seeding.nondeterministic_calls import FORKED
from torchrepro.verdict.render import headline
from torchrepro.verdict.value import Advice, Cause
from torchrepro.verification.copies import edited_copy
from torchrepro.verification.perturbations import NO_CHANGE, RunEnvironment
from torchrepro.verification.result import UNCHANGED, ControlledRun
from torchrepro.verification.runner import rows_of, status_in_words

if TYPE_CHECKING:
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.verdict.value import Edit, LineOfOrigin, Verdict
    from torchrepro.verification.leftovers import DivergedRuns
    from torchrepro.verification.result import Run
    from torchrepro.verification.runner import Runner

    Location: TypeAlias = Callable[[Runner], AbstractContextManager[Runner]]
    Script: TypeAlias = Generator["Trial", "Outcome", "Conclusion | None"]

ENOUGH = 3  # runs that must agree before a setting is proposed

MOST = 18  # the limit of runs for all trials of one divergence

_PATIENCE = 5.0  # how many times longer than the original runs a run of a trial may take
_AT_LEAST = 10.0  # seconds that a run of a trial may take in any case


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """What trials have shown about a divergence: the advice that replaces earlier advice."""

    cause: Cause | None = None  # None if the cause stays as it was
    edit: Edit | None = None
    command: str = ""
    tried: str = ""
    begins: LineOfOrigin | None = None  # the line of origin, if the verdict shows another line


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One change of the command, and what it explains if the runs with the change agree."""

    change: str
    command: str = ""  # the command line that makes the change; empty for a pinned source
    resolved: ResolvedProfile | None
    environment: RunEnvironment = NO_CHANGE  # overrides that of the original runs
    location: Location = nullcontext
    edit: Edit | None = None  # applied in a copy of the folder, in which all runs start
    runs: int = ENOUGH  # how many runs must agree
    refused: str = ""  # why the command cannot run with this change
    is_checked: bool = False  # whether runs of the unchanged command must differ from these runs
    objection: Callable[[Run], str] = lambda run: ""  # why the agreement with a run shows nothing
    explains: Conclusion | Script | None = None  # ends the script of this trial, if not None


class Outcome(NamedTuple):
    """The runs of a trial, and whether they agree and show something."""

    same: bool
    runs: Sequence[Run] = ()


class TrialLoop:
    """The trials of one divergence: starts before the first of them, and ends with a conclusion.

    No trial starts if its runs would exceed the limit `most`, or after most runs of the unchanged
    command agreed with each other.
    """

    def __init__(self, diverged: DivergedRuns, most: float = MOST) -> None:
        self._diverged = diverged
        self._most = most
        self._done: list[ControlledRun] = []
        self._unchanged: list[Run] = []  # further runs of the unchanged command
        self._differs_seldom = False  # most of the unchanged runs agree
        limit = max(*(run.seconds * _PATIENCE for run in diverged.between), _AT_LEAST)
        self._runner = replace(diverged.runner, limit=limit)

    def conclude(self, script: Script) -> tuple[Verdict, tuple[ControlledRun, ...]]:
        """Run the trials of a script. Return the verdict with the conclusion, and all trials.

        A trial that agrees and explains something replaces the script. Raises the same exceptions
        as `Runner.run`.
        """
        conclusion: Conclusion | None = None
        outcome: Any = None  # a generator starts with None
        try:
            while conclusion is None:
                trial = script.send(outcome)
                outcome = self._outcome(trial)
                if not outcome.same:
                    continue
                if isinstance(trial.explains, Conclusion):
                    conclusion = trial.explains
                elif trial.explains is not None:
                    script, outcome = trial.explains, None
        except StopIteration as end:
            conclusion = end.value
        verdict = self._diverged.verdict
        if conclusion is not None:
            before = verdict.advice and Cause(verdict.advice.cause, verdict.advice.cause_id)
            cause, page = conclusion.cause or before or ("", "")
            shown = conclusion.edit, conclusion.command, conclusion.tried
            advice = Advice(cause, *shown, cause_id=page)
            verdict = replace(verdict, advice=advice, origin=conclusion.begins or verdict.origin)
        return verdict, self._tried

    def _outcome(self, trial: Trial) -> Outcome:
        """Run a trial and append it to `_done`, unless no run is left for it."""
        finished: list[Run] = []
        same, answer = False, trial.refused
        if not trial.refused:
            if self._differs_seldom or self._spent + trial.runs > self._most:
                return Outcome(same=False)
            changed: AbstractContextManager[Runner] = nullcontext(self._runner)
            if trial.edit is not None:
                written = self._diverged.leftovers.written
                changed = edited_copy(trial.edit, written, self._runner)
            try:
                with changed as runner:
                    same, answer = self._agree(trial, runner, finished)
            except (ApplyError, CopyError) as error:
                answer = str(error)
        self._done.append(ControlledRun(trial.change, trial.command, same, len(finished), answer))
        objection = self._objection(trial, finished[0]) if same else ""
        if objection:
            self._done[-1] = replace(self._done[-1], same=False, answer=objection)
        return Outcome(same and not objection, finished)

    def _agree(self, trial: Trial, runner: Runner, finished: list[Run]) -> tuple[bool, str]:
        """Run a trial, and append its runs to `finished`. Return whether they agree, in words too.

        Stops after the first run that fails or differs.
        """
        between = self._diverged.between
        if not self._done:
            seconds = max(run.seconds for run in between)
            how_many = f"at most {self._most} more" if math.isfinite(self._most) else "more"
            runner.say(f"looking for the cause: {how_many} runs, about {seconds:.0f} s each\n")
        answer = ""
        for number in range(trial.runs):
            runner.say(f"tried: {trial.change}, run {number + 1} of {trial.runs} ...")
            changed = self._diverged.environments[min(number, 1)] | trial.environment
            name = f"trial-{len(self._done) + 1}-{number + 1}"
            with trial.location(runner) as changed_runner:
                run = changed_runner.run(trial.resolved, name, changed)
                finished.append(run)
                strayed = changed_runner.strayed()
            if strayed:
                return False, f"it used files outside its copy: {strayed}"
            if run.status != 0 or not run.recorded:
                return False, f"it ended with {status_in_words(run.status)}: see {run.log}"
            if between[0].steps and not run.steps:
                return False, "it recorded no step, but run 1 did"
            if number:
                verdict = self._runner.compare(finished[0], run)
                answer = headline(verdict)
                if not verdict.same:
                    return False, answer
                if any(verdict.not_finite) and not any(self._diverged.verdict.not_finite):
                    return False, "the same, but its losses are not finite"
        return True, answer

    def _objection(self, trial: Trial, run: Run) -> str:
        """Return why the agreement of a trial, whose first run is `run`, shows nothing."""
        if not trial.is_checked:
            return trial.objection(run)
        # An edit decides the draws of child processes, but no setting and no pinned source does.
        if trial.edit is None and any(read["what"] == FORKED for read in rows_of(run, "sources")):
            return "the same by chance: the draws depend on which child process gets which task"
        if self._unchanged_agree(run):
            return "the same, perhaps by chance: runs without this change agree too"
        return ""

    def _unchanged_agree(self, trial_run: Run) -> bool:
        """Return whether runs of the unchanged command agree with the run of a trial too.

        If neither original run agrees with the trial, the change has changed the results, and no
        further run is needed.
        """
        diverged, compare = self._diverged, self._runner.compare
        if not any(compare(run, trial_run).same for run in diverged.between):
            return False
        agree = differ = 0
        while max(agree, differ) <= ENOUGH // 2:
            number = agree + differ
            if number == len(self._unchanged):
                if self._spent >= self._most:
                    break
                self._runner.say(f"{UNCHANGED}, run {number + 1} of {ENOUGH} ...")
                environment = diverged.environments[min(number, 1)]
                run = self._runner.run(diverged.resolved, f"unchanged-{number + 1}", environment)
                self._unchanged.append(run)
            run = self._unchanged[number]
            same = run.status == 0 and run.recorded and compare(run, trial_run).same
            agree, differ = agree + same, differ + (not same)
        if differ > ENOUGH // 2:
            return False
        self._differs_seldom = agree > ENOUGH // 2
        return True

    @property
    def _tried(self) -> tuple[ControlledRun, ...]:
        """All trials, followed by the runs of the unchanged command if there were any."""
        runs, same = len(self._unchanged), self._differs_seldom
        if not runs:
            return tuple(self._done)
        answer = "most are the same" if same else "most differ"
        return (*self._done, ControlledRun(UNCHANGED, "", same, runs, answer))

    @property
    def _spent(self) -> int:
        return sum(trial.runs for trial in self._tried)
