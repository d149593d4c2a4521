"""Workers of a loader begin anew every epoch; what happens in forked ones is said once in a run."""

from __future__ import annotations

import mmap
import zlib

from torchrepro.console import note
from torchrepro.seeding.streams import present_worker

_SLOTS = 1 << 16
_said = mmap.mmap(-1, _SLOTS)
"""A byte for each note that was said. Processes that are forked share it with this one; those that
are spawned have one of their own. Two notes in 65,536 may share a byte: the later is not said."""


def say_in_first_worker(key: str, text: str) -> None:
    """Say `text` in the first worker of a loader, unless a worker has said `key` before.

    What a worker records stays in the worker, so one of them says it.
    """
    if present_worker() != 0:
        return
    slot = zlib.crc32(key.encode()) % _SLOTS
    if not _said[slot]:
        _said[slot] = 1
        note(text)
