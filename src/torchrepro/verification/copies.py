"""Fresh copies of a repository in a temporary folder, where a command runs as in its own.

A copy has what git tracks and does not ignore, as of a commit or as it is now, and links to what is
ignored and needed all the same. It is no `git worktree`: that would register itself in the user's
repository, and run the hooks of it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from subprocess import SubprocessError
from typing import TYPE_CHECKING

from torchrepro.manifest.environment import git
from torchrepro.verification import file_notes
from torchrepro.verification.file_notes import LEFT_OUT, READ, TOO_MANY, WRITTEN, noted
from torchrepro.verification.perturbations import RunEnvironment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torchrepro.verdict.value import Edit

PREFIX = "torchrepro-copy-"


class CopyError(Exception):
    """A copy cannot be made, or is none of what was asked for; the text says why."""


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder that is gone when the block ends, however it ends.

    One whose process was killed is removed by the next call: a process holds a lock on its own.
    """
    _sweep()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
        held = _locked(folder)
        if held is not None and folder.is_dir():  # a sweep may have come in between
            break
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _locked(folder: Path) -> int | None:
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
        else:
            return descriptor
    return None


def _sweep() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        held = _locked(folder)
        if held is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(held)


def repository_root(folder: Path) -> Path | None:
    """Return the root of the repository that a folder belongs to, or None."""
    try:
        found = git(folder.absolute(), "rev-parse", "--show-toplevel")
    except (OSError, SubprocessError):
        return None
    return Path(os.fsdecode(found).rstrip("\n"))


def is_of_environment(path: Path, root: Path) -> bool:
    """Whether a path below `root` belongs to a virtual environment that lies there."""
    return path != root and (_is_environment(path) or _has_environment_above(path.parent, root))


@lru_cache(maxsize=4096)
def _has_environment_above(folder: Path, root: Path) -> bool:
    return root in folder.parents and (
        _is_environment(folder) or _has_environment_above(folder.parent, root)
    )


def _is_environment(folder: Path) -> bool:
    return (folder / "pyvenv.cfg").is_file()


_SUBMODULE = "160000"  # the mode of its entry


def submodules(root: Path, commit: str = "") -> dict[str, str]:
    """Return the folders of the submodules, checked out or not, each with its commit.

    That is the one which the index names, or the commit that is given. Raises what `git` does.
    """
    words = ("ls-tree", "-r", "-z", commit) if commit else ("ls-files", "-s", "-z")
    entries = os.fsdecode(git(root, *words, timeout=None)).split("\0")
    return {
        name: max(its.split(), key=len)  # beside it stand the mode and a word or a digit
        for its, _, name in (entry.partition("\t") for entry in entries)
        if its.startswith(_SUBMODULE)
    }


def is_checked_out(submodule: Path) -> bool:
    """Whether the folder of a submodule is a repository."""
    return (submodule / ".git").exists()


def repositories(root: Path) -> Iterator[Path]:
    """Yield the repository at `root` after its submodules that are there, each after its own."""
    for name in submodules(root):
        if is_checked_out(root / name):
            yield from repositories(root / name)
    yield root


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
        git(root, "checkout-index", "--all", f"--prefix={tree}/", timeout=None, variables=index)
        for name, inner in submodules(root, commit).items():
            if _has_commit(root / name, inner):
                write_commit(root / name, inner, tree / name)
    except (OSError, SubprocessError) as error:
        raise CopyError(f"git cannot write out commit {commit[:12]}: {_said(error)}") from None


def _has_commit(root: Path, commit: str) -> bool:
    """Whether a commit is in the repository at `root`."""
    try:
        git(root, "cat-file", "-e", f"{commit}^{{commit}}")
    except (OSError, SubprocessError):
        return False
    return True


def _make_repository(root: Path, commit: str, tree: Path) -> None:
    """Make a repository that has no object of its own and finds those of the one at `root`."""
    own = tree / ".git"
    for folder in ("refs", "objects/info"):
        (own / folder).mkdir(parents=True)
    (own / "HEAD").write_text(f"{commit}\n")
    theirs = Path(os.fsdecode(git(root, "rev-parse", "--git-common-dir")).rstrip("\n"))
    common = root / theirs
    (own / "objects/info/alternates").write_text(f"{common / 'objects'}\n")
    (own / "config").write_text("[core]\n\trepositoryformatversion = 0\n\tbare = false\n")
    if (common / "shallow").exists():
        shutil.copyfile(common / "shallow", own / "shallow")


def _said(error: Exception) -> str:
    said = getattr(error, "stderr", None) or b""
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def files_now(root: Path) -> list[str]:
    """Return the files below `root`, by their path there, that git tracks or does not ignore.

    Those of its submodules are among them. In no repository these are all files but those of
    virtual environments.
    """
    try:
        names = git(root, "ls-files", "-z", "-co", "--exclude-standard", timeout=None)
        inner = [name for name in submodules(root) if is_checked_out(root / name)]
        found = [os.fsdecode(name) for name in names.split(b"\0") if name]
        found = [name for name in found if name not in inner]
        found += [f"{sub}/{name}" for sub in inner for name in files_now(root / sub)]
    except (OSError, SubprocessError):
        found = []
        for folder, folders, files in os.walk(root):
            here = Path(folder)
            folders[:] = [
                name
                for name in folders
                if name not in LEFT_OUT and not is_of_environment(here / name, root)
            ]
            found += [str((here / name).relative_to(root)) for name in files]
    return [name for name in dict.fromkeys(found) if os.path.lexists(root / name)]


def write_files(root: Path, names: Iterable[str], tree: Path) -> None:
    """Write files of `root` as they are now into the folder `tree`.

    In a repository, `tree` is one as well, with the same HEAD. Raises `CopyError`.
    """
    try:
        if (head := _head(root)) and not (tree / ".git").exists():
            _make_repository(root, head, tree)
            index = Path(os.fsdecode(git(root, "rev-parse", "--git-path", "index")).rstrip("\n"))
            shutil.copyfile(root / index, tree / ".git" / "index")
        for name in names:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            if (root / name).is_dir() and not (root / name).is_symlink():
                (tree / name).mkdir(exist_ok=True)  # a submodule that is not there
            else:
                shutil.copy2(root / name, tree / name, follow_symlinks=False)
    except (OSError, SubprocessError) as error:
        raise CopyError(f"the files cannot be copied: {error}") from None


def _head(root: Path) -> str:
    try:
        return git(root, "rev-parse", "--verify", "-q", "HEAD").decode().strip()
    except (OSError, SubprocessError):
        return ""


@dataclass(frozen=True)
class Copy:
    """A copy that a command runs in."""

    root: Path
    """What it is a copy of."""
    tree: Path
    place: Path
    """The folder of `tree` in which the command starts."""
    log: Path
    """Where its runs note which files they use."""
    linked: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The files and folders that are links to those of `root`, as they were."""

    @classmethod
    def of(cls, root: Path, folder: Path, temporary: Path) -> Copy:
        """Return the copy, still to be written, for a command that starts in `folder`.

        Its tree is called as `root` is.
        """
        tree = temporary / "tree" / root.name
        tree.mkdir(parents=True)
        place = tree / folder.relative_to(root)
        return cls(root, tree, place, temporary / "files.jsonl")

    def link(self, names: Iterable[str]) -> None:
        """Link files and folders of `root`; what is in the copy already stays."""
        for name in names:
            here = self.tree / name
            if os.path.lexists(here):
                continue
            here.parent.mkdir(parents=True, exist_ok=True)
            here.symlink_to(self.root / name)
            self.linked[name] = _state(self.root / name)

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the words of a command with the paths of `root` that are in it as the copy's."""
        return [self._mapped(word) for word in words]

    def _mapped(self, word: str) -> str:
        before, path = "", word
        if not word.startswith(os.sep) and "=" in word:  # --data=/repo/data
            before, equals, path = word.partition("=")
            before += equals
        whole = Path(path)
        if not whole.is_absolute() or not (whole == self.root or self.root in whole.parents):
            return word
        if is_of_environment(whole, self.root):
            return word
        return f"{before}{self.tree / whole.relative_to(self.root)}"

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be in the folder in which the command starts."""
        self.place.mkdir(parents=True, exist_ok=True)
        with chdir(self.place):
            yield

    @property
    def environment(self) -> RunEnvironment:
        """What a command is started in, so that it finds the copy's files and notes which."""
        return RunEnvironment(variables=file_notes.variables(self.root, self.log, self.tree))

    def strayed(self) -> str:
        """Return a file of `root` that a run in the copy used, in words; empty if there is none.

        What is linked may be read there, and not be written.
        """
        linked = [self.root / name for name in self.linked]
        for use in noted(self.log):
            path = Path(use.path)
            if use.kind == TOO_MANY:
                return f"it uses more than {file_notes.MOST:,} files"
            if path.is_relative_to(self.tree):
                if use.kind == WRITTEN and self._is_linked(path):
                    return f"it wrote {path.relative_to(self.tree)}, which is linked to your own"
            elif use.kind != file_notes.LISTED and not is_of_environment(path, self.root):
                is_ours = any(path == each or each in path.parents for each in linked)
                if use.kind != READ or not is_ours:
                    verb = "wrote" if use.kind == WRITTEN else "read"
                    return f"it {verb} {path} in your own folder"
        for name, before in self.linked.items():
            if _state(self.root / name) != before:
                return f"{name}, which is linked to your own, was changed meanwhile"
        return ""

    def _is_linked(self, path: Path) -> bool:
        return any(each.is_symlink() for each in (path, *path.parents) if self.tree in each.parents)


@contextmanager
def edited_copy(edit: Edit, files: Iterable[str]) -> Iterator[Copy]:
    """Be in a copy of this folder's repository in which one line of a program is edited.

    The program's `files` are copied, all else is linked. Raises `CopyError` for a line that is not
    in the repository.
    """
    root, folder = repository_root(Path.cwd()) or Path.cwd(), Path.cwd()
    file, _, number = edit.where.rpartition(":")
    inside = [Path(each) for each in (file, *files) if Path(each).is_relative_to(root)]
    if Path(file) not in inside:
        raise CopyError(f"{file} is not in {root}")
    with temporary_folder() as temporary:
        copy = Copy.of(root, folder, temporary)
        names = dict.fromkeys(str(each.relative_to(root)) for each in inside)
        write_files(root, names, copy.tree)
        for place, _, _ in os.walk(copy.tree):
            here = Path(place).relative_to(copy.tree)
            copy.link(str(here / each.name) for each in (root / here).iterdir())
        edited = copy.tree / Path(file).relative_to(root)
        lines = edited.read_text(encoding="utf-8").split("\n")
        at = int(number) - 1
        lines[at] = lines[at].replace(edit.before, edit.after)
        edited.write_text("\n".join(lines), encoding="utf-8")
        with copy.entered():
            yield copy


def _state(path: Path) -> tuple[int, int]:
    try:
        its = path.stat()
    except OSError:
        return 0, 0
    return its.st_mtime_ns, its.st_size
