"""The store of a trace: one SQLite file per rank and process, whole up to its last commit."""

from __future__ import annotations

import json
import sqlite3
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

from torchrepro.errors import Problem, TraceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

FORMAT = 1
SUFFIX = ".sqlite"
SCHEMA = """
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
create index tensor_of_record on tensor (record);
"""
"""What the tables hold is described in `reading`."""

Fingerprint = bytes

Row = tuple[int, int, int, bytes, bytes]
"""A record as it is stored: thread, site, argument, inputs, outputs."""

TOGETHER = 64
"""Records that are inserted by one statement, which takes two thirds of the time of one each."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """What a step comes to, besides its records."""

    step: int
    first: int
    """The id of its first record; the others follow."""
    records: int
    bytes: int
    """Bytes of all tensors that were read for the step's fingerprints."""
    digest: Fingerprint
    parameters: Fingerprint
    gradients: Fingerprint
    random: Mapping[str, str]
    finished: bool
    """Whether an optimizer, or the program itself, has ended the step."""


class Store:
    """A trace that is being written.

    Every step is one transaction, so a process that is killed leaves whole steps behind.
    https://sqlite.org/atomiccommit.html
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records = 0
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        execute = self._connection.execute
        # Survives the end of the process at any moment; only a power cut may lose the last steps.
        execute("pragma journal_mode = wal")
        execute("pragma synchronous = normal")
        self._connection.executescript(f"begin; {SCHEMA} commit;")  # all tables or none
        execute("begin")

    def write_meta(self, values: Mapping[str, Any]) -> None:
        """Write what is known of the run as a whole."""
        rows = [(key, json.dumps(value)) for key, value in values.items()]
        self._many("insert or replace into meta values (?, ?)", rows)

    def add_sites(self, sites: Iterable[tuple[int, Sequence[str]]]) -> None:
        """Add places of the program that records refer to."""
        for number, site in sites:
            self._execute("insert into site values (?, ?, ?, ?, ?, ?)", (number, *site))

    def add_arguments(self, texts: Iterable[tuple[int, str]]) -> None:
        """Add arguments of ops that are not tensors."""
        for row in texts:
            self._execute("insert into argument values (?, ?)", row)

    def add_threads(self, names: Iterable[tuple[int, str]]) -> None:
        """Add threads that records come from."""
        for row in names:
            self._execute("insert into thread values (?, ?)", row)

    def add_records(self, step: int, rows: Sequence[Row]) -> None:
        """Add records of a step in their order."""
        for start in range(0, len(rows), TOGETHER):
            some = rows[start : start + TOGETHER]
            self._execute(_insertion(len(some)), [step, *chain.from_iterable(some)])
        self.records += len(rows)

    def add_losses(self, rows: Iterable[tuple[int, int, float | None, bytes, str]]) -> None:
        """Add what backward passes began from: step, position, value, fingerprint, source."""
        for row in rows:
            self._execute("insert into loss values (?, ?, ?, ?, ?)", row)

    def add_statistics(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Add statistics of outputs: record, position, count, mean, norm, low, high."""
        self._many("insert into statistics values (?, ?, ?, ?, ?, ?, ?)", rows)

    def add_tensors(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Add kept tensors: record, role, position, dtype, shape, data."""
        self._many("insert into tensor values (?, ?, ?, ?, ?, ?)", rows)

    def end_step(self, row: StepRow) -> None:
        """Add a step and commit all that belongs to it."""
        values = (
            *(row.step, row.first, row.records, row.bytes, row.digest),
            *(row.parameters, row.gradients),
            *(json.dumps(dict(row.random)), int(row.finished)),
        )
        self._execute("insert into step values (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
        self._execute("commit")
        self._execute("begin")

    def close(self) -> None:
        """Commit what is left and leave one file behind."""
        self._execute("commit")
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


@cache
def _insertion(count: int) -> str:
    """Return the statement that inserts so many records of one step, its first parameter."""
    groups = (
        f"(?1, {', '.join(f'?{2 + 5 * number + column}' for column in range(5))})"
        for number in range(count)
    )
    columns = "step, thread, site, argument, inputs, outputs"
    return f"insert into record ({columns}) values {', '.join(groups)}"  # noqa: S608 - numbers only
