"""The files that the program itself asks for, reads and writes, with the first line of each.

A file that one run writes and the next one reads makes them differ. Noted are calls of `open`, of
`torch.save` and `sqlite3.connect`, which do without it, and of functions that say whether a file
exists; those of a library count for the line of the program that called the library. Code is left
out, and what libraries keep beside it. What extensions written in C open by themselves is not seen.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torchrepro.callers import frames, is_library, line, package
from torchrepro.imports import AfterImport
from torchrepro.seeding.call_listeners import listen, stop_listening

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

    from torchrepro.seeding.child_notes import ChildNotes

FEW, MANY = 50, 1000  # files that are noted of one line for one use, and of a program

_OPENING = (("builtins", "open"), ("io", "open"))
_ASKING = (
    *(("os.path", name) for name in ("exists", "isfile", "getmtime")),
    *(("pathlib", f"Path.{name}") for name in ("exists", "is_file")),
)
_SAVING = ("torch", "save")
_CONNECTING = ("sqlite3", "connect")
_OWN, _STAND_INS = "torchrepro", "torchrepro.seeding.call_listeners"
_CODE = (".py", ".pyc", ".pyi", ".so", ".pyd", ".dll")
_OF_THE_SYSTEM = ("/proc/", "/dev/", "/sys/")


@dataclass(slots=True)
class FileUse:
    """A file, and where the program first asked for it, read it and wrote it: ``file:line``."""

    path: str
    asked: str = ""
    read: str = ""
    written: str = ""
    changed: float = 0.0
    """When it had been changed, in seconds since 1970, as the program first read it."""

    def was_there(self, began: float) -> bool:
        """Whether the program read the file as it was when the program began."""
        return bool(self.read) and self.changed < began


class FileUses:
    """Notes the files that the program uses from now on, until it stops."""

    def __init__(self, told: ChildNotes) -> None:
        self.began = time.time()
        self._told = told
        self._files: dict[str, FileUse] = {}
        self._of_line: Counter[tuple[str, str]] = Counter()
        for module, name in (*_OPENING, *_ASKING):
            listen(module, name, self._note)
        late = dict((_SAVING, _CONNECTING))
        self._waiting = AfterImport(late, lambda module: listen(module, late[module], self._note))
        self._waiting.watch_all()

    def stop(self) -> None:
        """Note nothing more."""
        self._waiting.unwatch()
        stop_listening(self._note)

    def to_json(self) -> dict[str, Any]:
        """Return what a trace says of the files, and since when they were noted."""
        return {"files": [asdict(each) for each in self._files.values()], "began": self.began}

    def if_there(self) -> list[FileUse]:
        """Return the files that the program asked for and read, as an earlier run had left them."""
        return [each for each in self._files.values() if each.asked and each.was_there(self.began)]

    def add_told(self, note: Mapping[str, Any]) -> None:
        """Add what a forked child has told. Raises `TypeError` for what no child has written."""
        path, use, where, changed = (note[name] for name in ("path", "use", "where", "changed"))
        if use not in FileUse.__slots__ or not {str}.issuperset(map(type, (path, where))):
            raise TypeError(use)
        self._add(path, use, where, float(changed))

    def _note(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType
    ) -> None:
        if name == ".".join(_CONNECTING):
            database = args[0] if args else kwargs.get("database")
            for use in ("written", "read"):  # which of them SQLite does is not heard
                self._note_use(use, database, frame)
        else:
            self._note_use(*_use_of(name, args, kwargs), frame)

    def _note_use(self, use: str, target: Any, frame: FrameType) -> None:
        # A library may ask for files of its own; what it reads, it reads for the program.
        if use == "asked" and is_library(frame.f_code.co_filename):
            return
        if isinstance(target, int) or not isinstance(target, str | bytes | os.PathLike):
            return
        path = os.path.abspath(os.fsdecode(target))  # noqa: PTH100 - links stay as they are named
        known = self._files.get(path)
        if known is not None and getattr(known, use):
            return
        if path.endswith(_CODE) or path.startswith(_OF_THE_SYSTEM) or is_library(path):
            return
        for each in frames(frame):
            if not is_library(each.f_code.co_filename):
                break
            if package(each) == _OWN and each.f_globals["__name__"] != _STAND_INS:
                return
        else:
            return
        where = line(each)
        if self._of_line[where, use] >= FEW:
            return
        changed = os.stat(path).st_mtime if use == "read" else 0.0  # noqa: PTH116 - a text
        if self._add(path, use, where, changed) and self._told.in_child:
            self._told.tell("file", path=path, use=use, where=where, changed=changed)

    def _add(self, path: str, use: str, where: str, changed: float) -> bool:
        if path not in self._files and len(self._files) >= MANY:
            return False
        known = self._files.setdefault(path, FileUse(path))
        if getattr(known, use):
            return False
        self._of_line[where, use] += 1
        setattr(known, use, where)
        known.changed = changed or known.changed
        return True


def _use_of(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, Any]:
    if name == ".".join(_SAVING):
        return "written", args[1] if len(args) > 1 else kwargs.get("f")
    if not name.endswith(".open"):
        return "asked", args[0] if args else kwargs.get("path")
    mode = str(args[1] if len(args) > 1 else kwargs.get("mode", "r"))
    target = args[0] if args else kwargs.get("file")
    return "written" if set("wax") & set(mode) else "read", target
