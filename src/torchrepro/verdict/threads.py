"""Compares what threads beside the main one did, over the whole of two runs.

Such a thread has its own timing. The step of the main thread in which a record of it falls is an
accident, and so is which thread of a pool does which work. The records of all of them are therefore
compared as one multiset. Threads are compared one by one only where the multisets differ: records
at the end of a thread that only one run has may have been cut off by the end of the recording.

This module is imported only for a trace with other threads, because it imports numpy.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial
from itertools import compress, count
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from torchrepro.trace.format import OUTPUT, PARTLY
from torchrepro.verdict import columns
from torchrepro.verdict.alignment import MatchedRecords
from torchrepro.verdict.columns import (
    ALONE,
    INDEPENDENT,
    NAMES,
    PROPAGATED,
    Columns,
    OtherRecords,
    StepComparison,
    is_unset_in_part,
)
from torchrepro.verdict.criteria import FEW, Differences
from torchrepro.verdict.first_difference import FirstDifference
from torchrepro.verdict.render import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torchrepro.verdict.alignment import Names
    from torchrepro.verdict.columns import Pair, Reader
    from torchrepro.verdict.criteria import Judge

Array = Any
"""An array of numpy."""

Lanes = dict[int, Array]
"""By thread, the places of its records."""

First = tuple[int, str, FirstDifference]
"""Place of a difference in the left run, how it differs, and the records."""

FREE, CUT_OFF = -1, -2
"""In place of a partner: there is none, or none is expected."""

CUT_OFF_STEPS = 1
"""Ends of steps that records at an end of a thread may span and still count as cut off."""

BEGINNINGS = 100
"""Places that are tried as the one where a thread was when the other recording began."""

_MIX, _SHIFT = 0x9E3779B97F4A7C15, 29
"""An odd number whose multiples of 64 bits look random: D. Knuth, TAOCP 3, 6.4."""

_CONTENT = ("arguments", "shapes", "inputs", "outputs")

NO_RECORDS = OtherRecords(0, (), (), (), (), (), ())


@dataclass(frozen=True)
class OtherThreads:
    """Records of other threads of one trace, in their order, as arrays of numbers.

    A hash of 64 bits stands for what a record read or wrote.
    """

    reader: Reader
    ids: Array
    steps: Array
    """The step of the main thread under which it was recorded."""
    threads: Array
    sites: Array
    arguments: Array
    inputs: Array
    outputs: Array
    unset: Array
    """Whether outputs are of memory that ops had written in part."""

    @classmethod
    def of(cls, reader: Reader, steps: Iterable[int]) -> OtherThreads:
        """Read what other threads did in some steps."""
        parts = [_arrays(each) for each in reader.beside_main(steps)] or [_arrays(NO_RECORDS)]
        return cls(reader, *map(np.concatenate, zip(*parts, strict=True)))

    def __len__(self) -> int:
        return len(self.ids)

    def column(self, name: str) -> Array:
        """Return a column by its name, as numbers that mean the same in both traces."""
        if name == "names":
            return _table(self.reader.threads)[self.threads]
        if name == "arguments":
            return _table(self.reader.arguments)[self.arguments]
        if name in ("inputs", "outputs"):
            return getattr(self, name)
        return _table(self.reader.of_sites(name))[self.sites]

    def tokens(self, names: Sequence[str], places: Array) -> Array:
        """Return one number for the named columns of each of the records at `places`."""
        return _mixed([self.column(name)[places] for name in names])

    def lanes(self) -> Lanes:
        """Return the places of the records of each thread."""
        order = np.argsort(self.threads, kind="stable")
        lanes = np.split(order, np.flatnonzero(np.diff(self.threads[order])) + 1)
        return {int(self.threads[lane[0]]): lane for lane in lanes if len(lane)}

    def columns(self, places: Array) -> Columns:
        """Return the records at `places` for a judge to compare."""
        arguments, inputs, outputs = (
            self.column(name)[places].tolist() for name in ("arguments", "inputs", "outputs")
        )
        for place in np.flatnonzero(self.unset[places]).tolist():
            outputs[place] = PARTLY + outputs[place].to_bytes(OUTPUT - len(PARTLY), signed=True)
        structure = self.reader.structure(self.sites[places].tolist())
        return Columns(self.ids[places].tolist(), structure, arguments, inputs, outputs)

    def modules(self, places: Array) -> Iterator[tuple[int, str]]:
        """Yield the step and the module of each of the records at `places`."""
        modules = self.reader.of_sites("modules")
        sites = map(modules.__getitem__, self.sites[places].tolist())
        return zip(self.steps[places].tolist(), sites, strict=True)

    def names(self, places: Array) -> Iterator[str]:
        """Yield the name of the thread of each of the records at `places`."""
        for number in self.threads[places].tolist():
            yield self.reader.trace.threads.get(number, str(number))


class ThreadMatching:
    """The partner of each record, or why it has none.

    With `partial`, recording began while threads ran, so that their beginnings may be cut off too.
    """

    def __init__(
        self, left: OtherThreads, right: OtherThreads, rounds: Sequence[Names], *, partial: bool
    ) -> None:
        self.sides = left, right
        self.partial = partial
        self.partners = [np.full(len(side), FREE, "int64") for side in self.sides]
        self._lanes = left.lanes(), right.lanes()
        self._tokens = [side.tokens(rounds[0], np.arange(len(side))) for side in self.sides]
        self._join_equal_threads()
        equal = [partners.copy() for partners in self.partners]
        self._join_same(rounds[0])
        if self._free():
            self._match_thread_by_thread(equal, rounds[0])
            self._cut_off([(side, lane) for side in (0, 1) for lane in self._lanes[side].values()])
        for names in rounds[1:]:
            self._join_same(("names", *names))
            self._join_same(names)

    def places(self, side: int, state: int) -> Array:
        """Return the places of the records of one run that are `FREE` or `CUT_OFF`."""
        return np.flatnonzero(self.partners[side] == state)

    def pairs(self) -> tuple[Array, Array]:
        """Return the places of records that have a partner, in the order of the left run."""
        places = np.flatnonzero(self.partners[0] >= 0)
        return places, self.partners[0][places]

    def _free(self) -> int:
        return sum(len(self.places(side, FREE)) for side in (0, 1))

    def _join(self, left: Array, right: Array) -> None:
        self.partners[0][left] = right
        self.partners[1][right] = left

    def _join_equal_threads(self) -> None:
        """Join threads that did the same in the same order."""
        waiting: dict[bytes, list[Array]] = defaultdict(list)
        for lane in self._lanes[1].values():
            waiting[self._tokens[1][lane].tobytes()].append(lane)
        for lane in self._lanes[0].values():
            same = waiting[self._tokens[0][lane].tobytes()]
            if same:
                self._join(lane, same.pop(0))

    def _join_same(self, names: Names) -> None:
        """Join free records with the same tokens, the first with the first."""
        places = [self.places(side, FREE) for side in (0, 1)]
        tokens = [side.tokens(names, some) for side, some in zip(self.sides, places, strict=True)]
        left, right = _same_tokens(*tokens)
        self._join(places[0][left], places[1][right])

    def _match_thread_by_thread(self, equal: list[Array], names: Names) -> None:
        """Match threads one by one, if fewer records stay free than in one multiset."""
        free, whole = self._free(), self.partners
        counterparts = list(self._counterparts())
        self.partners = equal
        for thread, other in counterparts:
            left, right = self._lanes[0][thread], self._lanes[1][other]
            if self.partners[0][left[0]] == FREE:
                begins = self._overlaps(self._tokens[0][left], self._tokens[1][right])
                length, here, there = next(begins, (0, 0, 0))
                self._join(left[here : here + length], right[there : there + length])
                self._cut_off([(0, left), (1, right)])
        if any((partners == CUT_OFF).any() for partners in self.partners):
            self._join_same(names)
        if self._free() >= free:
            self.partners = whole

    def _counterparts(self) -> Iterator[tuple[int, int]]:
        """Yield pairs of threads, those with most in common first; each thread is in one pair."""
        left, right = self.pairs()
        threads = self.sides[0].threads[left], self.sides[1].threads[right]
        tokens = _mixed([*threads, self._tokens[0][left]])
        _, distinct = np.unique(tokens, return_index=True)
        common = Counter(zip(*(numbers[distinct].tolist() for numbers in threads), strict=True))
        here, there = set[int](), set[int]()
        for (thread, other), _ in common.most_common():
            if thread not in here and other not in there:
                here.add(thread)
                there.add(other)
                yield thread, other

    def _overlaps(self, left: Array, right: Array) -> Iterator[tuple[int, int, int]]:
        """Yield the length of what two threads share but for their ends, and where it begins."""
        begins = [(0, 0)]
        if self.partial:
            places = np.flatnonzero(left == right[0]), np.flatnonzero(right == left[0])
            begins = [(place, 0) for place in places[0][:BEGINNINGS].tolist()]
            begins += [(0, place) for place in places[1][:BEGINNINGS].tolist()]
        for here, there in begins:
            length = min(len(left) - here, len(right) - there)
            if (left[here : here + length] == right[there : there + length]).all():
                yield length, here, there

    def _cut_off(self, lanes: Sequence[tuple[int, Array]]) -> None:
        """Expect no partner for records at the ends of threads that only one run has.

        They stay a difference if both runs have records at the same end, if they span more than
        about a step, or if the runs have less than half in common.
        """
        size, surplus = [0, 0], [0, 0]
        heads: list[tuple[int, Array]] = []
        tails: list[tuple[int, Array]] = []
        for side, lane in lanes:
            paired = np.flatnonzero(self.partners[side][lane] != FREE)
            if not len(paired) or len(paired) <= paired[-1] - paired[0]:
                return
            heads.append((side, lane[: paired[0]]))
            tails.append((side, lane[paired[-1] + 1 :]))
            size[side] += len(lane)
            surplus[side] += len(lane) - len(paired)
        heads, tails = ([each for each in ends if len(each[1])] for ends in (heads, tails))
        if (
            (not heads or self.partial)
            and all(len({side for side, _ in ends}) <= 1 for ends in (heads, tails))
            and all(self._is_short(side, end) for side, end in heads + tails)
            and 2 * (size[0] - surplus[0]) >= min(size)
        ):
            for side, end in heads + tails:
                self.partners[side][end] = CUT_OFF

    def _is_short(self, side: int, end: Array) -> bool:
        steps = self.sides[side].steps
        return bool(steps[end[-1]] - steps[end[0]] <= CUT_OFF_STEPS)


class ThreadDifferences:
    """How other threads of two runs differ, by the step under which it was recorded."""

    def __init__(
        self, pair: Pair, readers: tuple[Reader, Reader], judge: Judge, steps: Sequence[int]
    ) -> None:
        self.pair, self.judge = pair, judge
        self.steps: defaultdict[int, StepComparison] = defaultdict(StepComparison)
        self.notes: list[str] = []
        self._left, self._right = (OtherThreads.of(reader, steps) for reader in readers)
        self._compare(ThreadMatching(self._left, self._right, judge.rounds, partial=steps[0] > 0))

    def _compare(self, matching: ThreadMatching) -> None:
        """Note what was cut off, and compare the rest step by step."""
        for side, name in enumerate(NAMES):
            threads = matching.sides[side].names(matching.places(side, CUT_OFF))
            self.notes += [
                f"{name} has {counted(number, 'more op')} at an end of thread {thread}, which was "
                "cut off at another moment: not compared"
                for thread, number in Counter(threads).items()
            ]
        left, right = matching.pairs()
        lone = matching.places(0, FREE), matching.places(1, FREE)
        self._count(self._left, left)
        if self.judge.needs_partner:
            self._count(self._left, lone[0])
            self._count(self._right, lone[1])
        unequal = np.zeros(len(left), bool)
        for name in _CONTENT:
            unequal |= self._left.column(name)[left] != self._right.column(name)[right]
        left, right = left[unequal], right[unequal]
        steps = self._left.steps[left], self._left.steps[lone[0]], self._right.steps[lone[1]]
        for step in sorted({number for each in steps for number in set(each.tolist())}):
            pairs, *alone = (_stretch(each, step) for each in steps)
            only = lone[0][alone[0]], lone[1][alone[1]]
            self._compare_step(step, left[pairs], right[pairs], only)

    def _count(self, side: OtherThreads, places: Array) -> None:
        """Count the records of each module in each step."""
        totals: defaultdict[int, Counter[str]] = defaultdict(Counter)
        for step, module in side.modules(places):
            totals[step][module] += 1
        for step, total in totals.items():
            self.steps[step].add(StepComparison(totals=total))

    def _compare_step(
        self, step: int, left: Array, right: Array, only: tuple[Array, Array]
    ) -> None:
        """Compare the pairs of a step in parts that fit into memory."""
        for start in range(0, max(len(left), 1), columns.PART):
            some = slice(start, start + columns.PART)
            one = self._left.columns(np.concatenate([left[some], only[0]]))
            other = self._right.columns(np.concatenate([right[some], only[1]]))
            pairs = range(len(left[some]))
            rest = range(len(pairs), len(one)), range(len(pairs), len(other))
            differences = Differences.of(
                self.judge, one, other, MatchedRecords(pairs, pairs, *rest)
            )
            _, differing = differences.modules()
            found = StepComparison(differences.tally(), differing=differing)
            firsts = [
                *self._first_pair(differences, self._left.threads[left[some]]),
                *self._first_alone(step, differences),
            ]
            if firsts:
                found.place, found.sort, difference = min(firsts, key=itemgetter(0))
                found.first = partial(self.judge.describe, difference)
            self.steps[step].add(found)
            only = only[0][:0], only[1][:0]

    def _first_pair(self, differences: Differences, threads: Array) -> Iterator[First]:
        """Yield the first pair that differs, and earlier pairs of its thread with other inputs."""
        pair = next(compress(count(), differences.differs), None)
        if pair is None:
            return
        here, there = differences.left.ids, differences.right.ids
        mine = (threads[:pair] == threads[pair]).tolist()
        before = [each for each in compress(range(pair), differences.inputs_differ) if mine[each]]
        read = [(here[each], there[each]) for each in before[-FEW:]]
        sort = PROPAGATED if differences.dependent()[pair] else INDEPENDENT
        yield here[pair], sort, FirstDifference(here[pair], there[pair], read=read)

    def _first_alone(self, step: int, differences: Differences) -> Iterator[First]:
        """Yield the first record that only one run has.

        The place of a record of the right run is only an estimate: its place within its step.
        """
        if differences.only_left:
            number = differences.left.ids[differences.only_left[0]]
            yield number, ALONE, FirstDifference(number, None)
        if differences.only_right:
            number = differences.right.ids[differences.only_right[0]]
            begins = [trace.steps[step].first for trace in self.pair.traces]
            yield number - begins[1] + begins[0], ALONE, FirstDifference(None, number)


def _arrays(its: OtherRecords) -> tuple[Array, ...]:
    numbers = its.ids, [its.step] * len(its.ids), its.threads, its.sites, its.arguments
    return (
        *(np.array(column, "int64") for column in numbers),
        *(np.array(list(map(hash, column)), "int64") for column in (its.inputs, its.outputs)),
        np.array(list(map(is_unset_in_part, its.outputs)), bool),
    )


def _table(numbers: Mapping[int, int]) -> Array:
    """Return a mapping as an array."""
    found = np.zeros(max(numbers, default=0) + 1, "int64")
    found[list(numbers)] = list(numbers.values())
    return found


def _mixed(columns: Sequence[Array]) -> Array:
    """Return a hash of 64 bits for each row of some columns."""
    found = np.zeros(len(columns[0]), "uint64")
    for column in columns:
        found = (found ^ column.astype("uint64")) * np.uint64(_MIX)
        found ^= found >> np.uint64(_SHIFT)
    return found


def _same_tokens(left: Array, right: Array) -> tuple[Array, Array]:
    """Return the places of equal tokens, the first with the first, the second with the second."""
    one, other = (np.argsort(tokens, kind="stable") for tokens in (left, right))
    left, right = left[one], right[other]
    turn = np.arange(len(left)) - np.searchsorted(left, left, "left")
    start = np.searchsorted(right, left, "left")
    found = turn < np.searchsorted(right, left, "right") - start
    return one[found], other[(start + turn)[found]]


def _stretch(steps: Array, step: int) -> slice:
    """Return where a step begins and ends among steps in their order."""
    return slice(*(int(np.searchsorted(steps, step, side)) for side in ("left", "right")))
