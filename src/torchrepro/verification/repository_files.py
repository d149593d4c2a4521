"""Which files of its repository a run has read, and which commit has them as they were then.

A lock is written before the commit that holds it, and squashing, rebasing and merging give that
commit another name. So the commit of a lock is found by content: every file of the repository that
the locked run read has to have the blob that the lock names.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from subprocess import SubprocessError
from typing import TYPE_CHECKING

from torchrepro.manifest.environment import git
from torchrepro.verification.copies import (
    CopyError,
    is_checked_out,
    is_of_environment,
    repositories,
    submodules,
)
from torchrepro.verification.file_notes import LISTED, READ, TOO_MANY, WRITTEN, Use, noted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class FilesRead:
    """The files of a repository that a run has read, by their paths there."""

    code: Mapping[str, str]
    """Those that git tracks or does not ignore, each with its blob."""
    ignored: tuple[str, ...]
    """Files that git ignores and that the run did not write, and folders of such files."""


def files_read(root: Path, log: Path, began: float, named: Iterable[Path] = ()) -> FilesRead:
    """Return what a run that began then has noted in `log`; `named` are files to add.

    What the run wrote itself it has not read. Raises `CopyError` where git cannot tell, and for
    a file of the program that was changed meanwhile.
    """
    uses = noted(log)
    if any(use.kind == TOO_MANY for use in uses):
        raise CopyError("the run uses more files of its repository than are noted")
    kinds: dict[str, dict[str, Use]] = {}
    for each in [*uses, *_named(root, named)]:
        path = Path(each.path)
        if path.is_relative_to(root) and path != root and not is_of_environment(path, root):
            kinds.setdefault(str(path.relative_to(root)), {}).setdefault(each.kind, each)
    try:
        parts = _by_repository(root, kinds)
        tracked = set(chain.from_iterable(_tracked(root, part) for part in parts))
    except (OSError, SubprocessError):
        raise CopyError("git does not say which files it tracks") from None
    ignored = set(chain.from_iterable(_ignored(root, *each) for each in parts.items()))
    code, own = [], []
    for name, its in kinds.items():
        use = its.get(READ)
        if use is None or (not (root / name).is_file() and not (root / name).is_symlink()):
            continue
        if use.changed / 1e9 >= began or next(iter(its)) == WRITTEN:
            own.append(name)  # the run has written it
        elif name not in ignored:
            code.append(name)
    for name in own:
        if name in tracked and next(iter(kinds[name])) == READ:
            raise CopyError(f"{name} was changed while the run went on")
    for name in code:
        now = (root / name).stat()
        if (now.st_mtime_ns, now.st_size) != kinds[name][READ][2:]:
            raise CopyError(f"{name} was changed while the run went on")
    return FilesRead(blobs_of(root, code), tuple(_to_link(root, kinds, ignored, {*own})))


def _named(root: Path, paths: Iterable[Path]) -> Iterator[Use]:
    for path in paths:
        whole = Path(os.path.abspath(path))  # noqa: PTH100 - links stay as they are named
        if whole.is_file() and whole.is_relative_to(root):
            its = whole.stat()
            yield Use(READ, str(whole), its.st_mtime_ns, its.st_size)


def _lines(text: bytes) -> list[str]:
    return [os.fsdecode(name) for name in text.split(b"\0") if name]


def _by_repository(root: Path, names: Iterable[str]) -> dict[Path, list[str]]:
    """Return `root` and its submodules, each with those of some names that are its own."""
    found: dict[Path, list[str]] = {part: [] for part in repositories(root)}
    for name in names:
        # The innermost comes first; the folder of a submodule belongs to what it lies in.
        found[next(part for part in found if part in (root / name).parents)].append(name)
    return found


def _tracked(root: Path, part: Path) -> Iterator[str]:
    for name in _lines(git(part, "ls-files", "-z", timeout=None)):
        yield str((part / name).relative_to(root))


def _ignored(root: Path, part: Path, names: Iterable[str]) -> list[str]:
    """Return those of some names that git ignores."""
    own = {str((root / name).relative_to(part)): name for name in names}
    given = b"\0".join(map(os.fsencode, own))
    try:
        found = git(part, "check-ignore", "-z", "--stdin", timeout=None, given=given)
    except (OSError, SubprocessError) as error:
        if getattr(error, "returncode", 0) == 1:  # none
            return []
        raise CopyError("git does not say which files it ignores") from None
    return [own[each] for each in _lines(found)]


def _to_link(
    root: Path, kinds: Mapping[str, Mapping[str, Use]], ignored: set[str], own: set[str]
) -> Iterator[str]:
    """Yield what is needed of what git ignores: as it was listed, without what the run wrote."""
    written = {name for name, its in kinds.items() if WRITTEN in its} | own
    needed = {
        name
        for name in ignored - written
        if (READ in kinds[name] or LISTED in kinds[name]) and Path(name).name != "__pycache__"
    }
    for name in sorted(needed):
        if any(str(above) in needed for above in Path(name).parents):
            continue
        yield from _without(root, name, written)


def _without(root: Path, name: str, written: set[str]) -> Iterator[str]:
    inside = [each for each in written if each.startswith(f"{name}/")]
    if not inside:
        yield name
        return
    for entry in sorted(os.listdir(root / name)):  # noqa: PTH208 - names
        below = f"{name}/{entry}"
        if below not in written and entry != "__pycache__":
            yield from _without(root, below, {*inside})


def blobs_of(root: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the blob that git would make of each of some files; what is not there is left out.

    Raises `CopyError` where git cannot.
    """
    there = [name for name in sorted(names) if (root / name).is_file() and "\n" not in name]
    found: dict[str, str] = {}
    try:
        for part, its in _by_repository(root, there).items():
            own = (str((root / name).relative_to(part)) for name in its)
            given = b"\n".join(map(os.fsencode, own))
            # By their paths, so that what git stores is known where a filter changes it.
            blobs = git(part, "hash-object", "--stdin-paths", timeout=None, given=given)
            found |= zip(its, blobs.decode().split(), strict=True)
    except (OSError, SubprocessError):
        raise CopyError("git cannot read the files of the program") from None
    return {name: found[name] for name in there}


_ABSENT = ""  # the blob of a file that is not there
_BLOCK = 64  # commits that git is asked about at once


def commit_with(root: Path, files: Mapping[str, str], absent: Iterable[str] = ()) -> str:
    """Return the newest commit in which `files` have these blobs and `absent` ones are not there.

    First the history of HEAD is searched, then all other branches. Raises `CopyError` with the
    reason, and what would help, where there is none.
    """
    wanted = {**dict.fromkeys(absent, _ABSENT), **files}
    own, inner = _by_submodule(root, wanted)
    paths = ["--", *(f":(top,literal){name}" for name in (*own, *inner))]
    given = "\n".join([*paths, ""]).encode(errors="surrogateescape")
    for which in ("HEAD", "--all"):
        words = "rev-list", "--full-history", "--date-order", which, "--stdin"
        try:
            commits = git(root, *words, timeout=None, given=given).decode().split()
        except (OSError, SubprocessError):
            continue  # a repository without a commit has no HEAD
        for commit in _having(root, commits, wanted):
            return commit
    gone = [folder for folder in inner if not is_checked_out(root / folder)]
    if gone:
        raise CopyError(f"the submodule {gone[0]} is not there; git submodule update --init")
    for part in repositories(root):
        if git(part, "rev-parse", "--is-shallow-repository").strip() == b"true":
            place = "" if part == root else f"-C {part.relative_to(root)} "
            hint = f"a history is cut off; git {place}fetch --unshallow"
            raise CopyError(f"no commit here has the files of the lock: {hint}")
    raise CopyError("no commit here has the files of the lock")


def _by_submodule(
    root: Path, wanted: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return what is wanted of a repository itself, and of each of its submodules."""
    own: dict[str, str] = {}
    inner: dict[str, dict[str, str]] = {}
    folders = [*submodules(root)]
    for name, blob in wanted.items():
        folder = next((each for each in folders if name.startswith(f"{each}/")), None)
        if folder is None:
            own[name] = blob
        else:
            inner.setdefault(folder, {})[name.removeprefix(f"{folder}/")] = blob
    return own, inner


def _having(root: Path, commits: Sequence[str], wanted: Mapping[str, str]) -> Iterator[str]:
    """Yield those of some commits whose files have the wanted blobs."""
    own, inner = _by_submodule(root, wanted)
    for start in range(0, len(commits), _BLOCK):
        block = commits[start : start + _BLOCK]
        asked = "".join(f"{commit}:{name}\n" for commit in block for name in own)
        answers = iter(
            git(
                *(root, "cat-file", "--batch-check=%(objectname)"),
                timeout=None,
                given=asked.encode(errors="surrogateescape"),
            ).splitlines()
        )
        for commit in block:
            found = [(next(answers), blob) for blob in own.values()]
            if all(
                it == blob.encode() if blob else it.endswith(b" missing") for it, blob in found
            ) and all(_has_inside(root, commit, *each) for each in inner.items()):
                yield commit


def _has_inside(root: Path, commit: str, folder: str, wanted: Mapping[str, str]) -> bool:
    try:
        inner = git(root, "rev-parse", "--verify", "-q", f"{commit}:{folder}").decode().strip()
        return any(_having(root / folder, [inner], wanted))
    except (OSError, SubprocessError):  # it was no submodule yet, or is not there
        return False
