"""What a process notes of the checkpoints that it writes and opens."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from torchrepro.lock.file_notes import LEFT_OUT

if TYPE_CHECKING:
    from torchrepro.verification.relations.notes import Notes

_LONGEST_WAIT = 3  # backward passes after which a checkpoint settles while new files appear
_BEGINNINGS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"\x89HDF")
_LONGEST_HEADER = 100_000_000  # of safetensors: https://huggingface.co/docs/safetensors


class Checkpoints:
    """Notes each checkpoint below `tree`, and kills the process once that of `kill` has settled.

    `pattern` says which files are checkpoints, by their path or name; without one those are that
    begin as what torch.save, pickle, safetensors or HDF5 writes. `kill` is a number of backward
    passes: the first checkpoint that is written after so many is the last that the process writes.

    The folder is scanned before every pass: Python's audit events hear neither ``torch.save(path)``
    nor safetensors, which open files in C. A pass that wrote files may have begun a checkpoint that
    later ones complete: a framework writes a folder file by file, and may do so while training
    goes on. It has settled after a pass without a new name, or after three.
    """

    def __init__(self, notes: Notes, tree: str, pattern: str = "", kill: int | None = None) -> None:
        self._notes = notes
        self.when_read: Callable[[], object] = tuple  # called as a checkpoint is opened
        self._tree = tree
        self._pattern = pattern
        self._kill = kill
        self._known = self._scan()
        self._names = set(self._known)
        self._unsettled: list[int] = []
        self._begun = 0
        self._is_looking = False
        sys.addaudithook(self._hear)
        atexit.register(lambda: self._note_changes(self._begun))

    def pass_begins(self, ended: int) -> None:
        """Look for checkpoints before a backward pass, before which `ended` were made."""
        self._begun = ended + 1
        changed, has_new_name = self._note_changes(ended)
        for saved in [*self._unsettled]:
            is_last = self._kill is not None and saved >= self._kill
            waits = ended < saved + (_LONGEST_WAIT if has_new_name else 1)
            if waits or (is_last and self._is_open()):
                continue
            self._unsettled.remove(saved)
            self._notes.add(settled=saved)
            if is_last:
                self._notes.add(killed=ended)
                # The run has a session of its own: all of its processes end, as if a machine did.
                if os.getsid(0) == os.getpgrp():
                    os.killpg(os.getpgrp(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
        if changed:
            self._unsettled.append(ended)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        # Which checkpoint it goes on from: none that is opened later.
        if event != "open" or self._begun or self._is_looking or str(args[1])[:1] != "r":
            return
        self._is_looking = True  # which opens the file
        with suppress(OSError, ValueError, TypeError):  # what is no path
            path = os.path.relpath(os.fsdecode(args[0]), self._tree)
            if path in self._known and self._is_checkpoint(path):
                self._notes.add(opened=path)
                self.when_read()
        self._is_looking = False

    def _note_changes(self, saved: int) -> tuple[bool, bool]:
        found = self._scan()
        changed = [
            path
            for path, state in found.items()
            if self._known.get(path) != state and self._is_checkpoint(path)
        ]
        new = [path for path in changed if path not in self._names]
        self._known = found
        self._names.update(found)
        if changed:
            self._notes.add(saved=saved, files=sorted(changed))
        return bool(changed), bool(new)

    def _scan(self) -> dict[str, tuple[int, int, int]]:
        found = {}
        for folder, folders, files in os.walk(self._tree):
            folders[:] = [name for name in folders if name not in LEFT_OUT]
            for name in files:
                path = os.path.join(folder, name)  # noqa: PTH118 - many of them
                with suppress(OSError):  # it is gone again
                    its = os.lstat(path)
                    state = its.st_mtime_ns, its.st_size, its.st_ino
                    found[os.path.relpath(path, self._tree)] = state
        return found

    def _is_checkpoint(self, path: str) -> bool:
        if self._pattern:
            return PurePath(path).match(self._pattern)
        whole = Path(self._tree, path)
        if whole.is_symlink():
            return False
        try:
            with whole.open("rb") as file:
                head = file.read(9)
        except OSError:
            return False
        if head.startswith(_BEGINNINGS):
            return True
        # Safetensors begin with the length of a header, which is JSON.
        return head[8:] == b"{" and 0 < int.from_bytes(head[:8], "little") < _LONGEST_HEADER

    def _is_open(self) -> bool:
        """Whether a process of this run has a checkpoint open for writing, where that is known."""
        session = os.getsid(0)
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            with suppress(OSError, ValueError, IndexError):
                process, path = link.parent.parent, os.path.realpath(link)
                is_ours = os.getsid(int(process.name)) == session
                if is_ours and path.startswith(self._tree + os.sep):
                    flags = (process / "fdinfo" / link.name).read_text().split("flags:")[1]
                    is_written = int(flags.split()[0], 8) & os.O_ACCMODE
                    if is_written and self._is_checkpoint(os.path.relpath(path, self._tree)):
                        return True
        return False
