"""Lists the files of a program's git repository, and finds and checks out the commit of a lock.

A checkout is not a `git worktree`: git would register a worktree in the user's repository, and
would run the hooks of that repository.

A lock is written before the commit that contains the lock, and squashing, rebasing and merging
change the hash of that commit. So the commit of a lock is found by content: every file of the
repository that the locked run read must have the blob that the lock names.
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
from typing import Any

from torchrepro.lock.file_notes import SKIPPED_FOLDERS
from torchrepro.manifest.environment import git

FAILED = (OSError, SubprocessError)  # the exceptions that the function `git` raises

_SUBMODULE = "160000"  # file mode in the index
HASH = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")  # of SHA-1 and SHA-256
_BLOCK = 64  # commits or files in one call of git


class CopyError(Exception):
    """Files cannot be checked out or copied, or do not match the request. The text says why."""


def _output(folder: Path, *words: str) -> str:
    return os.fsdecode(git(folder, *words)).rstrip("\n")


def names_by_git(folder: Path, *words: str, given: bytes = b"") -> list[str]:
    """Return the NUL-terminated names that a git command prints. Raises `FAILED`."""
    listed = git(folder, *words, timeout=None, given=given)
    return [os.fsdecode(name) for name in listed.split(b"\0") if name]


def repository_root(folder: Path) -> Path | None:
    try:
        return Path(_output(folder.absolute(), "rev-parse", "--show-toplevel"))
    except FAILED:
        return None


@lru_cache(10_000)
def is_of_environment(path: Path, root: Path) -> bool:
    """Return whether a path is inside of a virtual environment below `root`."""
    return root in path.parents and (
        (path / "pyvenv.cfg").is_file() or is_of_environment(path.parent, root)
    )


def _submodules(root: Path, commit: str = "") -> dict[str, str]:
    """Return the commit of each submodule by folder, also of submodules that are not checked out.

    Reads the tree of `commit`, or the index if `commit` is empty. Raises `FAILED`.
    """
    words = ("ls-tree", "-r", "-z", commit) if commit else ("ls-files", "-s", "-z")
    lines = (line.partition("\t") for line in names_by_git(root, *words))
    # The commit is the longest field: the others are the mode, and a type or a number.
    return {name: max(info.split(), key=len) for info, _, name in lines if info[:6] == _SUBMODULE}


def _is_checked_out(submodule: Path) -> bool:
    return (submodule / ".git").exists()


def repositories(root: Path) -> Iterator[Path]:
    """Yield the checked-out submodules below `root`, innermost first, and `root` itself last."""
    for name in _submodules(root):
        if _is_checked_out(root / name):
            yield from repositories(root / name)
    yield root


def entries(folder: Path, root: Path) -> tuple[list[Path], list[str]]:
    """Return the paths of the folders in `folder`, and the names of the files in `folder`.

    Caches and virtual environments are omitted. A link to a folder counts as a file. `root` is the
    folder where the search started.
    """
    folders, names = [], []
    with suppress(OSError), os.scandir(folder) as directory:
        for entry in directory:
            path = Path(entry)
            if not entry.is_dir(follow_symlinks=False):
                names.append(entry.name)
            elif entry.name not in SKIPPED_FOLDERS and not is_of_environment(path, root):
                folders.append(path)
    return folders, names


def walked(root: Path) -> Iterator[Path]:
    """Yield the files below `root`, except in caches and virtual environments."""
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        subfolders, names = entries(folder, root)
        waiting += subfolders
        yield from (folder / name for name in names)


def files_now(root: Path) -> list[str]:
    """Return the relative paths of all files below `root` that git does not ignore.

    Includes the files of submodules. If `root` is not in a repository, returns all files except in
    caches and virtual environments.
    """
    try:
        submodules = [name for name in _submodules(root) if _is_checked_out(root / name)]
        names = names_by_git(root, "ls-files", "-z", "-co", "--exclude-standard")
        names = [name for name in names if name not in submodules]
        names += [f"{sub}/{name}" for sub in submodules for name in files_now(root / sub)]
    except FAILED:
        names = [str(path.relative_to(root)) for path in walked(root)]
    return [name for name in dict.fromkeys(names) if os.path.lexists(root / name)]


def write_commit(root: Path, commit: str, tree: Path) -> None:
    """Write the files of a commit of the repository at `root` into the new folder `tree`.

    `tree` becomes a repository whose HEAD is that commit, because programs may call git.
    Submodules are written as well, if their commit is available. Raises `CopyError` if git fails.
    """
    try:
        _make_repository(root, commit, tree)
        index = {"GIT_INDEX_FILE": str(tree / ".git" / "index")}
        git(root, "read-tree", commit, timeout=None, variables=index)
        # git reads .gitattributes from this index, too, because `tree` is still empty.
        words = ("--work-tree", str(tree), "checkout-index", "--all")
        git(root, *words, timeout=None, variables=index)
        submodules = _submodules(root, commit)
    except FAILED as error:
        stderr = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
        why = stderr.splitlines()[-1] if stderr else type(error).__name__
        raise CopyError(f"git cannot check out commit {commit[:12]}: {why}") from None
    for name, submodule_commit in submodules.items():
        try:
            git(root / name, "cat-file", "-e", f"{submodule_commit}^{{commit}}")
        except FAILED:
            continue
        write_commit(root / name, submodule_commit, tree / name)


def _make_repository(root: Path, commit: str, tree: Path) -> None:
    """Make a repository in `tree` that uses the objects of the repository at `root`."""
    folder = tree / ".git"
    for name in ("refs", "objects/info"):
        (folder / name).mkdir(parents=True)
    (folder / "HEAD").write_text(f"{commit}\n")
    common = root / _output(root, "rev-parse", "--git-common-dir")
    (folder / "objects/info/alternates").write_text(f"{common / 'objects'}\n")
    (folder / "config").write_text("[core]\n\trepositoryformatversion = 0\n\tbare = false\n")
    if (common / "shallow").exists():
        shutil.copyfile(common / "shallow", folder / "shallow")


def write_files(root: Path, names: Iterable[str], tree: Path) -> None:
    """Copy the files `names` from the folder `root` into the folder `tree`.

    If `root` is a repository, `tree` becomes a repository with the same HEAD. Raises `CopyError`.
    """
    head = ""
    with suppress(*FAILED):  # not a repository, or without a commit
        head = _output(root, "rev-parse", "--verify", "-q", "HEAD")
    try:
        if head and not (tree / ".git").exists():
            _make_repository(root, head, tree)
            index = root / _output(root, "rev-parse", "--git-path", "index")
            shutil.copyfile(index, tree / ".git" / "index")
        for name in names:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            if (root / name).is_dir() and not (root / name).is_symlink():
                (tree / name).mkdir(exist_ok=True)  # a submodule that is not checked out
            else:
                shutil.copy2(root / name, tree / name, follow_symlinks=False)
    except FAILED as error:
        raise CopyError(f"the files cannot be copied: {error}") from None


def file_state(path: Path, *, follow: bool = False) -> tuple[int, int]:
    """Return the modification time in nanoseconds, and the size. A missing file has 0 and 0."""
    try:
        status = path.stat(follow_symlinks=follow)
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def tracked_and_ignored(root: Path, names: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return the files that git tracks below `root`, and which of `names` git ignores.

    Raises `CopyError` if git fails.
    """
    tracked, ignored = set[str](), set[str]()
    try:
        for repository, names_in_it in _by_repository(root, names).items():
            folder = repository.relative_to(root)
            tracked |= {str(folder / it) for it in names_by_git(repository, "ls-files", "-z")}
            ignored |= _ignored(root, repository, names_in_it)
    except FAILED:
        raise CopyError("git cannot list the files that it tracks") from None
    return tracked, ignored


def _by_repository(root: Path, names: Iterable[str]) -> dict[Path, list[str]]:
    """Group `names` by the repository that contains each file: `root` or one of the submodules."""
    grouped: dict[Path, list[str]] = {repository: [] for repository in repositories(root)}
    for name in names:
        # The innermost repository comes first. The folder of a submodule belongs to its parent.
        parents = (root / name).parents
        grouped[next(repository for repository in grouped if repository in parents)].append(name)
    return grouped


def _ignored(root: Path, repository: Path, names: Iterable[str]) -> set[str]:
    by_path = {str((root / name).relative_to(repository)): name for name in names}
    stdin = b"\0".join(map(os.fsencode, by_path))
    try:
        ignored = names_by_git(repository, "check-ignore", "-z", "--stdin", given=stdin)
    except FAILED as error:
        if getattr(error, "returncode", 0) == 1:  # git ignores none of them
            return set()
        raise CopyError("git cannot list the files that it ignores") from None
    return {by_path[path] for path in ignored}


def blobs_of(root: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the hash of the blob that git would store for each file. Missing files are skipped.

    Raises `CopyError` if git fails.
    """
    paths = {name: root / name for name in sorted(names)}
    existing = [name for name, path in paths.items() if path.is_file() or path.is_symlink()]
    blobs: dict[str, str] = {}
    try:
        for repository, inside in _by_repository(root, existing).items():
            links = [name for name in inside if paths[name].is_symlink()]
            files = [name for name in inside if name not in links]
            for start in range(0, len(files), _BLOCK):
                block = files[start : start + _BLOCK]
                # git gets paths, not contents, so that it applies the filters of each path.
                words = (str(paths[name].relative_to(repository)) for name in block)
                output = git(repository, "hash-object", "--", *words, timeout=None)
                blobs |= zip(block, output.decode().split(), strict=True)
            for name in links:  # git stores the target of a link
                target = os.fsencode(paths[name].readlink())
                blobs[name] = (
                    git(repository, "hash-object", "--stdin", given=target).decode().strip()
                )
    except FAILED:
        raise CopyError("git cannot read the files of the program") from None
    return {name: blobs[name] for name in existing}


def commits_of_lock(root: Path, lock: Path, seal: str, written_at: Any) -> list[str]:
    """Return the commit that added `seal` to the file `lock`, then `written_at` if it is a hash."""
    commits: list[str] = []
    with suppress(*FAILED, ValueError):  # a lock outside of the repository
        name = lock.resolve().relative_to(root)
        words = ("log", "--format=%H", "--no-show-signature", f"-S{seal}", "--")
        commits = _output(root, *words, f":(top,literal){name}").split()[:1]
    is_commit = isinstance(written_at, str) and HASH.fullmatch(written_at)
    return [*commits, written_at] if is_commit else commits


def commit_with(root: Path, files: Mapping[str, str], likely: Sequence[str] = ()) -> str:
    """Return a commit that contains all `files`, a mapping from paths to blobs.

    Searches the commits in `likely`, then the history of HEAD from the newest commit on, then all
    branches. Raises `CopyError` with the reason and a hint if no commit matches.
    """
    with suppress(*FAILED):
        for commit in _having(root, likely, files):
            return commit
    inside = _by_submodule(root, files)
    outside = inside.pop("")
    paths = ["--", *(f":(top,literal){name}" for name in (*outside, *inside) if "\n" not in name)]
    stdin = "\n".join([*paths, ""]).encode(errors="surrogateescape")
    for revisions in ("HEAD", "--all"):
        words = "rev-list", "--full-history", "--date-order", revisions, "--stdin"
        try:
            commits = git(root, *words, timeout=None, given=stdin).decode().split()
        except FAILED:
            continue  # a repository without a commit has no HEAD
        for commit in _having(root, commits, files):
            return commit
    missing = [folder for folder in inside if not _is_checked_out(root / folder)]
    if missing:
        hint = "git submodule update --init"
        raise CopyError(f"the submodule {missing[0]} is not checked out; {hint}")
    for repository in repositories(root):
        if _output(repository, "rev-parse", "--is-shallow-repository") == "true":
            option = "" if repository == root else f"-C {repository.relative_to(root)} "
            hint = f"the clone is shallow; git {option}fetch --unshallow"
            raise CopyError(f"no commit here has the files of the lock: {hint}")
    raise CopyError("no commit here has the files of the lock")


def _by_submodule(root: Path, wanted: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Group `wanted` by the folders of submodules; "" is the repository itself."""
    grouped: dict[str, dict[str, str]] = {"": {}}
    submodules = [*_submodules(root)]
    for name, blob in wanted.items():
        folder = next((it for it in submodules if name.startswith(f"{it}/")), "")
        grouped.setdefault(folder, {})[name.removeprefix(f"{folder}/")] = blob
    return grouped


def _having(root: Path, commits: Sequence[str], wanted: Mapping[str, str]) -> Iterator[str]:
    """Yield each of `commits` that contains all wanted files with the wanted blobs."""
    inside = _by_submodule(root, wanted)
    outside = inside.pop("")
    batch = {name: blob for name, blob in outside.items() if "\n" not in name}
    single = outside.items() - batch.items()  # names of two lines: git reads one name per line
    for start in range(0, len(commits), _BLOCK):
        block = commits[start : start + _BLOCK]
        objects = "".join(f"{commit}:{name}\n" for commit in block for name in batch)
        stdin = objects.encode(errors="surrogateescape")
        words = ("cat-file", "--batch-check=%(objectname)")
        answers = iter(git(root, *words, timeout=None, given=stdin).splitlines())
        for commit in block:
            blobs = [next(answers) for _ in batch]
            if (
                blobs == [blob.encode() for blob in batch.values()]
                and all(_has_inside(root, commit, *it) for it in inside.items())
                and all(_object(root, commit, name) == blob for name, blob in single)
            ):
                yield commit


def _object(root: Path, commit: str, name: str) -> str:
    try:
        return _output(root, "rev-parse", "--verify", "-q", f"{commit}:{name}")
    except FAILED:
        return ""


def _has_inside(root: Path, commit: str, folder: str, wanted: Mapping[str, str]) -> bool:
    submodule_commit = _object(root, commit, folder)
    try:
        return bool(submodule_commit) and any(_having(root / folder, [submodule_commit], wanted))
    except FAILED:  # not a submodule in this commit, or not checked out
        return False
