"""The options of a recording. An environment variable passes them to all processes of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchrepro.ground.errors import TraceError, near, shown
from torchrepro.ground.errors import size as in_units

VARIABLE = "TORCHREPRO_RECORD"
"""Environment variable with the request as JSON, for all processes of ``torchrepro run``."""

LEVELS = ("step", "module", "op")
"""The levels of recording, from the coarsest to the finest."""

UNITS = {
    "": 1,
    **{letter: 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}i": 1024**power for power, letter in enumerate("kmgt", start=1)},
}
"""The bytes of each unit of a size; a B may follow. ``M`` is decimal, as ``MB`` is."""

SMALLEST = 200_000
"""Bytes that suffice for a trace without ops, including its log and the log's index."""

_SIZE = re.compile(
    rf"(?P<number>\d{{1,30}}(?:\.\d{{1,30}})?)\s*(?P<unit>{'|'.join(filter(None, UNITS))}|)B?",
    re.IGNORECASE | re.ASCII,
)


@dataclass(frozen=True, slots=True)
class RecordingRequest:
    """The options of a recording."""

    folder: str
    level: str = "op"
    """``step`` (parameters, gradients, loss), ``module`` (the results of modules) or ``op``."""
    steps: tuple[int, int] | None = None
    """The first and the last step to record; None for all steps."""
    keep: tuple[str, ...] = ()
    """Patterns of modules whose tensors are kept."""
    statistics: bool = False
    """Whether to record mean, norm and range of outputs, for comparisons with a tolerance."""
    detail: bool = False
    """Whether to read every input again, which shows changes from outside torch at once."""
    on_unwritable: str = "stop"
    """If a trace cannot be written: ``stop`` the program, or ``warn`` and stop recording."""
    every: int = 1
    """Steps whose number is a multiple of it are recorded at `level`, the others at ``step``."""
    max_size: int | None = None
    """The most bytes that the traces of the run may use on disk; None for no limit."""
    loading: bool = True
    """Whether to record the ops that load a batch in the main process; batches always are."""

    def __post_init__(self) -> None:
        # Absolute, because the program may change its directory before the first step is written.
        object.__setattr__(self, "folder", str(Path(self.folder).absolute()))
        for key, choices in (("level", LEVELS), ("on_unwritable", ("stop", "warn"))):
            requested = getattr(self, key)
            if requested not in choices:
                close = near(requested, choices)
                hint = {"near": close} if close else {"legal": ", ".join(choices)}
                raise TraceError.about("no such choice", key=key, found=requested, **hint)
        if self.steps is not None and not is_range(self.steps):
            legal = "the first and the last, counted from 0, as in (5, 8)"
            raise _wrong("not a range of steps", "steps", self.steps, legal=legal)
        # The size may come from an untrusted manifest.
        object.__setattr__(self, "max_size", bytes_of(self.max_size))
        every = self.every
        if type(every) is not int or every < 1:
            legal = "as in 100, for steps 0, 100, 200, ..."
            raise _wrong("not a whole number from 1 on", "every", repr(every), legal=legal)
        if every > 1 and self.level == LEVELS[0]:
            legal = " or ".join(f"the level {level}" for level in LEVELS[1:])
            match = f"{every}, with the level {self.level}"
            raise TraceError.about("records no step in full", key="every", found=match, legal=legal)
        first, last = self.steps or (0, 0)
        if last // every * every < first:
            todo = f"ask for other steps, or for the level {LEVELS[0]}"
            problem = f"none of the steps {first} to {last} is a multiple of it"
            raise _wrong(problem, "every", every, todo=todo)

    def to_variable(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def inherited(cls, environment: Mapping[str, str]) -> RecordingRequest | None:
        """Return the request of the recorded run that this process belongs to, or None."""
        text = environment.get(VARIABLE)
        if not text:
            return None
        values = json.loads(text)
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**values | lists)

    def wants(self, step: int) -> bool:
        return self.steps is None or self.steps[0] <= step <= self.steps[1]

    def prepare_folder(self) -> None:
        """Create the folder. Raises `TraceError` if that fails or the folder is not empty."""
        folder = Path(self.folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            occupied = next(folder.iterdir(), None)
        except OSError as error:
            problem = f"cannot store a recording: {error.strerror}"
            todo = "name a new or empty folder"
            raise TraceError.about(problem, found=self.folder, todo=todo) from None
        if occupied is not None:
            raise TraceError.about(
                "a recording goes into a new or empty folder",
                found=self.folder,
                todo=f"name another one, or remove what is in it ({occupied.name}, ...)",
            )


def bytes_of(size: Any) -> int | None:
    """Return a size in bytes, given as a number or a text such as ``500MB``, ``2GiB`` or ``2G``.

    Returns None for None, which is no limit. Raises `TraceError` if the size is invalid, or too
    small for any trace.
    """
    if size is None:
        return None
    match = _SIZE.fullmatch(shown(size).strip())
    number = float(match["number"]) if match else 0.0
    requested = int(number * UNITS[match["unit"].lower()]) if match else 0
    if not match:
        legal = "a number of bytes, or one with kB, MB, GB, TB, KiB, MiB, GiB or TiB, as in 500MB"
        raise _wrong("not a size", "max_size", size, legal=legal)
    if requested < SMALLEST:
        meant = {"near": f"{match['number']}MB"} if number * UNITS["m"] >= SMALLEST else {}
        least = f"an empty trace needs up to {in_units(SMALLEST)}"
        raise _wrong(least, "max_size", size, **meant or {"legal": "that or more, as in 500MB"})
    return requested


def level_of_step(step: int, level: str, every: int) -> str:
    """Return `level` if `step` is a multiple of `every`, else the coarsest level."""
    return LEVELS[0] if step % every else level


def is_range(steps: Any) -> bool:
    """Whether `steps` are two whole numbers, the second at least as large as the first."""
    return (
        isinstance(steps, tuple | list)
        and len(steps) == 2  # noqa: PLR2004 - the first and the last
        and all(isinstance(step, int) for step in steps)
        and 0 <= steps[0] <= steps[1]
    )


def _wrong(problem: str, key: str, rejected: Any, **hint: str) -> TraceError:
    return TraceError.about(problem, key=key, found=shown(rejected), **hint)
