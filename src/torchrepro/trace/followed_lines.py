"""Notes digests of the values that each line of the program reads and changes, while it runs.

Used in recordings with `detail`, from the start of a process, in all threads of the process and in
its forked children. Each thread writes its own file, with these lines, into the recording's folder:

    H  rank, process, thread
    C  number, function, file, kind
                                    a code object of the program, at its first run
    n  code, line, reads, calls     the names in a line, at the first run of the line; calls has
                                    ``iter`` if the line advances an iterator without a name
    c  frame, code                  a call of the code, which creates a frame
    b  frame, line, values          a line begins: values it reads, if new or changed in the frame
    e  frame, line, values          a line has ended: the values that it has changed
    r  frame, line, value           the frame returns or yields, or an exception leaves it
    s  step                         a step has ended
    x  why                          noting has stopped, for good or until the step ends

Values are named as in the code, for example ``self.index``. Only digests of values are stored.
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
SET = b"s"  # the end of the digest of a set, which includes the order of its elements
MOST, LONGEST = 200_000, 30.0  # limits of a thread in one step: lines, and seconds in digests
LONGEST_OF_ONE = 1.0  # seconds in digests of one name in one step; then the name is opaque

_READS_LOCALS = frozenset(("locals", "vars", "dir", "eval", "exec"))
_ITERATING = ("FOR_ITER", "SEND")
_WHOLE = ("<module>", "<lambda>")
_HAS_NAMES = ("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF")
_SETS_NAMES = ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF")

Names = Sequence[tuple[str, ...]]
"""Names of values as in the code: a variable, followed by attributes."""

Digests = dict[tuple[str, ...], bytes]
"""Digests of values by their names."""

Scope = tuple[Mapping[str, Any], Mapping[str, Any]]
"""The local and the global variables of a frame."""


@dataclass(slots=True)
class _Code:
    number: int
    reads: dict[int, Names]  # by line
    touches: dict[int, Names]  # by line: the names that it reads or sets
    methods: dict[int, Names]  # by line: the methods that it calls or looks up
    iterates: frozenset[int]  # lines that advance an iterator


@dataclass(slots=True)
class _Frame:
    number: int
    code: _Code
    line: int = 0  # the running line
    known: Digests = field(default_factory=dict)  # the last digest of each name


class FollowedLines:
    """Follows the lines that this process and its forked children run after `begin`.

    Follows nothing if a debugger, a coverage tool or a profiler already traces the process. Skips
    functions that may read their own `locals()`, because reading them here would change the result.
    Always follows the first step of the run and the lines before it. From then on, follows the
    steps in the range `steps`, or every step without a range.
    """

    def __init__(self, folder: str, rank: int, steps: tuple[int, int] | None) -> None:
        self._folder, self._rank, self._steps = folder, rank, steps
        self._codes: dict[int, tuple[CodeType, _Code | None]] = {}
        self._step = 0
        self._by_thread = _NotesByThread(self)
        self.opened = count()  # numbers of files

    def begin(self) -> bool:
        """Start to follow this and later threads. Return False if another tool traces them."""
        if not report_lines(self):
            return False
        os.register_at_fork(after_in_child=self._begin_in_child)
        return True

    def _begin_in_child(self) -> None:
        self._step, self._by_thread = 0, _NotesByThread(self)

    def step_ended(self, number: int) -> None:
        """Note that step `number` has ended. Call this on the thread that ended the step."""
        self._step = number + 1
        self._by_thread.notes.step_ended(number)

    @property
    def is_wanted(self) -> bool:
        first, last = self._steps or (0, self._step)
        return self._step == 0 or first <= self._step <= last

    # The methods of a `Listener`.
    def begins(self, frame: FrameType) -> bool:
        code = self._code(frame.f_code)
        if code is not None:
            self._by_thread.notes.called(frame, code)
        return code is not None

    def line_begins(self, frame: FrameType) -> None:
        if (code := self._code(frame.f_code)) is not None:
            self._by_thread.notes.line_begins(frame, code)

    def returns(self, frame: FrameType, value: Any) -> None:
        if (code := self._code(frame.f_code)) is not None:
            self._by_thread.notes.returns(frame, code, value)

    def yields(self, frame: FrameType, value: Any) -> None:
        if (code := self._code(frame.f_code)) is not None:
            self._by_thread.notes.yields(frame, code, value)

    def is_left(self, frame: FrameType) -> None:
        self._by_thread.notes.is_left(frame)

    def failed(self, error: Exception) -> None:
        with suppress(Exception):
            self._by_thread.notes.note("x", f"{type(error).__name__}: {error}".splitlines()[0])

    def _code(self, code: CodeType) -> _Code | None:
        """Return the facts about code of the program, or None for code that is not followed."""
        known = self._codes.get(address(code))
        if known is None:
            facts = None
            # A comprehension is part of the line that contains it.
            is_comprehension = code.co_name.startswith("<") and code.co_name not in _WHOLE
            is_of_program = not (is_library(code.co_filename) or code.co_filename.startswith("<"))
            if is_of_program and not is_comprehension and _READS_LOCALS.isdisjoint(code.co_names):
                facts = _Code(len(self._codes), *_names_by_line(code), _lines_that_iterate(code))
            known = self._codes[address(code)] = code, facts  # keeps the code alive
        return known[1]


class _NotesByThread(threading.local):
    """Gives each thread its own `_ThreadNotes`, in the attribute `notes`."""

    def __init__(self, lines: FollowedLines) -> None:
        self.notes = _ThreadNotes(lines)


class _ThreadNotes:
    """Writes the notes of one thread to a file."""

    def __init__(self, lines: FollowedLines) -> None:
        self._lines = lines
        self._frames: dict[int, _Frame] = {}
        self._calls = 0
        self._written: set[Any] = set()  # numbers of code, and its lines
        self._file: IO[str] | None = None
        self._noted, self._seconds = 0, 0.0
        self._spent: dict[tuple[int, tuple[str, ...]], float] = {}  # seconds, by code and name
        self._is_paused = False

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()

    def called(self, frame: FrameType, code: _Code) -> None:
        if self._is_paused:
            return
        if frame.f_lasti > 0 and id(frame) in self._frames:
            return  # a generator that resumes
        self._calls += 1
        self._frames[id(frame)] = _Frame(self._calls, code)
        if code.number not in self._written:
            self._written.add(code.number)
            python_code = frame.f_code
            suffix = COROUTINE if python_code.co_flags & inspect.CO_COROUTINE else ""
            self.note("C", code.number, python_code.co_qualname, python_code.co_filename, suffix)
        self.note("c", self._calls, code.number)

    def line_begins(self, frame: FrameType, code: _Code) -> None:
        if self._pauses_at_limit():
            return
        followed, number = self._frame(frame, code), frame.f_lineno
        touched = code.touches.get(followed.line, ()) if followed.line else ()
        reads = code.reads.get(number, ())
        digests = self._digests(frame, [*touched, *reads])
        self._note_end_of_line(followed, touched, digests)
        if (code.number, number) not in self._written:
            self._written.add((code.number, number))
            methods, scope = code.methods.get(number, ()), (frame.f_locals, frame.f_globals)
            objects = {method[:-1] for method in methods}
            plain_reads = [name for name in reads if name not in objects]
            called = [_called(scope, name) for name in (*plain_reads, *methods)]
            called += [ITERATES] if number in code.iterates else []
            names = " ".join(".".join(name) for name in reads)
            self.note("n", code.number, number, names, " ".join(filter(None, called)))
        self._note_values("b", followed, number, reads, digests)
        followed.line = number

    def returns(self, frame: FrameType, code: _Code, value: Any) -> None:
        self.yields(frame, code, value)
        self._frames.pop(id(frame), None)

    def yields(self, frame: FrameType, code: _Code, value: Any) -> None:
        if self._pauses_at_limit():
            return
        followed = self._frame(frame, code)
        touched = code.touches.get(followed.line, ()) if followed.line else ()
        digests = self._digests(frame, touched)
        self._note_end_of_line(followed, touched, digests)
        began = time.perf_counter()
        digest = _digest(value)
        self._seconds += time.perf_counter() - began
        self.note("r", followed.number, frame.f_lineno, f"{RETURNED}={digest.hex()}")
        if not frame.f_code.co_flags & inspect.CO_COROUTINE:
            followed.line = 0  # a line that awaits continues later

    def is_left(self, frame: FrameType) -> None:
        followed = self._frames.pop(id(frame), None)
        if followed is not None:
            self.note("r", followed.number, frame.f_lineno)

    def step_ended(self, number: int) -> None:
        self._noted, self._seconds, self._is_paused = 0, 0.0, False
        self._spent.clear()
        self.note("s", number)
        if not self._lines.is_wanted:
            self._pause()

    def _frame(self, frame: FrameType, code: _Code) -> _Frame:
        followed = self._frames.get(id(frame))
        if followed is None:  # the call came before following began
            self.called(frame, code)
            followed = self._frames[id(frame)]
        return followed

    def _pauses_at_limit(self) -> bool:
        if not self._is_paused and (self._noted > MOST or self._seconds > LONGEST):
            much = "lines" if self._noted > MOST else "seconds"
            self.note("x", f"more than {MOST if much == 'lines' else LONGEST:,} {much} in a step")
            self._pause()
        return self._is_paused

    def _pause(self) -> None:
        self._is_paused = True
        self._frames.clear()  # their digests become outdated

    def _note_end_of_line(self, followed: _Frame, touched: Names, digests: Digests) -> None:
        if followed.line:
            self._note_values("e", followed, followed.line, touched, digests)

    def _digests(self, frame: FrameType, names: Names) -> Digests:
        digests = Digests()
        scope = frame.f_locals, frame.f_globals  # each read of `f_locals` builds a new dict
        for name in names:
            if name in digests:
                continue
            key, began = (address(frame.f_code), name), time.perf_counter()
            spent = self._spent.get(key, 0.0)
            value = _value_of(scope, name)
            if value is MISSING or _is_wrapper(value) or _is_of_library(scope, name):
                digests[name] = NOTHING
            else:
                digests[name] = OPAQUE if spent > LONGEST_OF_ONE else _digest(value)
            del value
            took = time.perf_counter() - began
            self._spent[key] = spent + took
            self._seconds += took
        return digests

    def _note_values(
        self,
        event: str,
        followed: _Frame,
        line: int,
        names: Names,
        digests: Digests,
    ) -> None:
        """Note the values that changed in the frame. Always note that a line begins."""
        new = [name for name in names if digests[name] != followed.known.get(name, NOTHING)]
        followed.known.update((name, digests[name]) for name in new)
        if new or event == "b":
            values = (f"{'.'.join(name)}={digests[name].hex()}" for name in dict.fromkeys(new))
            self.note(event, followed.number, line, *values)

    def note(self, *values: Any) -> None:
        if self._file is None:
            self._file = self._open()
        self._noted += 1
        self._file.write("\t".join(map(str, values)) + "\n")

    def _open(self) -> IO[str]:
        process = sys.modules.get("multiprocessing.process")
        name = process.current_process().name if process is not None else "MainProcess"
        path = Path(self._lines._folder) / f"{PREFIX}{os.getpid()}-{next(self._lines.opened)}"  # noqa: SLF001
        # Buffered by line, because a worker may end without closing its files.
        file = path.open("a", 1, encoding="utf-8", errors="surrogateescape")
        thread = threading.current_thread().name
        file.write(f"H\t{self._lines._rank}\t{name}\t{thread}\n")  # noqa: SLF001
        return file


def _digest(value: Any) -> bytes:
    digest = digest_of(value)
    is_set = type(value) in (set, frozenset) and digest != OPAQUE
    return digest + SET if is_set else digest


def _value_of(scope: Scope, name: tuple[str, ...]) -> Any:
    """Return the value of a name. For a method or property, return the object that has it."""
    variable, *attributes = name
    local_variables, global_variables = scope
    if variable in local_variables:
        value = local_variables[variable]
    else:
        value = global_variables.get(variable, MISSING)
    for attribute in attributes:
        field_value = field_of(value, attribute)
        if field_value is MISSING:
            break
        value = field_value
    return value


def _called(scope: Scope, name: tuple[str, ...]) -> str:
    """Return the library function or method that a name refers to, for example
    ``polars.DataFrame.group_by``. Return an empty string for any other name.
    """
    value, holder = _value_of(scope, name), _value_of(scope, name[:-1]) if name[1:] else MISSING
    type_ = type(value)
    if value is MISSING or type_ is ModuleType or type_ in _PLAIN:
        return ""
    is_class = issubclass(type_, type)
    is_code = is_class or type_ in _CODE or _is_wrapper(value)
    used = "" if is_code else next(_implicit_methods(type_), "")
    if value is holder:  # a method, or a property, of its class
        (module, inside), used = _name_of(type_), f".{name[-1]}"
    elif not (is_code or used):
        return ""
    elif type(holder) is ModuleType:
        module, inside, used = holder.__name__, name[-1], ""
    elif is_code and not is_class:
        module, inside = value.__module__, value.__qualname__
    else:
        module, inside = _name_of(value if is_class else type_)
    if not isinstance(module, str) or not is_library(_file_of(module)):
        return ""
    return f"{module.partition('.')[0]}.{inside}{used}"


def _name_of(type_: type) -> tuple[Any, Any]:
    # Runs no code of a metaclass, because a metaclass may belong to the program.
    return tuple(type.__getattribute__(type_, name) for name in ("__module__", "__qualname__"))


def _implicit_methods(type_: type) -> Iterator[str]:
    """Yield the methods of a class that code can call without naming them, like ``.__iter__``."""
    for base in type.__getattribute__(type_, "__mro__"):
        namespace = type.__getattribute__(base, "__dict__")
        yield from (f".{name}" for name in ("__call__", "__iter__") if name in namespace)


def _is_of_library(scope: Scope, name: tuple[str, ...]) -> bool:
    """Whether a name begins with a module of a library, as ``np.pi`` does."""
    if not name[1:]:
        return False
    module = _value_of(scope, name[:1])
    return type(module) is ModuleType and is_library(_file_of(module.__name__))


def _is_wrapper(value: Any) -> bool:
    """Whether `value` is torchrepro's wrapper of a function that torchrepro observes."""
    return type(value).__module__ == "torchrepro.seeding.observed_calls"


def _file_of(module: str) -> str:
    file = getattr(sys.modules.get(module), "__file__", None)
    return file if isinstance(file, str) else ""


_PLAIN = (str, bytes, list, tuple, dict, set, frozenset, range)
_CODE = (FunctionType, BuiltinFunctionType, MethodType)


def _names_by_line(code: CodeType) -> tuple[dict[int, Names], dict[int, Names], dict[int, Names]]:
    """Map each line to the names that it reads, to all it reads or sets, and to its methods."""
    reads, touches, methods = (defaultdict[int, dict[tuple[str, ...], None]](dict) for _ in "123")
    path: tuple[str, ...] = ()
    is_first = False  # whether the line has not read `path` before

    def forget_prefix() -> None:
        if is_first:
            del reads[line][path], touches[line][path]

    for line, name, operation in _operations(code):
        if operation == "load" or (operation == "attribute" and path):
            if operation == "attribute":
                forget_prefix()
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
                forget_prefix()
                touches[line][(*path, name)] = None
            path = ()
    tables = (reads, touches, methods)
    as_tuples = ({line: tuple(names) for line, names in table.items()} for table in tables)
    return tuple(as_tuples)  # type: ignore[return-value]


def _lines_that_iterate(code: CodeType) -> frozenset[int]:
    instructions = (
        instruction
        for instruction in dis.get_instructions(code)
        if instruction.opname in _ITERATING
    )
    positions = (instruction.positions for instruction in instructions)
    lines = (position.lineno for position in positions if position is not None)
    return frozenset(line for line in lines if line is not None)


def _operations(code: CodeType) -> Iterator[tuple[int, str, str]]:
    """Yield line, name and operation of each instruction. The name and operation may be empty."""
    line = code.co_firstlineno
    inlined = set[tuple[int, str]]()  # lines and variables of comprehensions without a frame
    for instruction in dis.get_instructions(code):
        line = (instruction.positions.lineno if instruction.positions else None) or line
        arguments = (
            instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        )
        if instruction.opname == "LOAD_FAST_AND_CLEAR":
            end = (instruction.positions and instruction.positions.end_lineno) or line
            inlined.update((number, instruction.argval) for number in range(line, end + 1))
        names = [name for name in arguments if (line, name) not in inlined]
        if instruction.opname.startswith(_HAS_NAMES):
            yield from ((line, name, "load") for name in names)
        elif instruction.opname.startswith(_SETS_NAMES):
            yield from ((line, name, "set") for name in names)
        elif instruction.opname == "LOAD_METHOD" or "NULL|self" in instruction.argrepr:
            yield line, instruction.argval, "method"
        elif instruction.opname in ("LOAD_ATTR", "STORE_ATTR"):
            yield (
                line,
                instruction.argval,
                "attribute" if instruction.opname == "LOAD_ATTR" else "set attribute",
            )
        elif instruction.opname not in _SILENT:
            yield line, "", ""


_SILENT = ("CACHE", "PUSH_NULL", "PRECALL", "NOP", "EXTENDED_ARG")


def follow(folder: str, steps: tuple[int, int] | None, environment: Mapping[str, str]) -> None:
    """Follow the lines of this process from now on, for the recording in `folder`."""
    rank = environment.get("RANK", "0")
    lines = FollowedLines(folder, int(rank) if rank.isdecimal() else 0, steps)
    if lines.begin():
        _followed.append(lines)


def step_ended(number: int) -> None:
    """Note that a step of the recording has ended. Call this on the thread that ended the step."""
    for lines in _followed:
        lines.step_ended(number)


_followed: list[FollowedLines] = []  # at most one, until the process ends
