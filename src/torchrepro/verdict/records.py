"""Comparison of two traces record by record.

Records of the main thread are compared step by step, and records of other threads over the whole
run. Records are rows of numpy arrays, in which equal texts have equal numbers in both traces.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from torchrepro.ground.errors import TraceError
from torchrepro.trace.format import INPUT, MAIN, NEW_TENSOR, OUTPUT, PARTLY, Outline
from torchrepro.verdict.criteria import NAMES, RERECORD, Criteria, Pair, Statistics, excess
from torchrepro.verdict.first_difference import INPUTLESS, FirstDifference, describe
from torchrepro.verdict.matching import DOWNSTREAM, TRUNCATED, Matching, match, match_threads, mixed
from torchrepro.verdict.reach import Reach
from torchrepro.verdict.render import counted, short

if TYPE_CHECKING:
    from torchrepro.trace.format import Site
    from torchrepro.trace.reader import Trace
    from torchrepro.verdict.matching import Array
    from torchrepro.verdict.value import Divergence

    Sides = tuple[Array, Array]  # records of the left run, and of the right one

VIEW = b""  # represents all views of tensors that ignored records wrote

CACHED = 1 << 17
"""How many records of translated outlines are cached. Programs have few outlines, maybe long."""

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
        ("algorithm", "i4"),  # the algorithms that fingerprinted the outputs
        ("effect", "?"),  # whether the inputs are unknown: a difference may have begun earlier
        ("module", "i4"),
        ("line", "i4"),  # equal records may have different lines after an edit of the program
        ("compared", "?"),  # whether records of the site are compared
        ("argument", "i4"),
        ("inputs", "u8"),  # a hash of the fingerprints
        ("outputs", "u8"),
        ("partly", "?"),  # whether a fingerprint covers only the bytes that were written
    ]
)
"""A record, numbered equally in both traces, except for thread, id and step."""

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
    ("spot", "size"),  # devices may use different ops for the same module
)
"""Columns that must be equal to match two records, the strictest first."""

_DEVICE = re.compile(r"(?<=\]) (\w+)(?::\d+)?")
_SIZE = re.compile(r"\[[^]]*\]")


class _Digests:
    """The positions of each record's digests in the sequence of all digests, in 8-byte words."""

    def __init__(self, ends: Sequence[int], lengths: Sequence[int]) -> None:
        self.ends, size = (np.asarray(offsets, "int64") // 8 for offsets in (ends, lengths))
        self.begins = self.ends - size
        # A hash of the position of each word within its record.
        self.salt = mixed([np.arange(size.sum()) - np.repeat(self.begins, size) + 1])

    def hashes(self, digests: bytes) -> Array:
        """Return one hash for each record, over all of its digests. The hash of no digests is 0."""
        sums = np.zeros(len(self.salt) + 1, "u8")
        np.cumsum(mixed([self.salt, np.frombuffer(digests, "<u8")]), out=sums[1:])
        return sums[self.ends] - sums[self.begins]


class Reader:
    """Reads the records of a trace step by step, without the records of ignored lines.

    The mapping `shared` gives equal sites, arguments and threads of both traces the same number.
    The set `from_ignored` has the output fingerprints of all ignored records that were read so far.
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
            if any(is_at(site, location) for location in ignore):
                self.ignored.add(number)
            # To a fully recorded step, a tensor from an earlier step without ops may look new.
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
        """Return the fingerprint algorithms of `outputs`, which depend on the devices."""
        known: Mapping[str, str] = self.trace.meta.get("algorithm") or {}
        devices = _DEVICE.findall(outputs)
        devices += ["cpu"] * (len(_SIZE.findall(outputs)) > len(devices))
        return frozenset(known.get(device, known.get("others", device)) for device in devices)

    def parts(self, step: int, *, on_main: bool) -> Iterator[Array]:
        """Yield the records of a step in parts, for the main thread or for all other threads."""
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
                extents = zip(outline.output_ends, outline.output_lengths, strict=True)
                records["partly"] = [
                    any(part.outputs.startswith(PARTLY, at) for at in range(end - n, end, OUTPUT))
                    for end, n in extents
                ]
            yield records if chosen.all() else records[chosen]

    def take_in(self, number: int) -> None:
        """Add the outputs of a record that ignored lines affect to the set `from_ignored`."""
        record = self.trace.record(number)
        outputs = record.outputs
        self.from_ignored.update(outputs[at : at + INPUT] for at in range(0, len(outputs), OUTPUT))
        if not outputs and record.inputs and self.trace.sites[record.site].outputs:
            self.from_ignored.add(VIEW)  # the digest of a view is not recorded, only of its base

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


def is_at(site: Site, location: str) -> bool:
    """Whether a site is at `location`: ``file:line``, where leading folders may be missing."""
    return site.source == location or site.source.endswith(f"/{location.removeprefix('./')}")


PROPAGATED, INDEPENDENT, ALONE = "propagated", "independent", "alone"
"""How a record differs: its inputs differ too, its inputs are equal, or it has no partner."""

_ELSEWHERE = (
    "ran on another type of device in the other run, which computes fingerprints differently: "
    "the outputs of such ops were not compared"
)
FEW = 16  # the most earlier records with differing inputs that are searched for the origin

VALUES = ("argument", "shape", "inputs", "outputs")


@dataclass(slots=True)
class StepComparison:
    """Result of the comparison of one step."""

    tally: Counter[str] = field(default_factory=Counter)
    """Records that differ, by how they differ, the first one included."""
    totals: Counter[str] = field(default_factory=Counter)  # records of each module
    differing: Counter[str] = field(default_factory=Counter)  # records of each module that differ
    first: FirstDifference | None = None

    def add(self, addition: StepComparison) -> None:
        """Add the result for another part of the step, or for other threads."""
        firsts = [first for first in (self.first, addition.first) if first is not None]
        self.first = min(firsts, key=attrgetter("position"), default=None)
        self.tally.update(addition.tally)
        self.totals.update(addition.totals)
        self.differing.update(addition.differing)


class Records:
    """Compares the records of two traces in the given steps."""

    def __init__(
        self, pair: Pair, criteria: Criteria, steps: Sequence[int], ignore: Sequence[str] = ()
    ) -> None:
        self.pair, self.criteria, self.steps = pair, criteria, steps
        self._rounds = BY_BITS if criteria.tolerance is None else BY_STATISTICS
        self.fed = 0  # records that differ only because of ignored records
        self._incomparable = 0  # pairs whose fingerprints have different algorithms
        self.unmatched = 0  # records without a partner
        self.thread_notes: list[str] = []
        shared = defaultdict[Any, int](count().__next__)
        left, right = (
            Reader(trace, shared, ignore, misses_steps=pair.misses_steps) for trace in pair.traces
        )
        self.readers = left, right
        self._ignores = bool(left.ignored or right.ignored)
        self._names = {number: name for name, number in shared.items()}
        self._excess: dict[int, str] = {}
        self._diverged = False
        self.reach = Reach(pair.left)
        self._last: tuple[Sides, Matching] | None = None

    def refuse_unequal_algorithms(self) -> None:
        """Raise `TraceError` if the two runs used different fingerprint algorithms."""
        used = [
            set[str]().union(*(reader.algorithms(it.outputs) for it in reader.trace.sites.values()))
            - {"meta"}  # such tensors have no data
            for reader in self.readers
        ]
        if used[0] and used[1] and used[0] != used[1]:
            raise TraceError.about(
                "the two runs used different types of devices, whose fingerprints differ",
                found=" and ".join(", ".join(sorted(names)) for names in used),
                todo=RERECORD,
            )

    @property
    def incomparable(self) -> str:
        """A clause on ops that could not be compared; empty if there are none."""
        ops = counted(self._incomparable, "op")
        return f"{ops} {_ELSEWHERE}" if self._incomparable else ""

    def step(self, number: int) -> StepComparison:
        """Compare the records of a step, on the main thread and on all other threads."""
        comparison = StepComparison()
        if self.pair.in_order:
            self._compare_main(number, comparison)
        for by_step in self._over_the_run:
            comparison.add(by_step.get(number, StepComparison()))
        return comparison

    def describe(self, difference: FirstDifference) -> Divergence:
        return describe(self.pair, difference, self._excess.get(difference.left or 0))

    def _compare_main(self, number: int, comparison: StepComparison) -> None:
        left_parts, right_parts = (reader.parts(number, on_main=True) for reader in self.readers)
        while True:
            left, right = next(left_parts, NOTHING), next(right_parts, NOTHING)
            if not np.array_equal(left["key"], right["key"]):
                left, right = (
                    np.concatenate([left, *left_parts]),
                    np.concatenate([right, *right_parts]),
                )
            if not len(left) and not len(right):
                return
            names = "key", *VALUES
            if not self._diverged and all(
                np.array_equal(left[column], right[column]) for column in names
            ):
                comparison.add(StepComparison(totals=self._count(left)))
                continue
            ops = left["key"], right["key"]
            # After the divergence, a part with the same ops as the last part reuses its matching.
            if self._last is not None and all(map(np.array_equal, self._last[0], ops)):
                matching = self._last[1]
            else:
                matching = match(left, right, self._rounds)
                self._last = (ops, matching) if self._diverged and not self._ignores else None
            pairs, lone = self._matched((left, right), matching)
            part, differs = self._compare(pairs, lone)
            part.totals = self._count(pairs[0], *lone)
            if not self._diverged:
                part.first = _first(matching, (left, right), pairs, lone, differs)
                self._diverged = part.first is not None
            self.reach.add(*pairs, differs)
            alone = (int(records["id"][0]) for records in lone if len(records))
            self.reach.until = min([self.reach.until, *alone])
            comparison.add(part)

    def _matched(self, sides: Sides, matching: Matching) -> tuple[Sides, Sides]:
        """Return the paired records, and the unmatched records that count as differences."""
        if self._ignores:
            self._exclude_downstream(sides, matching)
        (left, right), (left_paired, right_paired) = sides, matching.pairs
        left_lone, right_lone = matching.free(0), matching.free(1)
        self.unmatched += len(left_lone) + len(right_lone)
        if not self.criteria.needs_partner:
            left_lone, right_lone = left_lone[:0], right_lone[:0]
        return (left[left_paired], right[right_paired]), (left[left_lone], right[right_lone])

    def _exclude_downstream(self, sides: Sides, matching: Matching) -> None:
        """Exclude paired records whose differing inputs all come from ignored records.

        An unmatched record is excluded if any of its inputs comes from an ignored record. Records
        with equal inputs stay, because ignored records are not the cause of their difference.
        """
        left, right = sides
        left_paired, right_paired = matching.pairs
        unequal = left["inputs"][left_paired] != right["inputs"][right_paired]
        both = zip(left_paired[unequal].tolist(), right_paired[unequal].tolist(), strict=True)
        lone_left = ((n, None) for n in matching.free(0).tolist())
        lone_right = ((None, n) for n in matching.free(1).tolist())
        unequal_or_lone = [*both, *lone_left, *lone_right]
        for positions in sorted(unequal_or_lone, key=lambda pair: max(n or 0 for n in pair)):
            unexpected = [
                (reader, int(records["id"][position]))
                for reader, records, position in zip(self.readers, sides, positions, strict=True)
                if position is not None
            ]
            inputs = [
                [digests[at : at + INPUT] for at in range(0, len(digests), INPUT)]
                for digests in (reader.trace.record(number).inputs for reader, number in unexpected)
            ]
            if len(unexpected) == 1:
                is_fed = not unexpected[0][0].from_ignored.isdisjoint(inputs[0])
            else:
                is_fed = len(inputs[0]) == len(inputs[1]) and all(
                    mine == theirs
                    or all(
                        value in reader.from_ignored or VIEW in reader.from_ignored
                        for value, (reader, _) in zip((mine, theirs), unexpected, strict=True)
                    )
                    for mine, theirs in zip(*inputs, strict=True)
                )
            if not is_fed:
                continue
            self.fed += 1
            for reader, number in unexpected:
                reader.take_in(number)
            for partners, position in zip(matching.partners, positions, strict=True):
                if position is not None:
                    partners[position] = DOWNSTREAM

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
            positions = np.flatnonzero(differs)
            ids = [records["id"][positions].tolist() for records in (left, right)]
            left_rows, right_rows = map(_statistics, self.pair.traces, ids)
            texts = [
                excess(
                    left_rows.get(mine, []), right_rows.get(theirs, []), *self.criteria.tolerance
                )
                for mine, theirs in zip(*ids, strict=True)
            ]
            self._excess.update(filter(itemgetter(1), zip(ids[0], texts, strict=True)))
            differs[positions] = list(map(bool, texts))
            return differs
        if self.pair.misses_steps:
            differs &= ~(left["partly"] | right["partly"])
        alike = left["algorithm"] == right["algorithm"]
        self._incomparable += int((~alike).sum())
        differs &= alike
        return differs | (left["argument"] != right["argument"]) | (left["shape"] != right["shape"])

    def _count(self, *records: Array) -> Counter[str]:
        """Return the number of records of each module, in the order of first appearance."""
        modules = np.concatenate([columns["module"] for columns in records])
        numbers, first, counts = np.unique(modules, return_index=True, return_counts=True)
        order = np.argsort(first)
        counted_modules = zip(numbers[order].tolist(), counts[order].tolist(), strict=True)
        return Counter({self._names[number]: size for number, size in counted_modules})

    @cached_property
    def _over_the_run(self) -> Sequence[Mapping[int, StepComparison]]:
        """Results by step for records that were matched over the whole run.

        Timing decides into which step the records of other threads fall. If another thread ends the
        steps, this applies to the records of the main thread too.
        """
        other_threads = {thread for trace in self.pair.traces for thread in trace.threads} - {MAIN}
        of_main = [] if self.pair.in_order else [True]
        return [
            self._all_steps(on_main=on_main) for on_main in of_main + [False] * bool(other_threads)
        ]

    def _all_steps(self, *, on_main: bool) -> Mapping[int, StepComparison]:
        left, right = (
            np.concatenate(
                [NOTHING, *(part for n in self.steps for part in reader.parts(n, on_main=on_main))]
            )
            for reader in self.readers
        )
        if on_main:
            matching = match(left, right, self._rounds)
        else:
            matching = match_threads(left, right, self._rounds, partial=self.steps[0] > 0)
        of_runs = zip(NAMES, self.pair.traces, (left, right), matching.partners, strict=True)
        for name, trace, records, partners in of_runs:
            cut_off = Counter(records["thread"][partners == TRUNCATED].tolist())
            self.thread_notes += [
                f"{name} has {counted(number, 'more op')} at one end of thread "
                f"{trace.threads.get(thread, thread)}, where the recordings were cut off at "
                "different times: not compared"
                for thread, number in cut_off.items()
            ]
        pairs, lone = self._matched((left, right), matching)
        unequal = np.any([pairs[0][name] != pairs[1][name] for name in VALUES], axis=0)
        steps_of = [_slices_by_step(records) for records in (pairs[0], *lone)]
        comparisons: dict[int, StepComparison] = {}
        for step in sorted({step for slices in steps_of for step in slices}):
            paired, left_lone, right_lone = (slices.get(step, slice(0)) for slices in steps_of)
            alone = lone[0][left_lone], lone[1][right_lone]
            comparison = StepComparison()
            if unequal[paired].any() or len(alone[0]) or len(alone[1]):
                both = pairs[0][paired][unequal[paired]], pairs[1][paired][unequal[paired]]
                comparison, differs = self._compare(both, alone)
                self.reach.until = 0  # a difference cannot be traced without an order of records
                comparison.first = _first_of_all_steps(self.pair, step, both, alone, differs)
            comparison.totals = self._count(pairs[0][paired], *alone)
            comparisons[step] = comparison
        return comparisons


def _statistics(trace: Trace, ids: Sequence[int]) -> Mapping[int, list[Statistics]]:
    rows: dict[int, list[Statistics]] = {}
    if ids:
        for record, *row in trace.statistics_of(range(min(ids), max(ids) + 1)):
            rows.setdefault(record, []).append(tuple(row))
    return rows


def _depends(pairs: Sides) -> Array:
    return (pairs[0]["inputs"] != pairs[1]["inputs"]) | pairs[0]["effect"]


def _first_pair(pairs: Sides, differs: Array) -> FirstDifference:
    left, right = pairs
    position = int(np.argmax(differs))
    same_thread = left["thread"][:position] == left["thread"][position]
    read = np.flatnonzero(same_thread & (left["inputs"][:position] != right["inputs"][:position]))[
        -FEW:
    ]
    ids = (records["id"][read].tolist() for records in pairs)
    left_id, right_id = (int(records["id"][position]) for records in pairs)
    sort = PROPAGATED if _depends(pairs)[position] else INDEPENDENT
    return FirstDifference(left_id, right_id, sort, left_id, read=[*zip(*ids, strict=True)])


def _first(
    matching: Matching, parts: Sides, pairs: Sides, lone: Sides, differs: Array
) -> FirstDifference | None:
    """Return the first difference of the main thread, in the order of the left run.

    A record that only the right run has comes directly after the last pair before it. Pairs whose
    order differs between the runs are not used to find this position.
    """
    candidates = [_first_pair(pairs, differs)] if differs.any() else []
    kept = matching.in_order
    for run, against in ((0, 1), (1, 0)):
        if not len(lone[run]):
            continue
        number = int(lone[run]["id"][0])
        before = int(np.searchsorted(kept[run], matching.free(run)[0]))
        following = int(kept[against][before - 1]) + 1 if before else 0
        instead = next(iter(parts[against]["id"][following : following + 1].tolist()), None)
        if run == 0:
            alone = FirstDifference(number, None, ALONE, number - 0.5, instead)
        else:
            position = math.inf if instead is None else instead - 0.5
            alone = FirstDifference(None, number, ALONE, position, instead)
        candidates.append(alone)
    return min(candidates, key=attrgetter("position"), default=None)


def _first_of_all_steps(
    pair: Pair, step: int, pairs: Sides, lone: Sides, differs: Array
) -> FirstDifference | None:
    """Return the first difference in a step, for records that were matched over the whole run.

    A record that only the right run has is ordered by its position within the step.
    """
    candidates = [_first_pair(pairs, differs)] if differs.any() else []
    if len(lone[0]):
        number = int(lone[0]["id"][0])
        candidates.append(FirstDifference(number, None, ALONE, number))
    if len(lone[1]):
        number = int(lone[1]["id"][0])
        left, right = (row.first for row in pair.rows(step))
        candidates.append(FirstDifference(None, number, ALONE, number - right + left))
    return min(candidates, key=attrgetter("position"), default=None)


def _slices_by_step(records: Array) -> dict[int, slice]:
    steps, begins, sizes = np.unique(records["step"], return_index=True, return_counts=True)
    steps_found = zip(steps.tolist(), begins.tolist(), sizes.tolist(), strict=True)
    return {step: slice(begin, begin + size) for step, begin, size in steps_found}
