"""What is tried, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

CPU = "cpu"
ACCELERATORS = ("cuda", "npu", "mps", "xpu")
DEVICES = (CPU, *ACCELERATORS)


@dataclass(frozen=True, slots=True)
class Trial:
    """A promise on a device, or for one knob of it."""

    promise: str
    device: str
    knob: str = ""

    def __str__(self) -> str:
        return f"{self.knob or self.promise} on {self.device}"


class Result(StrEnum):
    """What became of a promise on a device."""

    HELD = "held"
    FAILED = "failed"
    NOT_HERE = "not here"


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one trial."""

    trial: Trial
    result: Result
    why: str = ""
    """Why it is not here."""

    expected: str = ""
    found: str = ""
    """What was expected of a promise that failed, and what was found instead."""

    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        return {
            "promise": self.trial.promise,
            "device": self.trial.device,
            "knob": self.trial.knob,
            "result": str(self.result),
            "why": self.why,
            "expected": self.expected,
            "found": self.found,
            "seconds": round(self.seconds, 3),
        }
