"""Compares two traces record by record, the main thread step by step and the others as a whole."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from functools import cached_property, partial
from itertools import count
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from torchrepro.trace.format import NEW_TENSOR
from torchrepro.verdict.columns import (
    ALONE,
    INDEPENDENT,
    MAIN,
    NAMES,
    PROPAGATED,
    Reader,
    StepComparison,
    joined,
)
from torchrepro.verdict.criteria import excess
from torchrepro.verdict.first_difference import FirstDifference, describe
from torchrepro.verdict.matching import CUT_OFF, Matching, match, match_threads
from torchrepro.verdict.render import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torchrepro.trace.reader import Trace
    from torchrepro.verdict.columns import Array, Pair
    from torchrepro.verdict.criteria import Criteria, Statistics
    from torchrepro.verdict.value import Divergence

    Sides = tuple[Array, Array]
    """Records of the left run, and of the right one."""

FEW = 16
"""Records before the first difference that read something else: they may show its origin."""


class Records:
    """Compares the records of some steps of two traces."""

    def __init__(self, pair: Pair, criteria: Criteria, steps: Sequence[int]) -> None:
        self.pair, self.criteria, self.steps = pair, criteria, steps
        self.incomparable = 0
        """Pairs whose fingerprints were not taken in the same way."""
        self.unmatched = 0
        """Records without a partner."""
        self.thread_notes: list[str] = []
        shared = defaultdict[object, int](count().__next__)
        left, right = (
            Reader(trace, shared, _made_before(trace) if pair.misses_steps else ())
            for trace in pair.traces
        )
        self.readers = left, right
        self._modules = {**left.modules, **right.modules}
        self._ambiguous = [
            {number for number in mine.keys() & its.keys() if mine[number] != its[number]}
            for mine, its in (
                (
                    {site: columns[:-1] for site, columns in left.sites.items()},
                    {site: columns[:-1] for site, columns in right.sites.items()},
                ),
                (left.arguments, right.arguments),
            )
        ]
        self._excess: dict[int, str] = {}
        self._diverged = False
        self._last: tuple[Sides, Matching] | None = None

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

    @cached_property
    def _unequal_steps(self) -> frozenset[int]:
        """The steps whose records have to be read."""
        return frozenset(number for number in self.steps if not self._digests_agree(number))

    def _digests_agree(self, number: int) -> bool:
        """Whether the digests show that a step is the same, without reading its records.

        Digests cover the numbers of sites and arguments. These mean the same in both traces unless
        one trace has a site or an argument that the other lacks.
        """
        left, right = (trace.steps[number] for trace in self.pair.traces)
        sites, arguments = self._ambiguous
        return (
            (left.digest, left.records) == (right.digest, right.records)
            and bool(left.digest)
            and (
                not (sites or arguments)
                or all(
                    sites.isdisjoint(outline.sites) and arguments.isdisjoint(outline.arguments)
                    for outline in self.pair.left.outlines(number)
                )
            )
        )

    def step(self, number: int) -> StepComparison:
        """Compare the records of the main thread in a step, and of other threads meanwhile."""
        if not self._unequal_steps:
            return StepComparison(totals=self.readers[0].totals(number, on_main=False))
        found = StepComparison()
        if number not in self._unequal_steps:
            found.totals = self.readers[0].totals(number, on_main=True)
        else:
            self._compare_main(number, found)
        if number in self._other_threads:
            found.add(self._other_threads[number])
        return found

    def _compare_main(self, number: int, found: StepComparison) -> None:
        """Compare the main thread part by part, while both runs do the same ops; else at once."""
        left, right = (reader.parts(number, on_main=True) for reader in self.readers)
        nothing = joined([])
        while True:
            one, other = next(left, nothing), next(right, nothing)
            if not np.array_equal(one["key"], other["key"]):
                one, other = joined([one, *left]), joined([other, *right])
            if not len(one) and not len(other):
                return
            names = "key", "shape", "argument", "outputs", "inputs"
            if not self._diverged and all(np.array_equal(one[each], other[each]) for each in names):
                found.add(StepComparison(totals=self._count(one)))
                continue
            matching = self._match(one, other)
            here, there = matching.pairs
            pairs = one[here], other[there]
            lone = self._lone((one[matching.free(0)], other[matching.free(1)]))
            part, differs = self._compare(pairs, lone)
            part.totals = self._count(pairs[0], *lone)
            if not self._diverged:
                difference = _first(matching, (one, other), pairs, lone, differs)
                if difference is not None:
                    self._note_first(part, difference, pairs, differs)
                    self._diverged = True
            found.add(part)

    def _match(self, left: Array, right: Array) -> Matching:
        """Match a part. After the runs diverged, parts of the same ops are matched alike."""
        ops = left["key"], right["key"]
        if self._last is not None and all(map(np.array_equal, self._last[0], ops)):
            return self._last[1]
        matching = match(left, right, self.criteria.matched_by)
        self._last = (ops, matching) if self._diverged else None
        return matching

    def _lone(self, records: Sides) -> Sides:
        """Return the records without a partner that should have one."""
        self.unmatched += sum(map(len, records))
        return records if self.criteria.needs_partner else (records[0][:0], records[1][:0])

    def _compare(self, pairs: Sides, lone: Sides) -> tuple[StepComparison, Array]:
        """Compare records that belong together; returns which of the pairs differ as well."""
        left, right = pairs
        differs = self._unequal(left, right)
        total, dependent = int(differs.sum()), int((differs & _dependent(pairs)).sum())
        tally = {
            PROPAGATED: dependent,
            INDEPENDENT: total - dependent,
            ALONE: sum(map(len, lone)),
        }
        differing = self._count(left[differs], *lone)
        return StepComparison(Counter(tally), differing=differing), differs

    def _unequal(self, left: Array, right: Array) -> Array:
        """Return for each pair whether it differs: in bits, or out of tolerance."""
        differs = left["outputs"] != right["outputs"]
        if self.criteria.tolerance is not None:
            places = np.flatnonzero(differs)
            ids = [side["id"][places].tolist() for side in (left, right)]
            one, other = map(_statistics, self.pair.traces, ids)
            texts = [
                excess(one.get(mine, []), other.get(its, []), *self.criteria.tolerance)
                for mine, its in zip(*ids, strict=True)
            ]
            self._excess.update(filter(itemgetter(1), zip(ids[0], texts, strict=True)))
            differs[places] = list(map(bool, texts))
            return differs
        if self.pair.misses_steps:
            differs &= ~(left["partly"] | right["partly"])
        alike = left["algorithm"] == right["algorithm"]
        self.incomparable += int((~alike).sum())
        differs &= alike
        return differs | (left["argument"] != right["argument"]) | (left["shape"] != right["shape"])

    def _count(self, *records: Array) -> Counter[str]:
        """Return how many of some records each module has."""
        return Counter(
            self._modules[number] for each in records for number in each["module"].tolist()
        )

    def _note_first(
        self,
        found: StepComparison,
        difference: FirstDifference,
        pairs: Sides,
        differs: Array,
    ) -> None:
        """Note what differs first, and how."""
        found.sort = ALONE
        if difference.left is not None and difference.right is not None:
            place = int(np.argmax(differs))
            found.sort = PROPAGATED if _dependent(pairs)[place] else INDEPENDENT
        found.place = math.inf
        if difference.left is not None:
            found.place = difference.left
        elif difference.instead is not None:
            found.place = difference.instead - 0.5
        found.first = partial(self._describe, difference)

    def _describe(self, difference: FirstDifference) -> Divergence:
        out_of_tolerance = self._excess.get(difference.left or 0)
        if self.criteria.tolerance is None or difference.right is None:
            out_of_tolerance = None
        return describe(self.pair, difference, out_of_tolerance)

    @cached_property
    def _other_threads(self) -> Mapping[int, StepComparison]:
        """How other threads of two runs differ, by the step under which it was recorded.

        Such a thread has its own timing. The step of the main thread in which a record of it falls
        is an accident. The records of all of them are therefore compared over the whole run.
        """
        found = defaultdict[int, StepComparison](StepComparison)
        threads = {thread for trace in self.pair.traces for thread in trace.threads}
        if not self._unequal_steps or threads <= {MAIN}:
            return found
        left, right = (
            joined(part for number in self.steps for part in reader.parts(number, on_main=False))
            for reader in self.readers
        )
        rounds = self.criteria.matched_by
        matching = match_threads(left, right, rounds, partial=self.steps[0] > 0)
        for name, trace, records, partners in zip(
            NAMES,
            self.pair.traces,
            (left, right),
            (matching.of_left, matching.of_right),
            strict=True,
        ):
            cut_off = Counter(records["thread"][partners == CUT_OFF].tolist())
            self.thread_notes += [
                f"{name} has {counted(number, 'more op')} at an end of thread "
                f"{trace.threads.get(thread, thread)}, which was cut off at another moment: "
                "not compared"
                for thread, number in cut_off.items()
            ]
        here, there = matching.pairs
        pairs = left[here], right[there]
        lone = self._lone((left[matching.free(0)], right[matching.free(1)]))
        for records in (pairs[0], *lone):
            for step, some in _by_step(records):
                found[step].add(StepComparison(totals=self._count(some)))
        names = "argument", "shape", "inputs", "outputs"
        unequal = np.any([pairs[0][name] != pairs[1][name] for name in names], axis=0)
        one, other = (side[unequal] for side in pairs)
        steps = {*one["step"].tolist(), *(step for side in lone for step in side["step"].tolist())}
        for step in sorted(steps):
            at = one["step"] == step
            mine = one[at], other[at]
            alone = lone[0][lone[0]["step"] == step], lone[1][lone[1]["step"] == step]
            part, differs = self._compare(mine, alone)
            firsts = [*_firsts_of_threads(self.pair, step, mine, alone, differs)]
            if firsts:
                place, difference = min(firsts, key=itemgetter(0))
                self._note_first(part, difference, mine, differs)
                part.place = place
            found[step].add(part)
        return found


def _made_before(trace: Trace) -> list[int]:
    """Return the sites of tensors that the program made, perhaps in a step without records."""
    return [number for number, site in trace.sites.items() if site.op == NEW_TENSOR]


def _statistics(trace: Trace, ids: Sequence[int]) -> Mapping[int, list[Statistics]]:
    found: dict[int, list[Statistics]] = {}
    if ids:
        for record, *row in trace.statistics_of(range(min(ids), max(ids) + 1)):
            found.setdefault(record, []).append(tuple(row))
    return found


def _dependent(pairs: Sides) -> Array:
    """Return for each pair whether it can only pass a difference on."""
    left, right = pairs
    return (left["inputs"] != right["inputs"]) | left["effect"]


def _first(
    matching: Matching, parts: Sides, pairs: Sides, lone: Sides, differs: Array
) -> FirstDifference | None:
    """Return the first difference of the main thread, in the order of the left run.

    A record that only the right run has comes after the last pair before it. A pair that moved
    says nothing about the place of its neighbours.
    """
    here, there = (side["id"] for side in parts)
    kept = matching.in_order
    places = [math.inf] * 3
    if differs.any():
        pair = int(np.argmax(differs))
        places[0] = matching.pairs[0][pair]
    if len(lone[0]):
        left = int(matching.free(0)[0])
        places[1] = left
    if len(lone[1]):
        right = int(matching.free(1)[0])
        before = int(np.searchsorted(kept[1], right))
        instead = int(kept[0][before - 1]) + 1 if before else 0
        places[2] = instead - 0.5
    earliest = min(places)
    if earliest == math.inf:
        return None
    if places[0] == earliest:
        one, other = pairs
        read = np.flatnonzero(one["inputs"][:pair] != other["inputs"][:pair])[-FEW:]
        ids = (side["id"][read].tolist() for side in pairs)
        return FirstDifference(
            int(one["id"][pair]), int(other["id"][pair]), read=[*zip(*ids, strict=True)]
        )
    if places[1] <= earliest + 0.5:
        before = int(np.searchsorted(kept[0], left))
        instead = int(kept[1][before - 1]) + 1 if before else 0
        return FirstDifference(int(here[left]), None, _at(there, instead))
    return FirstDifference(None, int(there[right]), _at(here, instead))


def _at(ids: Array, place: int) -> int | None:
    return int(ids[place]) if place < len(ids) else None


def _firsts_of_threads(
    pair: Pair, step: int, pairs: Sides, lone: Sides, differs: Array
) -> Iterator[tuple[float, FirstDifference]]:
    """Yield the first difference of each kind in a step, with its place in the left run.

    The place of a record of the right run is only an estimate: its place within its step.
    """
    left, right = pairs
    if differs.any():
        place = int(np.argmax(differs))
        mine = left["thread"][:place] == left["thread"][place]
        unequal = left["inputs"][:place] != right["inputs"][:place]
        read = np.flatnonzero(mine & unequal)[-FEW:]
        ids = (side["id"][read].tolist() for side in pairs)
        one, other = (int(side["id"][place]) for side in pairs)
        yield one, FirstDifference(one, other, read=[*zip(*ids, strict=True)])
    if len(lone[0]):
        number = int(lone[0]["id"][0])
        yield number, FirstDifference(number, None)
    if len(lone[1]):
        number = int(lone[1]["id"][0])
        begins = [trace.steps[step].first for trace in pair.traces]
        yield number - begins[1] + begins[0], FirstDifference(None, number)


def _by_step(records: Array) -> Iterator[tuple[int, Array]]:
    """Yield the records of each step; they are in the order of their steps."""
    for some in np.split(records, np.flatnonzero(np.diff(records["step"])) + 1):
        if len(some):
            yield int(some["step"][0]), some
