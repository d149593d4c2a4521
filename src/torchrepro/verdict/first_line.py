"""Search for the line of a program at which a difference between two runs began.

Both runs recorded the lines that they executed (see `trace.followed_lines`). The search pairs these
lines, thread by thread. It starts at the line of the op that differs, and traces each differing
value back to the line that set it. It ends at a line that read values equal in both runs,
but set values that differ.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice, product, starmap
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.trace.followed_lines import COROUTINE, ITERATES, PREFIX, RETURNED, SET
from torchrepro.trace.value_digest import OPAQUE, PARTLY
from torchrepro.verdict.libraries import library_row
from torchrepro.verdict.value import Kind, LineOfOrigin, OpaqueValue

if TYPE_CHECKING:
    from torchrepro.verdict.value import Divergence

CAUSED_BY_PROGRAM = (Kind.DATA, Kind.ARGUMENT, Kind.ONLY_ONE, Kind.INPUT)
"""Divergences that the program itself causes, outside of any op."""

_UNKNOWN, _PARTLY, _PARTLY_SET = (text.hex() for text in (OPAQUE, PARTLY, PARTLY + SET))
_WINDOW, _MATCHING = 2000, 3  # after a mismatch: lines to search for so many equal ones in a row
_MOST_QUEUED = 50  # the most further differing values that are traced back
_MAIN = ("MainProcess", "MainThread")

Key = tuple[str, str, str]
"""Rank, process and thread."""


class ProgramLine(NamedTuple):
    """A line of the program, by its number in a file."""

    file: str
    name: str  # the name of the file, without its folder
    function: str
    number: int

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"

    @property
    def key(self) -> tuple[Any, ...]:
        """The fields that identify the line in both runs, without the folder, which may differ."""
        return self[1:]


@dataclass(slots=True)
class Execution:
    """One execution of a line in a frame."""

    line: ProgramLine
    frame: int
    task: tuple[Any, ...]  # the coroutine that ran it; empty outside of coroutines
    step: int
    caller: int  # index of the execution that called the frame; -1 if unknown
    reads: dict[str, str]  # name -> digest before the line ran
    changes: dict[str, str] = field(default_factory=dict)  # name -> digest after it ran


@dataclass(slots=True)
class Thread:
    """The lines that one thread of a run executed."""

    executions: list[Execution] = field(default_factory=list)
    called: dict[ProgramLine, Sequence[str]] = field(default_factory=dict)
    stopped: str = ""  # why lines were not followed to the end


def threads_of(folder: str) -> dict[Key, Thread]:
    """Read the executed lines of each thread of a run. Threads that share a name are omitted."""
    threads: dict[Key, list[Thread]] = defaultdict(list)
    for path in sorted(Path(folder).glob(f"{PREFIX}*")):
        with path.open(encoding="utf-8", errors="surrogateescape") as lines:
            records = (line.rstrip("\n").split("\t") for line in lines if line.endswith("\n"))
            _, *key = next(records, ["H"])
            try:
                rank, process, thread = key
                threads[rank, process, thread].append(_read(records))
            except (ValueError, KeyError, IndexError):  # a damaged file
                continue
    return {key: same_key[0] for key, same_key in threads.items() if len(same_key) == 1}


def _read(records: Iterator[list[str]]) -> Thread:
    thread, step = Thread(), 0
    codes: dict[str, tuple[str, str, str]] = {}
    code_of: dict[int, str] = {}
    names: dict[tuple[str, str], Sequence[str]] = {}  # (code, line) -> names that the line reads
    known: dict[int, dict[str, str]] = {}
    running: list[int] = []  # frames, the innermost last
    last: dict[int, int] = {}  # frame -> index of its last execution
    caller: dict[int, int] = {}
    coroutines = Counter[str]()  # code -> number of its coroutines that have begun
    task: dict[int, tuple[Any, ...]] = {}  # frame -> coroutine
    for tag, *fields in records:
        if tag == "C":
            codes[fields[0]] = fields[2], PurePath(fields[2]).name, fields[1]
            if fields[3] == COROUTINE:
                coroutines[fields[0]] = 0
        elif tag == "n":
            code, number, named, called = fields
            names[code, number] = named.split()
            thread.called[ProgramLine(*codes[code], int(number))] = called.split()
        elif tag == "s":
            step = int(fields[0]) + 1
        elif tag == "x":
            thread.stopped = fields[0]
        elif tag == "c":
            frame = int(fields[0])
            code_of[frame], known[frame] = fields[1], {}
            if fields[1] in coroutines:
                coroutines[fields[1]] += 1
                task[frame] = (*codes[fields[1]][1:], coroutines[fields[1]])
        else:
            frame, number = int(fields[0]), fields[1]
            values = dict(field.rpartition("=")[::2] for field in fields[2:])
            if frame in running:
                del running[running.index(frame) + 1 :]
            else:
                caller[frame] = last[running[-1]] if running else -1
                running.append(frame)
            known[frame].update(values)
            if tag == "b":
                line = ProgramLine(*codes[code_of[frame]], int(number))
                read = names.get((code_of[frame], number), ())
                reads = {name: known[frame][name] for name in read if name in known[frame]}
                last[frame] = len(thread.executions)
                coroutine = task.get(frame, ())
                thread.executions.append(
                    Execution(line, frame, coroutine, step, caller[frame], reads)
                )
            elif frame in last:
                thread.executions[last[frame]].changes.update(values)
            if tag == "r":
                running.pop()
                if frame not in last:
                    last[frame] = -1
    return thread


class _PairedRuns:
    """The executed lines of one thread in two runs, paired in order. A pair is named by its index.

    If `right` resumes at step `begins` of `left`, the lines of this step are paired from the last
    line backwards. The reason is that the resumed run executes its setup before these lines.
    """

    def __init__(self, left: Thread, right: Thread, begins: int = 0) -> None:
        self.threads = left, right
        lefts, rights = left.executions, right.executions
        if not begins:
            self.pairs = _paired(lefts, rights)
        else:
            steps = [execution.step for execution in lefts]
            start, end = bisect_left(steps, begins), bisect_right(steps, begins)
            stop = bisect_right([execution.step for execution in rights], 0)
            first = _paired(lefts[start:end][::-1], rights[:stop][::-1])
            self.pairs = [(end - 1 - i, stop - 1 - j) for i, j in first][::-1]
            self.pairs += [(end + i, stop + j) for i, j in _paired(lefts[end:], rights[stop:])]
        self._number = {i: n for n, (i, _) in enumerate(self.pairs)}
        self._children: dict[int, list[int]] = defaultdict(list)
        for number in range(len(self.pairs)):
            self._children[self.caller(number)].append(number)

    def both(self, number: int) -> tuple[Execution, Execution]:
        i, j = self.pairs[number]
        return self.threads[0].executions[i], self.threads[1].executions[j]

    def left(self, number: int) -> Execution:
        return self.both(number)[0]

    def functions(self, number: int) -> Sequence[str]:
        """Return the functions that the line of a pair calls, by their full names."""
        return self.threads[0].called.get(self.left(number).line, ())

    def frames(self, number: int) -> tuple[int, int]:
        left, right = self.both(number)
        return left.frame, right.frame

    def caller(self, number: int) -> int:
        """Return the pair that called the functions which pair `number` is in, or -1 if unknown."""
        left, right = self.both(number)
        caller = self._number.get(left.caller, -1)
        return caller if caller >= 0 and self.pairs[caller][1] == right.caller else -1

    def called(self, number: int) -> Sequence[int]:
        """Return, in order, the pairs of lines in the functions that pair `number` called."""
        return self._children[number]

    def differing_reads(self, number: int) -> list[str]:
        left, right = self.both(number)
        return _unequal(left.reads, right.reads)

    def differing_changes(self, number: int) -> list[str]:
        left, right = self.both(number)
        return _unequal(left.changes, right.changes)

    def last_common_pair(self, is_after: Callable[[Execution, int], bool]) -> int | None:
        """Return the last pair before a line that only one run executed.

        This line is the first unpaired execution for which `is_after(execution, run)` is true.
        The pair is in the frame of this line. `run` is 0 for the left run and 1 for the right run.
        """
        for which, thread in enumerate(self.threads):
            paired = {pair[which] for pair in self.pairs}
            for at, execution in enumerate(thread.executions):
                if at not in paired and is_after(execution, which):
                    for number in range(len(self.pairs) - 1, -1, -1):
                        frame = self.both(number)[which].frame
                        if self.pairs[number][which] < at and frame == execution.frame:
                            return number
        return None

    def last_setting(self, name: str, before: int) -> int | None:
        """Return the pair that set `name` to the values that the pair `before` reads, or None."""
        frames = self.frames(before)
        wanted = tuple(execution.reads.get(name) for execution in self.both(before))
        for number in range(before - 1, -1, -1):
            both = self.both(number)
            changed = any(name in execution.changes for execution in both)
            if changed and self.frames(number) == frames:
                values = tuple(execution.changes.get(name) for execution in both)
                return number if values == wanted else None
        return None

    def last_making(self, values: tuple[str, str], before: int) -> int | None:
        """Return the last pair before pair `before` that set any name to `values`, or None."""
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
    """Return the pairs of executions of two runs, as indices. An execution may stay unpaired.

    Each coroutine is paired separately, because coroutines may take turns in any order.
    """
    by_task: list[dict[tuple[Any, ...], list[int]]] = [{}, {}]
    for numbers, executions in zip(by_task, (left, right), strict=True):
        for number, execution in enumerate(executions):
            numbers.setdefault(execution.task, []).append(number)
    return sorted(
        (ours[i], theirs[j])
        for task, ours in by_task[0].items()
        for theirs in [by_task[1].get(task, [])]
        for i, j in _in_order([left[n] for n in ours], [right[n] for n in theirs])
    )


def _in_order(left: Sequence[Execution], right: Sequence[Execution]) -> Iterator[tuple[int, int]]:
    lefts, rights = ([execution.line.key for execution in run] for run in (left, right))
    i = j = 0
    while i < len(left) and j < len(right):
        if lefts[i] == rights[j]:
            yield i, j
            i, j = i + 1, j + 1
            continue
        window = range(min(len(right), j + _WINDOW) - 1, j - 1, -1)
        places = {tuple(rights[at : at + _MATCHING]): at for at in window}
        nearest: tuple[int, int, int] | None = None
        for at in range(i, min(len(left), i + _WINDOW)):
            at_right = places.get(tuple(lefts[at : at + _MATCHING]))
            if at_right is not None and (nearest is None or at + at_right < nearest[0]):
                nearest = at + at_right, at, at_right
            if nearest is not None and at + j > nearest[0]:
                break
        if nearest is None:
            return
        _, i, j = nearest


def _is_within(name: str, owner: str) -> bool:
    """Whether `name` is `owner` or an attribute of `owner`."""
    return f"{name}.".startswith(f"{owner}.")


def _is_opaque(value: str) -> bool:
    """Whether a digest marks a value as unknown, or covers only some parts of the value."""
    return value == _UNKNOWN or (len(value) % 16 > 0 and value.endswith((_PARTLY, _PARTLY_SET)))


class Origins:
    """Searches for the line where a difference began, in the threads of one rank of two runs.

    If the run `right` was resumed, `begins` is the step of `left` at which `right` begins.
    """

    def __init__(self, left: str, right: str, rank: int, begins: int = 0) -> None:
        both = threads_of(left), threads_of(right)
        self._is_followed = all(both)
        self._threads = {
            key[1:]: _PairedRuns(thread, both[1][key], begins)
            for key, thread in both[0].items()
            if key in both[1] and key[0] == str(rank)
        }
        self._seen: set[tuple[int, int, str]] = set()
        self._path: list[str] = []  # the lines visited by the search
        # Other differing values that these lines read, to be traced later.
        self._queued: list[tuple[_PairedRuns, int, str]] = []

    @property
    def notes(self) -> Iterator[str]:
        """Yield sentences on why some or all lines of the program were not followed."""
        if not self._is_followed:
            yield (
                "the lines of the program were not followed in both runs: a debugger, a profiler "
                "or a coverage tool already traces them"
            )
        for (process, thread), paired in self._threads.items():
            if reason := next((run.stopped for run in paired.threads if run.stopped), ""):
                yield f"not all lines of {thread} in {process} were followed: {reason}"

    def of(self, first: Divergence) -> LineOfOrigin | None:
        """Return the line at which a divergence began; None if it was not found.

        `path` also has the origins of other differing values which the lines on `path` read.
        """
        origin = None
        with suppress(RecursionError):  # very deep call chains
            origin = self._of(first)
            for value in islice(self._queued, _MOST_QUEUED if origin is not None else 0):
                self._trace_value(*value)
        path = dict.fromkeys((*origin.path, *self._path)) if origin is not None else ()
        return origin and replace(origin, path=tuple(path))

    def _of(self, first: Divergence) -> LineOfOrigin | None:
        main = self._threads.get(_MAIN)
        thread = self._threads.get((_MAIN[0], first.thread or _MAIN[1]))
        origin = self._trace_op(thread, first) if thread is not None else None
        if main is None or (origin is not None and (thread is main or not origin.came_in)):
            return origin
        # Timing may split the work between threads. Search where the main thread uses its results.
        for number in range(len(main.pairs)):
            if main.left(number).step > first.step:
                break
            computes = any(name.startswith("torch.") for name in main.functions(number))
            if computes and main.differing_reads(number):
                return self._trace_reads(main, number)
        return origin

    def _trace_op(self, paired: _PairedRuns, first: Divergence) -> LineOfOrigin | None:
        """Trace a divergence back within one thread, from the line of the differing op."""
        source, step = first.source, first.step
        for number in range(len(paired.pairs)):
            left = paired.left(number)
            if str(left.line) == source and left.step == step:
                if paired.differing_changes(number):
                    return self._trace_changes(paired, number)
                if paired.differing_reads(number):
                    return self._trace_reads(paired, number)
        if first.kind is not Kind.ONLY_ONE:
            return None
        pair = paired.last_common_pair(
            lambda execution, _: str(execution.line) == source and execution.step == step
        )
        return None if pair is None else self._trace_parting(paired, pair)

    def _trace_parting(self, paired: _PairedRuns, number: int) -> LineOfOrigin | None:
        """Trace back the reason why two runs executed different lines after a pair of lines."""
        if paired.differing_reads(number):
            return self._trace_reads(paired, number)
        within = self._trace_calls(paired, number, len(paired.pairs))
        return within or self._origin_at(paired, number, took_another_path=True)

    def _trace_reads(self, paired: _PairedRuns, number: int) -> LineOfOrigin | None:
        """Trace back the differing values that a pair of lines read, until one origin is found."""
        if (id(paired), number, "read") in self._seen:
            return None
        self._seen.add((id(paired), number, "read"))
        self._path.append(str(paired.left(number).line))
        names = paired.differing_reads(number)
        for position, name in enumerate(names, start=1):
            origin = self._trace_value(paired, number, name)
            if origin is not None:
                self._queued += [(paired, number, rest) for rest in names[position:]]
                return origin
        return None

    def _trace_value(self, paired: _PairedRuns, number: int, name: str) -> LineOfOrigin | None:
        """Trace back the value of `name`, which differs when a pair of lines reads it."""
        left, right = paired.both(number)
        values = left.reads[name], right.reads[name]
        pair = paired.last_setting(name, number)
        while pair is not None and name in paired.differing_reads(pair):  # as in ``total += rows``
            self._path.append(str(paired.left(pair).line))
            earlier = paired.last_setting(name, pair)
            if earlier is None:
                break
            pair = earlier
        if pair is None:
            pair = paired.last_making(values, number)
        if pair is not None:
            return self._trace_changes(paired, pair)
        return (
            self._trace_threads(paired, values)
            or self._trace_owner(paired, number, name)
            or self._trace_lone_set(paired, number, name)
            or self._trace_argument(paired, number, name)
            or self._origin_at(paired, number, names=[name], came_in=True)
        )

    def _trace_owner(self, paired: _PairedRuns, number: int, name: str) -> LineOfOrigin | None:
        """Trace a differing attribute ``a.b.c`` back to the last line that set ``a`` or ``a.b``."""
        frames = paired.frames(number)
        parts = name.split(".")
        holders = {".".join(parts[:end]) for end in range(1, len(parts))}
        for at in range(number - 1, -1, -1):
            if paired.frames(at) == frames and holders & paired.left(at).changes.keys():
                return self._trace_changes(paired, at)
        return None

    def _trace_lone_set(self, paired: _PairedRuns, number: int, name: str) -> LineOfOrigin | None:
        """Trace back `name`, which was set on a line that only one of the runs executed."""
        frames = paired.frames(number)

        def sets(execution: Execution, which: int) -> bool:
            return execution.frame == frames[which] and name in execution.changes

        pair = paired.last_common_pair(sets)
        return self._trace_parting(paired, pair) if pair is not None and pair < number else None

    def _trace_argument(self, paired: _PairedRuns, number: int, name: str) -> LineOfOrigin | None:
        """Trace a differing argument back through the line that called the function."""
        caller = paired.caller(number)
        if caller < 0:
            return None
        if paired.differing_reads(caller):
            return self._trace_reads(paired, caller)
        if "." in name:  # another thread may have changed the object after it was passed
            return None
        return self._trace_calls(paired, caller, number) or self._origin_at(paired, caller)

    def _trace_changes(self, paired: _PairedRuns, number: int) -> LineOfOrigin | None:
        """Trace back the differing values that a pair of lines set."""
        if (id(paired), number, "changed") in self._seen:
            return None
        self._seen.add((id(paired), number, "changed"))
        self._path.append(str(paired.left(number).line))
        within = self._trace_calls(paired, number, len(paired.pairs))
        if within is not None:
            return within
        if (filled := self._filling_pair(paired, number)) is not None:
            return self._origin_at(paired, filled)
        if paired.differing_reads(number):
            return self._trace_reads(paired, number)
        if ITERATES in paired.functions(number):
            # The next value differs if one run has advanced the iterator more often.
            frames = paired.frames(number)
            pair = paired.last_common_pair(
                lambda execution, which: execution.frame == frames[which]
            )
            if pair is not None and pair < number:
                return self._trace_parting(paired, pair)
        return self._trace_opaque(paired, number) or self._origin_at(paired, number)

    def _filling_pair(self, paired: _PairedRuns, number: int) -> int | None:
        """Return the pair that fills the uninitialized memory that pair `number` allocates.

        Returns None if no pair fills it. After a fill, the earlier contents are irrelevant.
        """
        names = {function.rpartition(".")[2] for function in paired.functions(number)}
        if names.isdisjoint(("empty", "empty_like")):
            return None
        allocated = paired.left(number).changes
        for at in range(number + 1, len(paired.pairs)):
            if paired.frames(at) != paired.frames(number):
                continue
            filled = product(paired.differing_changes(at), allocated)
            if any(starmap(_is_within, filled)):
                return at
        return None

    def _trace_opaque(self, paired: _PairedRuns, number: int) -> LineOfOrigin | None:
        """Trace an object that has no digest back to a line that passed differing values to it."""
        reads = paired.left(number).reads
        opaque = [name for name, value in reads.items() if value == _UNKNOWN]
        of_opaque: set[int] = set()  # pairs that set or used such an object, and pairs they called
        for at in range(number):
            left = paired.left(at)
            same_frame = paired.frames(at) == paired.frames(number)
            names = left.reads.keys() | left.changes.keys()
            uses = same_frame and any(_is_within(name, used) for name in opaque for used in names)
            if uses or paired.caller(at) in of_opaque:
                of_opaque.add(at)
                touched = (*left.reads.values(), *left.changes.values())
                if _UNKNOWN in touched and paired.differing_reads(at):
                    return self._trace_reads(paired, at)
        return None

    def _trace_calls(self, paired: _PairedRuns, number: int, before: int) -> LineOfOrigin | None:
        """Trace a difference back to a function that a line called, if it began in the function."""
        returned = [
            inner
            for inner in paired.called(number)
            if inner < before and RETURNED in paired.differing_changes(inner)
        ]
        if returned:
            return self._trace_changes(paired, returned[-1])
        left, right = paired.both(number)
        iterates = ITERATES in paired.functions(number)
        if iterates or _UNKNOWN in left.reads.values():  # values may come from other threads
            for name in paired.differing_changes(number):
                values = left.changes[name], right.changes[name]
                origin = self._trace_threads(paired, values)
                if origin is not None:
                    return origin
            for thread in self._threads.values():
                if thread is paired:
                    continue
                for outermost in thread.called(-1):
                    if RETURNED in thread.differing_changes(outermost):
                        origin = self._trace_changes(thread, outermost)
                        # A value that came in as an argument may depend on the timing of threads.
                        return None if origin is None or origin.came_in else origin
        return None

    def _trace_threads(self, paired: _PairedRuns, values: tuple[str, str]) -> LineOfOrigin | None:
        """Trace differing values back to the line that set them in another thread or process."""
        for thread in self._threads.values():
            if thread is not paired:
                pair = thread.last_making(values, len(thread.pairs))
                if pair is not None:
                    return self._trace_changes(thread, pair)
        return None

    def _origin_at(
        self,
        paired: _PairedRuns,
        number: int,
        *,
        names: Sequence[str] = (),
        came_in: bool = False,
        took_another_path: bool = False,
    ) -> LineOfOrigin:
        left = paired.left(number)
        called = [function for function in paired.functions(number) if function != ITERATES]
        # Prefer a library to the call of torch or numpy that only converts the result.
        outer = (
            function for function in called if function.partition(".")[0] not in ("torch", "numpy")
        )
        opaque = [name for name, value in left.reads.items() if _is_opaque(value)]
        return LineOfOrigin(
            where=str(left.line),
            changed=tuple(names or paired.differing_changes(number)),
            same=tuple(
                name
                for name, value in left.reads.items()
                if value and not _is_opaque(value) and name not in names
            ),
            called=next(filter(library_row, called), next(chain(outer, called), "")),
            opaque=tuple(self._history(paired, number, name) for name in opaque),
            is_set=any(
                left.changes.get(name, "").endswith(SET.hex()) and len(left.changes[name]) % 16
                for name in paired.differing_changes(number)
            ),
            came_in=came_in,
            took_another_path=took_another_path,
            path=tuple(dict.fromkeys([str(left.line), *reversed(self._path)])),
            within=tuple(dict.fromkeys(map(str, self._lines_within(paired, number)))),
        )

    def _lines_within(self, paired: _PairedRuns, number: int) -> Iterator[ProgramLine]:
        """Yield the lines of all functions that a line called, directly or indirectly."""
        waiting = [*paired.called(number)]
        for pair in waiting:
            yield paired.left(pair).line
            waiting += paired.called(pair)

    def _history(self, paired: _PairedRuns, number: int, name: str) -> OpaqueValue:
        """Return `name`, the line that created its value, and the line that last used the value."""
        this = paired.left(number)
        made = changed = ""
        for at in range(number):
            left = paired.left(at)
            if left.frame == this.frame:
                names = {used for used in (*left.reads, *left.changes) if _is_within(name, used)}
                if names - left.reads.keys():
                    made, changed = str(left.line), ""
                elif names and left.line != this.line:
                    changed = str(left.line)
        return OpaqueValue(name, made, changed)
