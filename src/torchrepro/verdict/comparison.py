"""Comparison of two recorded runs: are they the same, and if not, where do they diverge first?

Each trace of one run is paired with the trace of the same process in the other run. Each step is
compared in the finest mode that both recordings allow (see `criteria`): record by record (see
`records`), or by digests of losses, gradients and parameters. The verdict names the earliest
difference in any pair of traces. `diagnosis` adds advice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING

from torchrepro.ground.errors import TraceError, some
from torchrepro.trace.format import BY_PROGRAM
from torchrepro.trace.request import LEVELS
from torchrepro.verdict import recordings
from torchrepro.verdict.criteria import (
    ANY_STEP,
    AT_LEVEL,
    FIELDS,
    LOSS,
    NAMES,
    PHASE_OF,
    RERECORD,
    Criteria,
    Mode,
    Pair,
    agreed_before,
    criteria_for,
    mode_of,
)
from torchrepro.verdict.diagnosis import COARSE, advice
from torchrepro.verdict.first_difference import FirstDifference
from torchrepro.verdict.first_line import CAUSED_BY_PROGRAM, Origins
from torchrepro.verdict.reach import draws_outside
from torchrepro.verdict.records import ALONE, INDEPENDENT, PROPAGATED, Records, StepComparison
from torchrepro.verdict.render import are, counted, short
from torchrepro.verdict.resumed_comparison import compare_resumed
from torchrepro.verdict.value import (
    AT_ONE_LEVEL,
    UNKNOWN_PROGRAM,
    Cell,
    Compared,
    Kind,
    Verdict,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torchrepro.trace.format import Site
    from torchrepro.trace.reader import Trace
    from torchrepro.verdict.recordings import Traces
    from torchrepro.verdict.value import Divergence, LineOfOrigin, UninitializedRead


# Divergences that a read of uninitialized memory can cause.
FROM_MEMORY = (Kind.OUTPUTS, Kind.DATA, Kind.INPUT)


def compare(
    run_a: Path | str,
    run_b: Path | str,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    ignore: Sequence[str] = (),
) -> Verdict:
    """Compare two recorded runs bit by bit or, within a tolerance, by statistics of their tensors.

    The `Verdict` states whether the runs are the same and, if not, where they diverge first. If
    both runs were recorded under the guarantee `aligned`, there is a default tolerance. `ignore`
    lists lines of the program as ``file:line``. The records of these lines are ignored, and so are
    differences that only these records cause.

    Raises `TraceError` if a folder contains no trace, if the recordings do not allow this
    comparison, if an ignored line has no record, or if there is nothing to compare.
    """
    refuse_malformed_lines(ignore)
    tolerance = tolerance_of(rtol, atol)
    runs = str(run_a), str(run_b)
    resumed = None
    with recordings.opened_runs(runs) as traces:
        if tolerance is None and not ignore:
            resumed = compare_resumed(runs, *(run.values() for run in traces))
        verdict = resumed or _verdict(runs, traces, tolerance, ignore)
    refuse_unknown_lines(verdict)
    return verdict


def refuse_malformed_lines(ignore: Sequence[str]) -> None:
    """Raise `TraceError` if a text in `ignore` is not ``file:line``."""
    for location in ignore:
        file, _, line = location.rpartition(":")
        if not file or not line.isdecimal():
            legal = "FILE:LINE, as in meters.py:17"
            raise TraceError.about("not a line", key="ignore", found=location, legal=legal)


def refuse_unknown_lines(verdict: Verdict) -> None:
    """Raise `TraceError` if nothing was recorded for a line that the user asked to ignore."""
    for skipped in verdict.left_out:
        if not skipped.records:
            todo = "name the line that computes it"
            near = {"legal": ", ".join(skipped.near)} if skipped.near else {"todo": todo}
            problem = "nothing was recorded for this line"
            raise TraceError.about(problem, key="ignore", found=skipped.where, **near)


def tolerance_of(rtol: float | None, atol: float | None) -> tuple[float, float] | None:
    """Return rtol and atol, or None if neither is set. Raises `TraceError` for an invalid value."""
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not 0 <= value < math.inf:
            raise TraceError.about(
                "not a valid tolerance", key=name, found=str(value), legal="0 or more, and finite"
            )
    return None if rtol is None and atol is None else (rtol or 0.0, atol or 0.0)


def compare_within(
    run_a: Path | str,
    run_b: Path | str,
    tolerance: tuple[float, float] | None,
    ignore: Sequence[str] = (),
    *,
    one_program: bool = False,
) -> Verdict:
    """Compare two runs like `compare`, but do not check arguments or recognize a resumed run."""
    runs = str(run_a), str(run_b)
    with recordings.opened_runs(runs) as traces:
        return _verdict(runs, traces, tolerance, ignore, one_program=one_program)


class PairComparison:
    """Compares two traces. Each step is compared in the finest mode that both recordings allow."""

    def __init__(self, pair: Pair, criteria: Criteria, ignore: Sequence[str]) -> None:
        self.pair, self.tolerance = pair, criteria.tolerance
        within = self.tolerance is not None
        self.modes = {step: mode_of(pair, step, within_tolerance=within) for step in pair.steps}
        in_full = [step for step, mode in self.modes.items() if not mode.fields]
        self.records = Records(pair, criteria, in_full, ignore)
        if not within and (in_full or not self.modes):
            self.records.refuse_unequal_algorithms()
        self.steps: dict[int, StepComparison] = {}
        first: Divergence | None = None
        self.sort = ""  # how the first differing record differs; empty if no record differs
        for number, mode in self.modes.items():
            comparison = StepComparison() if mode.fields else self.records.step(number)
            self.steps[number] = comparison
            if first is not None:
                continue
            if mode is Mode.LOSSES and self.tolerance is not None:
                first = pair.unequal_loss(number, self.tolerance)
            elif mode.fields:
                first = pair.unequal_digest(number, mode.fields)
            elif comparison.first is not None:
                first, self.sort = self.records.describe(comparison.first), comparison.first.sort
            if first is not None and first.kind is Kind.VALUES and first.phase != "forward":
                # Only values at the end of the step differ. A loss is computed before them.
                of_loss = (pair.unequal_digest(at, [LOSS]) for at in (number, ANY_STEP))
                loss = next(filter(None, of_loss), None)
                first, self.sort = (first, self.sort) if loss is None else (loss, "")
        self.unread: Sequence[Site] = ()  # sites whose random numbers differ, but are never used
        if self.sort and first and not within and draws_outside(first.op, first.module):
            first = self._first_that_reaches(first)
        if first is None:
            first = self._besides_records() or recordings.truncation(pair)
            if first is None and not (within or ignore):
                first = pair.unequal_end()
        self.first = first

    def _first_that_reaches(self, first: Divergence) -> Divergence | None:
        """Return the first difference, but skip random numbers that are never used.

        Returns `first` if the use of random numbers is unknown, or None if all are unused.
        """
        reach = self.records.reach
        origin = reach.first()
        if origin is None and False in reach.drawn:
            origin = reach.drawn.index(False)
        metas = [trace.meta for trace in self.pair.traces]
        if origin:
            left, right = reach.origins[origin]
            if left > reach.until:
                return first
            self.sort = INDEPENDENT
            return self.records.describe(FirstDifference(left, right, self.sort, left))
        is_unread = (
            origin is None
            and reach.until == math.inf
            and metas[0].get("left") == metas[1].get("left")
            and not any(meta.get("hidden") for meta in metas)
            and not (self.pair.ended_steps and reaches_a_result(self.pair))
        )
        if not is_unread:
            return first
        self.sort, self.unread = "", [reach.site(left) for left, _ in reach.origins]
        for step in self.steps.values():
            step.tally.clear()
            step.differing.clear()
        return None

    def _besides_records(self) -> Divergence | None:
        pair, records, steps = self.pair, self.records, self.records.steps
        if self.tolerance is not None:
            compared = sum(row.records for step in steps for row in pair.rows(step))
            if compared and records.unmatched >= compared:
                problem = "no op of one run has a counterpart in the other: nothing was compared"
                return pair.at_step(steps[0], Kind.INCOMPARABLE, problem)
            losses = (pair.unequal_loss(step, self.tolerance) for step in (*steps, ANY_STEP))
            return next(filter(None, losses), None)
        if records.incomparable:
            problem = f"{records.incomparable}; {RERECORD}"
            return pair.at_step(steps[0], Kind.INCOMPARABLE, problem)
        fields = {step: mode.fields or FIELDS for step, mode in self.modes.items()}
        fields[ANY_STEP] = min(fields.values(), key=len, default=FIELDS)
        digests = (pair.unequal_digest(step, names) for step, names in fields.items())
        return next(filter(None, digests), None) or pair.unequal_seeded_generator()

    def notes(self) -> Iterator[str]:
        """Yield notes for the user, each a sentence, on the limits of this comparison."""
        if self.unread and self.first is None:
            lines = dict.fromkeys(f"{short(site.source)} ({site.op})" for site in self.unread)
            yield (
                f"random numbers drawn at {some(list(lines))} differ but affect no result: "
                "nothing reads them before they are overwritten"
            )
        if self.records.incomparable:
            yield self.records.incomparable
        unmatched = self.records.unmatched
        if unmatched and not self.records.criteria.needs_partner:
            have = "has" if unmatched == 1 else "have"
            yield (
                f"{counted(unmatched, 'op')} {have} no counterpart in the other run: not compared"
            )
        yield from self.records.thread_notes
        modes = self.modes.values()
        without = sum(mode is Mode.LOSSES for mode in modes)
        if without:
            yield f"{without:,} steps have no statistics of tensors: their losses were compared"
        if set(modes) == {Mode.DIGESTS_OF_UNEQUAL_LEVELS}:
            yield (
                f"recorded at the levels {' and '.join(self.pair.levels)}: compared by the loss "
                "and the parameters of each step, not op by op"
            )

    @property
    def has_anything(self) -> bool:
        """Whether at least one step has records, or a digest in both runs, to be compared."""
        pair = self.pair
        return any(
            any(all(pair.digests(at, name)) for at in (step, ANY_STEP) for name in mode.fields)
            if mode.fields
            else any(row.records for row in pair.rows(step))
            for step, mode in self.modes.items()
        )


def _order(first: Divergence) -> tuple[int, bool, int, int]:
    # Within a step, values that a rank computed come before values that it received. Of the values
    # at the end of a step, losses come before gradients, which are summed over ranks.
    sent = first.phase == "collective" and first.kind is Kind.OUTPUTS
    late = first.kind in (Kind.ENDED, Kind.INCOMPARABLE)
    made = [PHASE_OF[name] for name in FIELDS]
    after = made.index(first.phase) if first.is_at_the_latest and first.phase in made else 0
    return first.step, sent or late, after, first.rank


def _verdict(
    runs: tuple[str, str],
    traces: Sequence[Traces],
    tolerance: tuple[float, float] | None,
    ignore: Sequence[str],
    *,
    one_program: bool = False,
) -> Verdict:
    left, right = traces
    pairs = [
        Pair(left[process], right[process], runs) for process in sorted(left) if process in right
    ]
    criteria = criteria_for(pairs, tolerance, one_program=one_program)
    all_have_steps = all(trace.steps for pair in pairs for trace in pair.traces)
    if pairs and all_have_steps and not any(pair.steps for pair in pairs):
        raise TraceError.about(
            "no step was recorded in both runs",
            found=" and ".join(runs),
            todo="record the same steps of both",
        )
    comparisons = [PairComparison(pair, criteria, ignore) for pair in pairs]
    missing = [*recordings.missing_processes(left, right)]
    diverged = [(_order(pair.first), pair) for pair in comparisons if pair.first is not None]
    earliest = min(diverged, key=itemgetter(0))[1] if diverged else None
    first = earliest.first if earliest else next(iter(missing), None)
    if first is None and not any(comparison.has_anything for comparison in comparisons):
        raise TraceError.about(
            "nothing was recorded that could be compared",
            found=" and ".join(runs),
            todo="record the same steps of both at the level op, in full",
        )
    tally, by_module = _differing(comparisons, earliest)
    modes: dict[int, Mode] = {}  # of each step, the coarsest mode of any process
    for step in sorted({step for comparison in comparisons for step in comparison.modes}):
        of_processes = (comparison.modes.get(step, Mode.OPS) for comparison in comparisons)
        modes[step] = max(of_processes, key=[*Mode].index)
    compared = _compared(comparisons, modes)
    program = UNKNOWN_PROGRAM
    if pairs:
        chosen = earliest.pair if earliest else pairs[0]
        program = recordings.program(chosen, [pair for pair in pairs if pair is not chosen])
    if first is not None and program.name_of(first.module) != first.module:
        first = replace(first, called=program.name_of(first.module))
    shown = [trace for pair in pairs[:1] for trace in pair.traces]
    origin, of_origin = _origin_of(first, runs, shown)
    knows_step = earliest is not None and compared.in_order
    verdict = Verdict(
        same=first is None,
        left=runs[0],
        right=runs[1],
        compared=compared,
        first=first,
        reaches=first is not None
        and (bool(missing) or not pairs or any(map(reaches_a_result, pairs))),
        tolerance=criteria.tolerance,
        propagated=tally[PROPAGATED],
        independent=tally[INDEPENDENT],
        by_module=tuple(by_module.items()),
        map=tuple(_cells(comparisons)),
        losses=recordings.losses(pairs[0]) if pairs else (),
        settings=recordings.settings(pairs[0]) if pairs else (),
        program=program,
        about=tuple(map(recordings.facts, shown)),
        agreed=agreed_before(modes, first.step) if first and knows_step else None,
        not_finite=tuple(map(recordings.not_finite, shown)) or (None, None),
        left_out=tuple(recordings.count_ignored(pairs, location) for location in ignore),
        fed=sum(comparison.records.fed for comparison in comparisons),
        across_ranks=tuple(
            sentence
            for name, run in zip(NAMES, traces, strict=True)
            for sentence in recordings.unequal_replicas(name, list(run.values()))
        ),
        origin=origin,
    )
    verdict = replace(verdict, program=replace(program, unwritten=_unwritten_reads(verdict)))
    of_pairs = [*_notes_of_pairs(comparisons), *(divergence.what for divergence in missing)]
    if tally[ALONE]:
        extra = counted(tally[ALONE], "more op")
        of_pairs.append(f"{extra} {are(tally[ALONE])} in one of the runs only")
    notes = (*_notes_of_runs(verdict, criteria), *of_origin, *dict.fromkeys(of_pairs))
    verdict = replace(verdict, notes=notes)
    return replace(verdict, advice=advice(verdict, next(iter(left.values())).meta))


def _differing(
    comparisons: Sequence[PairComparison], earliest: PairComparison | None
) -> tuple[Counter[str], Counter[str]]:
    """Count differing records by sort (all except the first record), and by module (all)."""
    tally, by_module = Counter[str](), Counter[str]()
    for comparison in comparisons:
        for step in comparison.steps.values():
            tally.update(step.tally)
            by_module.update(step.differing)
    if earliest is not None and tally[earliest.sort]:
        tally[earliest.sort] -= 1  # a first difference of digests is not in the tally
    return tally, by_module


def _origin_of(
    first: Divergence | None, runs: tuple[str, str], shown: Sequence[Trace]
) -> tuple[LineOfOrigin | None, Iterable[str]]:
    """Return the line where the divergence began, or None if unknown, and notes for the user."""
    if first is None or not first.source or first.kind not in CAUSED_BY_PROGRAM:
        return None, ()
    origins = Origins(*runs, first.rank)
    origin = origins.of(first)
    if origin and origin.where == first.source and not origin.is_sure and not origin.called:
        origin = None  # the op and its inputs are more informative
    # A recording that the program starts itself begins too late to follow the lines.
    metas = [trace.meta for trace in shown]
    follows = all(meta.get("detail") and meta.get("recorded_by") != BY_PROGRAM for meta in metas)
    return origin, origins.notes if follows else ()


def _unwritten_reads(verdict: Verdict) -> tuple[UninitializedRead, ...]:
    """Return the reads of uninitialized memory that made a loss NaN, or that are the divergence."""
    first = verdict.first
    at = (first.source, first.op) if first and first.kind in FROM_MEMORY else None
    return tuple(
        read
        for read in verdict.program.unwritten
        if (read.is_nan and any(verdict.not_finite)) or (read.read, read.op) == at
    )


def _notes_of_runs(verdict: Verdict, criteria: Criteria) -> Iterator[str]:
    """Yield notes that apply to all processes: on ignored lines, and limits of the comparison."""
    yield from recordings.loss_sentences(verdict.not_finite, verdict.program.unwritten)
    ignored, first, compared = verdict.left_out, verdict.first, verdict.compared
    if ignored:
        lines = ", ".join(f"{counted(line.records, 'record')} of {line.where}" for line in ignored)
        fed = verdict.fed
        downstream = f" and {fed:,} that differ only because of them" if fed else ""
        yield f"ignored: {lines}{downstream}"
    if ignored and first and first.op in COARSE:
        yield (
            "the ignored lines may be the cause: without --ignore the first differing op is named"
        )
    yield from criteria.notes
    in_full = AT_ONE_LEVEL[compared.level]
    if compared.by and compared.level != LEVELS[0] and in_full not in dict(compared.by):
        yield (
            f"no step was compared {in_full}: a difference that affects no parameter, gradient or "
            "loss (such as in a running mean) goes unnoticed"
        )
    if first and criteria.note_if_different:
        yield criteria.note_if_different


def _notes_of_pairs(comparisons: Sequence[PairComparison]) -> Iterator[str]:
    """Yield the notes on each process, with the rank in front if there are several processes."""
    for comparison in comparisons:
        rank = f"rank {comparison.pair.left.rank}: " if len(comparisons) > 1 else ""
        for note in (*recordings.notes(comparison.pair), *comparison.notes()):
            yield f"{rank}{note}"


def reaches_a_result(pair: Pair) -> bool:
    """Return whether losses, parameters or numbers of steps differ; also True if unknown."""
    ended = [[n for n, row in trace.steps.items() if row.finished] for trace in pair.traces]
    if not ended[0] or ended[0] != ended[1] or any(trace.is_truncated for trace in pair.traces):
        return True
    steps = *pair.steps, ANY_STEP
    losses, parameters = ([pair.digests(at, name) for at in steps] for name in (LOSS, "parameters"))
    return any(a != b for a, b in (*losses, *parameters)) or not any(
        digests[0] for digests in parameters
    )


def _cells(comparisons: Sequence[PairComparison]) -> Iterator[Cell]:
    for number in sorted({number for comparison in comparisons for number in comparison.steps}):
        all_ranks = StepComparison()
        for comparison in comparisons:
            all_ranks.add(comparison.steps.get(number, StepComparison()))
        for module, total in all_ranks.totals.items():
            differing = all_ranks.differing.get(module, 0)
            yield Cell(number, module, total - differing, differing)


def _compared(comparisons: Sequence[PairComparison], modes: Mapping[int, Mode]) -> Compared:
    """Return the extent of the comparison: numbers of ranks, steps, ops and bytes, and modes."""
    pairs = [comparison.pair for comparison in comparisons]
    last = max(modes, default=0)
    ended = {step for pair in pairs for step in pair.ended_steps}
    words = Counter(modes[step].words for step in modes if step in ended)
    compared_steps = [
        (comparison.pair, step, mode)
        for comparison in comparisons
        for step, mode in comparison.modes.items()
    ]
    levels = (level for pair in pairs for level in pair.levels)
    level = min(levels, key=LEVELS.index, default=LEVELS[0])
    return Compared(
        ranks=len({pair.left.rank for pair in pairs}),
        steps=len(ended),
        # Steps at other levels, or without compared records, are not counted.
        ops=sum(
            pair.left.steps[step].records
            for pair, step, mode in compared_steps
            if mode is AT_LEVEL[level]
        ),
        bytes=sum(
            min(row.bytes for row in pair.rows(step))
            for pair, step, mode in compared_steps
            if mode is not Mode.LOSSES and not any(row.dropped for row in pair.rows(step))
        ),
        level=level,
        in_order=all(pair.in_order for pair in pairs),
        after_last=last not in ended
        and any(last in pair.steps and pair.is_after_last(last) for pair in pairs),
        by=tuple((mode.words, words.pop(mode.words)) for mode in Mode if mode.words in words),
    )
