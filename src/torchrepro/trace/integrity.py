"""Checks that a file is a whole trace, before anything in it is believed.

A trace may come from anybody: reading it runs nothing that is in it, and ends soon.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing, contextmanager
from dataclasses import astuple
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import xxhash

from torchrepro.trace.format import (
    DETAILS,
    FORMAT,
    SCHEMA,
    SEAL,
    Loss,
    Site,
    StepRow,
    digest_of,
    unpacked,
)
from torchrepro.trace.request import LEVELS, is_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
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

_REAL = float, type(None)
TYPES: Mapping[str, tuple[Any, ...]] = {
    "step": (*[int] * 5, str, int, *[bytes] * 4, *[str] * 3, bytes),
    "part": (int, bytes, bytes, bytes),
    "statistics": (int, int, int, *[_REAL] * 4),
    "tensor": (int, str, int, str, str, bytes),
}
"""The types of the values in each row of a table."""

Tables = dict[str, tuple[str, str]]


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
    if not tables.items() <= _tables_of_format().items():
        return True  # opening it says why it is no trace
    return any(
        connection.execute(f"select 1 from {name} limit 1").fetchone()  # noqa: S608 - ours
        for name in tables.keys() & {"meta", "step", "part"}
    )


def is_of_format(connection: sqlite3.Connection) -> bool:
    """Whether a trace has the format that is read.

    Raises `ValueError` if it is no trace, or if its tables are not exactly those of the format.
    """
    tables, expected = _tables(connection), _tables_of_format()
    if tables.get("meta") != expected["meta"]:
        raise ValueError("its tables are not those of a trace")
    row = connection.execute("select value from meta where key = 'format'").fetchone()
    if row is None or not isinstance(row[0], str) or not row[0].isdecimal():
        raise ValueError("its format is missing")
    if row[0] != str(FORMAT):
        return False
    if tables != expected:
        raise ValueError("its tables are not those of a trace")
    return True


def _tables(connection: sqlite3.Connection) -> Tables:
    """Return all that a database holds, by name: its type, and how it was made."""
    master = connection.execute("select name, type, sql from sqlite_master")
    rows = master.fetchmany(OBJECTS)
    return {str(name): (str(kind), " ".join(str(sql).split())) for name, kind, sql in rows}


@cache
def _tables_of_format() -> Tables:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA)
        return _tables(connection)


def meta_of(connection: sqlite3.Connection) -> dict[str, Any]:
    """Return what a trace says of its run; raises `ValueError` if it cannot be right."""
    texts, size = {}, 0
    for key, value in connection.execute("select key, value from meta"):
        if not {str}.issuperset(map(type, (key, value))):
            raise ValueError("its facts about the run are no texts")
        size += len(key) + len(value)
        if size > META:
            raise ValueError("its facts about the run are too large")
        texts[key] = value
    if texts.pop(SEAL, None) != json.dumps(digest_of(sorted(texts.items())).hex()):
        raise ValueError("its facts about the run were changed after they were written")
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
    **dict.fromkeys(
        ("max_size", "dropped", "rows"), lambda value: value is None or type(value) is int
    ),
}
"""What is read of a run, each with a test of whether a value can be right."""


class Contents:
    """The steps of a trace, each row of which is checked as it is read.

    Raises `ValueError` for what was changed, and for what cannot be right. Its time and memory are
    bounded by the bytes of the file, whatever they say.
    """

    def __init__(self, connection: sqlite3.Connection, meta: Mapping[str, Any], size: int) -> None:
        self._connection = connection
        self._left = size
        self.steps: dict[int, StepRow] = {}
        self.sites: list[Site] = []
        self.arguments: list[str] = []
        self.threads: list[str] = []
        self.losses: list[Loss] = []
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LENGTH)
        # A recording begins with step 0, or the first one requested, and leaves none out.
        following, after = (meta.get("steps") or [0])[0], 1
        for row in self._rows("step", "order by step"):
            number, first, records, parts, read, level, finished, *rest = row
            digest, details, parameters, gradients, random, names, losses, seal = rest
            if number != following:
                raise ValueError(f"step {following} is missing")
            if digest_of([row[:-1]]) != seal:
                raise ValueError(f"step {number} was changed after it was written")
            if first != after or not 0 <= records <= RECORDS or parts < 0 or level not in LEVELS:
                raise ValueError(f"step {number} is not valid")
            try:
                self._read_texts(number, json.loads(names), json.loads(losses))
                generators = json.loads(random)
            except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
                raise ValueError(f"the texts of step {number} are not valid") from None
            if not isinstance(generators, dict) or not _is_mapping_of_words(generators):
                raise ValueError(f"the states of generators of step {number} are not valid")
            self.steps[number] = StepRow(
                *(number, first, records, read, parameters, gradients, generators),
                *(bool(finished), level, digest, details, parts),
            )
            following, after = number + 1, first + records
        self._end = after
        if meta.get("finished") and meta.get("rows") != len(self.steps):
            raise ValueError(f"it has {len(self.steps)} steps and says {meta.get('rows')}")

    def _rows(self, table: str, which: str, values: Sequence[int] = ()) -> Iterator[Any]:
        types = TYPES[table]
        for row in self._connection.execute(f"select * from {table} {which}", values):  # noqa: S608 - ours
            if not all(map(isinstance, row, types)):
                raise ValueError(f"its table `{table}` has a value of another type")
            self._take(sum(len(cell) for cell in row if isinstance(cell, str | bytes)))
            yield row

    def _take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise ValueError("it has more in it than a file of its size can hold")

    def _read_texts(self, step: int, names: Any, losses: Any) -> None:
        sites = [Site(*words) for words in names.get("sites", ())]
        arguments, threads = names.get("arguments", ()), names.get("threads", ())
        of_step = [
            Loss(step, place, None if value is None else float(value), bytes.fromhex(mark), source)
            for place, (value, mark, source) in enumerate(losses)
        ]
        texts = chain(*map(astuple, sites), arguments, threads, (loss.source for loss in of_step))
        "".join(texts).encode()  # raises if one of them is no text
        self.sites += sites
        self.arguments += arguments
        self.threads += threads
        self.losses += of_step

    def check_records(self) -> None:
        """Raise `ValueError` if a record is missing, was changed, or refers to no name."""
        rows = self._rows("part", "order by first")
        for step in self.steps.values():
            digest, following = xxhash.xxh3_128(), step.first
            for _ in range(step.parts):
                first, content, inputs, outputs = next(rows, (None, b"", b"", b""))
                if first != following:
                    raise ValueError(f"records of step {step.step} are missing")
                outline = unpacked(content)
                # The recorder sees to it that a file has a byte for each record.
                self._take(max(0, len(outline) - len(content) - len(inputs) - len(outputs)))
                thread, site, argument, least_site = outline.limits
                if not (
                    thread < max(len(self.threads), 1)
                    and 0 < least_site <= site <= len(self.sites)
                    and argument <= len(self.arguments)
                    and sum(outline.input_lengths) == len(inputs)
                    and sum(outline.output_lengths) == len(outputs)
                ):
                    raise ValueError(f"a record of step {step.step} is not valid")
                of_values = xxhash.xxh3_128_digest(inputs), xxhash.xxh3_128_digest(outputs)
                digest.update(b"".join((outline.digest, *of_values)))
                following += len(outline)
            if not step.dropped and (following, digest.digest()) != (
                step.first + step.records,
                step.digest,
            ):
                raise ValueError(f"records of step {step.step} were changed or are missing")
        if next(rows, None) is not None:
            raise ValueError("it has records that belong to no step")

    def check_details(self) -> None:
        """Raise `ValueError` if statistics or tensors are not those that were written."""
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, ANY_LENGTH)
        for step in self.steps.values():
            which = step.first, step.first + step.records
            rows = (
                self._rows(table, "where record >= ? and record < ? order by 1, 2, 3", which)
                for table in DETAILS
            )
            if digest_of(chain.from_iterable(rows)) != step.details:
                raise ValueError(f"the statistics or tensors of step {step.step} were changed")
        for table in DETAILS:
            for _ in self._rows(table, "where record < 1 or record >= ?", (self._end,)):
                raise ValueError(f"its table `{table}` has rows of no record")
