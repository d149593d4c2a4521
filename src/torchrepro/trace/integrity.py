"""Checks that a file is a whole trace, before anything in it is believed.

A trace may come from anybody: reading it runs nothing that is in it, and ends soon.
"""

from __future__ import annotations

import json
import sqlite3
from bisect import bisect_right
from contextlib import closing, contextmanager
from functools import cache
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

import xxhash

from torchrepro.trace.format import (
    DETAILS,
    FORMAT,
    OF_RUN,
    SCHEMAS,
    SEALED,
    WITHOUT_SEALS,
    StepRow,
    as_bytes,
)
from torchrepro.trace.parts import AT_ONCE, STORED_RECORDS
from torchrepro.trace.request import LEVELS, is_range, level_of_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

META = 1 << 20
"""Bytes of the whole `meta` table."""

LENGTH = 1 << 26
"""Bytes of any other cell."""

ANY_LENGTH = 2**31 - 1
"""Bytes of a cell that was checked, and of a kept tensor, each of which is read alone."""

RECORDS = 1 << 40
"""Records of a step."""

OBJECTS = 100

INSTRUCTIONS = 1000
"""Instructions of SQLite's machine that count as one."""

LEAST, EACH = 10_000, 100
"""So many counts are allowed, and one more for so many bytes of the file. Reading every row takes a
tenth of that at most."""

Tables = dict[str, tuple[str, str]]
Columns = dict[str, dict[str, frozenset[type]]]

_TYPES = {"integer": int, "text": str, "blob": bytes, "real": float}
_ORDERS = {"meta": "key", "statistics": "record, position"}


@contextmanager
def connected(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a file for reading, as it is at this moment; close it again if the block fails.

    Raises `ValueError` for what is no file. Views, and what else a database may hold besides data,
    run only if a query names them; `format_of` makes sure that there are none.
    """
    for each in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm", "-journal"))):
        if (each is path or each.exists()) and not each.is_file():
            raise ValueError(f"{each.name} is not a regular file")
    connection = _opened(path)
    try:
        with _bounded(connection, size_of(path)):
            connection.execute("begin")  # a run that still goes on adds rows
            yield connection
    except BaseException:
        connection.close()
        raise


def size_of(path: Path) -> int:
    """Return how many bytes a file has, with what is still in its log."""
    files = path, path.with_name(f"{path.name}-wal")
    return sum(each.stat().st_size for each in files if each.exists())


def _opened(path: Path) -> sqlite3.Connection:
    """Open a file for reading.

    A process that was killed while it opened or closed its file may leave a journal, which a reader
    may not take back. It would take back nothing but how SQLite keeps the file, so the file is read
    without it. See https://sqlite.org/rescode.html#readonly_rollback.
    """
    uri = f"{path.absolute().as_uri()}?mode=ro"
    try:
        return _guarded(sqlite3.connect(uri, uri=True))
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
            raise
        return _guarded(sqlite3.connect(f"{uri}&immutable=1", uri=True))


def _guarded(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Return the connection, limited to reading data; close it if its file cannot be read."""
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, META)
        for pragma in ("trusted_schema = off", "cell_size_check = on", "query_only = on"):
            connection.execute(f"pragma {pragma}")
        connection.execute("pragma schema_version")  # the first that reads the file
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def _bounded(connection: sqlite3.Connection, size: int) -> Iterator[None]:
    """Raise `ValueError` if the block reads more than a file of this size can hold."""
    left = LEAST + size // EACH

    def count() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    connection.set_progress_handler(count, INSTRUCTIONS)
    try:
        yield
    except sqlite3.OperationalError:
        if left < 0:
            raise ValueError("it has more rows than a file of its size can hold") from None
        raise
    finally:
        connection.set_progress_handler(None, 0)


def has_begun(connection: sqlite3.Connection) -> bool:
    """Whether there are rows; a process killed before its first step leaves empty tables."""
    tables = _tables(connection)
    if not any(tables.items() <= _schema(each)[0].items() for each in SCHEMAS):
        return True  # opening it says why it is no trace
    return any(
        connection.execute(f"select 1 from {name} limit 1").fetchone()  # noqa: S608 - ours
        for name in tables.keys() & {"meta", "step", "record", "part"}
    )


def format_of(connection: sqlite3.Connection) -> int | None:
    """Return the format of a trace; None for one that is not supported.

    Raises `ValueError` unless the tables are exactly those of the format.
    """
    tables = _tables(connection)
    if tables.get("meta") != _schema(WITHOUT_SEALS)[0]["meta"]:
        raise ValueError("its tables are not those of a trace")
    row = connection.execute("select value from meta where key = 'format'").fetchone()
    if row is None or not isinstance(row[0], str) or not row[0].isdecimal():
        raise ValueError("its format is missing")
    if row[0] not in map(str, SCHEMAS):
        return None
    if tables != _schema(int(row[0]))[0]:
        raise ValueError("its tables are not those of a trace")
    return int(row[0])


def meta_of(connection: sqlite3.Connection) -> dict[str, Any]:
    """Return what a trace says of its run; raises `ValueError` if it cannot be right."""
    texts, size = {}, 0
    for key, value in connection.execute("select key, value from meta"):
        size += len(key) + len(value)
        if size > META:
            raise ValueError("its facts about the run are too large")
        texts[key] = value
    try:
        meta = {key: json.loads(text) for key, text in texts.items()}
    except RecursionError:
        raise ValueError("its facts about the run are nested too deeply") from None
    for key, is_right in _META.items():
        if not is_right(meta.get(key)):
            raise ValueError(f"its value of `{key}` is not valid")
    return meta


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def _is_mapping(value: Any) -> bool:
    return value is None or isinstance(value, dict)


def _is_mapping_of_words(value: Any) -> bool:
    return _is_mapping(value) and all(isinstance(its, str) for its in (value or {}).values())


def _is_list_of(fields: Mapping[str, Callable[[Any], bool]]) -> Callable[[Any], bool]:
    """Return a test for a list of mappings with these fields; there may be no list."""

    def has_fields(each: Any) -> bool:
        return isinstance(each, dict) and all(
            is_right(each.get(name)) for name, is_right in fields.items()
        )

    return lambda value: value is None or (isinstance(value, list) and all(map(has_fields, value)))


_WORDS = _is(str, type(None))
_LOADER = {"where": _is(str), "workers": _is(int), "dataset": _is(str), "worker_init_fn": _WORDS}
_SOURCE = {
    **dict.fromkeys(("name", "what", "where"), _is(str)),
    **dict.fromkeys(("step", "record"), _is(int)),
    "value": _WORDS,
}
_META: Mapping[str, Callable[[Any], bool]] = {
    "rank": _is(int),
    **dict.fromkeys(("ordinal", "world_size"), _is(int, type(None))),
    **dict.fromkeys(("finished", "statistics", "detail"), _is(bool, type(None))),
    **dict.fromkeys(("program", "program_text", "process", "resumed"), _WORDS),
    **dict.fromkeys(("profile", "digest", "guarantee", "date", "host", "recorded_by"), _WORDS),
    "loaders": _is_list_of(_LOADER),
    "sources": _is_list_of(_SOURCE),
    **dict.fromkeys(("versions", "hardware", "outcomes", "repository"), _is_mapping),
    **dict.fromkeys(("algorithm", "knobs", "models"), _is_mapping_of_words),
    "level": lambda value: value is None or value in LEVELS,
    "steps": lambda value: value is None or is_range(value),
    "every": lambda value: value is None or (type(value) is int and value > 0),
    **dict.fromkeys(("max_size", "dropped"), lambda value: value is None or type(value) is int),
}
"""What is read of a run, each with a test of whether a value can be right."""


def check_tables(connection: sqlite3.Connection, version: int) -> None:
    """Raise `ValueError` if tables of the run and its steps are not those that were written.

    Without digests, raise it if they cannot be.
    """
    seals = _seals(connection, version)
    names = (*OF_RUN, *(name for name in SEALED[version] if name not in (*OF_RUN, *DETAILS)))
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LENGTH)
    for name in names:
        _check_table(connection, version, name, seals)


def check_details(
    connection: sqlite3.Connection, version: int, steps: Mapping[int, StepRow]
) -> None:
    """Raise `ValueError` if statistics or tensors are not those that were written."""
    seals = _seals(connection, version)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, ANY_LENGTH)
    if version < FORMAT:
        for name in DETAILS:
            _check_table(connection, version, name, seals)
        return
    found = {name: dict(_digests_by_step(connection, version, name, steps)) for name in DETAILS}
    for number, row in steps.items():
        digests = [found[name].pop(number, NOTHING) for name in DETAILS]
        whole = b"" if digests == [NOTHING] * len(DETAILS) else b"".join(digests)
        if whole != (b"" if row.dropped else row.details):
            raise ValueError(
                f"the statistics or tensors of step {number} were changed after they were written"
            )


def _digests_by_step(
    connection: sqlite3.Connection, version: int, table: str, steps: Mapping[int, StepRow]
) -> Iterator[tuple[int, bytes]]:
    """Yield a digest of the rows of each step that has any. Raises `ValueError` for a lone row."""
    ends = [row.first + row.records for row in steps.values()]
    numbers = list(steps)
    at_once = 1 if table == "tensor" else AT_ONCE
    rows = chain.from_iterable(_rows(connection, table, _schema(version)[1][table], at_once))
    last = -1
    for place, group in groupby(rows, key=lambda row: bisect_right(ends, row[0])):
        if place == len(ends) or place <= last:
            raise ValueError(f"its table `{table}` has rows in the wrong place")
        last = place
        digest = xxhash.xxh3_128()
        for row in group:
            digest.update(as_bytes([row]))
        yield numbers[place], digest.digest()


NOTHING = xxhash.xxh3_128_digest(b"")
"""The digest of no rows."""


def _seals(connection: sqlite3.Connection, version: int) -> Mapping[str, bytes]:
    if not SEALED[version]:
        return {}
    seals = dict(connection.execute("select name, digest from seal"))
    if seals.keys() != set(SEALED[version]):
        raise ValueError("not all of its tables have a digest")
    return seals


def _check_table(
    connection: sqlite3.Connection, version: int, name: str, seals: Mapping[str, bytes]
) -> None:
    at_once = 1 if name == "tensor" else AT_ONCE
    digest = xxhash.xxh3_128()
    for rows in _rows(connection, name, _schema(version)[1][name], at_once):
        digest.update(as_bytes(rows))
    if seals and seals[name] != digest.digest():
        raise ValueError(f"its table `{name}` was changed after it was written")


def _rows(
    connection: sqlite3.Connection, table: str, columns: dict[str, frozenset[type]], at_once: int
) -> Iterator[list[tuple[Any, ...]]]:
    """Yield the rows of a table in the order in which they were written, so many at a time."""
    names, order = ", ".join(columns), _ORDERS.get(table, "rowid")
    cursor = connection.execute(f"select {names} from {table} order by {order}")  # noqa: S608 - ours
    while rows := cursor.fetchmany(at_once):
        for (column, types), cells in zip(columns.items(), zip(*rows, strict=True), strict=True):
            if not types.issuperset(map(type, cells)):
                raise ValueError(
                    f"column `{column}` of its table `{table}` has a value of another type"
                )
        yield rows


def steps_of(
    connection: sqlite3.Connection, version: int, meta: Mapping[str, Any]
) -> dict[int, StepRow]:
    """Return every step by its number; raises `ValueError` if one is missing.

    A recording begins with step 0, or the first one requested, and leaves none out.
    """
    own, dropped = "x'', ''", set[int]()
    if version == FORMAT:
        own = "details, level"
        dropped = {step for (step,) in connection.execute("select step from dropped")}
    columns = "step, first, records, bytes, parameters, gradients, random, finished, digest"
    rows = connection.execute(f"select {columns}, {own} from step order by step")  # noqa: S608 - ours
    steps: dict[int, StepRow] = {}
    following, after = (meta.get("steps") or [0])[0], 1
    for number, first, records, size, parameters, gradients, random, finished, *rest in rows:
        generators = _generators(random)
        if number != following:
            raise ValueError(f"step {following} is missing")
        if first != after or not 0 <= records <= RECORDS:
            raise ValueError(f"the records of step {number} are in the wrong place")
        digest, of_details, level = rest
        if level not in {"", *LEVELS}:
            raise ValueError(f"the level of step {number} is not valid")
        steps[number] = StepRow(
            *(number, first, records, size, parameters, gradients, generators),
            finished=bool(finished),
            level=level or level_of(meta, number),
            digest=digest,
            details=of_details,
            dropped=number in dropped,
        )
        following, after = number + 1, first + records
    if not dropped <= steps.keys():
        raise ValueError("records were dropped of a step that is missing")
    return steps


def check_records(
    connection: sqlite3.Connection, version: int, steps: Mapping[int, StepRow], size: int
) -> None:
    """Raise `ValueError` if a record is missing, was changed, or refers to no row."""
    threads, sites, arguments = (
        {number for (number,) in connection.execute(f"select id from {name}")}  # noqa: S608 - ours
        for name in ("thread", "site", "argument")
    )
    known = {0, *threads}, sites - {0}, {0, *arguments}
    STORED_RECORDS[version](connection).check(steps, known, size)


def level_of(meta: Mapping[str, Any], number: int) -> str:
    """Return the level at which a step was to be recorded."""
    return level_of_step(number, meta.get("level") or LEVELS[-1], meta.get("every") or 1)


def _generators(text: str) -> Mapping[str, str]:
    try:
        found = json.loads(text)
    except RecursionError:
        found = None
    if not isinstance(found, dict) or not _is_mapping_of_words(found):
        raise ValueError("the states of generators are not valid")
    return found


def _tables(connection: sqlite3.Connection) -> Tables:
    """Return all that a database holds, by name: its type, and how it was made."""
    master = connection.execute("select name, type, sql from sqlite_master")
    rows = master.fetchmany(OBJECTS)
    return {str(name): (str(kind), " ".join(str(sql).split())) for name, kind, sql in rows}


@cache
def _schema(version: int) -> tuple[Tables, Columns]:
    """Return the tables of a format, and of each table the types that a cell of a column has."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMAS[version])
        info = 'select name, type, "notnull" or pk from pragma_table_info(?)'
        columns = {
            table: {
                column: frozenset({_TYPES[kind.lower()], *(() if filled else (type(None),))})
                for column, kind, filled in connection.execute(info, (table,))
            }
            for table in (*OF_RUN, *DETAILS, *SEALED[version])
        }
        return _tables(connection), columns
