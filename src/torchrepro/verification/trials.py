"""What is proposed after a divergence, tried before it is said.

A trial runs the command again with one thing changed: a setting more, or a source that no seed
controls held the same. Runs that then agree show the cause, or the command that repeats itself.
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
from torchrepro.manifest.contents import secrets_here
from torchrepro.profile.load import resolve
from torchrepro.profile.resolved import flatten
from torchrepro.seeding.nondeterministic_calls import (
    ADDRESS,
    CLOCK,
    FORKED,
    GIVEN_SEED,
    HASH,
    SET_ORDER,
    THREADS,
    UNWRITTEN,
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
    edits_elsewhere,
    scan,
    varying_seeds,
)
from torchrepro.verdict.render import from_here, headline, short, source_line
from torchrepro.verdict.value import Advice, Kind, LineOfOrigin, SeedSource
from torchrepro.verification.copies import edited_copy
from torchrepro.verification.leftovers import Leftovers, RunLocation, own_folder, traces_of, within
from torchrepro.verification.perturbations import RunEnvironment, holding
from torchrepro.verification.pinned_sources import HELD_AT_ONCE
from torchrepro.verification.result import UNCHANGED, ControlledRun, Run
from torchrepro.verification.runner import status_in_words

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.verdict.diagnosis import Evidence, Suspect
    from torchrepro.verdict.value import Edit, UncontrolledRead, Verdict
    from torchrepro.verification.runner import Runner

ENOUGH = 3  # runs under a setting that agree before it is proposed

ENOUGH_HELD = 2  # runs with a source held the same that agree before it is the cause

EVERYTHING = "everything"

MOST = 18  # runs that all trials of a divergence take at most, but for an escalation

_AGREED = f"the same in {ENOUGH} runs"
_TRIED = f"edited so, {ENOUGH_HELD} runs agree"
_SETTINGS, _ALONE, _LINES = 2, 4, 3  # settings, sources and lines that are tried one by one
_PATIENCE, _AT_LEAST = 5.0, 10.0  # times either run, and seconds, that a trial may take

_DRAWING = ("random", "numpy", "torch", "torchvision")
"""Packages that draw from generators which a profile seeds."""

_MAKES_UNWRITTEN = re.compile(r"\bempty(_like)?\(|\bndarray\(")

_UNHEARD = {
    ADDRESS: "the order of a set or dict of objects, which are found by their addresses",
    HASH: "the order of a set of strings, or a hash of text",
}
"""What may vary although no call was heard."""


@dataclass
class Trials:
    runner: Runner
    profile: Any  # the profile as the user named it; None for a command that is run as it is
    overrides: Sequence[str]
    resolved: ResolvedProfile | None
    between: tuple[Run, Run]  # two runs that differ
    environments: Sequence[RunEnvironment]  # what they were started in
    verdict: Verdict
    meta: Mapping[str, Any]
    left: Leftovers  # what one of the runs left for the next one
    most: float = MOST  # the runs that all trials take at most
    done: list[ControlledRun] = field(default_factory=list)
    _last: Run = field(init=False)  # the first run of the last trial whose runs agreed
    _unchanged: list[Run] = field(default_factory=list)  # more runs of the command as it is
    _differs_seldom: bool = False  # most of these are the same

    def advised(self) -> Verdict:
        """Return the verdict with what trials show: its cause, the edit, the command that repeats.

        Raises what `Runner.run` raises.
        """
        its = evidence_of(self.verdict, self.meta)
        is_fault = its.holds("reads_unwritten_memory") or its.holds("is_race")
        if self.left.carried and self._is_left_behind():
            return self.verdict
        if not (self.verdict.reaches or is_fault):
            return self._left_out(its)
        suspect = prime_suspect(its)
        if its.holds("reads_unwritten_memory"):
            if self._holds(UNWRITTEN, [], self.resolved):
                return self._explained(UNWRITTEN, [], its)
        elif suspect is not None and (
            its.other_seeds or suspect.where in {side.source for side in its.sides}
        ):
            # A source that cannot be held is known by the seed that was made from it.
            lines: list[Suspect] = [suspect, *its.other_seeds[:1]]
            for read in lines:
                held = read.what in {*HELD_AT_ONCE, GIVEN_SEED}
                if held and self._holds(read.what, [read], self.resolved):
                    return self._explained(suspect.what, [suspect], its)
        origin = its.origin
        if origin and not its.other_seeds and (origin.is_sure or not (origin.came_in or suspect)):
            return self._from_line(its, origin)
        if not (its.other_seeds or its.holds("own_generator")):
            for profile, overrides in list(self._settings(its))[:_SETTINGS]:
                if self._setting(profile, overrides):
                    return self._with_command(its)
        base = self._base
        (likeliest, its_reads), *others = self._sources(its).items()
        if self._holds(likeliest, [], base):
            return self._explained(likeliest, self._alone(likeliest, its_reads, base), its)
        if not self._holds(EVERYTHING, [], base):
            return self._by_what_cannot_be_held(its)
        for what, reads in others[:_ALONE]:
            if self._holds(what, [], base):
                return self._explained(what, self._alone(what, reads, base), its)
        return self._with(edit=None)  # several of them together

    def _from_line(self, its: Evidence, origin: LineOfOrigin) -> Verdict:
        """Return the verdict with what trials show of the line at which the difference began.

        Nothing is tried of what other lines have read: these read and made the same.
        """
        base = self._base
        heard: dict[str, list[UncontrolledRead]] = {}
        for read in its.suspects:
            if read.what in HELD_AT_ONCE:
                heard.setdefault(read.what, []).append(read)
        row = library_row(origin.called)
        cause = cause_of(its.suspects[0]) if heard else cause_by_line(origin)
        for edit in islice(edits_of(row, origin.where), _LINES) if row else ():
            if self._repeats_with(edit, self.resolved):
                return self._with(cause=cause, edit=edit, tried=_TRIED)
        can_be_seeded = self.resolved is None and not self.own_profile
        if can_be_seeded and HASH in heard and self._setting("seed-only", ()):
            command = self.done[-1].command
            return self._with(
                cause=cause_of(heard[HASH][0]), command=command, tried=_AGREED, edit=None
            )
        for what, reads in heard.items():
            if self._holds(what, reads, base):
                return self._explained(what, reads, its)
        lines = (*origin.path, *origin.within)
        leaves_unwritten = any(_MAKES_UNWRITTEN.search(source_line(each)) for each in lines)
        if (leaves_unwritten or self.verdict.program.unwritten) and self._holds(
            UNWRITTEN, [], self.resolved
        ):
            return self._explained(UNWRITTEN, [], its)
        of_order = {each.where for each in self._lines(ADDRESS)}
        reads_order = origin.is_set or not of_order.isdisjoint(origin.path)
        if reads_order and self._holds(ADDRESS, [], base):
            return self._explained(ADDRESS, [], its)
        # What no recording hears may be drawn, or go by the hashes of texts.
        is_unheard = bool(origin.opaque) or origin.called.partition(".")[0] in _DRAWING
        if can_be_seeded and (reads_order or is_unheard) and self._setting("seed-only", ()):
            return self._with_command(its)
        if reads_order and not can_be_seeded and self._holds(HASH, [], base):
            return self._explained(HASH, [], its)
        if origin.called and not (heard or self.own_profile):
            one = (*self.overrides, "env.OMP_NUM_THREADS=1")
            if self._setting(self.profile or "seed-only", one):
                command = self.done[-1].command
                return self._with(cause=cause, command=command, tried=_AGREED, edit=None)
        if its.suspects:
            return self._by_what_cannot_be_held(its)
        threads = [each for each in self.verdict.program.reads if each.what == THREADS]
        if threads and self._holds(THREADS, [], base):
            return self._explained(THREADS, threads[:1], its)
        return self._with(cause=cause, edit=None)

    def with_one_hash_seed(self) -> Verdict:
        """Return the verdict of runs that another hash seed makes differ, with what fixes it."""
        self.environments = [RunEnvironment()] * 2  # as the command runs that is proposed
        overrides = (*self.overrides, 'env.PYTHONHASHSEED="0"') if self.profile else ()
        # That it is the hash seed was seen as each perturbation was tried alone.
        if self.own_profile or not self._agrees_under(self.profile or "seed-only", overrides):
            return self.verdict
        return self._with(command=self.done[-1].command, tried=_AGREED, edit=None)

    def escalated(self) -> Verdict:
        """Return the verdict with the first command, by ever stricter settings, that repeats."""
        its = evidence_of(self.verdict, self.meta)
        base = self.resolved or resolve("seed-only")
        levels = levels_above(base.values, its.first, self.verdict.program)
        steps = [
            *self._settings(its),
            *((self.profile or "seed-only", (*self.overrides, *each.overrides)) for each in levels),
        ]
        for profile, overrides in dict.fromkeys(steps):
            if self._setting(profile, overrides):
                return self._with_command(its)
        return self.verdict

    def _settings(self, its: Evidence) -> Iterator[tuple[Any, tuple[str, ...]]]:
        """Yield profiles with overrides that may help, the cheapest first."""
        if self.own_profile:
            return
        base = self.resolved
        if base is None:
            base = resolve("seed-only")
            if not its.holds("is_computed"):
                yield "seed-only", ()
        values = flatten(base.values)
        for fix in open_fixes(its)[:1]:
            if not fix.is_met_by(None if values.get(fix.key) is None else str(values[fix.key])):
                yield self.profile or "seed-only", (*self.overrides, f"{fix.key}={fix.value}")
        may_be_any = its.holds("is_coarse") or its.first.kind is Kind.ENDED
        if base.guarantee != "repeatable" and (its.holds("is_computed") or may_be_any):
            yield "debug-strict", ()

    def _sources(self, its: Evidence) -> dict[str, list[UncontrolledRead]]:
        """Return what the program has read, the surest first, with the lines that read it."""
        found: dict[str, dict[str, UncontrolledRead]] = {}
        for read in its.suspects:
            if read.what in HELD_AT_ONCE:
                found.setdefault(read.what, {})[read.where] = read
        for what in (ADDRESS, HASH, UNWRITTEN):
            found.setdefault(what, {})
        return {what: list(reads.values()) for what, reads in found.items()}

    def _alone(
        self, what: str, reads: Sequence[UncontrolledRead], resolved: ResolvedProfile | None
    ) -> Sequence[UncontrolledRead]:
        """Return the one of some reads that it is enough to hold, or all where there is none."""
        if len(reads) > 1:
            for read in reads[:_LINES]:
                if self._holds(what, [read], resolved):
                    return [read]
        return reads

    # Trials: each says whether runs agree with one thing changed.

    def _setting(self, profile: Any, overrides: tuple[str, ...]) -> bool:
        return self._agrees_under(profile, overrides) and not self._by_chance()

    def _agrees_under(self, profile: Any, overrides: tuple[str, ...]) -> bool:
        command = self._command(profile, overrides)
        what = " ".join([str(profile), *overrides])
        try:
            resolved = resolve(profile, overrides)
        except ProfileError as refused:
            self.done.append(ControlledRun(what, command, same=False, runs=0, answer=str(refused)))
            return False
        return self._agrees(what, command, resolved, RunEnvironment())

    def _holds(self, what: str, reads: Sequence[Suspect], resolved: ResolvedProfile | None) -> bool:
        lines = ["/".join(each.where.split("/")[-2:]) for each in reads]
        held = {what: lines} if what != EVERYTHING else {each: [] for each in HELD_AT_ONCE}
        if what == THREADS:
            held[ADDRESS] = []  # by which a set of futures is ordered
        at = f" at {short(reads[0].where)}" if reads else ""
        what = f"{what}{at} held the same"
        same = self._agrees(what, "", resolved, holding(held), runs=ENOUGH_HELD)
        return same and not self._by_chance()

    def _is_left_behind(self) -> bool:
        """Whether runs differ by files that one leaves for the next; the verdict then says so.

        Runs then agree without them, perhaps once the program is seeded as well.
        """
        seeded = [("seed-only", ())] if self.resolved is None and not self.own_profile else []
        for profile, overrides in [(self.profile, self.overrides), *seeded]:
            resolved = self.resolved if profile == self.profile else resolve(profile)
            under = f", under {profile}" if profile != self.profile else ""
            what = f"each run without what the run before left{under}"
            words = f"rm -f -- {join(self.left.created)}; exec "
            command = self._command(profile, overrides, before=words)
            if not all(map(os.path.lexists, self.left.created)):
                command = ""  # a name that no terminal can show
            change, place = RunEnvironment(), self.left.copy_without_them
            if self._agrees(what, command, resolved, change, place=place):
                without = self._last
                if self.left.overwritten and not self.runner.compare(self.between[0], without).same:
                    # All of these runs found the same there: it may be what differs.
                    why = self.left.why_not_undone
                    self.done[-1] = replace(self.done[-1], same=False, answer=why)
                    continue
                what, words = f"each run in a new folder{under}", 'cd "$(mktemp -d)" && exec '
                anew = self._command(profile, overrides, before=words, full=self.left.in_full)
                is_same = self._agrees(
                    what, anew, resolved, change, runs=1, place=self.left.new_folder
                )
                if is_same and self.runner.compare(without, self._last).same:
                    command = anew
                cause = self.left.cause
                if profile != self.profile:
                    cause = f"{cause} And the program seeds no generator."
                self.verdict = self._with(cause=cause, command=command, tried=_AGREED, edit=None)
                return True
            if self.done and not self.done[-1].runs:
                break  # no copy can be made
        # A run that did less, since it found them, needs no further trial: the verdict says so.
        return self.between[0].steps > self.between[1].steps

    def _edit_that_works(self, what: str, reads: Sequence[Suspect]) -> Edit | None:
        """Return an edit of one of these lines, or elsewhere, with which runs of a copy agree."""
        edits = [_edit(each.what, each, is_seed=False) for each in reads]
        files, steps = self.verdict.program.files, min(run.steps for run in self.between)
        edits += edits_elsewhere(what, files, steps)
        for edit in list(filter(None, dict.fromkeys(edits)))[:_LINES]:
            if self._repeats_with(edit, self.resolved):
                return edit
        return None

    def _repeats_with(self, edit: Edit, resolved: ResolvedProfile | None) -> bool:
        """Whether runs of a copy with an edit agree."""
        what, change = f"{short(edit.where)} edited", RunEnvironment()
        try:
            with edited_copy(edit, self.left.written, self.runner.folder) as copy:
                place = partial(within, copy)
                return self._agrees(what, "", resolved, change, runs=ENOUGH_HELD, place=place)
        except CopyError as refused:
            self.done.append(ControlledRun(what, "", same=False, runs=0, answer=str(refused)))
        return False

    def _agrees(
        self,
        what: str,
        command: str,
        resolved: ResolvedProfile | None,
        change: RunEnvironment,
        *,
        runs: int = ENOUGH,
        place: Callable[[Runner], AbstractContextManager[RunLocation]] = own_folder,
    ) -> bool:
        """Whether so many runs agree with a change; how they went is added to what was done."""
        if self._differs_seldom or self._spent + runs > self.most:
            return False
        if not self.done:
            seconds = max(run.seconds for run in self.between)
            how_many = f"at most {self.most} more" if math.isfinite(self.most) else "more"
            self.runner.say(f"why: {how_many} runs, of about {seconds:.0f} s each\n")
        done, answer, same = [], "", False
        runner = replace(self.runner, limit=self._limit)
        for number in range(runs):
            self.runner.say(f"tried: {what}, run {number + 1} of {runs} ...")
            environment = self.environments[min(number, 1)] | change
            name = f"trial-{len(self.done) + 1}-{number + 1}"
            try:
                with place(runner) as its:
                    done.append(its.runner.run(resolved, name, environment | its.environment))
                    strayed = its.strayed()
            except (ApplyError, CopyError) as refused:
                answer = str(refused)
                break
            if strayed:
                answer = f"it did not stay in its copy: {strayed}"
                break
            if done[-1].status != 0 or not done[-1].recorded:
                answer = f"it ended with {status_in_words(done[-1].status)}: see {done[-1].log}"
                break
            if self.between[0].steps and not done[-1].steps:
                answer = "it made no step, and run 1 did"
                break
            if number:
                found = runner.compare(done[0], done[-1])
                answer = headline(found)
                if not found.same:
                    break
                if any(found.not_finite) and not any(self.verdict.not_finite):
                    answer = "the same, and its losses are no numbers"
                    break
        else:
            self._last, same = done[0], True
        self.done.append(ControlledRun(what, command, same=same, runs=len(done), answer=answer))
        return same

    def _by_chance(self) -> bool:
        """Whether the runs of the last trial agree and may not the next time; that is noted."""
        reads = [read for trace in traces_of(self._last) for read in trace.meta.get("sources", ())]
        if all(read["what"] != FORKED for read in reads):
            return self._agrees_unchanged()
        answer = "the same by chance: which child takes which task decides what it draws"
        self.done[-1] = replace(self.done[-1], same=False, answer=answer)
        return True

    def _agrees_unchanged(self) -> bool:
        """Whether most runs of the command as it is agree with the last trial, which is noted.

        Where no run of it was that of the trial, what was tried has changed what it computes.
        """
        trial, compare = self.done[-1], self.runner.compare
        if not any(compare(each, self._last).same for each in self.between):
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
        answer = "the same, perhaps by chance: so are runs without it"
        self.done[-1] = replace(trial, same=False, answer=answer)
        return True

    @property
    def tried(self) -> tuple[ControlledRun, ...]:
        """All trials, and the runs of the command as it is that they were held against."""
        runs, same = len(self._unchanged), self._differs_seldom
        answer = "most are the same" if same else "most differ"
        return (*self.done, *([ControlledRun(UNCHANGED, "", same, runs, answer)] if runs else ()))

    @property
    def _spent(self) -> int:
        return sum(trial.runs for trial in self.tried)

    @property
    def _limit(self) -> float:
        return max(*(run.seconds * _PATIENCE for run in self.between), _AT_LEAST)

    @property
    def _base(self) -> ResolvedProfile | None:
        """The profile in which sources are held: one that seeds, where the command has none."""
        if self.resolved is None and not self.own_profile:
            return resolve("seed-only")
        return self.resolved

    @property
    def own_profile(self) -> bool:
        """Whether the command puts a profile in force itself, to which nothing can be added."""
        return self.resolved is None and self.meta.get("profile") is not None

    # Answers: the verdict with what trials have shown.

    def _with(self, **advice: Any) -> Verdict:
        before = self.verdict.advice or Advice("")
        return replace(self.verdict, advice=replace(before, closer="", **advice))

    def _left_out(self, its: Evidence) -> Verdict:
        place = from_here(its.first.source)
        runner = replace(self.runner, ignore=(*self.runner.ignore, place))
        if place and runner.compare(*self.between).same:
            command = self._command(self.profile, self.overrides, "--ignore", place)
            return self._with(command=command, tried="the same without it")
        return self.verdict

    def _with_command(self, its: Evidence) -> Verdict:
        command = self.done[-1].command
        if its.holds("is_of_program") and not its.holds("is_random") and self.resolved is None:
            # The profile seeds, and fixes hashes: which of them was missing?
            if self._holds(HASH, [], None):
                reads = [each for each in its.suspects if each.what == HASH]
                self.verdict = self._explained(HASH, reads[:1], its)
            else:
                words = "The program seeds no generator, or not all that it draws from."
                self.verdict = self._with(cause=words)
        return self._with(command=command, tried=_AGREED, edit=None)

    def _by_what_cannot_be_held(self, its: Evidence) -> Verdict:
        """Return the verdict with no cause that holding it has shown to be none."""
        if its.other_seeds:
            return self._with(edit=None)
        program = self.verdict.program
        left: list[Suspect] = [each for each in its.suspects if each.what not in HELD_AT_ONCE]
        seeds = varying_seeds(scan(program.files, program.began), program.reads)
        left += [source for _, source in seeds]
        left += [each for each in its.suspects if each.what == THREADS]
        cause = cause_of(left[0]) if left else cause_by_evidence(its)
        what = left[0].what if left else ""
        edit = self._edit_that_works(what, left[:1]) if what in (FORKED, THREADS) else None
        if edit and what == THREADS and self._agrees_unchanged():
            edit = None  # no run has shown that it is the threads
        return self._with(cause=cause, edit=edit, tried=_TRIED * bool(edit))

    def _explained(self, what: str, reads: Sequence[Suspect], its: Evidence) -> Verdict:
        """Return the verdict with a cause that a trial has shown, and its line if that is known."""
        seeds = its.other_seeds[:1]
        words = what if reads else _UNHEARD.get(what, what)
        shown = self.verdict.origin.where if self.verdict.origin else its.first.source
        if reads and reads[0].where and shown not in {each.where for each in reads}:
            begins = LineOfOrigin(where=reads[0].where, changed=(), same=())
            self.verdict = replace(self.verdict, origin=begins)
        reads = reads or self._lines(what)
        cause, edit = f"{words[:1].upper()}{words[1:]}.", None
        if len(reads) == 1:
            cause = cause_of(replace(reads[0], what=words), seeds)
            if what != THREADS:
                edit = _edit(what, reads[0], is_seed=bool(seeds))
        elif reads:
            places = " and ".join(short(each.where) for each in reads[:2])
            cause = f"{cause.removesuffix('.')}, at {places}."
            distinct = {_edit(what, each, is_seed=False) for each in reads}
            edit = distinct.pop() if len(distinct) == 1 else None  # one for all of these lines
        tried = f"with that the same in each run, {ENOUGH_HELD} runs agree"
        if what == THREADS or (what == CLOCK and edit is None):
            lines = [*reads, *self._lines(what)] if what == THREADS else ()
            edit = self._edit_that_works(what, lines)
            tried = _TRIED if edit else tried
        return self._with(cause=cause, edit=edit, tried=tried)

    def _lines(self, what: str) -> list[Suspect]:
        """Return the lines of the program whose text says that they may be what was held."""
        words = {ADDRESS: (SET_ORDER, ADDRESS), HASH: (SET_ORDER,)}.get(what, (what,))
        program = self.verdict.program
        if what == UNWRITTEN and program.unwritten:
            where = program.unwritten[0].allocated
            return [SeedSource("torch.empty", what, where, is_sure=True)]
        found = [each for each in scan(program.files, program.began) if each.what in words]
        if what == UNWRITTEN and len(found) > 1:
            alone = (each for each in found[:_LINES] if self._holds(what, [each], self.resolved))
            return list(islice(alone, 1)) or list(found)
        # A set may be sorted by a key that no two members share: where all else has an order.
        return [each for each in found if each.name not in TIES] or list(found)

    def _command(
        self,
        profile: Any,
        overrides: Sequence[str],
        *options: str,
        before: str = "",
        full: Callable[[Sequence[str]], Sequence[str]] = list,
    ) -> str:
        # It has what the user has said of what is the same. A shell does `before` in each run.
        secrets = secrets_here(*([self.resolved] if self.resolved else []))
        words = shareable(full(self.runner.command), secrets)
        if before:
            words = ["sh", "-c", f"{before}{shell_line(words)}"]
        level, tolerance = self.runner.request.level, self.runner.tolerance or ()
        asked = ["--level", level] if level != LEVELS[-1] else []
        for name, number in zip(("--rtol", "--atol"), tolerance, strict=False):
            asked += [name, str(number)]
        for place in self.runner.ignore:
            asked += ["--ignore", place]
        named = [str(profile), *overrides] if profile else []
        return shell_line(["torchrepro", "verify", *named, *asked, *options, "--", *words])


def _edit(what: str, read: Suspect, *, is_seed: bool) -> Edit | None:
    if getattr(read, "in_sample", False):
        return edit_of_sample(read.name, read.where)
    of = SET_ORDER if read.what == SET_ORDER and what != HASH else what
    return edit_of(of, read.name, read.where, is_seed=is_seed)
