"""The command of a lock: how it is stored, one run of it, and the files which that run used."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Any

from torchrepro.application.launch import is_python
from torchrepro.ground.errors import ProfileError
from torchrepro.ground.messages import shown
from torchrepro.ground.redaction import shareable
from torchrepro.lock.diff import RUN_DEPENDENCIES
from torchrepro.lock.file_notes import READ, Use, first_uses, noted
from torchrepro.lock.lock_file import named_in
from torchrepro.lock.locked_results import Numbers
from torchrepro.lock.repository import FAILED, HASH, names_by_git, repository_root
from torchrepro.manifest.contents import known_secrets, read_complete
from torchrepro.profile.load import resolve
from torchrepro.trace.request import LEVELS, RecordingRequest, is_range
from torchrepro.verdict.render import relative_location
from torchrepro.verification.perturbations import RunEnvironment, logging_file_uses
from torchrepro.verification.runner import Runner, last_lines

if TYPE_CHECKING:
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.verification.result import Run

LOCK_COMMAND = "torchrepro lock PROFILE -o FILE -- COMMAND"
_QUOTED = re.compile("'([^']+)'")


@dataclass(frozen=True, slots=True)
class LockedCommand:
    """The command of a lock, and the steps whose results the lock contains."""

    command: tuple[str, ...]
    folder: Path  # the working directory
    root: Path | None  # the root of the folder's repository
    steps: tuple[int, int] | None = None
    every: int = 1

    @classmethod
    def here(
        cls, command: Sequence[str], steps: tuple[int, int] | None = None, every: int = 1
    ) -> LockedCommand:
        folder = Path.cwd()
        return cls(tuple(command), folder, repository_root(folder), steps, every)

    @classmethod
    def of_lock(
        cls, path: Path, contents: Mapping[str, Any], command: Sequence[str]
    ) -> LockedCommand:
        """Return the command of a lock. Raises `ProfileError` if `command` differs from it."""
        if "command" not in contents:
            todo = f"add them: torchrepro lock PROFILE -o {path} -- {join(command)}"
            raise ProfileError.about("the lock has no results of a command", str(path), todo=todo)
        steps, every = contents.get("steps"), contents.get("every")
        if not (steps is None or is_range(steps)) or type(every) is not int or every < 1:
            raise ProfileError.about("damaged: not the steps of a run", str(path), "steps")
        asked = cls.here(command, None if steps is None else (steps[0], steps[1]), every)
        for key, words_now in asked.to_json().items():
            used, locked = (
                join(map(str, words)) if isinstance(words, list) else str(words)
                for words in (words_now, contents.get(key))
            )
            if used != locked:
                problem = f"another {key} than in the lock"
                todo = f"use another lock: {LOCK_COMMAND}"
                raise ProfileError.about(problem, str(path), key, used, legal=locked, todo=todo)
        return asked

    def to_json(self) -> dict[str, Any]:
        """Return the JSON values for a lock, with ``python`` in place of the interpreter path."""
        words = shareable(self.command, known_secrets())
        folder = self.folder.relative_to(self.root) if self.root else Path()
        return {
            "command": [*(["python"] if is_python(words[0]) else words[:1]), *words[1:]],
            "folder": folder.as_posix(),
            "steps": list(self.steps) if self.steps else None,
            "every": self.every,
        }

    def runner(self, output: Path, say: Any, meanwhile: Any) -> Runner:
        request = RecordingRequest("", LEVELS[0], self.steps)
        return Runner(self.command, output, request, None, say, meanwhile)

    def run(self, runner: Runner, resolved: ResolvedProfile, name: str) -> RecordedRun:
        """Run and record the command once. Raises the same exceptions as `Runner.run`."""
        log, began = runner.folder / f"{name}.files", time.time()
        noting = RunEnvironment()
        if self.root is not None:
            noting = logging_file_uses(self.root, log, ours=runner.folder)
        return RecordedRun(self, resolved, runner.run(resolved, name, noting), log, began)


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """One run of a locked command under a profile, and the log of the files that it used."""

    asked: LockedCommand
    resolved: ResolvedProfile
    run: Run
    log: Path  # see `file_notes`
    began: float

    @property
    def uses(self) -> list[Use]:
        return noted(self.log)

    def left_before(self) -> list[str]:
        """Return untracked files that the run read and that are older than the run, newest first.

        Earlier runs may have created these files. If the run failed, returns the existing files
        that the last line of its output names.
        """
        root = self.asked.root
        changed = {
            Path(path): uses[READ].changed
            for path, uses in first_uses(self.uses).items()
            if READ in uses and root in Path(path).parents
        }
        if self.run.status:
            named = map(Path, _QUOTED.findall("".join(last_lines(self.run, 1))))
            changed = {path: path.stat().st_mtime_ns for path in named if path.exists()}
        if root is not None:
            with suppress(*FAILED):
                for name in names_by_git(root, "ls-files", "-z"):
                    changed.pop(root / name, None)
        old = [(at, path) for path, at in changed.items() if at / 1e9 < self.began]
        return [relative_location(str(path)) for _, path in sorted(old, reverse=True)]


@dataclass(frozen=True, slots=True)
class ResultsLock:
    """A lock with the results of a command on this platform, which is read and validated once."""

    path: Path
    contents: Mapping[str, Any]
    asked: LockedCommand
    numbers: Numbers
    resolved: ResolvedProfile  # the locked profile, resolved on this machine

    @classmethod
    def read(cls, path: Path, command: Sequence[str]) -> ResultsLock:
        """Read the lock in the file `path`.

        Raises `ProfileError` if it is damaged, has no results, or is a lock of another command
        than `command`, and if its profile cannot be resolved.
        """
        contents = read_complete(path)[1]
        asked = LockedCommand.of_lock(path, contents, command)
        numbers = Numbers.from_json(contents.get("numbers"), str(path))
        _refuse_damaged(path, contents)
        return cls(path, contents, asked, numbers, resolve(*named_in(path, contents), typed=False))


def _refuse_damaged(path: Path, contents: Mapping[str, Any]) -> None:
    """Raise `ProfileError` if a lock contains an invalid entry for a file or other dependency."""
    for key in ("files", *RUN_DEPENDENCIES):
        section = contents.get(key, {})
        for name, state in section.items() if isinstance(section, dict) else [("", section)]:
            is_inside = not {"", ".", "..", ".git"} & {*name.split("/")} and "\0" not in name
            is_file = is_inside and HASH.fullmatch(str(state))
            if not isinstance(state, str) or (key == "files" and not is_file):
                legal = "a path inside of the repository, with 40 hexadecimal digits"
                raise ProfileError.about(
                    "damaged: not a name with its state",
                    str(path),
                    key,
                    f"{name!r}: {shown(state)}",
                    legal=legal if key == "files" else "",
                    todo=f"lock again: {LOCK_COMMAND}",
                )
