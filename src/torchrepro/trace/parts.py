"""The records of a trace as columns, whatever its format.

In format 3 they lie in the file like that, in the parts of a step. Before, each had a row.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from torchrepro.trace.format import (
    FORMAT,
    OUTPUT,
    WITH_ROWS,
    WITHOUT_SEALS,
    PartRow,
    Record,
    StepRow,
    as_bytes,
)
from torchrepro.trace.sequences import Recent, unpacked

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterator, Mapping, Sequence

AT_ONCE = 1000
"""Rows that are held in memory at once."""

PART = 50_000
"""Rows that make a part where the format has none."""

Known = tuple[set[int], set[int], set[int]]
"""The numbers of threads, sites and arguments that a record may have."""


@dataclass(frozen=True, eq=False)
class Outline:
    """What records that follow one another are, apart from their values.

    Steps are alike. Parts of a trace with equal outlines mostly share one, which is a key for
    whatever is worked out of it.
    """

    threads: Sequence[int]
    sites: Sequence[int]
    arguments: Sequence[int]
    input_lengths: Sequence[int]
    """How many bytes of digests each record read."""
    output_lengths: Sequence[int]

    def __len__(self) -> int:
        return len(self.sites)

    @cached_property
    def input_ends(self) -> Sequence[int]:
        """Where the digests that a record read end among those of the part."""
        return list(accumulate(self.input_lengths))

    @cached_property
    def output_ends(self) -> Sequence[int]:
        """Where the digests that a record wrote end among those of the part."""
        return list(accumulate(self.output_lengths))


@dataclass(frozen=True, slots=True)
class Part:
    """Records that follow one another in a step."""

    first: int
    """The id of the first one; the others follow."""
    outline: Outline
    inputs: bytes
    """The digests that the records read, one after the other."""
    outputs: bytes

    def __len__(self) -> int:
        return len(self.outline)

    @property
    def ids(self) -> range:
        """The ids of its records."""
        return range(self.first, self.first + len(self))

    def record(self, number: int) -> Record:
        """Return one of its records by its id."""
        its, place = self.outline, number - self.first
        end, other_end = its.input_ends[place], its.output_ends[place]
        return Record(
            *(number, its.threads[place], its.sites[place], its.arguments[place]),
            self.inputs[end - its.input_lengths[place] : end],
            self.outputs[other_end - its.output_lengths[place] : other_end],
        )

    def last_writer(self, value: bytes, before: int) -> int | None:
        """Return the id of the last record before another that wrote what `value` stands for."""
        ends, lengths = self.outline.output_ends, self.outline.output_lengths
        place = min(before - self.first, len(self))
        end = ends[place - 1] if place > 0 else 0
        while (at := self.outputs.rfind(value, 0, end)) >= 0:
            place = bisect_right(ends, at)
            if (at - ends[place] + lengths[place]) % OUTPUT == 0:  # not across two digests
                return self.first + place
            end = at + len(value) - 1
        return None


class StoredRecords(Protocol):
    """The records of a file. Ranges are of their ids, the end not included."""

    def __init__(self, connection: sqlite3.Connection) -> None: ...

    def check(self, steps: Mapping[int, StepRow], known: Known, size: int) -> None:
        """Raise `ValueError` if a record is missing, was changed, or refers to no row.

        The file has `size` bytes.
        """

    def outlines(self, first: int, end: int) -> Iterator[Outline]:
        """Yield what the records of a step are, part by part."""

    def parts(self, first: int, end: int) -> Iterator[Part]:
        """Yield the records of a step."""

    def parts_before(self, end: int) -> Iterator[Part]:
        """Yield all records before one, the last first; parts may go on after it."""


class Parts:
    """Records of format 3."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._execute = connection.execute
        self._sequences: Recent[int, tuple[int, ...]] = Recent()
        self._outlines: Recent[tuple[int, ...], Outline] = Recent()

    def outlines(self, first: int, end: int) -> Iterator[Outline]:
        rows = self._execute(
            f"select {_OUTLINE} from part where first >= ? and first < ? order by first",  # noqa: S608 - ours
            (first, end),
        )
        return map(self._outline, rows)

    def parts(self, first: int, end: int) -> Iterator[Part]:
        return map(self._part, self._rows(first, end))

    def parts_before(self, end: int) -> Iterator[Part]:
        rows = self._execute(f"{_PART} where first < ? order by first desc", (end,))
        return map(self._part, rows)

    def check(self, steps: Mapping[int, StepRow], known: Known, size: int) -> None:
        check = _PartCheck(self._execute, known, size)
        for step in steps.values():
            check.step(step, self._rows(step.first, step.first + step.records))
        check.nothing_else()

    def _rows(self, first: int, end: int) -> Iterator[tuple[Any, ...]]:
        which = "where first >= ? and first < ? order by first"
        return self._execute(f"{_PART} {which}", (first, end))

    def _part(self, row: tuple[Any, ...]) -> Part:
        return Part(row[0], self._outline(row[1:6]), *row[6:])

    def _outline(self, numbers: tuple[int, ...]) -> Outline:
        found = self._outlines.get(numbers)
        if found is None:
            found = Outline(*map(self._sequence, numbers))
            self._outlines.add(numbers, found, 5 * len(found))
        return found

    def _sequence(self, number: int) -> tuple[int, ...]:
        found = self._sequences.get(number)
        if found is None:
            (content,) = self._execute(_NUMBERS, (number,)).fetchone()
            found = unpacked(content)
            self._sequences.add(number, found, len(found))
        return found


_OUTLINE = "thread, site, argument, input_lengths, output_lengths"
_PART = f"select first, {_OUTLINE}, inputs, outputs from part"  # noqa: S608 - ours
_NUMBERS = "select numbers from sequence where id = ?"


@dataclass(frozen=True, slots=True)
class _Sequence:
    """What a check has to know of a sequence."""

    digest: bytes
    count: int
    total: int
    values: frozenset[int]


class _PartCheck:
    """Checks the parts of a trace, step by step.

    Its time and memory are bounded by the bytes of the file, whatever they say.
    """

    def __init__(self, execute: Callable[..., Any], known: Known, size: int) -> None:
        self._execute = execute
        self._known = known
        self._left = size  # bytes of digests, each of which the file holds once
        self._records_left = size  # the writer sees to it that a record has a byte
        self._parts = 0
        self._recent: Recent[int, _Sequence] = Recent()

    def step(self, step: StepRow, rows: Iterator[tuple[Any, ...]]) -> None:
        """Check the parts of one step."""
        self._records_left -= 0 if step.dropped else step.records
        if self._records_left < 0:
            raise ValueError("it has more records than a file of its size can hold")
        found, digest = 0, xxhash.xxh3_128()
        for row in (PartRow(*each) for each in rows):
            if row.first != step.first + found:
                raise ValueError(f"a part of step {step.step} is in the wrong place")
            self._parts += 1
            found += self._part(step, row, digest)
        if step.dropped and not found:
            return
        if found != step.records or step.dropped or digest.digest() != step.digest:
            raise _changed(step)

    def nothing_else(self) -> None:
        """Raise `ValueError` if there is a part of no step, or a sequence that no part has."""
        (parts,) = self._execute("select count(*) from part").fetchone()
        if parts != self._parts:
            raise ValueError("it has records that belong to no step")
        columns = ("thread", "site", "argument", "input_lengths", "output_lengths")
        used = " union ".join(f"select {column} from part" for column in columns)  # noqa: S608 - ours
        if self._execute(f"select 1 from sequence where id not in ({used}) limit 1").fetchone():  # noqa: S608 - ours
            raise ValueError("it has a sequence of numbers that no record uses")

    def _part(self, step: StepRow, row: PartRow, digest: Any) -> int:
        """Check a part, and add it to the digest of its step; returns how many records it has."""
        numbers = (row.thread, row.site, row.argument, row.input_lengths, row.output_lengths)
        contents = row.inputs, row.outputs
        if not {int}.issuperset(map(type, numbers)) or not {bytes}.issuperset(map(type, contents)):
            raise ValueError(f"a part of step {step.step} is not valid")
        self._left -= sum(map(len, contents))
        if self._left < 0:
            raise ValueError("it has more bytes of records than a file of its size can hold")
        sequences = [self._sequence(number) for number in numbers]
        counts = {sequence.count for sequence in sequences}
        if not (
            len(counts) == 1
            and all(
                known.issuperset(sequence.values)
                for known, sequence in zip(self._known, sequences, strict=False)
            )
            and [sequence.total for sequence in sequences[3:]] == [*map(len, contents)]
        ):
            raise ValueError(f"a part of step {step.step} is not valid")
        of_values = map(xxhash.xxh3_128_digest, contents)
        digest.update(b"".join((*(each.digest for each in sequences), *of_values)))
        return max(counts)

    def _sequence(self, number: int) -> _Sequence:
        found = self._recent.get(number)
        if found is None:
            row = self._execute(_NUMBERS, (number,)).fetchone()
            if row is None or not isinstance(row[0], bytes):
                raise ValueError("a sequence of numbers is missing")
            numbers = unpacked(row[0])
            found = _Sequence(
                xxhash.xxh3_128_digest(row[0]), len(numbers), sum(numbers), frozenset(numbers)
            )
            self._recent.add(number, found, len(numbers))
        return found


class Rows:
    """Records of format 2, a row each."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._execute = connection.execute
        self._outlines: Recent[tuple[tuple[int, ...], ...], Outline] = Recent()

    def outlines(self, first: int, end: int) -> Iterator[Outline]:
        return (part.outline for part in self.parts(first, end))

    def parts(self, first: int, end: int) -> Iterator[Part]:
        for start in range(first, end, PART):
            yield self._part(start, min(start + PART, end))

    def parts_before(self, end: int) -> Iterator[Part]:
        for after in range(end, 1, -AT_ONCE):
            yield self._part(max(after - AT_ONCE, 1), after)

    def check(self, steps: Mapping[int, StepRow], known: Known, size: int) -> None:
        (count,) = self._execute("select count(*) from record").fetchone()
        expected = sum(row.records for row in steps.values())
        if count != expected:
            raise ValueError(f"it has {count} records where its steps have {expected}")
        for row in steps.values():
            self._check_step(row, known)

    def _check_step(self, step: StepRow, known: Known) -> None:
        found, digest = 0, xxhash.xxh3_128()
        cursor = self._execute(
            "select thread, site, argument, inputs, outputs from record"
            " where id >= ? and id < ? and step = ? order by id",
            (step.first, step.first + step.records, step.step),
        )
        while rows := cursor.fetchmany(AT_ONCE):
            found += len(rows)
            *numbers, inputs, outputs = zip(*rows, strict=True)
            if not (
                all(its.issuperset(column) for its, column in zip(known, numbers, strict=True))
                and {bytes}.issuperset(map(type, (*inputs, *outputs)))
            ):
                raise ValueError(f"a record of step {step.step} is not valid")
            digest.update(as_bytes(rows))
        if found != step.records or not self._is_as_written(step, digest.digest()):
            raise _changed(step)

    def _is_as_written(self, step: StepRow, digest: bytes) -> bool:
        return digest == step.digest

    def _part(self, first: int, end: int) -> Part:
        rows = self._execute(
            "select thread, site, argument, inputs, outputs from record"
            " where id >= ? and id < ? order by id",
            (first, end),
        ).fetchall()
        *numbers, inputs, outputs = zip(*rows, strict=True)
        columns = (*numbers, tuple(map(len, inputs)), tuple(map(len, outputs)))
        outline = self._outlines.get(columns)
        if outline is None:
            outline = Outline(*columns)
            self._outlines.add(columns, outline, len(columns) * len(outline))
        return Part(first, outline, b"".join(inputs), b"".join(outputs))


class RowsWithoutDigests(Rows):
    """Records of format 1, where nothing shows that one was changed."""

    def _is_as_written(self, step: StepRow, digest: bytes) -> bool:
        return True


def _changed(step: StepRow) -> ValueError:
    return ValueError(f"the records of step {step.step} were changed after they were written")


STORED_RECORDS: Mapping[int, type[StoredRecords]] = {
    WITHOUT_SEALS: RowsWithoutDigests,
    WITH_ROWS: Rows,
    FORMAT: Parts,
}
"""How each format stores records."""
