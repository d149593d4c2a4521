"""Sees which files a run writes as checkpoints, and ends the process once one of them has settled.

The folder is scanned after every step: Python's audit events hear neither ``torch.save(path)`` nor
safetensors, which open files in C. A step that wrote files may have begun a checkpoint that later
steps complete: a framework writes a folder file by file, and may do so while training goes on.
"""

from __future__ import annotations

import atexit
import os
import signal
from contextlib import suppress
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from torchrepro.verification.file_notes import LEFT_OUT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchrepro.relations.observations import Notes

STEPS = 3
"""Steps after which a checkpoint has settled although new files keep appearing."""

_BEGINNINGS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"\x89HDF")
_LONGEST_HEADER = 100_000_000  # of safetensors: https://huggingface.co/docs/safetensors


def settles(saved: int, new_at: list[int], step: int) -> bool:
    """Whether a checkpoint that was first seen in step `saved` has settled by the end of `step`.

    `new_at` are the steps in which files with new names appeared.
    """
    return step > saved and (step not in new_at or step >= saved + STEPS)


class CheckpointWatch:
    """Notes each checkpoint below `tree`, and kills the process once that of `kill` has settled.

    `pattern` says which files are checkpoints, by their path or name; without one those are that
    begin as what torch.save, pickle, safetensors or HDF5 writes. `kill` is a number of steps: the
    first checkpoint that is written after so many is the last that the process writes.
    """

    def __init__(self, notes: Notes, tree: str, pattern: str = "", kill: int | None = None) -> None:
        self._notes = notes
        self._tree = tree
        self._pattern = pattern
        self._kill = kill
        self._known = dict(self._scan())
        self._names = set(self._known)
        self._new_at: list[int] = []
        self._saved: int | None = None
        self._steps = 0
        atexit.register(self._at_the_end)

    def step_ended(self, steps: int) -> None:
        """Look for checkpoints at the end of a step, after which `steps` have ended."""
        self._steps = steps
        changed, new = self._changes()
        before = steps - 1  # a file was written before the step that ends just now, or within it
        if changed:
            self._notes.add(saved=before, files=changed, new=new)
        if new:
            self._new_at.append(before)
        if self._kill is None:
            return
        if self._saved is None and changed and before >= self._kill:
            self._saved = before
        if (
            self._saved is not None
            and settles(self._saved, self._new_at, before)
            and not self._is_open()
        ):
            self._notes.add(killed=steps)
            # The run has a session of its own: all of its processes end, as if a machine did.
            if os.getsid(0) == os.getpgrp():
                os.killpg(os.getpgrp(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    def _at_the_end(self) -> None:
        changed, new = self._changes()
        if changed:
            self._notes.add(saved=self._steps, files=changed, new=new)

    def _changes(self) -> tuple[list[str], list[str]]:
        found = dict(self._scan())
        changed = [
            path
            for path, state in found.items()
            if self._known.get(path) != state and self._is_checkpoint(path)
        ]
        new = [path for path in changed if path not in self._names]
        self._known = found
        self._names.update(found)
        return sorted(changed), new

    def _scan(self) -> Iterator[tuple[str, tuple[int, int, int]]]:
        for folder, folders, files in os.walk(self._tree):
            folders[:] = [name for name in folders if name not in LEFT_OUT]
            for name in files:
                path = os.path.join(folder, name)  # noqa: PTH118 - many of them
                with suppress(OSError):  # it is gone again
                    its = os.lstat(path)
                    state = its.st_mtime_ns, its.st_size, its.st_ino
                    yield os.path.relpath(path, self._tree), state

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
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError):
                if os.getsid(int(process.name)) != session:
                    continue
                for link in (process / "fd").iterdir():
                    with suppress(OSError, ValueError, IndexError):
                        path = os.path.realpath(link)
                        if not path.startswith(self._tree + os.sep):
                            continue
                        flags = (process / "fdinfo" / link.name).read_text().split("flags:")[1]
                        if int(flags.split()[0], 8) & os.O_ACCMODE and self._is_checkpoint(
                            os.path.relpath(path, self._tree)
                        ):
                            return True
        return False
