"""Copies of a program's folder, where a command runs as in its own.

What a copy links leads to the user's own files. So nothing is linked that a run is known to write,
and a process in a copy cannot write to the folder that it is a copy of (see `file_notes`).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torchrepro.lock import file_notes
from torchrepro.lock.file_notes import LISTED, READ, TOO_MANY, WRITTEN, Use, noted
from torchrepro.lock.repository import (
    CopyError,
    entries,
    file_state,
    is_of_environment,
    repository_root,
    write_files,
)
from torchrepro.verification.perturbations import RunEnvironment, noting_files

if TYPE_CHECKING:
    from torchrepro.verdict.value import Edit

PREFIX = "torchrepro-copy-"
MANY = 20_000  # files of a folder above which it is linked as one
MOST_BYTES = 500 * 2**20  # that a copy holds
LARGE = 2**20  # bytes of a file that is linked, where no run is known to write it

_MARK = ".torchrepro-copy"  # a file in every folder of ours


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder that is gone when the block ends, however it ends.

    One whose process was killed is removed by the next call: it holds our mark, and nobody its
    lock.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if (folder / _MARK).is_file() and (held := _locked(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # what ran there may still be ending: a later call removes it
                (folder / _MARK).touch()
            os.close(held)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
    held = _locked(folder)
    try:
        (folder / _MARK).touch()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if held is not None:  # some file systems have no locks
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


@dataclass(frozen=True, slots=True)
class FolderState:
    """The files of a program's repository, or of its folder where it has none, at one moment."""

    root: Path
    files: Mapping[str, tuple[int, int, int]]  # time of change in ns, size, inode; by path in root
    folders: frozenset[str]
    large: frozenset[str]  # folders with more than `MANY` files, which are not looked at

    @classmethod
    def now(cls, without: Path) -> FolderState:
        """Look at the folder that this process is in, but for what lies below `without`."""
        root = repository_root(Path.cwd()) or Path.cwd()
        found: dict[Path, list[str]] = {}  # the names in each folder
        sizes: Counter[Path] = Counter()  # how many there are below each
        large: set[Path] = set()
        waiting = [root]
        while waiting:
            folder = waiting.pop()
            around = [folder, *folder.parents]
            if without in around or not large.isdisjoint(around):
                continue
            inner, found[folder] = entries(folder, root)
            waiting += inner
            around = around[: around.index(root) + 1]
            sizes.update(dict.fromkeys(around, len(found[folder])))
            if full := next((each for each in around if sizes[each] > MANY), None):
                large.add(full)
                sizes.subtract(dict.fromkeys(around, sizes[full]))
        files: dict[str, tuple[int, int, int]] = {}
        kept = [each for each in found if large.isdisjoint([each, *each.parents])]
        for folder in kept:
            for name in found[folder]:
                with suppress(OSError):
                    its = (folder / name).lstat()
                    place = str((folder / name).relative_to(root))
                    files[place] = its.st_mtime_ns, its.st_size, its.st_ino
        folders, apart = (
            frozenset(str(each.relative_to(root)) for each in some) for some in (kept, large)
        )
        return cls(root, files, folders, apart)


@dataclass(frozen=True)
class Copy:
    """A copy that a command runs in."""

    root: Path  # what it is a copy of
    tree: Path
    place: Path  # the folder of `tree` in which the command starts
    log: Path  # where its runs note which files they use
    recordings: Path  # the folder of ours in which its runs are recorded
    linked: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The files and folders that are links to those of `root`, as they were."""

    @classmethod
    def of(cls, root: Path, folder: Path, temporary: Path, recordings: Path) -> Copy:
        """Return the copy, still to be written, for a command that starts in `folder`.

        Its tree is called as `root` is.
        """
        tree = temporary / "tree" / root.name
        tree.mkdir(parents=True)
        place = tree / folder.relative_to(root)
        return cls(root, tree, place, temporary / "files.jsonl", recordings.resolve())

    def link(self, names: Iterable[str]) -> None:
        """Link files and folders of `root`; what is in the copy already stays."""
        for name in names:
            here = self.tree / name
            if not os.path.lexists(here):
                here.parent.mkdir(parents=True, exist_ok=True)
                here.symlink_to(self.root / name)
                self.linked[name] = file_state(self.root / name, follow=True)

    def link_beside(self, uses: Iterable[Use]) -> None:
        """Link what lies beside `root` and was used, so that relative paths lead there.

        What was written to stays apart.
        """
        beside: dict[str, set[str]] = {}
        for use in uses:
            path = Path(use.path)
            if self.root.parent in path.parents and self.root not in path.parents:
                name = path.relative_to(self.root.parent).parts[0]
                beside.setdefault(name, set()).add(use.kind)
        for name in (each for each, kinds in beside.items() if WRITTEN not in kinds):
            with suppress(FileExistsError):
                (self.tree.parent / name).symlink_to(self.root.parent / name)

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the words of a command as they are in the copy.

        Absolute paths into `root` lead into the copy. Relative ones out of `root`, or into a
        virtual environment, lead from the copy elsewhere, so that they become absolute.
        """
        folder = self.root / self.place.relative_to(self.tree)

        def is_copied(path: Path) -> bool:
            return path.is_relative_to(self.root) and not is_of_environment(path, self.root)

        mapped = []
        for word in words:
            before, path = "", word
            if not word.startswith(os.sep) and "=" in word:  # --data=/repo/data
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
    def entered(self) -> Iterator[None]:
        self.place.mkdir(parents=True, exist_ok=True)
        with chdir(self.place):
            yield

    @property
    def environment(self) -> RunEnvironment:
        """What a command is started in, so that it finds the copy's files and notes which."""
        return noting_files(self.root, self.log, self.tree, self.recordings)

    @property
    def uses(self) -> list[Use]:
        """The files that runs in the copy have used, but for what is recorded of them."""
        return [
            use for use in noted(self.log) if not Path(use.path).is_relative_to(self.recordings)
        ]

    def strayed(self) -> str:
        """Return a file of `root` that a run in the copy used, in words; empty if there is none.

        What is linked may be read there, and not be written.
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
                is_linked = any(path.is_relative_to(each) for each in linked)
                if use.kind != READ or not is_linked:
                    verb = "would have written" if use.kind == WRITTEN else "read"
                    return f"it {verb} {path} in your own folder"
        for name, before in self.linked.items():
            if file_state(self.root / name, follow=True) != before:
                return f"{name}, which is linked to your own, was changed meanwhile"
        return ""


@contextmanager
def copy_of(state: FolderState, written: Set[str], recordings: Path) -> Iterator[Copy]:
    """Be in a copy of a folder with the files that it had at one moment.

    Large files and folders of very many are links, but for those in `written`: what a run is known
    to write, by absolute paths. Raises `CopyError` where that is too much, and for a link through
    which a run would read or write what it shall not.
    """
    root = state.root
    names = {*written, *map(os.path.realpath, written)}
    if "." in state.large:
        raise CopyError(f"{root} has more than {MANY:,} files")
    for folder in state.large:
        if _is_below(root / folder, names):
            raise CopyError(f"{folder} has more than {MANY:,} files, and a run writes there")
    copied, linked, size = [], [], 0
    for name, (_, its_size, _) in state.files.items():
        path = root / name
        if path.is_symlink():
            target = path.resolve()
            leads_out = path.readlink().is_absolute() or not target.is_relative_to(root)
            is_own = target.is_relative_to(root) or _is_below(path, names)
            if leads_out and (is_own or _is_below(target, names)):
                raise CopyError(f"{name} is a link that leads out of a copy")
        if its_size > LARGE and str(path) not in names:
            linked.append(name)
        else:
            copied.append(name)
            size += its_size
    if size > MOST_BYTES:
        raise CopyError(f"a copy of {root} would take {size / 2**20:,.0f} MB")
    with temporary_folder() as temporary:
        copy = Copy.of(root, Path.cwd(), temporary, recordings)
        for name in state.folders:
            (copy.tree / name).mkdir(parents=True, exist_ok=True)
        write_files(root, copied, copy.tree)
        copy.link([*linked, *state.large])
        with copy.entered():
            yield copy


def _is_below(path: Path, names: Iterable[str]) -> bool:
    return any(Path(name).is_relative_to(path) for name in names)


@contextmanager
def edited_copy(edit: Edit, written: Set[str], recordings: Path) -> Iterator[Copy]:
    """Be in a copy of this folder in which one line of a program is edited; raises as `copy_of`."""
    state = FolderState.now(recordings)
    file, _, number = edit.where.rpartition(":")
    if os.path.relpath(file, state.root) not in state.files:
        raise CopyError(f"{file} is not in {state.root}")
    with copy_of(state, {*written, file}, recordings) as copy:
        edited = copy.tree / Path(file).relative_to(state.root)
        lines = edited.read_text(encoding="utf-8").split("\n")
        at = int(number) - 1
        lines[at] = lines[at].replace(edit.before, edit.after)
        edited.write_text("\n".join(lines), encoding="utf-8")
        yield copy
