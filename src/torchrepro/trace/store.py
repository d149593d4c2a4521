"""Writes traces. Every process of every rank writes one SQLite file.

The file is complete up to the last commit. `SizeLimit` keeps the file below `max_size`.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sqlite3
import sys
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import import_module
from itertools import chain, count
from multiprocessing import current_process
from operator import itemgetter
from pathlib import Path
from typing import Any

import xxhash

from torchrepro.application.applier import active_profiles
from torchrepro.ground.console import say
from torchrepro.ground.errors import TraceError, shown, size
from torchrepro.ground.redaction import cleaner
from torchrepro.manifest.contents import known_secrets
from torchrepro.manifest.environment import commit, hardware, software
from torchrepro.seeding import generators
from torchrepro.seeding.streams import world
from torchrepro.trace.device_fingerprint import algorithm, summed_by
from torchrepro.trace.fingerprint import ALGORITHM
from torchrepro.trace.format import (
    BY_PROGRAM,
    BY_RUN,
    DETAILS,
    FORMAT,
    MANY,
    SCHEMA,
    SEAL,
    SUFFIX,
    Row,
    StepRow,
    digest_of,
    packed,
)
from torchrepro.trace.request import LEVELS, SMALLEST, RecordingRequest

LARGE = 1 << 24
"""Bytes of digests above which a part is split in two, since a reader loads whole parts."""

PATIENCE = 5000
"""Milliseconds that a write waits for a lock; Python's default."""

_REQUESTED = ("level", "steps", "every", "max_size", "statistics", "detail", "keep")

CHECKPOINT = 4000
"""The number of pages in the log after which SQLite moves them to the file. Moving waits
for the disk, for a time that depends little on the number of pages."""

OVERHEAD = 1 << 16
"""Extra bytes that a step needs: for rewritten pages, and for the index of the log."""

COARSEST = LEVELS[0]

NEWEST = 2
"""How many of the newest steps in full are dropped last, after all steps at `COARSEST`: if a run
diverges, its last two steps show the cause."""


class Store:
    """A trace that is being written.

    Every step is one transaction, so the trace of a killed process has complete steps only.
    https://sqlite.org/atomiccommit.html
    `clean` redacts texts of the program. If `shrinks` is true, `shrink` can reduce the file.
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
        self._steps = 0
        self._sources: dict[str, str] = {}  # redacted source lines of losses, by source line
        self._states: tuple[Mapping[str, str], str] = {}, "{}"
        self._outline = b"", b"", b""  # of the last part: plain, compressed, and the digest
        self._reset_step()
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        if shrinks:
            self.execute("pragma auto_vacuum = incremental")
        # A killed process loses no committed step. Only a power cut may lose the last steps.
        self.execute("pragma journal_mode = wal")
        self.execute("pragma synchronous = normal")
        self.execute(f"pragma wal_autocheckpoint = {CHECKPOINT}")
        self.execute("begin")
        for table in SCHEMA.split(";")[:-1]:  # all tables or none
            self.execute(table)
        self.commit()

    def _reset_step(self) -> None:
        self._records_digest = xxhash.xxh3_128()
        self._parts = 0
        self._names: dict[str, list[Any]] = {"sites": [], "arguments": [], "threads": [], "by": []}
        self._losses: list[Any] = []
        self._details: dict[str, list[tuple[Any, ...]]] = {table: [] for table in DETAILS}

    def write_meta(self, values: Mapping[str, Any]) -> None:
        self._meta |= {key: json.dumps(self._clean(value)) for key, value in values.items()}
        rows = sorted(self._meta.items())
        rows.append((SEAL, json.dumps(digest_of(rows).hex())))
        self.execute("replace into meta values (?, ?)", rows, many=True)

    def add_sites(self, sites: Sequence[Sequence[str]]) -> None:
        """Add sites. Records refer to a site by number, and the first site has number 1."""
        cleaned = self._cleaned(chain.from_iterable(sites))
        self._names["sites"] += [[*map(cleaned.__getitem__, words)] for words in sites]

    def add_arguments(self, texts: Sequence[str]) -> None:
        """Add texts of arguments of ops, except tensors. The first text has number 1."""
        # Only a text with quotes can contain a secret. Cleaning all texts would slow every step.
        cleaned = self._cleaned(text for text in texts if "'" in text or '"' in text)
        self._names["arguments"] += [cleaned.get(text, text) for text in texts]

    def add_threads(self, names: Sequence[str]) -> None:
        """Add names of threads. Records refer to a thread by number. The first has number 0."""
        self._names["threads"] += map(self._cleaned(names).__getitem__, names)

    def add_records(self, rows: list[Row]) -> None:
        """Add records of the running step, in order."""
        for start in range(0, len(rows), MANY):
            self._add_part(rows[start : start + MANY])

    def _add_part(self, rows: list[Row]) -> None:
        threads, sites, arguments, input_digests, output_digests = zip(*rows, strict=True)
        inputs, outputs = b"".join(input_digests), b"".join(output_digests)
        size = len(inputs) + len(outputs)
        if size > LARGE and len(rows) > 1:
            half = len(rows) // 2
            self._add_part(rows[:half])
            self._add_part(rows[half:])
            return
        lengths = [*map(len, input_digests)], [*map(len, output_digests)]
        plain = packed((threads, sites, arguments, *lengths))
        if plain != self._outline[0]:  # steps repeat, so outlines are often equal
            # A reader requires at least one byte for each record, so tiny parts stay uncompressed.
            content = zlib.compress(plain, 1 if size >= len(rows) else 0)
            self._outline = plain, content, xxhash.xxh3_128_digest(plain)
        _, content, digest = self._outline
        value_digests = xxhash.xxh3_128_digest(inputs), xxhash.xxh3_128_digest(outputs)
        self._records_digest.update(b"".join((digest, *value_digests)))
        self._insert("part", [(self.records + 1, content, inputs, outputs)])
        self.records += len(rows)
        self._parts += 1

    def add_losses(self, rows: Iterable[tuple[float | None, bytes, str, int]]) -> None:
        """Add losses of the running step. A row is value, fingerprint, source line and thread."""
        for value, fingerprint, source, thread in rows:
            if source not in self._sources:
                self._sources |= self._cleaned([source])
            # JSON cannot represent NaN and infinities as numbers.
            real = value if value is None or math.isfinite(value) else str(value)
            self._losses.append((real, fingerprint.hex(), self._sources[source]))
            self._names["by"].append(thread)

    def add_statistics(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Add statistics of outputs. A row is record, position, count, mean, norm, low and high."""
        self._details["statistics"] += ((*row[:3], *map(_storable_float, row[3:])) for row in rows)

    def add_tensors(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Add kept tensors. A row is record, role, position, dtype, shape and data."""
        self._details["tensor"] += rows

    def end_step(self, row: StepRow) -> None:
        """Add the row of a step, and commit everything that belongs to the step."""
        if row.random is not self._states[0]:  # the same object if no generator changed
            self._states = row.random, json.dumps(dict(row.random))
        details = []
        for table, rows in self._details.items():
            if rows:
                details += sorted(rows, key=itemgetter(0, 1, 2))
                self._insert(table, rows)
        threads = [row.thread, *self._names.pop("by")]
        if any(threads):  # omitted if all are the main thread
            self._names["by"] = threads
        values = (
            *(row.step, row.first, row.records, self._parts, row.bytes),
            *(row.level, int(row.finished)),
            *(self._records_digest.digest(), digest_of(details)),
            *(row.parameters, row.gradients, row.arguments, self._states[1]),
            json.dumps({group: texts for group, texts in self._names.items() if texts}),
            json.dumps(self._losses),
        )
        self._insert("step", [(*values, digest_of([values]))])
        self._steps += 1
        self._reset_step()
        self.commit()

    def commit(self) -> None:
        self.execute("commit")
        self.execute("begin")

    def bytes_on_disk(self, *, of_log: bool = False) -> int:
        """Return the bytes of the file, the log and its index. With `of_log`, omit the file."""
        ends = ("-wal", "-shm") if of_log else ("", "-wal", "-shm")
        files = [self.path.with_name(self.path.name + end) for end in ends]
        return sum(file.stat().st_size for file in files if file.exists())

    def bytes_of_file(self) -> tuple[int, int]:
        """Return the bytes of the file once the log is moved to it, and the bytes of used pages."""
        ((pages, free, page),) = self.execute(
            "select page_count, freelist_count, page_size"
            " from pragma_page_count, pragma_freelist_count, pragma_page_size"
        )
        return pages * page, (pages - free) * page

    def drop(self, step: int) -> None:
        """Delete the records of a step, and their details. The row of the step stays."""
        ((first, records),) = self.execute(
            "select first, records from step where step = ?", (step,)
        )
        ids = first, first + records
        self.execute("delete from part where first >= ? and first < ?", ids)
        for table in DETAILS:
            self.execute(f"delete from {table} where record >= ? and record < ?", ids)  # noqa: S608 - a table of ours
        self.execute("update step set parts = 0, details = x'' where step = ?", (step,))
        ((*values, _),) = self.execute("select * from step where step = ?", (step,))
        seal = digest_of([tuple(values)])
        self.execute("update step set seal = ? where step = ?", (seal, step))

    def shrink(self, *, file: bool) -> None:
        """Move the log into the file. If `file` is true, also remove unused pages from the file.

        Does not wait for readers. While a process reads the trace, part of the log may stay.
        """
        self.execute("commit")
        if file:
            self._connection.executescript(
                "pragma incremental_vacuum"
            )  # `execute` would free only one page
        self.execute("pragma busy_timeout = 0")
        self.execute("pragma wal_checkpoint(truncate)")
        self.execute(f"pragma busy_timeout = {PATIENCE}")
        self.execute("begin")

    def finish(self, values: Mapping[str, Any]) -> None:
        """Add `values` to `meta`, mark the trace as complete, and close it as a single file.

        A knob that changed to an equivalent value during the run is stored with the new value.
        Raises `TraceError` if the file was removed while it was written.
        """
        changes = [change for applied in active_profiles() for change in applied.report.as_good]
        changed = {change.knob: shown(change.now) for change in changes}
        knobs = {"knobs": json.loads(self._meta["knobs"]) | changed} if changed else {}
        self.write_meta({**knobs, **values, "finished": True, "rows": self._steps})
        self.close()
        if not self.path.exists():
            raise TraceError.about("the trace was removed while it was written", str(self.path))

    def close(self) -> None:
        """Commit and close. Only `finish` also marks the trace as complete."""
        self.execute("commit")
        with suppress(sqlite3.OperationalError):  # during a read, the log stays a separate file
            self._connection.execute("pragma journal_mode = delete")
        self._connection.close()

    def discard(self) -> None:
        """Roll back to the last commit, and close."""
        with suppress(sqlite3.Error):
            self._connection.execute("rollback")
        self._connection.close()

    def execute(
        self, statement: str, values: Sequence[Any] = (), *, many: bool = False
    ) -> list[Any]:
        """Run an SQL statement and return the resulting rows. Raises `TraceError` if it fails.

        If `many` is true, run the statement once for each of `values`.
        """
        run = self._connection.executemany if many else self._connection.execute
        try:
            return run(statement, values).fetchall()
        except sqlite3.Error as error:
            todo = "make room, or record into another folder"
            problem = f"the trace cannot be written: {error}"
            raise TraceError.about(problem, str(self.path), todo=todo) from error

    def _insert(self, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
        marks = ", ".join("?" * len(rows[0]))
        self.execute(f"insert into {table} values ({marks})", rows, many=True)  # noqa: S608 - a table of ours

    def _cleaned(self, texts: Iterable[str]) -> dict[str, str]:
        distinct = list(dict.fromkeys(texts))
        cleaned = self._clean(distinct) if distinct else []
        # A path may contain bytes that are not Unicode.
        storable = (text.encode(errors="backslashreplace").decode() for text in cleaned)
        return dict(zip(distinct, storable, strict=True))


class SizeLimit:
    """Drops records of old steps, so that a store stays below `max_size`.

    All ranks have equal shares of `max_size`, and every process of a rank may use the whole share.
    Assumes that the next step is at most as large as the largest so far. SQLite writes a step to
    the log, and later moves it to the file, into the space of deleted rows. So three times the size
    of the largest step stays free: in the log, in the file, and for the step before the next check.
    """

    def __init__(self, store: Store, size_of_run: int) -> None:
        ranks = world().size
        self._store = store
        self._limit = size_of_run // ranks  # bytes
        share = f" (its share of {size(size_of_run)} for {ranks:,} ranks)" if ranks > 1 else ""
        self._limit_text = f"{size(self._limit)}{share}"
        self._largest = 0
        self._used = store.bytes_of_file()[1]
        self._in_full: deque[int] = deque()  # steps recorded in full that still have records
        self._coarse: deque[int] = deque()  # steps at `COARSEST` that still have records
        self._after_last: int | None = None  # the number of the unfinished step at the end
        self._dropped = array("q")
        self._reported: set[str] = set()

    def make_room(self, row: StepRow) -> None:
        """Make room for the next step. Call this after `row` was written."""
        if not row.finished:
            self._after_last = row.step
        if row.records:
            (self._coarse if row.level == COARSEST else self._in_full).append(row.step)
        store = self._store
        file, used = store.bytes_of_file()
        self._largest = max(self._largest, used - self._used + OVERHEAD)
        room = self._limit - 3 * self._largest
        if used > room:
            newest = NEWEST + (self._after_last is not None)
            while store.bytes_of_file()[1] > room and (self._coarse or self._in_full):
                drops_coarse = self._coarse and len(self._in_full) <= newest
                steps = self._coarse if drops_coarse else self._in_full
                self._dropped.append(steps.popleft())
                store.drop(self._dropped[-1])
            store.commit()
            file, used = store.bytes_of_file()
        self._used = used
        if row.level != COARSEST and row.records and not self._in_full:
            self._report_once("full", self._message_of_no_room())
        # While the log is moved to the file, the log and the growing file both need space.
        if file + store.bytes_on_disk(of_log=True) + 2 * self._largest > self._limit:
            store.shrink(file=file + 2 * self._largest > self._limit)
            if store.bytes_on_disk() > self._limit:
                self._report_once(
                    "over",
                    f"takes {size(store.bytes_on_disk())}, more than {self._limit_text}: no "
                    "records are left that could be dropped\n    the run continues, and the "
                    "digests of each step are still written",
                )

    @property
    def count(self) -> int:
        """The number of steps whose records were dropped. An unfinished last step counts too."""
        return len(self._dropped)

    def summary(self) -> str:
        """Return a text: the size of the trace, the steps with records, and the dropped steps."""
        in_full = [step for step in self._in_full if step != self._after_last]
        dropped = [step for step in self._dropped if step != self._after_last]
        used = self._store.bytes_on_disk()
        relation = "of" if used <= self._limit else "and not"
        parts = [f"takes {size(used)} {relation} {self._limit_text}"]
        if in_full or not self._coarse:
            parts.append(f"kept in full: {_text_of_steps(in_full)}")
        if self._coarse:
            parts.append(f"kept at level {COARSEST}: {len(self._coarse):,} others")
        records = [f"the records of {_text_of_steps(dropped)}"] if dropped else []
        if len(dropped) < self.count:
            records.append("the records after the last step")
        parts.append(
            f"dropped: {' and '.join(records)}; every step still has its losses and the digests "
            "of its parameters and gradients"
        )
        text = "; ".join(parts)
        if "full" in self._reported and not self._in_full:
            text += f"\n    {self._message_of_no_room()}"
        return text

    def _report_once(self, topic: str, sentence: str) -> None:
        if topic not in self._reported:
            self._reported.add(topic)
            say(f"{self._store.path}: {sentence}")

    def _message_of_no_room(self) -> str:
        step = size(self._largest - OVERHEAD)
        return f"a step needs up to {step}: {self._limit_text} has room for no step in full"


class _Redaction:
    """Redacts the secrets that this process has at the time of the call."""

    def __init__(self) -> None:
        self._environment: Mapping[str, str] | None = None
        self._clean: Callable[[Any], Any]

    def __call__(self, value: Any) -> Any:
        environment = os.environ.copy()
        if environment != self._environment:
            profiles = (applied.resolved for applied in active_profiles())
            self._environment, self._clean = environment, cleaner(known_secrets(*profiles))
        return self._clean(value)


def check_share(request: RecordingRequest) -> None:
    """Raise `TraceError` if this rank's share of `max_size` is below the size of an empty trace."""
    ranks = world().size
    if request.max_size is not None and request.max_size // ranks < SMALLEST:
        raise TraceError.about(
            f"each of {ranks} ranks has {size(request.max_size // ranks)} of it, and an empty "
            f"trace needs up to {size(SMALLEST)}",
            key="max_size",
            found=size(request.max_size),
            legal=f"{size(ranks * SMALLEST)} or more",
        )


def open_store(request: RecordingRequest) -> Store:
    """Create the store of this process, and write facts about the process to it.

    The name of the file has the rank and the next free number. Raises `TraceError` if the folder
    cannot be written to.
    """
    torch: Any = import_module("torch")
    types = generators.devices_in_use()
    about: dict[str, Any] = {
        "program": sys.argv[0] if sys.argv else "",
        "program_text": _program_text(),
        "process": current_process().name,
        "recorded_by": BY_RUN if request == RecordingRequest.inherited(os.environ) else BY_PROGRAM,
        "algorithm": {"cpu": ALGORITHM} | {name: algorithm(torch.device(name)) for name in types},
        "summed_by": {name: summed_by(torch.device(name)) for name in types},
        "versions": software(),
        "hardware": hardware(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "repository": commit(),
        "knobs": {},
    }
    if torch.accelerator.is_available():
        device_type = torch.accelerator.current_accelerator().type
        devices = f"{device_type} x{torch.accelerator.device_count()}"
        about["hardware"] |= {"accelerator": devices}
    profiles = active_profiles()
    if profiles:
        resolved = profiles[-1].resolved
        rows = [row for applied in profiles for row in applied.report]
        about |= {
            "profile": resolved.name,
            "digest": resolved.digest,
            "guarantee": resolved.guarantee,
            "knobs": {row.knob: shown(row.after) for row in rows},
            "outcomes": {row.knob: str(row.outcome) for row in rows},
            "absent": {
                row.knob: row.absent for row in rows if row.absent and row.after is not None
            },
        }
    ranks = world()
    folder = Path(request.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path, ordinal = _create_file(folder, ranks.rank)
    except OSError as error:
        problem = f"cannot store a recording: {error.strerror}"
        raise TraceError.about(problem, found=request.folder) from None
    store = Store(path, _Redaction(), shrinks=request.max_size is not None)
    requested = {name: getattr(request, name) for name in _REQUESTED}
    position = {"rank": ranks.rank, "world_size": ranks.size, "ordinal": ordinal}
    store.write_meta({"format": FORMAT, **requested, **position, **about})
    return store


def _program_text() -> str | None:
    try:
        return xxhash.xxh3_64_hexdigest(Path(sys.argv[0]).read_bytes())
    except (IndexError, OSError):
        return None


def _create_file(folder: Path, rank: int) -> tuple[Path, int]:
    for ordinal in count():
        path = folder / f"rank{rank}{f'.{ordinal}' if ordinal else ''}{SUFFIX}"
        with suppress(FileExistsError):
            path.open("x").close()
            return path, ordinal
    raise AssertionError("count() does not end")


def _storable_float(value: float | None) -> float | None:
    """Return `value` as SQLite reads it back: NaN becomes None, and -0.0 becomes 0.0."""
    return None if value is None or math.isnan(value) else float(value) + 0.0


def _text_of_steps(steps: Sequence[int]) -> str:
    if len(steps) <= 1:
        return f"step {steps[0]}" if steps else "none"
    first, last = min(steps), max(steps)
    if len(steps) == 2:  # noqa: PLR2004 - the first and the last
        return f"steps {first} and {last}"
    ends = f"steps {first} to {last}"
    return ends if len(steps) == last - first + 1 else f"{len(steps):,} of the {ends}"
