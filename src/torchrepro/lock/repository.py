"""The repository of a program: its files, its commits, and their writing into another folder.

What is written there is no `git worktree`: that would register itself in the user's repository, and
run the hooks of it.

A lock is written before the commit that holds it, and squashing, rebasing and merging give that
commit another name. So the commit of a lock is found by content: every file of the repository that
the locked run read has to have the blob that the lock names.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from subprocess import SubprocessError
from typing import Any, NamedTuple

from torchrepro.lock.file_notes import (
    LEFT_OUT,
    LISTED,
    READ,
    TOO_MANY,
    TYPED,
    WRITTEN,
    Use,
    noted,
)
from torchrepro.manifest.environment import git

FAILED = (OSError, SubprocessError)  # what `git` raises

_SUBMODULE = "160000"  # the mode of its entry
_COMMIT = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")  # the name of one
_BLOCK = 64  # commits that git is asked about at once


class CopyError(Exception):
    """A copy cannot be made, or is none of what was asked for; the text says why."""


def _said(folder: Path, *words: str) -> str:
    return os.fsdecode(git(folder, *words)).rstrip("\n")


def names_by_git(folder: Path, *words: str, given: bytes = b"") -> list[str]:
    """Return the names that git lists, which end with a NUL; raises `FAILED`."""
    listed = git(folder, *words, timeout=None, given=given)
    return [os.fsdecode(name) for name in listed.split(b"\0") if name]


def repository_root(folder: Path) -> Path | None:
    try:
        return Path(_said(folder.absolute(), "rev-parse", "--show-toplevel"))
    except FAILED:
        return None


@lru_cache(10_000)
def is_of_environment(path: Path, root: Path) -> bool:
    """Whether a path below `root` belongs to a virtual environment that lies there."""
    return root in path.parents and (
        (path / "pyvenv.cfg").is_file() or is_of_environment(path.parent, root)
    )


def _submodules(root: Path, commit: str = "") -> dict[str, str]:
    """Return the folders of the submodules, checked out or not, each with its commit.

    That is the one which the index names, or the commit that is given. Raises `FAILED`.
    """
    words = ("ls-tree", "-r", "-z", commit) if commit else ("ls-files", "-s", "-z")
    entries = (entry.partition("\t") for entry in names_by_git(root, *words))
    # Beside the commit stand the mode and a word or a digit.
    return {name: max(its.split(), key=len) for its, _, name in entries if its[:6] == _SUBMODULE}


def _is_checked_out(submodule: Path) -> bool:
    return (submodule / ".git").exists()


def repositories(root: Path) -> Iterator[Path]:
    """Yield the repository at `root` after its submodules that are there, each after its own."""
    for name in _submodules(root):
        if _is_checked_out(root / name):
            yield from repositories(root / name)
    yield root


def entries(folder: Path, root: Path) -> tuple[list[Path], list[str]]:
    """Return the folders in `folder` but caches and virtual environments, and the other names.

    `root` is the outermost folder; links to folders are among the names.
    """
    folders, names = [], []
    with suppress(OSError), os.scandir(folder) as found:
        for each in found:
            path = Path(each)
            if not each.is_dir(follow_symlinks=False):
                names.append(each.name)
            elif each.name not in LEFT_OUT and not is_of_environment(path, root):
                folders.append(path)
    return folders, names


def walked(root: Path) -> Iterator[Path]:
    """Yield the files below `root` but those of caches and of virtual environments."""
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        inner, names = entries(folder, root)
        waiting += inner
        yield from (folder / name for name in names)


def files_now(root: Path) -> list[str]:
    """Return the files below `root`, by their path there, that git tracks or does not ignore.

    Those of its submodules are among them. In no repository these are all files but those of
    virtual environments.
    """
    try:
        inner = [name for name in _submodules(root) if _is_checked_out(root / name)]
        found = names_by_git(root, "ls-files", "-z", "-co", "--exclude-standard")
        found = [name for name in found if name not in inner]
        found += [f"{sub}/{name}" for sub in inner for name in files_now(root / sub)]
    except FAILED:
        found = [str(path.relative_to(root)) for path in walked(root)]
    return [name for name in dict.fromkeys(found) if os.path.lexists(root / name)]


def write_commit(root: Path, commit: str, tree: Path) -> None:
    """Write the files of a commit of the repository at `root` into the new folder `tree`.

    There they are a repository whose HEAD is that commit, for a program that asks git about itself.
    Submodules are written as well, without those that have no such commit here. Raises `CopyError`
    where git cannot.
    """
    try:
        _make_repository(root, commit, tree)
        index = {"GIT_INDEX_FILE": str(tree / ".git" / "index")}
        git(root, "read-tree", commit, timeout=None, variables=index)
        # Its attributes are those of the commit, too: `tree` has none yet, so the index tells.
        words = ("--work-tree", str(tree), "checkout-index", "--all")
        git(root, *words, timeout=None, variables=index)
        submodules = _submodules(root, commit)
    except FAILED as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
        why = said.splitlines()[-1] if said else type(error).__name__
        raise CopyError(f"git cannot write out commit {commit[:12]}: {why}") from None
    for name, inner in submodules.items():
        try:
            git(root / name, "cat-file", "-e", f"{inner}^{{commit}}")
        except FAILED:
            continue
        write_commit(root / name, inner, tree / name)


def _make_repository(root: Path, commit: str, tree: Path) -> None:
    """Make a repository that has no object of its own and finds those of the one at `root`."""
    own = tree / ".git"
    for folder in ("refs", "objects/info"):
        (own / folder).mkdir(parents=True)
    (own / "HEAD").write_text(f"{commit}\n")
    common = root / _said(root, "rev-parse", "--git-common-dir")
    (own / "objects/info/alternates").write_text(f"{common / 'objects'}\n")
    (own / "config").write_text("[core]\n\trepositoryformatversion = 0\n\tbare = false\n")
    if (common / "shallow").exists():
        shutil.copyfile(common / "shallow", own / "shallow")


def write_files(root: Path, names: Iterable[str], tree: Path) -> None:
    """Write files of `root` as they are now into the folder `tree`.

    In a repository, `tree` is one as well, with the same HEAD. Raises `CopyError`.
    """
    head = ""
    with suppress(*FAILED):  # no repository, or one without a commit
        head = _said(root, "rev-parse", "--verify", "-q", "HEAD")
    try:
        if head and not (tree / ".git").exists():
            _make_repository(root, head, tree)
            index = root / _said(root, "rev-parse", "--git-path", "index")
            shutil.copyfile(index, tree / ".git" / "index")
        for name in names:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            if (root / name).is_dir() and not (root / name).is_symlink():
                (tree / name).mkdir(exist_ok=True)  # a submodule that is not there
            else:
                shutil.copy2(root / name, tree / name, follow_symlinks=False)
    except FAILED as error:
        raise CopyError(f"the files cannot be copied: {error}") from None


def file_state(path: Path, *, follow: bool = False) -> tuple[int, int]:
    """Return when a file was changed last, and its size; zeros where it is not there."""
    try:
        its = path.stat(follow_symlinks=follow)
    except OSError:
        return 0, 0
    return its.st_mtime_ns, its.st_size


class FilesRead(NamedTuple):
    """The files of a repository that a run has read, by their paths there."""

    code: Mapping[str, str]  # those that git tracks or does not ignore, each with its blob
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
    if any(use.kind == TYPED for use in uses):
        what = "the program comes by `python -c` or standard input"
        raise CopyError(f"{what}: its code is in no file that could be found again")
    for each in named:
        whole = Path(os.path.abspath(each))  # noqa: PTH100 - links stay as they are named
        if whole.is_file():
            uses.append(Use(READ, str(whole), *file_state(whole, follow=True)))
    kinds: dict[str, dict[str, Use]] = {}  # the uses of each file, the first of each kind
    for use in uses:
        path = Path(use.path)
        if path.is_relative_to(root) and path != root and not is_of_environment(path, root):
            kinds.setdefault(str(path.relative_to(root)), {}).setdefault(use.kind, use)
    tracked, ignored = set[str](), set[str]()
    try:
        for part, names in _by_repository(root, kinds).items():
            inside = part.relative_to(root)
            tracked |= {str(inside / name) for name in names_by_git(part, "ls-files", "-z")}
            ignored |= _ignored(root, part, names)
    except FAILED:
        raise CopyError("git does not say which files it tracks") from None
    code, own = [], set()
    for name, its in kinds.items():
        path, read, first = root / name, its.get(READ), next(iter(its))
        if read is None or not (path.is_file() or path.is_symlink()):
            continue
        if read.changed / 1e9 >= began or first == WRITTEN:  # the run has written it
            own.add(name)
            changed = name in tracked and first == READ
        elif name not in ignored:
            code.append(name)
            changed = file_state(path, follow=True) != (read.changed, read.size)
        else:
            continue
        if changed:
            raise CopyError(f"{name} was changed while the run went on")
    # Of what git ignores that is needed which was read or listed, but for what the run wrote.
    written = {name for name, its in kinds.items() if WRITTEN in its} | own
    needed = {
        name
        for name in ignored - written
        if kinds[name].keys() & {READ, LISTED} and Path(name).name != "__pycache__"
    }
    outermost = (n for n in sorted(needed) if not any(str(p) in needed for p in Path(n).parents))
    linked = (each for name in outermost for each in _without(root, name, written))
    return FilesRead(blobs_of(root, code), tuple(linked))


def _by_repository(root: Path, names: Iterable[str]) -> dict[Path, list[str]]:
    """Return `root` and its submodules, each with those of some names that are its own."""
    found: dict[Path, list[str]] = {part: [] for part in repositories(root)}
    for name in names:
        # The innermost comes first; the folder of a submodule belongs to what it lies in.
        found[next(part for part in found if part in (root / name).parents)].append(name)
    return found


def _ignored(root: Path, part: Path, names: Iterable[str]) -> set[str]:
    own = {str((root / name).relative_to(part)): name for name in names}
    given = b"\0".join(map(os.fsencode, own))
    try:
        found = names_by_git(part, "check-ignore", "-z", "--stdin", given=given)
    except FAILED as error:
        if getattr(error, "returncode", 0) == 1:  # none
            return set()
        raise CopyError("git does not say which files it ignores") from None
    return {own[each] for each in found}


def _without(root: Path, name: str, written: set[str]) -> Iterator[str]:
    """Yield a folder, or what is in it besides what was written, where something was."""
    inside = {each for each in written if each.startswith(f"{name}/")}
    if not inside:
        yield name
        return
    for entry in sorted(os.listdir(root / name)):  # noqa: PTH208 - names
        below = f"{name}/{entry}"
        if below not in written and entry != "__pycache__":
            yield from _without(root, below, inside)


def blobs_of(root: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the blob that git would make of each of some files; what is not there is left out.

    Raises `CopyError` where git cannot.
    """
    paths = {name: root / name for name in sorted(names)}
    there = [name for name, path in paths.items() if path.is_file() or path.is_symlink()]
    found: dict[str, str] = {}
    try:
        for part, its in _by_repository(root, there).items():
            links = {name for name in its if paths[name].is_symlink()}
            plain = [name for name in its if "\n" not in name and name not in links]
            given = b"\n".join(os.fsencode(paths[name].relative_to(part)) for name in plain)
            # By their paths, so that what git stores is known where a filter changes it.
            blobs = git(part, "hash-object", "--stdin-paths", timeout=None, given=given)
            found |= zip(plain, blobs.decode().split(), strict=True)
            for name in {*its}.difference(plain):
                words, given = ["--", str(paths[name].relative_to(part))], b""
                if name in links:  # git stores where it leads
                    words, given = ["--stdin"], os.fsencode(paths[name].readlink())
                found[name] = git(part, "hash-object", *words, given=given).decode().strip()
    except FAILED:
        raise CopyError("git cannot read the files of the program") from None
    return {name: found[name] for name in there}


def commits_of_lock(root: Path, lock: Path, seal: str, written_at: Any) -> list[str]:
    """Return which commit brought a seal into the file of a lock, and at which it was written."""
    found: list[str] = []
    with suppress(*FAILED, ValueError):  # a lock outside of the repository
        name = lock.resolve().relative_to(root)
        words = ("log", "--format=%H", "--no-show-signature", f"-S{seal}", "--")
        found = _said(root, *words, f":(top,literal){name}").split()[:1]
    is_commit = isinstance(written_at, str) and _COMMIT.fullmatch(written_at)
    return [*found, written_at] if is_commit else found


def commit_with(root: Path, files: Mapping[str, str], likely: Sequence[str] = ()) -> str:
    """Return the newest commit in which `files` have these blobs.

    First come `likely` ones, then the history of HEAD, then all other branches. Raises `CopyError`
    with the reason, and what would help, where there is none.
    """
    with suppress(*FAILED):
        for commit in _having(root, likely, files):
            return commit
    own, inner = _by_submodule(root, files)
    paths = ["--", *(f":(top,literal){name}" for name in (*own, *inner) if "\n" not in name)]
    given = "\n".join([*paths, ""]).encode(errors="surrogateescape")
    for which in ("HEAD", "--all"):
        words = "rev-list", "--full-history", "--date-order", which, "--stdin"
        try:
            commits = git(root, *words, timeout=None, given=given).decode().split()
        except FAILED:
            continue  # a repository without a commit has no HEAD
        for commit in _having(root, commits, files):
            return commit
    gone = [folder for folder in inner if not _is_checked_out(root / folder)]
    if gone:
        raise CopyError(f"the submodule {gone[0]} is not there; git submodule update --init")
    for part in repositories(root):
        if _said(part, "rev-parse", "--is-shallow-repository") == "true":
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
    folders = [*_submodules(root)]
    for name, blob in wanted.items():
        folder = next((each for each in folders if name.startswith(f"{each}/")), None)
        if folder is None:
            own[name] = blob
        else:
            inner.setdefault(folder, {})[name.removeprefix(f"{folder}/")] = blob
    return own, inner


def _having(root: Path, commits: Sequence[str], wanted: Mapping[str, str]) -> Iterator[str]:
    """Yield those of some commits whose files have the wanted blobs."""
    every, inner = _by_submodule(root, wanted)
    own = {name: blob for name, blob in every.items() if "\n" not in name}
    alone = every.items() - own.items()  # git's list of objects is one of lines
    for start in range(0, len(commits), _BLOCK):
        block = commits[start : start + _BLOCK]
        asked = "".join(f"{commit}:{name}\n" for commit in block for name in own)
        given = asked.encode(errors="surrogateescape")
        words = ("cat-file", "--batch-check=%(objectname)")
        answers = iter(git(root, *words, timeout=None, given=given).splitlines())
        for commit in block:
            found = [(next(answers), blob) for blob in own.values()]
            if all(it == blob.encode() for it, blob in found) and all(
                _has_inside(root, commit, *each) for each in inner.items()
            ):
                objects = ((_object(root, commit, name), blob) for name, blob in alone)
                if all(it == blob for it, blob in objects):
                    yield commit


def _object(root: Path, commit: str, name: str) -> str:
    try:
        return _said(root, "rev-parse", "--verify", "-q", f"{commit}:{name}")
    except FAILED:
        return ""


def _has_inside(root: Path, commit: str, folder: str, wanted: Mapping[str, str]) -> bool:
    inner = _object(root, commit, folder)
    try:
        return bool(inner) and any(_having(root / folder, [inner], wanted))
    except FAILED:  # it was no submodule yet, or is not there
        return False
