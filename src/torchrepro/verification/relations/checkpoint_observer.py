"""Observes the checkpoints that a process writes and opens."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from torchrepro.lock.file_notes import SKIPPED_FOLDERS

if TYPE_CHECKING:
    from torchrepro.verification.relations.notes import Notes

_LONGEST_WAIT = 3  # passes after which a checkpoint counts as complete, even with new files
_BEGINNINGS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"\x89HDF")
_LONGEST_HEADER = 100_000_000  # of safetensors: https://huggingface.co/docs/safetensors


class Checkpoints:
    """Notes the checkpoints below `tree`, and may kill the process after one of them.

    `pattern` matches the paths or names of checkpoints. Without a pattern, a file is a checkpoint
    if it begins like a file of torch.save, pickle, safetensors or HDF5. `kill` is a number of
    backward passes. The process is killed once the first checkpoint that it writes after this
    number of passes is complete.

    The folder is scanned before every pass, because Python's audit events do not report files that
    C code opens, as in ``torch.save(path)`` and safetensors. A framework may write several files
    for one checkpoint while training continues. So a checkpoint counts as complete (settled) after
    a pass without a new file name, or after three passes.
    """

    def __init__(self, notes: Notes, tree: str, pattern: str = "", kill: int | None = None) -> None:
        self._notes = notes
        self.on_read: Callable[[], object] = tuple  # called when a checkpoint is opened
        self._tree = tree
        self._pattern = pattern
        self._kill = kill
        self._known = self._scan()
        self._names = set(self._known)
        self._unsettled: list[int] = []
        self._begun = 0
        self._is_checking = False
        sys.addaudithook(self._on_audit_event)
        atexit.register(lambda: self._note_changes(self._begun))

    def pass_begins(self, ended: int) -> None:
        """Look for new checkpoints as a backward pass begins, after `ended` earlier passes."""
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
                # A run has its own session. All its processes are killed, as in a power failure.
                if os.getsid(0) == os.getpgrp():
                    os.killpg(os.getpgrp(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
        if changed:
            self._unsettled.append(ended)

    def _on_audit_event(self, event: str, args: tuple[Any, ...]) -> None:
        # A run resumes only from a checkpoint that it opens before its first pass.
        if event != "open" or self._begun or self._is_checking or str(args[1])[:1] != "r":
            return
        self._is_checking = True  # the check opens the file too, which raises another event
        with suppress(OSError, ValueError, TypeError):  # the argument is not a path
            path = os.path.relpath(os.fsdecode(args[0]), self._tree)
            if path in self._known and self._is_checkpoint(path):
                self._notes.add(opened=path)
                self.on_read()
        self._is_checking = False

    def _note_changes(self, saved: int) -> tuple[bool, bool]:
        states = self._scan()
        changed = [
            path
            for path, state in states.items()
            if self._known.get(path) != state and self._is_checkpoint(path)
        ]
        new = [path for path in changed if path not in self._names]
        self._known = states
        self._names.update(states)
        if changed:
            self._notes.add(saved=saved, files=sorted(changed))
        return bool(changed), bool(new)

    def _scan(self) -> dict[str, tuple[int, int, int]]:
        states = {}
        for folder, folders, files in os.walk(self._tree):
            folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
            for name in files:
                path = os.path.join(folder, name)  # noqa: PTH118 - many of them
                with suppress(OSError):  # removed since the listing
                    stat = os.lstat(path)
                    state = stat.st_mtime_ns, stat.st_size, stat.st_ino
                    states[os.path.relpath(path, self._tree)] = state
        return states

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
        # A safetensors file begins with the length of its header, which is JSON.
        return head[8:] == b"{" and 0 < int.from_bytes(head[:8], "little") < _LONGEST_HEADER

    def _is_open(self) -> bool:
        """Whether a process of this run is known to have a checkpoint open for writing."""
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
