"""Copies a program's folder, so that a command runs in the copy as in the original folder.

Large files are not copied, but linked to the user's files. To protect these, a file that a run is
known to write is never linked, and `file_notes` blocks writes to the original folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchrepro.lock import file_notes, repository
from torchrepro.lock.file_notes import LISTED, READ, TOO_MANY, WRITTEN, Use, noted
from torchrepro.lock.repository import CopyError, file_state, is_of_environment
from torchrepro.verification.perturbations import logging_file_uses

if TYPE_CHECKING:
    from torchrepro.verdict.value import Edit
    from torchrepro.verification.runner import Runner

PREFIX = "torchrepro-copy-"
MANY = 20_000  # files of a folder above which the whole folder is linked
MOST_BYTES = 500 * 2**20  # the size of a copy above which it is refused
LARGE = 2**20  # bytes above which a file is linked, unless a run is known to write it

_MARK = ".torchrepro-copy"  # a file in every temporary folder of torchrepro


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a temporary folder that is removed when the block ends, also after an error.

    If this process is killed, a later call removes the folder. Such a folder contains the file
    `_MARK`, and is not locked by a process.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if (folder / _MARK).is_file() and (lock := _locked(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # a process may still use it: a later call removes it
                (folder / _MARK).touch()
            os.close(lock)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
    lock = _locked(folder)
    try:
        (folder / _MARK).touch()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:  # some file systems have no locks
            os.close(lock)


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


@dataclass(frozen=True, slots=True)
class FolderState:
    """The files in the program's repository, or else in its working directory, at one moment."""

    root: Path
    files: Mapping[str, tuple[int, int, int]]  # path in root -> time of change in ns, size, inode
    folders: frozenset[str]
    large: frozenset[str]  # folders with more than `MANY` files, which are not scanned

    @classmethod
    def now(cls, without: Path) -> FolderState:
        """Scan the repository or the working directory, except for the folder `without`."""
        root = repository.repository_root(Path.cwd()) or Path.cwd()
        names: dict[Path, list[str]] = {}  # folder -> names of its files
        sizes: Counter[Path] = Counter()  # the number of files below each folder
        large: set[Path] = set()
        waiting = [root]
        while waiting:
            folder = waiting.pop()
            around = [folder, *folder.parents]
            if without in around or not large.isdisjoint(around):
                continue
            inner, names[folder] = repository.entries(folder, root)
            waiting += inner
            around = around[: around.index(root) + 1]
            sizes.update(dict.fromkeys(around, len(names[folder])))
            if full := next((path for path in around if sizes[path] > MANY), None):
                large.add(full)
                sizes.subtract(dict.fromkeys(around, sizes[full]))
        files: dict[str, tuple[int, int, int]] = {}
        kept = [folder for folder in names if large.isdisjoint([folder, *folder.parents])]
        for folder in kept:
            for name in names[folder]:
                with suppress(OSError):
                    state = (folder / name).lstat()
                    path_in_root = str((folder / name).relative_to(root))
                    files[path_in_root] = state.st_mtime_ns, state.st_size, state.st_ino

        def in_root(folders: Iterable[Path]) -> frozenset[str]:
            return frozenset(str(folder.relative_to(root)) for folder in folders)

        return cls(root, files, in_root(kept), in_root(large))


@dataclass(frozen=True)
class Copy:
    """A copy of a folder. Commands run in the copy in place of the original folder."""

    root: Path  # the original folder
    tree: Path
    start: Path  # the folder in `tree` where the command starts
    log: Path  # the file with the log of the files that runs use
    recordings: Path  # the folder with torchrepro's recordings of the runs
    linked: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The files and folders that are links to those of `root`, with their state when linked."""

    @classmethod
    def of(cls, root: Path, folder: Path, temporary: Path, recordings: Path) -> Copy:
        """Return an empty copy of `root` for a command that starts in `folder`."""
        tree = temporary / "tree" / root.name
        tree.mkdir(parents=True)
        start = tree / folder.relative_to(root)
        return cls(root, tree, start, temporary / "files.jsonl", recordings.resolve())

    def link(self, names: Iterable[str]) -> None:
        """Link the files and folders `names` of `root` that the copy does not contain yet."""
        for name in names:
            link = self.tree / name
            if not os.path.lexists(link):
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(self.root / name)
                self.linked[name] = file_state(self.root / name, follow=True)

    def link_beside(self, uses: Iterable[Use]) -> None:
        """Link files and folders next to `root` that were only read, such as ``../data``."""
        neighbors: dict[str, set[str]] = {}
        for use in uses:
            path = Path(use.path)
            if self.root.parent in path.parents and self.root not in path.parents:
                name = path.relative_to(self.root.parent).parts[0]
                neighbors.setdefault(name, set()).add(use.kind)
        for name, kinds in neighbors.items():
            if WRITTEN not in kinds:
                with suppress(FileExistsError):
                    (self.tree.parent / name).symlink_to(self.root.parent / name)

    def command(self, words: Sequence[str]) -> list[str]:
        """Return a command with the paths in `words` changed for the copy.

        Absolute paths into `root` become paths into the copy. Relative paths that leave `root`, or
        lead into a virtual environment, become absolute, because the copy lacks these files.
        """
        folder = self.root / self.start.relative_to(self.tree)

        def is_copied(path: Path) -> bool:
            return path.is_relative_to(self.root) and not is_of_environment(path, self.root)

        mapped = []
        for word in words:
            before, path = "", word
            if not word.startswith(os.sep) and "=" in word:  # such as --data=/repo/data
                before, _, path = word.partition("=")
                before += "="
            whole = Path(os.path.normpath(folder / path))
            if path.startswith(os.sep):
                path = str(self.tree / whole.relative_to(self.root)) if is_copied(whole) else path
            elif os.sep in path and os.path.exists(whole) and not is_copied(whole):  # noqa: PTH110 - never raises
                path = str(whole)
            mapped.append(f"{before}{path}")
        return mapped

    @contextmanager
    def entered(self, runner: Runner) -> Iterator[Runner]:
        """Change into the copy, and yield a runner of the same command that logs used files."""
        command = self.command(runner.command)
        logging = logging_file_uses(self.root, self.log, self.tree, self.recordings)
        self.start.mkdir(parents=True, exist_ok=True)
        with chdir(self.start):
            yield replace(runner, command=command, environment=logging, strayed=self.strayed)

    @property
    def uses(self) -> list[Use]:
        """The logged uses of files by runs in the copy, without the recordings of these runs."""
        return [
            use for use in noted(self.log) if not Path(use.path).is_relative_to(self.recordings)
        ]

    def strayed(self) -> str:
        """Return a use of the user's own files by a run in the copy, in words, or an empty string.

        Reading a linked file is allowed, writing to it is not.
        """
        linked = [self.root / name for name in self.linked]
        for use in self.uses:
            path = Path(use.path)
            if use.kind == TOO_MANY:
                return f"it uses more than {file_notes.MOST:,} files"
            if path.is_relative_to(self.tree):
                if use.kind == WRITTEN and not path.resolve().is_relative_to(self.tree):
                    what = f"it would have written {path.relative_to(self.tree)}"
                    return f"{what}, which is linked to your own"
            elif use.kind != LISTED and not is_of_environment(path, self.root):
                is_linked = any(path.is_relative_to(link) for link in linked)
                if use.kind != READ or not is_linked:
                    verb = "would have written" if use.kind == WRITTEN else "read"
                    return f"it {verb} {path} in your own folder"
        for name, before in self.linked.items():
            if file_state(self.root / name, follow=True) != before:
                return f"{name}, which is linked to your own, was changed during the run"
        return ""


@contextmanager
def copy_of(state: FolderState, written: Set[str], runner: Runner) -> Iterator[Runner]:
    """Copy the folder of `state`, change into the copy, and yield a runner as `Copy.entered`.

    The copy contains the files that `state` lists. Large files, and folders with very many files,
    are linked. The files in `written` are always copied: absolute paths of files that a run is
    known to write. Raises `CopyError` if the copy would be too large, and for a link through which
    a run could use files outside of the copy.
    """
    root = state.root
    names = {*written, *map(os.path.realpath, written)}
    if "." in state.large:
        raise CopyError(f"{root} has more than {MANY:,} files")
    for folder in state.large:
        if _is_below(root / folder, names):
            raise CopyError(f"{folder} has more than {MANY:,} files, and a run writes there")
    copied, linked, size = [], [], 0
    for name, (_, file_size, _) in state.files.items():
        path = root / name
        if path.is_symlink():
            target = path.resolve()
            leads_out = path.readlink().is_absolute() or not target.is_relative_to(root)
            is_original = target.is_relative_to(root) or _is_below(path, names)
            if leads_out and (is_original or _is_below(target, names)):
                raise CopyError(f"{name} is a link that leads out of a copy")
        if file_size > LARGE and str(path) not in names:
            linked.append(name)
        else:
            copied.append(name)
            size += file_size
    if size > MOST_BYTES:
        raise CopyError(f"a copy of {root} would take {size / 2**20:,.0f} MB")
    with temporary_folder() as temporary:
        copy = Copy.of(root, Path.cwd(), temporary, runner.folder)
        for name in state.folders:
            (copy.tree / name).mkdir(parents=True, exist_ok=True)
        repository.write_files(root, copied, copy.tree)
        copy.link([*linked, *state.large])
        with copy.entered(runner) as runner_in_copy:
            yield runner_in_copy


def _is_below(path: Path, names: Iterable[str]) -> bool:
    return any(Path(name).is_relative_to(path) for name in names)


@contextmanager
def edited_copy(edit: Edit, written: Set[str], runner: Runner) -> Iterator[Runner]:
    """Copy this folder, apply `edit`, and change into the copy. Raises as `copy_of` does."""
    state = FolderState.now(runner.folder)
    file, _, number = edit.where.rpartition(":")
    if os.path.relpath(file, state.root) not in state.files:
        raise CopyError(f"{file} is not in {state.root}")
    edited = Path(os.path.relpath(file))
    with copy_of(state, {*written, file}, runner) as runner_in_copy:
        lines = edited.read_text(encoding="utf-8").split("\n")
        index = int(number) - 1
        lines[index] = lines[index].replace(edit.before, edit.after)
        edited.write_text("\n".join(lines), encoding="utf-8")
        yield runner_in_copy
