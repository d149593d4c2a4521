"""What to record; passed in a variable from a command line to the processes below it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchrepro.ground.errors import TraceError
from torchrepro.ground.messages import near, shown
from torchrepro.ground.messages import size as in_units

VARIABLE = "TORCHREPRO_RECORD"
"""Variable that carries the request, as JSON, to every process below `run`."""

LEVELS = ("step", "module", "op")
"""How much can be recorded, from the coarsest to the finest."""

UNITS = {
    "": 1,
    **{letter: 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}i": 1024**power for power, letter in enumerate("kmgt", start=1)},
}
"""The bytes of each unit of a size; a B may follow. What others call 500M is no less than ours."""

SMALLEST = 200_000
"""Bytes that a trace without a single op has room in, its log and the index of that included."""

_SIZE = re.compile(
    rf"(?P<number>\d{{1,30}}(?:\.\d{{1,30}})?)\s*(?P<unit>{'|'.join(filter(None, UNITS))}|)B?",
    re.IGNORECASE | re.ASCII,
)


@dataclass(frozen=True, slots=True)
class RecordingRequest:
    """What to record, and where."""

    folder: str
    level: str = "op"
    """``step`` (parameters, gradients, loss), ``module`` (what modules return) or ``op``."""
    steps: tuple[int, int] | None = None
    """The first and the last step to record; None is all of them."""
    keep: tuple[str, ...] = ()
    """Patterns of modules whose tensors are kept."""
    statistics: bool = False
    """Whether mean, norm and range of outputs are recorded, to compare within a tolerance."""
    detail: bool = False
    """Whether every input is read again, so that changes from outside torch are seen at once."""
    on_unwritable: str = "stop"
    """Whether a program stops, or goes on unrecorded, where its trace cannot be written."""
    every: int = 1
    """Steps whose number is a multiple of it are recorded at `level`, all others at ``step``."""
    max_size: int | None = None
    """How many bytes the traces of the run may take on disk; None is any number."""
    loading: bool = True
    """Whether ops are recorded by which the main process loads a batch, besides the batch."""

    def __post_init__(self) -> None:
        # The program may go to another directory before the first step is written.
        object.__setattr__(self, "folder", str(Path(self.folder).absolute()))
        for key, choices in (("level", LEVELS), ("on_unwritable", ("stop", "warn"))):
            asked = getattr(self, key)
            if asked not in choices:
                close = near(asked, choices)
                hint = {"near": close} if close else {"legal": ", ".join(choices)}
                raise TraceError.about("no such choice", key=key, found=asked, **hint)
        if self.steps is not None and not is_range(self.steps):
            legal = "the first and the last, counted from 0, as in (5, 8)"
            raise _wrong("not a range of steps", "steps", self.steps, legal=legal)
        if self.max_size is not None:  # a manifest's, which anybody may have written
            object.__setattr__(self, "max_size", bytes_of(self.max_size))
        every = self.every
        if type(every) is not int or every < 1:
            legal = "as in 100, for steps 0, 100, 200, ..."
            raise _wrong("not a whole number from 1 on", "every", repr(every), legal=legal)
        if every > 1 and self.level == LEVELS[0]:
            legal = " or ".join(f"the level {level}" for level in LEVELS[1:])
            found = f"{every}, with the level {self.level}"
            raise TraceError.about("records no step in full", key="every", found=found, legal=legal)
        first, last = self.steps or (0, 0)
        if last // every * every < first:
            todo = f"ask for other steps, or for the level {LEVELS[0]}"
            what = f"none of the steps {first} to {last} is a multiple of it"
            raise _wrong(what, "every", every, todo=todo)

    def to_variable(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def inherited(cls, environment: Mapping[str, str]) -> RecordingRequest | None:
        """Return the request that the process has inherited; None without one."""
        text = environment.get(VARIABLE)
        if not text:
            return None
        values = json.loads(text)
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**values | lists)

    def wants(self, step: int) -> bool:
        return self.steps is None or self.steps[0] <= step <= self.steps[1]

    def prepare_folder(self) -> None:
        """Make the folder; raises `TraceError` if it cannot be made or is not empty."""
        place = Path(self.folder)
        try:
            place.mkdir(parents=True, exist_ok=True)
            occupied = next(place.iterdir(), None)
        except OSError as error:
            what = f"cannot store a recording: {error.strerror}"
            todo = "name a new or empty folder"
            raise TraceError.about(what, found=self.folder, todo=todo) from None
        if occupied is not None:
            raise TraceError.about(
                "a recording goes into a new or empty folder",
                found=self.folder,
                todo=f"name another one, or remove what is in it ({occupied.name}, ...)",
            )


def bytes_of(size: Any) -> int:
    """Return a size that is written as a number of bytes, or as in ``500MB``, ``2GiB`` or ``2G``.

    Raises `TraceError` for any other, and for one that no trace has room in.
    """
    found = _SIZE.fullmatch(shown(size).strip())
    number = float(found["number"]) if found else 0.0
    asked = int(number * UNITS[found["unit"].lower()]) if found else 0
    if not found:
        legal = "a number of bytes, or one with kB, MB, GB, TB, KiB, MiB, GiB or TiB, as in 500MB"
        raise _wrong("not a size", "max_size", size, legal=legal)
    if asked < SMALLEST:
        meant = {"near": f"{found['number']}MB"} if number * UNITS["m"] >= SMALLEST else {}
        least = f"an empty trace needs up to {in_units(SMALLEST)}"
        raise _wrong(least, "max_size", size, **meant or {"legal": "that or more, as in 500MB"})
    return asked


def level_of_step(step: int, level: str, every: int) -> str:
    """Return the level of a step where every so many steps are recorded at `level`."""
    return LEVELS[0] if step % every else level


def is_range(steps: Any) -> bool:
    """Whether `steps` are two whole numbers, the second no less than the first."""
    return (
        isinstance(steps, tuple | list)
        and len(steps) == 2  # noqa: PLR2004 - the first and the last
        and all(isinstance(step, int) for step in steps)
        and 0 <= steps[0] <= steps[1]
    )


def _wrong(what: str, key: str, found: Any, **hint: str) -> TraceError:
    return TraceError.about(what, key=key, found=shown(found), **hint)
