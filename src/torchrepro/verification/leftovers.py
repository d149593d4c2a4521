"""Files that one run leaves for the next, and places in which a run does not find them.

The folder of a program is looked at before and after its first run: what was created in between is
left behind. A run that is to find none of it starts in a copy of the folder as it was before. No
file of the user is moved, removed or changed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torchrepro.ground.callers import is_library
from torchrepro.ground.errors import TraceError
from torchrepro.ground.messages import printable, some
from torchrepro.lock.file_notes import WRITTEN
from torchrepro.lock.repository import CopyError
from torchrepro.trace.reader import read_run
from torchrepro.verdict.render import counted, from_here, short
from torchrepro.verdict.value import Advice
from torchrepro.verification.copies import Copy, FolderState, copy_of, temporary_folder
from torchrepro.verification.perturbations import RunEnvironment
from torchrepro.verification.runner import last_lines, status_in_words

if TYPE_CHECKING:
    from torchrepro.trace.reader import Trace
    from torchrepro.verdict.value import Verdict
    from torchrepro.verification.result import Run
    from torchrepro.verification.runner import Runner

_LINES = 100  # of what a run has printed last, with its traceback
_LOCATION = re.compile(r'File "([^"]+)", line (\d+)')


class CarriedFile(NamedTuple):
    """A file that a run read as the run before it had left it."""

    path: str
    written: str
    """The line of the program that wrote it, as ``file:line``; empty where that was not heard."""
    read: str  # the line that first read it in the later run


def carried(first: Run, second: Run) -> tuple[CarriedFile, ...]:
    """Return the files that `second` read as they had been written since `first` began.

    The runs are those of one command, one after the other. Empty where one has left no trace of
    its files, which it writes at its end.
    """
    earlier, later = (
        [
            trace.meta
            for trace in traces_of(run)
            if None not in (trace.meta.get("began"), trace.meta.get("files"))
        ]
        for run in (first, second)
    )
    if not (earlier and later):
        return ()
    begun, ended = (min(meta["began"] for meta in metas) for metas in (earlier, later))
    written = {each["path"]: each["written"] for meta in earlier for each in meta["files"]}
    read = {
        each["path"]: each["read"]
        for meta in later
        for each in meta["files"]
        if each["read"] and begun <= each["changed"] < ended
    }
    return tuple(
        CarriedFile(printable(path), printable(written.get(path, "")), printable(where))
        for path, where in read.items()
    )


def traces_of(run: Run) -> list[Trace]:
    """Return the traces of a run without their records; empty where nothing was recorded."""
    found: list[Trace] = []
    with suppress(TraceError):
        found = read_run(run.folder, records=False)
    for trace in found:
        trace.close()
    return found


class RunLocation(NamedTuple):
    """Where a run is tried: what starts it there, and in which environment."""

    runner: Runner
    environment: RunEnvironment
    strayed: Callable[[], str]  # what of the user's own the run has used, in words


@contextmanager
def own_folder(runner: Runner) -> Iterator[RunLocation]:
    yield RunLocation(runner, RunEnvironment(), str)


@contextmanager
def within(copy: Copy, runner: Runner) -> Iterator[RunLocation]:
    runner = replace(runner, command=copy.command(runner.command))
    yield RunLocation(runner, copy.environment, copy.strayed)


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What the first run of a command left behind, seen in its folder before and after it."""

    before: FolderState
    after: FolderState
    runs: tuple[Run, Run]  # the first, and a later one
    carried: tuple[CarriedFile, ...]  # what the later one read of it

    @classmethod
    def of(cls, before: FolderState, after: FolderState, first: Run, later: Run) -> Leftovers:
        return cls(before, after, (first, later), carried(first, later))

    @property
    def created(self) -> list[str]:
        """The files that the first run created, as they are named from here."""
        names = self.after.files.keys() - self.before.files.keys()
        return sorted(from_here(str(self.before.root / name)) for name in names)

    @property
    def overwritten(self) -> list[str]:
        """The carried files that were there before the first run, as they are named from here."""
        names = (from_here(each.path) for each in self.carried)
        return [name for name in names if name not in self.created]

    @property
    def cause(self) -> str:
        """A carried file, rather one that was created, and the lines that use it, in words."""
        one = min(self.carried, key=lambda each: from_here(each.path) in self.overwritten)
        name = from_here(one.path)
        note = "" if name in self.created else ", overwritten by run 1"
        wrote = f"written at {short(one.written)} and " if one.written else ""
        return (
            f"A file that one run leaves for the next: {name}{note}, {wrote}read at "
            f"{short(one.read)}."
        )

    @contextmanager
    def copy_without_them(self, runner: Runner) -> Iterator[RunLocation]:
        """Be in a copy of the folder as it was before the first run.

        What the first run has overwritten is as it is now. Raises `CopyError` where there can be no
        copy: for carried files of which the first run created none, or one that is elsewhere, a
        link that leads out of the folder, and too much to copy.
        """
        for each in self.carried:
            if not Path(each.path).is_relative_to(self.before.root):
                raise CopyError(f"{from_here(each.path)} is not in {self.before.root}")
        if len(self.overwritten) == len(self.carried):
            raise CopyError(self.why_not_undone)
        with (
            copy_of(self.before, self.written, runner.folder) as copy,
            within(copy, runner) as place,
        ):
            yield place

    @property
    def why_not_undone(self) -> str:
        return f"there before, and overwritten by run 1: {some(self.overwritten)}"

    @contextmanager
    def new_folder(self, runner: Runner) -> Iterator[RunLocation]:
        """Be in an empty folder, from where the command's words lead to the same files."""
        with temporary_folder() as temporary:
            copy = Copy.of(self.before.root, Path.cwd(), temporary, runner.folder)
            runner = replace(runner, command=self.in_full(runner.command))

            def strayed() -> str:
                written = (Path(use.path) for use in copy.uses if use.kind == WRITTEN)
                return next((str(path) for path in written if path.is_relative_to(copy.root)), "")

            with copy.entered():
                yield RunLocation(runner, copy.environment, strayed)

    def in_full(self, words: Sequence[str]) -> list[str]:
        """Return a command with absolute paths, but to what the first run has created."""
        created = {*self.created, *self._created_folders}

        def whole(word: str) -> str:
            before, equals, path = word.rpartition("=")
            is_old = os.path.lexists(path) and os.path.normpath(path) not in created
            return f"{before}{equals}{Path(path).absolute()}" if is_old else word

        return [*map(whole, words)]

    @property
    def written(self) -> set[str]:
        """The files that a run has opened for writing, or changed, by absolute paths."""
        root, before, after = self.before.root, self.before.files, self.after.files
        changed = {str(root / name) for name in before if after.get(name) != before[name]}
        uses = (use for run in self.runs for use in _uses_of_files(run))
        return changed | {use["path"] for use in uses if use["written"]}

    @property
    def is_refused(self) -> bool:
        """Whether the later run failed and the first one did not."""
        first, later = self.runs
        return bool(later.status and not first.status)

    def explained(self, verdict: Verdict) -> Verdict:
        """Return the verdict of both runs, with what was left behind as its cause, if it is."""
        first, later = self.runs
        if verdict.same:
            return verdict
        if self.is_refused:
            cause = self.refusal
        elif later.steps < first.steps and self.carried:
            cause = self.cause
        elif later.steps < first.steps and self.created:
            steps = counted(later.steps, "step")
            cause = f"Run 1 left {some(self.created)} behind, and run 2 then made {steps}."
        else:
            return verdict
        advice = verdict.advice or Advice("")
        return replace(verdict, advice=replace(advice, cause=cause, edit=None))

    @property
    def refusal(self) -> str:
        """Why the later run failed: its last line, the line of the program, what run 1 made."""
        run = self.runs[1]
        lines = [line for line in last_lines(run, _LINES) if line.strip()]
        said = lines[-1].strip() if lines else status_in_words(run.status)
        found = (_LOCATION.search(line) for line in reversed(lines))
        places = (f"{each[1]}:{each[2]}" for each in found if each and not is_library(each[1]))
        place = next(places, "")
        left = [name for name in (*self.created, *self._created_folders) if name in said]
        parts = [
            f"{run.name.replace('-', ' ')} failed: {said}",
            f" ({short(place)})" * bool(place),
            f"; run 1 made {some(left or self.created)}" * bool(left or self.created),
        ]
        return f"{''.join(parts)}."

    @property
    def _created_folders(self) -> list[str]:
        created = self.after.folders - self.before.folders
        return sorted(from_here(str(self.before.root / each)) for each in created)


def _uses_of_files(run: Run) -> Iterator[Mapping[str, str]]:
    for trace in traces_of(run):
        yield from trace.meta.get("files") or ()
