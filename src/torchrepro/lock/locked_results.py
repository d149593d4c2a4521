"""The numbers that a run computed, as a lock holds them, and where two runs of them differ.

They are the losses of each step, exactly, a digest of the parameters after it, and one of what
there is at the end. One step is one line of the lock: a change of numbers reads as a diff. Those of
single tests, which the fixture `repro_numbers` asks for, are in a file beside the tests.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from torchrepro.ground.errors import ProfileError, TraceError
from torchrepro.ground.imports import import_torch, installed_version
from torchrepro.ground.messages import some
from torchrepro.ground.writing import write_in_place
from torchrepro.manifest.contents import MACHINES, as_text
from torchrepro.manifest.environment import kind_of_machine
from torchrepro.trace.format import ARGUMENTS
from torchrepro.trace.reader import read_run

if TYPE_CHECKING:
    from pathlib import Path

_ZEROS = re.compile(r"\.?0*p")
_LINE = re.compile(r"(\d+): ([^|]*)\| ([0-9a-f]*)")
_MARK = "#"  # begins the fingerprint of a loss that is no single number
_DIGITS = 16  # hexadecimal ones of a digest

FOLDER = "repro_numbers"
"""The name of the folder beside a test that holds the numbers of its module."""

FORMAT = 1  # of that file


class StepNumbers(NamedTuple):
    losses: tuple[str, ...]
    """Hexadecimal floats, and fingerprints of losses that are no single number."""
    parameters: str
    """A digest of the parameters after the step, over all ranks; empty if it has none."""


class Numbers(NamedTuple):
    steps: Mapping[int, StepNumbers]
    end: str
    """A digest of the parameters and the states of optimizers at the end; empty if some steps alone
    were asked for."""

    def to_json(self) -> dict[str, Any]:
        lines = [
            f"{step}: {' '.join(its.losses)} | {its.parameters}" for step, its in self.steps.items()
        ]
        return {"steps": lines, "end": self.end}

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


def _exact(value: float) -> str:
    return _ZEROS.sub("p", value.hex())


def _digest_of_all(each: Iterable[bytes]) -> str:
    """Return a digest of digests in their order; empty if all of them are."""
    together = b"".join(each)
    return xxhash.xxh3_128_hexdigest(together)[:_DIGITS] if together else ""


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
            text = f"{_MARK}{loss.fingerprint.hex()}" if loss.value is None else _exact(loss.value)
            losses.setdefault(loss.step, []).append(text)
        for kind, its in sorted((trace.meta.get("end") or {}).items()):
            # An optimizer's arguments have other names in another torch, and are no numbers.
            left = (pair for pair in sorted(its.items()) if not pair[0].startswith(ARGUMENTS))
            end += [f"{kind} {name} {value}".encode() for name, value in left]
        trace.close()
    steps = {
        number: StepNumbers(tuple(losses.get(number, ())), _digest_of_all(each))
        for number, each in sorted(parameters.items())
    }
    if not any(its.losses or its.parameters for its in steps.values()):
        what = "has no loss and no parameters of any step, so there are no numbers to hold"
        todo = "a step is a call of an optimizer's step(), or of torchrepro.end_step()"
        raise TraceError.about(what, found=str(folder), todo=todo)
    return Numbers(steps, _digest_of_all(end))


class NumbersDifference(NamedTuple):
    """Where the numbers of a run first differ from those of a lock."""

    step: int
    what: str  # ``loss``, ``parameters``, ``steps`` or ``end``
    locked: str
    here: str

    def __str__(self) -> str:
        if self.what == "steps":
            return f"the same numbers up to there, but {self.locked} in the lock, {self.here} here"
        if self.what == "end":
            return "other numbers at the end: other parameters or states of optimizers"
        values = f"other {self.what}"
        if self.what == "loss":
            one, two = self._told_apart()
            values = f"loss {one} in the lock, {two} here"
        return f"other numbers from step {self.step}: {values}"

    def _told_apart(self) -> tuple[str, str]:
        # With as many digits as it takes to see that they differ.
        one, two = (_number(text) for text in (self.locked, self.here))
        for digits in range(5, 18):
            left, right = (f"{i:.{digits}g}" if isinstance(i, float) else i for i in (one, two))
            if left != right:
                break
        return left or "none", right or "none"

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = {"locked": self.locked, "here": self.here}
        if self.what == "loss":
            values = {key: _number(text) for key, text in values.items()}
        return {"step": self.step, "what": self.what, **values}


def _number(text: str) -> float | str:
    value = None if text.startswith(_MARK) or not text else float.fromhex(text)
    # JSON has neither NaN nor infinity.
    return text if value is None or value - value != 0 else value


def first_difference(locked: Numbers, here: Numbers) -> NumbersDifference | None:
    """Return where the numbers of two runs first differ; None where they are the same.

    Fewer or more steps are compared as far as both go.
    """
    for step, one in locked.steps.items():
        two = here.steps.get(step)
        if two is None:
            break
        for pair in zip((*one.losses, ""), (*two.losses, ""), strict=False):
            if pair[0] != pair[1]:
                return NumbersDifference(step, "loss", *pair)
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


def numbers_of_training(losses: Any, model: Any = None) -> Numbers:
    """Return losses, and what the state of a model is, as the numbers of a lock.

    `losses` are numbers or tensors of one, or a single one. Raises `ProfileError` for others.
    """
    import_torch()
    from torchrepro.trace.fingerprint import fingerprint

    each: Iterable[Any] = losses if isinstance(losses, list | tuple) else [losses]
    steps = {}
    for step, loss in enumerate(each):
        try:
            value = loss.item() if hasattr(loss, "item") else loss
            steps[step] = StepNumbers((_exact(float(value)),), "")
        except (TypeError, ValueError, RuntimeError):
            legal = "a list of floats, or of tensors of one number"
            found = type(loss).__name__
            raise ProfileError.about("no loss", "repro_numbers", found=found, legal=legal) from None
    state = {} if model is None else model.state_dict()
    tensors = (state[name] for name in sorted(state) if hasattr(state[name], "dtype"))
    return Numbers(steps, _digest_of_all(fingerprint(tensor.detach()) for tensor in tensors))


def hold_test(path: Path, name: str, profile: str | None, numbers: Numbers, reason: str) -> str:
    """Return in what the numbers of the test `name` differ from those in its file `path`.

    Empty if in nothing. `profile` is the name of the one that is in force. With a reason the
    numbers are written. Where there are none yet they are written as well, unless the variable
    `CI` is set: then that is what is returned.
    """
    machine = kind_of_machine()
    settings = {"torch": installed_version("torch"), "profile": profile}
    with _opened(path) as contents:
        section = contents[MACHINES].get(machine, {})
        held = section.get(name)
        if held is None and not reason and os.environ.get("CI"):
            others = [each for each in contents[MACHINES] if each != machine]
            there = f"; it has some of {some(others)}" if others and not section else ""
            return (
                f"{path} holds no numbers of {name} for {machine}{there}\n"
                f'  to add them: pytest --repro-update "why" {path.parent.parent}'
            )
        if held is not None and not reason:
            first = first_difference(Numbers.from_json(held, str(path)), numbers)
            if first is None:
                return ""
            other = (
                f"  {setting}: {held.get(setting)} in the lock, {now} here"
                for setting, now in settings.items()
                if held.get(setting) != now
            )
            todo = '  if that is as it should be: pytest --repro-update "why"'
            return "\n".join([str(first), *other, f"  as it is: {path}", todo])
        its = {**numbers.to_json(), **settings}
        section[name] = {**its, "reason": reason} if reason else its
        contents[MACHINES][machine] = section
        write_in_place(path, as_text(contents))
    return ""


@contextmanager
def _opened(path: Path) -> Iterator[dict[str, Any]]:
    """Read the file, while no other process of the same tests reads or writes it."""
    contents: dict[str, Any] = {"tests": FORMAT, MACHINES: {}}
    if not path.exists() and os.environ.get("CI"):
        yield contents
        return
    path.parent.mkdir(exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if path.exists():
            try:
                contents = json.loads(path.read_text(encoding="utf-8"))
                valid = contents["tests"] == FORMAT and isinstance(contents[MACHINES], dict)
            except (ValueError, TypeError, KeyError):
                valid = False
            if not valid:
                todo = 'remove it, then pytest --repro-update "why"'
                what = "damaged: no numbers of tests"
                raise ProfileError.about(what, str(path), todo=todo)
        yield contents
    finally:
        os.close(folder)
