"""Records of two traces as columns, with numbers that mean the same in both."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial, reduce
from itertools import chain, compress, count
from typing import TYPE_CHECKING, Any, TypeVar

from torchrepro.trace.format import OUTPUT, PARTLY
from torchrepro.trace.sequences import Recent
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
    from torchrepro.trace.parts import Outline, Part
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

CACHED = 1 << 17
"""Records whose outlines stay translated. A program has few outlines, and they may be long."""

COVERED = ("sites", "arguments")
"""Columns of an outline whose numbers the digest of a step covers, and not what they stand for."""

_DEVICE = re.compile(r"(?<=\]) (\w+)(?::\d+)?")
_SIZE = re.compile(r"\[[^]]*\]")

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
    """Bytes, or numbers that stand for them unless they are unset in part."""

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


@dataclass(frozen=True, slots=True)
class OtherRecords:
    """Records of threads beside the main one that follow one another in a step."""

    step: int
    ids: Sequence[int]
    threads: Sequence[int]
    sites: Sequence[int]
    arguments: Sequence[int]
    inputs: Sequence[bytes]
    outputs: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Chosen:
    """Those records of an outline that are compared in one way."""

    places: Sequence[int]
    inputs: Sequence[slice]
    """Where the digests of each of them are."""
    outputs: Sequence[slice]

    @classmethod
    def at(cls, places: Sequence[int], outline: Outline) -> Chosen:
        """Return the records at these places."""
        return cls(
            places,
            _slices(outline.input_lengths, outline.input_ends, places),
            _slices(outline.output_lengths, outline.output_ends, places),
        )

    def values(self, part: Part) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """Return what each of them read and wrote."""
        return (
            list(map(part.inputs.__getitem__, self.inputs)),
            list(map(part.outputs.__getitem__, self.outputs)),
        )


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
        self._main = _remembered(self._of_main)
        self._beside = _remembered(self._of_others)
        self._counted = _remembered(self._count)
        self._distinct = {name: _remembered(partial(_distinct, name)) for name in COVERED}

    def algorithms(self, outputs: str) -> frozenset[str]:
        """Return how the fingerprints of outputs were taken, by what their devices are."""
        known: Mapping[str, str] = self.trace.meta.get("algorithm") or {}
        devices = _DEVICE.findall(outputs)
        devices += ["cpu"] * (len(_SIZE.findall(outputs)) > len(devices))
        return frozenset(known.get(device, known.get("others", device)) for device in devices)

    def content(self) -> Mapping[str, Mapping[int, Hashable]]:
        """Return what each number that a digest covers stands for, lines of code aside."""
        sites = {number: values[:-1] for number, values in self._numbers.items()}
        return dict(zip(COVERED, (sites, self.arguments), strict=True))

    def parts(self, step: int) -> Iterator[Columns]:
        """Yield the records of the main thread in a step, in parts that fit into memory."""
        for part in self.trace.parts(step):
            chosen, structure, arguments = self._main(part.outline)
            if chosen.places:
                ids = _taken(part.ids, chosen.places)
                yield Columns(ids, structure, arguments, *chosen.values(part))

    def beside_main(self, steps: Iterable[int]) -> Iterator[OtherRecords]:
        """Yield the records of other threads in some steps, in parts that fit into memory."""
        for step in steps:
            for part in self.trace.parts(step):
                chosen, threads, sites, arguments = self._beside(part.outline)
                if chosen.places:
                    ids = _taken(part.ids, chosen.places)
                    yield OtherRecords(step, ids, threads, sites, arguments, *chosen.values(part))

    def used(self, step: int, column: str) -> Collection[int]:
        """Return each site, or each argument, that records of a step have."""
        distinct = self._distinct[column]
        return frozenset[int]().union(*map(distinct, self.trace.outlines(step)))

    def totals(self, step: int) -> Mapping[str, int]:
        """Return how many records each module has in a step."""
        return self._sum_of_counts(step, 0)

    def totals_of_main(self, step: int) -> Mapping[str, int]:
        """Return how many records of the main thread each module has in a step."""
        return self._sum_of_counts(step, 1)

    def _sum_of_counts(self, step: int, which: int) -> Mapping[str, int]:
        counts = [self._counted(outline)[which] for outline in self.trace.outlines(step)]
        return reduce(_sum, counts, {})

    def _count(self, outline: Outline) -> tuple[Counter[str], Counter[str]]:
        """Return how many records each module has, on all threads and on the main one."""
        modules = [self.trace.sites[site].module for site in outline.sites]
        on_main = [thread == MAIN for thread in outline.threads]
        return Counter(modules), Counter(compress(modules, on_main))

    def _of_main(self, outline: Outline) -> tuple[Chosen, Structure, Sequence[int]]:
        places = self._places(outline, on_main=True)
        return (
            Chosen.at(places, outline),
            self.structure(_taken(outline.sites, places)),
            tuple(map(self.arguments.__getitem__, _taken(outline.arguments, places))),
        )

    def _of_others(
        self, outline: Outline
    ) -> tuple[Chosen, Sequence[int], Sequence[int], Sequence[int]]:
        places = self._places(outline, on_main=False)
        return (
            Chosen.at(places, outline),
            _taken(outline.threads, places),
            _taken(outline.sites, places),
            _taken(outline.arguments, places),
        )

    def _places(self, outline: Outline, *, on_main: bool) -> Sequence[int]:
        """Return where records are that are compared, on the main thread or on the others."""
        return [
            place
            for place, (thread, site) in enumerate(zip(outline.threads, outline.sites, strict=True))
            if (thread == MAIN) == on_main and site not in self._left_out
        ]

    def structure(self, sites: Iterable[int]) -> Structure:
        """Return what records of these sites are."""
        return _structure(self._numbers, sites)

    def of_sites(self, column: str) -> Mapping[int, Any]:
        """Return what a column of the structure has for each site."""
        place = [field.name for field in fields(Structure)].index(column)
        return {site: values[place] for site, values in self._numbers.items()}


def joined(parts: Sequence[Columns]) -> Columns:
    """Return consecutive parts of a step as one."""
    parts = [part for part in parts if len(part)]
    if len(parts) == 1:
        return parts[0]
    structures = [part.structure for part in parts]
    structure = Structure(*(_chained(structures, field.name) for field in fields(Structure)))
    rest = {name: _chained(parts, name) for name in _OF_RECORDS - {"structure"}}
    return Columns(structure=structure, **rest)


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


def is_unset_in_part(outputs: Any) -> bool:
    """Whether some fingerprint is of what ops had written into memory, not of its bytes."""
    return isinstance(outputs, bytes) and PARTLY in (
        outputs[start : start + len(PARTLY)] for start in range(0, len(outputs), OUTPUT)
    )


def _chained(parts: Iterable[Any], name: str) -> tuple[Any, ...]:
    return tuple(chain.from_iterable(getattr(part, name) for part in parts))


def _structure(numbers: Mapping[int, tuple[Any, ...]], sites: Iterable[int]) -> Structure:
    rows = [numbers[site] for site in sites]
    return Structure(*zip(*rows, strict=True)) if rows else NO_STRUCTURE


def _taken(column: Sequence[int], places: Sequence[int]) -> Sequence[int]:
    """Return what a column has at these places, which rise."""
    return column if len(places) == len(column) else tuple(map(column.__getitem__, places))


def _slices(lengths: Sequence[int], ends: Sequence[int], places: Sequence[int]) -> list[slice]:
    return [slice(ends[place] - lengths[place], ends[place]) for place in places]


def _distinct(column: str, outline: Outline) -> frozenset[int]:
    return frozenset(getattr(outline, column))


Result = TypeVar("Result")


def _remembered(work_out: Callable[[Outline], Result]) -> Callable[[Outline], Result]:
    """Return a function that works something out of an outline, and remembers the last ones."""
    recent: Recent[Outline, Result] = Recent(CACHED)

    def find(outline: Outline) -> Result:
        found = recent.get(outline)
        if found is None:
            found = work_out(outline)
            recent.add(outline, found, len(outline))
        return found

    return find
