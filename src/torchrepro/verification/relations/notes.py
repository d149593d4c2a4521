"""What a process of a run notes of itself for a relation, in a file of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections import Counter


class Notes:
    """The file of what this process notes."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._process = os.getpid()
        self._file: Any = None

    def add(self, **values: Any) -> None:
        """Write one line, at once: the process may be killed. A forked child writes none."""
        if os.getpid() != self._process:
            return
        if self._file is None:
            rank = os.environ.get("RANK", "0")
            place = self._folder / f"{rank}-{self._process}.jsonl"
            self._file = place.open("a", encoding="utf-8", buffering=1)
        self._file.write(json.dumps(values) + "\n")

    def discard(self) -> None:
        """Remove what was noted, and note nothing more; a forked child changes nothing."""
        if self._file is not None and os.getpid() == self._process:
            Path(self._file.name).unlink()
        self._process = 0


def numbered(name: str, seen: Counter[str]) -> str:
    seen[name] += 1
    return name if seen[name] == 1 else f"{name}#{seen[name]}"
