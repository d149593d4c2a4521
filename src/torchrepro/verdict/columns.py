"""Records of two traces as arrays, with numbers that mean the same in both."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from torchrepro.trace.format import INPUT, MAIN, OUTPUT, PARTLY, Loss, Outline
from torchrepro.verdict.evidence import short

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from torchrepro.trace.reader import Trace

Array = Any  # an array of numpy

INPUTLESS = frozenset({"parameter", "gradient", "module"})
"""Ops whose records name a value, but not what it was computed from.

A record of a collective names only this rank's contribution.
"""

ANY_STEP = -1  # stands for the step of what other threads do: in which one it falls is an accident

VIEW = b""  # stands for all views of what ignored records wrote

CACHED = 1 << 17
"""Records whose outlines stay translated. A program has few outlines, and they may be long."""

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

_SITE = np.dtype([*((name, RECORD[name]) for name in OF_SITE), ("compared", "?")])

_DEVICE = re.compile(r"(?<=\]) (\w+)(?::\d+)?")
_SIZE = re.compile(r"\[[^]]*\]")
_MIX, _SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(29)
"""An odd number whose multiples of 64 bits look random: D. Knuth, TAOCP 3, 6.4."""


@dataclass(frozen=True)
class Pair:
    """The traces of one process in both runs."""

    left: Trace
    right: Trace
    runs: tuple[str, str]  # the folders, as they were named

    @cached_property
    def steps(self) -> Sequence[int]:
        """The steps that both have."""
        return [step for step in self.left.steps if step in self.right.steps]

    @cached_property
    def in_order(self) -> bool:
        """Whether the main thread ends all steps: what belongs to which of them is no accident."""
        return not any(row.thread for trace in self.traces for row in trace.steps.values())

    @cached_property
    def losses(self) -> tuple[Mapping[int, Sequence[Loss]], ...]:
        """The losses of each step in both; those of no step in particular are under `ANY_STEP`.

        These are the losses of other threads than the main one, and all where these end steps.
        """
        found = []
        for trace in self.traces:
            sides: dict[int, list[Loss]] = defaultdict(list)
            for loss in trace.losses:
                sides[ANY_STEP if loss.thread or not self.in_order else loss.step].append(loss)
            if ANY_STEP in sides:
                sides[ANY_STEP].sort(
                    key=lambda loss: (not loss.is_finite or loss.value, loss.fingerprint)
                )
            found.append(sides)
        return tuple(found)

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

    @property
    def levels(self) -> tuple[str, ...]:
        """The level of detail at which each was recorded."""
        return tuple(str(trace.meta.get("level", "op")) for trace in self.traces)

    @cached_property
    def ended_steps(self) -> Sequence[int]:
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
    records of the sites `ignored` wrote is in `from_ignored`, once they have been passed over.
    """

    def __init__(
        self,
        trace: Trace,
        shared: defaultdict[Any, int],
        left_out: Collection[int] = (),
        ignored: Collection[int] = (),
    ) -> None:
        self.trace = trace
        self.ignored = frozenset(ignored)
        self.from_ignored = set[bytes]()
        self.sites = np.zeros(len(trace.sites) + 1, _SITE)
        """What each site stands for; sites are numbered from 1."""
        for number, site in trace.sites.items():
            self.sites[number] = (
                shared[site.key],
                shared[_DEVICE.sub("", site.outputs)],
                shared[tuple(_SIZE.findall(site.outputs))],
                shared[site.phase, site.module],
                shared[self.algorithms(site.outputs)],
                site.op in INPUTLESS or site.phase == "collective",
                shared[site.module],
                shared[short(site.source)],
                number not in left_out and number not in self.ignored,
            )
        self.arguments = np.array([shared[text] for text in trace.arguments.values()])
        self._threads = np.array([shared[name] for name in trace.threads.values()] or [-1])
        self.modules = {shared[site.module]: site.module for site in trace.sites.values()}
        self._known: dict[Outline, tuple[Array, _Digests, _Digests]] = {}
        self._counted = lru_cache(maxsize=32)(self._count)

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
            chosen = self.sites["compared"][np.asarray(outline.sites)]
            chosen &= (records["thread"] == MAIN) == on_main
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
        records = np.zeros(len(outline), RECORD)
        records["thread"] = outline.threads
        records["thread_name"] = self._threads[np.asarray(outline.threads)]
        records["argument"] = self.arguments[np.asarray(outline.arguments)]
        sites = self.sites[np.asarray(outline.sites)]
        for name in OF_SITE:
            records[name] = sites[name]
        return (
            records,
            _Digests(outline.input_ends, outline.input_lengths),
            _Digests(outline.output_ends, outline.output_lengths),
        )

    def totals(self, step: int, *, on_main: bool) -> Mapping[str, int]:
        """Return how many records each module has in a step, on all threads or the main one."""
        total: Mapping[str, int] = {}
        for outline in self.trace.outlines(step):
            total = added(total, self._counted(outline, on_main))
        return total

    def _count(self, outline: Outline, on_main: bool) -> Mapping[str, int]:  # noqa: FBT001 - cached
        modules = self.sites["module"][np.asarray(outline.sites)]
        chosen = np.asarray(outline.threads) == MAIN if on_main else slice(None)
        return count_by(modules[chosen], self.modules)


def count_by(numbers: Array, names: Mapping[int, str]) -> dict[str, int]:
    """Return how often each of some numbers is there, by its name, in the order of the first."""
    found, first, often = np.unique(numbers, return_index=True, return_counts=True)
    order = np.argsort(first)
    each = zip(found[order].tolist(), often[order].tolist(), strict=True)
    return {names[number]: many for number, many in each}


def added(left: Mapping[str, int], right: Mapping[str, int]) -> Mapping[str, int]:
    """Return the sum of two counts, neither of which may be changed: steps share them."""
    if not left or not right:
        return left or right
    total = dict(left)
    for name, number in right.items():
        total[name] = total.get(name, 0) + number
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
