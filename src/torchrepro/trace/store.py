"""The store of a trace: one SQLite file per rank and process, complete up to its last commit.

It is kept within so many bytes, where that is asked for, while it is written.
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

from torchrepro.application.applier import in_force
from torchrepro.ground.console import say
from torchrepro.ground.errors import TraceError
from torchrepro.ground.messages import shown, size
from torchrepro.ground.redaction import cleaner
from torchrepro.manifest.contents import secrets_here
from torchrepro.manifest.environment import commit, hardware, software
from torchrepro.seeding import generators
from torchrepro.seeding.streams import world
from torchrepro.trace.fingerprint import ALGORITHM, algorithm
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
"""Bytes of digests at which records become two parts. A reader holds a part in memory."""

PATIENCE = 5000
"""Milliseconds for which a write waits for a lock, which is what Python asks for by itself."""

_ASKED = ("level", "steps", "every", "max_size", "statistics", "detail", "keep")

CHECKPOINT = 4000
"""Pages of the log that are moved to the file at once. The disk is waited for then, and the time
that takes depends little on how much is moved."""

OVERHEAD = 1 << 16
"""Bytes that a step takes besides its own: pages that are written again, and the log's index."""

COARSEST = LEVELS[0]

NEWEST = 2
"""Steps in full that outlive the records of older steps at `COARSEST`: where a run diverges, its
last step and the one before it say from what."""


class Store:
    """A trace that is being written.

    Every step is one transaction, so a process that is killed leaves complete steps behind.
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
        self._steps = 0
        self._sources: dict[str, str] = {}  # of losses: the same in every step
        self._states: tuple[Mapping[str, str], str] = {}, "{}"
        self._outline = b"", b"", b""  # the last one, compressed, and its digest
        self._begin_step()
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        if shrinks:
            self.ask("pragma auto_vacuum = incremental")
        # Survives the end of the process at any moment; only a power cut may lose the last steps.
        self.ask("pragma journal_mode = wal")
        self.ask("pragma synchronous = normal")
        self.ask(f"pragma wal_autocheckpoint = {CHECKPOINT}")
        self.ask("begin")
        for table in SCHEMA.split(";")[:-1]:  # all tables or none
            self.ask(table)
        self.commit()

    def _begin_step(self) -> None:
        self._of_step = xxhash.xxh3_128()
        self._parts = 0
        self._names: dict[str, list[Any]] = {"sites": [], "arguments": [], "threads": [], "by": []}
        self._losses: list[Any] = []
        self._details: dict[str, list[tuple[Any, ...]]] = {table: [] for table in DETAILS}

    def write_meta(self, values: Mapping[str, Any]) -> None:
        self._meta |= {key: json.dumps(self._clean(value)) for key, value in values.items()}
        rows = sorted(self._meta.items())
        rows.append((SEAL, json.dumps(digest_of(rows).hex())))
        self.ask("replace into meta values (?, ?)", rows, each=True)

    def add_sites(self, sites: Sequence[Sequence[str]]) -> None:
        """Add places of the program that records refer to, by numbers from 1 on."""
        shown = self._shown(chain.from_iterable(sites))
        self._names["sites"] += [[*map(shown.__getitem__, words)] for words in sites]

    def add_arguments(self, texts: Sequence[str]) -> None:
        """Add arguments of ops that are not tensors, which are numbered from 1 on."""
        # A text without quotes has only numbers and types in it, and may be new in every step.
        shown = self._shown(text for text in texts if "'" in text or '"' in text)
        self._names["arguments"] += [shown.get(text, text) for text in texts]

    def add_threads(self, names: Sequence[str]) -> None:
        """Add threads that records come from, which are numbered from 0 on."""
        self._names["threads"] += map(self._shown(names).__getitem__, names)

    def add_records(self, rows: list[Row]) -> None:
        """Add records of the running step in their order."""
        for start in range(0, len(rows), MANY):
            self._add_part(rows[start : start + MANY])

    def _add_part(self, rows: list[Row]) -> None:
        threads, sites, arguments, each_input, each_output = zip(*rows, strict=True)
        inputs, outputs = b"".join(each_input), b"".join(each_output)
        size = len(inputs) + len(outputs)
        if size > LARGE and len(rows) > 1:
            half = len(rows) // 2
            self._add_part(rows[:half])
            self._add_part(rows[half:])
            return
        lengths = [*map(len, each_input)], [*map(len, each_output)]
        plain = packed((threads, sites, arguments, *lengths))
        if plain != self._outline[0]:  # steps are alike
            # A reader relies on it that a file has a byte for each of its records.
            content = zlib.compress(plain, 1 if size >= len(rows) else 0)
            self._outline = plain, content, xxhash.xxh3_128_digest(plain)
        _, content, digest = self._outline
        of_values = xxhash.xxh3_128_digest(inputs), xxhash.xxh3_128_digest(outputs)
        self._of_step.update(b"".join((digest, *of_values)))
        self._insert("part", [(self.records + 1, content, inputs, outputs)])
        self.records += len(rows)
        self._parts += 1

    def add_losses(self, rows: Iterable[tuple[float | None, bytes, str, int]]) -> None:
        """Add losses of the running step: value, fingerprint, source, thread."""
        for value, fingerprint, source, thread in rows:
            if source not in self._sources:
                self._sources |= self._shown([source])
            # JSON has no numbers for NaN and infinities.
            real = value if value is None or math.isfinite(value) else str(value)
            self._losses.append((real, fingerprint.hex(), self._sources[source]))
            self._names["by"].append(thread)

    def add_statistics(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Add statistics of outputs: record, position, count, mean, norm, low, high."""
        self._details["statistics"] += ((*row[:3], *map(_real, row[3:])) for row in rows)

    def add_tensors(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Add kept tensors: record, role, position, dtype, shape, data."""
        self._details["tensor"] += rows

    def end_step(self, row: StepRow) -> None:
        """Add a step and commit all that belongs to it."""
        if row.random is not self._states[0]:  # those of many steps are the very same
            self._states = row.random, json.dumps(dict(row.random))
        details = []
        for table, rows in self._details.items():
            if rows:
                details += sorted(rows, key=itemgetter(0, 1, 2))
                self._insert(table, rows)
        by = [row.thread, *self._names.pop("by")]
        if any(by):  # by others than the main thread
            self._names["by"] = by
        values = (
            *(row.step, row.first, row.records, self._parts, row.bytes),
            *(row.level, int(row.finished)),
            *(self._of_step.digest(), digest_of(details)),
            *(row.parameters, row.gradients, row.arguments, self._states[1]),
            json.dumps({kind: its for kind, its in self._names.items() if its}),
            json.dumps(self._losses),
        )
        self._insert("step", [(*values, digest_of([values]))])
        self._steps += 1
        self._begin_step()
        self.commit()

    def commit(self) -> None:
        self.ask("commit")
        self.ask("begin")

    def bytes_on_disk(self, *, of_log: bool = False) -> int:
        """Return how many bytes the trace, or its log alone, takes with the log's index."""
        ends = ("-wal", "-shm") if of_log else ("", "-wal", "-shm")
        files = [self.path.with_name(self.path.name + end) for end in ends]
        return sum(file.stat().st_size for file in files if file.exists())

    def bytes_of_file(self) -> tuple[int, int]:
        """Return how many bytes the file has, once it has all of the log, and are in use."""
        ((pages, free, page),) = self.ask(
            "select page_count, freelist_count, page_size"
            " from pragma_page_count, pragma_freelist_count, pragma_page_size"
        )
        return pages * page, (pages - free) * page

    def drop(self, step: int) -> None:
        """Delete the records of a step and their details; its row says so and stays."""
        ((first, records),) = self.ask("select first, records from step where step = ?", (step,))
        which = first, first + records
        self.ask("delete from part where first >= ? and first < ?", which)
        for table in DETAILS:
            self.ask(f"delete from {table} where record >= ? and record < ?", which)  # noqa: S608 - a table of ours
        self.ask("update step set parts = 0, details = x'' where step = ?", (step,))
        ((*values, _),) = self.ask("select * from step where step = ?", (step,))
        seal = digest_of([tuple(values)])
        self.ask("update step set seal = ? where step = ?", (seal, step))

    def shrink(self, *, file: bool) -> None:
        """Empty the log into the file; with `file`, make that smaller by what is not in use.

        While somebody reads the trace, this does less, and does not wait.
        """
        self.ask("commit")
        if file:
            self._connection.executescript("pragma incremental_vacuum")  # one page by `execute`
        self.ask("pragma busy_timeout = 0")
        self.ask("pragma wal_checkpoint(truncate)")
        self.ask(f"pragma busy_timeout = {PATIENCE}")
        self.ask("begin")

    def finish(self, values: Mapping[str, Any]) -> None:
        """Write that the trace is complete, with `values` of the run, and leave one file behind.

        Knobs that have changed since to equivalent values have these. Raises `TraceError` if
        somebody has taken the file away while it was written.
        """
        changes = [each for applied in in_force() for each in applied.report.as_good]
        now = {each.knob: shown(each.now) for each in changes}
        knobs = {"knobs": json.loads(self._meta["knobs"]) | now} if now else {}
        self.write_meta({**knobs, **values, "finished": True, "rows": self._steps})
        self.close()
        if not self.path.exists():
            raise TraceError.about("the trace was removed while it was written", str(self.path))

    def close(self) -> None:
        """Commit what is left; a trace that is not finished shows that the run was cut off."""
        self.ask("commit")
        with suppress(sqlite3.OperationalError):  # a reader may hold it: then it stays as it is
            self._connection.execute("pragma journal_mode = delete")
        self._connection.close()

    def discard(self) -> None:
        """Close without what was written since the last commit."""
        with suppress(sqlite3.Error):
            self._connection.execute("rollback")
        self._connection.close()

    def ask(self, statement: str, values: Sequence[Any] = (), *, each: bool = False) -> list[Any]:
        """Run a statement and return its rows. Raises `TraceError` if it cannot be done.

        With `each`, run it once for each of `values`.
        """
        run = self._connection.executemany if each else self._connection.execute
        try:
            return run(statement, values).fetchall()
        except sqlite3.Error as error:
            todo = "make room, or record into another folder"
            what = f"the trace cannot be written: {error}"
            raise TraceError.about(what, str(self.path), todo=todo) from error

    def _insert(self, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
        marks = ", ".join("?" * len(rows[0]))
        self.ask(f"insert into {table} values ({marks})", rows, each=True)  # noqa: S608 - a table of ours

    def _shown(self, texts: Iterable[str]) -> dict[str, str]:
        distinct = list(dict.fromkeys(texts))
        cleaned = self._clean(distinct) if distinct else []
        # A path may hold bytes that are not Unicode.
        storable = (text.encode(errors="backslashreplace").decode() for text in cleaned)
        return dict(zip(distinct, storable, strict=True))


class SizeLimit:
    """Holds a store to its rank's share of the size of a run; a process that a rank starts has as
    much again.

    No step is taken to be larger than those before it. SQLite writes a step to a log, and later
    from there into its file, in which it uses the place of what was deleted. So there has to be
    room for the largest step up to now in the log, in the file, and once more for the step that is
    written before the next call.
    """

    def __init__(self, store: Store, size_of_run: int) -> None:
        ranks = world().size
        self._store = store
        self._most = size_of_run // ranks
        share = f" (its share of {size(size_of_run)} for {ranks:,} ranks)" if ranks > 1 else ""
        self._most_in_words = f"{size(self._most)}{share}"
        self._largest = 0
        self._used = store.bytes_of_file()[1]
        self._in_full: deque[int] = deque()  # the steps that have records
        self._coarse: deque[int] = deque()  # those at `COARSEST` that have records
        self._after_last: int | None = None  # the number of what came after the last step
        self._dropped = array("q")
        self._said: set[str] = set()

    def hold(self, row: StepRow) -> None:
        """Make room for the next step; called where `row` has been written."""
        if not row.finished:
            self._after_last = row.step
        if row.records:
            (self._coarse if row.level == COARSEST else self._in_full).append(row.step)
        store = self._store
        file, used = store.bytes_of_file()
        self._largest = max(self._largest, used - self._used + OVERHEAD)
        room = self._most - 3 * self._largest
        if used > room:
            newest = NEWEST + (self._after_last is not None)
            while store.bytes_of_file()[1] > room and (self._coarse or self._in_full):
                kind = self._in_full
                if self._coarse and len(kind) <= newest:
                    kind = self._coarse
                self._dropped.append(kind.popleft())
                store.drop(self._dropped[-1])
            store.commit()
            file, used = store.bytes_of_file()
        self._used = used
        if row.level != COARSEST and row.records and not self._in_full:
            self._say_once("full", self._room_for_none())
        # The log is still there while it is moved: the file grows beside it.
        if file + store.bytes_on_disk(of_log=True) + 2 * self._largest > self._most:
            store.shrink(file=file + 2 * self._largest > self._most)
            if store.bytes_on_disk() > self._most:
                self._say_once(
                    "over",
                    f"takes {size(store.bytes_on_disk())}, more than {self._most_in_words}: no "
                    "records are left that could be dropped\n    the run goes on, and the digests "
                    "of each step are still written",
                )

    @property
    def count(self) -> int:
        """How many steps have no records any longer, what came after the last one included."""
        return len(self._dropped)

    def in_words(self) -> str:
        """Return what the trace takes, which steps have their records and which have not."""
        in_full = [step for step in self._in_full if step != self._after_last]
        dropped = [step for step in self._dropped if step != self._after_last]
        taken = self._store.bytes_on_disk()
        of = "of" if taken <= self._most else "and not"
        parts = [f"takes {size(taken)} {of} {self._most_in_words}"]
        if in_full or not self._coarse:
            parts.append(f"kept in full: {_in_words(in_full)}")
        if self._coarse:
            parts.append(f"kept at level {COARSEST}: {len(self._coarse):,} others")
        what = [f"the records of {_in_words(dropped)}"] if dropped else []
        what += ["what came after the last step"] if len(dropped) < self.count else []
        parts.append(
            f"dropped: {' and '.join(what)}; losses and the digests of parameters and gradients "
            "are there of every step"
        )
        none = f"\n    {self._room_for_none()}" * ("full" in self._said and not self._in_full)
        return "; ".join(parts) + none

    def _say_once(self, what: str, sentence: str) -> None:
        if what not in self._said:
            self._said.add(what)
            say(f"{self._store.path}: {sentence}")

    def _room_for_none(self) -> str:
        step = size(self._largest - OVERHEAD)
        return f"a step takes up to {step}: {self._most_in_words} has room for none in full"


class _Redaction:
    """Takes the secrets of this process out of texts, also those that it has learnt since."""

    def __init__(self) -> None:
        self._environment: Mapping[str, str] | None = None
        self._clean: Callable[[Any], Any]

    def __call__(self, value: Any) -> Any:
        environment = os.environ.copy()
        if environment != self._environment:
            profiles = (applied.resolved for applied in in_force())
            self._environment, self._clean = environment, cleaner(secrets_here(*profiles))
        return self._clean(value)


def check_share(request: RecordingRequest) -> None:
    """Raise `TraceError` where the share of this rank has no room for a trace without an op."""
    ranks = world().size
    if request.max_size is not None and request.max_size // ranks < SMALLEST:
        raise TraceError.about(
            f"each of {ranks} ranks has {size(request.max_size // ranks)} of it, and an empty "
            f"trace takes up to {size(SMALLEST)}",
            key="max_size",
            found=size(request.max_size),
            legal=f"{size(ranks * SMALLEST)} or more",
        )


def open_store(request: RecordingRequest) -> Store:
    """Open a store for this process, the next free one of its rank, and describe the process in it.

    Raises `TraceError` if the folder cannot be written to.
    """
    torch: Any = import_module("torch")
    about: dict[str, Any] = {
        "program": sys.argv[0] if sys.argv else "",
        "program_text": _program_text(),
        "process": current_process().name,
        "recorded_by": BY_RUN if request == RecordingRequest.inherited(os.environ) else BY_PROGRAM,
        "algorithm": {"cpu": ALGORITHM}
        | {name: algorithm(torch.device(name)) for name in generators.devices_in_use()},
        "versions": software(),
        "hardware": hardware(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "repository": commit(),
        "knobs": {},
    }
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        about["hardware"] |= {"accelerator": f"{kind} x{torch.accelerator.device_count()}"}
    profiles = in_force()
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
    its = world()
    folder = Path(request.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path, ordinal = _new_file(folder, its.rank)
    except OSError as error:
        what = f"cannot hold a recording: {error.strerror}"
        raise TraceError.about(what, found=request.folder) from None
    store = Store(path, _Redaction(), shrinks=request.max_size is not None)
    asked = {name: getattr(request, name) for name in _ASKED}
    place = {"rank": its.rank, "world_size": its.size, "ordinal": ordinal}
    store.write_meta({"format": FORMAT, **asked, **place, **about})
    return store


def _program_text() -> str | None:
    try:
        return xxhash.xxh3_64_hexdigest(Path(sys.argv[0]).read_bytes())
    except (IndexError, OSError):
        return None


def _new_file(folder: Path, rank: int) -> tuple[Path, int]:
    for ordinal in count():
        path = folder / f"rank{rank}{f'.{ordinal}' if ordinal else ''}{SUFFIX}"
        with suppress(FileExistsError):
            path.open("x").close()
            return path, ordinal
    raise AssertionError("count() does not end")


def _real(value: float | None) -> float | None:
    """Return a number as it is read again: a database has no NaN and no negative zero."""
    return None if value is None or math.isnan(value) else float(value) + 0.0


def _in_words(steps: Sequence[int]) -> str:
    if len(steps) <= 1:
        return f"step {steps[0]}" if steps else "none"
    first, last = min(steps), max(steps)
    if len(steps) == 2:  # noqa: PLR2004 - the first and the last
        return f"steps {first} and {last}"
    ends = f"steps {first} to {last}"
    return ends if len(steps) == last - first + 1 else f"{len(steps):,} of the {ends}"
