"""Reads traces: the runs in a folder, and the file of a process, checked before it is believed.

A trace may come from anybody: reading it runs nothing that is in it, and ends soon.
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

from torchrepro.ground.errors import TraceError
from torchrepro.ground.messages import near, some
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
"""Bytes of a cell of `meta`; any other cell may have as many as the file."""

MOST = 1 << 40
"""Records of a step."""

_Tables = dict[str, tuple[str, str]]
_Words, _Number = str | None, int | None
_TYPES = {"integer": int, "text": str, "blob": bytes, "real": float}

META: Mapping[str, Any] = {
    "rank": int,
    **dict.fromkeys(("ordinal", "world_size", "max_size", "rows"), _Number),
    **dict.fromkeys(("every", "built"), _Number),
    **dict.fromkeys(("finished", "statistics", "detail", "replicated"), bool | None),
    **dict.fromkeys(("program", "program_text", "process", "resumed", "level"), _Words),
    **dict.fromkeys(
        ("profile", "digest", "guarantee", "date", "host", "recorded_by", "left"), _Words
    ),
    **dict.fromkeys(("versions", "hardware", "outcomes", "repository"), dict | None),
    **dict.fromkeys(("algorithm", "generators", "knobs", "models"), "words by name"),
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
"""The type of each value that is read of a run; for a list, those of its entries' fields."""


class Trace:
    """One process of a recorded run, as its file is when it is opened.

    Raises `TraceError` for a file that is no trace, is damaged, or has another format. Without
    `records`, the records and their details are not checked and must not be read.
    """

    def __init__(self, path: Path, *, records: bool = True) -> None:
        self.path = path
        self.steps: dict[int, StepRow] = {}
        """Every step by its number, in order."""
        self.sites: dict[int, Site] = {}
        """Every site by its number, from 1 on."""
        self.arguments: dict[int, str] = {0: ""}
        """The text of arguments that are not tensors, by its number; 0 stands for none."""
        self.threads: dict[int, str] = {}
        """The name of each thread by its number; 0 is the main thread."""
        self.losses: list[Loss] = []
        """Every loss in its order."""
        self._last_part: Part | None = None
        try:
            with ExitStack() as if_it_fails:
                self._connection = if_it_fails.enter_context(closing(_connect(path)))
                _check_tables(self._connection, path)
                # All rows together take no more bytes than the file and its log, whatever they say.
                files = path, path.with_name(f"{path.name}-wal")
                size = self._left = sum(each.stat().st_size for each in files if each.exists())
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

    def _rows(self, table: str, which: str = "", *values: int) -> Iterator[Any]:
        types = _format()[1][table]
        for row in self._connection.execute(f"select * from {table} {which}", values):  # noqa: S608 - ours
            if not all(map(isinstance, row, types)):
                raise ValueError(f"its table `{table}` has a value of another type")
            self._take(1 + sum(len(cell) for cell in row if isinstance(cell, str | bytes)))
            yield row

    def _take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise ValueError("it has more in it than a file of its size can hold")

    def _read_meta(self) -> Mapping[str, Any]:
        texts = dict(self._rows("meta"))
        if texts.pop(SEAL, None) != json.dumps(digest_of(sorted(texts.items())).hex()):
            raise ValueError("its facts about the run were changed after they were written")
        try:
            meta = {key: json.loads(text) for key, text in texts.items()}
        except RecursionError:
            raise ValueError("its facts about the run are nested too deeply") from None
        valid = {key: _fits(meta.get(key), kind) for key, kind in META.items()}
        valid["level"] = meta.get("level") in (None, *LEVELS)
        valid["steps"] = meta.get("steps") is None or is_range(meta["steps"])
        for key in ("every", "world_size"):
            valid[key] = valid[key] and (meta.get(key) is None or meta[key] > 0)
        for key, is_valid in valid.items():
            if not is_valid:
                raise ValueError(f"its value of `{key}` is not valid")
        return meta

    def _read_steps(self) -> None:
        # A recording begins with step 0, or the first one requested, and leaves none out.
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
            raise ValueError(f"it has {len(self.steps)} steps and says {self.meta.get('rows')}")

    def _read_texts(self, step: int, names: Any, losses: Any) -> int:
        """Read the texts of a step; returns the thread that ended it."""
        sites = [Site(*words) for words in names.get("sites", ())]
        arguments, threads = names.get("arguments", ()), names.get("threads", ())
        by, *by_each = map(int, names.get("by") or [MAIN] * (len(losses) + 1))
        of_step = [
            Loss(step, None if value is None else float(value), bytes.fromhex(mark), source, thread)
            for (value, mark, source), thread in zip(losses, by_each, strict=True)
        ]
        texts = chain(*map(astuple, sites), arguments, threads, (loss.source for loss in of_step))
        "".join(texts).encode()  # raises if one of them is no text
        self.sites |= enumerate(sites, len(self.sites) + 1)
        self.arguments |= enumerate(arguments, len(self.arguments))
        self.threads |= enumerate(threads, len(self.threads))
        self.losses += of_step
        return by

    def _check_records(self) -> None:
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
            found, expected = (following, digest.digest()), (step.first + step.records, step.digest)
            if not step.dropped and found != expected:
                raise ValueError(f"records of step {step.step} were changed or are missing")
        if next(rows, None) is not None:
            raise ValueError("it has records that belong to no step")

    def _check_details(self) -> None:
        which = "where record >= ? and record < ? order by 1, 2, 3"
        for step in self.steps.values():
            ids = step.first, step.first + step.records
            rows = chain.from_iterable(self._rows(table, which, *ids) for table in DETAILS)
            if digest_of(rows) != step.details:
                raise ValueError(f"the statistics or tensors of step {step.step} were changed")
        for table in DETAILS:
            for _ in self._rows(table, "where record < 1 or record >= ?", self._end):
                raise ValueError(f"its table `{table}` has rows of no record")

    def close(self) -> None:
        self._connection.close()

    @property
    def rank(self) -> int:
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
        if row is not None:
            return row.level
        asked = self.meta.get("level") or LEVELS[-1]
        return level_of_step(number, asked, self.meta.get("every") or 1)

    def ends_before(self, number: int) -> bool:
        """Whether it shows that the program ended no step of this number."""
        asked = self.meta.get("steps")
        row = self.steps.get(number)
        return not (
            self.is_truncated
            or (row and row.finished)
            or (asked and not asked[0] <= number <= asked[1])
        )

    def outlines(self, step: int) -> Iterator[Outline]:
        """Yield what the records of a step are, without their values; nothing if dropped."""
        row = self.steps[step]
        rows = self._connection.execute(
            "select outline from part where first >= ? and first < ? order by first",
            (row.first, row.first + row.records),
        )
        return (unpacked(content) for (content,) in rows)

    def parts(self, step: int) -> Iterator[Part]:
        """Yield the records of a step in parts that fit into memory; nothing if dropped."""
        row = self.steps[step]
        which = "where first >= ? and first < ? order by first"
        return self._parts(which, row.first, row.first + row.records)

    def parts_before(self, record: int) -> Iterator[Part]:
        """Yield all that came before a record, the last first; a part may go on after it."""
        return self._parts("where first < ? order by first desc", record)

    def _parts(self, which: str, *values: int) -> Iterator[Part]:
        rows = self._connection.execute(f"select * from part {which}", values)  # noqa: S608 - ours
        return (Part(first, unpacked(content), *rest) for first, content, *rest in rows)

    def records(self, step: int) -> list[Record]:
        return [part.record(number) for part in self.parts(step) for number in part.ids]

    def record(self, number: int) -> Record:
        part = self._last_part
        if part is None or number not in part.ids:
            part = self._last_part = next(self.parts_before(number + 1))
        return part.record(number)

    def step_of(self, record: int) -> int:
        return next(at for at, its in self.steps.items() if record < its.first + its.records)

    def statistics_of(self, records: range) -> Iterator[tuple[Any, ...]]:
        """Yield record, count, mean, norm, low and high of each output of some records."""
        return self._connection.execute(
            "select record, count, mean, norm, low, high from statistics"
            " where record >= ? and record < ? order by record, position",
            (records.start, records.stop),
        )

    def tensors(self, record: int) -> list[tuple[str, int, str, str, bytes]]:
        """Return role (``input``, ``output``), position, dtype, shape, bytes of kept tensors."""
        return self._connection.execute(
            "select role, position, dtype, shape, data from tensor"
            " where record = ? order by role, position",
            (record,),
        ).fetchall()


def _fits(value: Any, kind: Any) -> bool:
    if kind == "words by name":
        value = {} if value is None else value
        return isinstance(value, dict) and {str}.issuperset(map(type, value.values()))
    if kind == "words":
        return value is None or (isinstance(value, list) and {str}.issuperset(map(type, value)))
    if isinstance(kind, dict):
        return value is None or (
            isinstance(value, list)
            and all(
                isinstance(each, dict) and all(_fits(each.get(key), kind[key]) for key in kind)
                for each in value
            )
        )
    return isinstance(value, kind)


def _connect(path: Path, *, is_immutable: bool = False) -> sqlite3.Connection:
    """Open a file for reading, as it is at this moment. Raises `ValueError` for what is no file.

    Views, and what else a database may hold besides data, run only if a query names them;
    `_check_tables` makes sure that there are none.
    """
    for each in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm", "-journal"))):
        if (each is path or each.exists()) and not each.is_file():
            raise ValueError(f"{each.name} is not a regular file")
    uri = f"{path.absolute().as_uri()}?mode=ro" + "&immutable=1" * is_immutable
    connection = sqlite3.connect(uri, uri=True)
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST)
        for pragma in ("trusted_schema = off", "cell_size_check = on", "query_only = on"):
            connection.execute(f"pragma {pragma}")
        connection.execute("begin")  # a run that still goes on adds rows
        connection.execute("pragma schema_version")  # the first that reads the file
    except BaseException as error:
        connection.close()
        # A process that was killed while it opened or closed its file may leave a journal, which a
        # reader may not take back. It would take back nothing but how SQLite keeps the file, so
        # the file is read without it. See https://sqlite.org/rescode.html#readonly_rollback.
        code = getattr(error, "sqlite_errorcode", None)
        if code == sqlite3.SQLITE_READONLY_ROLLBACK and not is_immutable:
            return _connect(path, is_immutable=True)
        raise
    return connection


def _tables(connection: sqlite3.Connection) -> _Tables:
    """Return what a database holds, by name: its type, and how it was made. It may be cut short."""
    master = connection.execute("select name, type, sql from sqlite_master")
    rows = master.fetchmany(100)
    return {str(name): (str(kind), " ".join(str(sql).split())) for name, kind, sql in rows}


@cache
def _format() -> tuple[_Tables, Mapping[str, tuple[Any, ...]]]:
    columns = 'select type, "notnull" or pk from pragma_table_info(?)'
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA)
        tables = _tables(connection)
        types = {
            table: tuple(
                _TYPES[kind.lower()] if filled else (_TYPES[kind.lower()], type(None))
                for kind, filled in connection.execute(columns, (table,))
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
    """Return the traces of a recorded run, by rank and by the order in which they began.

    Raises `TraceError` for a folder that does not exist, holds no trace, or holds a damaged one.
    Without `records` the traces are for reading what they say of the run and its steps only.
    """
    place = Path(folder)
    if os.path.isfile(place):  # noqa: PTH113 - never raises
        todo = "name the folder of the recording"
        raise TraceError.about("is a file", found=str(folder), todo=todo)
    if not os.path.isdir(place):  # noqa: PTH112 - see above
        raise TraceError.about("no such folder", found=str(folder), **_beside(place))
    files = place.glob(f"rank*{SUFFIX}")
    by_number = sorted(files, key=lambda path: [*map(int, re.findall(r"\d+", path.name))])
    begun = [path for path in by_number if _begun(path)]
    if not begun:
        todo = (
            "copy the whole folder: until a run ends, its steps may be in files that end in -wal; "
            "one that was killed before its first step ended has none"
            if by_number
            else "record one: torchrepro run PROFILE --record DIR -- COMMAND"
        )
        raise TraceError.about("holds no trace", found=str(folder), todo=todo)
    return [Trace(path, records=records) for path in begun]


def _begun(path: Path) -> bool:
    """Whether there are rows; a process killed before its first step leaves empty tables.

    A file that cannot be read as a trace counts as begun, so that opening it says why.
    """
    try:
        with closing(_connect(path)) as connection:
            tables, (expected, _) = _tables(connection), _format()
            return not tables.items() <= expected.items() or any(
                connection.execute(f"select 1 from {name} limit 1").fetchone()  # noqa: S608 - ours
                for name, (kind, _) in tables.items()
                if kind == "table"
            )
    except (ValueError, sqlite3.Error):
        return True


def steps_so_far(folder: Path) -> int:
    """Return how many steps a run that may go on has ended, in the process that is furthest.

    A file is opened only once its write-ahead log is there: a reader does not hold up who
    writes to it from then on (https://sqlite.org/wal.html#concurrency).
    """
    ended = [0]
    for log in folder.glob(f"rank*{SUFFIX}-wal"):
        try:
            with closing(_connect(log.with_name(log.name.removesuffix("-wal")))) as connection:
                ended += connection.execute("select count(*) from step where finished").fetchone()
        except (ValueError, OSError, sqlite3.Error):
            continue  # the process has ended meanwhile, or has not got so far
    return max(ended)


def _beside(place: Path) -> dict[str, str]:
    above = place.parent
    others = sorted(each.name for each in above.iterdir()) if above.is_dir() else []
    recorded = [each for each in others if any((above / each).glob(f"rank*{SUFFIX}"))]
    close = near(place.name, recorded)
    if close:
        return {"near": str(above / close)}
    if recorded:
        return {"legal": some(str(above / each) for each in recorded)}
    return {"todo": "record one: torchrepro run PROFILE --record DIR -- COMMAND"}
