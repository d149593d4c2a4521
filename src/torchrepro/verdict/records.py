"""Compares two traces record by record, the main thread step by step and the others at once.

Records are read as arrays, whose numbers mean the same in both traces.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import count
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from torchrepro.ground.errors import TraceError
from torchrepro.trace.format import INPUT, MAIN, NEW_TENSOR, OUTPUT, PARTLY, Outline
from torchrepro.verdict.criteria import NAMES, RERECORD, Criteria, Pair, Statistics, excess
from torchrepro.verdict.first_difference import INPUTLESS, FirstDifference, describe
from torchrepro.verdict.matching import CUT_OFF, FED, Matching, match, match_threads, mixed
from torchrepro.verdict.reach import Reach
from torchrepro.verdict.render import counted, short

if TYPE_CHECKING:
    from torchrepro.trace.format import Site
    from torchrepro.trace.reader import Trace
    from torchrepro.verdict.matching import Array
    from torchrepro.verdict.value import Divergence

    Sides = tuple[Array, Array]  # records of the left run, and of the right one

VIEW = b""  # stands for all views of what ignored records wrote

CACHED = 1 << 17
"""Records whose outlines stay translated. A program has few outlines, and they may be long."""

OF_SITE = ("key", "shape", "size", "spot", "algorithm", "effect", "module", "line")
RECORD = np.dtype(
    [
        ("id", "i8"),
        ("step", "i4"),
        ("thread", "i4"),
        ("thread_name", "i4"),
        ("key", "i4"),  # phase, module and op
        ("shape", "i4"),  # dtypes and shapes of the outputs
        ("size", "i4"),  # shapes of the outputs alone
        ("spot", "i4"),  # phase and module
        ("algorithm", "i4"),  # how the fingerprints of the outputs were taken
        ("effect", "?"),  # whether the record cannot show that a difference began with it
        ("module", "i4"),
        ("line", "i4"),  # an edit shifts the lines of alike records
        ("compared", "?"),  # whether records of the site are
        ("argument", "i4"),
        ("inputs", "u8"),  # a hash of the fingerprints
        ("outputs", "u8"),
        ("partly", "?"),  # whether a fingerprint is of what was written, not of the bytes
    ]
)
"""A record, whose numbers mean the same in both traces; thread, id and step are of its own."""

NOTHING = np.zeros(0, RECORD)

BY_BITS = (
    ("key", "argument", "shape", "inputs", "outputs"),
    ("key", "argument", "shape", "inputs"),
    ("key", "argument", "shape"),
    ("key",),
)
BY_STATISTICS = (
    ("key", "argument", "size"),
    ("key", "size"),
    ("key",),
    ("spot", "size"),  # devices have ops of their own for the same module
)
"""The columns by which records are matched, the finest first."""

_DEVICE = re.compile(r"(?<=\]) (\w+)(?::\d+)?")
_SIZE = re.compile(r"\[[^]]*\]")


class _Digests:
    """Where the digests of each record are among those of all, in words of 8 bytes."""

    def __init__(self, ends: Sequence[int], lengths: Sequence[int]) -> None:
        self.ends, size = (np.asarray(each, "int64") // 8 for each in (ends, lengths))
        self.begins = self.ends - size
        # A number for the place of each word within its record.
        self.salt = mixed([np.arange(size.sum()) - np.repeat(self.begins, size) + 1])

    def hashes(self, digests: bytes) -> Array:
        """Return a hash of the digests of each record: a sum over its words, 0 without any."""
        sums = np.zeros(len(self.salt) + 1, "u8")
        np.cumsum(mixed([self.salt, np.frombuffer(digests, "<u8")]), out=sums[1:])
        return sums[self.ends] - sums[self.begins]


class Reader:
    """Reads the records of a trace step by step, without those of some sites.

    `shared` numbers what sites, arguments and threads stand for, in both traces alike. What
    records of the lines to `ignore` wrote is in `from_ignored`, once they have been passed over.
    """

    def __init__(
        self,
        trace: Trace,
        shared: defaultdict[Any, int],
        ignore: Sequence[str],
        *,
        misses_steps: bool,
    ) -> None:
        self.trace = trace
        self.ignored, self.from_ignored = set[int](), set[bytes]()
        self.sites = np.zeros(len(trace.sites) + 1, RECORD)  # sites are numbered from 1
        columns = self.sites[[*OF_SITE, "compared"]]
        for number, site in trace.sites.items():
            if any(is_at(site, where) for where in ignore):
                self.ignored.add(number)
            # What a full step knows of tensors that were made before it is not the same.
            is_unknown = misses_steps and site.op == NEW_TENSOR
            columns[number] = (
                shared[site.key],
                shared[_DEVICE.sub("", site.outputs)],
                shared[tuple(_SIZE.findall(site.outputs))],
                shared[site.phase, site.module],
                shared[self.algorithms(site.outputs)],
                site.op in INPUTLESS or site.phase == "collective",
                shared[site.module],
                shared[short(site.source)],
                number not in self.ignored and not is_unknown,
            )
        self.arguments = np.array([shared[text] for text in trace.arguments.values()])
        self._threads = np.array([shared[name] for name in trace.threads.values()] or [-1])
        self._known: dict[Outline, tuple[Array, _Digests, _Digests]] = {}

    def algorithms(self, outputs: str) -> frozenset[str]:
        """Return how the fingerprints of outputs were taken, by what their devices are."""
        known: Mapping[str, str] = self.trace.meta.get("algorithm") or {}
        devices = _DEVICE.findall(outputs)
        devices += ["cpu"] * (len(_SIZE.findall(outputs)) > len(devices))
        return frozenset(known.get(device, known.get("others", device)) for device in devices)

    def parts(self, step: int, *, on_main: bool) -> Iterator[Array]:
        """Yield the records of a step, on the main thread or on the others, in parts."""
        for part in self.trace.parts(step):
            outline = part.outline
            if outline not in self._known:
                if sum(map(len, self._known)) > CACHED:
                    self._known.clear()
                self._known[outline] = self._translated(outline)
            records, inputs, outputs = self._known[outline]
            if self.ignored:
                for number, site in zip(part.ids, outline.sites, strict=True):
                    if site in self.ignored:
                        self.take_in(number)
            chosen = records["compared"] & ((records["thread"] == MAIN) == on_main)
            if not chosen.any():
                continue
            records = records.copy()
            records["id"] = part.ids
            records["step"] = step
            records["inputs"] = inputs.hashes(part.inputs)
            records["outputs"] = outputs.hashes(part.outputs)
            if PARTLY in part.outputs:
                each = zip(outline.output_ends, outline.output_lengths, strict=True)
                records["partly"] = [
                    any(part.outputs.startswith(PARTLY, at) for at in range(end - n, end, OUTPUT))
                    for end, n in each
                ]
            yield records if chosen.all() else records[chosen]

    def take_in(self, number: int) -> None:
        """Note what an ignored record wrote, or what one that it fed did."""
        record = self.trace.record(number)
        outputs = record.outputs
        self.from_ignored.update(outputs[at : at + INPUT] for at in range(0, len(outputs), OUTPUT))
        if not outputs and record.inputs and self.trace.sites[record.site].outputs:
            self.from_ignored.add(VIEW)  # its digest comes from its base's, and is in no record

    def _translated(self, outline: Outline) -> tuple[Array, _Digests, _Digests]:
        records = self.sites[np.asarray(outline.sites)]
        records["thread"] = outline.threads
        records["thread_name"] = self._threads[np.asarray(outline.threads)]
        records["argument"] = self.arguments[np.asarray(outline.arguments)]
        return (
            records,
            _Digests(outline.input_ends, outline.input_lengths),
            _Digests(outline.output_ends, outline.output_lengths),
        )


def added(left: Mapping[str, int], right: Mapping[str, int]) -> Mapping[str, int]:
    """Return the sum of two counts, neither of which may be changed: steps share them."""
    if not left or not right:
        return left or right
    return {name: left.get(name, 0) + right.get(name, 0) for name in {**left, **right}}


def is_at(site: Site, where: str) -> bool:
    """Whether a site is at a line, which may be named without some of its folders."""
    return site.source == where or site.source.endswith(f"/{where.removeprefix('./')}")


PROPAGATED, INDEPENDENT, ALONE = "propagated", "independent", "alone"
"""How a record differs: its inputs differ too, they are equal, or it has no partner."""

_ELSEWHERE = (
    "ran on another kind of device in the other run, where fingerprints are taken in another way: "
    "no outputs of such an op were compared"
)
FEW = 16  # records before the first difference that read something else: they may show its origin

VALUES = ("argument", "shape", "inputs", "outputs")


@dataclass(slots=True)
class StepComparison:
    """What the comparison of one step found."""

    tally: Counter[str] = field(default_factory=Counter)
    """Records that differ, by how they differ, the first one included."""
    totals: Mapping[str, int] = field(default_factory=dict)  # records of each module
    differing: Mapping[str, int] = field(default_factory=dict)  # records of each module that differ
    first: FirstDifference | None = None

    def add(self, other: StepComparison) -> None:
        """Add what was found in another part of the step, or on other threads."""
        firsts = [each for each in (self.first, other.first) if each is not None]
        self.first = min(firsts, key=attrgetter("place"), default=None)
        self.tally.update(other.tally)
        self.totals = added(self.totals, other.totals)
        self.differing = added(self.differing, other.differing)


class Records:
    """Compares the records of some steps of two traces."""

    def __init__(
        self, pair: Pair, criteria: Criteria, steps: Sequence[int], ignore: Sequence[str] = ()
    ) -> None:
        self.pair, self.criteria, self.steps = pair, criteria, steps
        self._rounds = BY_BITS if criteria.tolerance is None else BY_STATISTICS
        self.fed = 0  # records that differ only by what ignored ones wrote
        self._incomparable = 0  # pairs whose fingerprints were not taken in the same way
        self.unmatched = 0  # records without a partner
        self.thread_notes: list[str] = []
        shared = defaultdict[Any, int](count().__next__)
        left, right = (
            Reader(trace, shared, ignore, misses_steps=pair.misses_steps) for trace in pair.traces
        )
        self.readers = left, right
        self._ignores = bool(left.ignored or right.ignored)
        self._names = {number: name for name, number in shared.items()}
        self._counted = lru_cache(maxsize=32)(self._count_outline)
        self._excess: dict[int, str] = {}
        self._diverged = False
        self.reach = Reach(pair.left)
        self._last: tuple[Sides, Matching] | None = None

    def refuse_unequal_algorithms(self) -> None:
        """Raise `TraceError` if the bits of the two runs cannot be compared at all."""
        used = [
            {name for site in its.trace.sites.values() for name in its.algorithms(site.outputs)}
            - {"meta"}  # such a tensor has no bytes, and so no fingerprint
            for its in self.readers
        ]
        if used[0] and used[1] and used[0] != used[1]:
            raise TraceError.about(
                "the two runs computed on other kinds of device, whose fingerprints differ",
                found=" and ".join(", ".join(sorted(names)) for names in used),
                todo=RERECORD,
            )

    @property
    def incomparable(self) -> str:
        """Says what could not be compared; empty if all could."""
        many = counted(self._incomparable, "op")
        return f"{many} {_ELSEWHERE}" if self._incomparable else ""

    @cached_property
    def _unequal_steps(self) -> frozenset[int]:
        """The steps whose records have to be read: digests do not show that they are the same.

        Digests cover the numbers of sites and arguments. These mean the same in both traces unless
        one trace has a site or an argument that the other lacks.
        """
        one, other = self.readers
        kinds = [name for name in OF_SITE if name != "line"]
        sites, arguments = (
            set(np.flatnonzero(mine[:shorter] != its[:shorter]).tolist())
            for mine, its in (
                (one.sites[kinds], other.sites[kinds]),
                (one.arguments, other.arguments),
            )
            for shorter in [min(len(mine), len(its))]
        )
        left, right = (trace.steps for trace in self.pair.traces)
        return frozenset(
            step
            for step in self.steps
            if not left[step].digest
            or (left[step].digest, left[step].records) != (right[step].digest, right[step].records)
            or not all(
                sites.isdisjoint(outline.sites) and arguments.isdisjoint(outline.arguments)
                for outline in (self.pair.left.outlines(step) if sites or arguments else ())
            )
        )

    def step(self, number: int) -> StepComparison:
        """Compare the records of the main thread in a step, and of other threads meanwhile."""
        if not self._unequal_steps:
            return StepComparison(totals=self._totals(number, on_main=False))
        found = StepComparison()
        if not self.pair.in_order:
            found.add(self._over_the_run[True].get(number, StepComparison()))
        elif number not in self._unequal_steps:
            found.totals = self._totals(number, on_main=True)
        else:
            self._compare_main(number, found)
        found.add(self._over_the_run[False].get(number, StepComparison()))
        return found

    def describe(self, difference: FirstDifference) -> Divergence:
        return describe(self.pair, difference, self._excess.get(difference.left or 0))

    def _compare_main(self, number: int, found: StepComparison) -> None:
        left, right = (reader.parts(number, on_main=True) for reader in self.readers)
        while True:
            one, other = next(left, NOTHING), next(right, NOTHING)
            if not np.array_equal(one["key"], other["key"]):
                one, other = np.concatenate([one, *left]), np.concatenate([other, *right])
            if not len(one) and not len(other):
                return
            names = "key", *VALUES
            if not self._diverged and all(np.array_equal(one[each], other[each]) for each in names):
                found.add(StepComparison(totals=self._count(one)))
                continue
            ops = one["key"], other["key"]
            # After the runs diverged, parts of the same ops are matched alike.
            if self._last is not None and all(map(np.array_equal, self._last[0], ops)):
                matching = self._last[1]
            else:
                matching = match(one, other, self._rounds)
                self._last = (ops, matching) if self._diverged and not self._ignores else None
            pairs, lone = self._matched((one, other), matching)
            part, differs = self._compare(pairs, lone)
            part.totals = self._count(pairs[0], *lone)
            if not self._diverged:
                part.first = _first(matching, (one, other), pairs, lone, differs)
                self._diverged = part.first is not None
            self.reach.add(*pairs, differs)
            alone = (int(each["id"][0]) for each in lone if len(each))
            self.reach.until = min([self.reach.until, *alone])
            found.add(part)

    def _matched(self, sides: Sides, matching: Matching) -> tuple[Sides, Sides]:
        """Return the pairs, and what lacks a partner that it should have."""
        if self._ignores:
            self._leave_out_fed(sides, matching)
        (left, right), (here, there) = sides, matching.pairs
        free, other = matching.free(0), matching.free(1)
        self.unmatched += len(free) + len(other)
        if not self.criteria.needs_partner:
            free, other = free[:0], other[:0]
        return (left[here], right[there]), (left[free], right[other])

    def _leave_out_fed(self, sides: Sides, matching: Matching) -> None:
        """Expect no partner for records whose differing inputs all come from ignored ones.

        A difference begins in a record with equal inputs, or without a partner, which stays. So
        what an ignored line has brought in can hide none.
        """
        left, right = sides
        here, there = matching.pairs
        unequal = left["inputs"][here] != right["inputs"][there]
        both = zip(here[unequal].tolist(), there[unequal].tolist(), strict=True)
        alone = ((n, None) for n in matching.free(0).tolist())
        other = ((None, n) for n in matching.free(1).tolist())
        for places in sorted([*both, *alone, *other], key=lambda its: max(n or 0 for n in its)):
            found = [
                (reader, int(side["id"][place]))
                for reader, side, place in zip(self.readers, sides, places, strict=True)
                if place is not None
            ]
            inputs = [
                [each[at : at + INPUT] for at in range(0, len(each), INPUT)]
                for each in (reader.trace.record(number).inputs for reader, number in found)
            ]
            if len(found) == 1:
                is_fed = not found[0][0].from_ignored.isdisjoint(inputs[0])
            else:
                is_fed = len(inputs[0]) == len(inputs[1]) and all(
                    one == two
                    or all(
                        value in reader.from_ignored or VIEW in reader.from_ignored
                        for value, (reader, _) in zip((one, two), found, strict=True)
                    )
                    for one, two in zip(*inputs, strict=True)
                )
            if not is_fed:
                continue
            self.fed += 1
            for reader, number in found:
                reader.take_in(number)
            for partners, place in zip(matching.partners, places, strict=True):
                if place is not None:
                    partners[place] = FED

    def _compare(self, pairs: Sides, lone: Sides) -> tuple[StepComparison, Array]:
        left, right = pairs
        differs = self._unequal(left, right)
        total, dependent = int(differs.sum()), int((differs & _depends(pairs)).sum())
        alone = sum(map(len, lone))
        tally = {PROPAGATED: dependent, INDEPENDENT: total - dependent, ALONE: alone}
        differing = self._count(left[differs], *lone)
        return StepComparison(Counter(tally), differing=differing), differs

    def _unequal(self, left: Array, right: Array) -> Array:
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
        self._incomparable += int((~alike).sum())
        differs &= alike
        return differs | (left["argument"] != right["argument"]) | (left["shape"] != right["shape"])

    def _count(self, *records: Array) -> Mapping[str, int]:
        """Return how often each module is there, in the order in which it first is."""
        modules = np.concatenate([each["module"] for each in records])
        found, first, often = np.unique(modules, return_index=True, return_counts=True)
        order = np.argsort(first)
        each = zip(found[order].tolist(), often[order].tolist(), strict=True)
        return {self._names[number]: many for number, many in each}

    def _totals(self, step: int, *, on_main: bool) -> Mapping[str, int]:
        """Return how many records each module has, on all threads or the main one."""
        total: Mapping[str, int] = {}
        for outline in self.pair.left.outlines(step):
            total = added(total, self._counted(outline, on_main))
        return total

    def _count_outline(self, outline: Outline, on_main: bool) -> Mapping[str, int]:  # noqa: FBT001
        records = self.readers[0].sites[["module"]][np.asarray(outline.sites)]
        return self._count(records[np.asarray(outline.threads) == MAIN] if on_main else records)

    @cached_property
    def _over_the_run(self) -> Mapping[bool, Mapping[int, StepComparison]]:
        """How the main thread, and the others, differ, by the step in which it was recorded.

        A thread beside the main one has its own timing. In which step of the main thread a record
        of it falls is an accident, and so is what of the main thread falls into a step that
        another thread ends. The records of these are therefore compared over the whole run.
        """
        others = {thread for trace in self.pair.traces for thread in trace.threads} - {MAIN}
        return {
            True: {} if self.pair.in_order else self._all_steps(on_main=True),
            False: self._all_steps(on_main=False) if others else {},
        }

    def _all_steps(self, *, on_main: bool) -> Mapping[int, StepComparison]:
        left, right = (
            np.concatenate(
                [NOTHING, *(part for n in self.steps for part in its.parts(n, on_main=on_main))]
            )
            for its in self.readers
        )
        if on_main:
            matching = match(left, right, self._rounds)
        else:
            matching = match_threads(left, right, self._rounds, partial=self.steps[0] > 0)
        each = zip(NAMES, self.pair.traces, (left, right), matching.partners, strict=True)
        for name, trace, records, partners in each:
            cut_off = Counter(records["thread"][partners == CUT_OFF].tolist())
            self.thread_notes += [
                f"{name} has {counted(number, 'more op')} at an end of thread "
                f"{trace.threads.get(thread, thread)}, which was cut off at another moment: "
                "not compared"
                for thread, number in cut_off.items()
            ]
        pairs, lone = self._matched((left, right), matching)
        unequal = np.any([pairs[0][name] != pairs[1][name] for name in VALUES], axis=0)
        by_step = [_by_step(records) for records in (pairs[0], *lone)]
        found: dict[int, StepComparison] = {}
        for step in sorted({step for each in by_step for step in each}):
            its, mine, theirs = (each.get(step, slice(0)) for each in by_step)
            alone = lone[0][mine], lone[1][theirs]
            part = StepComparison()
            if unequal[its].any() or len(alone[0]) or len(alone[1]):
                both = pairs[0][its][unequal[its]], pairs[1][its][unequal[its]]
                part, differs = self._compare(both, alone)
                self.reach.until = 0  # what has no order is not followed
                part.first = _first_of_all_steps(self.pair, step, both, alone, differs)
            part.totals = self._count(pairs[0][its], *alone)
            found[step] = part
        return found


def _statistics(trace: Trace, ids: Sequence[int]) -> Mapping[int, list[Statistics]]:
    found: dict[int, list[Statistics]] = {}
    if ids:
        for record, *row in trace.statistics_of(range(min(ids), max(ids) + 1)):
            found.setdefault(record, []).append(tuple(row))
    return found


def _depends(pairs: Sides) -> Array:
    return (pairs[0]["inputs"] != pairs[1]["inputs"]) | pairs[0]["effect"]


def _first_pair(pairs: Sides, differs: Array) -> FirstDifference:
    left, right = pairs
    place = int(np.argmax(differs))
    mine = left["thread"][:place] == left["thread"][place]
    read = np.flatnonzero(mine & (left["inputs"][:place] != right["inputs"][:place]))[-FEW:]
    ids = (side["id"][read].tolist() for side in pairs)
    one, other = (int(side["id"][place]) for side in pairs)
    sort = PROPAGATED if _depends(pairs)[place] else INDEPENDENT
    return FirstDifference(one, other, sort, one, read=[*zip(*ids, strict=True)])


def _first(
    matching: Matching, parts: Sides, pairs: Sides, lone: Sides, differs: Array
) -> FirstDifference | None:
    """Return the first difference of the main thread, in the order of the left run.

    A record that only the right run has comes after the last pair before it, and before what the
    left run goes on with. A pair that moved says nothing about the place of its neighbours.
    """
    here, there = (side["id"] for side in parts)
    kept = matching.in_order
    found: list[tuple[float, FirstDifference]] = []
    if differs.any():
        found.append((matching.pairs[0][int(np.argmax(differs))], _first_pair(pairs, differs)))
    if len(lone[0]):
        left = int(matching.free(0)[0])
        before = int(np.searchsorted(kept[0], left))
        instead = _at(there, int(kept[1][before - 1]) + 1 if before else 0)
        number = int(here[left])
        found.append((left - 0.5, FirstDifference(number, None, ALONE, number, instead)))
    if len(lone[1]):
        right = int(matching.free(1)[0])
        before = int(np.searchsorted(kept[1], right))
        place = int(kept[0][before - 1]) + 1 if before else 0
        instead = _at(here, place)
        at = math.inf if instead is None else instead - 0.5
        alone = FirstDifference(None, int(there[right]), ALONE, at, instead)
        found.append((place - 0.5, alone))
    return min(found, key=itemgetter(0), default=(0, None))[1]


def _at(ids: Array, place: int) -> int | None:
    return int(ids[place]) if place < len(ids) else None


def _first_of_all_steps(
    pair: Pair, step: int, pairs: Sides, lone: Sides, differs: Array
) -> FirstDifference | None:
    """Return the first difference in a step of records that were compared over the whole run.

    The place of a record of the right run is only an estimate: its place within its step.
    """
    found = [_first_pair(pairs, differs)] if differs.any() else []
    if len(lone[0]):
        number = int(lone[0]["id"][0])
        found.append(FirstDifference(number, None, ALONE, number))
    if len(lone[1]):
        number = int(lone[1]["id"][0])
        left, right = (trace.steps[step].first for trace in pair.traces)
        found.append(FirstDifference(None, number, ALONE, number - right + left))
    return min(found, key=attrgetter("place"), default=None)


def _by_step(records: Array) -> dict[int, slice]:
    steps, begins, sizes = np.unique(records["step"], return_index=True, return_counts=True)
    each = zip(steps.tolist(), begins.tolist(), sizes.tolist(), strict=True)
    return {step: slice(begin, begin + size) for step, begin, size in each}
