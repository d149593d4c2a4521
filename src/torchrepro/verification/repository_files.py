"""Which files of its repository a run has read, and which commit has them as they were then.

A lock is written before the commit that holds it, and squashing, rebasing and merging give that
commit another name. So the commit of a lock is found by content: every file of the repository that
the locked run read has to have the blob that the lock names.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, SubprocessError
from typing import TYPE_CHECKING

from torchrepro.manifest.environment import git
from torchrepro.verification.copies import CopyError, is_of_environment
from torchrepro.verification.file_notes import LISTED, READ, TOO_MANY, WRITTEN, Use, noted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_SUBMODULE = b"160000"


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
    tracked = _tracked(root)
    ignored = _ignored(root, kinds, tracked)
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


def _tracked(root: Path) -> dict[str, bytes]:
    """Return the mode of each file that git tracks; raises `CopyError` where it does not tell."""
    try:
        entries = git(root, "ls-files", "-s", "-z", timeout=None).split(b"\0")
    except (OSError, SubprocessError):
        raise CopyError("git does not say which files it tracks") from None
    pairs = (entry.partition(b"\t") for entry in entries if entry)
    return {os.fsdecode(name): its[: len(_SUBMODULE)] for its, _, name in pairs}


def _ignored(root: Path, names: Iterable[str], tracked: Mapping[str, bytes]) -> set[str]:
    """Return those of some names that git ignores; raises `CopyError` for one in a submodule."""
    every = [*names]
    for folder in (name for name, mode in tracked.items() if mode == _SUBMODULE):
        for name in every:
            if name.startswith(f"{folder}/"):
                raise CopyError(f"{name} belongs to the submodule {folder}")
    try:
        given = b"\0".join(map(os.fsencode, every))
        return set(_lines(git(root, "check-ignore", "-z", "--stdin", timeout=None, given=given)))
    except (OSError, SubprocessError) as error:
        if getattr(error, "returncode", 0) == 1:  # none
            return set()
        raise CopyError("git does not say which files it ignores") from None


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


def blobs_of(root: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the blob that git would make of each of some files; what is not there is left out.

    Raises `CopyError` where git cannot.
    """
    there = [name for name in sorted(names) if (root / name).is_file() and "\n" not in name]
    given = b"\n".join(map(os.fsencode, there))
    try:
        # By their paths, so that what git stores is known where a filter changes it.
        found = git(root, "hash-object", "--stdin-paths", timeout=None, given=given)
    except (OSError, SubprocessError):
        raise CopyError("git cannot read the files of the program") from None
    return dict(zip(there, found.decode().split(), strict=True))


def commit_with(root: Path, files: Mapping[str, str], absent: Iterable[str] = ()) -> str:
    """Return the newest commit in which `files` have these blobs and `absent` ones are not there.

    First the history of HEAD is searched, then all other branches. Raises `CopyError` with the
    reason, and what would help, where there is none.
    """
    paths = ["--", *(f":(top,literal){name}" for name in files)]
    given = "\n".join([*paths, ""]).encode(errors="surrogateescape")
    seen: set[str] = set()
    gone = sorted(absent)
    for which in ("HEAD", "--all"):
        words = "rev-list", "--full-history", "--date-order", which, "--stdin"
        try:
            commits = git(root, *words, timeout=None, given=given).decode().split()
        except (OSError, SubprocessError):
            continue  # a repository without a commit has no HEAD
        with Popen(  # noqa: S603 - words of our own
            ["git", "-C", str(root), "cat-file", "--batch-check=%(objectname)"],  # noqa: S607
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            cwd=os.sep,
            env={name: its for name, its in os.environ.items() if not name.startswith("GIT_")},
        ) as asked:
            for commit in commits:
                if commit not in seen and _has(asked, commit, files, gone):
                    return commit
                seen.add(commit)
    shallow = git(root, "rev-parse", "--is-shallow-repository").strip() == b"true"
    hint = ": its history is cut off; git fetch --unshallow" if shallow else ""
    raise CopyError(f"no commit here has the files of the lock{hint}")


def _has(asked: Popen[bytes], commit: str, files: Mapping[str, str], absent: Sequence[str]) -> bool:
    def blob(name: str) -> bytes:
        if asked.stdin is None or asked.stdout is None:
            return b""
        asked.stdin.write(f"{commit}:{name}\n".encode(errors="surrogateescape"))
        asked.stdin.flush()
        return asked.stdout.readline().strip()

    if any(blob(name) != its.encode() for name, its in files.items()):
        return False
    return all(blob(name).endswith(b"missing") for name in absent)
