"""What a process of a run notes of its files, and how it finds those of a copy in place of its own.

Python's audit events tell of every file that Python opens, of the code that it imports, and of the
folders that are listed. What a library opens in C is not heard. Every Python below the command
does both, those that never import torch included: this module imports next to nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

MOST = 100_000  # uses of files that one process notes

READ, WRITTEN, LISTED, TOO_MANY = "read", "written", "listed", "too many"
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
    which changes `sys.path`.
    """
    if asked["tree"]:
        _find_in_copy(asked["root"], asked["tree"])
    sys.addaudithook(_Notes(**asked).hear)


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
    def __init__(self, root: str, log: str, tree: str) -> None:
        self._inside = root + os.sep
        self._in_tree = tree + os.sep if tree else ""
        self._log = log
        self._seen: set[tuple[str, Any]] = set()

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        told = _EVENTS.get(event)
        if told is None:
            return
        try:
            for kind, path in told(*args):
                self._note(kind, path)
        except (OSError, ValueError, TypeError):
            return  # what is no path; an exception here would be one of the program's call

    def _note(self, kind: str, path: Any) -> None:
        key = kind, path
        if key in self._seen or len(self._seen) > MOST:
            return
        if not isinstance(path, str | bytes | os.PathLike):
            return
        text = os.fsdecode(path)
        if text.startswith("<") or text == self._log:
            return
        whole = os.path.abspath(text)  # noqa: PTH100 - links stay as they are named
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


_EVENTS: Mapping[str, Any] = {
    "open": _opened,
    "exec": lambda code: [(READ, code.co_filename)],
    "import": lambda module, filename, *_: [(READ, filename)] if filename else [],
    "cpython.run_file": lambda path: [(READ, path)],
    "os.listdir": lambda path: [(LISTED, path)],
    "os.scandir": lambda path: [(LISTED, path)],
    "os.rename": lambda old, new, *_: [(WRITTEN, new)],
    "os.remove": lambda path, *_: [(WRITTEN, path)],
}
"""Event -> what it says was used: https://docs.python.org/3/library/audit_events.html."""
