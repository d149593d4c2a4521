"""Records of two traces as columns, with numbers that mean the same in both."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache, partial
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from torchrepro.verdict.evidence import short

if TYPE_CHECKING:
    from collections.abc import (
        Callable,
        Collection,
        Hashable,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

    from torchrepro.trace.format import Site
    from torchrepro.trace.reader import Trace
    from torchrepro.verdict.value import Divergence


INPUTLESS = frozenset({"parameter", "gradient", "module"})
"""Ops whose records name a value, but not what it was computed from.

A record of a collective names only this rank's contribution.
"""

MAIN = 0
"""The main thread. Its order is the program's own; that of all other threads is an accident."""

PART = 50_000
"""Records of a step that are held in memory at once while both runs do the same ops."""

AT_ONCE = 1000
"""Rows that are fetched at once where they are not kept: they fit into the processor's cache."""

CACHED = 64
"""Sequences of ops that stay translated. A program has few of them, and they may be long."""

_DEVICE = re.compile(r"(?<=\]) (\w+)(?::\d+)?")
_SIZE = re.compile(r"\[[^]]*\]")

OtherRow = tuple[int, int, int, int, int, bytes, bytes]
"""A record of a thread beside the main one: id, step, thread, site, argument, inputs, outputs."""

PROPAGATED, INDEPENDENT, ALONE = "propagated", "independent", "alone"
"""How a record differs: its inputs differ too, they are equal, or it has no partner."""

NAMES = ("A", "B")
"""What sentences call the two runs. Their folders have long names, which are often alike."""


@dataclass(frozen=True)
class Pair:
    """The traces of one process in both runs."""

    left: Trace
    right: Trace
    runs: tuple[str, str]
    """The folders, as they were named."""
    chosen: Collection[int] | None = None
    """The steps that are compared; None for all that both have."""

    @cached_property
    def steps(self) -> Sequence[int]:
        """The steps that both have, or the chosen ones of them."""
        common = [step for step in self.left.steps if step in self.right.steps]
        return common if self.chosen is None else [each for each in common if each in self.chosen]

    def among(self, steps: Iterable[int]) -> Pair:
        """Return the same traces, of which some steps are compared."""
        return replace(self, chosen=frozenset(steps))

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


SharedNumbers = defaultdict["Hashable", int]
"""Numbers for keys, arguments and outputs that mean the same in both traces."""


def shared_numbers() -> SharedNumbers:
    """Return a table that gives each new value the next number."""
    return defaultdict(count().__next__)


@dataclass(frozen=True, slots=True)
class Structure:
    """What a sequence of ops is, apart from its values: a number or a name for each record."""

    keys: tuple[int, ...]
    shapes: tuple[int, ...]
    """Dtypes and shapes of the outputs."""
    sizes: tuple[int, ...]
    """Shapes of the outputs alone."""
    spots: tuple[int, ...]
    """Phase and module."""
    algorithms: tuple[int, ...]
    """How the fingerprints of the outputs were taken."""
    effects: tuple[bool, ...]
    """Whether the record cannot show that a difference began with it."""
    modules: tuple[str, ...]
    lines: tuple[int, ...]
    """The lines of the user's code. An edit shifts them, so that records may be alike without."""


NO_STRUCTURE = Structure((), (), (), (), (), (), (), ())


@dataclass(frozen=True, slots=True)
class Columns:
    """Records of one trace."""

    ids: Sequence[int]
    structure: Structure
    arguments: Sequence[int]
    inputs: Sequence[Hashable]
    outputs: Sequence[Hashable]
    """Bytes, or numbers that stand for them."""

    def __len__(self) -> int:
        return len(self.ids)

    def tokens(self, names: Sequence[str], places: Sequence[int]) -> list[tuple[Any, ...]]:
        """Return what the named columns say of each of the records at `places`."""
        columns = [self.column(name) for name in names]
        return list(zip(*([column[place] for place in places] for column in columns), strict=True))

    def part(self, start: int, end: int) -> Columns:
        """Return the records from one place up to another."""
        if (start, end) == (0, len(self)):
            return self
        structure = (getattr(self.structure, field.name)[start:end] for field in fields(Structure))
        rest = {name: getattr(self, name)[start:end] for name in _OF_RECORDS - {"structure"}}
        return Columns(structure=Structure(*structure), **rest)

    def column(self, name: str) -> Sequence[Any]:
        """Return a column by its name, of the records or of their structure."""
        column: Sequence[Any] = getattr(self if name in _OF_RECORDS else self.structure, name)
        return column


_OF_RECORDS = frozenset(field.name for field in fields(Columns))


class Reader:
    """Reads the records of a trace step by step."""

    def __init__(self, trace: Trace, shared: SharedNumbers, left_out: Collection[int] = ()) -> None:
        self.trace = trace
        self._left_out = frozenset(left_out)  # the sites whose records are not compared
        self._numbers = {
            number: _site_columns(site, shared, self.algorithms(site.outputs))
            for number, site in trace.sites.items()
        }
        self.arguments = {number: shared[text] for number, text in trace.arguments.items()}
        self.threads = {number: shared[name] for number, name in trace.threads.items()}
        # Steps of a program are alike, so that most sequences are in a cache already.
        self._structure = lru_cache(CACHED)(partial(_structure, self._numbers))
        self._translated = lru_cache(CACHED)(partial(_translated, self.arguments))
        self._counted = lru_cache(CACHED)(_counted)
        self._by_module = lru_cache(CACHED)(partial(_counted_by_module, trace.sites))

    def algorithms(self, outputs: str) -> frozenset[str]:
        """Return how the fingerprints of outputs were taken, by what their devices are."""
        known: Mapping[str, str] = self.trace.meta.get("algorithm") or {}
        devices = _DEVICE.findall(outputs)
        devices += ["cpu"] * (len(_SIZE.findall(outputs)) > len(devices))
        return frozenset(known.get(device, known.get("others", device)) for device in devices)

    def content(self) -> Mapping[str, Mapping[int, Hashable]]:
        """Return what each number that a digest covers stands for, lines of code aside."""
        sites = {number: values[:-1] for number, values in self._numbers.items()}
        return {"site": sites, "argument": self.arguments}

    def parts(self, step: int) -> Iterator[Columns]:
        """Yield the records of the main thread in a step, in parts that fit into memory."""
        cursor = self.trace.connection.execute(
            "select id, site, argument, inputs, outputs from record"
            " where id >= ? and id < ? and thread = ? order by id",
            (*self._range(step), MAIN),
        )
        while rows := cursor.fetchmany(PART):
            if self._left_out:
                rows = [row for row in rows if row[1] not in self._left_out]
            if rows:
                yield self._columns(rows)

    def rows_beside_main(self, steps: Iterable[int]) -> Iterator[list[OtherRow]]:
        """Yield the records of other threads in some steps, in order and in parts."""
        for first, end in _stretches(map(self._range, steps)):
            cursor = self.trace.connection.execute(
                "select id, step, thread, site, argument, inputs, outputs from record"
                " where id >= ? and id < ? and thread <> ? order by id",
                (first, end, MAIN),
            )
            while rows := cursor.fetchmany(AT_ONCE):
                if self._left_out:
                    rows = [row for row in rows if row[3] not in self._left_out]
                yield rows

    def used(self, step: int, column: str) -> Collection[int]:
        """Return each site, or each argument, that records of a step have."""
        return self._counted(self._text(step, column))

    def totals(self, step: int, *, main_only: bool = False) -> Counter[str]:
        """Return how many records each module has in a step, on all threads or on the main one."""
        which = f"and thread = {MAIN}" if main_only else ""
        return self._by_module(self._text(step, "site", which))

    def _text(self, step: int, column: str, which: str = "") -> bytes:
        """Return a column of a step as one text."""
        query = (
            f"select cast(group_concat({column}) as blob)"  # noqa: S608 - names of ours
            f" from (select * from record where id >= ? and id < ? {which} order by id)"
        )
        (text,) = self.trace.connection.execute(query, self._range(step)).fetchone()
        return text or b""

    def _range(self, step: int) -> tuple[int, int]:
        row = self.trace.steps[step]
        return row.first, row.first + row.records

    def structure(self, sites: Iterable[int]) -> Structure:
        """Return what records of these sites are."""
        return _structure(self._numbers, sites)

    def of_sites(self, column: str) -> Mapping[int, Any]:
        """Return what a column of the structure has for each site."""
        place = [field.name for field in fields(Structure)].index(column)
        return {site: values[place] for site, values in self._numbers.items()}

    def _columns(self, rows: Sequence[tuple[int, int, int, bytes, bytes]]) -> Columns:
        ids, sites, arguments, inputs, outputs = zip(*rows, strict=True)
        structure = self._structure(sites)
        return Columns(ids, structure, self._translated(arguments), inputs, outputs)


def joined(parts: Sequence[Columns]) -> Columns:
    """Return consecutive parts of a step as one."""
    parts = [part for part in parts if len(part)]
    if len(parts) == 1:
        return parts[0]
    structures = [part.structure for part in parts]
    structure = Structure(*(_chained(structures, field.name) for field in fields(Structure)))
    rest = {name: _chained(parts, name) for name in _OF_RECORDS - {"structure"}}
    return Columns(structure=structure, **rest)


def _stretches(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges with those joined that follow one another."""
    found: list[tuple[int, int]] = []
    for first, end in ranges:
        if found and found[-1][1] == first:
            first, _ = found.pop()  # noqa: PLW2901 - it begins earlier
        found.append((first, end))
    return found


def _site_columns(site: Site, shared: SharedNumbers, algorithms: frozenset[str]) -> tuple[Any, ...]:
    """Return what `Structure` has for a record of `site`, in the order of its fields."""
    return (
        shared[site.key],
        shared[_DEVICE.sub("", site.outputs)],
        shared[tuple(_SIZE.findall(site.outputs))],
        shared[(site.phase, site.module)],
        shared[algorithms],
        site.op in INPUTLESS or site.phase == "collective",
        site.module,
        shared[short(site.source)],
    )


def _chained(parts: Iterable[Any], name: str) -> tuple[Any, ...]:
    return tuple(chain.from_iterable(getattr(part, name) for part in parts))


def _structure(numbers: Mapping[int, tuple[Any, ...]], sites: Iterable[int]) -> Structure:
    rows = [numbers[site] for site in sites]
    return Structure(*zip(*rows, strict=True)) if rows else NO_STRUCTURE


def _translated(shared: Mapping[int, int], numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(map(shared.__getitem__, numbers))


def _counted(text: bytes) -> Counter[int]:
    return Counter(map(int, text.split(b","))) if text else Counter()


def _counted_by_module(sites: Mapping[int, Site], text: bytes) -> Counter[str]:
    totals: Counter[str] = Counter()
    for site, records in _counted(text).items():
        totals[sites[site].module] += records
    return totals
