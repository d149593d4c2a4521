"""Lists the trials of a divergence, the likeliest cause first, and what each of them explains.

`answer` is the entry for other packages. A script of `Trials` answers a question about two runs
that differ: a generator that `trial_loop` runs. No script keeps state between two of its trials.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from shlex import join
from typing import TYPE_CHECKING, Any

from torchrepro.advice.trial_loop import ENOUGH, MOST, Conclusion, Trial, TrialLoop
from torchrepro.ground.errors import ProfileError
from torchrepro.ground.redaction import shareable, shell_line
from torchrepro.manifest.contents import known_secrets
from torchrepro.profile.load import resolve
from torchrepro.profile.resolved import flatten
from torchrepro.seeding.call_records import ObservedCall
from torchrepro.seeding.nondeterministic_calls import (
    ADDRESS,
    CLOCK,
    EXISTING_FILE,
    EXPLICIT_SEED,
    FORKED,
    HASH,
    SET_ORDER,
    THREADS,
    UNINITIALIZED_MEMORY,
)
from torchrepro.trace.request import LEVELS
from torchrepro.verdict.diagnosis import (
    PAGES,
    UNSEEDED,
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
from torchrepro.verdict.render import relative_location, short, source_line
from torchrepro.verdict.value import Cause, Kind, LineOfOrigin
from torchrepro.verification.perturbations import pinning
from torchrepro.verification.pinned_sources import PINNED_TOGETHER

if TYPE_CHECKING:
    from torchrepro.advice.trial_loop import Script
    from torchrepro.verdict.diagnosis import Suspect
    from torchrepro.verdict.value import Edit, NondeterministicRead, Verdict
    from torchrepro.verification.leftovers import DivergedRuns
    from torchrepro.verification.result import ControlledRun, Run

EVERYTHING = "everything"

_ENOUGH_PINNED = 2  # runs that must agree before a pinned source is named as the cause
_SETTINGS, _SOURCES, _LINES = 2, 4, 3  # the most settings, sources and lines tried one by one

_AGREED = f"the same in {ENOUGH} runs"
_EDIT_AGREED = f"with this edit, {_ENOUGH_PINNED} runs agree"
_PIN_AGREED = f"with that source pinned, {_ENOUGH_PINNED} runs agree"

_DRAWING = ("random", "numpy", "torch", "torchvision")
"""Packages that draw from generators which a profile seeds."""

_MAKES_UNINITIALIZED = re.compile(r"\bempty(_like)?\(|\bndarray\(")

_WITHOUT_A_CALL = {
    ADDRESS: "the order of a set or dict of objects, which are hashed by their addresses",
    HASH: "the order of a set of strings, or a hash of text",
}
"""How each source can vary without a call that a recording could observe."""


class Trials:
    """The scripts of trials for two runs that differ."""

    def __init__(self, diverged: DivergedRuns) -> None:
        self._diverged, self._verdict = diverged, diverged.verdict
        self._program, self._resolved = diverged.verdict.program, diverged.resolved
        self._evidence = evidence_of(diverged.verdict, diverged.meta)
        self._profile = diverged.request.profile or "seed-only"
        self._overrides = diverged.request.overrides
        has_profile = diverged.meta.get("profile") is not None
        # The command applies a profile itself, so that trials cannot add settings.
        self._applies_own_profile = self._resolved is None and has_profile
        self._can_be_seeded = self._resolved is None and not has_profile
        # The profile under which sources are pinned.
        self._base = resolve("seed-only") if self._can_be_seeded else self._resolved

    # Scripts: each yields trials, and returns a conclusion if no trial explained the difference.

    def of_causes(self) -> Script:
        """Try what the evidence suggests, then settings, then each source of nondeterminism."""
        evidence = self._evidence
        if self._diverged.leftovers.carried:
            first, later = self._diverged.between
            explained = yield from self._of_leftovers()
            # If run 2 made fewer steps, `Leftovers.explained` has already named the files.
            if explained or first.steps > later.steps:
                return explained
        reads_uninitialized = evidence.holds("reads_unwritten_memory")
        if not (self._verdict.reaches or reads_uninitialized or evidence.holds("is_race")):
            return self._with_line_ignored()
        suspect, origin = prime_suspect(evidence), evidence.origin
        if reads_uninitialized:
            yield self._pin_alone(UNINITIALIZED_MEMORY)
        elif suspect:
            yield from self._of_suspect(suspect)
        is_at_fault = origin and (origin.is_sure or not (origin.came_in or suspect))
        if origin and is_at_fault and not evidence.differing_seeds:
            return (yield from self._of_line(origin))
        if not (evidence.differing_seeds or evidence.holds("own_generator")):
            for profile, overrides in islice(self._settings(), _SETTINGS):
                yield self._setting(profile, overrides)
        (likeliest, reads), *further = self._sources().items()
        yield replace(self._pin(likeliest), explains=self._of_reads(likeliest, reads))
        yield replace(self._pin(EVERYTHING), explains=self._of_sources(further[:_SOURCES]))
        return (yield from self._of_unpinned())

    def of_one_hash_seed(self) -> Script:
        """Try the hash seed alone. The cause is known already."""
        if self._applies_own_profile:
            return None
        fixed = ('env.PYTHONHASHSEED="0"',) if self._diverged.request.profile else ()
        trial = self._setting(self._profile, (*self._overrides, *fixed))
        explains = Conclusion(command=trial.command, tried=_AGREED)
        yield replace(trial, is_checked=False, explains=explains)
        return None

    def of_stricter_settings(self) -> Script:
        """Try the settings that fit the evidence, then all levels of escalation."""
        base = self._resolved or resolve("seed-only")
        levels = levels_above(base.values, self._evidence.first, self._program)
        stricter = [(self._profile, (*self._overrides, *level.overrides)) for level in levels]
        for profile, overrides in dict.fromkeys([*self._settings(), *stricter]):
            yield self._setting(profile, overrides)
        return None

    def _of_leftovers(self) -> Script:
        """Try runs without files that one run leaves for the next, also when seeded."""
        leftovers, compare = self._diverged.leftovers, self._diverged.runner.compare
        remove = f"rm -f -- {join(leftovers.created)}; exec "
        # A terminal cannot show the names of some files.
        can_be_shown = all(map(os.path.lexists, leftovers.created))

        def objection(run: Run) -> str:
            # These runs read the overwritten files. Run 1 may have read other contents, so the
            # agreement of these runs does not show the cause.
            is_other = leftovers.overwritten and not compare(leftovers.runs[0], run).same
            return leftovers.why_not_undone if is_other else ""

        rows = [(self._diverged.request.profile, self._overrides, self._resolved, "", "")]
        if self._can_be_seeded:
            also = " Also, the program seeds no generator."
            rows.append(("seed-only", (), resolve("seed-only"), ", under seed-only", also))
        for profile, overrides, resolved, under, also in rows:
            command = self._command(profile, overrides, before=remove) if can_be_shown else ""
            trial = Trial(
                change=f"each run without files that run 1 left{under}",
                command=command,
                resolved=resolved,
                location=leftovers.copy_without_them,
                objection=objection,
            )
            without = yield trial
            if without.same:
                enter_new = 'cd "$(mktemp -d)" && exec '
                new = replace(
                    trial,
                    change=f"each run in a new folder{under}",
                    command=self._command(
                        profile, overrides, before=enter_new, full=leftovers.in_full
                    ),
                    location=leftovers.new_folder,
                    objection=lambda run: "",
                    runs=1,
                )
                in_new = yield new
                if in_new.same and compare(without.runs[0], in_new.runs[0]).same:
                    command = new.command
                cause = Cause(leftovers.cause + also, PAGES[EXISTING_FILE])
                return Conclusion(cause=cause, command=command, tried=_AGREED)
            if not without.runs:
                return None  # no copy can be made
        return None

    def _of_suspect(self, suspect: Suspect) -> Script:
        """Pin the suspect, and the seed that was computed from it."""
        evidence = self._evidence
        if evidence.differing_seeds or suspect.where in {run.source for run in evidence.sides}:
            # If the source cannot be pinned, the seed that was computed from it is pinned instead.
            for read in (suspect, *evidence.differing_seeds[:1]):
                if read.what in {*PINNED_TOGETHER, EXPLICIT_SEED}:
                    trial = self._pin_alone(read.what, [read])
                    yield replace(trial, explains=self._of_source(suspect.what, [suspect]))
        return None

    def _of_line(self, origin: LineOfOrigin) -> Script:
        """Try changes of the program line where the runs began to differ.

        Other lines are not tried, because they read and computed the same in both runs.
        """
        evidence = self._evidence
        observed: dict[str, list[NondeterministicRead]] = {}
        for read in evidence.suspects:
            if read.what in PINNED_TOGETHER:
                observed.setdefault(read.what, []).append(read)
        cause = cause_of(evidence.suspects[0]) if observed else cause_by_line(origin)
        if row := library_row(origin.called):
            yield from self._of_edits(edits_of(row, origin.where), Conclusion(cause=cause))
        if self._can_be_seeded and HASH in observed:
            yield self._setting("seed-only", (), cause_of(observed[HASH][0]))
        for source, reads in observed.items():
            yield self._pin(source, reads)
        lines = (*origin.path, *origin.within)
        allocates = any(_MAKES_UNINITIALIZED.search(source_line(line)) for line in lines)
        if allocates or self._program.unwritten:
            yield self._pin_alone(UNINITIALIZED_MEMORY)
        of_order = {suspect.where for suspect in self._lines(ADDRESS)}
        reads_order = origin.is_set or not of_order.isdisjoint(origin.path)
        if reads_order:
            yield self._pin(ADDRESS)
        # Code that a recording cannot observe may draw random numbers, or depend on hashes of text.
        is_unobserved = bool(origin.opaque) or origin.called.partition(".")[0] in _DRAWING
        if self._can_be_seeded and (reads_order or is_unobserved):
            yield self._setting("seed-only", ())
        if reads_order and not self._can_be_seeded:
            yield self._pin(HASH)
        if origin.called and not (observed or self._applies_own_profile):
            one_thread = (*self._overrides, "env.OMP_NUM_THREADS=1")
            yield self._setting(self._profile, one_thread, cause)
        if evidence.suspects:
            return (yield from self._of_unpinned())
        threads = [read for read in self._program.reads if read.what == THREADS]
        if threads:
            explains = self._of_source(THREADS, threads[:1])
            yield replace(self._pin(THREADS), explains=explains)
        return Conclusion(cause=cause)

    def _of_sources(self, rows: Iterable[tuple[str, list[NondeterministicRead]]]) -> Script:
        """Pin one source after another. It is known that runs agree if all sources are pinned."""
        for source, reads in rows:
            yield replace(self._pin(source), explains=self._of_reads(source, reads))
        return Conclusion()

    def _of_reads(self, source: str, reads: Sequence[NondeterministicRead]) -> Script:
        """Pin each read of `source` alone, to find the first that makes runs agree."""
        if len(reads) > 1:
            for read in reads[:_LINES]:
                yield self._pin(source, [read])
        return (yield from self._of_source(source, reads))

    def _of_source(self, source: str, reads: Sequence[Suspect]) -> Script:
        """Look for the line and the edit of `source`, which is the cause. `reads` are observed."""
        lines = reads or self._lines(source)
        if source == UNINITIALIZED_MEMORY and not reads and len(lines) > 1:
            for line in lines[:_LINES]:
                trial = self._pin_alone(source, [line])
                yield replace(trial, explains=self._conclusion(source, [], [line]))
        conclusion = self._conclusion(source, reads, lines)
        if source == THREADS or (source == CLOCK and conclusion.edit is None):
            candidates = [*lines, *self._lines(source)] if source == THREADS else ()
            yield from self._of_edits(self._edits(source, candidates), conclusion)
            return replace(conclusion, edit=None)
        return conclusion

    def _of_unpinned(self) -> Script:
        """Name a cause that pinning has not ruled out, and try the edits of that cause."""
        evidence, program = self._evidence, self._program
        if evidence.differing_seeds:
            return Conclusion()
        remaining: list[Suspect] = [
            read for read in evidence.suspects if read.what not in PINNED_TOGETHER
        ]
        seeds = varying_seeds(scan(program.files, program.began), program.reads)
        remaining += [source for _, source in seeds]
        remaining += [read for read in evidence.suspects if read.what == THREADS]
        if not remaining:
            return Conclusion(cause=cause_by_evidence(evidence))
        conclusion, source = Conclusion(cause=cause_of(remaining[0])), remaining[0].what
        if source in (FORKED, THREADS):
            for trial in self._of_edits(self._edits(source, remaining[:1]), conclusion):
                # No run has shown that threads are the cause.
                yield replace(trial, is_checked=source == THREADS)
        return conclusion

    def _of_edits(self, edits: Iterable[Edit], conclusion: Conclusion) -> Iterator[Trial]:
        """Try each edit. The edit with which runs agree is added to `conclusion`."""
        for edit in islice(edits, _LINES):
            yield Trial(
                change=f"{short(edit.where)} edited",
                resolved=self._resolved,
                edit=edit,
                runs=_ENOUGH_PINNED,
                explains=replace(conclusion, edit=edit, tried=_EDIT_AGREED),
            )

    def _of_seeds(self, command: str) -> Script:
        """Look for the reason why `command`, whose runs agree, helps.

        A profile seeds generators and fixes hashes. A trial shows which one helps.
        """
        conclusion = Conclusion(command=command, tried=_AGREED)
        evidence = self._evidence
        is_brought_in = evidence.holds("is_of_program") and not evidence.holds("is_random")
        if not is_brought_in or self._resolved is not None:
            return conclusion
        reads = [read for read in evidence.suspects if read.what == HASH][:1]
        explained = self._conclusion(HASH, reads, reads or self._lines(HASH))
        by_hash = replace(explained, command=command, tried=_AGREED, edit=None)
        yield replace(self._pin_alone(HASH), explains=by_hash)
        sentence = "The program seeds no generator, or not every one that it draws from."
        cause = Cause(sentence, PAGES[UNSEEDED])
        return replace(conclusion, cause=cause)

    # Trials.

    def _setting(
        self, profile: Any, overrides: tuple[str, ...], cause: Cause | None = None
    ) -> Trial:
        """Return the trial of a profile. If no `cause` is known, further trials look for it."""
        command = self._command(profile, overrides)
        resolved, refused = None, ""
        try:
            resolved = resolve(profile, overrides)
        except ProfileError as error:
            refused = str(error)
        known = Conclusion(cause=cause, command=command, tried=_AGREED)
        return Trial(
            change=" ".join([str(profile), *overrides]),
            command=command,
            resolved=resolved,
            refused=refused,
            is_checked=True,
            explains=known if cause else self._of_seeds(command),
        )

    def _pin(self, source: str, reads: Sequence[Suspect] = ()) -> Trial:
        """Return the trial that pins `source` at the lines of `reads`, or everywhere.

        Without a profile, the runs are seeded: `_pin_alone` changes nothing else.
        """
        lines = ["/".join(read.where.split("/")[-2:]) for read in reads]
        pins: dict[str, list[str]] = {source: lines}
        if source == EVERYTHING:
            pins = {pinned: [] for pinned in PINNED_TOGETHER}
        if source == THREADS:
            pins[ADDRESS] = []  # the order of a set of futures depends on their addresses
        at = f" at {short(reads[0].where)}" if reads else ""
        return Trial(
            change=f"{source}{at} pinned",
            resolved=self._base,
            environment=pinning(pins),
            runs=_ENOUGH_PINNED,
            is_checked=True,
            explains=self._of_source(source, reads),
        )

    def _pin_alone(self, source: str, reads: Sequence[Suspect] = ()) -> Trial:
        return replace(self._pin(source, reads), resolved=self._resolved)

    # What trials are made from, and what they explain.

    def _settings(self) -> Iterator[tuple[Any, tuple[str, ...]]]:
        """Yield pairs of a profile and overrides that may make runs agree, the cheapest first."""
        if self._applies_own_profile:
            return
        evidence, base = self._evidence, self._resolved
        if base is None:
            base = resolve("seed-only")
            if not evidence.holds("is_computed"):
                yield "seed-only", ()
        values = flatten(base.values)
        for fix in open_fixes(evidence)[:1]:
            if not fix.is_met_by(None if values.get(fix.key) is None else str(values[fix.key])):
                yield self._profile, (*self._overrides, f"{fix.key}={fix.value}")
        may_be_any = evidence.holds("is_coarse") or evidence.first.kind is Kind.ENDED
        if base.guarantee != "repeatable" and (evidence.holds("is_computed") or may_be_any):
            yield "debug-strict", ()

    def _sources(self) -> dict[str, list[NondeterministicRead]]:
        """Return the sources that may cause the difference, likeliest first, with known reads."""
        by_line: dict[str, dict[str, NondeterministicRead]] = {}
        for read in self._evidence.suspects:
            if read.what in PINNED_TOGETHER:
                by_line.setdefault(read.what, {})[read.where] = read
        for source in (ADDRESS, HASH, UNINITIALIZED_MEMORY):
            by_line.setdefault(source, {})
        return {source: list(reads.values()) for source, reads in by_line.items()}

    def _edits(self, source: str, reads: Sequence[Suspect]) -> Iterator[Edit]:
        """Return the edits of the lines of `reads`, and of other lines."""
        edits = [_edit(read.what, read, is_seed=False) for read in reads]
        steps = min(run.steps for run in self._diverged.between)
        edits += edits_of_other_lines(source, self._program.files, steps)
        return filter(None, dict.fromkeys(edits))

    def _lines(self, source: str) -> Sequence[Suspect]:
        """Return the program lines that seem to read `source`, according to their text."""
        sources = {ADDRESS: (SET_ORDER, ADDRESS), HASH: (SET_ORDER,)}.get(source, (source,))
        program = self._program
        if source == UNINITIALIZED_MEMORY and program.unwritten:
            allocated = program.unwritten[0].allocated
            return [ObservedCall("torch.empty", source, allocated)]
        lines = [line for line in scan(program.files, program.began) if line.what in sources]
        # Sorting a set with a key leaves only members with equal keys in the order of the set. So
        # lines that sort are returned only if no other line reads the order of a set.
        return [line for line in lines if line.name not in TIES] or lines

    def _conclusion(
        self, source: str, reads: Sequence[Suspect], lines: Sequence[Suspect]
    ) -> Conclusion:
        """Return the conclusion that `source` is the cause, with its `lines`.

        `reads` are the lines that were observed to read it. They become the line of origin, unless
        the verdict shows one of them already.
        """
        verdict, evidence = self._verdict, self._evidence
        seeds = evidence.differing_seeds[:1]
        words = source if reads else _WITHOUT_A_CALL.get(source, source)
        shown = verdict.origin.where if verdict.origin else evidence.first.source
        begins = None
        if reads and reads[0].where and shown not in {read.where for read in reads}:
            begins = LineOfOrigin(where=reads[0].where, changed=(), same=())
        cause, edit = Cause(f"{words[:1].upper()}{words[1:]}.", PAGES[words]), None
        if len(lines) == 1:
            cause = cause_of(replace(lines[0], what=words), seeds)
            if source != THREADS:
                edit = _edit(source, lines[0], is_seed=bool(seeds))
        elif lines:
            at = " and ".join(short(line.where) for line in lines[:2])
            cause = cause._replace(sentence=f"{cause.sentence.removesuffix('.')}, at {at}.")
            distinct = {_edit(source, line, is_seed=False) for line in lines}
            edit = distinct.pop() if len(distinct) == 1 else None  # one edit for all lines
        return Conclusion(cause=cause, edit=edit, tried=_PIN_AGREED, begins=begins)

    def _with_line_ignored(self) -> Conclusion | None:
        """If only one line differs, return a command that ignores this line, else None."""
        diverged, advice = self._diverged, self._verdict.advice
        line = relative_location(self._evidence.first.source)
        runner = replace(diverged.runner, ignore=(*diverged.runner.ignore, line))
        if not line or not runner.compare(*diverged.between).same:
            return None
        command = self._command(diverged.request.profile, self._overrides, "--ignore", line)
        edit = advice.edit if advice else None
        return Conclusion(edit=edit, command=command, tried="the same without it")

    def _command(
        self,
        profile: Any,
        overrides: Sequence[str],
        *options: str,
        before: str = "",
        full: Callable[[Sequence[str]], Sequence[str]] = list,
    ) -> str:
        """Return a `verify` command line with the user's criteria. A run starts with `before`."""
        runner, resolved = self._diverged.runner, self._resolved
        secrets = known_secrets(*([resolved] if resolved else []))
        words = shareable(full(runner.command), secrets)
        if before:
            words = ["sh", "-c", f"{before}{shell_line(words)}"]
        level, tolerance = runner.request.level, runner.tolerance or ()
        criteria = ["--level", level] if level != LEVELS[-1] else []
        for option, number in zip(("--rtol", "--atol"), tolerance, strict=False):
            criteria += [option, str(number)]
        for line in runner.ignore:
            criteria += ["--ignore", line]
        named = [str(profile), *overrides] if profile else []
        return shell_line(["torchrepro", "verify", *named, *criteria, *options, "--", *words])


def _edit(source: str, read: Suspect, *, is_seed: bool) -> Edit | None:
    if getattr(read, "in_sample", False):
        return edit_of_sample(read.name, read.where)
    edited_source = SET_ORDER if read.what == SET_ORDER and source != HASH else source
    return edit_of(edited_source, read.name, read.where, is_seed=is_seed)


_QUESTIONS: Mapping[str, tuple[Callable[[Trials], Script], float]] = {
    "cause": (Trials.of_causes, MOST),
    "hash seed": (Trials.of_one_hash_seed, MOST),
    "settings": (Trials.of_stricter_settings, math.inf),
}
"""Question -> the trials that answer it, and the limit of their runs."""


def answer(question: str, diverged: DivergedRuns) -> tuple[Verdict, tuple[ControlledRun, ...]]:
    """Return the verdict with the advice that trials have confirmed, and all trials.

    The question ``cause`` asks for the cause, and the edit or the command that makes runs agree.
    ``hash seed`` asks for a command that fixes it, if runs differ when it alone is perturbed.
    ``settings`` asks for the first repeatable command under ever stricter settings.
    """
    script, most = _QUESTIONS[question]
    return TrialLoop(diverged, most).conclude(script(Trials(diverged)))
