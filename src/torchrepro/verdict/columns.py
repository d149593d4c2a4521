"""Records of two traces as columns, in words that both share."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

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
"""Ops whose records name a value and not what it was computed from.

Those of a collective name this rank's part of it alone.
"""

MAIN = 0
"""The thread whose order is the program's own; that of all others is an accident."""

PART = 50_000
"""Records of a step that are held at once as long as both runs do the same ops."""

AT_ONCE = 1000
"""Rows that are fetched at once where they are not kept: few enough for the processor's cache."""

REMEMBERED = 64
"""Sequences of ops that are kept in translation: a program has few, and they may be long."""

_DEVICE = re.compile(r"(?<=\]) (\w+)(?::\d+)?")
_SIZE = re.compile(r"\[[^]]*\]")

OtherRow = tuple[int, int, int, int, int, bytes, bytes]
"""A record of a thread beside the main one: id, step, thread, site, argument, inputs, outputs."""

_KEY = TypeVar("_KEY")
_KEPT = TypeVar("_KEPT")


class SharedNames:
    """Numbers for keys, texts of arguments and of outputs that mean the same in both traces."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def number(self, value: Hashable) -> int:
        """Return the number of a value, a new one if it has none."""
        return self._numbers.setdefault(value, len(self._numbers))


@dataclass(frozen=True, slots=True)
class Structure:
    """What a sequence of ops is, whatever they computed: a number or a name for each record."""

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


NO_STRUCTURE = Structure((), (), (), (), (), (), ())


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

    def __init__(self, trace: Trace, shared: SharedNames) -> None:
        self.trace = trace
        self._numbers = {
            number: _described(site, shared, self.algorithms(site.outputs))
            for number, site in trace.sites.items()
        }
        self.arguments = {number: shared.number(text) for number, text in trace.arguments.items()}
        self.threads = {number: shared.number(name) for number, name in trace.threads.items()}
        self._structures: dict[tuple[int, ...], Structure] = {}
        self._translated: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._counted: dict[bytes, Counter[int]] = {}
        self._totals: dict[bytes, Counter[str]] = {}

    def algorithms(self, outputs: str) -> frozenset[str]:
        """Return how the fingerprints of outputs were taken, by what their devices are."""
        known: Mapping[str, str] = self.trace.meta.get("algorithm") or {}
        devices = _DEVICE.findall(outputs)
        devices += ["cpu"] * (len(_SIZE.findall(outputs)) > len(devices))
        return frozenset(known.get(device, known.get("others", device)) for device in devices)

    def content(self) -> Mapping[str, Mapping[int, Hashable]]:
        """Return what each number that a digest covers stands for, in shared words."""
        return {"site": self._numbers, "argument": self.arguments}

    def parts(self, step: int) -> Iterator[Columns]:
        """Yield what the main thread did in a step, so much at a time that none fills the memory.

        Its order is the program's own; that of other threads is an accident (`threads`).
        """
        cursor = self.trace.connection.execute(
            "select id, site, argument, inputs, outputs from record"
            " where id >= ? and id < ? and thread = ? order by id",
            (*self._range(step), MAIN),
        )
        while rows := cursor.fetchmany(PART):
            yield self._columns(rows)

    def rows_beside_main(self, steps: Iterable[int]) -> Iterator[list[OtherRow]]:
        """Yield the records of other threads in some steps in order, so many at a time."""
        for first, end in _stretches(map(self._range, steps)):
            cursor = self.trace.connection.execute(
                "select id, step, thread, site, argument, inputs, outputs from record"
                " where id >= ? and id < ? and thread <> ? order by id",
                (first, end, MAIN),
            )
            while rows := cursor.fetchmany(AT_ONCE):
                yield rows

    def used(self, step: int, column: str) -> Collection[int]:
        """Return each site, or each argument, that records of a step have."""
        return _remembered(self._counted, self._text(step, column), _count)

    def totals(self, step: int) -> Counter[str]:
        """Return how many records each module has in a step."""
        return _remembered(self._totals, self._text(step, "site"), self._by_module)

    def totals_of_main(self, step: int) -> Counter[str]:
        """Return how many records of the main thread each module has in a step."""
        text = self._text(step, "site", f"and thread = {MAIN}")
        return _remembered(self._totals, text, self._by_module)

    def _text(self, step: int, column: str, which: str = "") -> bytes:
        """Return a column of a step as one text.

        Steps of a program are alike, so that most of these texts are known already.
        """
        query = (
            f"select cast(group_concat({column}) as blob)"  # noqa: S608 - names of ours
            f" from (select * from record where id >= ? and id < ? {which} order by id)"
        )
        (text,) = self.trace.connection.execute(query, self._range(step)).fetchone()
        return text or b""

    def _range(self, step: int) -> tuple[int, int]:
        row = self.trace.steps[step]
        return row.first, row.first + row.records

    def _by_module(self, sites: bytes) -> Counter[str]:
        totals: Counter[str] = Counter()
        for site, records in _count(sites).items():
            totals[self.trace.sites[site].module] += records
        return totals

    def structure(self, sites: Iterable[int]) -> Structure:
        """Return what records of these sites are."""
        rows = [self._numbers[site] for site in sites]
        return Structure(*zip(*rows, strict=True)) if rows else NO_STRUCTURE

    def of_sites(self, column: str) -> Mapping[int, Any]:
        """Return what a column of the structure has for each site."""
        place = [field.name for field in fields(Structure)].index(column)
        return {site: described[place] for site, described in self._numbers.items()}

    def _columns(self, rows: Sequence[tuple[int, int, int, bytes, bytes]]) -> Columns:
        ids, sites, arguments, inputs, outputs = zip(*rows, strict=True)
        translated = _remembered(self._translated, arguments, self._translate)
        return Columns(
            ids,
            _remembered(self._structures, sites, self.structure),
            translated,
            inputs,
            outputs,
        )

    def _translate(self, arguments: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(map(self.arguments.__getitem__, arguments))


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


def _described(site: Site, shared: SharedNames, algorithms: frozenset[str]) -> tuple[Any, ...]:
    """Return what `Structure` has for a record of `site`, in the order of its fields."""
    return (
        shared.number(site.key),
        shared.number(_DEVICE.sub("", site.outputs)),
        shared.number(tuple(_SIZE.findall(site.outputs))),
        shared.number((site.phase, site.module)),
        shared.number(algorithms),
        site.op in INPUTLESS or site.phase == "collective",
        site.module,
    )


def _chained(parts: Iterable[Any], name: str) -> tuple[Any, ...]:
    return tuple(chain.from_iterable(getattr(part, name) for part in parts))


def _count(text: bytes) -> Counter[int]:
    return Counter(map(int, text.split(b","))) if text else Counter()


def _remembered(kept: dict[_KEY, _KEPT], key: _KEY, make: Callable[[_KEY], _KEPT]) -> _KEPT:
    found = kept.get(key)
    if found is None:
        if len(kept) >= REMEMBERED:
            kept.clear()
        found = kept[key] = make(key)
    return found


PROPAGATED, INDEPENDENT, ALONE = "propagated", "independent", "alone"
"""How a record differs: as its inputs do, although they are equal, or for want of a partner."""

NAMES = ("A", "B")
"""What sentences call the two runs: their folders are long, and often alike."""


@dataclass(frozen=True)
class Pair:
    """The traces of one process in both runs."""

    left: Trace
    right: Trace
    runs: tuple[str, str]
    """The folders, as they were named."""

    @property
    def names(self) -> tuple[str, str]:
        """What sentences call the two runs."""
        return NAMES

    @cached_property
    def steps(self) -> Sequence[int]:
        """The steps that both have."""
        return [step for step in self.left.steps if step in self.right.steps]

    @property
    def traces(self) -> tuple[Trace, Trace]:
        """Both traces."""
        return self.left, self.right


@dataclass(slots=True)
class StepComparison:
    """What the comparison of one step found."""

    tally: Counter[str] = field(default_factory=Counter)
    """Records that differ, by how they do, the first one included."""
    totals: Mapping[str, int] = field(default_factory=dict)
    """Records of each module."""
    differing: Mapping[str, int] = field(default_factory=dict)
    """Records of each module that differ."""
    first: Callable[[], Divergence] | None = None
    """Describes the first difference; None if there is none."""
    sort: str = INDEPENDENT
    """How the first one differs."""
    place: float = math.inf
    """Where it is in the left run: the id of a record, or what lies between two."""

    def add(self, other: StepComparison) -> None:
        """Take in what was found in another part of the step, or on other threads."""
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
