"""When runs and their records count as the same: by bits, or by statistics within a tolerance."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import compress, count
from operator import and_, eq, ne, or_
from typing import TYPE_CHECKING, TypeAlias

from torchrepro.errors import TraceError
from torchrepro.messages import Problem
from torchrepro.verdict.columns import ALONE, INDEPENDENT, NAMES, PROPAGATED, is_unset_in_part
from torchrepro.verdict.first_difference import (
    MADE_OUTSIDE,
    Explanation,
    FirstDifference,
    RecordView,
    describe,
    divergence,
)
from torchrepro.verdict.recordings import (
    FIELDS,
    Digests,
    at_step,
    unequal_losses,
)
from torchrepro.verdict.render import counted
from torchrepro.verdict.value import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torchrepro.trace.format import Loss
    from torchrepro.trace.reader import Trace
    from torchrepro.verdict.alignment import MatchedRecords, Names
    from torchrepro.verdict.columns import Columns, Pair
    from torchrepro.verdict.value import Divergence


RERECORD = (
    "record both again with --statistics, or under a profile whose guarantee is aligned, "
    "and compare them with --rtol and --atol"
)

ALIGNED = (1e-3, 1e-5)
"""The rtol and atol of the guarantee `aligned`, unless others are given.

A thousandth is ten thousand times the rounding of float32. Another order of summation stays within
it through many steps; another random number, a skipped op or a lost sample does not. bfloat16
rounds by 0.004 and needs ``rtol`` 0.016: https://docs.pytorch.org/docs/stable/testing.html.
``atol``, for values near zero, is what the same page has for float32.
"""

Statistics = tuple[int, float | None, float | None, float | None, float | None]
"""Count, mean, norm, low and high of an output."""


@dataclass(frozen=True, slots=True)
class Criteria:
    """What it takes for two runs to count as the same."""

    tolerance: tuple[float, float] | None = None
    """rtol and atol, where statistics are compared and not bits."""
    one_program: bool = False
    """Whether each op of one run must have a counterpart in the other."""
    notes: tuple[str, ...] = ()
    """Why these criteria were chosen, where nobody named them."""
    note_if_different: str = ""
    """What else is to be said if the runs differ."""


def criteria_for(
    pairs: Sequence[Pair], given: tuple[float, float] | None, *, one_program: bool = False
) -> Criteria:
    """Return the criteria for the traces of two runs; `given` are rtol and atol.

    Without them the criterion is the same bits, unless both runs were recorded under the guarantee
    `aligned`, which has a tolerance of its own. Equal bits are within any tolerance, so bits are
    compared where the recordings have no statistics in common. `one_program` says that both runs
    are of one command on one machine.
    """
    notes: tuple[str, ...] = ()
    if given is None and pairs and all(_is_aligned(pair) for pair in pairs):
        given = ALIGNED
        notes = (
            "the tolerance is that of the guarantee `aligned`, under which both were recorded",
        )
    if given is None:
        return Criteria()
    obstacle = next(filter(None, map(_lacks_statistics, pairs)), "")
    if obstacle:
        within = f"whether they agree within rtol={given[0]:g}, atol={given[1]:g} cannot be told"
        return Criteria(note_if_different=f"{within}: {obstacle}")
    return Criteria(given, one_program, notes)


def levels(pair: Pair) -> tuple[str, str]:
    """Return the levels of detail at which two traces were recorded."""
    left, right = (str(trace.meta.get("level", "op")) for trace in pair.traces)
    return left, right


def _is_aligned(pair: Pair) -> bool:
    return all(trace.meta.get("guarantee") == "aligned" for trace in pair.traces)


def _lacks_statistics(pair: Pair) -> str:
    """Return why there are no statistics to compare, and what to record; else nothing."""
    left, right = levels(pair)
    if left != right:
        return (
            f"the levels {left} and {right} have no statistics in common; record both at one level"
        )
    if left != "op":
        return f"the level {left} has no statistics of tensors; record both at the level op"
    lacking = [
        name
        for name, trace in zip(NAMES, pair.traces, strict=True)
        if not trace.meta.get("statistics")
    ]
    if not lacking:
        return ""
    have = "has" if len(lacking) == 1 else "have"
    return f"{' and '.join(lacking)} {have} no statistics of tensors; {RERECORD}"


@dataclass(slots=True)
class Bits:
    """Records are the same if their fingerprints are."""

    pair: Pair
    incomparable: int = 0
    """Pairs whose fingerprints were not taken in the same way."""
    needs_partner: bool = True
    """Whether a record that only one run has is a difference."""
    rounds: Sequence[Names] = (
        ("keys", "arguments", "shapes", "inputs", "outputs"),
        ("keys", "arguments", "shapes", "inputs"),
        ("keys", "arguments", "shapes"),
        ("keys",),
    )
    """The columns by which records are matched, from the finest round to the coarsest."""

    def unequal(self, left: Columns, right: Columns, matched: MatchedRecords) -> list[bool]:
        """Return for each pair whether outputs, their shapes or the arguments differ."""
        one, other = matched.column("outputs", left, right)
        found = list(map(ne, one, other))
        if self.pair.misses_steps and any(found):
            known = (
                not (is_unset_in_part(a) or is_unset_in_part(b))
                for a, b in zip(one, other, strict=True)
            )
            found = list(map(and_, found, known))
        one, other = matched.column("algorithms", left, right)
        if one != other:
            found = list(map(and_, found, map(eq, one, other)))
            self.incomparable += sum(map(ne, one, other))
        for name in ("arguments", "shapes"):
            one, other = matched.column(name, left, right)
            if one != other:
                found = list(map(or_, found, map(ne, one, other)))
        return found

    def describe(self, difference: FirstDifference) -> Divergence:
        """Return what the first difference is, and where it came from."""
        return describe(self.pair, difference)

    def besides_records(self) -> Divergence | None:
        """Return in what the steps differ although no record does."""
        if not self.incomparable:
            return Digests(self.pair, FIELDS).besides_records()
        what = f"{self._incomparable()}; {RERECORD}"
        return at_step(self.pair, self.pair.steps[0], Kind.INCOMPARABLE, what)

    def notes(self) -> list[str]:
        """Return what could not be compared."""
        return [self._incomparable()] if self.incomparable else []

    def _incomparable(self) -> str:
        return (
            f"{counted(self.incomparable, 'op')} ran on another kind of device in the other run, "
            "where fingerprints are taken in another way: no outputs of such an op were compared"
        )


@dataclass(slots=True)
class Tolerance:
    """Records are the same if the statistics of their outputs are within a tolerance.

    If every element of a tensor is within ``atol + rtol * |right|``, so is each of these
    statistics. A statistic out of tolerance therefore proves that elements are out of it too.
    """

    pair: Pair
    rtol: float
    atol: float
    needs_partner: bool = False
    """False across devices and precisions, each of which may have ops of its own."""
    found: dict[int, str] = field(default_factory=dict)
    """In what the first record of each part is out of tolerance, by the left record's id."""
    unmatched: int = 0
    rounds: Sequence[Names] = (
        ("keys", "arguments", "sizes"),
        ("keys", "sizes"),
        ("keys",),
        ("spots", "sizes"),  # devices have ops of their own for the same module
    )

    def unequal(self, left: Columns, right: Columns, matched: MatchedRecords) -> list[bool]:
        """Return for each pair whether statistics of its outputs are out of tolerance."""
        self.unmatched += len(matched.only_left) + len(matched.only_right)
        one, other = _statistics(self.pair.left, left), _statistics(self.pair.right, right)
        found = {
            place: self._excess(one.get(left.ids[place], []), other.get(right.ids[partner], []))
            for place, partner, unequal in zip(
                matched.left,
                matched.right,
                map(ne, *matched.column("outputs", left, right)),
                strict=True,
            )
            if unequal
        }
        first = next((place for place, what in found.items() if what), None)
        if first is not None:
            self.found[left.ids[first]] = found[first]
        return [bool(found.get(place)) for place in matched.left]

    def describe(self, difference: FirstDifference) -> Divergence:
        """Return which statistic is out of tolerance first."""
        if difference.left is None or difference.right is None:
            return describe(self.pair, difference)
        left = RecordView.read(self.pair.left, difference.left)
        right = RecordView.read(self.pair.right, difference.right)
        kind = Kind.DATA if left.site.op in MADE_OUTSIDE else Kind.OUTPUTS
        found = Explanation(kind, self.found[difference.left])
        return divergence(self.pair, left, right, found)

    def besides_records(self) -> Divergence | None:
        """Return a loss that is out of tolerance, or that no op at all was compared."""
        steps = self.pair.steps
        records = sum(trace.steps[step].records for trace in self.pair.traces for step in steps)
        if records and self.unmatched >= records:
            what = "no op of one run has a counterpart in the other: nothing was compared"
            return at_step(self.pair, steps[0], Kind.INCOMPARABLE, what)
        return next(filter(None, map(self.unequal_losses, steps)), None)

    def unequal_losses(self, step: int) -> Divergence | None:
        """Return a loss of a step that is out of tolerance."""
        what = unequal_losses(self.pair, step, self._differ)
        if not what:
            return None
        return at_step(self.pair, step, Kind.VALUES, what, "forward", "loss")

    def _differ(self, left: Loss, right: Loss) -> bool:
        most = self.atol + self.rtol * abs(right.value or 0.0)
        return not _near(left.value, right.value, most)

    def notes(self) -> list[str]:
        """Return what could not be compared."""
        if not self.unmatched or self.needs_partner:
            return []
        have = "has" if self.unmatched == 1 else "have"
        ops = counted(self.unmatched, "op")
        return [f"{ops} {have} no counterpart in the other run: not compared"]

    def _excess(self, left: Sequence[Statistics], right: Sequence[Statistics]) -> str:
        """Return in words what is out of tolerance; nothing if all outputs are within it."""
        if len(left) != len(right):
            return f"statistics of {counted(len(left), 'output')} and of {len(right)}"
        if not left:
            return "they differ, and no statistics of them were recorded"
        for place, (one, other) in enumerate(zip(left, right, strict=True)):
            what = out_of_tolerance(one, other, self.rtol, self.atol)
            if what:
                return f"output {place}: {what}"
        return ""


def out_of_tolerance(left: Statistics, right: Statistics, rtol: float, atol: float) -> str:
    """Return which statistic shows that elements are out of tolerance, if one does.

    With elements within ``atol + rtol * |right|``, means are at most ``atol + rtol * rms`` apart,
    rms likewise (Minkowski), and extremes at most ``atol + rtol * max|right|``. The bound of the
    mean is relative to the rms because values around zero cancel in the mean.
    """
    if left[0] != right[0]:
        return f"{left[0]} and {right[0]} numbers besides NaN"
    rms = [_rms(one) for one in (left, right)]
    sizes = [abs(value) for value in right[3:] if value is not None and math.isfinite(value)]
    largest = max(sizes, default=0.0)
    rows: tuple[tuple[str, float | None, float | None, float | None], ...] = (
        ("mean", left[1], right[1], rms[1]),
        ("root mean square", rms[0], rms[1], rms[1]),
        ("lowest", left[3], right[3], largest),
        ("highest", left[4], right[4], largest),
    )
    for name, one, other, scale in rows:
        if not _near(one, other, atol + rtol * (scale or 0.0)):
            return f"{name} {_shown(one)} and {_shown(other)}"
    return ""


def refuse_unequal_algorithms(used: tuple[frozenset[str], frozenset[str]]) -> None:
    """Raise `TraceError` if the bits of two runs cannot be compared at all."""
    if used[0] and used[1] and used[0] != used[1]:
        raise TraceError(
            Problem(
                "the two runs computed on other kinds of device, whose fingerprints differ",
                found=" and ".join(", ".join(sorted(names)) for names in used),
                todo=RERECORD,
            )
        )


def _statistics(trace: Trace, columns: Columns) -> dict[int, list[Statistics]]:
    found: dict[int, list[Statistics]] = {}
    if columns.ids:
        records = range(min(columns.ids), max(columns.ids) + 1)
        for record, *row in trace.statistics_of(records):
            found.setdefault(record, []).append(tuple(row))
    return found


def _rms(statistics: Statistics) -> float | None:
    count, _, norm, *_ = statistics
    return None if norm is None or not count else norm / math.sqrt(count)


def _near(left: float | None, right: float | None, most: float) -> bool:
    if left is None or right is None or left == right:  # SQLite has no NaN: it is None as well
        return left is right or left == right
    return math.isfinite(left) and math.isfinite(right) and abs(left - right) <= most


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


Judge: TypeAlias = "Bits | Tolerance"
"""Decides which records are the same."""

FEW = 16
"""Records before the first difference that read something else: they may show its origin."""


@dataclass(frozen=True, slots=True)
class Differences:
    """The records of a step that differ."""

    left: Columns
    right: Columns
    matched: MatchedRecords
    differs: Sequence[bool]
    """Whether a pair differs, in the order of the left run."""
    inputs_differ: Sequence[bool]
    """Whether a pair read something else."""
    only_left: Sequence[int]
    only_right: Sequence[int]
    """Places without the partner that they should have."""

    @classmethod
    def of(
        cls, judge: Judge, left: Columns, right: Columns, matched: MatchedRecords
    ) -> Differences:
        """Return what differs in two parts whose records are matched."""
        lone = (matched.only_left, matched.only_right) if judge.needs_partner else ((), ())
        differs = judge.unequal(left, right, matched)
        inputs_differ = list(map(ne, *matched.column("inputs", left, right)))
        return cls(left, right, matched, differs, inputs_differ, *lone)

    def tally(self) -> Counter[str]:
        """Return how many records differ, by how they differ."""
        total, propagated = sum(self.differs), sum(map(and_, self.differs, self.dependent()))
        return Counter(
            {
                PROPAGATED: propagated,
                INDEPENDENT: total - propagated,
                ALONE: len(self.only_left) + len(self.only_right),
            }
        )

    def modules(self) -> tuple[Counter[str], Counter[str]]:
        """Return the records of each module, and how many of them differ."""
        names, _ = self.matched.column("modules", self.left, self.right)
        alone = Counter(
            [self.left.structure.modules[place] for place in self.only_left]
            + [self.right.structure.modules[place] for place in self.only_right]
        )
        totals, differing = Counter(names), Counter(compress(names, self.differs))
        totals.update(alone)
        differing.update(alone)
        return totals, differing

    def first(self) -> tuple[str, FirstDifference] | None:
        """Return the sort of the first difference, and its records."""
        pair = next(compress(count(), self.differs), None)
        ends = len(self.left) + 1.0
        places = (
            ends if pair is None else float(self.matched.left[pair]),
            float(self.only_left[0]) if self.only_left else ends,
            self._place_of_right() if self.only_right else ends,
        )
        earliest = min(places)
        if earliest == ends:
            return None
        if pair is not None and places[0] == earliest:
            sort = PROPAGATED if self.dependent()[pair] else INDEPENDENT
            return sort, self._first_pair(pair)
        replaced = places[1] <= earliest + 0.5
        return ALONE, self._only_left() if replaced else self._only_right()

    def dependent(self) -> Sequence[bool]:
        """Return for each pair whether it can only pass a difference on."""
        effects, _ = self.matched.column("effects", self.left, self.right)
        return list(map(or_, self.inputs_differ, effects)) if any(effects) else self.inputs_differ

    def _first_pair(self, pair: int) -> FirstDifference:
        here, there = self.left.ids, self.right.ids
        pairs = list(zip(self.matched.left[:pair], self.matched.right[:pair], strict=True))
        read = list(compress(pairs, self.inputs_differ[:pair]))[-FEW:]
        return FirstDifference(
            here[self.matched.left[pair]],
            there[self.matched.right[pair]],
            read=[(here[one], there[other]) for one, other in read],
        )

    def _place_of_right(self) -> float:
        """Return where in the left run the first record that only the right run has would be."""
        place = self.only_right[0]
        before = [left for left, right in self._kept_in_order() if right < place]
        return 0.5 + (before[-1] if before else -1)

    def _kept_in_order(self) -> Iterator[tuple[int, int]]:
        """Yield the pairs that are in the same order in both runs.

        One that moved says nothing about the place of its neighbours.
        """
        moved = self.matched.moved
        for left, right in zip(self.matched.left, self.matched.right, strict=True):
            if left not in moved:
                yield left, right

    def _only_left(self) -> FirstDifference:
        place = self.only_left[0]
        before = [right for left, right in self._kept_in_order() if left < place]
        after = before[-1] + 1 if before else 0
        return FirstDifference(self.left.ids[place], None, _at(self.right.ids, after))

    def _only_right(self) -> FirstDifference:
        after = int(self._place_of_right() + 0.5)
        return FirstDifference(None, self.right.ids[self.only_right[0]], _at(self.left.ids, after))


def _at(ids: Sequence[int], place: int) -> int | None:
    return ids[place] if place < len(ids) else None
