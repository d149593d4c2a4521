"""What threads beside the main one did in a whole run.

Such a thread runs on its own time: at which step of the main thread a record of it lands is an
accident. Its records are therefore held together for the whole run, as arrays of numbers, in which
a number of 64 bits stands for what a record read or wrote.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrepro.verdict.columns import Columns

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torchrepro.verdict.columns import OtherRow, Reader

Array = Any
"""An array of numpy, which is imported only where there are other threads."""

_MIX = 0x9E3779B97F4A7C15
"""An odd number whose multiples of 64 bits look random: D. Knuth, TAOCP 3, 6.4."""

_SHIFT = 29


@dataclass(frozen=True)
class OtherThreads:
    """Records of one trace beside its main thread: thread by thread, each in its order."""

    reader: Reader
    ids: Array
    steps: Array
    """The step of the main thread under which it was recorded."""
    threads: Array
    sites: Array
    arguments: Array
    """As both traces number them."""
    inputs: Array
    outputs: Array

    @classmethod
    def of(cls, reader: Reader, steps: Iterable[int]) -> OtherThreads:
        """Read what other threads did in some steps."""
        numpy = import_module("numpy")
        parts = [_arrays(rows) for rows in reader.rows_beside_main(steps)]
        columns = [
            numpy.concatenate(column) for column in zip(*(parts or [_arrays([])]), strict=True)
        ]
        ids, numbers, threads, sites, arguments, inputs, outputs = columns
        order = numpy.argsort(threads, kind="stable")
        shared = _table(reader.arguments)[arguments]
        columns = [ids, numbers, threads, sites, shared, inputs, outputs]
        return cls(reader, *(column[order] for column in columns))

    def __len__(self) -> int:
        return len(self.ids)

    def column(self, name: str) -> Array:
        """Return a column by its name, as numbers that mean the same in both traces."""
        if name == "names":
            return _table(self.reader.threads)[self.threads]
        if name in _OWN:
            return getattr(self, name)
        return _table(self.reader.of_sites(name))[self.sites]

    def tokens(self, names: Sequence[str], places: Array) -> Array:
        """Return a number for what the named columns say of each of the records at `places`."""
        numpy = import_module("numpy")
        mix, shift = numpy.uint64(_MIX), numpy.uint64(_SHIFT)
        found = numpy.zeros(len(places), "uint64")
        for name in names:
            found = (found ^ self.column(name)[places].astype("uint64")) * mix
            found ^= found >> shift
        return found

    def columns(self, places: Array) -> Columns:
        """Return the records at `places` for a judge to compare."""
        return Columns(
            self.ids[places].tolist(),
            self.reader.structure(self.sites[places].tolist()),
            *(getattr(self, name)[places].tolist() for name in ("arguments", "inputs", "outputs")),
        )

    def totals(self, places: Array) -> Mapping[int, Counter[str]]:
        """Return by step how many of the records at `places` each module has."""
        numpy = import_module("numpy")
        modules = self.reader.of_sites("modules")
        names = list(dict.fromkeys(modules.values())) or [""]
        numbers = {name: number for number, name in enumerate(names)}
        of_site = _table({site: numbers[name] for site, name in modules.items()})
        kinds = self.steps[places] * len(names) + of_site[self.sites[places]]
        found: defaultdict[int, Counter[str]] = defaultdict(Counter)
        kinds, records = numpy.unique(kinds, return_counts=True)
        for kind, number in zip(kinds.tolist(), records.tolist(), strict=True):
            step, module = divmod(kind, len(names))
            found[step][names[module]] = number
        return found

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield where each thread begins and ends."""
        numpy = import_module("numpy")
        ends = [*numpy.flatnonzero(numpy.diff(self.threads)) + 1, len(self)] if len(self) else []
        yield from zip([0, *ends], ends, strict=False)

    def thread_name(self, place: int) -> str:
        """Return the name of the thread of a record."""
        number = int(self.threads[place])
        return self.reader.trace.threads.get(number, str(number))


_OWN = frozenset(field.name for field in fields(OtherThreads))


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
