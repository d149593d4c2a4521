"""Notes which values each line of the program reads and changes, as digests, while it runs.

A process that is recorded in detail does so from its start, in each of its threads and in the
processes that it forks. Each thread has a file of its own in the folder of the recording:

    H  rank, process, thread
    C  number, function, file, kind
                                    code of the program that runs for the first time
    n  code, line, reads, calls     what a line that runs for the first time names; ``iter``, where
                                    it takes the next value of what it does not name
    c  frame, code                  a call of it, which makes a frame
    b  frame, line, values          a line begins; what it reads that this frame has not read so
    e  frame, line, values          that line has ended; what it has changed
    r  frame, line, value           the frame returns or yields, or an exception leaves it
    s  step                         a step has ended
    x  why                          nothing more is noted, or nothing of this step

A value is named as the code names it, as in ``self.index``. Only digests are kept.
"""

from __future__ import annotations

import dis
import inspect
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import IO, Any

from torchrepro.ground.callers import address, is_library
from torchrepro.trace.line_events import report_lines
from torchrepro.trace.value_digest import MISSING, NOTHING, OPAQUE, digest_of, field_of

PREFIX = "lines-"
RETURNED, ITERATES, COROUTINE = "return value", "iter", "coroutine"
SET = b"s"  # ends the digest of a set, of which the order is a part
MOST, LONGEST = 200_000, 30.0  # lines, and seconds in digests, of what a thread does in one step
LONGEST_OF_ONE = 1.0  # seconds in digests of one name of one function in a step; it is then opaque

_SEES_LOCALS = frozenset(("locals", "vars", "dir", "eval", "exec"))
_ITERATING = ("FOR_ITER", "SEND")
_WHOLE = ("<module>", "<lambda>")
_HAS_NAMES = ("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF")
_SETS_NAMES = ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF")

Names = Sequence[tuple[str, ...]]
"""Values as code names them: a variable, and the attributes that lead on from it."""

Scope = tuple[Mapping[str, Any], Mapping[str, Any]]
"""The local and the global variables of a frame."""


@dataclass(slots=True)
class _Code:
    number: int
    reads: dict[int, Names]  # by line
    touches: dict[int, Names]  # what a line reads or sets
    methods: dict[int, Names]  # that a line calls, or looks up
    iterates: frozenset[int]  # lines that take the next value


@dataclass(slots=True)
class _Frame:
    number: int
    code: _Code
    line: int = 0  # that has begun and not ended
    known: dict[tuple[str, ...], bytes] = field(default_factory=dict)


class FollowedLines:
    """Follows the lines of this process, from `begin` to its end, and in what it forks.

    Follows nothing where a debugger, a coverage tool or a profiler follows them already: that one
    stays. A function that asks for its own local variables is left out, since to read them changes
    what it gets. Of all steps, the first one and those of `steps` are followed, with what comes
    before and between them.
    """

    def __init__(self, folder: str, rank: int, steps: tuple[int, int] | None) -> None:
        self._folder, self._rank, self._steps = folder, rank, steps
        self._codes: dict[int, tuple[CodeType, _Code | None]] = {}
        self._step = 0
        self._threads = _Threads(self)
        self.opened = count()  # files

    def begin(self) -> bool:
        """Begin to follow this thread and all that come; return whether nobody else does."""
        if not report_lines(self):
            return False
        os.register_at_fork(after_in_child=self._begin_in_child)
        return True

    def _begin_in_child(self) -> None:
        self._step, self._threads = 0, _Threads(self)

    def step_ended(self, number: int) -> None:
        """Note that a step has ended, on the thread that ended it."""
        self._step = number + 1
        self._threads.own.step_ended(number)

    @property
    def is_wanted(self) -> bool:
        first, last = self._steps or (0, self._step)
        return self._step == 0 or first <= self._step <= last

    # As a `Listener`.

    def begins(self, frame: FrameType) -> bool:
        code = self._code(frame.f_code)
        if code is not None:
            self._threads.own.called(frame, code)
        return code is not None

    def line_begins(self, frame: FrameType) -> None:
        if (code := self._code(frame.f_code)) is not None:
            self._threads.own.line_begins(frame, code)

    def returns(self, frame: FrameType, value: Any) -> None:
        if (code := self._code(frame.f_code)) is not None:
            self._threads.own.returns(frame, code, value)

    def yields(self, frame: FrameType, value: Any) -> None:
        if (code := self._code(frame.f_code)) is not None:
            self._threads.own.yields(frame, code, value)

    def is_left(self, frame: FrameType) -> None:
        self._threads.own.is_left(frame)

    def failed(self, error: Exception) -> None:
        with suppress(Exception):
            self._threads.own.note("x", f"{type(error).__name__}: {error}".splitlines()[0])

    def _code(self, code: CodeType) -> _Code | None:
        """Return what is known of code of the program; None for any other."""
        known = self._codes.get(address(code))
        if known is None:
            its = None
            # A comprehension is a part of the line that it stands on.
            is_part = code.co_name.startswith("<") and code.co_name not in _WHOLE
            is_own = not (is_library(code.co_filename) or code.co_filename.startswith("<"))
            if is_own and not is_part and _SEES_LOCALS.isdisjoint(code.co_names):
                its = _Code(len(self._codes), *_names_by_line(code), _lines_that_iterate(code))
            known = self._codes[address(code)] = code, its  # which keeps the code alive
        return known[1]


class _Threads(threading.local):
    """The notes of each thread of a process."""

    def __init__(self, lines: FollowedLines) -> None:
        self.own = _Thread(lines)


class _Thread:
    """What one thread notes."""

    def __init__(self, lines: FollowedLines) -> None:
        self._lines = lines
        self._frames: dict[int, _Frame] = {}
        self._calls = 0
        self._written: set[Any] = set()  # codes, and lines of them
        self._file: IO[str] | None = None
        self._noted, self._seconds = 0, 0.0
        self._spent: dict[tuple[int, tuple[str, ...]], float] = {}  # seconds, by code and name
        self._rests = False

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()

    def called(self, frame: FrameType, code: _Code) -> None:
        if self._rests:
            return
        if frame.f_lasti > 0 and id(frame) in self._frames:
            return  # a generator that goes on
        self._calls += 1
        self._frames[id(frame)] = _Frame(self._calls, code)
        if code.number not in self._written:
            self._written.add(code.number)
            its = frame.f_code
            kind = COROUTINE if its.co_flags & inspect.CO_COROUTINE else ""
            self.note("C", code.number, its.co_qualname, its.co_filename, kind)
        self.note("c", self._calls, code.number)

    def line_begins(self, frame: FrameType, code: _Code) -> None:
        if self._is_resting():
            return
        its, number = self._frame(frame, code), frame.f_lineno
        touched = code.touches.get(its.line, ()) if its.line else ()
        reads = code.reads.get(number, ())
        now = self._digests(frame, [*touched, *reads])
        self._ended(its, touched, now)
        if (code.number, number) not in self._written:
            self._written.add((code.number, number))
            methods, scope = code.methods.get(number, ()), (frame.f_locals, frame.f_globals)
            alone = [name for name in reads if name not in {each[:-1] for each in methods}]
            called = [_called(scope, name) for name in (*alone, *methods)]
            called += [ITERATES] if number in code.iterates else []
            names = " ".join(".".join(name) for name in reads)
            self.note("n", code.number, number, names, " ".join(filter(None, called)))
        self._note_values("b", its, number, reads, now)
        its.line = number

    def returns(self, frame: FrameType, code: _Code, value: Any) -> None:
        self.yields(frame, code, value)
        self._frames.pop(id(frame), None)

    def yields(self, frame: FrameType, code: _Code, value: Any) -> None:
        if self._is_resting():
            return
        its = self._frame(frame, code)
        touched = code.touches.get(its.line, ()) if its.line else ()
        now = self._digests(frame, touched)
        self._ended(its, touched, now)
        began = time.perf_counter()
        digest = _digest(value)
        self._seconds += time.perf_counter() - began
        self.note("r", its.number, frame.f_lineno, f"{RETURNED}={digest.hex()}")
        if not frame.f_code.co_flags & inspect.CO_COROUTINE:
            its.line = 0  # a line that awaits goes on afterwards

    def is_left(self, frame: FrameType) -> None:
        its = self._frames.pop(id(frame), None)
        if its is not None:
            self.note("r", its.number, frame.f_lineno)

    def step_ended(self, number: int) -> None:
        self._noted, self._seconds, self._rests = 0, 0.0, False
        self._spent.clear()
        self.note("s", number)
        if not self._lines.is_wanted:
            self._rest()

    def _frame(self, frame: FrameType, code: _Code) -> _Frame:
        its = self._frames.get(id(frame))
        if its is None:  # it was called before lines were followed
            self.called(frame, code)
            its = self._frames[id(frame)]
        return its

    def _is_resting(self) -> bool:
        if not self._rests and (self._noted > MOST or self._seconds > LONGEST):
            much = "lines" if self._noted > MOST else "seconds"
            self.note("x", f"more than {MOST if much == 'lines' else LONGEST:,} {much} in a step")
            self._rest()
        return self._rests

    def _rest(self) -> None:
        self._rests = True
        self._frames.clear()  # what is known of them will no longer be true

    def _ended(self, its: _Frame, touched: Names, now: dict[tuple[str, ...], bytes]) -> None:
        if its.line:
            self._note_values("e", its, its.line, touched, now)

    def _digests(self, frame: FrameType, names: Names) -> dict[tuple[str, ...], bytes]:
        found = dict[tuple[str, ...], bytes]()
        scope = frame.f_locals, frame.f_globals  # Python makes the first anew each time
        for name in names:
            if name in found:
                continue
            key, began = (address(frame.f_code), name), time.perf_counter()
            spent = self._spent.get(key, 0.0)
            value = _value(scope, name)
            if value is MISSING or _is_ours(value) or _is_of_library(scope, name):
                found[name] = NOTHING
            else:
                found[name] = OPAQUE if spent > LONGEST_OF_ONE else _digest(value)
            del value
            took = time.perf_counter() - began
            self._spent[key] = spent + took
            self._seconds += took
        return found

    def _note_values(
        self, kind: str, its: _Frame, line: int, names: Names, now: dict[tuple[str, ...], bytes]
    ) -> None:
        """Note what is not known of some names, and in any case that a line begins."""
        new = [name for name in names if now[name] != its.known.get(name, NOTHING)]
        its.known.update((name, now[name]) for name in new)
        if new or kind == "b":
            values = (f"{'.'.join(name)}={now[name].hex()}" for name in dict.fromkeys(new))
            self.note(kind, its.number, line, *values)

    def note(self, *values: Any) -> None:
        if self._file is None:
            self._file = self._open()
        self._noted += 1
        self._file.write("\t".join(map(str, values)) + "\n")

    def _open(self) -> IO[str]:
        process = sys.modules.get("multiprocessing.process")
        name = process.current_process().name if process is not None else "MainProcess"
        path = Path(self._lines._folder) / f"{PREFIX}{os.getpid()}-{next(self._lines.opened)}"  # noqa: SLF001
        # By lines, as a worker may end without closing its files.
        file = path.open("a", 1, encoding="utf-8", errors="surrogateescape")
        thread = threading.current_thread().name
        file.write(f"H\t{self._lines._rank}\t{name}\t{thread}\n")  # noqa: SLF001
        return file


def _digest(value: Any) -> bytes:
    digest = digest_of(value)
    is_set = type(value) in (set, frozenset) and digest != OPAQUE
    return digest + SET if is_set else digest


def _value(scope: Scope, name: tuple[str, ...]) -> Any:
    """Return the value that a name stands for, or the object whose property it is."""
    first, *rest = name
    known, everywhere = scope
    value = known[first] if first in known else everywhere.get(first, MISSING)
    for each in rest:
        its = field_of(value, each)
        if its is MISSING:
            break
        value = its
    return value


def _called(scope: Scope, name: tuple[str, ...]) -> str:
    """Return what of a library a name stands for, as in ``polars.DataFrame.group_by``."""
    value, holder = _value(scope, name), _value(scope, name[:-1]) if name[1:] else MISSING
    kind = type(value)
    if value is MISSING or kind is ModuleType or kind in _PLAIN:
        return ""
    is_class = issubclass(kind, type)
    is_code = is_class or kind in _CODE or _is_ours(value)
    used = "" if is_code else next(_in_call(kind), "")
    if value is holder:  # a method, or a property, of its class
        (module, inside), used = _name_of(kind), f".{name[-1]}"
    elif not (is_code or used):
        return ""
    elif type(holder) is ModuleType:
        module, inside, used = holder.__name__, name[-1], ""
    elif is_code and not is_class:
        module, inside = value.__module__, value.__qualname__
    else:
        module, inside = _name_of(value if is_class else kind)
    if not isinstance(module, str) or not is_library(_file_of(module)):
        return ""
    return f"{module.partition('.')[0]}.{inside}{used}"


def _name_of(kind: type) -> tuple[Any, Any]:
    # Not by the class itself, whose own class may be the program's.
    return tuple(type.__getattribute__(kind, name) for name in ("__module__", "__qualname__"))


def _in_call(kind: type) -> Iterator[str]:
    """Yield how an object of a class may be used without the name of a method."""
    for each in type.__getattribute__(kind, "__mro__"):
        own = type.__getattribute__(each, "__dict__")
        yield from (f".{name}" for name in ("__call__", "__iter__") if name in own)


def _is_of_library(scope: Scope, name: tuple[str, ...]) -> bool:
    """Whether a name leads on from a module of a library, as ``np.pi`` does."""
    if not name[1:]:
        return False
    module = _value(scope, name[:1])
    return type(module) is ModuleType and is_library(_file_of(module.__name__))


def _is_ours(value: Any) -> bool:
    """Whether it stands in for a function that is listened to, with the names of that one."""
    return type(value).__module__ == "torchrepro.seeding.observed_calls"


def _file_of(module: str) -> str:
    file = getattr(sys.modules.get(module), "__file__", None)
    return file if isinstance(file, str) else ""


_PLAIN = (str, bytes, list, tuple, dict, set, frozenset, range)
_CODE = (FunctionType, BuiltinFunctionType, MethodType)


def _names_by_line(code: CodeType) -> tuple[dict[int, Names], dict[int, Names], dict[int, Names]]:
    """Return what each line reads, what it reads or sets, and the methods that it looks up."""
    reads, touches, methods = (defaultdict[int, dict[tuple[str, ...], None]](dict) for _ in "123")
    path: tuple[str, ...] = ()
    is_first = False  # whether the line reads it now for the first time

    def only_leads_on() -> None:
        if is_first:
            del reads[line][path], touches[line][path]

    for line, name, operation in _operations(code):
        if operation == "load" or (operation == "attribute" and path):
            if operation == "attribute":
                only_leads_on()
            path = (*path, name) if operation == "attribute" else (name,)
            is_first = path not in reads[line]
            reads[line][path] = touches[line][path] = None
        elif operation == "method" and path:
            methods[line][(*path, name)] = None
            path = ()
        else:
            if operation == "set":
                touches[line][(name,)] = None
            elif operation == "set attribute" and path:
                only_leads_on()
                touches[line][(*path, name)] = None
            path = ()
    its = ({line: tuple(names) for line, names in of.items()} for of in (reads, touches, methods))
    return tuple(its)  # type: ignore[return-value]


def _lines_that_iterate(code: CodeType) -> frozenset[int]:
    its = (each.positions for each in dis.get_instructions(code) if each.opname in _ITERATING)
    return frozenset(each.lineno for each in its if each is not None and each.lineno is not None)


def _operations(code: CodeType) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the name and the kind of what code does with names, in its order."""
    line = code.co_firstlineno
    own = set[tuple[int, str]]()  # variables of a comprehension that has no frame, by its lines
    for each in dis.get_instructions(code):
        line = (each.positions.lineno if each.positions else None) or line
        given = each.argval if isinstance(each.argval, tuple) else (each.argval,)
        if each.opname == "LOAD_FAST_AND_CLEAR":
            end = (each.positions and each.positions.end_lineno) or line
            own.update((number, each.argval) for number in range(line, end + 1))
        names = [name for name in given if (line, name) not in own]
        if each.opname.startswith(_HAS_NAMES):
            yield from ((line, name, "load") for name in names)
        elif each.opname.startswith(_SETS_NAMES):
            yield from ((line, name, "set") for name in names)
        elif each.opname == "LOAD_METHOD" or "NULL|self" in each.argrepr:
            yield line, each.argval, "method"
        elif each.opname in ("LOAD_ATTR", "STORE_ATTR"):
            yield line, each.argval, "attribute" if each.opname == "LOAD_ATTR" else "set attribute"
        elif each.opname not in _SILENT:
            yield line, "", ""


_SILENT = ("CACHE", "PUSH_NULL", "PRECALL", "NOP", "EXTENDED_ARG")


def follow(folder: str, steps: tuple[int, int] | None, environment: Mapping[str, str]) -> None:
    """Follow the lines of this process from now on, as part of the recording in `folder`."""
    rank = environment.get("RANK", "0")
    lines = FollowedLines(folder, int(rank) if rank.isdecimal() else 0, steps)
    if lines.begin():
        _followed.append(lines)


def step_ended(number: int) -> None:
    """Note that a step of the recording has ended, on the thread that has ended it."""
    for lines in _followed:
        lines.step_ended(number)


_followed: list[FollowedLines] = []  # one, from the start of a process to its end
