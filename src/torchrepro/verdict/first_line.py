"""The line of a program at which a difference of two runs began.

Two runs that followed their lines (see `trace.followed_lines`) are laid side by side, thread by
thread. From the line of the op that differs, each value that it read is followed back to the line
that set it, until one has read the same in both runs and made another value of it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.trace.followed_lines import COROUTINE, ITERATES, PREFIX, RETURNED, SET
from torchrepro.trace.value_digest import OPAQUE, PARTLY
from torchrepro.verdict.libraries import library_row
from torchrepro.verdict.value import Kind, LineOfOrigin, OpaqueValue

if TYPE_CHECKING:
    from torchrepro.verdict.value import Divergence

BROUGHT_IN = (Kind.DATA, Kind.ARGUMENT, Kind.ONLY_ONE, Kind.INPUT)
"""How runs diverge by what the program itself does, outside of any op."""

_UNKNOWN, _PARTLY, _PARTLY_SET = (text.hex() for text in (OPAQUE, PARTLY, PARTLY + SET))
_WINDOW, _ALIKE = 2000, 3  # lines that are searched for as many in a row that both runs have
_OTHERS = 50  # further values that are followed back
_MAIN = ("MainProcess", "MainThread")

Key = tuple[str, str, str]
"""Rank, process and thread."""


class ProgramLine(NamedTuple):
    """A line of the program as a recording knows it."""

    file: str
    name: str  # of the file, without its folder
    function: str
    number: int

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"

    @property
    def alike(self) -> tuple[Any, ...]:
        """What the line is in any run: the same program may run in another folder."""
        return self[1:]


@dataclass(slots=True)
class Execution:
    """One time that a frame ran a line."""

    line: ProgramLine
    frame: int
    task: tuple[Any, ...]  # the coroutine that it is of; empty outside of any
    step: int
    caller: int  # the number of the execution that called the frame; -1 where no line is known to
    reads: dict[str, str]  # digests as it began
    changes: dict[str, str] = field(default_factory=dict)  # digests as it had ended


@dataclass(slots=True)
class Thread:
    """What one thread of a run has noted."""

    executions: list[Execution] = field(default_factory=list)
    called: dict[ProgramLine, Sequence[str]] = field(default_factory=dict)
    stopped: str = ""  # why lines were not followed to the end


def threads_of(folder: str) -> dict[Key, Thread]:
    """Return what the threads of a run have noted; of two with one name none."""
    found: dict[Key, list[Thread]] = defaultdict(list)
    for path in sorted(Path(folder).glob(f"{PREFIX}*")):
        with path.open(encoding="utf-8", errors="surrogateescape") as lines:
            records = (line.rstrip("\n").split("\t") for line in lines if line.endswith("\n"))
            _, *key = next(records, ["H"])
            try:
                rank, process, thread = key
                found[rank, process, thread].append(_read(records))
            except (ValueError, KeyError, IndexError):  # a file may hold anything
                continue
    return {key: its[0] for key, its in found.items() if len(its) == 1}


def _read(records: Iterator[list[str]]) -> Thread:
    thread, step = Thread(), 0
    codes: dict[str, tuple[str, str, str]] = {}
    code_of: dict[int, str] = {}
    names: dict[tuple[str, str], Sequence[str]] = {}  # that a line reads, by code and line
    known: dict[int, dict[str, str]] = {}
    running: list[int] = []  # frames, the innermost last
    last: dict[int, int] = {}  # by frame, the number of its last execution
    caller: dict[int, int] = {}
    coroutines = Counter[str]()  # how many of each code have begun
    task: dict[int, tuple[Any, ...]] = {}  # by frame
    for kind, *its in records:
        if kind == "C":
            codes[its[0]] = its[2], PurePath(its[2]).name, its[1]
            if its[3] == COROUTINE:
                coroutines[its[0]] = 0
        elif kind == "n":
            code, number, named, called = its
            names[code, number] = named.split()
            thread.called[ProgramLine(*codes[code], int(number))] = called.split()
        elif kind == "s":
            step = int(its[0]) + 1
        elif kind == "x":
            thread.stopped = its[0]
        elif kind == "c":
            frame = int(its[0])
            code_of[frame], known[frame] = its[1], {}
            if its[1] in coroutines:
                coroutines[its[1]] += 1
                task[frame] = (*codes[its[1]][1:], coroutines[its[1]])
        else:
            frame, number = int(its[0]), its[1]
            values = dict(each.rpartition("=")[::2] for each in its[2:])
            if frame in running:
                del running[running.index(frame) + 1 :]
            else:
                caller[frame] = last[running[-1]] if running else -1
                running.append(frame)
            known[frame].update(values)
            if kind == "b":
                line = ProgramLine(*codes[code_of[frame]], int(number))
                read = names.get((code_of[frame], number), ())
                reads = {name: known[frame][name] for name in read if name in known[frame]}
                last[frame] = len(thread.executions)
                of = task.get(frame, ())
                thread.executions.append(Execution(line, frame, of, step, caller[frame], reads))
            elif frame in last:
                thread.executions[last[frame]].changes.update(values)
            if kind == "r":
                running.pop()
                if frame not in last:
                    last[frame] = -1
    return thread


class _SideBySide:
    """What one thread did in two runs; executions of both are paired by their order.

    Where `right` goes on with step `begins` of `left`, that step is paired from its end: a resumed
    run first makes what the other one has already.
    """

    def __init__(self, left: Thread, right: Thread, begins: int = 0) -> None:
        self.threads = left, right
        its, other = left.executions, right.executions
        if not begins:
            self.pairs = _paired(its, other)
        else:
            steps = [each.step for each in its]
            start, end = bisect_left(steps, begins), bisect_right(steps, begins)
            stop = bisect_right([each.step for each in other], 0)
            first = _paired(its[start:end][::-1], other[:stop][::-1])
            self.pairs = [(end - 1 - i, stop - 1 - j) for i, j in first][::-1]
            self.pairs += [(end + i, stop + j) for i, j in _paired(its[end:], other[stop:])]
        self._number = {i: n for n, (i, _) in enumerate(self.pairs)}
        self._children: dict[int, list[int]] = defaultdict(list)
        for number in range(len(self.pairs)):
            self._children[self.caller(number)].append(number)

    def both(self, number: int) -> tuple[Execution, Execution]:
        i, j = self.pairs[number]
        return self.threads[0].executions[i], self.threads[1].executions[j]

    def frames(self, number: int) -> tuple[int, int]:
        left, right = self.both(number)
        return left.frame, right.frame

    def caller(self, number: int) -> int:
        """Return the pair that called the frames of a pair; -1 if none did."""
        left, right = self.both(number)
        its = self._number.get(left.caller, -1)
        return its if its >= 0 and self.pairs[its][1] == right.caller else -1

    def called(self, number: int) -> Sequence[int]:
        """Return the pairs of the frames that a pair called, in their order."""
        return self._children[number]

    def read_otherwise(self, number: int) -> list[str]:
        left, right = self.both(number)
        return _unequal(left.reads, right.reads)

    def changed_otherwise(self, number: int) -> list[str]:
        left, right = self.both(number)
        return _unequal(left.changes, right.changes)

    def parting(self, is_after: Callable[[Execution, int], bool]) -> int | None:
        """Return the last pair before the first execution of one run alone that is such a one.

        `is_after` is asked with the number of the run.
        """
        for which, thread in enumerate(self.threads):
            paired = {pair[which] for pair in self.pairs}
            for at, its in enumerate(thread.executions):
                if at not in paired and is_after(its, which):
                    for number in range(len(self.pairs) - 1, -1, -1):
                        frame = self.both(number)[which].frame
                        if self.pairs[number][which] < at and frame == its.frame:
                            return number
        return None

    def sets(self, name: str, before: int) -> int | None:
        """Return the pair that last gave a name of the same frames its values, before another."""
        frames = self.frames(before)
        wanted = tuple(each.reads.get(name) for each in self.both(before))
        for number in range(before - 1, -1, -1):
            both = self.both(number)
            if self.frames(number) == frames:
                if tuple(each.changes.get(name) for each in both) == wanted:
                    return number
                if any(name in each.changes for each in both):
                    return None
        return None

    def makes(self, values: tuple[str, str], before: int) -> int | None:
        """Return the last pair before another that changed anything to these values."""
        for number in range(before - 1, -1, -1):
            left, right = self.both(number)
            for name, value in left.changes.items():
                if (value, right.changes.get(name)) == values:
                    return number
        return None


def _unequal(left: Mapping[str, str], right: Mapping[str, str]) -> list[str]:
    return [
        name
        for name, value in left.items()
        if name in right and value != right[name] and _UNKNOWN not in (value, right[name])
    ]


def _paired(left: Sequence[Execution], right: Sequence[Execution]) -> list[tuple[int, int]]:
    """Return which executions belong together; some may be in one run alone.

    Those of a coroutine are paired by themselves: which of several goes on is an accident.
    """
    by_task: list[dict[tuple[Any, ...], list[int]]] = [{}, {}]
    for numbers, executions in zip(by_task, (left, right), strict=True):
        for number, each in enumerate(executions):
            numbers.setdefault(each.task, []).append(number)
    return sorted(
        (ours[i], theirs[j])
        for task, ours in by_task[0].items()
        for theirs in [by_task[1].get(task, [])]
        for i, j in _in_order([left[n] for n in ours], [right[n] for n in theirs])
    )


def _in_order(left: Sequence[Execution], right: Sequence[Execution]) -> Iterator[tuple[int, int]]:
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i].line.alike == right[j].line.alike:
            yield i, j
            i, j = i + 1, j + 1
            continue
        places: dict[tuple[Any, ...], int] = {}
        for at in range(min(len(right), j + _WINDOW) - 1, j - 1, -1):
            places[tuple(each.line.alike for each in right[at : at + _ALIKE])] = at
        nearest: tuple[int, int, int] | None = None
        for at in range(i, min(len(left), i + _WINDOW)):
            other = places.get(tuple(each.line.alike for each in left[at : at + _ALIKE]))
            if other is not None and (nearest is None or at + other < nearest[0]):
                nearest = at + other, at, other
            if nearest is not None and at + j > nearest[0]:
                break
        if nearest is None:
            return
        _, i, j = nearest


def _is_within(name: str, other: str) -> bool:
    """Whether a value is, or belongs to, another one by their names."""
    return f"{name}.".startswith(f"{other}.")


def _is_opaque(value: str) -> bool:
    """Whether a digest says nothing, or nothing of a part, of a value."""
    return value == _UNKNOWN or (len(value) % 16 > 0 and value.endswith((_PARTLY, _PARTLY_SET)))


class Origins:
    """Searches the origin of what differs in the threads of one rank of two runs.

    The run `right` may have been resumed, and goes on with step `begins` of `left`.
    """

    def __init__(self, left: str, right: str, rank: int, begins: int = 0) -> None:
        both = threads_of(left), threads_of(right)
        self._is_followed = all(both)
        self._sides = {
            key[1:]: _SideBySide(its, both[1][key], begins)
            for key, its in both[0].items()
            if key in both[1] and key[0] == str(rank)
        }
        self._seen: set[tuple[int, int, str]] = set()
        self._path: list[str] = []  # the lines that were looked at
        # Values that those lines read otherwise, besides the one that was followed.
        self._others: list[tuple[_SideBySide, int, str]] = []

    @property
    def notes(self) -> Iterator[str]:
        """Yield what a reader has to know of what was not followed."""
        if not self._is_followed:
            yield (
                "the lines of the program were not followed in both runs: a debugger, a profiler "
                "or a coverage tool that traces them already stays"
            )
        for (process, thread), side in self._sides.items():
            if why := next((each.stopped for each in side.threads if each.stopped), ""):
                yield f"the lines of {thread} in {process} were not all followed: {why}"

    def of(self, first: Divergence) -> LineOfOrigin | None:
        """Return the line at which a divergence began; None where no line shows that.

        Its path has the lines as well from which the rest came that a line between read otherwise.
        """
        found = None
        with suppress(RecursionError):  # through very many calls
            found = self._of(first)
            for other in islice(self._others, _OTHERS if found is not None else 0):
                self._source_of(*other)
        path = dict.fromkeys((*found.path, *self._path)) if found is not None else ()
        return found and replace(found, path=tuple(path))

    def _of(self, first: Divergence) -> LineOfOrigin | None:
        main = self._sides.get(_MAIN)
        own = self._sides.get((_MAIN[0], first.thread or _MAIN[1]))
        found = self._from_op(own, first) if own is not None else None
        if main is None or (found is not None and (own is main or not found.came_in)):
            return found
        # Which of several threads is given what may be an accident: it shows where they meet again.
        for number in range(len(main.pairs)):
            left, _ = main.both(number)
            calls = main.threads[0].called[left.line]
            if left.step > first.step:
                break
            if any(each.startswith("torch.") for each in calls) and main.read_otherwise(number):
                return self._read_at(main, number)
        return found

    def _from_op(self, side: _SideBySide, first: Divergence) -> LineOfOrigin | None:
        """Return where the difference began that an op of this thread has shown."""
        source, step = first.source, first.step
        for number in range(len(side.pairs)):
            left, _ = side.both(number)
            if str(left.line) == source and left.step == step:
                if side.changed_otherwise(number):
                    return self._changed_at(side, number)
                if side.read_otherwise(number):
                    return self._read_at(side, number)
        if first.kind is not Kind.ONLY_ONE:
            return None
        parting = side.parting(lambda each, _: str(each.line) == source and each.step == step)
        return None if parting is None else self._parted_at(side, parting)

    def _parted_at(self, side: _SideBySide, number: int) -> LineOfOrigin | None:
        """Return where the difference began by which the runs went on with other lines."""
        if side.read_otherwise(number):
            return self._read_at(side, number)
        within = self._within(side, number, len(side.pairs))
        return within or self._found(side, number, took_another_path=True)

    def _read_at(self, side: _SideBySide, number: int) -> LineOfOrigin | None:
        """Return where the first of the values came from that a line read otherwise."""
        if (id(side), number, "read") in self._seen:
            return None
        self._seen.add((id(side), number, "read"))
        self._path.append(str(side.both(number)[0].line))
        names = side.read_otherwise(number)
        for place, name in enumerate(names, start=1):
            found = self._source_of(side, number, name)
            if found is not None:
                self._others += [(side, number, other) for other in names[place:]]
                return found
        return None

    def _source_of(self, side: _SideBySide, number: int, name: str) -> LineOfOrigin | None:
        """Return where one value came from that a line read otherwise."""
        left, right = side.both(number)
        values = left.reads[name], right.reads[name]
        by = side.sets(name, number)
        while by is not None and name in side.read_otherwise(by):  # as in ``total += rows``
            self._path.append(str(side.both(by)[0].line))
            earlier = side.sets(name, by)
            if earlier is None:
                break
            by = earlier
        if by is None:
            by = side.makes(values, number)
        if by is not None:
            return self._changed_at(side, by)
        return (
            self._in_another_thread(side, values)
            or self._out_of(side, number, name)
            or self._where_paths_part(side, number, name)
            or self._handed_over(side, number, name)
            or self._found(side, number, names=[name], came_in=True)
        )

    def _out_of(self, side: _SideBySide, number: int, name: str) -> LineOfOrigin | None:
        """Return where the object began of which a line read an attribute otherwise."""
        frames = side.frames(number)
        parts = name.split(".")
        holders = {".".join(parts[:end]) for end in range(1, len(parts))}
        for at in range(number - 1, -1, -1):
            left, _ = side.both(at)
            if side.frames(at) == frames and holders & left.changes.keys():
                return self._changed_at(side, at)
        return None

    def _where_paths_part(self, side: _SideBySide, number: int, name: str) -> LineOfOrigin | None:
        """Return the line after which one run alone set a name that both then read otherwise."""
        frames = side.frames(number)

        def sets(its: Execution, which: int) -> bool:
            return its.frame == frames[which] and name in its.changes

        parting = side.parting(sets)
        return self._parted_at(side, parting) if parting is not None and parting < number else None

    def _handed_over(self, side: _SideBySide, number: int, name: str) -> LineOfOrigin | None:
        """Return where what a call was given came from: what its line read, or called before."""
        caller = side.caller(number)
        if caller < 0:
            return None
        if side.read_otherwise(caller):
            return self._read_at(side, caller)
        if "." in name:  # an object that was given may have been changed since, by a thread
            return None
        return self._within(side, caller, number) or self._found(side, caller)

    def _changed_at(self, side: _SideBySide, number: int) -> LineOfOrigin | None:
        """Return where the difference began that a line shows in what it changed."""
        if (id(side), number, "changed") in self._seen:
            return None
        self._seen.add((id(side), number, "changed"))
        self._path.append(str(side.both(number)[0].line))
        within = self._within(side, number, len(side.pairs))
        if within is not None:
            return within
        if (filled := self._where_filled(side, number)) is not None:
            return self._found(side, filled)
        if side.read_otherwise(number):
            return self._read_at(side, number)
        left, _ = side.both(number)
        if ITERATES in side.threads[0].called[left.line]:
            # The next value is another one where one run has taken more of them before.
            frames = side.frames(number)
            parting = side.parting(lambda each, which: each.frame == frames[which])
            if parting is not None and parting < number:
                return self._parted_at(side, parting)
        return self._into_opaque(side, number) or self._found(side, number)

    def _where_filled(self, side: _SideBySide, number: int) -> int | None:
        """Return the pair that fills memory which a pair has only allocated; None for any other.

        What was in that memory is no argument of it.
        """
        left, _ = side.both(number)
        called = side.threads[0].called.get(left.line, ())
        if not any(each.rpartition(".")[2] in ("empty", "empty_like") for each in called):
            return None
        for at in range(number + 1, len(side.pairs)):
            names = side.changed_otherwise(at) if side.frames(at) == side.frames(number) else ()
            if any(_is_within(name, its) for name in names for its in left.changes):
                return at
        return None

    def _into_opaque(self, side: _SideBySide, number: int) -> LineOfOrigin | None:
        """Return where what differs began that was put into an object which nobody can compare."""
        this, _ = side.both(number)
        opaque = [name for name, value in this.reads.items() if value == _UNKNOWN]
        of_opaque: set[int] = set()  # pairs that made or used one of these, and what they called
        for at in range(number):
            left, _ = side.both(at)
            is_here = side.frames(at) == side.frames(number)
            names = left.reads.keys() | left.changes.keys()
            uses = is_here and any(_is_within(name, each) for name in opaque for each in names)
            if uses or side.caller(at) in of_opaque:
                of_opaque.add(at)
                touched = (*left.reads.values(), *left.changes.values())
                if _UNKNOWN in touched and side.read_otherwise(at):
                    return self._read_at(side, at)
        return None

    def _within(self, side: _SideBySide, number: int, before: int) -> LineOfOrigin | None:
        """Return where the difference began in what a line called, if it began there."""
        returned = [
            inner
            for inner in side.called(number)
            if inner < before and RETURNED in side.changed_otherwise(inner)
        ]
        if returned:
            return self._changed_at(side, returned[-1])
        left, right = side.both(number)
        iterates = ITERATES in side.threads[0].called.get(left.line, ())
        if iterates or _UNKNOWN in left.reads.values():  # it may have taken what others made
            for name in side.changed_otherwise(number):
                values = left.changes[name], right.changes[name]
                found = self._in_another_thread(side, values)
                if found is not None:
                    return found
            for other in self._sides.values():
                for outermost in other.called(-1) if other is not side else ():
                    if RETURNED in other.changed_otherwise(outermost):
                        found = self._changed_at(other, outermost)
                        # Which of them is given what may be an accident.
                        return None if found is None or found.came_in else found
        return None

    def _in_another_thread(self, side: _SideBySide, values: tuple[str, str]) -> LineOfOrigin | None:
        """Return where these values began that another thread or process has made."""
        for other in self._sides.values():
            if other is not side:
                by = other.makes(values, len(other.pairs))
                if by is not None:
                    return self._changed_at(other, by)
        return None

    def _found(
        self,
        side: _SideBySide,
        number: int,
        *,
        names: Sequence[str] = (),
        came_in: bool = False,
        took_another_path: bool = False,
    ) -> LineOfOrigin:
        left, _ = side.both(number)
        called = [each for each in side.threads[0].called.get(left.line, ()) if each != ITERATES]
        # A call is looked up before those in its arguments; what converts a value has one as well.
        outer = (each for each in called if each.partition(".")[0] not in ("torch", "numpy"))
        opaque = [name for name, value in left.reads.items() if _is_opaque(value)]
        return LineOfOrigin(
            where=str(left.line),
            changed=tuple(names or side.changed_otherwise(number)),
            same=tuple(
                name
                for name, value in left.reads.items()
                if value and not _is_opaque(value) and name not in names
            ),
            called=next(filter(library_row, called), next(chain(outer, called), "")),
            opaque=tuple(self._history(side, number, name) for name in opaque),
            is_set=any(
                left.changes.get(name, "").endswith(SET.hex()) and len(left.changes[name]) % 16
                for name in side.changed_otherwise(number)
            ),
            came_in=came_in,
            took_another_path=took_another_path,
            path=tuple(dict.fromkeys([str(left.line), *reversed(self._path)])),
            within=tuple(dict.fromkeys(map(str, self._lines_within(side, number)))),
        )

    def _lines_within(self, side: _SideBySide, number: int) -> Iterator[ProgramLine]:
        """Yield the lines of what a line has called."""
        waiting = [*side.called(number)]
        for each in waiting:
            yield side.both(each)[0].line
            waiting += side.called(each)

    def _history(self, side: _SideBySide, number: int, name: str) -> OpaqueValue:
        """Return which lines made a value without a digest, and last called a method of it."""
        this, _ = side.both(number)
        made = changed = ""
        for at in range(number):
            its, _ = side.both(at)
            if its.frame == this.frame:
                names = {each for each in (*its.reads, *its.changes) if _is_within(name, each)}
                if names - its.reads.keys():
                    made, changed = str(its.line), ""
                elif names and its.line != this.line:
                    changed = str(its.line)
        return OpaqueValue(name, made, changed)
