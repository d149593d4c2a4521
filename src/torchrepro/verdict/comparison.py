"""Whether two recorded runs were the same, and where they diverge if not.

The traces of each process are paired. Each step of a pair is compared in the finest mode that both
recordings allow (`criteria`): record by record (`records`), or by digests. The earliest difference
of all pairs is that of the verdict, and `diagnosis` adds advice.
"""

from __future__ import annotations

import gc
import math
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING

from torchrepro.ground.errors import TraceError
from torchrepro.ground.messages import printable, some
from torchrepro.trace.format import BY_PROGRAM, OPTIMIZER_STEP
from torchrepro.trace.reader import Trace, read_run
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
from torchrepro.verdict.diagnosis import COARSE, RESUMED, advice, evidence_of, rule_of
from torchrepro.verdict.first_difference import FirstDifference
from torchrepro.verdict.first_line import BROUGHT_IN, Origins
from torchrepro.verdict.reach import draws_outside
from torchrepro.verdict.records import ALONE, INDEPENDENT, PROPAGATED, Records, StepComparison
from torchrepro.verdict.render import are, counted, short
from torchrepro.verdict.value import (
    AT_ONE_LEVEL,
    UNKNOWN_PROGRAM,
    Advice,
    Cell,
    Compared,
    Kind,
    Verdict,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torchrepro.trace.format import Site
    from torchrepro.verdict.recordings import Traces
    from torchrepro.verdict.value import Divergence


UNWRITTEN = (Kind.OUTPUTS, Kind.DATA, Kind.INPUT)  # how runs diverge that read unwritten memory


def compare(
    run_a: Path | str,
    run_b: Path | str,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    ignore: Sequence[str] = (),
) -> Verdict:
    """Compare two recorded runs, by their bits or, with a tolerance, by statistics of tensors.

    Returns a `Verdict`: the same, or the first divergence. Runs that were both recorded under the
    guarantee `aligned` are compared within its tolerance. What the lines of `ignore` computed, each
    as ``file:line``, is left out, with what differs by that alone. Raises `TraceError` for a folder
    that contains no trace, for recordings that cannot be compared in this way, for a line without a
    record, and if nothing is compared.
    """
    refuse_no_line(ignore)
    tolerance = tolerance_of(rtol, atol)
    runs = str(run_a), str(run_b)
    found = None
    with _opened(runs) as sides:
        if tolerance is None and not ignore:
            found = compare_resumed(runs, *(side.values() for side in sides))
        verdict = found or _verdict(runs, sides, tolerance, ignore)
    refuse_unknown_lines(verdict)
    return verdict


def refuse_no_line(ignore: Sequence[str]) -> None:
    """Raise `TraceError` for a text that names no line of a file."""
    for where in ignore:
        file, _, line = where.rpartition(":")
        if not file or not line.isdecimal():
            legal = "FILE:LINE, as in meters.py:17"
            raise TraceError.about("not a line", key="ignore", found=where, legal=legal)


def refuse_unknown_lines(verdict: Verdict) -> None:
    """Raise `TraceError` if a line was to be left out of which there is no record."""
    for each in verdict.left_out:
        if not each.records:
            todo = "name the line that computes it"
            near = {"legal": ", ".join(each.near)} if each.near else {"todo": todo}
            what = "nothing was recorded of this line"
            raise TraceError.about(what, key="ignore", found=each.where, **near)


def tolerance_of(rtol: float | None, atol: float | None) -> tuple[float, float] | None:
    """Return rtol and atol, None if neither is given. Raises `TraceError` for an illegal one."""
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not 0 <= value < math.inf:
            raise TraceError.about(
                "no tolerance", key=name, found=str(value), legal="0 or more, and finite"
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
    """Compare two runs by the criteria that `criteria_for` chooses."""
    runs = str(run_a), str(run_b)
    with _opened(runs) as sides:
        return _verdict(runs, sides, tolerance, ignore, one_program=one_program)


@contextmanager
def _opened(runs: tuple[str, str]) -> Iterator[Sequence[Traces]]:
    def order(trace: Trace) -> tuple[int, bool, str, str, int]:
        # By names: the order in which the processes of a rank began is an accident.
        name, meta = str(trace.meta.get("process", "")), trace.meta
        program, ordinal = str(meta.get("program", "")), int(meta.get("ordinal", 0))
        return trace.rank, name != "MainProcess", name, program, ordinal

    with ExitStack() as stack:
        if gc.isenabled():  # so many rows would trigger it, and none of them is garbage
            gc.disable()
            stack.callback(gc.enable)
        sides: list[Traces] = []
        for run in runs:
            traces = read_run(run)
            for trace in traces:
                stack.callback(trace.close)
            ranks = groupby(sorted(traces, key=order), key=attrgetter("rank"))
            sides.append({(rank, n): its for rank, group in ranks for n, its in enumerate(group)})
        try:
            yield sides
        except sqlite3.Error as error:
            what = f"has changed since it was opened: {error}"
            raise TraceError.about(what, found=" or ".join(runs)) from None


class PairComparison:
    """Compares two traces, each step in the finest mode that both recordings allow."""

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
        self.sort = ""  # how the first record differs; empty where a digest or an end differs
        for number, mode in self.modes.items():
            found = StepComparison() if mode.fields else self.records.step(number)
            self.steps[number] = found
            if first is not None:
                continue
            if mode is Mode.LOSSES and self.tolerance is not None:
                first = pair.unequal_loss(number, self.tolerance)
            elif mode.fields:
                first = pair.unequal_digest(number, mode.fields)
            elif found.first is not None:
                first, self.sort = self.records.describe(found.first), found.first.sort
            if first is not None and first.kind is Kind.VALUES and first.phase != "forward":
                # It is known by values alone that the step left behind: what led to them says more.
                of_loss = (pair.unequal_digest(at, [LOSS]) for at in (number, ANY_STEP))
                loss = next(filter(None, of_loss), None)
                first, self.sort = (first, self.sort) if loss is None else (loss, "")
        self.unread: Sequence[Site] = ()  # of random numbers that differ, and that nothing reads
        if self.sort and first and not within and draws_outside(first.op, first.module):
            first = self._first_that_reaches(first)
        if first is None:
            first = self._besides_records() or recordings.truncation(pair)
            if first is None and not (within or ignore):
                first = pair.unequal_end()
        self.first = first

    def _first_that_reaches(self, first: Divergence) -> Divergence | None:
        """Return what differs first but for random numbers that nothing reads; None if nothing."""
        reach = self.records.reach
        origin = reach.first()
        if origin is None and False in reach.drawn:
            origin = reach.drawn.index(False)
        metas = [trace.meta for trace in self.pair.traces]
        if origin:
            one, other = reach.origins[origin]
            if one > reach.until:
                return first
            self.sort = INDEPENDENT
            return self.records.describe(FirstDifference(one, other, self.sort, one))
        is_unread = (
            origin is None
            and reach.until == math.inf
            and metas[0].get("left") == metas[1].get("left")
            and not any(meta.get("hidden") for meta in metas)
            and not (self.pair.ended_steps and _reaches(self.pair))
        )
        if not is_unread:
            return first
        self.sort, self.unread = "", [reach.site(one) for one, _ in reach.origins]
        for step in self.steps.values():
            step.tally.clear()
            step.differing = {}
        return None

    def _besides_records(self) -> Divergence | None:
        pair, records, steps = self.pair, self.records, self.records.steps
        if self.tolerance is not None:
            compared = sum(trace.steps[step].records for trace in pair.traces for step in steps)
            if compared and records.unmatched >= compared:
                what = "no op of one run has a counterpart in the other: nothing was compared"
                return pair.at_step(steps[0], Kind.INCOMPARABLE, what)
            found = (pair.unequal_loss(step, self.tolerance) for step in (*steps, ANY_STEP))
            return next(filter(None, found), None)
        if records.incomparable:
            what = f"{records.incomparable}; {RERECORD}"
            return pair.at_step(steps[0], Kind.INCOMPARABLE, what)
        fields = {step: mode.fields or FIELDS for step, mode in self.modes.items()}
        fields[ANY_STEP] = min(fields.values(), key=len, default=FIELDS)
        digests = (pair.unequal_digest(step, its) for step, its in fields.items())
        return next(filter(None, digests), None) or pair.unequal_seeded_generator()

    def notes(self) -> Iterator[str]:
        """Yield what a reader has to know of the comparison."""
        if self.unread and self.first is None:
            lines = dict.fromkeys(f"{short(its.source)} ({its.op})" for its in self.unread)
            yield (
                f"random numbers drawn at {some(list(lines))} differ, and reach no result: "
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
        """Whether both recordings hold anything that could be compared."""
        pair = self.pair
        return any(
            any(all(pair.digests(at, name)) for at in (step, ANY_STEP) for name in mode.fields)
            if mode.fields
            else any(trace.steps[step].records for trace in pair.traces)
            for step, mode in self.modes.items()
        )


def _order(first: Divergence) -> tuple[int, bool, int, int]:
    # Within a step, what a rank computed comes before what it received. Of the values that a step
    # left behind, losses come before gradients, which ranks add up.
    sent = first.phase == "collective" and first.kind is Kind.OUTPUTS
    late = first.kind in (Kind.ENDED, Kind.INCOMPARABLE)
    made = [PHASE_OF[name] for name in FIELDS]
    after = made.index(first.phase) if first.is_at_the_latest and first.phase in made else 0
    return first.step, sent or late, after, first.rank


def _verdict(
    runs: tuple[str, str],
    sides: Sequence[Traces],
    tolerance: tuple[float, float] | None,
    ignore: Sequence[str],
    *,
    one_program: bool = False,
) -> Verdict:
    left, right = sides
    pairs = [Pair(left[each], right[each], runs) for each in sorted(left) if each in right]
    criteria = criteria_for(pairs, tolerance, one_program=one_program)
    all_have_steps = all(trace.steps for pair in pairs for trace in pair.traces)
    if pairs and all_have_steps and not any(pair.steps for pair in pairs):
        raise TraceError.about(
            "no step was recorded in both runs",
            found=" and ".join(runs),
            todo="record the same steps of both",
        )
    found = [PairComparison(pair, criteria, ignore) for pair in pairs]
    missing = [*recordings.missing_processes(left, right)]
    diverged = [(_order(one.first), one) for one in found if one.first is not None]
    earliest = min(diverged, key=itemgetter(0))[1] if diverged else None
    tally, by_module = Counter[str](), Counter[str]()
    for each in (step for one in found for step in one.steps.values()):
        tally.update(each.tally)
        by_module.update(each.differing)
    if earliest is not None and tally[earliest.sort]:
        tally[earliest.sort] -= 1  # the first one; where digests differ, no record is counted
    first = earliest.first if earliest else next(iter(missing), None)
    if first is None and not any(one.has_anything for one in found):
        raise TraceError.about(
            "nothing was recorded that could be compared",
            found=" and ".join(runs),
            todo="record the same steps of both at the level op, in full",
        )
    modes: dict[int, Mode] = {}  # where processes differ in a step, the coarsest
    for step in sorted({step for one in found for step in one.modes}):
        modes[step] = max((one.modes.get(step, Mode.OPS) for one in found), key=[*Mode].index)
    compared = _compared(found, modes)
    uses = UNKNOWN_PROGRAM
    if pairs:
        diverges = earliest.pair if earliest else pairs[0]
        uses = recordings.program(diverges, [pair for pair in pairs if pair is not diverges])
    if first is not None and uses.name_of(first.module) != first.module:
        first = replace(first, called=uses.name_of(first.module))
    shown = [trace for pair in pairs[:1] for trace in pair.traces]
    unfinite = tuple(map(recordings.not_finite, shown)) or (None, None)
    at = (first.source, first.op) if first and first.kind in UNWRITTEN else None
    unwritten = tuple(
        each
        for each in uses.unwritten
        if (each.is_nan and any(unfinite)) or (each.read, each.op) == at
    )
    left_out = tuple(recordings.line_left_out(pairs, where) for where in ignore)
    fed = sum(one.records.fed for one in found)
    said = [*recordings.words_of_not_finite(unfinite, unwritten)]
    if left_out:
        lines = ", ".join(f"{counted(each.records, 'record')} of {each.where}" for each in left_out)
        said.append(f"left out: {lines}{f' and {fed:,} that only they feed' if fed else ''}")
    if left_out and first and first.op in COARSE:
        said.append(
            "what was left out may be why: without --ignore the first op that differs is named"
        )
    said += criteria.notes
    in_full = AT_ONE_LEVEL[compared.level]
    if compared.by and compared.level != LEVELS[0] and in_full not in dict(compared.by):
        said.append(
            f"no step was compared {in_full}: what shows in no parameter, gradient or loss "
            "(such as a running mean) is not seen"
        )
    said += [criteria.note_if_different] if first and criteria.note_if_different else []
    ranks = [f"rank {pair.left.rank}: " if len(pairs) > 1 else "" for pair in pairs]
    of_pairs = [
        f"{rank}{note}"
        for rank, one in zip(ranks, found, strict=True)
        for note in (*recordings.notes(one.pair), *one.notes())
    ]
    of_pairs += [divergence.what for divergence in missing]
    if tally[ALONE]:
        more = counted(tally[ALONE], "more op")
        of_pairs.append(f"{more} {are(tally[ALONE])} in one of the runs only")
    is_known = earliest is not None and compared.in_order
    origin = None
    if first is not None and first.source and first.kind in BROUGHT_IN:
        metas = [trace.meta for trace in shown]
        origins = Origins(*runs, first.rank)
        origin = origins.of(first)
        if origin and origin.where == first.source and not origin.is_sure and not origin.called:
            origin = None  # the op and its inputs tell more of what a model computed
        # A recording that the program makes itself begins too late to follow its lines.
        if all(its.get("detail") and its.get("recorded_by") != BY_PROGRAM for its in metas):
            said += origins.notes
    verdict = Verdict(
        same=first is None,
        left=runs[0],
        right=runs[1],
        compared=compared,
        first=first,
        reaches=first is not None and (bool(missing) or not found or any(map(_reaches, pairs))),
        tolerance=criteria.tolerance,
        propagated=tally[PROPAGATED],
        independent=tally[INDEPENDENT],
        by_module=tuple(by_module.items()),
        map=tuple(_cells(found)),
        losses=recordings.losses(pairs[0]) if pairs else (),
        settings=recordings.settings(pairs[0]) if pairs else (),
        program=replace(uses, unwritten=unwritten),
        about=tuple(map(recordings.facts, shown)),
        agreed=agreed_before(modes, first.step) if first and is_known else None,
        not_finite=unfinite,
        left_out=left_out,
        fed=fed,
        across_ranks=tuple(
            sentence
            for name, side in zip(NAMES, sides, strict=True)
            for sentence in recordings.unequal_replicas(name, list(side.values()))
        ),
        notes=(*said, *dict.fromkeys(of_pairs)),
        origin=origin,
    )
    return replace(verdict, advice=advice(verdict, next(iter(left.values())).meta))


def _reaches(pair: Pair) -> bool:
    ended = [[n for n, row in trace.steps.items() if row.finished] for trace in pair.traces]
    if not ended[0] or ended[0] != ended[1] or any(trace.is_truncated for trace in pair.traces):
        return True
    steps = *pair.steps, ANY_STEP
    losses, parameters = ([pair.digests(at, name) for at in steps] for name in (LOSS, "parameters"))
    return any(a != b for a, b in (*losses, *parameters)) or not any(its[0] for its in parameters)


def _cells(found: Sequence[PairComparison]) -> Iterator[Cell]:
    for number in sorted({number for one in found for number in one.steps}):
        all_ranks = StepComparison()
        for one in found:
            if number in one.steps:
                all_ranks.add(one.steps[number])
        for module, total in all_ranks.totals.items():
            differing = all_ranks.differing.get(module, 0)
            yield Cell(number, module, total - differing, differing)


def _compared(found: Sequence[PairComparison], modes: Mapping[int, Mode]) -> Compared:
    pairs = [one.pair for one in found]
    last = max(modes, default=0)
    ended = {step for pair in pairs for step in pair.ended_steps}
    words = Counter(modes[step].words for step in modes if step in ended)
    each = [(one.pair, step, mode) for one in found for step, mode in one.modes.items()]
    levels = (level for pair in pairs for level in pair.levels)
    level = min(levels, key=LEVELS.index, default=LEVELS[0])
    return Compared(
        ranks=len({pair.left.rank for pair in pairs}),
        steps=len(ended),
        # Records of other steps are not of this level, or were not compared.
        ops=sum(
            pair.left.steps[step].records for pair, step, mode in each if mode is AT_LEVEL[level]
        ),
        bytes=sum(
            min(trace.steps[step].bytes for trace in pair.traces)
            for pair, step, mode in each
            if mode is not Mode.LOSSES
            and not any(trace.steps[step].dropped for trace in pair.traces)
        ),
        level=level,
        in_order=all(pair.in_order for pair in pairs),
        after_last=last not in ended
        and any(last in pair.steps and pair.is_after_last(last) for pair in pairs),
        by=tuple((mode.words, words.pop(mode.words)) for mode in Mode if mode.words in words),
    )


# What comes before a digest, by its phase, besides the phases of `FIELDS` before it.
_LOADING = {"forward": (), "backward": ("data",), "optimizer": ("data", "collective")}
_ALLOCATES = "aten::empty"


def compare_resumed(
    runs: tuple[str, str], whole: Iterable[Trace], resumed: Iterable[Trace]
) -> Verdict | None:
    """Compare a run with one that went on from a checkpoint of it; None where that is not known.

    The parameters before the first step of `resumed` are those after a step of `whole`, with which
    that did not begin itself.
    """
    left, right = _trained(whole), _trained(resumed)
    shifts = {_shift(Pair(*each, runs)) for each in zip(left, right, strict=False)}
    shift = shifts.pop() if len(shifts) == 1 and len(left) == len(right) else None
    # Those that are aligned have a tolerance, and digests have none.
    if shift is None or all(its.meta.get("guarantee") == "aligned" for its in (*left, *right)):
        return None
    found, pair = _compared_from(runs, left, right, shift)
    found = replace(
        found,
        settings=tuple(each for each in recordings.settings(pair) if each.name != RESUMED),
        about=tuple(map(recordings.facts, pair.traces)),
        notes=(f"B goes on from A: its step 0 is step {shift} of A",),
    )
    likely = advice(found, pair.left.meta)
    if found.first is None or likely is None:
        return found
    evidence = evidence_of(found, pair.left.meta)
    rule, op = rule_of(evidence), found.first.op
    is_known = found.first.kind is Kind.ENDED or evidence.holds("is_other_program")
    if not (is_known or rule.kernel or op.endswith(OPTIMIZER_STEP)):
        likely = Advice(cause=_not_restored(pair, found.first))
    return replace(found, advice=replace(likely, closer=""))


def _shift(pair: Pair) -> int | None:
    whole, resumed = pair.traces
    befores = zip(whole.meta.get("before") or (), resumed.meta.get("before") or (), strict=False)
    restored = {its for began, its in befores if its != began}
    if not restored or not pair.in_order:
        return None
    after: dict[str, int] = {}
    for number, row in whole.steps.items():
        if row.finished:
            after.setdefault(row.parameters.hex(), number)
    if not restored <= after.keys():
        return None
    following = whole.steps.get(max(after[its] for its in restored) + 1)
    return following.step - min(resumed.steps) if following and following.finished else None


def _not_restored(pair: Pair, first: Divergence) -> str:
    left = pair.left.steps
    before = left[first.step - 1].random if first.step - 1 in left else {}
    drew = [
        name
        for name in pair.unequal_generators(first.step)
        if left[first.step].random[name] != before.get(name)
    ]
    if first.phase == "optimizer":
        what = "the state of the optimizer, which made another step of equal gradients"
    elif drew:
        names = ", ".join(drew)
        what = f"random generators ({names}), whose states differ after step {first.step}"
    elif first.phase == "data":
        what = "the place in the data"
    else:
        what = "the place in the data, a buffer, or what else the program keeps"
    return f"The parameters were restored, and likely not: {what}."


def compare_from(whole: str, resumed: str, shift: int, losses: int = 0) -> Verdict:
    """Compare the steps of `resumed` with those of `whole`, whose step `shift` is its first.

    Of that step it has the rest: `losses` of it came before.

    They are compared by losses, gradients and parameters: what a program does to begin, and what it
    logs, may differ. The first op is named that computed something else, where it is known.
    """
    runs = whole, resumed
    with _opened(runs) as sides:
        left, right = (_trained(side.values()) for side in sides)
        return _compared_from(runs, left, right, shift, losses)[0]


def _compared_from(
    runs: tuple[str, str],
    whole: Iterable[Trace],
    resumed: Iterable[Trace],
    shift: int,
    losses: int = 0,
) -> tuple[Verdict, Pair]:
    pairs = []
    for left, right in zip(whole, resumed, strict=False):
        # From here on its steps are numbered as those of the run that it goes on.
        right.steps = {n + shift: replace(row, step=n + shift) for n, row in right.steps.items()}
        right.losses = [replace(loss, step=loss.step + shift) for loss in right.losses]
        its = [number for number, loss in enumerate(left.losses) if loss.step == shift]
        before = {*its[:losses]}
        left.losses = [loss for n, loss in enumerate(left.losses) if n not in before]
        pairs.append(Pair(left, right, runs))
    found = [(first, pair) for pair in pairs if (first := _first_from(pair, losses)) is not None]
    first, pair = min(
        found, key=lambda each: (each[0].step, each[0].rank), default=(None, pairs[0])
    )
    steps = [
        step for step in pairs[0].steps if any(all(pairs[0].digests(step, name)) for name in FIELDS)
    ]
    compared = Compared(
        ranks=len(pairs),
        steps=len(steps),
        ops=0,
        bytes=sum(pairs[0].right.steps[step].bytes for step in steps),
        level=pairs[0].levels[1],
        by=((AT_ONE_LEVEL["step"], len(steps)),),
    )
    uses = recordings.program(pair, [each for each in pairs if each is not pair])
    same = first is None and bool(steps)
    return Verdict(same, *runs, compared, first, losses=recordings.losses(pair), program=uses), pair


def _trained(traces: Iterable[Trace]) -> Sequence[Trace]:
    """Return the trace of the process of each rank that made most steps."""
    by_rank = groupby(traces, key=attrgetter("rank"))
    return [max(its, key=attrgetter("ended_steps")) for _, its in by_rank]


def _first_from(pair: Pair, losses_before: int) -> Divergence | None:
    for step in pair.steps:  # of one that has not ended, what led to it
        first = pair.unequal_digest(step, FIELDS)
        if first is not None:
            is_whole = step != pair.steps[0] or not losses_before
            return (_first_op(pair, step, first.phase) if is_whole else None) or first
    left, right = (
        max(
            (number for number, row in trace.steps.items() if row.finished),
            default=min(trace.steps, default=0) - 1,
        )
        for trace in pair.traces
    )
    cut = [recordings.CUT if trace.is_truncated else "" for trace in pair.traces]
    if left != right or any(cut):
        what = (
            f"the whole run ends after step {left}{cut[0]}, "
            f"the resumed one after step {right}{cut[1]}"
        )
        return pair.at_step(min(left, right) + 1, Kind.ENDED, what)
    # What both hold as they end whose value is not there in the resumed run: names count optimizers
    # and models as they come, which is from another step on there.
    mine, theirs = (trace.meta.get("end") or {} for trace in pair.traces)
    for kind in ("optimizers", "buffers"):
        its = theirs.get(kind) or {}
        for name, held in (mine.get(kind) or {}).items():
            if name in its and held not in its.values():
                what = f"not the same when the runs end: {printable(name)}"
                return pair.at_step(pair.steps[-1], Kind.VALUES, what)
    return None


def _first_op(pair: Pair, step: int, phase: str) -> Divergence | None:
    """Return the first op of a step that differs, if it is known: what came before `phase` agrees.

    What one run alone has is how it begins, or what it logs, and what allocates holds no value.
    """
    if any(trace.steps[step].level in COARSE for trace in pair.traces):
        return None
    phases = [PHASE_OF[name] for name in FIELDS]
    agree = (*phases[: phases.index(phase)], *_LOADING[phase])
    records = Records(pair, Criteria(needs_partner=False), [step])
    for reader in records.readers:
        for number, site in reader.trace.sites.items():
            if site.phase in agree or site.op.startswith(_ALLOCATES):
                reader.sites["compared"][number] = False
    found = records.step(step).first
    return None if found is None else records.describe(found)
