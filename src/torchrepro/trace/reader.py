"""Reads the traces of a recorded run. Each file is validated before its content is used.

A trace may come from an untrusted source. Reading takes bounded time and runs no code from it.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import astuple
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from torchrepro.ground.errors import TraceError, near, some
from torchrepro.trace.format import (
    DETAILS,
    FORMAT,
    MAIN,
    SCHEMA,
    SEAL,
    SUFFIX,
    Loss,
    Part,
    Site,
    StepRow,
    digest_of,
    unpacked,
)
from torchrepro.trace.request import LEVELS, is_range, level_of_step

if TYPE_CHECKING:
    from torchrepro.trace.format import Outline, Record

LONGEST = 1 << 26
"""The most bytes in a cell of `meta`; any other cell may have as many bytes as the file."""

MOST = 1 << 40
"""The most records of a step."""

_Tables = dict[str, tuple[str, str]]
_Words, _Number = str | None, int | None
_TYPES = {"integer": int, "text": str, "blob": bytes, "real": float}

META: Mapping[str, Any] = {
    "rank": int,
    **dict.fromkeys(("ordinal", "world_size", "max_size", "rows"), _Number),
    **dict.fromkeys(("every", "built", "unread"), _Number),
    **dict.fromkeys(("finished", "statistics", "detail", "replicated"), bool | None),
    **dict.fromkeys(("program", "program_text", "process", "resumed", "level"), _Words),
    **dict.fromkeys(
        ("profile", "digest", "guarantee", "date", "host", "recorded_by", "left"), _Words
    ),
    **dict.fromkeys(("versions", "hardware", "outcomes", "repository"), dict | None),
    **dict.fromkeys(("algorithm", "summed_by", "generators", "knobs", "models"), "words by name"),
    **dict.fromkeys(("before", "hidden", "keep", "modules"), "words"),
    "loaders": {"where": str, "workers": int, "dataset": str, "worker_init_fn": _Words},
    "sources": {
        **dict.fromkeys(("name", "what", "where"), str),
        "step": int,
        "record": int,
        "value": _Words,
    },
    "files": {**dict.fromkeys(("path", "asked", "read", "written"), str), "changed": float},
    "began": float | None,
    "unwritten": {**dict.fromkeys(("allocated", "read", "op"), str), "is_nan": bool},
}
"""The type of each value in `meta`; for a list of mappings, the type of each field."""


class Trace:
    """A snapshot of the trace of one process, taken when the file is opened.

    Raises `TraceError` if the file is not a trace, is damaged, or has another format. With
    `records=False`, records and details of records are not validated and must not be read.
    """

    def __init__(self, path: Path, *, records: bool = True) -> None:
        self.path = path
        self.steps: dict[int, StepRow] = {}
        """Every step by its number, in order."""
        self.sites: dict[int, Site] = {}
        """Every site by its number, from 1 on."""
        self.arguments: dict[int, str] = {0: ""}
        """The text of arguments that are not tensors, by number; 0 means no arguments."""
        self.threads: dict[int, str] = {}
        """The name of each thread by its number; 0 is the main thread."""
        self.losses: list[Loss] = []
        """Every loss, in order."""
        self._last_part: Part | None = None
        try:
            with ExitStack() as if_it_fails:
                self._connection = if_it_fails.enter_context(closing(_connect(path)))
                _check_tables(self._connection, path)
                # All rows together cannot have more bytes than the file and the log.
                files = path, path.with_name(f"{path.name}-wal")
                size = self._left = sum(file.stat().st_size for file in files if file.exists())
                self.meta = self._read_meta()
                self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(size, 2**31 - 1))
                self._read_steps()
                if records:
                    self._check_records()
                    self._check_details()
                if_it_fails.pop_all()
        except TraceError:
            raise
        except ValueError as error:
            raise TraceError.about(f"a damaged trace: {error}", str(path)) from None
        except sqlite3.Error as error:
            raise TraceError.about(f"cannot be read as a trace: {error}", str(path)) from None

    def _rows(self, table: str, condition: str = "", *values: int) -> Iterator[Any]:
        types = _format()[1][table]
        for row in self._connection.execute(f"select * from {table} {condition}", values):  # noqa: S608 - ours
            if not all(map(isinstance, row, types)):
                raise ValueError(f"its table `{table}` has a value of another type")
            self._count_bytes(1 + sum(len(cell) for cell in row if isinstance(cell, str | bytes)))
            yield row

    def _count_bytes(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise ValueError("it claims more content than a file of its size can have")

    def _read_meta(self) -> Mapping[str, Any]:
        texts = dict(self._rows("meta"))
        if texts.pop(SEAL, None) != json.dumps(digest_of(sorted(texts.items())).hex()):
            raise ValueError("its facts about the run were changed after they were written")
        try:
            meta = {key: json.loads(text) for key, text in texts.items()}
        except RecursionError:
            raise ValueError("its facts about the run are nested too deeply") from None
        valid = {key: _fits(meta.get(key), expected_type) for key, expected_type in META.items()}
        valid["level"] = meta.get("level") in (None, *LEVELS)
        valid["steps"] = meta.get("steps") is None or is_range(meta["steps"])
        for key in ("every", "world_size"):
            valid[key] = valid[key] and (meta.get(key) is None or meta[key] > 0)
        for key, is_valid in valid.items():
            if not is_valid:
                raise ValueError(f"its value of `{key}` is not valid")
        return meta

    def _read_steps(self) -> None:
        # Step numbers are consecutive. They start at 0, or at the first requested step.
        following, after = (self.meta.get("steps") or [0])[0], 1
        for row in self._rows("step", "order by step"):
            number, first, records, parts, read, level, finished, *rest = row
            digest, details, parameters, gradients, arguments, random, names, losses, seal = rest
            if number != following:
                raise ValueError(f"step {following} is missing")
            if digest_of([row[:-1]]) != seal:
                raise ValueError(f"step {number} was changed after it was written")
            if first != after or not 0 <= records <= MOST or parts < 0 or level not in LEVELS:
                raise ValueError(f"step {number} is not valid")
            try:
                thread = self._read_texts(number, json.loads(names), json.loads(losses))
                generators = json.loads(random)
            except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
                raise ValueError(f"the texts of step {number} are not valid") from None
            if generators is None or not _fits(generators, "words by name"):
                raise ValueError(f"the states of generators of step {number} are not valid")
            self.steps[number] = StepRow(
                *(number, first, records, read, parameters, gradients, arguments, generators),
                *(bool(finished), level, digest, details, parts, thread),
            )
            following, after = number + 1, first + records
        self._end = after
        if self.meta.get("finished") and self.meta.get("rows") != len(self.steps):
            raise ValueError(f"it has {len(self.steps)} steps, not {self.meta.get('rows')}")

    def _read_texts(self, step: int, names: Any, losses: Any) -> int:
        """Read the texts of a step, and return the number of the thread that ended the step."""
        sites = [Site(*words) for words in names.get("sites", ())]
        arguments, threads = names.get("arguments", ()), names.get("threads", ())
        ended_by, *loss_threads = map(int, names.get("by") or [MAIN] * (len(losses) + 1))
        of_step = [
            Loss(step, None if value is None else float(value), bytes.fromhex(mark), source, thread)
            for (value, mark, source), thread in zip(losses, loss_threads, strict=True)
        ]
        texts = chain(*map(astuple, sites), arguments, threads, (loss.source for loss in of_step))
        "".join(texts).encode()  # raises if one of them is not valid Unicode text
        self.sites |= enumerate(sites, len(self.sites) + 1)
        self.arguments |= enumerate(arguments, len(self.arguments))
        self.threads |= enumerate(threads, len(self.threads))
        self.losses += of_step
        return ended_by

    def _check_records(self) -> None:
        rows = self._rows("part", "order by first")
        for step in self.steps.values():
            digest, following = xxhash.xxh3_128(), step.first
            for _ in range(step.parts):
                first, content, inputs, outputs = next(rows, (None, b"", b"", b""))
                if first != following:
                    raise ValueError(f"records of step {step.step} are missing")
                outline = unpacked(content)
                # The recorder writes at least one byte for each record.
                self._count_bytes(max(0, len(outline) - len(content) - len(inputs) - len(outputs)))
                thread, least_site, site, argument = outline.limits
                if not (
                    thread < max(len(self.threads), 1)
                    and 0 < least_site <= site <= len(self.sites)
                    and argument < len(self.arguments)
                    and outline.input_ends[-1] == len(inputs)
                    and outline.output_ends[-1] == len(outputs)
                ):
                    raise ValueError(f"a record of step {step.step} is not valid")
                of_values = xxhash.xxh3_128_digest(inputs), xxhash.xxh3_128_digest(outputs)
                digest.update(b"".join((outline.digest, *of_values)))
                following += len(outline)
            is_intact = (following, digest.digest()) == (step.first + step.records, step.digest)
            if not step.dropped and not is_intact:
                raise ValueError(f"records of step {step.step} were changed or are missing")
        if next(rows, None) is not None:
            raise ValueError("it has records outside of any step")

    def _check_details(self) -> None:
        condition = "where record >= ? and record < ? order by 1, 2, 3"
        for step in self.steps.values():
            ids = step.first, step.first + step.records
            rows = chain.from_iterable(self._rows(table, condition, *ids) for table in DETAILS)
            if digest_of(rows) != step.details:
                raise ValueError(f"the statistics or tensors of step {step.step} were changed")
        for table in DETAILS:
            for _ in self._rows(table, "where record < 1 or record >= ?", self._end):
                raise ValueError(f"its table `{table}` has rows without a record")

    def close(self) -> None:
        self._connection.close()

    @property
    def rank(self) -> int:
        return int(self.meta["rank"])

    @property
    def is_truncated(self) -> bool:
        """Whether the process was killed before it finished the trace."""
        return not self.meta.get("finished")

    @property
    def ended_steps(self) -> int:
        """The number of steps that the program ended. Ops after the last step do not count."""
        return sum(row.finished for row in self.steps.values())

    def level_of(self, number: int) -> str:
        """Return the level of a step, also of a step that was not recorded."""
        row = self.steps.get(number)
        if row is not None:
            return row.level
        asked = self.meta.get("level") or LEVELS[-1]
        return level_of_step(number, asked, self.meta.get("every") or 1)

    def ends_before(self, number: int) -> bool:
        """Whether the trace proves that the program ended before it finished step `number`."""
        asked = self.meta.get("steps")
        row = self.steps.get(number)
        return not (
            self.is_truncated
            or (row and row.finished)
            or (asked and not asked[0] <= number <= asked[1])
        )

    def outlines(self, step: int) -> Iterator[Outline]:
        """Yield the outlines of the records of a step. Yields nothing if the step was dropped."""
        row = self.steps[step]
        rows = self._connection.execute(
            "select outline from part where first >= ? and first < ? order by first",
            (row.first, row.first + row.records),
        )
        return (unpacked(content) for (content,) in rows)

    def parts(self, step: int) -> Iterator[Part]:
        """Yield the parts of a step, which fit into memory. A dropped step has no parts."""
        row = self.steps[step]
        condition = "where first >= ? and first < ? order by first"
        return self._parts(condition, row.first, row.first + row.records)

    def parts_before(self, record: int) -> Iterator[Part]:
        """Yield the parts that begin before `record`, last part first. It may contain `record`."""
        return self._parts("where first < ? order by first desc", record)

    def _parts(self, condition: str, *values: int) -> Iterator[Part]:
        rows = self._connection.execute(f"select * from part {condition}", values)  # noqa: S608 - ours
        return (Part(first, unpacked(content), *rest) for first, content, *rest in rows)

    def records(self, step: int) -> list[Record]:
        return [part.record(number) for part in self.parts(step) for number in part.ids]

    def record(self, number: int) -> Record:
        part = self._last_part
        if part is None or number not in part.ids:
            part = self._last_part = next(self.parts_before(number + 1))
        return part.record(number)

    def step_of(self, record: int) -> int:
        return next(
            number for number, row in self.steps.items() if record < row.first + row.records
        )

    def statistics_of(self, records: range) -> Iterator[tuple[Any, ...]]:
        """Yield record, count, mean, norm, low and high of each output of the records."""
        return self._connection.execute(
            "select record, count, mean, norm, low, high from statistics"
            " where record >= ? and record < ? order by record, position",
            (records.start, records.stop),
        )

    def tensors(self, record: int) -> list[tuple[str, int, str, str, bytes]]:
        """Return role (``input``, ``output``), position, dtype, shape and bytes of kept tensors."""
        return self._connection.execute(
            "select role, position, dtype, shape, data from tensor"
            " where record = ? order by role, position",
            (record,),
        ).fetchall()


def _fits(value: Any, expected_type: Any) -> bool:
    if expected_type == "words by name":
        value = {} if value is None else value
        return isinstance(value, dict) and {str}.issuperset(map(type, value.values()))
    if expected_type == "words":
        return value is None or (isinstance(value, list) and {str}.issuperset(map(type, value)))
    if isinstance(expected_type, dict):
        return value is None or (
            isinstance(value, list)
            and all(
                isinstance(row, dict)
                and all(_fits(row.get(key), expected_type[key]) for key in expected_type)
                for row in value
            )
        )
    return isinstance(value, expected_type)


def _connect(path: Path, *, is_immutable: bool = False) -> sqlite3.Connection:
    """Open a snapshot of a SQLite file for reading. Raises `ValueError` if a file is not regular.

    Views and triggers in a file run only when a query uses them. `_check_tables` rejects a file
    that has views or triggers.
    """
    logs = [path.with_name(path.name + end) for end in ("-wal", "-shm", "-journal")]
    for file in (path, *(log for log in logs if log.exists())):
        if not file.is_file():
            raise ValueError(f"{file.name} is not a regular file")
    uri = f"{path.absolute().as_uri()}?mode=ro" + "&immutable=1" * is_immutable
    connection = sqlite3.connect(uri, uri=True)
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST)
        for pragma in ("trusted_schema = off", "cell_size_check = on", "query_only = on"):
            connection.execute(f"pragma {pragma}")
        connection.execute("begin")  # one snapshot, although a running process adds rows
        connection.execute("pragma schema_version")  # the first statement that reads the file
    except BaseException as error:
        connection.close()
        # A process that is killed while it opens or closes its file may leave a journal, which a
        # read-only connection cannot roll back. That journal changes no rows, only the journal
        # mode, so it is ignored. See https://sqlite.org/rescode.html#readonly_rollback.
        code = getattr(error, "sqlite_errorcode", None)
        if code == sqlite3.SQLITE_READONLY_ROLLBACK and not is_immutable:
            return _connect(path, is_immutable=True)
        raise
    return connection


def _tables(connection: sqlite3.Connection) -> _Tables:
    """Return type and SQL of tables, views, indexes and triggers, by name. Reads at most 100."""
    master = connection.execute("select name, type, sql from sqlite_master")
    rows = master.fetchmany(100)
    return {str(name): (str(type_), " ".join(str(sql).split())) for name, type_, sql in rows}


@cache
def _format() -> tuple[_Tables, Mapping[str, tuple[Any, ...]]]:
    columns = 'select type, "notnull" or pk from pragma_table_info(?)'
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA)
        tables = _tables(connection)
        types = {
            table: tuple(
                _TYPES[declared.lower()] if filled else (_TYPES[declared.lower()], type(None))
                for declared, filled in connection.execute(columns, (table,))
            )
            for table in tables
        }
    return tables, types


def _check_tables(connection: sqlite3.Connection, path: Path) -> None:
    tables, (expected, _) = _tables(connection), _format()
    if tables.get("meta") != expected["meta"]:
        raise ValueError("its tables are not those of a trace")
    row = connection.execute("select value from meta where key = 'format'").fetchone()
    if row is None or not isinstance(row[0], str) or not row[0].isdecimal():
        raise ValueError("its format is missing")
    if row[0] != str(FORMAT):
        todo = "read it with the version of torchrepro that wrote it"
        raise TraceError.about("a trace of another format", str(path), legal=str(FORMAT), todo=todo)
    if tables != expected:
        raise ValueError("its tables are not those of a trace")


def read_run(folder: Path | str, *, records: bool = True) -> list[Trace]:
    """Return the traces of a recorded run, sorted by rank and then by the start of the process.

    Raises `TraceError` if the folder does not exist, has no trace, or has a damaged trace.
    With `records=False`, only facts about the run and about its steps can be read.
    """
    path = Path(folder)
    if os.path.isfile(path):  # noqa: PTH113 - never raises
        todo = "name the folder of the recording"
        raise TraceError.about("is a file", found=str(folder), todo=todo)
    if not os.path.isdir(path):  # noqa: PTH112 - never raises
        raise TraceError.about("no such folder", found=str(folder), **_hint_of_neighbours(path))
    files = path.glob(f"rank*{SUFFIX}")
    by_number = sorted(files, key=lambda path: [*map(int, re.findall(r"\d+", path.name))])
    started = [path for path in by_number if _has_rows(path)]
    if not started:
        todo = (
            "copy the whole folder: until a run ends, its steps may be in files that end in -wal; "
            "a run that was killed before the end of its first step has no steps"
            if by_number
            else "record one: torchrepro run PROFILE --record DIR -- COMMAND"
        )
        raise TraceError.about("contains no trace", found=str(folder), todo=todo)
    return [Trace(path, records=records) for path in started]


def _has_rows(path: Path) -> bool:
    """Whether a trace has rows. Tables are empty if a process was killed in its first step.

    Returns True for an invalid file, so that the caller opens the file and gets the error.
    """
    try:
        with closing(_connect(path)) as connection:
            tables, (expected, _) = _tables(connection), _format()
            return not tables.items() <= expected.items() or any(
                connection.execute(f"select 1 from {name} limit 1").fetchone()  # noqa: S608 - ours
                for name, (type_, _) in tables.items()
                if type_ == "table"
            )
    except (ValueError, sqlite3.Error):
        return True


def steps_so_far(folder: Path) -> int:
    """Return how many steps a run has ended so far: the largest number of all processes.

    A trace is opened only once its write-ahead log exists, because from that moment a reader does
    not block the writer (https://sqlite.org/wal.html#concurrency).
    """
    ended = [0]
    for log in folder.glob(f"rank*{SUFFIX}-wal"):
        try:
            with closing(_connect(log.with_name(log.name.removesuffix("-wal")))) as connection:
                ended += connection.execute("select count(*) from step where finished").fetchone()
        except (ValueError, OSError, sqlite3.Error):
            continue  # the process has just ended, or has no table of steps yet
    return max(ended)


def _hint_of_neighbours(path: Path) -> dict[str, str]:
    """Return a hint for the error about a missing folder: recordings in the parent folder."""
    parent = path.parent
    names = sorted(neighbour.name for neighbour in parent.iterdir()) if parent.is_dir() else []
    recorded = [name for name in names if any((parent / name).glob(f"rank*{SUFFIX}"))]
    close = near(path.name, recorded)
    if close:
        return {"near": str(parent / close)}
    if recorded:
        return {"legal": some(str(parent / name) for name in recorded)}
    return {"todo": "record one: torchrepro run PROFILE --record DIR -- COMMAND"}
