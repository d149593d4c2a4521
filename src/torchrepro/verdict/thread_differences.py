"""Compares what threads beside the main one did, over the whole of two runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from importlib import import_module
from itertools import compress, count
from operator import itemgetter
from typing import TYPE_CHECKING

from torchrepro.verdict import columns
from torchrepro.verdict.columns import MAIN
from torchrepro.verdict.differences import FEW, Differences
from torchrepro.verdict.explaining import Parting
from torchrepro.verdict.matching import Matched
from torchrepro.verdict.other_threads import OtherThreads
from torchrepro.verdict.pair import ALONE, INDEPENDENT, PROPAGATED, StepFound
from torchrepro.verdict.thread_matching import CUT_OFF, FREE, ThreadMatching
from torchrepro.verdict.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torchrepro.verdict.columns import Columns, Reader
    from torchrepro.verdict.judging import Judge
    from torchrepro.verdict.other_threads import Array
    from torchrepro.verdict.pair import Pair

    First = tuple[int, str, Parting]
    """Place of a difference in the left run, how it differs, and the records."""

_CONTENT = ("arguments", "shapes", "inputs", "outputs")


class ThreadDifferences:
    """What other threads did otherwise, by the step under which it was recorded."""

    def __init__(
        self, pair: Pair, readers: tuple[Reader, Reader], judge: Judge, steps: Sequence[int]
    ) -> None:
        self.steps: Mapping[int, StepFound] = {}
        self.notes: Sequence[str] = ()
        if steps and any(thread != MAIN for trace in pair.traces for thread in trace.threads):
            left, right = (OtherThreads.of(reader, steps) for reader in readers)
            comparison = _Comparison(
                pair, judge, ThreadMatching(left, right, judge.rounds, partial=pair.steps[0] > 0)
            )
            self.notes = comparison.notes()
            self.steps = comparison.steps()


class _Comparison:
    """Compares the records of other threads, once it is known which is which."""

    def __init__(self, pair: Pair, judge: Judge, matching: ThreadMatching) -> None:
        self.pair, self.judge, self.matching = pair, judge, matching
        self.left, self.right = matching.sides

    def notes(self) -> list[str]:
        """Say what was not compared."""
        return [
            f"{name} has {counted(number, 'more op')} at an end of thread {thread}, which was cut "
            "off at another moment: not compared"
            for number_of_side, name in enumerate(self.pair.names)
            for thread, number in self._cut_off(number_of_side).items()
        ]

    def steps(self) -> Mapping[int, StepFound]:
        """Return what was found in each step."""
        found: defaultdict[int, StepFound] = defaultdict(StepFound)
        left, right = self.matching.pairs()
        lone = self.matching.in_order(0, FREE), self.matching.in_order(1, FREE)
        self._count(found, left, lone)
        unequal = self._unequal(left, right)
        left, right = left[unequal], right[unequal]
        steps = self.left.steps[left], self.left.steps[lone[0]], self.right.steps[lone[1]]
        for step in sorted({number for each in steps for number in set(each.tolist())}):
            pairs, *alone = (_stretch(each, step) for each in steps)
            only = lone[0][alone[0]], lone[1][alone[1]]
            found[step].add(self._step(step, left[pairs], right[pairs], only))
        return found

    def _cut_off(self, side: int) -> Counter[str]:
        places = self.matching.in_order(side, CUT_OFF)
        return Counter(map(self.matching.sides[side].thread_name, places))

    def _count(
        self, found: Mapping[int, StepFound], left: Array, lone: tuple[Array, Array]
    ) -> None:
        """Count the records of each module in each step."""
        alone = lone if self.judge.needs_partner else (left[:0], left[:0])
        places = import_module("numpy").concatenate([left, alone[0]])
        for side, some in ((self.left, places), (self.right, alone[1])):
            for step, totals in side.totals(some).items():
                found[step].add(StepFound(totals=totals))

    def _unequal(self, left: Array, right: Array) -> Array:
        """Return which pairs are not the same in all that was recorded of them."""
        found = import_module("numpy").zeros(len(left), bool)
        for name in _CONTENT:
            found |= self.left.column(name)[left] != self.right.column(name)[right]
        return found

    def _step(self, step: int, left: Array, right: Array, only: tuple[Array, Array]) -> StepFound:
        """Compare pairs of a step, so many at a time that none fills the memory."""
        found = StepFound()
        for start in range(0, max(len(left), 1), columns.PART):
            some = slice(start, start + columns.PART)
            found.add(self._part(step, left[some], right[some], only))
            only = only[0][:0], only[1][:0]
        return found

    def _part(self, step: int, left: Array, right: Array, only: tuple[Array, Array]) -> StepFound:
        concatenate = import_module("numpy").concatenate
        one = self.left.columns(concatenate([left, only[0]]))
        other = self.right.columns(concatenate([right, only[1]]))
        pairs = range(len(left))
        matched = Matched(pairs, pairs, range(len(left), len(one)), range(len(left), len(other)))
        differences = Differences.of(self.judge, one, other, matched)
        _, differing = differences.modules()
        found = StepFound(differences.tally(), differing=differing)
        firsts = [
            *self._first_pair(differences, left),
            *self._first_alone(step, (differences.only_left, differences.only_right), one, other),
        ]
        if firsts:
            found.place, found.sort, parting = min(firsts, key=itemgetter(0))
            found.first = partial(self.judge.described, parting)
        return found

    def _first_pair(self, differences: Differences, left: Array) -> Iterator[First]:
        """Yield the first pair that differs, with what its thread read otherwise before."""
        pair = next(compress(count(), differences.differs), None)
        if pair is None:
            return
        here, there = differences.left.ids, differences.right.ids
        threads = (self.left.threads[left[:pair]] == self.left.threads[left[pair]]).tolist()
        before = [each for each in compress(range(pair), differences.touched) if threads[each]]
        read = [(here[each], there[each]) for each in before[-FEW:]]
        sort = PROPAGATED if differences.dependent()[pair] else INDEPENDENT
        yield here[pair], sort, Parting(here[pair], there[pair], read=read)

    def _first_alone(
        self,
        step: int,
        alone: tuple[Sequence[int], Sequence[int]],
        left: Columns,
        right: Columns,
    ) -> Iterator[First]:
        """Yield the first record that only one run has; one of the right at its place in its step.

        The step of another run says roughly what went on meanwhile, and no more is to be known.
        """
        if alone[0]:
            number = left.ids[alone[0][0]]
            yield number, ALONE, Parting(number, None)
        if alone[1]:
            number = right.ids[alone[1][0]]
            begins = [trace.steps[step].first for trace in self.pair.traces]
            place = number - begins[1] + begins[0]
            yield place, ALONE, Parting(None, number)


def _stretch(steps: Array, step: int) -> slice:
    """Return where a step begins and ends among steps in their order."""
    search = import_module("numpy").searchsorted
    return slice(int(search(steps, step, "left")), int(search(steps, step, "right")))
