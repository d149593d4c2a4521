"""Finds files that one run leaves for the next, and starts runs without these files.

The program's folder is scanned before and after the first run. Files that were created in between
are leftovers. A run without them starts in a copy of the folder, which has only the files from
before the first run. The user's own files always stay as they are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.ground.callers import is_library
from torchrepro.ground.errors import printable, some
from torchrepro.lock.file_notes import WRITTEN
from torchrepro.lock.repository import CopyError
from torchrepro.seeding.nondeterministic_calls import EXISTING_FILE
from torchrepro.verdict.diagnosis import PAGES
from torchrepro.verdict.render import counted, relative_location, short
from torchrepro.verdict.value import Advice
from torchrepro.verification.copies import Copy, FolderState, copy_of, temporary_folder
from torchrepro.verification.runner import last_lines, rows_of, status_in_words, traces_in

if TYPE_CHECKING:
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.verdict.value import Verdict
    from torchrepro.verification.perturbations import RunEnvironment
    from torchrepro.verification.result import Run
    from torchrepro.verification.runner import Runner, RunRequest

_LINES = 100  # the last lines of a run's output, which contain its traceback
_LOCATION = re.compile(r'File "([^"]+)", line (\d+)')


class CarriedFile(NamedTuple):
    """A file that one run wrote and the next run read, so that state leaks between the runs."""

    path: str
    written: str
    """The line of the program that wrote it, as ``file:line``; empty if it was not observed."""
    read: str  # the line that first read it in the later run


def carried(first: Run, second: Run) -> tuple[CarriedFile, ...]:
    """Return the files that `second` read and that were written after `first` began.

    `second` ran the same command after `first`. The result is empty if a run was killed before it
    recorded its list of files.
    """
    earlier, later = (
        [
            trace.meta
            for trace in traces_in(run.folder)
            if None not in (trace.meta.get("began"), trace.meta.get("files"))
        ]
        for run in (first, second)
    )
    if not (earlier and later):
        return ()
    begun, ended = (min(meta["began"] for meta in metas) for metas in (earlier, later))
    written = {file["path"]: file["written"] for meta in earlier for file in meta["files"]}
    read = {
        file["path"]: file["read"]
        for meta in later
        for file in meta["files"]
        if file["read"] and begun <= file["changed"] < ended
    }
    return tuple(
        CarriedFile(printable(path), printable(written.get(path, "")), printable(line))
        for path, line in read.items()
    )


@dataclass(frozen=True, slots=True)
class Leftovers:
    """The files that the first run of a command left behind, found by two scans of the folder."""

    before: FolderState
    after: FolderState
    runs: tuple[Run, Run]  # the first run, and a later run
    carried: tuple[CarriedFile, ...]  # leftovers that the later run read

    @property
    def created(self) -> list[str]:
        """The files that the first run created, relative to the current folder."""
        names = self.after.files.keys() - self.before.files.keys()
        return sorted(relative_location(str(self.before.root / name)) for name in names)

    @property
    def overwritten(self) -> list[str]:
        """The files of `carried` that existed before run 1, relative to the current folder."""
        names = (relative_location(file.path) for file in self.carried)
        return [name for name in names if name not in self.created]

    @property
    def cause(self) -> str:
        """A sentence about a file of `carried`, preferably from run 1, and lines that use it."""
        file = min(self.carried, key=lambda file: relative_location(file.path) in self.overwritten)
        name = relative_location(file.path)
        note = "" if name in self.created else ", overwritten by run 1"
        wrote = f"written at {short(file.written)} and " if file.written else ""
        return (
            f"A file that one run leaves for the next: {name}{note}, {wrote}read at "
            f"{short(file.read)}."
        )

    def copy_without_them(self, runner: Runner) -> AbstractContextManager[Runner]:
        """Change into a copy of the folder without the files that the first run created.

        A file that the first run overwrote has its present contents. Raises `CopyError` as
        `copy_of` does. Also raises it if a file of `carried` is outside the folder, or if all
        files of `carried` existed before the first run.
        """
        for file in self.carried:
            if not Path(file.path).is_relative_to(self.before.root):
                raise CopyError(f"{relative_location(file.path)} is not in {self.before.root}")
        if len(self.overwritten) == len(self.carried):
            raise CopyError(self.why_not_undone)
        return copy_of(self.before, self.written, runner)

    @property
    def why_not_undone(self) -> str:
        return f"existed before, and overwritten by run 1: {some(self.overwritten)}"

    @contextmanager
    def new_folder(self, runner: Runner) -> Iterator[Runner]:
        """Change into an empty folder. The command gets absolute paths, so it finds its files."""
        with temporary_folder() as temporary:
            copy = Copy.of(self.before.root, Path.cwd(), temporary, runner.folder)
            command = self.in_full(runner.command)

            def strayed() -> str:
                written = (Path(use.path) for use in copy.uses if use.kind == WRITTEN)
                return next((str(path) for path in written if path.is_relative_to(copy.root)), "")

            with copy.entered(runner) as runner_in_copy:
                yield replace(runner_in_copy, command=command, strayed=strayed)

    def in_full(self, words: Sequence[str]) -> list[str]:
        """Return a command with absolute paths, except for files that the first run created."""
        created = {*self.created, *self._created_folders}

        def absolute(word: str) -> str:
            before, equals, path = word.rpartition("=")
            is_old = os.path.lexists(path) and os.path.normpath(path) not in created
            return f"{before}{equals}{Path(path).absolute()}" if is_old else word

        return [*map(absolute, words)]

    @property
    def written(self) -> set[str]:
        """The absolute paths of files that a run changed or opened for writing."""
        root, before, after = self.before.root, self.before.files, self.after.files
        changed = {str(root / name) for name in before if after.get(name) != before[name]}
        uses = (use for run in self.runs for use in rows_of(run, "files"))
        return changed | {use["path"] for use in uses if use["written"]}

    @property
    def is_refused(self) -> bool:
        """Whether the first run succeeded and the later run failed."""
        first, later = self.runs
        return bool(later.status and not first.status)

    def explained(self, verdict: Verdict) -> Verdict:
        """Return `verdict`, with the leftovers as the cause if they explain the difference."""
        first, later = self.runs
        if verdict.same:
            return verdict
        if self.is_refused:
            cause = self.refusal
        elif later.steps < first.steps and self.carried:
            cause = self.cause
        elif later.steps < first.steps and self.created:
            steps = counted(later.steps, "step")
            cause = f"Run 1 left {some(self.created)}, and run 2 made only {steps}."
        else:
            return verdict
        page = PAGES[EXISTING_FILE]
        advice = verdict.advice or Advice("", cause_id=page)
        advice = replace(advice, cause=cause, edit=None, cause_id=page)
        return replace(verdict, advice=advice)

    @property
    def refusal(self) -> str:
        """A sentence with the error of the later run, the program line, and files of run 1."""
        run = self.runs[1]
        lines = [line for line in last_lines(run, _LINES) if line.strip()]
        message = lines[-1].strip() if lines else status_in_words(run.status)
        matches = (_LOCATION.search(line) for line in reversed(lines))
        program_lines = (
            f"{match[1]}:{match[2]}" for match in matches if match and not is_library(match[1])
        )
        line = next(program_lines, "")
        named = [name for name in (*self.created, *self._created_folders) if name in message]
        files = named or self.created
        cause = f"{run.name.replace('-', ' ')} failed: {message}"
        cause += f" ({short(line)})" if line else ""
        cause += f"; run 1 created {some(files)}" if files else ""
        return f"{cause}."

    @property
    def _created_folders(self) -> list[str]:
        created = self.after.folders - self.before.folders
        return sorted(relative_location(str(self.before.root / folder)) for folder in created)


@dataclass(frozen=True, slots=True)
class DivergedRuns:
    """Two runs of a command that differ, the way they were started, and their comparison."""

    request: RunRequest
    runner: Runner
    environments: Sequence[RunEnvironment]  # the environments of the two runs
    verdict: Verdict
    meta: Mapping[str, Any]
    leftovers: Leftovers  # the files that the first of the two runs left behind

    @property
    def between(self) -> tuple[Run, Run]:
        return self.leftovers.runs

    @property
    def resolved(self) -> ResolvedProfile | None:
        return self.request.resolved
