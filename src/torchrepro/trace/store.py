"""The store of a trace: one SQLite file per rank and process, whole up to its last commit."""

from __future__ import annotations

import json
import marshal
import math
import sqlite3
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import xxhash

from torchrepro.errors import TraceError
from torchrepro.messages import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

FORMAT = 2
SUFFIX = ".sqlite"
_TABLES = """
create table meta (key text primary key, value text not null) without rowid;
create table site (
    id integer primary key, phase text not null, module text not null, op text not null,
    source text not null, outputs text not null
);
create table argument (id integer primary key, text text not null);
create table thread (id integer primary key, name text not null);
create table step (
    step integer primary key, first integer not null, records integer not null,
    bytes integer not null,
    digest blob not null, parameters blob not null, gradients blob not null,
    random text not null, finished integer not null
);
create table loss (
    step integer not null, position integer not null, value real, fingerprint blob not null,
    source text not null
);
create table record (
    id integer primary key, step integer not null, thread integer not null,
    site integer not null, argument integer not null, inputs blob not null, outputs blob not null
);
create table statistics (
    record integer not null, position integer not null, count integer not null,
    mean real, norm real, low real, high real, primary key (record, position)
) without rowid;
create table tensor (
    record integer not null, role text not null, position integer not null,
    dtype text not null, shape text not null, data blob not null
);
"""
SCHEMA = f"{_TABLES}create table seal (name text primary key, digest blob not null) without rowid;"
"""What the tables hold is described in `reading`.

`seal` has a digest of the rows of every other table, written in the same transaction as they. It
covers records by way of the digests of their steps.
"""

WITHOUT_SEALS = 1
"""The format of 0.2.0."""

SCHEMAS = {
    WITHOUT_SEALS: f"{_TABLES}create index tensor_of_record on tensor (record);",
    FORMAT: SCHEMA,
}
"""The tables of every format that is still read."""

SEALED = ("meta", "site", "argument", "thread", "step", "loss", "statistics", "tensor")

Fingerprint = bytes

Row = tuple[int, int, int, bytes, bytes]
"""A record as it is stored: thread, site, argument, inputs, outputs."""

TOGETHER = 64
"""Records that are inserted by one statement, which takes two thirds of the time of one each."""

_HEAD = len(marshal.dumps([], 2))


def as_bytes(rows: list[Any]) -> memoryview:
    """Return rows as bytes for a digest; those of two lists are those of one after the other.

    Version 2 of marshal writes equal values as equal bytes, and values of other types as others.
    """
    return memoryview(marshal.dumps(rows, 2))[_HEAD:]


@dataclass(frozen=True, slots=True)
class StepRow:
    """What a step comes to, besides its records."""

    step: int
    first: int
    """The id of its first record; the others follow."""
    records: int
    bytes: int
    """Bytes of all tensors that were read for the step's fingerprints."""
    parameters: Fingerprint
    gradients: Fingerprint
    random: Mapping[str, str]
    finished: bool
    """Whether an optimizer, or the program itself, has ended the step."""
    digest: Fingerprint = b""
    """Of its records; the store fills it in."""


class Store:
    """A trace that is being written.

    Every step is one transaction, so a process that is killed leaves whole steps behind.
    https://sqlite.org/atomiccommit.html
    `clean` takes out of texts of the program what must not be written down.
    """

    def __init__(self, path: Path, clean: Callable[[Any], Any] = lambda text: text) -> None:
        self.path = path
        self.records = 0
        self._clean = clean
        self._meta: dict[str, str] = {}
        self._sources: dict[str, str] = {}  # of losses: the same in every step
        self._of_step = xxhash.xxh3_128()
        self._digests = {name: xxhash.xxh3_128() for name in SEALED}
        self._unsealed = set(SEALED)
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        execute = self._connection.execute
        # Survives the end of the process at any moment; only a power cut may lose the last steps.
        execute("pragma journal_mode = wal")
        execute("pragma synchronous = normal")
        self._connection.executescript(f"begin; {SCHEMA} commit;")  # all tables or none
        execute("begin")

    def write_meta(self, values: Mapping[str, Any]) -> None:
        """Write what is known of the run as a whole."""
        rows = [(key, json.dumps(self._clean(value))) for key, value in values.items()]
        self._many("insert or replace into meta values (?, ?)", rows)
        self._meta.update(rows)
        self._digests["meta"] = xxhash.xxh3_128(as_bytes(sorted(self._meta.items())))
        self._unsealed.add("meta")

    def add_sites(self, sites: Iterable[tuple[int, Sequence[str]]]) -> None:
        """Add places of the program that records refer to."""
        sites = list(sites)
        shown = self._shown(chain.from_iterable(words for _, words in sites))
        self._add("site", [(number, *map(shown.__getitem__, words)) for number, words in sites])

    def add_arguments(self, texts: Iterable[tuple[int, str]]) -> None:
        """Add arguments of ops that are not tensors."""
        texts = list(texts)
        # Without quotes there are only numbers and types in it, which every step may have new of.
        shown = self._shown(text for _, text in texts if "'" in text or '"' in text)
        self._add("argument", [(number, shown.get(text, text)) for number, text in texts])

    def add_threads(self, names: Iterable[tuple[int, str]]) -> None:
        """Add threads that records come from."""
        names = list(names)
        shown = self._shown(name for _, name in names)
        self._add("thread", [(number, shown[name]) for number, name in names])

    def add_records(self, step: int, rows: list[Row]) -> None:
        """Add records of a step in their order."""
        self._of_step.update(as_bytes(rows))
        for start in range(0, len(rows), TOGETHER):
            some = rows[start : start + TOGETHER]
            self._execute(_insertion(len(some)), [step, *chain.from_iterable(some)])
        self.records += len(rows)

    def add_losses(self, rows: Iterable[tuple[int, int, float | None, bytes, str]]) -> None:
        """Add what backward passes began from: step, position, value, fingerprint, source."""
        rows = list(rows)
        self._sources |= self._shown({row[4] for row in rows} - self._sources.keys())
        self._add(
            "loss", [(*row[:2], _real(row[2]), row[3], self._sources[row[4]]) for row in rows]
        )

    def add_statistics(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Add statistics of outputs: record, position, count, mean, norm, low, high."""
        numbers = [(*row[:3], *map(_real, row[3:])) for row in rows]
        self._add("statistics", sorted(numbers, key=itemgetter(0, 1)))  # as they will be read

    def add_tensors(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Add kept tensors: record, role, position, dtype, shape, data."""
        self._add("tensor", list(rows))

    def end_step(self, row: StepRow) -> None:
        """Add a step and commit all that belongs to it."""
        values = (
            *(row.step, row.first, row.records, row.bytes, self._of_step.digest()),
            *(row.parameters, row.gradients),
            *(json.dumps(dict(row.random)), int(row.finished)),
        )
        self._of_step.reset()
        self._add("step", [values])
        self._commit()
        self._execute("begin")

    def close(self) -> None:
        """Commit what is left and leave one file behind."""
        self._commit()
        with suppress(sqlite3.OperationalError):  # a reader may hold it: then it stays as it is
            self._connection.execute("pragma journal_mode = delete")
        self._connection.close()

    def must_exist(self) -> None:
        """Raise `TraceError` if somebody has taken the file away while it was written."""
        if not self.path.exists():
            raise TraceError(Problem("the trace was removed while it was written", str(self.path)))

    def discard(self) -> None:
        """Close without what was written since the last commit."""
        with suppress(sqlite3.Error):
            self._connection.execute("rollback")
        self._connection.close()

    def _shown(self, texts: Iterable[str]) -> dict[str, str]:
        """Return each text as it may be written: without secrets, and as a database can hold it."""
        distinct = list(dict.fromkeys(texts))
        cleaned = self._clean(distinct) if distinct else []
        # A path may hold what is no Unicode.
        storable = (text.encode(errors="backslashreplace").decode() for text in cleaned)
        return dict(zip(distinct, storable, strict=True))

    def _add(self, table: str, rows: list[tuple[Any, ...]]) -> None:
        if rows:
            self._many(f"insert into {table} values ({', '.join('?' * len(rows[0]))})", rows)  # noqa: S608 - a table of ours
            self._digests[table].update(as_bytes(rows))
            self._unsealed.add(table)

    def _commit(self) -> None:
        seals = [(name, self._digests[name].digest()) for name in sorted(self._unsealed)]
        self._many("insert or replace into seal values (?, ?)", seals)
        self._unsealed.clear()
        self._execute("commit")

    def _many(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        try:
            self._connection.executemany(statement, rows)
        except sqlite3.Error as error:
            raise self._refused(error) from error

    def _execute(self, statement: str, values: Sequence[Any] = ()) -> None:
        try:
            self._connection.execute(statement, values)
        except sqlite3.Error as error:
            raise self._refused(error) from error

    def _refused(self, error: sqlite3.Error) -> TraceError:
        return TraceError(
            Problem(
                f"the trace cannot be written: {error}",
                str(self.path),
                todo="make room, or record into another folder",
            )
        )


def _real(value: float | None) -> float | None:
    """Return a number as it is read again: a database has no NaN and no negative zero."""
    return None if value is None or math.isnan(value) else float(value) + 0.0


@cache
def _insertion(count: int) -> str:
    """Return the statement that inserts so many records of one step, its first parameter."""
    groups = (
        f"(?1, {', '.join(f'?{2 + 5 * number + column}' for column in range(5))})"
        for number in range(count)
    )
    columns = "step, thread, site, argument, inputs, outputs"
    return f"insert into record ({columns}) values {', '.join(groups)}"  # noqa: S608 - numbers only
