"""Records which lines of a program read a source of nondeterminism, such as the clock.

A watch records the first read of each source at each line of the program. A generator that is made
without a seed counts as a read if it draws before it is seeded. If a library makes the generator,
the record names the line of the program that called the library, and the library's function. The
generator is ignored if the library is just being imported, or draws only for itself. Other reads in
libraries are ignored, except reads that `uuid` or `glob` make for the program. Forked children
report their reads. They also report their draws if timing or the operating system decides which
random numbers they get.

A watch replaces attributes. So it does not see the following:

- Names imported before the watch began (``from os import urandom``), and methods bound before.
- Types written in C, such as ``datetime.now`` and ``torch.Generator().seed()``. Numpy's types, such
  as ``SeedSequence()``, are only recognized by the text of the source line.
- The order of a set, and hashes or addresses that a container uses to find its entries.
- Draws of a library from a global generator, and draws from a copy of an unseeded generator.
- Code compiled by torch.compile, and processes that are neither forked nor recorded.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import FrameType
from typing import Any

from torchrepro.ground.callers import call_text, frames, is_library, line, package
from torchrepro.ground.imports import AfterImport
from torchrepro.ground.patching import patch
from torchrepro.seeding.call_records import ChildNotes, ObservedCall, printed_notes
from torchrepro.seeding.loader import in_loader
from torchrepro.seeding.nondeterministic_calls import (
    CHEAP_SOURCES,
    ENTROPY,
    EVERY_SOURCE,
    EXISTING_FILE,
    EXPLICIT_SEED,
    FILE_IF_THERE,
    FORKED,
    FORKED_DRAWS,
    FUNCTIONS,
    MADE_BY_NUMPY,
    UNSEEDED,
    WITHOUT_SEED,
    Source,
)
from torchrepro.seeding.observed_calls import (
    Call,
    Change,
    Listener,
    listen,
    replace_imported_names,
    stop_listening,
)
from torchrepro.seeding.streams import present_worker
from torchrepro.seeding.unseeded_generators import UnseededGenerators

_MANY = 1000  # the most lines, and the most files, that are recorded
_FEW_SEEDS = 100  # if children set more seeds at a line, they are not compared
_POOLS = {  # function that runs the tasks of a pool -> its variable with the present task
    ("multiprocessing.pool", "worker"): "task",
    ("concurrent.futures.process", "_process_worker"): "call_item",
}
_FEW_FILES = 50  # the most files that are recorded for one line and one use
_TICK = 0.01  # seconds that a file's time of change may lag behind the clock

_USING = [
    Source(module, name, EXISTING_FILE, "")
    for module, name in (
        *(("builtins", "open"), ("io", "open"), ("torch", "save"), ("sqlite3", "connect")),
        *(("os.path", name) for name in ("exists", "isfile", "getmtime")),
        *(("pathlib", f"Path.{name}") for name in ("exists", "is_file")),
    )
]
"""Functions that use a file."""

_WRAPPERS = "torchrepro.seeding.observed_calls"
_CODE = (".py", ".pyc", ".pyi", ".so", ".pyd", ".dll")
_OF_THE_SYSTEM = ("/proc/", "/dev/", "/sys/")
_Key = tuple[str, bool, str]  # of a read: its name, whether it passes no seed, its line


@dataclass(slots=True)
class FileUse:
    """A file, with the lines (``file:line``) that first asked for it, read it and wrote it."""

    path: str
    asked: str = ""
    read: str = ""
    written: str = ""
    changed: float = 0.0  # time of change at the first read, in seconds since 1970


class FileUses:
    """Records which files the program asks for, reads and writes.

    Two runs may differ if a run reads a file that an earlier run has written. `note` is called at
    calls of `open`, of functions that return whether a file exists, and of `torch.save` and
    `sqlite3.connect`, which do not call `open`. If a library makes the call, the record names the
    line of the program that called the library. Code and files in the folders of libraries are
    ignored. Files that a C extension opens itself are not seen.
    """

    def __init__(self, notes: ChildNotes) -> None:
        self.began = time.time() - _TICK
        self._notes = notes
        self._files: dict[str, FileUse] = {}
        self._of_line: Counter[tuple[str, str]] = Counter()

    def to_json(self) -> dict[str, Any]:
        return {"files": [asdict(file) for file in self._files.values()], "began": self.began}

    def reads(self) -> list[ObservedCall]:
        """Return the files that are older than the run and that the program asked for and read."""
        row = FILE_IF_THERE
        return [
            ObservedCall(Path(file.path).name, row.what, file.read, row.instead)
            for file in self._files.values()
            if file.asked and file.read and file.changed < self.began
        ]

    def note(self, call: Call) -> None:
        if call.function == "sqlite3.connect":
            for use in ("written", "read"):  # SQLite's own reads and writes are not observed
                self._note_use(use, call.argument(0, "database"), call.frame)
        elif call.function == "torch.save":
            self._note_use("written", call.argument(1, "f"), call.frame)
        elif call.function.endswith(".open"):
            mode = set(str(call.argument(1, "mode") or "r"))
            if not mode & set("wax"):
                self._note_use("read", call.argument(0, "file"), call.frame)
            if mode & set("wax+"):
                self._note_use("written", call.argument(0, "file"), call.frame)
        else:
            self._note_use("asked", call.argument(0, "path"), call.frame)

    def _note_use(self, use: str, target: Any, frame: FrameType) -> None:
        # Libraries ask for their own files, such as caches, so only their reads are recorded.
        if use == "asked" and is_library(frame.f_code.co_filename):
            return
        if isinstance(target, int) or not isinstance(target, str | bytes | os.PathLike):
            return
        path = os.path.abspath(os.fsdecode(target))  # noqa: PTH100 - links stay as they are named
        known = self._files.get(path)
        if known is not None and getattr(known, use):
            return
        if path.endswith(_CODE) or path.startswith(_OF_THE_SYSTEM) or is_library(path):
            return
        for caller in frames(frame):
            if not is_library(caller.f_code.co_filename):
                break
            if package(caller) == "torchrepro" and caller.f_globals["__name__"] != _WRAPPERS:
                return
        else:
            return
        source_line = line(caller)
        if self._of_line[source_line, use] >= _FEW_FILES:
            return
        changed = os.stat(path).st_mtime if use == "read" else 0.0  # noqa: PTH116 - a text
        if self.add(path, use, source_line, changed) and self._notes.in_child:
            self._notes.append("file", path=path, use=use, where=source_line, changed=changed)

    def add(self, path: str, use: str, where: str, changed: float) -> bool:
        """Record a `use` of a file by this process or a child; return whether it is the first."""
        if path not in self._files and len(self._files) >= _MANY:
            return False
        known = self._files.setdefault(path, FileUse(path))
        if getattr(known, use):
            return False
        self._of_line[where, use] += 1
        setattr(known, use, where)
        known.changed = changed or known.changed
        return True


class Watch:
    """Records the first read of each source in `rows` at each line of the program, until `stop`.

    If the `folder` of a recording is passed, child processes report their reads in this folder, and
    the files that the program uses are recorded as well.
    """

    def __init__(
        self,
        rows: Sequence[Source],
        on_first: Callable[[ObservedCall], object] = lambda read: None,
        folder: str | None = None,
    ) -> None:
        # Returns the running step and the number of records taken.
        self.position: Callable[[], tuple[int, int]] = lambda: (-1, 0)
        self._on_first = on_first
        self._notes = ChildNotes(folder)
        self._reads: dict[_Key, ObservedCall] = {}
        self._times: Counter[_Key] = Counter()
        self._seeds: dict[_Key, set[str]] = {}  # that children set at one line
        self._seeded: set[str] = set()  # modules whose generators this child has seeded
        self._unseeded = UnseededGenerators()
        self._follows_states = False  # whether the generators of `RandomState` are observed
        self._state_draws: Callable[[], None] | None = None  # of a `RandomState` that is being made
        self._undo = ExitStack()
        self.files = FileUses(self._notes)
        self._listeners = {row: self._listener(row) for row in rows}
        if folder is not None:
            self._listeners |= dict.fromkeys(_USING, self.files.note)
        self._waiting = AfterImport((row.awaited for row in self._listeners), self._listen_to)
        self._waiting.watch_all()
        if folder is not None:
            recorded_watches.running.append(self)
            if self._notes.is_spawned:
                self.begin_in_child()

    def reads(self) -> tuple[ObservedCall, ...]:
        """Return the reads up to now: by this process, then by its children, then of files.

        The read of an unseeded generator has the step and the record when the generator was made.
        If several children set seeds at one line, all these seeds become one text.
        """
        for note in self._notes.take():
            if note.pop("kind") == "read":
                self._add_noted(ObservedCall.from_json(note))
            else:
                self.files.add(**note)
        self._unseeded.settle()
        reads = [
            replace(read, times=self._times[key], value=self._value(key))
            for key, read in self._reads.items()
            if self._times[key]
        ]
        return (*reads, *self.files.reads())

    def stop(self) -> None:
        """Stop recording, and restore the original functions."""
        self._waiting.unwatch()
        self._undo.close()
        self._unseeded.stop()
        for listener in self._listeners.values():
            stop_listening(listener)
        if self in recorded_watches.running:
            recorded_watches.running.remove(self)

    def begin_in_child(self) -> None:
        """Observe draws from global generators as well; called when a child process begins."""
        self._reads = {key: read for key, read in self._reads.items() if read.value is None}
        self._seeded.clear()
        new_rows = [row for row in FORKED_DRAWS if row not in self._listeners]
        draw_listeners = {row: self._listener(row) for row in new_rows}
        self._listeners |= draw_listeners
        for row, listener in draw_listeners.items():
            if row.module in sys.modules:  # `_waiting` observes later imports
                listen(row.module, row.attribute, listener)
        replace_imported_names(draw_listeners.values())

    def _listen_to(self, module: str) -> None:
        if module == "numpy.random" and any(row.what == ENTROPY for row in self._listeners):
            self._listen_to_types_of_numpy()
        for row, listener in self._listeners.items():
            if row.awaited == module:
                listen(row.module, row.attribute, listener)

    def _listen_to_types_of_numpy(self) -> None:
        # numpy's types also call `randbits` for an explicit seed, and then replace the result.
        module: Any = sys.modules.get("numpy.random.bit_generator")
        original = getattr(module, "randbits", None)
        if original is None:
            return
        # `_MT19937` is private, but numpy has no public hook for a new `RandomState`. Without
        # `_MT19937`, an unseeded `RandomState` counts as a read when it is made.
        legacy: Any = sys.modules.get("numpy.random.mtrand")
        twister: Any = getattr(legacy, "_MT19937", None)

        def randbits(size: int) -> Any:
            drawn = original(size)
            caller = next(frame for frame in frames() if frame.f_globals["__name__"] != __name__)
            made = WITHOUT_SEED.fullmatch(call_text(caller))
            row = MADE_BY_NUMPY[made[1]] if made else None
            reader = row and row.reader(caller)
            change = (
                row and reader and self.heard(row, Call((size,), {}, row.name, caller), *reader)
            )
            return change(drawn) if change else drawn

        class OfRandomState(type):
            def __call__(cls, *args: Any, **kwargs: Any) -> Any:
                generator, on_draw = twister(*args, **kwargs), self._state_draws
                self._state_draws = None
                return self._unseeded.add(generator, on_draw) if on_draw else generator

            def __instancecheck__(cls, value: Any) -> bool:
                self._unseeded.settle()  # `RandomState.seed` calls this before it seeds
                return isinstance(value, twister)

        patch(self._undo, module, "randbits", randbits, original)
        if twister is not None:
            self._follows_states = True
            patch(self._undo, legacy, "_MT19937", OfRandomState("MT19937", (), {}), twister)

    def _listener(self, row: Source) -> Listener:
        function = f"{row.module}.{row.attribute}"
        generator = row.module.removesuffix(".random")
        seeds = row.what == EXPLICIT_SEED and (row.module, row.attribute) in FUNCTIONS

        def listener(call: Call) -> Change | None:
            frame = call.frame
            ours = package(frame) == "torchrepro"  # a profile gives every child the same seed
            if seeds and self._notes.in_child and not ours and _in_task(frame) is not False:
                self._seeded.add(generator)
            if call.function != function:
                return None  # another name of the function has another row
            if row.what == FORKED and not self._draws_vary(generator, frame, listener):
                return None
            reader = row.reader(frame)
            if reader is None or not row.applies(call):
                return None
            if row.what == FORKED:
                stop_listening(listener)  # one line is enough, and watching each draw is slow
            return self.heard(row, call, *reader)

        return listener

    def _draws_vary(self, generator: str, frame: FrameType, listener: Listener) -> bool:
        """Return whether the draws of a child from `generator` vary between runs.

        In a forked child, Python seeds `random` from the operating system. In a pool, timing
        decides which worker runs which task. In workers of a loader, draws depend on the sample,
        so they do not vary.
        """
        if generator in self._seeded:
            return False
        seeded_by_system: tuple[str, ...] = ("random",)
        if self._notes.is_spawned:
            # A profile seeds the children that it starts.
            has_profile = os.environ.get("TORCHREPRO_PROFILE")
            seeded_by_system = () if has_profile else ("random", "numpy")
        varies = generator in seeded_by_system or _in_task(frame) is not None
        if present_worker() is None and varies:
            return True
        stop_listening(listener)
        return False

    def heard(
        self, row: Source, call: Call, front: FrameType | None, source_line: str
    ) -> Change | None:
        """Record a read of the source `row` at the line `source_line`.

        `front` is the frame of the library function that the line called, if any. Returns a
        function that changes the result of the call, or None.
        """
        name, value = row.public_name(front), row.value(call)
        key = name, value is None, source_line
        if key not in self._reads or (self._notes.in_child and value is not None):
            if len(self._reads) >= _MANY:
                return None
            in_sample = in_loader() or present_worker() is not None
            instead = row.edit(name, in_sample=in_sample)
            step, record = self.position()
            self._reads[key] = ObservedCall(
                name, row.what, source_line, instead, step, record, value=value, in_sample=in_sample
            )
        note = partial(self._note, key)
        if row.name == "random.Random" and value is None:
            self._unseeded.add(call.args[0], note)
        elif row.name == "numpy.random.default_rng" and value is None:
            return lambda made: self._unseeded.add(made, note)
        elif row is MADE_BY_NUMPY["RandomState"] and self._follows_states:
            self._state_draws = note
        else:
            note()
        return None

    def _note(self, key: _Key) -> None:
        read = self._reads[key]
        self._times[key] += 1
        is_first = self._times[key] == 1
        if self._notes.in_child and read.value is not None:
            reported = self._seeds.setdefault(key, set())
            is_first = read.value not in reported and len(reported) <= _FEW_SEEDS
            if is_first:
                reported.add(read.value)
        if is_first and self._notes.in_child:
            self._notes.append("read", **read.to_json())
        elif is_first:
            self._on_first(read)

    def _add_noted(self, read: ObservedCall) -> None:
        key = read.name, read.value is None, read.where
        if key not in self._reads and len(self._reads) >= _MANY:
            return
        known = self._reads.setdefault(key, read)
        self._times[key] += 1
        if read.value is not None:
            self._seeds.setdefault(key, {known.value or ""}).add(read.value)

    def _value(self, key: _Key) -> str | None:
        """Return the explicit seed at a line, or one text for all seeds that children set there."""
        if key not in self._seeds:
            return self._reads[key].value
        seeds = sorted(self._seeds[key])
        digest = blake2b(repr(seeds).encode(), digest_size=4).hexdigest()
        text = f"{seeds[0]} and {len(seeds) - 1} more #{digest}" if seeds[1:] else seeds[0]
        return text if len(seeds) <= _FEW_SEEDS else ""


def _in_task(frame: FrameType) -> bool | None:
    """Return whether `frame` is called by a task of a pool of processes.

    Returns False during the initializer of the pool, and None outside of a pool.
    """
    for caller in frames(frame):
        variable = _POOLS.get((caller.f_globals.get("__name__", ""), caller.f_code.co_name))
        if variable is not None:
            return caller.f_locals.get(variable) is not None
    return None


def watch_unseeded() -> Watch:
    """Watch draws without a seed; the first worker of a loader prints its draws at once."""

    def on_first(read: ObservedCall) -> None:
        text = f"drew without a seed, in workers: {read} ({read.instead})"
        printed_notes.print_in_first_worker(f"{read.name} at {read.where}", text)

    return Watch(UNSEEDED, on_first)


class RecordedWatches:
    """The watches for the recordings of this process, each until its `stop`.

    A process is watched from its start, and its recording may begin later: it takes the watch
    `early`. The watches also continue in forked children.
    """

    def __init__(self) -> None:
        self.running: list[Watch] = []
        self.early: Watch | None = None
        os.register_at_fork(after_in_child=self._begin_in_child)

    def begin_early(self, folder: str, *, in_detail: bool) -> None:
        """Watch sources from now on, for a recording in `folder` that begins later."""
        self.early = self.begin(folder, in_detail=in_detail)

    def begin(self, folder: str, *, in_detail: bool) -> Watch:
        """Return the watch that `begin_early` has made, or a new watch."""
        early, self.early = self.early, None
        return early or Watch(EVERY_SOURCE if in_detail else CHEAP_SOURCES, folder=folder)

    def _begin_in_child(self) -> None:
        for watch in self.running:
            watch.begin_in_child()


recorded_watches = RecordedWatches()
