"""Compares two traces record by record, by the criteria that were asked for."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol

from torchrepro.verdict import columns
from torchrepro.verdict.alignment import MatchedRecords, match
from torchrepro.verdict.columns import Reader, SharedNames, StepComparison, joined
from torchrepro.verdict.criteria import (
    Bits,
    Differences,
    Tolerance,
    lacks_statistics,
    refuse_unequal_algorithms,
)
from torchrepro.verdict.step_digests import AT_EVERY_LEVEL, Digests
from torchrepro.verdict.threads import ThreadDifferences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torchrepro.verdict.columns import Columns, Pair
    from torchrepro.verdict.criteria import Judge
    from torchrepro.verdict.first_difference import FirstDifference
    from torchrepro.verdict.value import Divergence


if TYPE_CHECKING:
    Part = tuple[Columns, Columns, MatchedRecords]


NOTHING = joined([])


class Feed:
    """What was read of a run and is not compared yet."""

    def __init__(self, parts: Iterator[Columns]) -> None:
        self._parts = parts
        self._next = next(parts, None)
        self.held = NOTHING

    @property
    def ended(self) -> bool:
        """Whether nothing more is to be read."""
        return self._next is None

    def fill(self) -> None:
        """Read on unless enough is held."""
        if self._next is not None and len(self.held) < columns.PART:
            self.held = joined([self.held, self._next])
            self._next = next(self._parts, None)

    def take(self, length: int) -> Columns:
        """Return so many of the records held, and hold them no more."""
        taken, self.held = self.held.part(0, length), self.held.part(length, len(self.held))
        return taken


def parts(
    left: Feed, right: Feed, match: Callable[[Columns, Columns], MatchedRecords]
) -> Iterator[Part]:
    """Yield parts of two sequences that belong together, with the records that do.

    What has no partner at the end of a part may have it in the next one.
    """
    while True:
        left.fill()
        right.fill()
        ended = left.ended and right.ended
        length = min(len(left.held), len(right.held))
        if not ended and length >= columns.PART and _keep_pace(left.held, right.held, length):
            together = range(length)
            yield left.take(length), right.take(length), MatchedRecords(together, together)
            continue
        matched = match(left.held, right.held)
        if ended:
            yield left.held, right.held, matched
            return
        ends = max(matched.left, default=-1) + 1, max(matched.right, default=-1) + 1
        if not all(ends):
            ends = len(left.held), len(right.held)
        yield left.take(ends[0]), right.take(ends[1]), _up_to(matched, ends)


def _keep_pace(left: Columns, right: Columns, length: int) -> bool:
    one, other = (each.structure.keys for each in (left, right))
    return one[:length] == other[:length]


def _up_to(matched: MatchedRecords, ends: tuple[int, int]) -> MatchedRecords:
    return MatchedRecords(
        matched.left,
        matched.right,
        [place for place in matched.only_left if place < ends[0]],
        [place for place in matched.only_right if place < ends[1]],
    )


class Records:
    """Compares the records of a pair of traces, step by step."""

    def __init__(self, pair: Pair, judge: Judge) -> None:
        self.pair = pair
        self.judge = judge
        shared = SharedNames()
        self.readers = Reader(pair.left, shared), Reader(pair.right, shared)
        self._foreign = self._other_meanings()
        self._parted = False
        self._known: dict[tuple[object, ...], MatchedRecords] = {}

    @cached_property
    def _unequal_steps(self) -> Mapping[int, None]:
        """The steps whose records have to be read."""
        return dict.fromkeys(
            number for number in self.pair.steps if not self._digests_agree(number)
        )

    @cached_property
    def _other_threads(self) -> ThreadDifferences:
        steps = self.pair.steps if self._unequal_steps else ()
        return ThreadDifferences(self.pair, self.readers, self.judge, steps)

    @property
    def algorithms(self) -> tuple[frozenset[str], frozenset[str]]:
        """How the fingerprints of either run were taken."""
        left, right = (
            frozenset[str]().union(
                *(reader.algorithms(site.outputs) for site in reader.trace.sites.values())
            )
            for reader in self.readers
        )
        return left, right

    @property
    def anything(self) -> bool:
        """Whether a step that both runs have holds a record."""
        return any(
            trace.steps[number].records for trace in self.pair.traces for number in self.pair.steps
        )

    def step(self, number: int) -> StepComparison:
        """Compare what the main thread did in a step; add what was recorded of others meanwhile."""
        if not self._unequal_steps:
            return StepComparison(totals=self.readers[0].totals(number))
        found = self._of_main(number)
        beside = self._other_threads.steps.get(number)
        if beside is not None:
            found.add(beside)
        return found

    def _of_main(self, number: int) -> StepComparison:
        if number not in self._unequal_steps:
            return StepComparison(totals=self.readers[0].totals_of_main(number))
        found = StepComparison()
        left, right = (Feed(reader.parts(number)) for reader in self.readers)
        for part in parts(left, right, self._matched):
            found.add(self._compared(*part))
        return found

    def otherwise(self) -> Divergence | None:
        """Return what differs although no record does."""
        return self.judge.otherwise()

    def notes(self) -> list[str]:
        """Return what a reader has to know of the comparison."""
        return [*self.judge.notes(), *self._other_threads.notes]

    def _digests_agree(self, number: int) -> bool:
        """Whether two digests show that a step is the same, without reading its records.

        They cover numbers of sites and arguments, which mean the same in both traces unless one
        has seen something that the other has not.
        """
        left, right = (trace.steps[number] for trace in self.pair.traces)
        return (
            (left.digest, left.records) == (right.digest, right.records)
            and bool(left.digest)
            and all(
                foreign.isdisjoint(self.readers[0].used(number, column))
                for column, foreign in self._foreign.items()
                if foreign
            )
        )

    def _other_meanings(self) -> Mapping[str, frozenset[int]]:
        left, right = (reader.content() for reader in self.readers)
        return {
            column: frozenset(
                number
                for number in left[column].keys() & right[column].keys()
                if left[column][number] != right[column][number]
            )
            for column in left
        }

    def _compared(self, left: Columns, right: Columns, matched: MatchedRecords) -> StepComparison:
        if not self._parted and _are_the_same(left, right):
            return StepComparison(totals=Counter(left.structure.modules))
        differences = Differences.of(self.judge, left, right, matched)
        found = StepComparison(differences.tally(), *differences.modules())
        first = differences.first()
        if first is not None:
            self._parted = True
            found.sort, parting = first
            found.place = _place(parting)
            found.first = partial(self.judge.described, parting)
        return found

    def _matched(self, left: Columns, right: Columns) -> MatchedRecords:
        """Match a step; once the runs have parted, as one that was made of the same ops."""
        if not self._parted:
            return match(left, right, self.judge.rounds)
        form = left.structure.keys, right.structure.keys
        if form not in self._known:
            self._known.clear()
            self._known[form] = match(left, right, self.judge.rounds)
        return self._known[form]


def _are_the_same(left: Columns, right: Columns) -> bool:
    return all(
        left.column(name) == right.column(name)
        for name in ("keys", "shapes", "arguments", "outputs", "inputs")
    )


def _place(parting: FirstDifference) -> float:
    """Return where in the left run a difference is: at a record, or before it."""
    if parting.left is not None:
        return parting.left
    return math.inf if parting.instead is None else parting.instead - 0.5


ALIGNED = (1e-3, 1e-5)
"""The rtol and atol of the guarantee `aligned`, if nobody gives others.

A thousandth is ten thousand times the rounding of float32, so another order of summation stays
within it through many steps, while another random number, a skipped op or a lost sample does not.
bfloat16 rounds by 0.004: there ``rtol`` 0.016 is to be given, which is what
https://docs.pytorch.org/docs/stable/testing.html has for it. Of what is near zero, ``atol`` is
what the same page has for float32.
"""


class Comparison(Protocol):
    """A comparison of two traces, step by step."""

    @property
    def anything(self) -> bool:
        """Whether the traces hold anything that is compared."""

    def step(self, number: int) -> StepComparison:
        """Compare one step."""

    def otherwise(self) -> Divergence | None:
        """Return what differs although no step has shown it."""

    def notes(self) -> list[str]:
        """Return what a reader has to know of the comparison."""


@dataclass(frozen=True, slots=True)
class Criteria:
    """What is asked of two runs."""

    comparison: Callable[[Pair], Comparison]
    """Raises `TraceError` for recordings of which this cannot be asked."""
    tolerance: tuple[float, float] | None = None
    """rtol and atol, where statistics are compared and not bits."""
    notes: tuple[str, ...] = ()
    """Why this is asked, where nobody has named it."""
    if_unequal: str = ""
    """What more is to be said of runs that are not the same."""


def asked_of(
    pairs: Sequence[Pair], given: tuple[float, float] | None, *, one_program: bool = False
) -> Criteria:
    """Return what is asked of the traces of two runs, of which `given` are rtol and atol.

    Without them it is the same bits, unless both runs were recorded under the guarantee `aligned`,
    which asks for a tolerance itself. Bits that agree are within any tolerance, so they are what
    is asked of recordings that have no statistics in common. `one_program` says that both runs
    are of one command on one machine, so that each op of one has its counterpart in the other.
    """
    notes: tuple[str, ...] = ()
    if given is None and pairs and all(_is_aligned(pair) for pair in pairs):
        given = ALIGNED
        notes = (
            "the tolerance is that of the guarantee `aligned`, under which both were recorded",
        )
    if given is None:
        return Criteria(_bits)
    lacking = next(filter(None, map(_nothing_to_hold_to_a_tolerance, pairs)), "")
    if lacking:
        rtol, atol = given
        within = f"whether they agree within rtol={rtol:g}, atol={atol:g} cannot be told"
        return Criteria(_bits, if_unequal=f"{within}: {lacking}")
    return Criteria(
        lambda pair: Records(pair, Tolerance(pair, *given, needs_partner=one_program)), given, notes
    )


def _bits(pair: Pair) -> Comparison:
    if _levels(pair)[0] != _levels(pair)[1]:
        return Digests(pair, AT_EVERY_LEVEL)
    records = Records(pair, Bits(pair))
    refuse_unequal_algorithms(records.algorithms)
    return records


def _is_aligned(pair: Pair) -> bool:
    return all(trace.meta.get("guarantee") == "aligned" for trace in pair.traces)


def _nothing_to_hold_to_a_tolerance(pair: Pair) -> str:
    """Return why there is nothing that a tolerance works on, and what to record; else nothing."""
    levels = _levels(pair)
    if levels[0] != levels[1]:
        return (
            f"the levels {levels[0]} and {levels[1]} have no statistics in common; "
            "record both at one level"
        )
    if levels[0] != "op":
        return f"the level {levels[0]} has no statistics of tensors; record both at the level op"
    return lacks_statistics(pair)


def _levels(pair: Pair) -> tuple[str, str]:
    left, right = (str(trace.meta.get("level", "op")) for trace in pair.traces)
    return left, right
