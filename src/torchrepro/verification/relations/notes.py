"""The notes of one process of a run for a relation: a file with one JSON object a line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections import Counter


class Notes:
    """The file of this process's notes."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._process = os.getpid()
        self._file: Any = None

    def add(self, **values: Any) -> None:
        """Write one line immediately, as the process may be killed. Forked children write none."""
        if os.getpid() != self._process:
            return
        if self._file is None:
            rank = os.environ.get("RANK", "0")
            path = self._folder / f"{rank}-{self._process}.jsonl"
            self._file = path.open("a", encoding="utf-8", buffering=1)
        self._file.write(json.dumps(values) + "\n")

    def discard(self) -> None:
        """Remove the file, and write nothing more. A forked child does not remove it."""
        if self._file is not None and os.getpid() == self._process:
            Path(self._file.name).unlink()
        self._process = 0


def numbered(name: str, seen: Counter[str]) -> str:
    seen[name] += 1
    return name if seen[name] == 1 else f"{name}#{seen[name]}"
