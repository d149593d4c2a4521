"""What a process of a run notes of its files, and how it finds those of a copy in place of its own.

Python's audit events tell of every file that Python opens, of the code that it imports, and of the
folders that are listed. What a library opens in C is not heard, but for `torch.save` and SQLite.
Every Python below the command does both, those that never import torch included: this module
imports next to nothing.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.imports import AfterImport

if TYPE_CHECKING:
    from pathlib import Path

MOST = 100_000  # uses of files that one process notes

READ, WRITTEN, LISTED, TOO_MANY = "read", "written", "listed", "too many"
CHANGED = "changed"  # otherwise than by writing, which is not noted
_WRITING = os.O_WRONLY | os.O_RDWR
LEFT_OUT = ("__pycache__", ".git")  # folders of a repository that hold no file of the program

_FINDERS = "__editable__"  # how the modules begin that setuptools puts in place of a path


class Use(NamedTuple):
    """The first use of a file or a folder by one process of a run."""

    kind: str
    path: str
    changed: int
    """When it had last been changed, in nanoseconds since 1970; 0 where it was not there."""
    size: int


def noted(log: Path) -> list[Use]:
    """Return what the processes of a run have noted, in the order of time."""
    found = []
    for line in log.read_bytes().splitlines() if log.exists() else ():
        try:
            found.append(Use(*json.loads(line)))
        except (ValueError, TypeError):  # a process that was killed may leave half a line
            continue
    return found


def begin(asked: Mapping[str, str]) -> None:
    """Note the files below `root` in the file `log`; adds an audit hook.

    With `tree`, a copy of `root`, this process finds what is in the copy before what is in `root`,
    which changes `sys.path`. A call that would write below `root`, or through a link of the copy to
    elsewhere, then raises `OSError`; what lies below `ours` may be written.
    """
    notes = _Notes(**asked)
    if asked["tree"]:
        _find_in_copy(asked["root"], asked["tree"])
        AfterImport(["torch"], notes.guard_save).watch_all()
    sys.addaudithook(notes.hear)


def _find_in_copy(root: str, tree: str) -> None:
    """Put the folders of the copy in place of those of the original, where they are there."""

    def mapped(entry: str) -> str:
        there = tree + entry[len(root) :]
        is_inside = entry == root or entry.startswith(root + os.sep)
        return there if is_inside and os.path.isdir(there) else entry  # noqa: PTH112 - texts

    sys.path[:] = [mapped(entry) for entry in sys.path]
    for name in [*sys.modules]:
        if name.startswith(_FINDERS):
            places = getattr(sys.modules[name], "MAPPING", {}).values()
            parents = {os.path.dirname(str(place)) for place in places}  # noqa: PTH120 - texts
            # Such a finder comes after all of the path.
            sys.path += sorted(mapped(each) for each in parents if mapped(each) != each)


class _Notes:
    def __init__(self, root: str, log: str, tree: str, ours: str) -> None:
        self._inside = root + os.sep
        self._in_tree = tree + os.sep if tree else ""
        self._log = log
        self._ours = tuple(each + os.sep for each in (ours, sys.prefix) if each)
        self._seen: set[tuple[str, str]] = set()

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        told, refused = _EVENTS.get(event), ""
        if told is None:
            return
        try:
            for kind, path, *folder in told(*args):
                place = _within(path, *folder)
                if kind != CHANGED:
                    self._note(kind, place)
                if self._in_tree and kind in (WRITTEN, CHANGED):
                    parent, name = os.path.split(place)
                    real = os.path.join(os.path.realpath(parent), name)  # noqa: PTH118 - texts
                    if self._leads_out(place, real if folder else os.path.realpath(place)):
                        self._note(WRITTEN, place)
                        refused = place
        except (OSError, ValueError, TypeError):
            return  # what is no path; an exception here would be one of the program's call
        if refused:
            what = "this run is in a copy, and that is a file of the user's own"
            raise OSError(errno.EROFS, what, refused)

    def guard_save(self, module: str) -> None:
        """Have `torch.save`, which opens files in C, ask as `open` does."""
        torch: Any = sys.modules[module]
        save = torch.save

        @wraps(save)
        def guarded(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            self.hear("open", (f, "w", os.O_WRONLY))
            save(obj, f, *args, **kwargs)

        torch.save = guarded

    def _leads_out(self, place: str, real: str) -> bool:
        """Whether what would be written is below `root`, or behind a link of the copy."""
        is_own = real.startswith(self._inside) and not real.startswith(self._ours)
        return not real.startswith(self._in_tree) and (is_own or place.startswith(self._in_tree))

    def _note(self, kind: str, whole: str) -> None:
        key = kind, whole
        if key in self._seen or len(self._seen) > MOST or whole == self._log:
            return
        if not (self._in_tree and whole.startswith(self._in_tree)):
            if not whole.startswith(self._inside):
                folder, name = os.path.split(whole)
                whole = f"{_real(folder)}{os.sep}{name}"
                if not whole.startswith(self._inside):
                    return
            whole = self._up_to_link(whole)
        if any(f"{os.sep}{folder}{os.sep}" in whole for folder in LEFT_OUT):
            return
        if len(self._seen) == MOST:
            kind, whole = TOO_MANY, ""
        self._seen.add(key)
        try:
            its = os.stat(whole)  # noqa: PTH116 - a text
            use = Use(kind, whole, its.st_mtime_ns, its.st_size)
        except OSError:
            if kind not in (WRITTEN, TOO_MANY):
                return  # it asked for what is not there
            use = Use(kind, whole, 0, 0)
        file = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, json.dumps(use).encode() + b"\n")
        finally:
            os.close(file)

    def _up_to_link(self, path: str) -> str:
        """Return the first part of a path that is a link in the repository, or all of it."""
        at = len(self._inside)
        while (at := path.find(os.sep, at + 1)) > 0:
            if os.path.islink(path[:at]):  # noqa: PTH114 - a text
                return path[:at]
        return path


_real = lru_cache(maxsize=1024)(os.path.realpath)


def _opened(path: Any, mode: Any, flags: int) -> Iterator[tuple[str, Any]]:
    if flags & os.O_ACCMODE != os.O_WRONLY and not flags & os.O_TRUNC:
        yield READ, path
    if flags & _WRITING:
        yield WRITTEN, path


def _within(path: Any, folder: int = -1) -> str:
    """Return the absolute path of what is named in `folder`, a descriptor, or from here.

    Raises `TypeError` for what is no path.
    """
    if not isinstance(path, str | bytes | os.PathLike):
        raise TypeError
    base = os.readlink(f"/proc/self/fd/{folder}") if folder >= 0 else ""  # noqa: PTH115 - a text
    whole = os.path.join(base, os.fsdecode(path))  # noqa: PTH118 - texts
    return os.path.abspath(whole)  # noqa: PTH100 - links stay as they are named


_EVENTS: Mapping[str, Any] = {
    "open": _opened,
    "exec": lambda code: [] if code.co_filename.startswith("<") else [(READ, code.co_filename)],
    "import": lambda module, filename, *_: [(READ, filename)] if filename else [],
    "cpython.run_file": lambda path: [(READ, path)],
    "os.listdir": lambda path: [(LISTED, path)],
    "os.scandir": lambda path: [(LISTED, path)],
    "os.rename": lambda old, new, of_old, of_new: [
        (CHANGED, old, of_old),
        (WRITTEN, new, of_new),
    ],
    "os.remove": lambda path, folder: [(WRITTEN, path, folder)],
    "os.rmdir": lambda path, folder: [(CHANGED, path, folder)],
    "os.mkdir": lambda path, mode, folder: (
        [] if os.path.exists(_within(path, folder)) else [(CHANGED, path, folder)]  # noqa: PTH110
    ),
    "os.link": lambda old, new, of_old, of_new: [
        (CHANGED, old, of_old),  # by whoever then writes to the new name
        (CHANGED, new, of_new),
    ],
    "os.symlink": lambda target, new, folder: [(CHANGED, new, folder)],
    "os.truncate": lambda path, length: [(WRITTEN, path)],
    "os.chmod": lambda path, mode, folder: [(CHANGED, path)],
    "os.chown": lambda path, user, group, folder: [(CHANGED, path)],
    "os.utime": lambda path, times, at, folder: [(CHANGED, path)],
    "sqlite3.connect": lambda path: [(READ, path), (WRITTEN, path)],
}
"""Event -> what it says was used; with a folder, what is there itself, were it a link: https://docs.python.org/3/library/audit_events.html."""
