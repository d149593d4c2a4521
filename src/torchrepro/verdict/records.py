"""Compares two traces record by record."""

from __future__ import annotations

import math
from collections import Counter
from functools import cached_property, partial
from typing import TYPE_CHECKING

from torchrepro.verdict.alignment import match
from torchrepro.verdict.columns import Reader, Shared
from torchrepro.verdict.differences import Differences
from torchrepro.verdict.pacing import Feed, parts
from torchrepro.verdict.pair import StepFound
from torchrepro.verdict.threads import ThreadDifferences

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrepro.verdict.alignment import Matched
    from torchrepro.verdict.columns import Columns
    from torchrepro.verdict.explaining import Parting
    from torchrepro.verdict.judging import Judge
    from torchrepro.verdict.pair import Pair
    from torchrepro.verdict.value import Divergence


class Records:
    """Compares the records of a pair of traces, step by step."""

    def __init__(self, pair: Pair, judge: Judge) -> None:
        self.pair = pair
        self.judge = judge
        shared = Shared()
        self.readers = Reader(pair.left, shared), Reader(pair.right, shared)
        self._foreign = self._other_meanings()
        self._parted = False
        self._known: dict[tuple[object, ...], Matched] = {}

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

    def step(self, number: int) -> StepFound:
        """Compare what the main thread did in a step; add what was recorded of others meanwhile."""
        if not self._unequal_steps:
            return StepFound(totals=self.readers[0].totals(number))
        found = self._of_main(number)
        beside = self._other_threads.steps.get(number)
        if beside is not None:
            found.add(beside)
        return found

    def _of_main(self, number: int) -> StepFound:
        if number not in self._unequal_steps:
            return StepFound(totals=self.readers[0].totals_of_main(number))
        found = StepFound()
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

    def _compared(self, left: Columns, right: Columns, matched: Matched) -> StepFound:
        if not self._parted and _are_the_same(left, right):
            return StepFound(totals=Counter(left.structure.modules))
        differences = Differences.of(self.judge, left, right, matched)
        found = StepFound(differences.tally(), *differences.modules())
        first = differences.first()
        if first is not None:
            self._parted = True
            found.sort, parting = first
            found.place = _place(parting)
            found.first = partial(self.judge.described, parting)
        return found

    def _matched(self, left: Columns, right: Columns) -> Matched:
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


def _place(parting: Parting) -> float:
    """Return where in the left run a difference is: at a record, or before it."""
    if parting.left is not None:
        return parting.left
    return math.inf if parting.instead is None else parting.instead - 0.5
