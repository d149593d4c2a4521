"""Compares what threads beside the main one did, over the whole of two runs.

Such a thread runs on its own time: at which step of the main thread a record of it lands is an
accident, and so is which thread of a pool does which piece of the work. What all of them did is
therefore compared as one multiset. Only where it differs are threads held against each other: what
one of them did at its end, and no other did, may be what the end of the recording cut off.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import compress, count
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from torchrepro.verdict import columns
from torchrepro.verdict.alignment import MatchedRecords
from torchrepro.verdict.columns import ALONE, INDEPENDENT, MAIN, PROPAGATED, Columns, StepComparison
from torchrepro.verdict.criteria import FEW, Differences
from torchrepro.verdict.first_difference import FirstDifference
from torchrepro.verdict.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torchrepro.verdict.alignment import Names
    from torchrepro.verdict.columns import OtherRow, Pair, Reader
    from torchrepro.verdict.criteria import Judge

Array = Any
"""An array of numpy, which is imported only where there are other threads."""

Lanes = dict[int, Array]
"""By thread, the places of its records."""

First = tuple[int, str, FirstDifference]
"""Place of a difference in the left run, how it differs, and the records."""

FREE, CUT_OFF = -1, -2
"""In place of a partner: there is none, or none is to be expected."""

A_BIT = 1
"""Ends of steps that a thread may have outlived another by, and still be one that was cut off."""

MANY = 100
"""Places at which a thread may have been when the recording of the other run began."""

_MIX, _SHIFT = 0x9E3779B97F4A7C15, 29
"""An odd number whose multiples of 64 bits look random: D. Knuth, TAOCP 3, 6.4."""

_CONTENT = ("arguments", "shapes", "inputs", "outputs")


@dataclass(frozen=True)
class OtherThreads:
    """Records of one trace beside its main thread, in their order, as arrays of numbers.

    A number of 64 bits stands for what a record read or wrote.
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

    @classmethod
    def of(cls, reader: Reader, steps: Iterable[int]) -> OtherThreads:
        """Read what other threads did in some steps."""
        parts = [_arrays(rows) for rows in reader.rows_beside_main(steps)] or [_arrays([])]
        return cls(reader, *map(import_module("numpy").concatenate, zip(*parts, strict=True)))

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
        """Return a number for what the named columns say of each of the records at `places`."""
        return _mixed([self.column(name)[places] for name in names])

    def lanes(self) -> Lanes:
        """Return what each thread did."""
        numpy = import_module("numpy")
        order = numpy.argsort(self.threads, kind="stable")
        lanes = numpy.split(order, numpy.flatnonzero(numpy.diff(self.threads[order])) + 1)
        return {int(self.threads[lane[0]]): lane for lane in lanes if len(lane)}

    def columns(self, places: Array) -> Columns:
        """Return the records at `places` for a judge to compare."""
        return Columns(
            self.ids[places].tolist(),
            self.reader.structure(self.sites[places].tolist()),
            *(self.column(name)[places].tolist() for name in ("arguments", "inputs", "outputs")),
        )

    def modules(self, places: Array) -> Iterator[tuple[int, str]]:
        """Yield the step and the module of each of the records at `places`."""
        modules = self.reader.of_sites("modules")
        sites = map(modules.__getitem__, self.sites[places].tolist())
        return zip(self.steps[places].tolist(), sites, strict=True)

    def names(self, places: Array) -> Iterator[str]:
        """Yield the name of the thread of each of the records at `places`."""
        for number in self.threads[places].tolist():
            yield self.reader.trace.threads.get(number, str(number))


class Matching:
    """The partner of each record, or why it has none.

    With `partial`, recording began when threads were under way, so that they may be cut off at
    their beginning as well.
    """

    def __init__(
        self, left: OtherThreads, right: OtherThreads, rounds: Sequence[Names], *, partial: bool
    ) -> None:
        numpy = import_module("numpy")
        self.sides = left, right
        self.partial = partial
        self.partners = [numpy.full(len(side), FREE, "int64") for side in self.sides]
        self._lanes = left.lanes(), right.lanes()
        self._tokens = [side.tokens(rounds[0], numpy.arange(len(side))) for side in self.sides]
        self._join_equal_threads()
        equal = [partners.copy() for partners in self.partners]
        self._join_alike(rounds[0])
        if self._free():
            self._match_thread_by_thread(equal, rounds[0])
            self._cut_off([(side, lane) for side in (0, 1) for lane in self._lanes[side].values()])
        for names in rounds[1:]:
            self._join_alike(("names", *names))
            self._join_alike(names)

    def places(self, side: int, state: int) -> Array:
        """Return the places of the records of one run that are in a state."""
        return import_module("numpy").flatnonzero(self.partners[side] == state)

    def pairs(self) -> tuple[Array, Array]:
        """Return the places of records that have a partner, in the order of the left run."""
        places = import_module("numpy").flatnonzero(self.partners[0] >= 0)
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

    def _join_alike(self, names: Names) -> None:
        """Join free records that are alike, the earlier with the earlier."""
        places = [self.places(side, FREE) for side in (0, 1)]
        tokens = [side.tokens(names, some) for side, some in zip(self.sides, places, strict=True)]
        left, right = _alike(*tokens)
        self._join(places[0][left], places[1][right])

    def _match_thread_by_thread(self, equal: list[Array], names: Names) -> None:
        """Hold each thread against its like, if less is left over then than of all as one."""
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
            self._join_alike(names)
        if self._free() >= free:
            self.partners = whole

    def _counterparts(self) -> Iterator[tuple[int, int]]:
        """Yield the threads that have most in common, each at most once."""
        left, right = self.pairs()
        threads = self.sides[0].threads[left], self.sides[1].threads[right]
        tokens = _mixed([*threads, self._tokens[0][left]])
        _, distinct = import_module("numpy").unique(tokens, return_index=True)
        common = Counter(zip(*(numbers[distinct].tolist() for numbers in threads), strict=True))
        here, there = set[int](), set[int]()
        for (thread, other), _ in common.most_common():
            if thread not in here and other not in there:
                here.add(thread)
                there.add(other)
                yield thread, other

    def _overlaps(self, left: Array, right: Array) -> Iterator[tuple[int, int, int]]:
        """Yield how long two threads are the same but for their ends, and from where on in each."""
        numpy = import_module("numpy")
        begins = [(0, 0)]
        if self.partial:
            begins = [(int(here), 0) for here in numpy.flatnonzero(left == right[0])[:MANY]]
            begins += [(0, int(there)) for there in numpy.flatnonzero(right == left[0])[:MANY]]
        for here, there in begins:
            length = min(len(left) - here, len(right) - there)
            if (left[here : here + length] == right[there : there + length]).all():
                yield length, here, there

    def _cut_off(self, lanes: Sequence[tuple[int, Array]]) -> None:
        """Expect no partner for the ends of threads of one or both runs that only one of them has.

        It is a difference if both have something else at the same end, if a thread did it for
        longer than about a step, or if less than half is in common.
        """
        size, surplus = [0, 0], [0, 0]
        heads: list[tuple[int, Array]] = []
        tails: list[tuple[int, Array]] = []
        for side, lane in lanes:
            paired = import_module("numpy").flatnonzero(self.partners[side][lane] != FREE)
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
        return bool(steps[end[-1]] - steps[end[0]] <= A_BIT)


class ThreadDifferences:
    """What other threads did otherwise, by the step under which it was recorded."""

    def __init__(
        self, pair: Pair, readers: tuple[Reader, Reader], judge: Judge, steps: Sequence[int]
    ) -> None:
        self.pair, self.judge = pair, judge
        self.steps: defaultdict[int, StepComparison] = defaultdict(StepComparison)
        self.notes: list[str] = []
        if steps and any(thread != MAIN for trace in pair.traces for thread in trace.threads):
            self._left, self._right = (OtherThreads.of(reader, steps) for reader in readers)
            self._compare(
                Matching(self._left, self._right, judge.rounds, partial=pair.steps[0] > 0)
            )

    def _compare(self, matching: Matching) -> None:
        """Note what was cut off, and compare all else step by step."""
        for side, name in enumerate(self.pair.names):
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
        unequal = import_module("numpy").zeros(len(left), bool)
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
        """Compare pairs of a step, so many at a time that none fills the memory."""
        concatenate = import_module("numpy").concatenate
        for start in range(0, max(len(left), 1), columns.PART):
            some = slice(start, start + columns.PART)
            one = self._left.columns(concatenate([left[some], only[0]]))
            other = self._right.columns(concatenate([right[some], only[1]]))
            pairs = list(range(len(left[some])))  # a range would stand for all records
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
                found.place, found.sort, parting = min(firsts, key=itemgetter(0))
                found.first = partial(self.judge.described, parting)
            self.steps[step].add(found)
            only = only[0][:0], only[1][:0]

    def _first_pair(self, differences: Differences, threads: Array) -> Iterator[First]:
        """Yield the first pair that differs, with what its thread read otherwise before."""
        pair = next(compress(count(), differences.differs), None)
        if pair is None:
            return
        here, there = differences.left.ids, differences.right.ids
        mine = (threads[:pair] == threads[pair]).tolist()
        before = [each for each in compress(range(pair), differences.touched) if mine[each]]
        read = [(here[each], there[each]) for each in before[-FEW:]]
        sort = PROPAGATED if differences.dependent()[pair] else INDEPENDENT
        yield here[pair], sort, FirstDifference(here[pair], there[pair], read=read)

    def _first_alone(self, step: int, differences: Differences) -> Iterator[First]:
        """Yield the first record that only one run has; one of the right at its place in its step.

        The step of another run says roughly what went on meanwhile, and no more is to be known.
        """
        if differences.only_left:
            number = differences.left.ids[differences.only_left[0]]
            yield number, ALONE, FirstDifference(number, None)
        if differences.only_right:
            number = differences.right.ids[differences.only_right[0]]
            begins = [trace.steps[step].first for trace in self.pair.traces]
            yield number - begins[1] + begins[0], ALONE, FirstDifference(None, number)


def _arrays(rows: Sequence[OtherRow]) -> tuple[Array, ...]:
    numpy = import_module("numpy")
    *numbers, inputs, outputs = zip(*rows, strict=True) if rows else [()] * 7
    return (
        *(numpy.array(column, "int64") for column in numbers),
        *(numpy.array(list(map(hash, column)), "int64") for column in (inputs, outputs)),
    )


def _table(numbers: Mapping[int, int]) -> Array:
    """Return an array that has for each number what it stands for."""
    numpy = import_module("numpy")
    found = numpy.zeros(max(numbers, default=0) + 1, "int64")
    found[list(numbers)] = list(numbers.values())
    return found


def _mixed(columns: Sequence[Array]) -> Array:
    """Return one number for each row of some columns."""
    numpy = import_module("numpy")
    found = numpy.zeros(len(columns[0]), "uint64")
    for column in columns:
        found = (found ^ column.astype("uint64")) * numpy.uint64(_MIX)
        found ^= found >> numpy.uint64(_SHIFT)
    return found


def _alike(left: Array, right: Array) -> tuple[Array, Array]:
    """Return the places of equal tokens, the first with the first, the second with the second."""
    numpy = import_module("numpy")
    one, other = (numpy.argsort(tokens, kind="stable") for tokens in (left, right))
    left, right = left[one], right[other]
    turn = numpy.arange(len(left)) - numpy.searchsorted(left, left, "left")
    start = numpy.searchsorted(right, left, "left")
    found = turn < numpy.searchsorted(right, left, "right") - start
    return one[found], other[(start + turn)[found]]


def _stretch(steps: Array, step: int) -> slice:
    """Return where a step begins and ends among steps in their order."""
    search = import_module("numpy").searchsorted
    return slice(int(search(steps, step, "left")), int(search(steps, step, "right")))
