"""Reads traces; checks each as a whole before anything in it is believed.

A trace may come from anybody: reading it runs nothing that is in it, and ends soon.
"""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing, contextmanager
from functools import cache, cached_property
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from torchrepro.errors import TraceError
from torchrepro.messages import Problem, near, some
from torchrepro.trace.format import (
    SCHEMAS,
    SEALED,
    SUFFIX,
    WITHOUT_SEALS,
    Loss,
    Record,
    Site,
    StepRow,
    as_bytes,
)
from torchrepro.trace.request import LEVELS, is_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

META = 1 << 20
"""Bytes of the whole `meta` table."""

LENGTH = 1 << 26
"""Bytes of any other cell."""

ANY_LENGTH = 2**31 - 1
"""Bytes of a cell that was checked, and of a kept tensor, each of which is read alone."""

OBJECTS = 100
AT_ONCE = 1000
"""Rows that are held in memory at once."""

INSTRUCTIONS = 1000
"""Instructions of SQLite's machine that count as one."""

LEAST, EACH = 10_000, 100
"""So many counts are allowed, and one more for so many bytes of the file. Reading every row takes a
tenth of that at most."""

OF_RECORDS = ("statistics", "tensor")
"""Tables with details of single records."""

Tables = dict[str, tuple[str, str]]
Columns = dict[str, dict[str, frozenset[type]]]

_TYPES = {"integer": int, "text": str, "blob": bytes, "real": float}
_ORDERS = {"meta": "key", "statistics": "record, position"}


class Trace:
    """One process of a recorded run, as its file is when it is opened.

    Raises `TraceError` for a file that is no trace, is damaged, or has another format. Without
    `records`, the records and their details are not checked and must not be read.
    """

    def __init__(self, path: Path, *, records: bool = True) -> None:
        self.path = path
        try:
            with _connected(path) as self.connection:
                self._read(records=records)
        except TraceError:
            raise
        except ValueError as error:
            raise TraceError(Problem(f"a damaged trace: {error}", str(path))) from None
        except sqlite3.Error as error:
            raise TraceError(Problem(f"cannot be read as a trace: {error}", str(path))) from None

    def _read(self, *, records: bool) -> None:
        version = _format_of(self.connection)
        if version is None:
            raise TraceError(
                Problem(
                    "a trace of another format",
                    str(self.path),
                    legal=" or ".join(map(str, sorted(SCHEMAS))),
                    todo="read it with the version of torchrepro that wrote it",
                )
            )
        self.sealed = version != WITHOUT_SEALS
        """Whether it has digests, which show damage."""
        self.meta: Mapping[str, Any] = _meta_of(self.connection)
        _check_tables(self.connection, version, records=records)
        self.steps: Mapping[int, StepRow] = _steps_of(self.connection, self.meta)
        """Every step by its number, in order."""
        if records:
            _check_records(self.connection, self.steps, sealed=self.sealed)

    def close(self) -> None:
        """Close the file."""
        self.connection.close()

    @property
    def rank(self) -> int:
        """The rank of the process."""
        return int(self.meta["rank"])

    @property
    def is_truncated(self) -> bool:
        """Whether the process ended before it had written the end of the trace."""
        return not self.meta.get("finished")

    @property
    def ended_steps(self) -> int:
        """How many steps of the program are in it: what came after the last one is none."""
        return sum(row.finished for row in self.steps.values())

    def level_of(self, number: int) -> str:
        """Return the level at which a step was recorded, or would have been."""
        row = self.steps.get(number)
        return _level_of(self.meta, number) if row is None else row.level

    def ends_before(self, number: int) -> bool:
        """Whether it shows that the program ended no step of this number."""
        asked = self.meta.get("steps")
        row = self.steps.get(number)
        return not (
            self.is_truncated
            or (row and row.finished)
            or (asked and not asked[0] <= number <= asked[1])
        )

    @cached_property
    def sites(self) -> Mapping[int, Site]:
        """Every site by its id."""
        rows = self.connection.execute("select id, phase, module, op, source, outputs from site")
        return {number: Site(*rest) for number, *rest in rows}

    @cached_property
    def arguments(self) -> Mapping[int, str]:
        """The text of arguments that are not tensors, by its id; 0 stands for none."""
        return {0: "", **dict(self.connection.execute("select id, text from argument"))}

    @cached_property
    def threads(self) -> Mapping[int, str]:
        """The name of each thread by its id; 0 is the main thread."""
        return dict(self.connection.execute("select id, name from thread"))

    @cached_property
    def losses(self) -> list[Loss]:
        """Every loss in its order."""
        rows = self.connection.execute(
            "select step, position, value, fingerprint, source from loss order by step, position"
        )
        return [Loss(*row) for row in rows]

    def rows(self, step: int) -> list[tuple[int, int, int, int, bytes, bytes]]:
        """Return the records of a step in order: id, thread, site, argument, inputs, outputs."""
        its = self.steps[step]
        return self.connection.execute(
            "select id, thread, site, argument, inputs, outputs from record"
            " where id >= ? and id < ? order by id",
            (its.first, its.first + its.records),
        ).fetchall()

    def records(self, step: int) -> list[Record]:
        """Return the records of a step in order."""
        return [Record(*row) for row in self.rows(step)]

    def statistics(self, record: int) -> list[tuple[int, int, float, float, float, float]]:
        """Return position, count, mean, norm, low and high of each output of a record."""
        return self.connection.execute(
            "select position, count, mean, norm, low, high from statistics"
            " where record = ? order by position",
            (record,),
        ).fetchall()

    def tensors(self, record: int) -> list[tuple[str, int, str, str, bytes]]:
        """Return role (``input``, ``output``), position, dtype, shape, bytes of kept tensors."""
        return self.connection.execute(
            "select role, position, dtype, shape, data from tensor"
            " where record = ? order by role, position",
            (record,),
        ).fetchall()


def read_run(folder: Path | str, *, records: bool = True) -> list[Trace]:
    """Return the traces of a recorded run, by rank and by the order in which they began.

    Raises `TraceError` for a folder that does not exist, holds no trace, or holds a damaged one.
    Without `records` the traces are for reading what they say of the run and its steps only.
    """
    place = Path(folder)
    if place.is_file():
        raise TraceError(
            Problem("is a file", found=str(folder), todo="name the folder of the recording")
        )
    if not place.is_dir():
        raise TraceError(Problem("no such folder", found=str(folder), **_beside(place)))
    files = sorted(filter(_begun, place.glob(f"rank*{SUFFIX}")), key=_order)
    if not files:
        raise TraceError(
            Problem(
                "holds no trace",
                found=str(folder),
                todo="record one: torchrepro run PROFILE --record DIR -- COMMAND; "
                "a run that was killed before its first step ended leaves none",
            )
        )
    return [Trace(path, records=records) for path in files]


def steps_so_far(folder: Path) -> int:
    """Return how many steps a run that may go on has ended, in the process that is furthest.

    A file is looked at only once its write-ahead log is there: a reader does not hold up who
    writes to it from then on (https://sqlite.org/wal.html#concurrency).
    """
    return max(map(_ended_steps, folder.glob(f"rank*{SUFFIX}-wal")), default=0)


def _ended_steps(log: Path) -> int:
    try:
        with _connected(log.with_name(log.name.removesuffix("-wal"))) as connection:
            (number,) = connection.execute("select count(*) from step where finished").fetchone()
    except (ValueError, OSError, sqlite3.Error):
        return 0  # the process has ended meanwhile, or has not got so far
    connection.close()
    return int(number)


def _beside(place: Path) -> dict[str, str]:
    """Return the folder beside `place` whose name is nearest, or all that hold a recording."""
    above = place.parent
    others = sorted(each.name for each in above.iterdir()) if above.is_dir() else []
    recorded = [each for each in others if any((above / each).glob(f"rank*{SUFFIX}"))]
    close = near(place.name, recorded)
    if close:
        return {"near": str(above / close)}
    if recorded:
        return {"legal": some(str(above / each) for each in recorded)}
    return {"todo": "record one: torchrepro run PROFILE --record DIR -- COMMAND"}


def _begun(path: Path) -> bool:
    """Whether a process has written anything to its file.

    A file that cannot be read as a trace counts as begun, so that opening it says why.
    """
    try:
        with _connected(path) as connection:
            begun = _has_begun(connection)
    except (ValueError, sqlite3.Error):
        return True
    connection.close()
    return begun


def _order(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.name)]


@contextmanager
def _connected(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a file for reading, as it is at this moment; close it again if the block fails.

    Raises `ValueError` for what is no file. Views, and what else a database may hold besides data,
    run only if a query names them; `_format_of` makes sure that there are none.
    """
    for each in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm", "-journal"))):
        if (each is path or each.exists()) and not each.is_file():
            raise ValueError(f"{each.name} is not a regular file")
    size = sum(
        each.stat().st_size for each in (path, path.with_name(f"{path.name}-wal")) if each.exists()
    )
    connection = _opened(path)
    try:
        with _bounded(connection, size):
            connection.execute("begin")  # a run that still goes on adds rows
            yield connection
    except BaseException:
        connection.close()
        raise


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


def _has_begun(connection: sqlite3.Connection) -> bool:
    """Whether there are rows; a process killed before its first step leaves empty tables."""
    tables = _tables(connection)
    if not any(tables.items() <= _schema(each)[0].items() for each in SCHEMAS):
        return True  # opening it says why it is no trace
    return any(
        connection.execute(f"select 1 from {name} limit 1").fetchone()  # noqa: S608 - ours
        for name in tables.keys() & {"meta", "step", "record"}
    )


def _format_of(connection: sqlite3.Connection) -> int | None:
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


def _meta_of(connection: sqlite3.Connection) -> dict[str, Any]:
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
    **dict.fromkeys(("program", "program_text", "process"), _WORDS),
    **dict.fromkeys(("profile", "digest", "guarantee", "date", "host"), _WORDS),
    "loaders": _is_list_of(_LOADER),
    "sources": _is_list_of(_SOURCE),
    **dict.fromkeys(("versions", "hardware", "outcomes", "repository"), _is_mapping),
    **dict.fromkeys(("algorithm", "knobs", "models"), _is_mapping_of_words),
    "level": lambda value: value is None or value in LEVELS,
    "steps": lambda value: value is None or is_range(value),
    "every": lambda value: value is None or (type(value) is int and value > 0),
}
"""What is read of a run, each with a test of whether a value can be right."""


def _check_tables(connection: sqlite3.Connection, version: int, *, records: bool) -> None:
    """Raise `ValueError` if rows are not those that were written; without seals, if they cannot be.

    `records` says whether details of single records are checked too.
    """
    sealed = version != WITHOUT_SEALS
    seals = dict(connection.execute("select name, digest from seal")) if sealed else {}
    if sealed and seals.keys() != set(SEALED):
        raise ValueError("not all of its tables have a digest")
    for name in SEALED:
        if name in OF_RECORDS and not records:
            continue
        length, at_once = (ANY_LENGTH, 1) if name == "tensor" else (LENGTH, AT_ONCE)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, length)
        digest = xxhash.xxh3_128()
        for rows in _rows(connection, name, _schema(version)[1][name], at_once):
            digest.update(as_bytes(rows))
        if sealed and seals[name] != digest.digest():
            raise ValueError(f"its table `{name}` was changed after it was written")
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, ANY_LENGTH)


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


def _steps_of(connection: sqlite3.Connection, meta: Mapping[str, Any]) -> dict[int, StepRow]:
    """Return every step by its number; raises `ValueError` if one is missing.

    A recording begins with step 0, or the first one requested, and leaves none out.
    """
    rows = connection.execute(
        "select step, first, records, bytes, parameters, gradients, random, finished, digest"
        " from step order by step"
    )
    steps: dict[int, StepRow] = {}
    following, after = (meta.get("steps") or [0])[0], 1
    for number, first, records, size, parameters, gradients, random, finished, digest in rows:
        generators = _generators(random)
        if number != following:
            raise ValueError(f"step {following} is missing")
        if first != after or records < 0:
            raise ValueError(f"the records of step {number} are in the wrong place")
        steps[number] = StepRow(
            *(number, first, records, size, parameters, gradients, generators),
            finished=bool(finished),
            level=_level_of(meta, number),
            digest=digest,
        )
        following, after = number + 1, first + records
    return steps


def _level_of(meta: Mapping[str, Any], number: int) -> str:
    """Return the level at which a step was to be recorded."""
    return LEVELS[0] if number % (meta.get("every") or 1) else meta.get("level") or LEVELS[-1]


def _generators(text: str) -> Mapping[str, str]:
    try:
        found = json.loads(text)
    except RecursionError:
        found = None
    if not isinstance(found, dict) or not _is_mapping_of_words(found):
        raise ValueError("the states of generators are not valid")
    return found


def _check_records(
    connection: sqlite3.Connection, steps: Mapping[int, StepRow], *, sealed: bool
) -> None:
    """Raise `ValueError` if a record is missing, was changed, or refers to no row."""
    (count,) = connection.execute("select count(*) from record").fetchone()
    expected = sum(row.records for row in steps.values())
    if count != expected:
        raise ValueError(f"it has {count} records where its steps have {expected}")
    known = [
        {0, *map(itemgetter(0), connection.execute(f"select id from {name}"))}  # noqa: S608 - ours
        for name in ("thread", "site", "argument")
    ]
    known[1].discard(0)
    for row in steps.values():
        found, digest = 0, xxhash.xxh3_128()
        cursor = connection.execute(
            "select thread, site, argument, inputs, outputs from record"
            " where id >= ? and id < ? and step = ? order by id",
            (row.first, row.first + row.records, row.step),
        )
        while rows := cursor.fetchmany(AT_ONCE):
            found += len(rows)
            *numbers, inputs, outputs = zip(*rows, strict=True)
            if not (
                all(its.issuperset(column) for its, column in zip(known, numbers, strict=True))
                and {bytes}.issuperset(map(type, (*inputs, *outputs)))
            ):
                raise ValueError(f"a record of step {row.step} is not valid")
            digest.update(as_bytes(rows))
        if found != row.records or (sealed and digest.digest() != row.digest):
            raise ValueError(f"the records of step {row.step} were changed after they were written")


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
            for table in SEALED
        }
        return _tables(connection), columns
