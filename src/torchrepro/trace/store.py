"""The store of a trace: one SQLite file per rank and process, whole up to its last commit."""

from __future__ import annotations

import json
import math
import os
import platform
import sqlite3
import sys
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache, cached_property
from importlib import import_module
from itertools import chain, count
from multiprocessing import current_process
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from torchrepro.applier import in_force
from torchrepro.errors import TraceError
from torchrepro.manifest.contents import secrets_here
from torchrepro.manifest.environment import commit, hardware, software
from torchrepro.messages import Problem, shown
from torchrepro.redaction import cleaner
from torchrepro.seeding import generators
from torchrepro.seeding.ranks import world
from torchrepro.trace.device_fingerprint import algorithm
from torchrepro.trace.fingerprint import ALGORITHM
from torchrepro.trace.format import (
    BY_PROGRAM,
    BY_RUN,
    DETAILS,
    FORMAT,
    MANY,
    SCHEMA,
    SEALED,
    SUFFIX,
    Row,
    StepRow,
    as_bytes,
)
from torchrepro.trace.request import Request
from torchrepro.trace.sequences import Recent, packed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

LARGE = 1 << 24
"""Bytes of digests at which records become two parts. A reader holds a part in memory."""

PATIENCE = 5000
"""Milliseconds for which a write waits for a lock, which is what Python asks for by itself."""

CHECKPOINT = 4000
"""Pages of the log that are moved to the file at once. The disk is waited for then, and the time
that takes depends little on how much is moved."""


class Store:
    """A trace that is being written.

    Every step is one transaction, so a process that is killed leaves whole steps behind.
    https://sqlite.org/atomiccommit.html
    `clean` redacts texts of the program; with `shrinks`, the file can be made smaller again.
    """

    def __init__(
        self,
        path: Path,
        clean: Callable[[Any], Any] = lambda text: text,
        *,
        shrinks: bool = False,
    ) -> None:
        self.path = path
        self.records = 0
        self._clean = clean
        self._meta: dict[str, str] = {}
        self._sources: dict[str, str] = {}  # of losses: the same in every step
        self._states: tuple[Mapping[str, str], str] = {}, "{}"
        self._of_step = xxhash.xxh3_128()
        self._of_details = {name: xxhash.xxh3_128() for name in DETAILS}
        self._has_details = False
        self._sequences = 0
        self._recent: Recent[tuple[int, ...], tuple[int, bytes]] = Recent()  # number, digest
        self._shrinks = shrinks
        self._uses: Counter[int] = Counter()  # of each sequence by parts, where parts are dropped
        self._digests = {name: xxhash.xxh3_128() for name in SEALED[FORMAT]}
        self._unsealed = set(SEALED[FORMAT])
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        execute = self._connection.execute
        if shrinks:
            execute("pragma auto_vacuum = incremental")
        # Survives the end of the process at any moment; only a power cut may lose the last steps.
        execute("pragma journal_mode = wal")
        execute("pragma synchronous = normal")
        execute(f"pragma wal_autocheckpoint = {CHECKPOINT}")
        self._connection.executescript(f"begin; {SCHEMA} commit;")  # all tables or none
        execute("begin")

    def write_meta(self, values: Mapping[str, Any]) -> None:
        """Write what is known of the run as a whole."""
        rows = [(key, json.dumps(self._clean(value))) for key, value in values.items()]
        self._many("insert or replace into meta values (?, ?)", rows)
        self._meta.update(rows)
        self._digests["meta"] = xxhash.xxh3_128(as_bytes(sorted(self._meta.items())))
        self._unsealed.add("meta")

    def write_knobs_in_effect(self) -> None:
        """Write the values of knobs that have changed since to others as good."""
        rewrites = [each for applied in in_force() for each in applied.report.as_good]
        if rewrites:
            now = {each.knob: shown(each.now) for each in rewrites}
            self.write_meta({"knobs": json.loads(self._meta["knobs"]) | now})

    def add_sites(self, sites: Iterable[tuple[int, Sequence[str]]]) -> None:
        """Add places of the program that records refer to."""
        sites = list(sites)
        shown = self._shown(chain.from_iterable(words for _, words in sites))
        self._add("site", [(number, *map(shown.__getitem__, words)) for number, words in sites])

    def add_arguments(self, texts: Iterable[tuple[int, str]]) -> None:
        """Add arguments of ops that are not tensors."""
        texts = list(texts)
        # A text without quotes has only numbers and types in it, and may be new in every step.
        shown = self._shown(text for _, text in texts if "'" in text or '"' in text)
        self._add("argument", [(number, shown.get(text, text)) for number, text in texts])

    def add_threads(self, names: Iterable[tuple[int, str]]) -> None:
        """Add threads that records come from."""
        names = list(names)
        shown = self._shown(name for _, name in names)
        self._add("thread", [(number, shown[name]) for number, name in names])

    def add_records(self, rows: list[Row]) -> None:
        """Add records of the running step in their order."""
        for start in range(0, len(rows), MANY):
            self._add_part(rows[start : start + MANY])

    def _add_part(self, rows: list[Row]) -> None:
        threads, sites, arguments, each_input, each_output = zip(*rows, strict=True)
        inputs, outputs = b"".join(each_input), b"".join(each_output)
        if len(inputs) + len(outputs) > LARGE and len(rows) > 1:
            half = len(rows) // 2
            self._add_part(rows[:half])
            self._add_part(rows[half:])
            return
        # A reader relies on it that a file has a byte for each of its records.
        find = self._sequence if len(inputs) + len(outputs) >= len(rows) else self._new_sequence
        lengths = tuple(map(len, each_input)), tuple(map(len, each_output))
        found = [find(numbers) for numbers in (threads, sites, arguments, *lengths)]
        numbers, digests = zip(*found, strict=True)
        if self._shrinks:
            self._uses.update(numbers)
        of_values = xxhash.xxh3_128_digest(inputs), xxhash.xxh3_128_digest(outputs)
        self._of_step.update(b"".join((*digests, *of_values)))
        values = (self.records + 1, *numbers, inputs, outputs)
        self._execute("insert into part values (?, ?, ?, ?, ?, ?, ?, ?)", values)
        self.records += len(rows)

    def _sequence(self, numbers: tuple[int, ...]) -> tuple[int, bytes]:
        """Return the number and the digest of a sequence, which is written if it is new."""
        found = self._recent.get(numbers)
        if found is None:
            found = self._new_sequence(numbers)
            self._recent.add(numbers, found, len(numbers))
        return found

    def _new_sequence(self, numbers: tuple[int, ...]) -> tuple[int, bytes]:
        content = packed(numbers)
        self._sequences += 1
        self._execute("insert into sequence values (?, ?)", (self._sequences, content))
        return self._sequences, xxhash.xxh3_128_digest(content)

    def add_losses(self, rows: Iterable[tuple[int, int, float | None, bytes, str]]) -> None:
        """Add losses: step, position, value, fingerprint, source."""
        rows = list(rows)
        new = {row[4] for row in rows} - self._sources.keys()
        if new:
            self._sources |= self._shown(new)
        self._add(
            "loss", [(*row[:2], _real(row[2]), row[3], self._sources[row[4]]) for row in rows]
        )

    def add_statistics(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Add statistics of outputs: record, position, count, mean, norm, low, high."""
        numbers = [(*row[:3], *map(_real, row[3:])) for row in rows]
        in_order_of_reading = sorted(numbers, key=itemgetter(0, 1))
        self._add_details("statistics", in_order_of_reading)

    def add_tensors(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Add kept tensors: record, role, position, dtype, shape, data."""
        self._add_details("tensor", list(rows))

    def end_step(self, row: StepRow) -> None:
        """Add a step and commit all that belongs to it."""
        values = (
            *(row.step, row.first, row.records, row.bytes),
            *(self._of_step.digest(), self._digest_of_details()),
            *(row.parameters, row.gradients),
            *(self._text_of(row.random), int(row.finished), row.level),
        )
        self._of_step.reset()
        self._add("step", [values])
        self.commit()

    def commit(self) -> None:
        """Commit what was done since the last time."""
        self._commit()
        self._execute("begin")

    def _text_of(self, states: Mapping[str, str]) -> str:
        """Return the states of generators as JSON; those of many steps are the very same."""
        if states is not self._states[0]:
            self._states = states, json.dumps(dict(states))
        return self._states[1]

    # Dropping records, between two steps.

    @property
    def bytes_on_disk(self) -> int:
        """How many bytes the trace takes, its log and the index of that included."""
        return self._bytes_in("") + self.bytes_of_log

    @property
    def bytes_of_log(self) -> int:
        """How many bytes the log takes with its index."""
        return self._bytes_in("-wal") + self._bytes_in("-shm")

    def _bytes_in(self, end: str) -> int:
        file = self.path.with_name(self.path.name + end)
        return file.stat().st_size if file.exists() else 0

    @property
    def bytes_used(self) -> int:
        """How many bytes of the file, once it has all that the log holds, are in use."""
        return self.bytes_of_file - self._asked("freelist_count") * self._page

    @property
    def bytes_of_file(self) -> int:
        """How many bytes the file has, once it has all that the log holds."""
        return self._asked("page_count") * self._page

    @cached_property
    def _page(self) -> int:
        return self._asked("page_size")

    def _asked(self, pragma: str) -> int:
        return int(self._rows(f"pragma {pragma}")[0][0])

    def next_step(self, after: int, level: str) -> tuple[int, int, int]:
        """Return number, first record and count of records of the next step of a level with any.

        There has to be one.
        """
        (found,) = self._rows(
            "select step, first, records from step where step > ? and records > 0 and level = ?"
            " order by step limit 1",
            (after, level),
        )
        return found  # type: ignore[no-any-return]

    def drop(self, step: int, first: int, records: int) -> None:
        """Delete the records of a step and their details; its row stays as it is."""
        which = first, first + records
        rows = self._rows(
            "select thread, site, argument, input_lengths, output_lengths from part"
            " where first >= ? and first < ?",
            which,
        )
        self._execute("delete from part where first >= ? and first < ?", which)
        for table in DETAILS:
            self._execute(f"delete from {table} where record >= ? and record < ?", which)  # noqa: S608 - a table of ours
        self._uses.subtract(chain.from_iterable(rows))
        unused = [number for number in {*chain.from_iterable(rows)} if not self._uses[number]]
        if unused:
            self._many("delete from sequence where id = ?", [(number,) for number in unused])
            for number in unused:
                del self._uses[number]
            self._recent.clear()
        self._add("dropped", [(step,)])

    def shrink(self, *, file: bool) -> None:
        """Empty the log into the file; with `file`, make that smaller by what is not in use.

        While somebody reads the trace, this does less, and does not wait.
        """
        self._commit()
        if file:
            self._rows("pragma incremental_vacuum")
        self._rows("pragma busy_timeout = 0")
        self._rows("pragma wal_checkpoint(truncate)")
        self._rows(f"pragma busy_timeout = {PATIENCE}")
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
        # A path may hold bytes that are not Unicode.
        storable = (text.encode(errors="backslashreplace").decode() for text in cleaned)
        return dict(zip(distinct, storable, strict=True))

    def _add(self, table: str, rows: list[tuple[Any, ...]]) -> None:
        if rows:
            self._insert(table, rows)
            self._digests[table].update(as_bytes(rows))
            self._unsealed.add(table)

    def _add_details(self, table: str, rows: list[tuple[Any, ...]]) -> None:
        if rows:
            self._insert(table, rows)
            self._of_details[table].update(as_bytes(rows))
            self._has_details = True

    def _digest_of_details(self) -> bytes:
        """Return a digest of the statistics and tensors of the running step, the last time."""
        if not self._has_details:
            return b""
        found = b"".join(digest.digest() for digest in self._of_details.values())
        for digest in self._of_details.values():
            digest.reset()
        self._has_details = False
        return found

    def _insert(self, table: str, rows: list[tuple[Any, ...]]) -> None:
        self._many(_insertion(table, len(rows[0])), rows)

    def _commit(self) -> None:
        seals = [(name, self._digests[name].digest()) for name in self._unsealed]
        self._many("insert or replace into seal values (?, ?)", seals)
        self._unsealed.clear()
        self._execute("commit")

    def _many(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        try:
            self._connection.executemany(statement, rows)
        except sqlite3.Error as error:
            raise self._refused(error) from error

    def _rows(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        try:
            return self._connection.execute(statement, values).fetchall()
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


class _Redaction:
    """Takes the secrets of this process out of texts, also those that it has learnt since."""

    def __init__(self) -> None:
        self._environment: Mapping[str, str] | None = None
        self._clean: Callable[[Any], Any]

    def __call__(self, value: Any) -> Any:
        """Return plain JSON values with no secret in any text."""
        environment = os.environ.copy()
        if environment != self._environment:
            profiles = (applied.resolved for applied in in_force())
            self._environment, self._clean = environment, cleaner(secrets_here(*profiles))
        return self._clean(value)


def open_store(request: Request) -> Store:
    """Open a store for this process, the next free one of its rank, and describe the process in it.

    Raises `TraceError` if the folder cannot be written to.
    """
    about = _about_this_process()
    its = world()
    folder = Path(request.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path, ordinal = _new_file(folder, its.rank)
    except OSError as error:
        raise TraceError(
            Problem(f"cannot hold a recording: {error.strerror}", found=request.folder)
        ) from None
    store = Store(path, _Redaction(), shrinks=request.max_size is not None)
    store.write_meta(
        {
            "format": FORMAT,
            "level": request.level,
            "rank": its.rank,
            "world_size": its.size,
            "ordinal": ordinal,
            "program": sys.argv[0] if sys.argv else "",
            "program_text": _program_text(),
            "process": current_process().name,
            "steps": request.steps,
            "every": request.every,
            "max_size": request.max_size,
            "recorded_by": _who_asked_for(request),
            "algorithm": _algorithms(),
            "statistics": request.statistics,
            "detail": request.detail,
            "keep": list(request.keep),
            **about,
        }
    )
    return store


def _about_this_process() -> Mapping[str, Any]:
    """Return the profile in force with its knobs, and what a manifest says of the machine.

    Secrets may be in it; the store redacts them.
    """
    its: dict[str, Any] = {
        "versions": software(),
        "hardware": hardware() | _accelerator(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "repository": commit(),
        "knobs": {},
    }
    profiles = in_force()
    if profiles:
        resolved = profiles[-1].resolved
        its["profile"] = resolved.name
        its["digest"] = resolved.digest
        its["guarantee"] = resolved.guarantee
        rows = [row for applied in profiles for row in applied.report]
        its["knobs"] = {row.knob: shown(row.after) for row in rows}
        its["outcomes"] = {row.knob: str(row.outcome) for row in rows}
        absent = (row for row in rows if row.absent and row.after is not None)
        its["absent"] = {row.knob: row.absent for row in absent}
    return its


def _who_asked_for(request: Request) -> str:
    return BY_RUN if request == Request.inherited(os.environ) else BY_PROGRAM


def _program_text() -> str | None:
    """Return a digest of the text of the program; None where it has no file."""
    try:
        return xxhash.xxh3_64_hexdigest(Path(sys.argv[0]).read_bytes())
    except (IndexError, OSError):
        return None


def _accelerator() -> dict[str, str]:
    """Return the type and the number of the devices that torch can compute on besides the CPU."""
    torch: Any = import_module("torch")
    if not torch.accelerator.is_available():
        return {}
    device = torch.accelerator.current_accelerator()
    return {"accelerator": f"{device.type} x{torch.accelerator.device_count()}"}


def _algorithms() -> Mapping[str, str]:
    """Return how fingerprints are taken, by type of device in use."""
    torch = import_module("torch")
    return {"cpu": ALGORITHM} | {
        name: algorithm(torch.device(name)) for name in generators.devices_in_use()
    }


def _new_file(folder: Path, rank: int) -> tuple[Path, int]:
    """Make the next free file of this rank; return it with its number."""
    for ordinal in count():
        path = folder / f"rank{rank}{f'.{ordinal}' if ordinal else ''}{SUFFIX}"
        with suppress(FileExistsError):
            path.open("x").close()
            return path, ordinal
    raise AssertionError("count() does not end")


def _real(value: float | None) -> float | None:
    """Return a number as it is read again: a database has no NaN and no negative zero."""
    return None if value is None or math.isnan(value) else float(value) + 0.0


@cache
def _insertion(table: str, columns: int) -> str:
    return f"insert into {table} values ({', '.join('?' * columns)})"  # noqa: S608 - a table of ours
