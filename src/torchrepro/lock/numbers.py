"""The numbers that a run computed, as a lock holds them, and where two runs of them differ.

They are the losses of each step, exactly, a digest of the parameters after it, and one of what
there is at the end. One step is one line of the lock: a change of numbers reads as a diff.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from torchrepro.errors import ProfileError, TraceError
from torchrepro.trace.format import ARGUMENTS
from torchrepro.trace.reader import read_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

_ZEROS = re.compile(r"\.?0*p")
_LINE = re.compile(r"(\d+): ([^|]*)\| ([0-9a-f]*)")
_MARK = "#"  # begins the fingerprint of a loss that is no single number
_DIGITS = 16  # hexadecimal ones of a digest


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """What a step computed."""

    losses: tuple[str, ...]
    """Hexadecimal floats, and fingerprints of losses that are no single number."""
    parameters: str
    """A digest of the parameters after the step, over all ranks; empty if it has none."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a run computed."""

    steps: Mapping[int, StepNumbers]
    end: str
    """A digest of the parameters and the states of optimizers at the end; empty if some steps alone
    were asked for."""

    def to_json(self) -> dict[str, Any]:
        """Return them as plain JSON values, a step on a line."""
        return {"steps": [self.line(step) for step in self.steps], "end": self.end}

    def line(self, step: int) -> str:
        """Return a step as a line of a lock."""
        its = self.steps[step]
        return f"{step}: {' '.join(its.losses)} | {its.parameters}"

    @classmethod
    def from_json(cls, value: Any, where: str) -> Numbers:
        """Return the numbers of a lock; raises `ProfileError` for what is damaged."""
        steps = {}
        try:
            for line in value["steps"]:
                step, losses, parameters = _LINE.fullmatch(line).groups()  # type: ignore[union-attr]
                for text in losses.split():
                    if not text.startswith(_MARK):
                        float.fromhex(text)
                steps[int(step)] = StepNumbers(tuple(losses.split()), parameters)
            return cls(steps, str(value["end"]))
        except (TypeError, AttributeError, KeyError, ValueError, OverflowError):
            raise ProfileError.about("damaged: no numbers of a run", where, "numbers") from None


def exact(value: float) -> str:
    """Return a float as the shortest hexadecimal text that is exactly it."""
    return _ZEROS.sub("p", value.hex())


def digest_of_all(each: Iterable[bytes]) -> str:
    """Return a digest of digests in their order; empty if all of them are."""
    together = [one for one in each if one]
    return xxhash.xxh3_128_hexdigest(b"".join(together))[:_DIGITS] if together else ""


def numbers_of(folder: Path | str, every: int = 1) -> Numbers:
    """Return the numbers of a recorded run, of each step whose number is a multiple of `every`.

    Losses are those of rank 0. Raises `TraceError` for a recording that holds no step of any, and
    for one of which several threads have ended steps.
    """
    traces = read_run(folder, records=False)
    parameters: dict[int, list[bytes]] = {}
    losses: dict[int, list[str]] = {}
    end: list[bytes] = []
    for trace in traces:
        if len({row.thread for row in trace.steps.values()}) > 1:
            what = "several threads end steps, so it is chance which step has which numbers"
            todo = "compare its runs: torchrepro verify PROFILE -- COMMAND"
            raise TraceError.about(what, found=str(folder), todo=todo)
        for number, row in trace.steps.items():
            if row.finished and number % every == 0:
                parameters.setdefault(number, []).append(row.parameters)
        for loss in trace.losses if not trace.rank else ():
            text = f"{_MARK}{loss.fingerprint.hex()}" if loss.value is None else exact(loss.value)
            losses.setdefault(loss.step, []).append(text)
        for kind, its in sorted((trace.meta.get("end") or {}).items()):
            # An optimizer's arguments have other names in another torch, and are no numbers.
            left = (pair for pair in sorted(its.items()) if not pair[0].startswith(ARGUMENTS))
            end += [f"{kind} {name} {value}".encode() for name, value in left]
        trace.close()
    steps = {
        number: StepNumbers(tuple(losses.get(number, ())), digest_of_all(each))
        for number, each in sorted(parameters.items())
    }
    if not any(its.losses or its.parameters for its in steps.values()):
        what = "has no loss and no parameters of any step, so there are no numbers to hold"
        todo = "a step is a call of an optimizer's step(), or of torchrepro.end_step()"
        raise TraceError.about(what, found=str(folder), todo=todo)
    return Numbers(steps, digest_of_all(end))


@dataclass(frozen=True, slots=True)
class NumbersDifference:
    """Where the numbers of a run first differ from those of a lock."""

    step: int
    what: str
    """``loss``, ``parameters``, ``steps`` or ``end``."""
    locked: str
    here: str

    def __str__(self) -> str:
        if self.what == "steps":
            return f"the same numbers up to there, but {self.locked} in the lock, {self.here} here"
        place = "at the end" if self.what == "end" else f"from step {self.step}"
        what = "parameters or states of optimizers" if self.what == "end" else self.what
        one, two = _told_apart(self.locked, self.here) if self.what == "loss" else ("", "")
        values = f"{what} {one} in the lock, {two} here" if one else f"other {what}"
        return f"other numbers {place}: {values}"

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        values: dict[str, Any] = {"locked": self.locked, "here": self.here}
        if self.what == "loss":
            values = {key: _number(text) for key, text in values.items()}
        return {"step": self.step, "what": self.what, **values}


def _number(text: str) -> Any:
    value = None if text.startswith(_MARK) or not text else float.fromhex(text)
    return text if value is None or value - value != 0 else value  # JSON has neither NaN nor inf


def _told_apart(left: str, right: str) -> tuple[str, str]:
    """Return two losses with as many digits as it takes to see that they differ."""
    values = [_number(text) for text in (left, right)]
    shown = [""]
    for digits in range(5, 18):
        shown = [f"{its:.{digits}g}" if isinstance(its, float) else str(its) for its in values]
        if shown[0] != shown[1]:
            break
    one, two = (text or "none" for text in shown)
    return one, two


def first_difference(locked: Numbers, here: Numbers) -> NumbersDifference | None:
    """Return where the numbers of two runs first differ; None where they are the same.

    Fewer or more steps are compared as far as both go.
    """
    for step, one in locked.steps.items():
        two = here.steps.get(step)
        if two is None:
            break
        if one.losses != two.losses:
            return NumbersDifference(step, "loss", *_first_unequal(one.losses, two.losses))
        if one.parameters != two.parameters:
            return NumbersDifference(step, "parameters", one.parameters, two.parameters)
    if locked.steps.keys() != here.steps.keys():
        step = min(locked.steps.keys() ^ here.steps.keys())
        sizes = (len(each.steps) for each in (locked, here))
        counts = (f"{size:,} step{'s' * (size != 1)}" for size in sizes)
        return NumbersDifference(step, "steps", *counts)
    if locked.end != here.end:
        return NumbersDifference(max(locked.steps), "end", locked.end, here.end)
    return None


def _first_unequal(left: Sequence[str], right: Sequence[str]) -> tuple[str, str]:
    pairs = zip((*left, ""), (*right, ""), strict=False)
    return next((one, two) for one, two in pairs if one != two)
