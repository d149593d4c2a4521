"""Finds dependencies of a run that neither git nor the locked environment contains.

They are files that git does not track, folders that the run listed, and environment variables that
it read. A lock stores names and digests, but skips names that may contain a secret. A changed
dependency does not violate the lock. If results differ, changed dependencies may be the cause.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from torchrepro.ground.redaction import cleaner, sounds_secret
from torchrepro.lock import file_notes
from torchrepro.lock.diff import RUN_DEPENDENCIES, Difference
from torchrepro.lock.file_notes import LISTED, READ, VARIABLE, WRITTEN, Use, first_uses, is_of_cache
from torchrepro.lock.repository import (
    CopyError,
    blobs_of,
    file_state,
    is_of_environment,
    tracked_and_ignored,
)
from torchrepro.manifest.contents import known_secrets

if TYPE_CHECKING:
    from torchrepro.checking.locked_command import RecordedRun

MOST_FILES, MOST_BYTES, MOST_SECONDS = 1_000, 20 * 10**9, 10.0  # limits for computing digests
_MOST_VARIABLES = 100  # a program that reads more iterates over all of them
_BLOCK = 2**20


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
    tracked, ignored = tracked_and_ignored(root, uses_of)
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
    return FilesRead(blobs_of(root, code), tuple(linked))


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
