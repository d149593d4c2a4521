"""The record of an observed call, and how child processes report the calls that they observe.

Children of a recorded process write notes to a file, and the recorded process reads this file. If
nothing is recorded, the first worker of a loader prints its calls, because it has no other way to
report them.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from io import FileIO
from pathlib import Path
from typing import Any

from torchrepro.ground.console import note
from torchrepro.ground.fork_safety import comes_from_fork_server
from torchrepro.seeding.streams import present_worker

RECORDED = ("name", "what", "where", "times", "step", "record", "value", "instead", "in_sample")
"""The keys of a call in the metadata of a trace, in a report, and in the notes of children."""

IN_MANIFEST = ("function", "value", "where", "times")
"""The keys of a seeding call in a manifest."""

_LARGEST = 1 << 20  # the most bytes of the notes of children
_SLOTS = 1 << 16


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """A call by a line of the program: it reads a source of nondeterminism, or passes a seed."""

    name: str  #: The function, as in ``time.time_ns``.
    what: str  #: The source, as in ``the clock``; the same words for all explicit seeds.
    where: str  #: ``file:line`` of the program.
    instead: str = ""  #: The suggested replacement.
    step: int = -1  #: The step of the first call; -1 before torch was imported.
    record: int = 0  #: The number of records before the first call.
    times: int = 1
    value: str | None = None  #: The explicit seed; None if the call reads a source.
    in_sample: bool = False
    """Whether the call loads a sample, which has its own generator (`torchrepro.sample_rng`)."""
    is_sure: bool = True
    """Whether the line itself shows the call. If not, the call is the last one before a seed."""

    @property
    def function(self) -> str:
        """The function, by its key in a manifest."""
        return self.name

    def to_json(self, keys: Sequence[str] = RECORDED) -> dict[str, Any]:
        """Return the values under `keys` as plain JSON values."""
        return {key: getattr(self, key) for key in keys}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> ObservedCall:
        """Return the call with the values in `row`, which may lack keys or have more."""
        return cls(**{key: row[key] for key in RECORDED if key in row})

    def __str__(self) -> str:
        count = f" ({self.times} times)" if self.times > 1 else ""
        return f"{self.name}({self.value or ''}) at {self.where}{count}"


class ChildNotes:
    """A file of notes that child processes leave for the recorded process.

    The file is in the folder of the recording; without a folder, no process counts as a child. The
    children are forked, or started by multiprocessing. Each note is one line of JSON. `take`
    removes the file.
    """

    def __init__(self, folder: str | None) -> None:
        # Python starts a spawned process with this module in its command line.
        spawned = any("multiprocessing.spawn" in argument for argument in sys.orig_argv)
        is_recorded = folder is not None
        self.is_spawned = is_recorded and (spawned or comes_from_fork_server())
        self._process = os.getppid() if self.is_spawned else os.getpid()
        self._path = Path(folder or "") / f"told-{self._process}.jsonl"
        self._is_recorded = is_recorded

    @property
    def in_child(self) -> bool:
        return self._is_recorded and os.getpid() != self._process

    def append(self, note_type: str, **fields: Any) -> None:
        """Append a note; skip it if the file cannot be written or has `_LARGEST` bytes."""
        text = json.dumps({"kind": note_type, **fields}) + "\n"
        opener = partial(os.open, mode=0o600)
        with suppress(OSError), FileIO(self._path, "a", opener=opener) as file:
            if file.tell() < _LARGEST:
                file.write(text.encode())

    def take(self) -> list[dict[str, Any]]:
        """Return all notes and remove the file; in a child process, return an empty list.

        Skips a note that a child process has written only in part.
        """
        notes: list[dict[str, Any]] = []
        if self.in_child or not self._is_recorded:
            return notes
        with suppress(OSError):
            lines = self._path.read_bytes()[: 2 * _LARGEST].splitlines()
            self._path.unlink()
            for line in lines:
                with suppress(ValueError):
                    notes.append(json.loads(line))
        return notes


class PrintedNotes:
    """Shared bytes that mark the printed notes, so that several processes print each note once.

    The hash of a note is the index of its byte. Forked processes share the bytes with this
    process. Spawned workers share another array, which they set with `write` when they start.
    """

    def __init__(self) -> None:
        self._slots: Any = mmap.mmap(-1, _SLOTS)

    @cached_property
    def of_spawned(self) -> Any:
        """The array for spawned workers; it can only be passed to a process at its start."""
        from multiprocessing.sharedctypes import RawArray

        return RawArray("B", _SLOTS)

    def write(self, slots: Any) -> None:
        self._slots = slots

    def print_in_first_worker(self, key: str, text: str) -> None:
        """Print `text` in the first worker of a loader, once for each `key`.

        Most loaders start new workers in every epoch.
        """
        slot = zlib.crc32(key.encode()) % _SLOTS
        if present_worker() == 0 and not self._slots[slot]:
            self._slots[slot] = 1
            note(text)


printed_notes = PrintedNotes()
