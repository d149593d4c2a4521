"""Controlled re-runs after a divergence: advice is tested before it is shown.

A trial runs the command again with one change: one more setting, or one pinned source of
nondeterminism. If its runs agree, the change shows the cause, or a command that is repeatable.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from shlex import join
from typing import TYPE_CHECKING, Any

from torchrepro.ground.errors import ApplyError, ProfileError
from torchrepro.ground.redaction import shareable, shell_line
from torchrepro.lock.repository import CopyError
from torchrepro.manifest.contents import known_secrets
from torchrepro.profile.load import resolve
from torchrepro.profile.resolved import flatten
from torchrepro.seeding.call_records import ObservedCall
from torchrepro.seeding.nondeterministic_calls import (
    ADDRESS,
    CLOCK,
    EXPLICIT_SEED,
    FORKED,
    HASH,
    SET_ORDER,
    THREADS,
    UNINITIALIZED_MEMORY,
)
from torchrepro.trace.request import LEVELS
from torchrepro.verdict.diagnosis import (
    cause_by_evidence,
    cause_by_line,
    cause_of,
    evidence_of,
    levels_above,
    open_fixes,
    prime_suspect,
)
from torchrepro.verdict.libraries import edits_of, library_row
from torchrepro.verdict.program_text import (
    TIES,
    edit_of,
    edit_of_sample,
    edits_of_other_lines,
    scan,
    varying_seeds,
)
from torchrepro.verdict.render import headline, relative_location, short, source_line
from torchrepro.verdict.value import Advice, Kind, LineOfOrigin
from torchrepro.verification.copies import edited_copy
from torchrepro.verification.leftovers import Leftovers, RunLocation, own_folder, traces_of, within
from torchrepro.verification.perturbations import RunEnvironment, pinning
from torchrepro.verification.pinned_sources import PINNED_TOGETHER
from torchrepro.verification.result import UNCHANGED, ControlledRun, Run
from torchrepro.verification.runner import status_in_words

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.verdict.diagnosis import Evidence, Suspect
    from torchrepro.verdict.value import Edit, NondeterministicRead, Verdict
    from torchrepro.verification.runner import Runner

ENOUGH = 3  # runs that must agree before a setting is proposed

ENOUGH_PINNED = 2  # runs that must agree before a pinned source is named as the cause

EVERYTHING = "everything"

MOST = 18  # the limit of runs for all trials of one divergence; escalation has none

_AGREED = f"the same in {ENOUGH} runs"
_EDIT_AGREED = f"with this edit, {ENOUGH_PINNED} runs agree"
_SETTINGS, _SOURCES, _LINES = 2, 4, 3  # the most settings, sources and lines tried one by one
_PATIENCE = 5.0  # how many times longer than the original runs a run of a trial may take
_AT_LEAST = 10.0  # seconds that a run of a trial may take in any case

_DRAWING = ("random", "numpy", "torch", "torchvision")
"""Packages that draw from generators which a profile seeds."""

_MAKES_UNINITIALIZED = re.compile(r"\bempty(_like)?\(|\bndarray\(")

_WITHOUT_A_CALL = {
    ADDRESS: "the order of a set or dict of objects, which are hashed by their addresses",
    HASH: "the order of a set of strings, or a hash of text",
}
"""How each source can vary without a call that a recording could observe."""


@dataclass
class Trials:
    runner: Runner
    profile: Any  # the profile as the user named it; None for a command without one
    overrides: Sequence[str]
    resolved: ResolvedProfile | None
    between: tuple[Run, Run]  # two runs that differ
    environments: Sequence[RunEnvironment]  # the environments of the two runs
    verdict: Verdict
    meta: Mapping[str, Any]
    leftovers: Leftovers  # the files that one of the two runs left for the next
    most: float = MOST  # the limit of runs for all trials
    done: list[ControlledRun] = field(default_factory=list)
    _last: Run = field(init=False)  # the first run of the last trial whose runs agreed
    _unchanged: list[Run] = field(default_factory=list)  # further runs of the unchanged command
    _differs_seldom: bool = False  # most of the unchanged runs agree

    def advised(self) -> Verdict:
        """Return the verdict with the cause, the edit and the command that trials have confirmed.

        Raises the same exceptions as `Runner.run`.
        """
        evidence = evidence_of(self.verdict, self.meta)
        is_fault = evidence.holds("reads_unwritten_memory") or evidence.holds("is_race")
        if self.leftovers.carried and self._differs_by_leftovers():
            return self.verdict
        if not (self.verdict.reaches or is_fault):
            return self._with_line_ignored(evidence)
        suspect, origin = prime_suspect(evidence), evidence.origin
        if explained := self._explained_by_suspect(suspect, evidence):
            return explained
        is_at_fault = origin and (origin.is_sure or not (origin.came_in or suspect))
        if origin and is_at_fault and not evidence.differing_seeds:
            return self._from_line(evidence, origin)
        if not (evidence.differing_seeds or evidence.holds("own_generator")):
            for profile, overrides in islice(self._settings(evidence), _SETTINGS):
                if self._setting_helps(profile, overrides):
                    return self._with_command(evidence)
        base = self._base
        (likeliest, its_reads), *further = self._sources(evidence).items()
        if self._pin_helps(likeliest, [], base):
            reads = self._decisive(likeliest, its_reads, base)
            return self._explained(likeliest, reads, evidence)
        if not self._pin_helps(EVERYTHING, [], base):
            return self._by_what_cannot_be_pinned(evidence)
        for source, reads in further[:_SOURCES]:
            if self._pin_helps(source, [], base):
                return self._explained(source, self._decisive(source, reads, base), evidence)
        return self._with(edit=None)  # several sources together

    def _explained_by_suspect(self, suspect: Suspect | None, evidence: Evidence) -> Verdict | None:
        """Return the verdict if runs agree once the suspect, or uninitialized memory, is pinned."""
        if evidence.holds("reads_unwritten_memory"):
            if self._pin_helps(UNINITIALIZED_MEMORY, [], self.resolved):
                return self._explained(UNINITIALIZED_MEMORY, [], evidence)
            return None
        if suspect is None:
            return None
        if evidence.differing_seeds or suspect.where in {run.source for run in evidence.sides}:
            # A source that cannot be pinned itself is shown by the seed that was made from it.
            lines: list[Suspect] = [suspect, *evidence.differing_seeds[:1]]
            for read in lines:
                can_be_pinned = read.what in {*PINNED_TOGETHER, EXPLICIT_SEED}
                if can_be_pinned and self._pin_helps(read.what, [read], self.resolved):
                    return self._explained(suspect.what, [suspect], evidence)
        return None

    def _from_line(self, evidence: Evidence, origin: LineOfOrigin) -> Verdict:
        """Return the verdict with the results of trials at the line where the difference began.

        Other lines are not tried: they read and computed the same in both runs.
        """
        base = self._base
        observed: dict[str, list[NondeterministicRead]] = {}
        for read in evidence.suspects:
            if read.what in PINNED_TOGETHER:
                observed.setdefault(read.what, []).append(read)
        row = library_row(origin.called)
        cause = cause_of(evidence.suspects[0]) if observed else cause_by_line(origin)
        if row:
            for edit in islice(edits_of(row, origin.where), _LINES):
                if self._edit_helps(edit, self.resolved):
                    return self._with(cause=cause, edit=edit, tried=_EDIT_AGREED)
        can_be_seeded = self.resolved is None and not self.own_profile
        if can_be_seeded and HASH in observed and self._setting_helps("seed-only", ()):
            return self._with_last_command(cause_of(observed[HASH][0]))
        for source, reads in observed.items():
            if self._pin_helps(source, reads, base):
                return self._explained(source, reads, evidence)
        lines = (*origin.path, *origin.within)
        allocates = any(_MAKES_UNINITIALIZED.search(source_line(line)) for line in lines)
        may_be_uninitialized = allocates or self.verdict.program.unwritten
        if may_be_uninitialized and self._pin_helps(UNINITIALIZED_MEMORY, [], self.resolved):
            return self._explained(UNINITIALIZED_MEMORY, [], evidence)
        of_order = {suspect.where for suspect in self._lines(ADDRESS)}
        reads_order = origin.is_set or not of_order.isdisjoint(origin.path)
        if reads_order and self._pin_helps(ADDRESS, [], base):
            return self._explained(ADDRESS, [], evidence)
        # Code that a recording cannot observe may draw random numbers, or depend on hashes of text.
        is_unobserved = bool(origin.opaque) or origin.called.partition(".")[0] in _DRAWING
        seed_may_help = can_be_seeded and (reads_order or is_unobserved)
        if seed_may_help and self._setting_helps("seed-only", ()):
            return self._with_command(evidence)
        if reads_order and not can_be_seeded and self._pin_helps(HASH, [], base):
            return self._explained(HASH, [], evidence)
        if origin.called and not (observed or self.own_profile):
            one_thread = (*self.overrides, "env.OMP_NUM_THREADS=1")
            if self._setting_helps(self.profile or "seed-only", one_thread):
                return self._with_last_command(cause)
        if evidence.suspects:
            return self._by_what_cannot_be_pinned(evidence)
        threads = [read for read in self.verdict.program.reads if read.what == THREADS]
        if threads and self._pin_helps(THREADS, [], base):
            return self._explained(THREADS, threads[:1], evidence)
        return self._with(cause=cause, edit=None)

    def with_one_hash_seed(self) -> Verdict:
        """Return the verdict of runs that differ by hash seed, with the command that fixes it."""
        self.environments = [RunEnvironment()] * 2  # as for the proposed command
        overrides = (*self.overrides, 'env.PYTHONHASHSEED="0"') if self.profile else ()
        # The perturbations, each tried alone, have shown already that the hash seed is the cause.
        if self.own_profile or not self._agrees_under(self.profile or "seed-only", overrides):
            return self.verdict
        return self._with(command=self.done[-1].command, tried=_AGREED, edit=None)

    def escalated(self) -> Verdict:
        """Return the verdict with the first repeatable command; settings get ever stricter."""
        evidence = evidence_of(self.verdict, self.meta)
        base = self.resolved or resolve("seed-only")
        levels = levels_above(base.values, evidence.first, self.verdict.program)
        stricter = [
            (self.profile or "seed-only", (*self.overrides, *level.overrides)) for level in levels
        ]
        for profile, overrides in dict.fromkeys([*self._settings(evidence), *stricter]):
            if self._setting_helps(profile, overrides):
                return self._with_command(evidence)
        return self.verdict

    def _settings(self, evidence: Evidence) -> Iterator[tuple[Any, tuple[str, ...]]]:
        """Yield profiles with overrides that may help, the cheapest first."""
        if self.own_profile:
            return
        base = self.resolved
        if base is None:
            base = resolve("seed-only")
            if not evidence.holds("is_computed"):
                yield "seed-only", ()
        values = flatten(base.values)
        for fix in open_fixes(evidence)[:1]:
            if not fix.is_met_by(None if values.get(fix.key) is None else str(values[fix.key])):
                yield self.profile or "seed-only", (*self.overrides, f"{fix.key}={fix.value}")
        may_be_any = evidence.holds("is_coarse") or evidence.first.kind is Kind.ENDED
        if base.guarantee != "repeatable" and (evidence.holds("is_computed") or may_be_any):
            yield "debug-strict", ()

    def _sources(self, evidence: Evidence) -> dict[str, list[NondeterministicRead]]:
        """Return the sources that the program reads, each with its reads, the likeliest first."""
        by_line: dict[str, dict[str, NondeterministicRead]] = {}
        for read in evidence.suspects:
            if read.what in PINNED_TOGETHER:
                by_line.setdefault(read.what, {})[read.where] = read
        for source in (ADDRESS, HASH, UNINITIALIZED_MEMORY):
            by_line.setdefault(source, {})
        return {source: list(reads.values()) for source, reads in by_line.items()}

    def _decisive(
        self, source: str, reads: Sequence[NondeterministicRead], resolved: ResolvedProfile | None
    ) -> Sequence[NondeterministicRead]:
        """Return the one read that is enough to pin, or all reads if no single one is."""
        if len(reads) > 1:
            for read in reads[:_LINES]:
                if self._pin_helps(source, [read], resolved):
                    return [read]
        return reads

    # Trials: each returns whether runs agree with one change.

    def _setting_helps(self, profile: Any, overrides: tuple[str, ...]) -> bool:
        return self._agrees_under(profile, overrides) and not self._by_chance()

    def _agrees_under(self, profile: Any, overrides: tuple[str, ...]) -> bool:
        command = self._command(profile, overrides)
        change = " ".join([str(profile), *overrides])
        try:
            resolved = resolve(profile, overrides)
        except ProfileError as error:
            self.done.append(ControlledRun(change, command, same=False, runs=0, answer=str(error)))
            return False
        return self._agrees(change, command, resolved, RunEnvironment())

    def _pin_helps(
        self, source: str, reads: Sequence[Suspect], resolved: ResolvedProfile | None
    ) -> bool:
        lines = ["/".join(read.where.split("/")[-2:]) for read in reads]
        pins: dict[str, list[str]] = {source: lines}
        if source == EVERYTHING:
            pins = {pinned: [] for pinned in PINNED_TOGETHER}
        if source == THREADS:
            pins[ADDRESS] = []  # a set of futures is ordered by address
        at = f" at {short(reads[0].where)}" if reads else ""
        change = f"{source}{at} pinned"
        same = self._agrees(change, "", resolved, pinning(pins), runs=ENOUGH_PINNED)
        return same and not self._by_chance()

    def _differs_by_leftovers(self) -> bool:
        """Whether files that one run leaves for the next make runs differ; updates the verdict.

        In that case runs agree without these files, perhaps only if the program is seeded too.
        """
        seeded = [("seed-only", ())] if self.resolved is None and not self.own_profile else []
        for profile, overrides in [(self.profile, self.overrides), *seeded]:
            is_own = profile == self.profile
            resolved = self.resolved if is_own else resolve(profile)
            under = "" if is_own else f", under {profile}"
            change = f"each run without files that run 1 left{under}"
            remove = f"rm -f -- {join(self.leftovers.created)}; exec "
            command = self._command(profile, overrides, before=remove)
            if not all(map(os.path.lexists, self.leftovers.created)):
                command = ""  # a terminal cannot show the name of one of the files
            environment, location = RunEnvironment(), self.leftovers.copy_without_them
            if self._agrees(change, command, resolved, environment, location=location):
                without, compare = self._last, self.runner.compare
                if self.leftovers.overwritten and not compare(self.between[0], without).same:
                    # All of these runs started with the overwritten files, which may differ from
                    # the files that run 1 started with.
                    reason = self.leftovers.why_not_undone
                    self.done[-1] = replace(self.done[-1], same=False, answer=reason)
                    continue
                enter_new = 'cd "$(mktemp -d)" && exec '
                in_new_folder = self._command(
                    profile, overrides, before=enter_new, full=self.leftovers.in_full
                )
                change, location = f"each run in a new folder{under}", self.leftovers.new_folder
                is_same = self._agrees(
                    change, in_new_folder, resolved, environment, runs=1, location=location
                )
                if is_same and compare(without, self._last).same:
                    command = in_new_folder
                cause = self.leftovers.cause
                if not is_own:
                    cause = f"{cause} Also, the program seeds no generator."
                self.verdict = self._with(cause=cause, command=command, tried=_AGREED, edit=None)
                return True
            if self.done and not self.done[-1].runs:
                break  # no copy can be made
        # Run 2 made fewer steps because it found the files: the verdict says so without a trial.
        return self.between[0].steps > self.between[1].steps

    def _edit_that_works(self, source: str, reads: Sequence[Suspect]) -> Edit | None:
        """Return an edit, at one of these lines or elsewhere, that makes runs in a copy agree."""
        edits = [_edit(read.what, read, is_seed=False) for read in reads]
        files, steps = self.verdict.program.files, min(run.steps for run in self.between)
        edits += edits_of_other_lines(source, files, steps)
        for edit in list(filter(None, dict.fromkeys(edits)))[:_LINES]:
            if self._edit_helps(edit, self.resolved):
                return edit
        return None

    def _edit_helps(self, edit: Edit, resolved: ResolvedProfile | None) -> bool:
        """Whether runs in an edited copy agree."""
        change, environment = f"{short(edit.where)} edited", RunEnvironment()
        try:
            with edited_copy(edit, self.leftovers.written, self.runner.folder) as copy:
                location = partial(within, copy)
                return self._agrees(
                    change, "", resolved, environment, runs=ENOUGH_PINNED, location=location
                )
        except CopyError as error:
            self.done.append(ControlledRun(change, "", same=False, runs=0, answer=str(error)))
        return False

    def _agrees(
        self,
        change: str,
        command: str,
        resolved: ResolvedProfile | None,
        environment: RunEnvironment,
        *,
        runs: int = ENOUGH,
        location: Callable[[Runner], AbstractContextManager[RunLocation]] = own_folder,
    ) -> bool:
        """Whether so many runs agree with a change; the trial is appended to `done`.

        The environment of the change overrides the environments of the original runs.
        """
        if self._differs_seldom or self._spent + runs > self.most:
            return False
        if not self.done:
            seconds = max(run.seconds for run in self.between)
            how_many = f"at most {self.most} more" if math.isfinite(self.most) else "more"
            self.runner.say(f"looking for the cause: {how_many} runs, about {seconds:.0f} s each\n")
        finished: list[Run] = []
        answer, same = "", False
        runner = replace(self.runner, limit=self._limit)
        for number in range(runs):
            self.runner.say(f"tried: {change}, run {number + 1} of {runs} ...")
            changed = self.environments[min(number, 1)] | environment
            name = f"trial-{len(self.done) + 1}-{number + 1}"
            try:
                with location(runner) as at:
                    run = at.runner.run(resolved, name, changed | at.environment)
                    finished.append(run)
                    strayed = at.strayed()
            except (ApplyError, CopyError) as error:
                answer = str(error)
                break
            if strayed:
                answer = f"it used files outside its copy: {strayed}"
                break
            if run.status != 0 or not run.recorded:
                answer = f"it ended with {status_in_words(run.status)}: see {run.log}"
                break
            if self.between[0].steps and not run.steps:
                answer = "it recorded no step, but run 1 did"
                break
            if number:
                verdict = runner.compare(finished[0], run)
                answer = headline(verdict)
                if not verdict.same:
                    break
                if any(verdict.not_finite) and not any(self.verdict.not_finite):
                    answer = "the same, but its losses are not finite"
                    break
        else:
            self._last, same = finished[0], True
        trial = ControlledRun(change, command, same=same, runs=len(finished), answer=answer)
        self.done.append(trial)
        return same

    def _by_chance(self) -> bool:
        """Return whether the runs of the last trial may agree by chance, and note it there."""
        reads = [read for trace in traces_of(self._last) for read in trace.meta.get("sources", ())]
        if all(read["what"] != FORKED for read in reads):
            return self._agrees_unchanged()
        answer = "the same by chance: the draws depend on which child process gets which task"
        self.done[-1] = replace(self.done[-1], same=False, answer=answer)
        return True

    def _agrees_unchanged(self) -> bool:
        """Whether most runs of the unchanged command agree with the last trial; marks the trial.

        If neither original run agrees with the trial, the change has changed the results: no
        further run is needed.
        """
        trial, compare = self.done[-1], self.runner.compare
        if not any(compare(run, self._last).same for run in self.between):
            return False
        runner = replace(self.runner, limit=self._limit)
        agree = differ = 0
        while max(agree, differ) <= ENOUGH // 2:
            number = agree + differ
            if number == len(self._unchanged):
                if self._spent >= self.most:
                    break
                self.runner.say(f"{UNCHANGED}, run {number + 1} of {ENOUGH} ...")
                environment = self.environments[min(number, 1)]
                run = runner.run(self.resolved, f"unchanged-{number + 1}", environment)
                self._unchanged.append(run)
            run = self._unchanged[number]
            same = run.status == 0 and run.recorded and compare(run, self._last).same
            agree, differ = agree + same, differ + (not same)
        if differ > ENOUGH // 2:
            return False
        self._differs_seldom = agree > ENOUGH // 2
        answer = "the same, perhaps by chance: runs without this change agree too"
        self.done[-1] = replace(trial, same=False, answer=answer)
        return True

    @property
    def tried(self) -> tuple[ControlledRun, ...]:
        """All trials, and the runs of the unchanged command that they were compared with."""
        runs, same = len(self._unchanged), self._differs_seldom
        if not runs:
            return tuple(self.done)
        answer = "most are the same" if same else "most differ"
        return (*self.done, ControlledRun(UNCHANGED, "", same, runs, answer))

    @property
    def _spent(self) -> int:
        return sum(trial.runs for trial in self.tried)

    @property
    def _limit(self) -> float:
        return max(*(run.seconds * _PATIENCE for run in self.between), _AT_LEAST)

    @property
    def _base(self) -> ResolvedProfile | None:
        """The profile under which sources are pinned: `seed-only` for a command without one."""
        if self.resolved is None and not self.own_profile:
            return resolve("seed-only")
        return self.resolved

    @property
    def own_profile(self) -> bool:
        """Whether the command applies a profile itself, so that no setting can be added to it."""
        return self.resolved is None and self.meta.get("profile") is not None

    # Answers: the verdict with the results of trials.

    def _with(self, **advice: Any) -> Verdict:
        before = self.verdict.advice or Advice("")
        return replace(self.verdict, advice=replace(before, closer="", **advice))

    def _with_last_command(self, cause: str) -> Verdict:
        command = self.done[-1].command
        return self._with(cause=cause, command=command, tried=_AGREED, edit=None)

    def _with_line_ignored(self, evidence: Evidence) -> Verdict:
        """Return the verdict with a command that ignores the first line, if all else agrees."""
        line = relative_location(evidence.first.source)
        runner = replace(self.runner, ignore=(*self.runner.ignore, line))
        if line and runner.compare(*self.between).same:
            command = self._command(self.profile, self.overrides, "--ignore", line)
            return self._with(command=command, tried="the same without it")
        return self.verdict

    def _with_command(self, evidence: Evidence) -> Verdict:
        command = self.done[-1].command
        is_brought_in = evidence.holds("is_of_program") and not evidence.holds("is_random")
        if is_brought_in and self.resolved is None:
            # The profile seeds generators and fixes hashes: which of the two was missing?
            if self._pin_helps(HASH, [], None):
                reads = [read for read in evidence.suspects if read.what == HASH]
                self.verdict = self._explained(HASH, reads[:1], evidence)
            else:
                cause = "The program seeds no generator, or not every one that it draws from."
                self.verdict = self._with(cause=cause)
        return self._with(command=command, tried=_AGREED, edit=None)

    def _by_what_cannot_be_pinned(self, evidence: Evidence) -> Verdict:
        """Return the verdict without the causes that pinning has ruled out."""
        if evidence.differing_seeds:
            return self._with(edit=None)
        program = self.verdict.program
        remaining: list[Suspect] = [
            read for read in evidence.suspects if read.what not in PINNED_TOGETHER
        ]
        seeds = varying_seeds(scan(program.files, program.began), program.reads)
        remaining += [source for _, source in seeds]
        remaining += [read for read in evidence.suspects if read.what == THREADS]
        cause = cause_of(remaining[0]) if remaining else cause_by_evidence(evidence)
        source = remaining[0].what if remaining else ""
        edit = None
        if source in (FORKED, THREADS):
            edit = self._edit_that_works(source, remaining[:1])
        if edit and source == THREADS and self._agrees_unchanged():
            edit = None  # no run has shown that threads are the cause
        return self._with(cause=cause, edit=edit, tried=_EDIT_AGREED if edit else "")

    def _explained(self, source: str, reads: Sequence[Suspect], evidence: Evidence) -> Verdict:
        """Return the verdict with the source that a trial has confirmed, and its line if known."""
        seeds = evidence.differing_seeds[:1]
        words = source if reads else _WITHOUT_A_CALL.get(source, source)
        shown = self.verdict.origin.where if self.verdict.origin else evidence.first.source
        if reads and reads[0].where and shown not in {read.where for read in reads}:
            begins = LineOfOrigin(where=reads[0].where, changed=(), same=())
            self.verdict = replace(self.verdict, origin=begins)
        reads = reads or self._lines(source)
        cause, edit = f"{words[:1].upper()}{words[1:]}.", None
        if len(reads) == 1:
            cause = cause_of(replace(reads[0], what=words), seeds)
            if source != THREADS:
                edit = _edit(source, reads[0], is_seed=bool(seeds))
        elif reads:
            lines = " and ".join(short(read.where) for read in reads[:2])
            cause = f"{cause.removesuffix('.')}, at {lines}."
            distinct = {_edit(source, read, is_seed=False) for read in reads}
            edit = distinct.pop() if len(distinct) == 1 else None  # the same one for all lines
        tried = f"with that source pinned, {ENOUGH_PINNED} runs agree"
        if source == THREADS or (source == CLOCK and edit is None):
            candidates = [*reads, *self._lines(source)] if source == THREADS else ()
            edit = self._edit_that_works(source, candidates)
            tried = _EDIT_AGREED if edit else tried
        return self._with(cause=cause, edit=edit, tried=tried)

    def _lines(self, source: str) -> list[Suspect]:
        """Return the lines whose text suggests that they read the source that was pinned."""
        sources = {ADDRESS: (SET_ORDER, ADDRESS), HASH: (SET_ORDER,)}.get(source, (source,))
        program = self.verdict.program
        if source == UNINITIALIZED_MEMORY and program.unwritten:
            allocated = program.unwritten[0].allocated
            return [ObservedCall("torch.empty", source, allocated)]
        lines = [line for line in scan(program.files, program.began) if line.what in sources]
        if source == UNINITIALIZED_MEMORY and len(lines) > 1:
            for line in lines[:_LINES]:
                if self._pin_helps(source, [line], self.resolved):
                    return [line]
            return list(lines)
        # A sorted set has a fixed order unless members share a key: such lines are likely only
        # where no other line reads the order of a set.
        return [line for line in lines if line.name not in TIES] or list(lines)

    def _command(
        self,
        profile: Any,
        overrides: Sequence[str],
        *options: str,
        before: str = "",
        full: Callable[[Sequence[str]], Sequence[str]] = list,
    ) -> str:
        """Return a `verify` command with the user's criteria; a shell runs `before` each time."""
        secrets = known_secrets(*([self.resolved] if self.resolved else []))
        words = shareable(full(self.runner.command), secrets)
        if before:
            words = ["sh", "-c", f"{before}{shell_line(words)}"]
        level, tolerance = self.runner.request.level, self.runner.tolerance or ()
        criteria = ["--level", level] if level != LEVELS[-1] else []
        for option, number in zip(("--rtol", "--atol"), tolerance, strict=False):
            criteria += [option, str(number)]
        for line in self.runner.ignore:
            criteria += ["--ignore", line]
        named = [str(profile), *overrides] if profile else []
        return shell_line(["torchrepro", "verify", *named, *criteria, *options, "--", *words])


def _edit(source: str, read: Suspect, *, is_seed: bool) -> Edit | None:
    if getattr(read, "in_sample", False):
        return edit_of_sample(read.name, read.where)
    edited_source = SET_ORDER if read.what == SET_ORDER and source != HASH else source
    return edit_of(edited_source, read.name, read.where, is_seed=is_seed)
