"""The command of a lock: how it is stored, one run of it, and the dependencies of that run.

`Dependencies` are those that neither git nor the locked environment contains: files that git does
not track, folders that the run listed, and environment variables that it read. A lock stores names
and digests, but skips names that may contain a secret. A changed dependency does not violate the
lock. If results differ, changed dependencies may be the cause.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from torchrepro.application.launch import is_python
from torchrepro.ground.errors import ProfileError, shown
from torchrepro.ground.redaction import cleaner, shareable, sounds_secret
from torchrepro.lock import file_notes, repository
from torchrepro.lock.diff import RUN_DEPENDENCIES, Difference
from torchrepro.lock.file_notes import LISTED, READ, VARIABLE, WRITTEN, Use, first_uses, is_of_cache
from torchrepro.lock.lock_file import named_in
from torchrepro.lock.locked_results import Numbers
from torchrepro.lock.repository import FAILED, CopyError, file_state, is_of_environment
from torchrepro.manifest.contents import known_secrets, read_complete
from torchrepro.profile.load import resolve
from torchrepro.trace.request import LEVELS, RecordingRequest, is_range
from torchrepro.verdict.render import relative_location
from torchrepro.verification.perturbations import NO_CHANGE, logging_file_uses
from torchrepro.verification.runner import RunRequest, last_lines

if TYPE_CHECKING:
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.verification.result import Run
    from torchrepro.verification.runner import Runner

LOCK_COMMAND = "torchrepro lock PROFILE -o FILE -- COMMAND"
MOST_FILES, MOST_BYTES, MOST_SECONDS = 1_000, 20 * 10**9, 10.0  # limits for computing digests
_MOST_VARIABLES = 100  # a program that reads more iterates over all of them
_BLOCK = 2**20
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
        return cls(tuple(command), folder, repository.repository_root(folder), steps, every)

    @classmethod
    def of_lock(
        cls, path: Path, contents: Mapping[str, Any], command: Sequence[str]
    ) -> LockedCommand:
        """Return the command of a lock.

        Raises `ProfileError` if `command` differs from it, and if the lock is damaged.
        """
        _refuse_damaged(path, contents)
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

    def runner(self, say: Any, meanwhile: Any) -> AbstractContextManager[Runner]:
        recording = RecordingRequest("", LEVELS[0], self.steps)
        request = RunRequest(self.command, recording=recording, say=say, meanwhile=meanwhile)
        return request.runner(None)

    def run(self, runner: Runner, resolved: ResolvedProfile, name: str) -> RecordedRun:
        """Run and record the command once. Raises the same exceptions as `Runner.run`."""
        log, began = runner.folder / f"{name}.files", time.time()
        noting = NO_CHANGE
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
        return file_notes.noted(self.log)

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
                for name in repository.names_by_git(root, "ls-files", "-z"):
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
        return cls(path, contents, asked, numbers, resolve(*named_in(path, contents), typed=False))


def _refuse_damaged(path: Path, contents: Mapping[str, Any]) -> None:
    """Raise `ProfileError` if a lock contains an invalid entry for a file or other dependency."""
    for key in ("files", *RUN_DEPENDENCIES):
        section = contents.get(key, {})
        for name, state in section.items() if isinstance(section, dict) else [("", section)]:
            is_inside = not {"", ".", "..", ".git"} & {*name.split("/")} and "\0" not in name
            is_file = is_inside and repository.HASH.fullmatch(str(state))
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


class Dependencies(NamedTuple):
    data: Mapping[str, str] = {}  # files, each with a digest
    listed: Mapping[str, str] = {}  # folders, each with a digest of the names in it
    variables: Mapping[str, str] = {}  # each `set` or `not set`
    left_out: str = ""  # the limit that was reached, so that some files may be missing; or empty

    @classmethod
    def of(
        cls, run: RecordedRun, without: Set[str], locked: Dependencies | None = None
    ) -> Dependencies:
        """Return the dependencies of a run, and those in `locked` in their present state.

        Omits the files in `without`, files that the run wrote, and names that may be secret.
        """
        root, past = run.asked.root or Path(), list[Use]()
        if locked:
            past += [Use(READ, str(path_of(name, root)), 0, 0) for name in locked.data]
            past += [Use(LISTED, str(path_of(name, root)), 0, 0) for name in locked.listed]
        kinds = first_uses((*past, *run.uses))
        written = {path for path, by_kind in kinds.items() if WRITTEN in by_kind}
        parents = {str(parent) for path in written for parent in Path(path).parents}
        names: dict[str, str] = {}
        variables: dict[str, str] = {}
        clean = cleaner(known_secrets())
        for path, by_kind in sorted(kinds.items()):
            name = path if VARIABLE in by_kind else _name(path, root)
            parts = Path(name).parts
            if any(map(sounds_secret, parts)) or clean(name) != name:
                continue
            if VARIABLE in by_kind:
                variables[path] = "set" if by_kind[VARIABLE].size else "not set"
            elif (
                name not in without
                and not any(part.startswith(".") and part != ".cache" for part in parts)
                and not is_of_cache(path)
                and not is_of_environment(Path(path), root)
            ):
                names[path] = name
        read = (path for path in names if READ in kinds[path] and path not in written)
        data, left_out = _digests(p for p in read if kinds[p][READ].changed / 1e9 < run.began)
        listed = (path for path in names if LISTED in kinds[path] and path not in parents)
        return cls(
            {names[path]: digest for path, digest in data.items()},
            {names[path]: _digest_of_names(path) for path in listed if Path(path).is_dir()},
            variables if len(variables) <= _MOST_VARIABLES else {},
            left_out,
        )

    @classmethod
    def held_by(cls, contents: Mapping[str, Any]) -> Dependencies:
        return cls(**{key: contents[key] for key in cls._fields if key in contents})

    def to_json(self) -> dict[str, Any]:
        return {key: it for key, it in self._asdict().items() if it or key != "left_out"}

    def differing(self, now: Dependencies, root: Path) -> Iterator[Difference]:
        """Yield the dependencies whose locked state certainly differs from the state in `now`."""
        for section in RUN_DEPENDENCIES:
            locked_states, states = getattr(self, section), getattr(now, section)
            for name in sorted({*locked_states, *states}):
                before, after = locked_states.get(name), states.get(name)
                is_gone = section != "variables" and not path_of(name, root).exists()
                is_known = before is not None or not self.left_out
                if before != after and is_known and (after is not None or is_gone):
                    yield Difference(section, name, before, after)


def _digests(paths: Iterable[str]) -> tuple[dict[str, str], str]:
    """Return a digest of each file, and in words the limit that was reached, if any."""
    digests, size, until = dict[str, str](), 0, time.monotonic() + MOST_SECONDS
    for path in paths:
        digest = xxhash.xxh3_64()
        with suppress(OSError), open(path, "rb") as file:  # noqa: PTH123 - a text
            size += os.fstat(file.fileno()).st_size
            if len(digests) == MOST_FILES:
                return digests, f"{MOST_FILES:,} files"
            if size > MOST_BYTES:
                return digests, f"{MOST_BYTES / 1e9:.0f} GB"
            while block := file.read(_BLOCK):
                if time.monotonic() > until:
                    return digests, f"{MOST_SECONDS:g} s of reading"
                digest.update(block)
            digests[path] = digest.hexdigest()
    return digests, ""


def _digest_of_names(folder: str) -> str:
    names = sorted({*os.listdir(folder)} - {*file_notes.SKIPPED_FOLDERS})  # noqa: PTH208 - names
    return xxhash.xxh3_64(repr(names).encode()).hexdigest()


def _name(path: str, root: Path) -> str:
    for folder, prefix in ((f"{root}/", ""), (f"{Path.home()}/", "~/")):
        if path.startswith(folder):
            return prefix + path.removeprefix(folder)
    return path


def path_of(name: str, root: Path) -> Path:
    """Return the path of the file or folder that a lock lists under `name`."""
    return root / Path(name).expanduser()


class FilesRead(NamedTuple):
    """The files of a repository that a run has read, by relative path."""

    code: Mapping[str, str]  # files that git does not ignore, each with its blob
    ignored: tuple[str, ...]
    """Ignored files that the run did not write itself, and folders of such files."""


def files_read(run: RecordedRun) -> FilesRead:
    """Return the files that a run read, and the existing files that its command names.

    Files that the run wrote itself are omitted. Raises `CopyError` if git fails, if the log of the
    run is not complete, if the program is not a file, and if a program file changed during the run.
    """
    root, uses = run.asked.root, run.uses
    if root is None:
        raise CopyError("git finds no repository here")
    if any(use.kind == file_notes.TOO_MANY for use in uses):
        raise CopyError("the run uses too many files of its repository to record them")
    if any(use.kind == file_notes.TYPED for use in uses):
        raise CopyError("the program came from `python -c` or standard input, not from a file")
    sources = (origin.to_json()["set_by"] for origin in run.resolved.origins.values())
    for word in (*run.asked.command, *(source.rpartition(":")[0] for source in sources)):
        path = Path(os.path.abspath(word))  # noqa: PTH100 - does not resolve links
        if path.is_file():
            uses.append(Use(READ, str(path), *file_state(path, follow=True)))
    uses_of: dict[str, dict[str, Use]] = {}  # relative path -> kind of use -> the first such use
    for text, by_kind in first_uses(uses).items():
        path = Path(text)
        if root in path.parents and not is_of_environment(path, root):
            uses_of[str(path.relative_to(root))] = by_kind
    tracked, ignored = repository.tracked_and_ignored(root, uses_of)
    code, written = [], set()
    for name, by_kind in uses_of.items():
        path, read, first = root / name, by_kind.get(READ), next(iter(by_kind))
        if WRITTEN in by_kind:
            written.add(name)
        if read is None or not (path.is_file() or path.is_symlink()):
            continue
        changed = False
        if read.changed / 1e9 >= run.began or first == WRITTEN:
            written.add(name)
            changed = name in tracked and first == READ
        elif name not in ignored:
            code.append(name)
            changed = file_state(path, follow=True) != (read.changed, read.size)
        if changed:
            raise CopyError(f"{name} was changed during the run")
    needed = {
        name
        for name in ignored - written
        if uses_of[name].keys() & {READ, LISTED} and Path(name).name != "__pycache__"
    }
    outermost = (n for n in sorted(needed) if not any(str(p) in needed for p in Path(n).parents))
    linked = (path for name in outermost for path in _without(root, name, written))
    return FilesRead(repository.blobs_of(root, code), tuple(linked))


def _without(root: Path, name: str, written: set[str]) -> Iterator[str]:
    """Yield `name`. If files in this folder were written, yield the other paths in it instead."""
    inside = {path for path in written if path.startswith(f"{name}/")}
    if not inside:
        yield name
        return
    for entry in sorted(os.listdir(root / name)):  # noqa: PTH208 - names
        below = f"{name}/{entry}"
        if below not in written and entry != "__pycache__":
            yield from _without(root, below, inside)
