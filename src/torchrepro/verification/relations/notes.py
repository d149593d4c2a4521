"""Writes the notes of one process for a relation, to a file with one JSON object per line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections import Counter


class Notes:
    """The file with the notes of the process that creates this object."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._process = os.getpid()
        self._file: Any = None

    def add(self, **values: Any) -> None:
        """Write one line at once, as the process may be killed. A forked child writes nothing."""
        if os.getpid() != self._process:
            return
        if self._file is None:
            rank = os.environ.get("RANK", "0")
            path = self._folder / f"{rank}-{self._process}.jsonl"
            self._file = path.open("a", encoding="utf-8", buffering=1)
        self._file.write(json.dumps(values) + "\n")

    def discard(self) -> None:
        """Remove the file, and ignore further notes. A forked child does not remove the file."""
        if self._file is not None and os.getpid() == self._process:
            Path(self._file.name).unlink()
        self._process = 0


def numbered(name: str, seen: Counter[str]) -> str:
    seen[name] += 1
    return name if seen[name] == 1 else f"{name}#{seen[name]}"
