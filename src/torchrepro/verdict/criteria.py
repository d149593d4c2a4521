"""When two records are the same, by bits or nearly, and which difference is the first."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from itertools import compress, count
from operator import and_, eq, ne, or_
from typing import TYPE_CHECKING, Any, Protocol

from torchrepro.errors import TraceError
from torchrepro.messages import Problem
from torchrepro.verdict.columns import ALONE, INDEPENDENT, PROPAGATED
from torchrepro.verdict.first_difference import FirstDifference, described, divergence
from torchrepro.verdict.step_digests import FIELDS, Digests, at_step
from torchrepro.verdict.tensor_diff import seen
from torchrepro.verdict.value import Kind
from torchrepro.verdict.wording import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrepro.trace.reader import Trace
    from torchrepro.verdict.alignment import MatchedRecords, Names
    from torchrepro.verdict.columns import Columns, Pair
    from torchrepro.verdict.value import Divergence


RERECORD = (
    "record both again with --statistics, or under a profile whose guarantee is aligned, "
    "and compare them with --rtol and --atol"
)

Statistics = tuple[int, float | None, float | None, float | None, float | None]
"""Count, mean, norm, low and high of an output."""


class Judge(Protocol):
    """Decides which records are the same."""

    rounds: Sequence[Names]
    """By which columns records are matched, from the finest to the coarsest."""
    needs_partner: bool
    """Whether a record that only one run has is a difference."""

    def differing(self, left: Columns, right: Columns, matched: MatchedRecords) -> list[bool]:
        """Say of each pair whether it differs."""

    def described(self, parting: FirstDifference) -> Divergence:
        """Return what the first difference is."""

    def otherwise(self) -> Divergence | None:
        """Return what differs although no record does."""

    def notes(self) -> list[str]:
        """Return what a reader has to know of how records were judged."""


def picked(column: Sequence[Any], places: Sequence[int]) -> Sequence[Any]:
    """Return the values of a column at some places."""
    return column if isinstance(places, range) else list(map(column.__getitem__, places))


def both(
    name: str, left: Columns, right: Columns, matched: MatchedRecords
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return a column of both runs, matched."""
    return picked(left.column(name), matched.left), picked(right.column(name), matched.right)


@dataclass(slots=True)
class Bits:
    """Records are the same if their fingerprints are."""

    pair: Pair
    incomparable: int = 0
    """Pairs whose fingerprints were not taken in the same way."""
    rounds: Sequence[Names] = (
        ("keys", "arguments", "shapes", "inputs", "outputs"),
        ("keys", "arguments", "shapes", "inputs"),
        ("keys", "arguments", "shapes"),
        ("keys",),
    )
    needs_partner: bool = True

    def differing(self, left: Columns, right: Columns, matched: MatchedRecords) -> list[bool]:
        """Say of each pair whether outputs, their shapes or the arguments differ."""
        found = list(map(ne, *both("outputs", left, right, matched)))
        one, other = both("algorithms", left, right, matched)
        if one != other:
            found = list(map(and_, found, map(eq, one, other)))
            self.incomparable += sum(map(ne, one, other))
        for name in ("arguments", "shapes"):
            one, other = both(name, left, right, matched)
            if one != other:
                found = list(map(or_, found, map(ne, one, other)))
        return found

    def described(self, parting: FirstDifference) -> Divergence:
        """Return what the first difference is, and where it came from."""
        return described(self.pair, parting)

    def otherwise(self) -> Divergence | None:
        """Return what the steps as a whole differ in: something that no op computed."""
        if not self.incomparable:
            return Digests(self.pair, FIELDS).otherwise()
        what = f"{self._incomparable()}; {RERECORD}"
        return at_step(self.pair, self.pair.steps[0], Kind.INCOMPARABLE, what)

    def notes(self) -> list[str]:
        """Say what could not be compared."""
        return [self._incomparable()] if self.incomparable else []

    def _incomparable(self) -> str:
        return (
            f"{counted(self.incomparable, 'op')} ran on another kind of device in the other run, "
            "where fingerprints are taken in another way: no outputs of such an op were compared"
        )


@dataclass(slots=True)
class Tolerance:
    """Records are the same if the statistics of their outputs are nearly so.

    If every element of a tensor is within ``atol + rtol * |right|``, so is every statistic that
    is looked at: what is out of tolerance here has elements that are.
    """

    pair: Pair
    rtol: float
    atol: float
    needs_partner: bool = False
    """Devices and precisions have ops of their own, one program on one machine has not."""
    worst: dict[int, str] = field(default_factory=dict)
    """What the first record of each part that differs is out of, by the left record's id."""
    unmatched: int = 0
    rounds: Sequence[Names] = (
        ("keys", "arguments", "sizes"),
        ("keys", "sizes"),
        ("keys",),
        ("spots", "sizes"),  # devices have ops of their own for the same module
    )

    def differing(self, left: Columns, right: Columns, matched: MatchedRecords) -> list[bool]:
        """Say of each pair whether statistics of its outputs are too far apart."""
        self.unmatched += len(matched.only_left) + len(matched.only_right)
        one, other = _statistics(self.pair.left, left), _statistics(self.pair.right, right)
        found = {
            place: self._apart(one.get(left.ids[place], []), other.get(right.ids[partner], []))
            for place, partner, unequal in zip(
                matched.left,
                matched.right,
                map(ne, *both("outputs", left, right, matched)),
                strict=True,
            )
            if unequal
        }
        first = next((place for place, what in found.items() if what), None)
        if first is not None:
            self.worst[left.ids[first]] = found[first]
        return [bool(found.get(place)) for place in matched.left]

    def described(self, parting: FirstDifference) -> Divergence:
        """Return which statistic is out of tolerance first."""
        if parting.left is None or parting.right is None:
            return described(self.pair, parting)
        left, right = seen(self.pair.left, parting.left), seen(self.pair.right, parting.right)
        kind = Kind.DATA if left.site.op == "DataLoader" else Kind.OUTPUTS
        return divergence(self.pair, left, right, kind, self.worst[parting.left])

    def otherwise(self) -> Divergence | None:
        """Return a loss that is out of tolerance, or that no op at all was compared."""
        steps = self.pair.steps
        records = sum(trace.steps[step].records for trace in self.pair.traces for step in steps)
        if records and self.unmatched >= records:
            what = "no op of one run has a counterpart in the other: nothing was compared"
            return at_step(self.pair, steps[0], Kind.INCOMPARABLE, what)
        return next(filter(None, map(self._losses_apart, steps)), None)

    def _losses_apart(self, step: int) -> Divergence | None:
        left, right = (
            [loss.value for loss in trace.losses if loss.step == step] for trace in self.pair.traces
        )
        if len(left) != len(right):
            what = f"{counted(len(left), 'loss')} and {len(right)}"
        elif any(
            not _near(one, other, self.atol + self.rtol * abs(other or 0.0))
            for one, other in zip(left, right, strict=True)
        ):
            what = f"{' '.join(map(_shown, left))} and {' '.join(map(_shown, right))}"
        else:
            return None
        return at_step(self.pair, step, Kind.OUTPUTS, what, "forward", "loss")

    def notes(self) -> list[str]:
        """Say what could not be compared."""
        if not self.unmatched or self.needs_partner:
            return []
        have = "has" if self.unmatched == 1 else "have"
        ops = counted(self.unmatched, "op")
        return [f"{ops} {have} no counterpart in the other run: not compared"]

    def _apart(self, left: Sequence[Statistics], right: Sequence[Statistics]) -> str:
        """Return what of some outputs is out of tolerance, in words; nothing if all are within."""
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
    """Return which statistic shows that elements are further apart than they may be.

    With elements within ``atol + rtol * |right|``, means are at most ``atol + rtol * rms`` apart,
    rms likewise (Minkowski), and extremes at most ``atol + rtol * max|right|``. The mean is held
    to the rms because values around zero cancel in it.
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


def lacks_statistics(pair: Pair) -> str:
    """Return which run a tolerance has nothing to work on in, and what to record; else nothing."""
    lacking = [
        name
        for name, trace in zip(pair.names, pair.traces, strict=True)
        if not trace.meta.get("statistics")
    ]
    if not lacking:
        return ""
    have = "has" if len(lacking) == 1 else "have"
    return f"{' and '.join(lacking)} {have} no statistics of tensors; {RERECORD}"


def _statistics(trace: Trace, columns: Columns) -> dict[int, list[Statistics]]:
    found: dict[int, list[Statistics]] = {}
    if columns.ids:
        rows = trace.connection.execute(
            "select record, count, mean, norm, low, high from statistics"
            " where record between ? and ? order by record, position",
            (min(columns.ids), max(columns.ids)),
        )
        for record, *row in rows:
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


FEW = 16
"""Records that read something else before the first difference: they may tell where it is from."""


@dataclass(frozen=True, slots=True)
class Differences:
    """What of a step differs."""

    left: Columns
    right: Columns
    matched: MatchedRecords
    differs: Sequence[bool]
    """Of each pair, in the order of the left run."""
    touched: Sequence[bool]
    """Whether it read something else."""
    only_left: Sequence[int]
    only_right: Sequence[int]
    """Places that have no partner and ought to."""

    @classmethod
    def of(
        cls, judge: Judge, left: Columns, right: Columns, matched: MatchedRecords
    ) -> Differences:
        """Return what differs of two parts whose records are matched."""
        lone = (matched.only_left, matched.only_right) if judge.needs_partner else ((), ())
        differs = judge.differing(left, right, matched)
        touched = list(map(ne, *both("inputs", left, right, matched)))
        return cls(left, right, matched, differs, touched, *lone)

    def tally(self) -> Counter[str]:
        """Return how many records differ, by how they do."""
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
        names, _ = both("modules", self.left, self.right, self.matched)
        alone = Counter(
            [self.left.structure.modules[place] for place in self.only_left]
            + [self.right.structure.modules[place] for place in self.only_right]
        )
        totals, differing = Counter(names), Counter(compress(names, self.differs))
        totals.update(alone)
        differing.update(alone)
        return totals, differing

    def first(self) -> tuple[str, FirstDifference] | None:
        """Return how the first difference differs, and which records it is."""
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
            return sort, self._parting(pair)
        replaced = places[1] <= earliest + 0.5
        return ALONE, self._only_left() if replaced else self._only_right()

    def dependent(self) -> Sequence[bool]:
        """Return of each pair whether it can only pass a difference on."""
        effects, _ = both("effects", self.left, self.right, self.matched)
        return list(map(or_, self.touched, effects)) if any(effects) else self.touched

    def _parting(self, pair: int) -> FirstDifference:
        here, there = self.left.ids, self.right.ids
        pairs = list(zip(self.matched.left[:pair], self.matched.right[:pair], strict=True))
        read = list(compress(pairs, self.touched[:pair]))[-FEW:]
        return FirstDifference(
            here[self.matched.left[pair]],
            there[self.matched.right[pair]],
            read=[(here[one], there[other]) for one, other in read],
        )

    def _place_of_right(self) -> float:
        """Return where the first record that only the right run has would stand in the left."""
        partners = dict(zip(self.matched.right, self.matched.left, strict=True))
        before = range(self.only_right[0] - 1, -1, -1)
        return 0.5 + next((partners[place] for place in before if place in partners), -1)

    def _only_left(self) -> FirstDifference:
        place = self.only_left[0]
        number = bisect_left(self.matched.left, place)
        after = self.matched.right[number - 1] + 1 if number else 0
        return FirstDifference(self.left.ids[place], None, _at(self.right.ids, after))

    def _only_right(self) -> FirstDifference:
        after = int(self._place_of_right() + 0.5)
        return FirstDifference(None, self.right.ids[self.only_right[0]], _at(self.left.ids, after))


def _at(ids: Sequence[int], place: int) -> int | None:
    return ids[place] if place < len(ids) else None
