"""Compares two traces record by record."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from torchrepro.trace.format import NEW_TENSOR, OPTIMIZER_STEP
from torchrepro.verdict import columns
from torchrepro.verdict.alignment import MatchedRecords, match
from torchrepro.verdict.columns import MAIN, Reader, StepComparison, joined, shared_numbers
from torchrepro.verdict.criteria import Differences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torchrepro.trace.reader import Trace
    from torchrepro.verdict.columns import Columns, Pair
    from torchrepro.verdict.criteria import Judge
    from torchrepro.verdict.first_difference import FirstDifference
    from torchrepro.verdict.threads import ThreadDifferences
    from torchrepro.verdict.value import Divergence

    Part = tuple[Columns, Columns, MatchedRecords]


class Feed:
    """Records that were read of a run and are not compared yet."""

    def __init__(self, parts: Iterator[Columns]) -> None:
        self._parts = parts
        self._next = next(parts, None)
        self.held = joined([])

    @property
    def ended(self) -> bool:
        """Whether nothing more is to be read."""
        return self._next is None

    def fill(self) -> None:
        """Read the next part unless enough is held."""
        if self._next is not None and len(self.held) < columns.PART:
            self.held = joined([self.held, self._next])
            self._next = next(self._parts, None)

    def take(self, length: int) -> Columns:
        """Return the first records that are held, and hold them no longer."""
        taken, self.held = self.held.part(0, length), self.held.part(length, len(self.held))
        return taken


def matched_parts(
    left: Feed, right: Feed, match: Callable[[Columns, Columns], MatchedRecords]
) -> Iterator[Part]:
    """Yield parts of two sequences with their matched records.

    A record at the end of a part may have its partner in the next part of the other run.
    """
    while True:
        left.fill()
        right.fill()
        ended = left.ended and right.ended
        length = min(len(left.held), len(right.held))
        if not ended and length >= columns.PART and _same_ops(left.held, right.held, length):
            yield left.take(length), right.take(length), MatchedRecords.place_by_place(length)
            continue
        matched = match(left.held, right.held)
        if ended:
            yield left.held, right.held, matched
            return
        ends = max(matched.left, default=-1) + 1, max(matched.right, default=-1) + 1
        if not all(ends):
            ends = len(left.held), len(right.held)
        only_left = [place for place in matched.only_left if place < ends[0]]
        only_right = [place for place in matched.only_right if place < ends[1]]
        matched = replace(matched, only_left=only_left, only_right=only_right)
        yield left.take(ends[0]), right.take(ends[1]), matched


def _same_ops(left: Columns, right: Columns, length: int) -> bool:
    one, other = (each.structure.keys for each in (left, right))
    return one[:length] == other[:length]


class Records:
    """Compares the records of a pair of traces, step by step."""

    def __init__(self, pair: Pair, judge: Judge) -> None:
        self.pair = pair
        self.judge = judge
        shared = shared_numbers()
        one_is_older = pair.left.sealed != pair.right.sealed
        left_out = (
            _unknown_to_0_2_0 if one_is_older else _made_before if pair.misses_steps else _none
        )
        left, right = map(left_out, pair.traces)
        self.readers = Reader(pair.left, shared, left), Reader(pair.right, shared, right)
        self._ambiguous = self._ambiguous_numbers()
        self._diverged = False
        self._last_match: tuple[object, MatchedRecords] | None = None

    @cached_property
    def _unequal_steps(self) -> Mapping[int, None]:
        """The steps whose records have to be read."""
        return dict.fromkeys(
            number for number in self.pair.steps if not self._digests_agree(number)
        )

    @cached_property
    def _other_threads(self) -> ThreadDifferences | None:
        threads = {thread for trace in self.pair.traces for thread in trace.threads}
        if not self._unequal_steps or threads <= {MAIN}:
            return None
        from torchrepro.verdict.threads import ThreadDifferences  # it imports numpy

        return ThreadDifferences(self.pair, self.readers, self.judge, self.pair.steps)

    @property
    def algorithms(self) -> tuple[frozenset[str], frozenset[str]]:
        """How the fingerprints of each run were taken. A meta tensor has no bytes, and so none."""
        left, right = (
            frozenset[str]().union(
                *(reader.algorithms(site.outputs) for site in reader.trace.sites.values())
            )
            - {"meta"}
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
        """Compare the records of the main thread in a step, and of other threads meanwhile."""
        if not self._unequal_steps:
            return StepComparison(totals=self.readers[0].totals(number))
        found = self._main_thread(number)
        if self._other_threads is not None and number in self._other_threads.steps:
            found.add(self._other_threads.steps[number])
        return found

    def _main_thread(self, number: int) -> StepComparison:
        if number not in self._unequal_steps:
            return StepComparison(totals=self.readers[0].totals_of_main(number))
        found = StepComparison()
        left, right = (Feed(reader.parts(number)) for reader in self.readers)
        for part in matched_parts(left, right, self._match):
            found.add(self._compare(*part))
        return found

    def besides_records(self) -> Divergence | None:
        """Return what differs although no record does."""
        return self.judge.besides_records()

    def notes(self) -> list[str]:
        """Return what a reader has to know of the comparison."""
        return [*self.judge.notes(), *(self._other_threads.notes if self._other_threads else ())]

    def _digests_agree(self, number: int) -> bool:
        """Whether the digests show that a step is the same, without reading its records.

        Digests cover the numbers of sites and arguments. These mean the same in both traces unless
        one trace has a site or an argument that the other lacks.
        """
        left, right = (trace.steps[number] for trace in self.pair.traces)
        return (
            (left.digest, left.records) == (right.digest, right.records)
            and bool(left.digest)
            and all(
                numbers.isdisjoint(self.readers[0].used(number, column))
                for column, numbers in self._ambiguous.items()
                if numbers
            )
        )

    def _ambiguous_numbers(self) -> Mapping[str, frozenset[int]]:
        """Return the numbers of sites and arguments that stand for something else in each run."""
        left, right = (reader.content() for reader in self.readers)
        return {
            column: frozenset(
                number
                for number in left[column].keys() & right[column].keys()
                if left[column][number] != right[column][number]
            )
            for column in left
        }

    def _compare(self, left: Columns, right: Columns, matched: MatchedRecords) -> StepComparison:
        if not self._diverged and _are_the_same(left, right):
            return StepComparison(totals=Counter(left.structure.modules))
        differences = Differences.of(self.judge, left, right, matched)
        found = StepComparison(differences.tally(), *differences.modules())
        first = differences.first()
        if first is not None:
            self._diverged = True
            found.sort, difference = first
            found.place = _place(difference)
            found.first = partial(self.judge.describe, difference)
        return found

    def _match(self, left: Columns, right: Columns) -> MatchedRecords:
        """Match a part. After the runs diverged, parts of the same ops are matched alike."""
        ops = left.structure.keys, right.structure.keys
        if self._diverged and self._last_match is not None and self._last_match[0] == ops:
            return self._last_match[1]
        matched = match(left, right, self.judge.rounds)
        self._last_match = (ops, matched) if self._diverged else None
        return matched


def _unknown_to_0_2_0(trace: Trace) -> list[int]:
    """Return the sites of records that torchrepro 0.2.0 did not take."""
    return [
        number
        for number, site in trace.sites.items()
        if site.op == NEW_TENSOR or (site.phase == "optimizer" and site.op.endswith(OPTIMIZER_STEP))
    ]


def _made_before(trace: Trace) -> list[int]:
    """Return the sites of tensors that the program made, perhaps in a step without records."""
    return [number for number, site in trace.sites.items() if site.op == NEW_TENSOR]


def _none(_trace: Trace) -> Sequence[int]:
    return ()


def _are_the_same(left: Columns, right: Columns) -> bool:
    return all(
        left.column(name) == right.column(name)
        for name in ("keys", "shapes", "arguments", "outputs", "inputs")
    )


def _place(difference: FirstDifference) -> float:
    """Return where in the left run a difference is: at a record, or before it."""
    if difference.left is not None:
        return difference.left
    return math.inf if difference.instead is None else difference.instead - 0.5
