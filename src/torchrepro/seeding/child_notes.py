"""What children tell of the process that is recorded above them: one JSON line each time.

They are forked, or spawned by multiprocessing, whose first program names `multiprocessing.spawn`.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

LARGEST = 1 << 20  # bytes above which nothing more is told, and nothing is read


class ChildNotes:
    """A file in the folder of a recording that all children of this process append to.

    It exists from the first note until they are taken. Only the process that made this takes them.
    """

    def __init__(self, folder: str) -> None:
        self.is_spawned = any("multiprocessing.spawn" in each for each in sys.orig_argv)
        """Whether this process began as a child of the one that is recorded."""
        self._process = os.getppid() if self.is_spawned else os.getpid()
        self._path = Path(folder) / f"told-{self._process}.jsonl"

    @property
    def in_child(self) -> bool:
        """Whether this process is a child of the one that is recorded."""
        return os.getpid() != self._process

    def tell(self, kind: str, **fields: Any) -> None:
        """Append a note; a child that cannot, or comes too late, tells nothing."""
        text = json.dumps({"kind": kind, **fields}) + "\n"
        with suppress(OSError):
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                if os.lseek(file, 0, os.SEEK_END) < LARGEST:
                    os.write(file, text.encode())
            finally:
                os.close(file)

    def take(self) -> list[dict[str, Any]]:
        """Return all notes and remove them; a line that a child has not finished is left out.

        A child has none to take.
        """
        found: list[Any] = []
        if self.in_child:
            return found
        with suppress(OSError):
            lines = self._path.read_bytes()[: 2 * LARGEST].splitlines()
            self._path.unlink()
            for line in lines:
                with suppress(ValueError):
                    found.append(json.loads(line))
        return [each for each in found if isinstance(each, dict)]
