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

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from torchrepro.ground.callers import address, call_text, frames, is_library, line, package
from torchrepro.ground.fork_safety import comes_from_fork_server
from torchrepro.ground.imports import AfterImport
from torchrepro.ground.patching import patch
from torchrepro.seeding.loader import in_loader
from torchrepro.seeding.nondeterministic_calls import (
    ANY,
    CHEAP_SOURCES,
    ENTROPY,
    EVERY_SOURCE,
    EXISTING_FILE,
    EXPLICIT_SEED,
    FILE_IF_THERE,
    FOR_THEMSELVES,
    FORKED,
    FORKED_DRAWS,
    GIVEN_SEEDS,
    MADE_BY_NUMPY,
    OWN_GENERATOR,
    UNSEEDED,
    WITHOUT_SEED,
    Source,
)
from torchrepro.seeding.observed_calls import (
    Change,
    Listener,
    listen,
    replace_imported_names,
    stop_listening,
)
from torchrepro.seeding.seeding_calls import FUNCTIONS, OWN, SeedingCall, note_in_first_worker
from torchrepro.seeding.streams import present_worker
from torchrepro.seeding.unseeded_generators import UnseededGenerators

if TYPE_CHECKING:
    from torchrepro.seeding.nondeterministic_calls import Arguments

_MANY = 1000  # the most lines, and the most files, that are recorded
_FEW_SEEDS = 100  # if children set more seeds at a line, they are not compared
_POOLS = {  # function that runs the tasks of a pool -> its variable with the present task
    ("multiprocessing.pool", "worker"): "task",
    ("concurrent.futures.process", "_process_worker"): "call_item",
}
_LARGEST = 1 << 20  # the most bytes of the notes of children
_FEW_FILES = 50  # the most files that are recorded for one line and one use
_TICK = 0.01  # seconds that a file's time of change may lag behind the clock

_USING = (
    *(("builtins", "open"), ("io", "open")),
    *(("os.path", name) for name in ("exists", "isfile", "getmtime")),
    *(("pathlib", f"Path.{name}") for name in ("exists", "is_file")),
)
_USING_LATE = {"torch": "save", "sqlite3": "connect"}  # observed once these modules are imported
_WRAPPERS = "torchrepro.seeding.observed_calls"
_CODE = (".py", ".pyc", ".pyi", ".so", ".pyd", ".dll")
_OF_THE_SYSTEM = ("/proc/", "/dev/", "/sys/")


@dataclass(slots=True)
class SourceRead:
    """A line of the program that reads a source, or that sets an explicit seed."""

    name: str
    what: str
    where: str  # ``file:line``
    times: int
    step: int  # the step of the first read; -1 before torch was imported
    record: int  # how many records had been taken before the first read
    value: str | None  # the explicit seed; None for a read
    instead: str
    in_sample: bool  # whether a loader was loading a sample

    def to_json(self) -> dict[str, Any]:
        """Return the read as plain JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        return str(SeedingCall(self.name, self.value or "", self.where, self.times))


def seed_of_generator(where: str, step: int, record: int, seed: str) -> SourceRead:
    """Return the record of a line that draws from a generator with the explicit seed `seed`."""
    first = 1, step, record, seed, GIVEN_SEEDS[0].instead
    return SourceRead(OWN_GENERATOR, EXPLICIT_SEED, where, *first, in_sample=False)


class ChildNotes:
    """A file of notes that child processes leave for the recorded process.

    The file is in the folder of the recording. The children are forked, or started by
    multiprocessing. Each note is one line of JSON. `take` removes the file.
    """

    def __init__(self, folder: str) -> None:
        # Python starts a spawned process with this module in its command line.
        spawned = any("multiprocessing.spawn" in argument for argument in sys.orig_argv)
        self.is_spawned = spawned or comes_from_fork_server()
        self._process = os.getppid() if self.is_spawned else os.getpid()
        self._path = Path(folder) / f"told-{self._process}.jsonl"

    @property
    def in_child(self) -> bool:
        return os.getpid() != self._process

    def append(self, note_type: str, **fields: Any) -> None:
        """Append a note; skip it if the file cannot be written or has `_LARGEST` bytes."""
        text = json.dumps({"kind": note_type, **fields}) + "\n"
        with suppress(OSError):
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                if os.lseek(file, 0, os.SEEK_END) < _LARGEST:
                    os.write(file, text.encode())
            finally:
                os.close(file)

    def take(self) -> list[dict[str, Any]]:
        """Return all notes and remove the file; in a child process, return an empty list.

        Skips a note that a child process has written only in part.
        """
        notes: list[dict[str, Any]] = []
        if self.in_child:
            return notes
        with suppress(OSError):
            lines = self._path.read_bytes()[: 2 * _LARGEST].splitlines()
            self._path.unlink()
            for line in lines:
                with suppress(ValueError):
                    notes.append(json.loads(line))
        return notes


@dataclass(slots=True)
class FileUse:
    """A file, with the lines (``file:line``) that first asked for it, read it and wrote it."""

    path: str
    asked: str = ""
    read: str = ""
    written: str = ""
    changed: float = 0.0  # time of change at the first read, in seconds since 1970


class FileUses:
    """Records which files the program asks for, reads and writes, until `stop`.

    Two runs may differ if a run reads a file that an earlier run has written. The class observes
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
        for module, name in _USING:
            listen(module, name, self._note)
        late = _USING_LATE
        self._waiting = AfterImport(late, lambda module: listen(module, late[module], self._note))
        self._waiting.watch_all()

    def stop(self) -> None:
        self._waiting.unwatch()
        stop_listening(self._note)

    def to_json(self) -> dict[str, Any]:
        return {"files": [asdict(file) for file in self._files.values()], "began": self.began}

    def reads(self) -> list[SourceRead]:
        """Return the files that are older than the run and that the program asked for and read."""
        first = 1, -1, 0, None, FILE_IF_THERE.instead
        return [
            SourceRead(Path(file.path).name, EXISTING_FILE, file.read, *first, in_sample=False)
            for file in self._files.values()
            if file.asked and file.read and file.changed < self.began
        ]

    def _note(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType
    ) -> None:
        def argument(position: int, keyword: str) -> Any:
            return args[position] if len(args) > position else kwargs.get(keyword)

        if name == "sqlite3.connect":
            for use in ("written", "read"):  # SQLite's own reads and writes are not observed
                self._note_use(use, argument(0, "database"), frame)
        elif name == "torch.save":
            self._note_use("written", argument(1, "f"), frame)
        elif name.endswith(".open"):
            mode = set(str(argument(1, "mode") or "r"))
            if not mode & set("wax"):
                self._note_use("read", argument(0, "file"), frame)
            if mode & set("wax+"):
                self._note_use("written", argument(0, "file"), frame)
        else:
            self._note_use("asked", argument(0, "path"), frame)

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
        on_first: Callable[[SourceRead], object] = lambda read: None,
        folder: str | None = None,
    ) -> None:
        # Returns the running step and the number of records taken.
        self.position: Callable[[], tuple[int, int]] = lambda: (-1, 0)
        self._on_first = on_first
        self._reads: dict[tuple[str, bool, str], SourceRead] = {}
        self._seeds: dict[tuple[str, bool, str], set[str]] = {}  # that children set at one line
        self._seeded: set[str] = set()  # modules whose generators this child has seeded
        self._unseeded = UnseededGenerators()
        self._follows_states = False  # whether the generators of `RandomState` are observed
        self._state_made: SourceRead | None = None  # of a `RandomState` that is being made
        self._undo = ExitStack()
        self._listeners = {row: self._listener(row) for row in rows}
        self._waiting = AfterImport(map(_awaited, rows), self._listen_to)
        self._waiting.watch_all()
        self._notes = ChildNotes(folder) if folder is not None else None
        self.files: FileUses | None = None
        if self._notes is not None:
            self.files = FileUses(self._notes)
            _of_recordings.append(self)
            if self._notes.is_spawned:
                self.begin_in_child()

    def reads(self) -> tuple[SourceRead, ...]:
        """Return the reads up to now: by this process, then by its children, then of files.

        The read of an unseeded generator has the step and the record when the generator was made.
        If several children set seeds at one line, all these seeds become one text.
        """
        notes = [] if self._notes is None else self._notes.take()
        for note in notes:
            if note.pop("kind") == "read":
                self._add_noted(SourceRead(**note))
            elif self.files is not None:
                self.files.add(**note)
        for key, values in self._seeds.items():
            seeds = sorted(values)
            digest = blake2b(repr(seeds).encode(), digest_size=4).hexdigest()
            text = f"{seeds[0]} and {len(seeds) - 1} more #{digest}" if seeds[1:] else seeds[0]
            self._reads[key].value = text if len(values) <= _FEW_SEEDS else ""
        self._unseeded.settle()
        reads = [read for read in self._reads.values() if read.times]
        return (*reads, *(self.files.reads() if self.files is not None else ()))

    def stop(self) -> None:
        """Stop recording, and restore the original functions."""
        self._waiting.unwatch()
        self._undo.close()
        self._unseeded.stop()
        for listener in self._listeners.values():
            stop_listening(listener)
        if self.files is not None:
            self.files.stop()
            _of_recordings.remove(self)

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
            if _awaited(row) == module:
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
            reader = row and _reader(row, caller)
            change = row and reader and self.heard(row, ((size,), {}), *reader)
            return change(drawn) if change else drawn

        class OfRandomState(type):
            def __call__(cls, *args: Any, **kwargs: Any) -> Any:
                generator, read = twister(*args, **kwargs), self._state_made
                self._state_made = None
                return (
                    self._unseeded.add(generator, partial(self._note, read)) if read else generator
                )

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

        def listener(
            name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType
        ) -> Change | None:
            ours = package(frame) == "torchrepro"  # a profile gives every child the same seed
            if seeds and self._in_child and not ours and _in_task(frame) is not False:
                self._seeded.add(generator)
            if name != function:
                return None  # another name of the function has another row
            arguments = args, kwargs
            if row.what == FORKED and not self._draws_vary(generator, frame, listener):
                return None
            reader = _reader(row, frame)
            if reader is None or not row.applies(arguments):
                return None
            if row.what == FORKED:
                stop_listening(listener)  # one line is enough, and watching each draw is slow
            return self.heard(row, arguments, *reader)

        return listener

    @property
    def _in_child(self) -> bool:
        return self._notes is not None and self._notes.in_child

    def _draws_vary(self, generator: str, frame: FrameType, listener: Listener) -> bool:
        """Return whether the draws of a child from `generator` vary between runs.

        In a forked child, Python seeds `random` from the operating system. In a pool, timing
        decides which worker runs which task. In workers of a loader, draws depend on the sample,
        so they do not vary.
        """
        if generator in self._seeded:
            return False
        seeded_by_system: tuple[str, ...] = ("random",)
        if self._notes is not None and self._notes.is_spawned:
            # A profile seeds the children that it starts.
            has_profile = os.environ.get("TORCHREPRO_PROFILE")
            seeded_by_system = () if has_profile else ("random", "numpy")
        varies = generator in seeded_by_system or _in_task(frame) is not None
        if present_worker() is None and varies:
            return True
        stop_listening(listener)
        return False

    def heard(
        self, row: Source, arguments: Arguments, front: FrameType | None, source_line: str
    ) -> Change | None:
        """Record a read of the source `row` at the line `source_line`.

        `front` is the frame of the library function that the line called, if any. Returns a
        function that changes the result of the call, or None.
        """
        name, value = _public_name(row, front), row.value(arguments)
        key = name, value is None, source_line
        read = self._reads.get(key)
        if read is None or (self._in_child and value is not None):
            if len(self._reads) >= _MANY:
                return None
            step, record = self.position()
            is_loading = in_loader() or present_worker() is not None
            read = self._reads[key] = SourceRead(
                name=name,
                what=row.what,
                where=source_line,
                times=0,
                step=step,
                record=record,
                value=value,
                in_sample=is_loading,
                instead=row.edit(name, in_sample=is_loading),
            )
        note = partial(self._note, read)
        if row.name == "random.Random" and value is None:
            self._unseeded.add(arguments[0][0], note)
        elif row.name == "numpy.random.default_rng" and value is None:
            return lambda made: self._unseeded.add(made, note)
        elif row is MADE_BY_NUMPY["RandomState"] and self._follows_states:
            self._state_made = read
        else:
            note()
        return None

    def _note(self, read: SourceRead) -> None:
        read.times += 1
        if read.times > 1:
            return
        key = read.name, read.value is None, read.where
        in_child, value = self._in_child, read.value or ""
        reported = self._seeds.setdefault(key, set()) if in_child and value else set()
        if self._notes is None or not in_child:
            self._on_first(read)
        elif value not in reported and len(reported) <= _FEW_SEEDS:
            reported.add(value)
            self._notes.append("read", **read.to_json())

    def _add_noted(self, read: SourceRead) -> None:
        key = read.name, read.value is None, read.where
        if key not in self._reads and len(self._reads) >= _MANY:
            return
        known = self._reads.setdefault(key, read)
        if known is not read:
            known.times += 1
        if read.value is not None:
            self._seeds.setdefault(key, {known.value or ""}).add(read.value)


def _in_task(frame: FrameType) -> bool | None:
    """Return whether `frame` is called by a task of a pool of processes.

    Returns False during the initializer of the pool, and None outside of a pool.
    """
    for caller in frames(frame):
        variable = _POOLS.get((caller.f_globals.get("__name__", ""), caller.f_code.co_name))
        if variable is not None:
            return caller.f_locals.get(variable) is not None
    return None


_of_recordings: list[Watch] = []


def _begin_in_child() -> None:
    for watch in _of_recordings:
        watch.begin_in_child()


os.register_at_fork(after_in_child=_begin_in_child)


_of_program: dict[int, bool] = {}
_seen: list[CodeType] = []  # keeps code alive, so that Python reuses no address in `_of_program`


def _is_program(code: CodeType) -> bool:
    known = _of_program.get(address(code))
    if known is None:
        file = code.co_filename
        generated = file.startswith("<") and code.co_name.startswith("__")
        known = _of_program[address(code)] = not (generated or is_library(file))
        _seen.append(code)
    return known


def _reader(row: Source, frame: FrameType) -> tuple[FrameType | None, str] | None:
    """Return how the program reads a source: the library's frame, and the program's own line.

    The frame is None if the line calls the source itself. Returns None if a library reads the
    source for itself, and not for the program. `row.through` and `row.by_libraries` define which
    libraries read for the program.
    """
    front, in_library = None, False
    for caller in frames(frame):
        if _is_program(caller.f_code):
            return front, line(caller)
        name = package(caller)
        if name not in FOR_THEMSELVES and row.by_libraries:
            if caller.f_code.co_name == "<module>":
                return None  # the library is being imported
            in_library = True
            if front is None or "<locals>" not in caller.f_code.co_qualname:
                front = caller  # the outermost frame except for decorators of the library
        elif caller.f_globals.get("__name__") in row.through:
            front = caller
        elif not in_library and (row.through != (ANY,) or name in OWN):
            return None
    return None


def _public_name(row: Source, front: FrameType | None) -> str:
    home = front.f_globals.get("__name__") if front is not None else None
    if front is None or home is None or row.through == (ANY,):
        return row.name  # generated code may belong to no module
    if home == row.module == "random":
        return row.name
    *path, function = f"{home}.{front.f_code.co_qualname}".split(".")
    parts = [part for part in path if not part.startswith("_")]
    return ".".join(parts if function.startswith("__") else [*parts, function.lstrip("_")])


def _awaited(row: Source) -> str:
    """Return the module to wait for before `row` is observed: for a part of torch, all of torch."""
    return "torch" if row.module.startswith("torch.") else row.module


def watch_unseeded() -> Watch:
    """Watch draws without a seed; the first worker of a loader prints its draws at once."""
    message = "drew without a seed, in workers: {0} ({0.instead})"
    return Watch(
        UNSEEDED,
        lambda read: note_in_first_worker(f"{read.name} at {read.where}", message.format(read)),
    )


_of_process: list[Watch] = []


def watch_from_the_start(folder: str, *, in_detail: bool) -> None:
    """Watch sources from now on, for a recording of this process in `folder` that begins later."""
    _of_process.append(Watch(EVERY_SOURCE if in_detail else CHEAP_SOURCES, folder=folder))


def watch_for_recording(folder: str, *, in_detail: bool) -> Watch:
    """Return the watch that `watch_from_the_start` has made, or a new watch."""
    if not _of_process:
        watch_from_the_start(folder, in_detail=in_detail)
    return _of_process.pop()
