"""Who reads what no seed controls: lines of a program, its forked children, and files.

A watch notes the first read of each source at each line of the program. A generator that is made
without a seed is a read once it draws before it is seeded. One that a library makes is noted at the
line of the program that called the library, by the name of the library's function; not if it is
made as the library is imported, or by a package that needs it for purposes of its own. Other calls
of libraries are not noted, but for those that `uuid` or `glob` make for the program. Forked
children tell what they read, and what they draw where chance decides which numbers they get.

Not seen is what does not go through an attribute that can be replaced:

- a name imported before the watch began (``from os import urandom``), and a method bound before it;
- types written in C: ``datetime.now``, ``torch.Generator().seed()``; those of numpy, as
  ``SeedSequence()``, are known by the text of the line alone;
- the order of a set, and the hash or address by which a container finds its entries;
- what a library draws from a global generator or from a copy of one without a seed, what code that
  torch.compile has compiled does, and processes that are neither forked nor recorded.
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
    ENTROPY,
    EVERY_SOURCE,
    FILE_IF_THERE,
    FOR_THEMSELVES,
    FORKED,
    FORKED_DRAWS,
    GIVEN_SEED,
    GIVEN_SEEDS,
    IF_THERE,
    MADE_BY_NUMPY,
    OWN_GENERATOR,
    UNSEEDED,
    WITHOUT_COST,
    WITHOUT_SEED,
    Source,
)
from torchrepro.seeding.observed_calls import Change, Listener, listen, put_by_name, stop_listening
from torchrepro.seeding.seeding_calls import FUNCTIONS, OWN, SeedingCall, say_in_first_worker
from torchrepro.seeding.streams import present_worker
from torchrepro.seeding.unseeded_generators import UnseededGenerators

if TYPE_CHECKING:
    from torchrepro.seeding.nondeterministic_calls import Arguments

_MANY = 1000  # lines, and files, above which no further one is noted
_FEW_SEEDS = 100  # that a child tells of a line; those of more than that are not compared
_POOLS = {  # functions that run the tasks of a pool, and the variable that holds one
    ("multiprocessing.pool", "worker"): "task",
    ("concurrent.futures.process", "_process_worker"): "call_item",
}
_LARGEST = 1 << 20  # bytes above which nothing more is told, and nothing is read
_FEW_FILES = 50  # that are noted of one line for one use
_TICK = 0.01  # seconds by which the time of a change may lie before the clock that a program reads

_USING = (
    *(("builtins", "open"), ("io", "open")),
    *(("os.path", name) for name in ("exists", "isfile", "getmtime")),
    *(("pathlib", f"Path.{name}") for name in ("exists", "is_file")),
)
_USING_LATE = {"torch": "save", "sqlite3": "connect"}  # once they are imported
_STAND_INS = "torchrepro.seeding.observed_calls"
_CODE = (".py", ".pyc", ".pyi", ".so", ".pyd", ".dll")
_OF_THE_SYSTEM = ("/proc/", "/dev/", "/sys/")


@dataclass(slots=True)
class SourceRead:
    """A line of the program that has read a source."""

    name: str
    what: str
    where: str  # ``file:line``
    times: int
    step: int  # that was running at the first read; -1 before torch was imported
    record: int  # how many records had been taken by then
    value: str | None  # the seed that was given; None for a read
    instead: str
    in_sample: bool  # whether a loader was loading a sample

    def to_json(self) -> dict[str, Any]:
        """Return the read as plain JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        return str(SeedingCall(self.name, self.value or "", self.where, self.times))


def seed_of_generator(where: str, step: int, record: int, seed: str) -> SourceRead:
    """Return the seed of a generator from which a line draws, as a seed that the program gives."""
    first = 1, step, record, seed, GIVEN_SEEDS[0].instead
    return SourceRead(OWN_GENERATOR, GIVEN_SEED, where, *first, in_sample=False)


class ChildNotes:
    """A file in the folder of a recording that all children of this process append to.

    They are forked, or started by multiprocessing, whose first program names its module. The file
    has one JSON line for each note, and exists from the first one until they are taken. Only the
    process that made this takes them.
    """

    def __init__(self, folder: str) -> None:
        # Whether this process began as a child of the one that is recorded.
        spawned = any("multiprocessing.spawn" in each for each in sys.orig_argv)
        self.is_spawned = spawned or comes_from_fork_server()
        self._process = os.getppid() if self.is_spawned else os.getpid()
        self._path = Path(folder) / f"told-{self._process}.jsonl"

    @property
    def in_child(self) -> bool:
        return os.getpid() != self._process

    def tell(self, kind: str, **fields: Any) -> None:
        """Append a note; a child that cannot, or comes too late, tells nothing."""
        text = json.dumps({"kind": kind, **fields}) + "\n"
        with suppress(OSError):
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                if os.lseek(file, 0, os.SEEK_END) < _LARGEST:
                    os.write(file, text.encode())
            finally:
                os.close(file)

    def take(self) -> list[dict[str, Any]]:
        """Return all notes and remove them; a line that a child has not finished is left out.

        A child has none to take.
        """
        found: list[dict[str, Any]] = []
        if self.in_child:
            return found
        with suppress(OSError):
            lines = self._path.read_bytes()[: 2 * _LARGEST].splitlines()
            self._path.unlink()
            for line in lines:
                with suppress(ValueError):
                    found.append(json.loads(line))
        return found


@dataclass(slots=True)
class FileUse:
    """A file, and where the program first asked for it, read it and wrote it: ``file:line``."""

    path: str
    asked: str = ""
    read: str = ""
    written: str = ""
    changed: float = 0.0  # when it had been, in seconds since 1970, as the program first read it


class FileUses:
    """Notes the files that the program itself asks for, reads and writes, until it stops.

    A file that one run writes and the next one reads makes them differ. Noted are calls of `open`,
    of `torch.save` and `sqlite3.connect`, which do without it, and of functions that say whether a
    file exists; those of a library count for the line of the program that called the library. Code
    is left out, and what libraries keep beside it. What extensions written in C open by themselves
    is not seen.
    """

    def __init__(self, told: ChildNotes) -> None:
        self.began = time.time() - _TICK
        self._told = told
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
        return {"files": [asdict(each) for each in self._files.values()], "began": self.began}

    def reads(self) -> list[SourceRead]:
        """Return the files that the program asked for and read, as an earlier run had left them."""
        first = 1, -1, 0, None, FILE_IF_THERE.instead
        return [
            SourceRead(Path(each.path).name, IF_THERE, each.read, *first, in_sample=False)
            for each in self._files.values()
            if each.asked and each.read and each.changed < self.began
        ]

    def _note(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType
    ) -> None:
        def given(position: int, keyword: str) -> Any:
            return args[position] if len(args) > position else kwargs.get(keyword)

        if name == "sqlite3.connect":
            for use in ("written", "read"):  # which of them SQLite does is not heard
                self._note_use(use, given(0, "database"), frame)
        elif name == "torch.save":
            self._note_use("written", given(1, "f"), frame)
        elif name.endswith(".open"):
            mode = set(str(given(1, "mode") or "r"))
            if not mode & set("wax"):
                self._note_use("read", given(0, "file"), frame)
            if mode & set("wax+"):
                self._note_use("written", given(0, "file"), frame)
        else:
            self._note_use("asked", given(0, "path"), frame)

    def _note_use(self, use: str, target: Any, frame: FrameType) -> None:
        # A library may ask for files of its own; what it reads, it reads for the program.
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
        for each in frames(frame):
            if not is_library(each.f_code.co_filename):
                break
            if package(each) == "torchrepro" and each.f_globals["__name__"] != _STAND_INS:
                return
        else:
            return
        where = line(each)
        if self._of_line[where, use] >= _FEW_FILES:
            return
        changed = os.stat(path).st_mtime if use == "read" else 0.0  # noqa: PTH116 - a text
        if self.add(path, use, where, changed) and self._told.in_child:
            self._told.tell("file", path=path, use=use, where=where, changed=changed)

    def add(self, path: str, use: str, where: str, changed: float) -> bool:
        """Note a `use` of a file, by this process or a child; return whether that is new."""
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
    """Notes the first read of each of some sources at each line of the program, until it stops.

    With a `folder`, that of a recording, forked children tell there what they read, and the
    program's files are noted as well.
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
        self._seeds: dict[tuple[str, bool, str], set[str]] = {}  # given at one line by children
        self._seeded: set[str] = set()  # modules whose generators a forked child seeds
        self._unseeded = UnseededGenerators()
        self._follows_states = False  # whether what a `RandomState` makes is known
        self._state_made: SourceRead | None = None  # by a `RandomState` whose generator comes next
        self._undo = ExitStack()
        self._listeners = {row: self._listener(row) for row in rows}
        self._waiting = AfterImport(map(_awaited, rows), self._listen_to)
        self._waiting.watch_all()
        self._told = ChildNotes(folder) if folder is not None else None
        self.files: FileUses | None = None
        if self._told is not None:
            self.files = FileUses(self._told)
            _of_recordings.append(self)
            if self._told.is_spawned:
                self.begin_in_child()

    def reads(self) -> tuple[SourceRead, ...]:
        """Return what was read up to now, in the order of the first reads.

        A generator has the position at which it was made. What children have told comes last. What
        several of them gave as a seed is one text.
        """
        for note in self._told.take() if self._told is not None else ():
            if note.pop("kind") == "read":
                self._add_told(SourceRead(**note))
            elif self.files is not None:
                self.files.add(**note)
        for key, values in self._seeds.items():
            first, *others = sorted(values)
            digest = blake2b(repr([first, *others]).encode(), digest_size=4).hexdigest()
            together = f"{first} and {len(others)} more #{digest}" if others else first
            self._reads[key].value = together if len(values) <= _FEW_SEEDS else ""
        self._unseeded.settle()
        reads = [read for read in self._reads.values() if read.times]
        return (*reads, *(self.files.reads() if self.files is not None else ()))

    def stop(self) -> None:
        """Note nothing more; every function is then the one that it was."""
        self._waiting.unwatch()
        self._undo.close()
        self._unseeded.stop()
        for listener in self._listeners.values():
            stop_listening(listener)
        if self.files is not None:
            self.files.stop()
            _of_recordings.remove(self)

    def begin_in_child(self) -> None:
        """Listen to draws as well, in a child that has just begun."""
        self._reads = {key: read for key, read in self._reads.items() if read.value is None}
        self._seeded.clear()
        more = {row: self._listener(row) for row in FORKED_DRAWS if row not in self._listeners}
        self._listeners |= more
        for row, listener in more.items():
            if row.module in sys.modules:  # others once they are imported: a fork imports nothing
                listen(row.module, row.attribute, listener)
        put_by_name(more.values())

    def _listen_to(self, module: str) -> None:
        if module == "numpy.random" and any(row.what == ENTROPY for row in self._listeners):
            self._listen_to_types_of_numpy()
        for row, listener in self._listeners.items():
            if _awaited(row) == module:
                listen(row.module, row.attribute, listener)

    def _listen_to_types_of_numpy(self) -> None:
        # They draw from the system also where they are given a seed: what they draw is theirs then.
        module: Any = sys.modules.get("numpy.random.bit_generator")
        original = getattr(module, "randbits", None)
        if original is None:
            return
        # Private, because numpy tells nobody what a `RandomState` makes. Where it is gone, one that
        # is given no seed counts as it is made.
        legacy: Any = sys.modules.get("numpy.random.mtrand")
        twister: Any = getattr(legacy, "_MT19937", None)

        def randbits(size: int) -> Any:
            drawn = original(size)
            caller = next(each for each in frames() if each.f_globals["__name__"] != __name__)
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
                self._unseeded.settle()  # `RandomState.seed` asks before it seeds
                return isinstance(value, twister)

        patch(self._undo, module, "randbits", randbits, original)
        if twister is not None:
            self._follows_states = True
            patch(self._undo, legacy, "_MT19937", OfRandomState("MT19937", (), {}), twister)

    def _listener(self, row: Source) -> Listener:
        function = f"{row.module}.{row.attribute}"
        generator = row.module.removesuffix(".random")
        seeds = row.what == GIVEN_SEED and (row.module, row.attribute) in FUNCTIONS

        def listener(
            name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType
        ) -> Change | None:
            ours = package(frame) == "torchrepro"  # a profile seeds every child alike
            if seeds and self._in_child and not ours and _in_task(frame) is not False:
                self._seeded.add(generator)
            if name != function:
                return None  # it has a row by another name
            arguments = args, kwargs
            if row.what == FORKED and not self._chance_decides(generator, frame, listener):
                return None
            reader = _reader(row, frame)
            if reader is None or not row.applies(arguments):
                return None
            if row.what == FORKED:
                stop_listening(listener)  # the first line says it, and draws are many
            return self.heard(row, arguments, *reader)

        return listener

    @property
    def _in_child(self) -> bool:
        return self._told is not None and self._told.in_child

    def _chance_decides(self, generator: str, frame: FrameType, listener: Listener) -> bool:
        # Which numbers a child draws: Python has seeded its `random` anew where it was forked, and
        # which of a pool's workers takes which task is a matter of timing. A loader decides by the
        # sample.
        if generator in self._seeded:
            return False
        seeded_anew: tuple[str, ...] = ("random",)
        if self._told is not None and self._told.is_spawned:  # a profile seeds all that it starts
            seeded_anew = () if os.environ.get("TORCHREPRO_PROFILE") else ("random", "numpy")
        by_chance = generator in seeded_anew or _in_task(frame) is not None
        if present_worker() is None and by_chance:
            return True
        stop_listening(listener)
        return False

    def heard(
        self, row: Source, arguments: Arguments, front: FrameType | None, where: str
    ) -> Change | None:
        """Note a call that a line of the program made, through `front` if a library made it."""
        name, value = _public_name(row, front), row.value(arguments)
        key = name, value is None, where
        read = self._reads.get(key)
        if read is None or (self._in_child and value is not None):
            if len(self._reads) >= _MANY:
                return None
            step, record = self.position()
            read = self._reads[key] = SourceRead(
                name=name,
                what=row.what,
                where=where,
                times=0,
                step=step,
                record=record,
                value=value,
                in_sample=(loading := in_loader() or present_worker() is not None),
                instead=row.edit(name, in_sample=loading),
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
        # A child tells every seed that is given at a line, up to some.
        key = read.name, read.value is None, read.where
        in_child, value = self._in_child, read.value or ""
        given = self._seeds.setdefault(key, set()) if in_child and value else set()
        if self._told is None or not in_child:
            self._on_first(read)
        elif value not in given and len(given) <= _FEW_SEEDS:
            given.add(value)
            self._told.tell("read", **read.to_json())

    def _add_told(self, read: SourceRead) -> None:
        key = read.name, read.value is None, read.where
        if key not in self._reads and len(self._reads) >= _MANY:
            return
        known = self._reads.setdefault(key, read)
        if known is not read:
            known.times += 1
        if read.value is not None:
            self._seeds.setdefault(key, {known.value or ""}).add(read.value)


def _in_task(frame: FrameType) -> bool | None:
    """Whether a worker of a pool runs a task, and not its initializer; None outside of a pool."""
    for each in frames(frame):
        task = _POOLS.get((each.f_globals.get("__name__", ""), each.f_code.co_name))
        if task is not None:
            return each.f_locals.get(task) is not None
    return None


_of_recordings: list[Watch] = []


def _begin_in_child() -> None:
    for watch in _of_recordings:
        watch.begin_in_child()


os.register_at_fork(after_in_child=_begin_in_child)


_of_program: dict[int, bool] = {}
_seen: list[CodeType] = []  # keeps alive what `_of_program` is about: no address has two meanings


def _is_program(code: CodeType) -> bool:
    known = _of_program.get(address(code))
    if known is None:
        file = code.co_filename
        generated = file.startswith("<") and code.co_name.startswith("__")
        known = _of_program[address(code)] = not (generated or is_library(file))
        _seen.append(code)
    return known


def _reader(row: Source, frame: FrameType) -> tuple[FrameType | None, str] | None:
    """Return the line of the program that reads a source, and the code through which it does.

    None where code reads it for purposes of its own: the innermost that is not there to be called
    through decides that.
    """
    front, in_library = None, False
    for each in frames(frame):
        if _is_program(each.f_code):
            return front, line(each)
        name = package(each)
        if name not in FOR_THEMSELVES and row.by_libraries:
            if each.f_code.co_name == "<module>":
                return None  # as it is imported
            in_library = True
            if front is None or "<locals>" not in each.f_code.co_qualname:
                front = each  # the outermost that is no decorator of the library
        elif each.f_globals.get("__name__") in row.through:
            front = each
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
    # After whose import the function is there, and torch is complete.
    return "torch" if row.module.startswith("torch.") else row.module


def watch_unseeded() -> Watch:
    """Watch what draws without a seed; in workers of a loader the first of them says it."""
    said = "drew without a seed, in workers: {0} ({0.instead})"
    return Watch(
        UNSEEDED,
        lambda read: say_in_first_worker(f"{read.name} at {read.where}", said.format(read)),
    )


_of_process: list[Watch] = []


def watch_from_the_start(folder: str, *, in_detail: bool) -> None:
    """Watch sources from now on, for the recording of this process in `folder` that is to come."""
    _of_process.append(Watch(EVERY_SOURCE if in_detail else WITHOUT_COST, folder=folder))


def watch_for_recording(folder: str, *, in_detail: bool) -> Watch:
    """Return the watch that was begun for the recording of this process, or a new one."""
    if not _of_process:
        watch_from_the_start(folder, in_detail=in_detail)
    return _of_process.pop()
