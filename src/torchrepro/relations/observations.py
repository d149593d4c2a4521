"""The notes that processes of a run take of themselves, and that a relation reads."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLE = "TORCHREPRO_OBSERVE"
"""The variable that carries what is to be observed, as JSON, to every process of a run."""

SUFFIX = ".jsonl"


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
            place = self._folder / f"{rank}-{self._process}{SUFFIX}"
            self._file = place.open("a", encoding="utf-8", buffering=1)
        self._file.write(json.dumps(values) + "\n")


def noted(folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield what each process of a run has noted, rank by rank."""
    for place in sorted(folder.glob(f"*{SUFFIX}")):
        lines = place.read_text(encoding="utf-8").splitlines()
        whole = [line for line in lines if line.endswith("}")]  # the last one may be cut off
        yield [json.loads(line) for line in whole]
