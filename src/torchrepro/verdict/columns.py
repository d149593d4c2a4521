"""Records of two traces as arrays, with numbers that mean the same in both."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress, groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from torchrepro.trace.format import OUTPUT, PARTLY
from torchrepro.verdict.evidence import short

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from torchrepro.trace.format import Loss, Outline
    from torchrepro.trace.reader import Trace
    from torchrepro.verdict.value import Divergence

Array = Any
"""An array of numpy."""

INPUTLESS = frozenset({"parameter", "gradient", "module"})
"""Ops whose records name a value, but not what it was computed from.

A record of a collective names only this rank's contribution.
"""

MAIN = 0
"""The main thread. Its order is the program's own; that of all other threads is an accident."""

CACHED = 1 << 17
"""Records whose outlines stay translated. A program has few outlines, and they may be long."""

PROPAGATED, INDEPENDENT, ALONE = "propagated", "independent", "alone"
"""How a record differs: its inputs differ too, they are equal, or it has no partner."""

NAMES = ("A", "B")
"""What sentences call the two runs. Their folders have long names, which are often alike."""

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
        ("argument", "i4"),
        ("inputs", "u8"),  # a hash of the fingerprints
        ("outputs", "u8"),
        ("partly", "?"),  # whether a fingerprint is of what was written, not of the bytes
    ]
)
"""A record, whose numbers mean the same in both traces; thread, id and step are of its own."""

_DEVICE = re.compile(r"(?<=\]) (\w+)(?::\d+)?")
_SIZE = re.compile(r"\[[^]]*\]")
_MIX, _SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(29)
"""An odd number whose multiples of 64 bits look random: D. Knuth, TAOCP 3, 6.4."""


@dataclass(frozen=True)
class Pair:
    """The traces of one process in both runs."""

    left: Trace
    right: Trace
    runs: tuple[str, str]
    """The folders, as they were named."""

    @cached_property
    def steps(self) -> Sequence[int]:
        """The steps that both have."""
        return [step for step in self.left.steps if step in self.right.steps]

    @cached_property
    def losses(self) -> tuple[Mapping[int, Sequence[Loss]], ...]:
        """The losses of each step in both."""
        return tuple(
            {step: [*some] for step, some in groupby(trace.losses, attrgetter("step"))}
            for trace in self.traces
        )

    @cached_property
    def misses_steps(self) -> bool:
        """Whether one recording has the ops of steps of which the other has none.

        What a full step knows of tensors that were made before it is then not the same.
        """
        left, right = (trace.meta.get("every") or 1 for trace in self.traces)
        return bool(left != right)

    @property
    def traces(self) -> tuple[Trace, Trace]:
        """Both traces."""
        return self.left, self.right

    @cached_property
    def ended_steps(self) -> Sequence[int]:
        """The steps that have ended in both."""
        return [
            step for step in self.steps if all(trace.steps[step].finished for trace in self.traces)
        ]

    def is_after_last(self, number: int) -> bool:
        """Whether what has this number comes after the last step of both runs.

        A run that was cut off does not show which step was its last: the other one has to.
        """
        rows = (trace.steps.get(number) for trace in self.traces)
        return not any(row is not None and row.finished for row in rows) and any(
            trace.ends_before(number) for trace in self.traces
        )


@dataclass(slots=True)
class StepComparison:
    """What the comparison of one step found."""

    tally: Counter[str] = field(default_factory=Counter)
    """Records that differ, by how they differ, the first one included."""
    totals: Mapping[str, int] = field(default_factory=dict)
    """Records of each module."""
    differing: Mapping[str, int] = field(default_factory=dict)
    """Records of each module that differ."""
    first: Callable[[], Divergence] | None = None
    """Describes the first difference; None if there is none."""
    sort: str = INDEPENDENT
    """How the first one differs."""
    place: float = math.inf
    """Where the first one is in the left run: the id of a record, or between two ids."""

    def add(self, other: StepComparison) -> None:
        """Add what was found in another part of the step, or on other threads."""
        if other.first is not None and (self.first is None or other.place < self.place):
            self.first, self.sort, self.place = other.first, other.sort, other.place
        self.tally.update(other.tally)
        self.totals = _sum(self.totals, other.totals)
        self.differing = _sum(self.differing, other.differing)


def _sum(left: Mapping[str, int], right: Mapping[str, int]) -> Mapping[str, int]:
    """Return the sum of two counts, neither of which may be changed: steps share them."""
    if not left or not right:
        return left or right
    total = Counter(left)
    total.update(right)
    return total


@dataclass(frozen=True, slots=True)
class _Digests:
    """Where the digests of each record are among those of all, in words of 8 bytes."""

    begins: Array
    ends: Array
    salt: Array
    """A number for the place of each word within its record."""

    @classmethod
    def of(cls, ends: Sequence[int], lengths: Sequence[int]) -> _Digests:
        until, size = (np.asarray(each, "int64") // 8 for each in (ends, lengths))
        place = np.arange(size.sum()) - np.repeat(until - size, size)
        return cls(until - size, until, mixed([place + 1]))

    def hashes(self, digests: bytes) -> Array:
        """Return a hash of the digests of each record: a sum over its words, 0 without any."""
        sums = np.zeros(len(self.salt) + 1, "u8")
        np.cumsum(mixed([self.salt, np.frombuffer(digests, "<u8")]), out=sums[1:])
        return sums[self.ends] - sums[self.begins]


@dataclass(frozen=True, slots=True)
class _Translated:
    """The records of an outline, apart from their values."""

    records: Array
    compared: Array
    """Which of them are compared."""
    inputs: _Digests
    outputs: _Digests


class Reader:
    """Reads the records of a trace step by step, without those of some sites.

    `shared` numbers what sites, arguments and threads stand for, in both traces alike.
    """

    def __init__(
        self, trace: Trace, shared: defaultdict[Any, int], left_out: Collection[int] = ()
    ) -> None:
        self.trace = trace
        self._left_out = frozenset(left_out)
        self.sites = {
            number: (
                shared[site.key],
                shared[_DEVICE.sub("", site.outputs)],
                shared[tuple(_SIZE.findall(site.outputs))],
                shared[site.phase, site.module],
                shared[self.algorithms(site.outputs)],
                site.op in INPUTLESS or site.phase == "collective",
                shared[site.module],
                shared[short(site.source)],
            )
            for number, site in trace.sites.items()
        }
        self.arguments = {number: shared[text] for number, text in trace.arguments.items()}
        self._threads = {number: shared[name] for number, name in trace.threads.items()}
        self.modules = {shared[site.module]: site.module for site in trace.sites.values()}
        self._known: dict[Outline, _Translated] = {}
        self._counts: dict[Outline, tuple[Counter[str], Counter[str]]] = {}

    def algorithms(self, outputs: str) -> frozenset[str]:
        """Return how the fingerprints of outputs were taken, by what their devices are."""
        known: Mapping[str, str] = self.trace.meta.get("algorithm") or {}
        devices = _DEVICE.findall(outputs)
        devices += ["cpu"] * (len(_SIZE.findall(outputs)) > len(devices))
        return frozenset(known.get(device, known.get("others", device)) for device in devices)

    def parts(self, step: int, *, on_main: bool) -> Iterator[Array]:
        """Yield the records of a step, on the main thread or on the others, in parts."""
        for part in self.trace.parts(step):
            its = self._translated(part.outline)
            chosen = its.compared & ((its.records["thread"] == MAIN) == on_main)
            if not chosen.any():
                continue
            records = its.records.copy()
            records["id"] = part.ids
            records["step"] = step
            records["inputs"] = its.inputs.hashes(part.inputs)
            records["outputs"] = its.outputs.hashes(part.outputs)
            if PARTLY in part.outputs:
                records["partly"] = [
                    any(
                        part.outputs.startswith(PARTLY, at) for at in range(end - size, end, OUTPUT)
                    )
                    for end, size in zip(
                        part.outline.output_ends, part.outline.output_lengths, strict=True
                    )
                ]
            yield records if chosen.all() else records[chosen]

    def _translated(self, outline: Outline) -> _Translated:
        found = self._known.get(outline)
        if found is None:
            if sum(map(len, self._known)) > CACHED:
                self._known.clear()
            records = np.zeros(len(outline), RECORD)
            records["thread"] = outline.threads
            records["thread_name"] = [self._threads.get(each, -1) for each in outline.threads]
            records["argument"] = list(map(self.arguments.__getitem__, outline.arguments))
            columns = zip(*map(self.sites.__getitem__, outline.sites), strict=True)
            for name, column in zip(OF_SITE, columns, strict=False):
                records[name] = column
            found = self._known[outline] = _Translated(
                records,
                np.array([site not in self._left_out for site in outline.sites], bool),
                _Digests.of(outline.input_ends, outline.input_lengths),
                _Digests.of(outline.output_ends, outline.output_lengths),
            )
        return found

    def totals(self, step: int, *, on_main: bool) -> Mapping[str, int]:
        """Return how many records each module has in a step, on all threads or the main one."""
        total: Mapping[str, int] = {}
        for outline in self.trace.outlines(step):
            found = self._counts.get(outline)
            if found is None:
                if sum(map(len, self._counts)) > CACHED:
                    self._counts.clear()
                modules = [self.trace.sites[site].module for site in outline.sites]
                main = compress(modules, (thread == MAIN for thread in outline.threads))
                found = self._counts[outline] = Counter(modules), Counter(main)
            total = _sum(total, found[on_main])
        return total


def joined(parts: Iterable[Array]) -> Array:
    """Return parts of records as one."""
    return np.concatenate([np.zeros(0, RECORD), *parts])


def mixed(columns: Sequence[Array]) -> Array:
    """Return a hash of 64 bits for each row of some columns."""
    found = np.zeros(len(columns[0]), "uint64")
    for column in columns:
        found = (found ^ column.astype("uint64")) * _MIX
        found ^= found >> _SHIFT
    return found
