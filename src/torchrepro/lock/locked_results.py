"""Reads the results of runs as locks store them, and finds the first difference between two.

Results (`Numbers`) are the exact losses of each step, a digest of the parameters after each step,
and a digest of the final state. A lock stores one line per step, so a git diff of a lock shows
which steps changed. The fixture `repro_numbers` stores results of single tests in other files.
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

from torchrepro.ground.errors import ProfileError, TraceError, some
from torchrepro.ground.imports import import_torch, installed_version
from torchrepro.ground.writing import write_in_place
from torchrepro.manifest.contents import MACHINES, as_text
from torchrepro.manifest.environment import platform_name
from torchrepro.trace.format import ARGUMENTS
from torchrepro.trace.reader import read_run

if TYPE_CHECKING:
    from pathlib import Path

_ZEROS = re.compile(r"\.?0*p")
_LINE = re.compile(r"(\d+): ([^|]*)\| ([0-9a-f]*)")
_MARK = "#"  # prefix of the fingerprint of a loss with several elements
_DIGITS = 16  # hexadecimal digits of a digest

FOLDER = "repro_numbers"
"""Name of the folder, next to a test module, with the results of its tests."""

FORMAT = 1  # the version of the file format in this folder


class StepResults(NamedTuple):
    losses: tuple[str, ...]
    """Hexadecimal floats; fingerprints of losses with several elements."""
    parameters: str
    """A digest of the parameters of all ranks after the step; empty without parameters."""


class Numbers(NamedTuple):
    steps: Mapping[int, StepResults]
    end: str
    """A digest of the final parameters and optimizer states; empty if only some steps were
    requested."""

    def to_json(self) -> dict[str, Any]:
        lines = [
            f"{step}: {' '.join(row.losses)} | {row.parameters}" for step, row in self.steps.items()
        ]
        return {"steps": lines, "end": self.end}

    @classmethod
    def from_json(cls, value: Any, path: str) -> Numbers:
        """Return the results in the lock `path`. Raises `ProfileError` if they are damaged."""
        steps = {}
        try:
            for line in value["steps"]:
                step, losses, digest = _LINE.fullmatch(line).groups()  # type: ignore[union-attr]
                for text in losses.split():
                    if not text.startswith(_MARK):
                        float.fromhex(text)
                steps[int(step)] = StepResults(tuple(losses.split()), digest)
            return cls(steps, str(value["end"]))
        except (TypeError, AttributeError, KeyError, ValueError, OverflowError):
            raise ProfileError.about("damaged: not the results of a run", path, "numbers") from None


def _exact(value: float) -> str:
    return _ZEROS.sub("p", value.hex())


def _digest_of_all(digests: Iterable[bytes]) -> str:
    """Return one digest of all `digests` in this order, or an empty string if all are empty."""
    joined = b"".join(digests)
    return xxhash.xxh3_128_hexdigest(joined)[:_DIGITS] if joined else ""


def numbers_of(folder: Path | str, every: int = 1) -> Numbers:
    """Return the results of a recorded run, for each step whose number is a multiple of `every`.

    Only the losses of rank 0 count. Raises `TraceError` if no step has a loss or parameters, or if
    steps were ended on several threads of one process.
    """
    traces = read_run(folder, records=False)
    parameters: dict[int, list[bytes]] = {}
    losses: dict[int, list[str]] = {}
    end: list[bytes] = []
    for trace in traces:
        if len({row.thread for row in trace.steps.values()}) > 1:
            problem = "several threads end steps, so the results of a step depend on their timing"
            todo = "compare its runs: torchrepro verify PROFILE -- COMMAND"
            raise TraceError.about(problem, found=str(folder), todo=todo)
        for number, row in trace.steps.items():
            if row.finished and number % every == 0:
                parameters.setdefault(number, []).append(row.parameters)
        for loss in [] if trace.rank else trace.losses:
            text = f"{_MARK}{loss.fingerprint.hex()}" if loss.value is None else _exact(loss.value)
            losses.setdefault(loss.step, []).append(text)
        for group, digests in sorted((trace.meta.get("end") or {}).items()):
            # The arguments of an optimizer do not count, and their names depend on torch.
            end += [
                f"{group} {name} {digest}".encode()
                for name, digest in sorted(digests.items())
                if not name.startswith(ARGUMENTS)
            ]
        trace.close()
    steps = {
        number: StepResults(tuple(losses.get(number, ())), _digest_of_all(digests))
        for number, digests in sorted(parameters.items())
    }
    if not any(row.losses or row.parameters for row in steps.values()):
        problem = "no step has a loss or parameters, so nothing can be locked"
        todo = "a step is a call of an optimizer's step(), or of torchrepro.end_step()"
        raise TraceError.about(problem, found=str(folder), todo=todo)
    return Numbers(steps, _digest_of_all(end))


class ResultsDifference(NamedTuple):
    """The first difference between the results in a lock and the results of a run."""

    step: int
    what: str  # ``loss``, ``parameters``, ``steps`` or ``end``
    locked: str
    here: str

    def __str__(self) -> str:
        if self.what == "steps":
            return f"the results of common steps agree: {self.locked} in the lock, {self.here} here"
        if self.what == "end":
            return "results differ at the end: other parameters or optimizer states"
        difference = f"other {self.what}"
        if self.what == "loss":
            locked, here = self._distinct_losses()
            difference = f"loss {locked} in the lock, {here} here"
        return f"results differ from step {self.step}: {difference}"

    def _distinct_losses(self) -> tuple[str, str]:
        """Return both losses as text, with enough digits to show the difference."""
        losses = [_number(text) for text in (self.locked, self.here)]
        for digits in range(5, 18):
            left, right = (f"{it:.{digits}g}" if isinstance(it, float) else it for it in losses)
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


def first_difference(locked: Numbers, here: Numbers) -> ResultsDifference | None:
    """Return the first difference between the results of two runs, or None if they are equal.

    If one run has more steps, the common steps are compared first.
    """
    for step, expected in locked.steps.items():
        row = here.steps.get(step)
        if row is None:
            break
        for pair in zip((*expected.losses, ""), (*row.losses, ""), strict=False):
            if pair[0] != pair[1]:
                return ResultsDifference(step, "loss", *pair)
        if expected.parameters != row.parameters:
            return ResultsDifference(step, "parameters", expected.parameters, row.parameters)
    if locked.steps.keys() != here.steps.keys():
        step = min(locked.steps.keys() ^ here.steps.keys())
        sizes = (len(run.steps) for run in (locked, here))
        counts = (f"{size:,} step{'s' * (size != 1)}" for size in sizes)
        return ResultsDifference(step, "steps", *counts)
    if locked.end != here.end:
        return ResultsDifference(max(locked.steps), "end", locked.end, here.end)
    return None


def numbers_of_training(losses: Any, model: Any = None) -> Numbers:
    """Return losses, and a digest of a model's state, as the results that a lock stores.

    `losses` is a number, a tensor with one element, or a list of them. Raises `ProfileError` for
    other losses.
    """
    import_torch()
    from torchrepro.trace.fingerprint import fingerprint

    loss_list: Iterable[Any] = losses if isinstance(losses, list | tuple) else [losses]
    steps = {}
    for step, loss in enumerate(loss_list):
        try:
            value = loss.item() if hasattr(loss, "item") else loss
            steps[step] = StepResults((_exact(float(value)),), "")
        except (TypeError, ValueError, RuntimeError):
            legal = "a list of floats, or of tensors with one element"
            raise ProfileError.about(
                "not a loss", "repro_numbers", found=type(loss).__name__, legal=legal
            ) from None
    state = {} if model is None else model.state_dict()
    tensors = (state[name] for name in sorted(state) if hasattr(state[name], "dtype"))
    return Numbers(steps, _digest_of_all(fingerprint(tensor.detach()) for tensor in tensors))


def check_test_results(
    path: Path, name: str, profile: str | None, numbers: Numbers, reason: str
) -> str:
    """Compare the results of the test `name` with the file `path`, and return the error message.

    The message is empty if the results are equal. `profile` is the name of the active profile.
    With a `reason`, the results are stored and not compared. If the test has no stored results,
    they are stored too. If the variable `CI` is set, such a test gets an error message instead.
    """
    machine = platform_name()
    settings = {"torch": installed_version("torch"), "profile": profile}
    with _opened(path) as contents:
        section = contents[MACHINES].get(machine, {})
        locked = section.get(name)
        if locked is None and not reason and os.environ.get("CI"):
            platforms = [platform for platform in contents[MACHINES] if platform != machine]
            hint = f"; it has results for {some(platforms)}" if platforms and not section else ""
            return (
                f"{path} has no results of {name} for {machine}{hint}\n"
                f'  to add them: pytest --repro-update "why" {path.parent.parent}'
            )
        if locked is not None and not reason:
            first = first_difference(Numbers.from_json(locked, str(path)), numbers)
            if first is None:
                return ""
            differing = (
                f"  {setting}: {locked.get(setting)} in the lock, {now} here"
                for setting, now in settings.items()
                if locked.get(setting) != now
            )
            todo = '  if this change is intended: pytest --repro-update "why"'
            return "\n".join([str(first), *differing, f"  locked in {path}", todo])
        row = {**numbers.to_json(), **settings}
        section[name] = {**row, "reason": reason} if reason else row
        contents[MACHINES][machine] = section
        write_in_place(path, as_text(contents))
    return ""


@contextmanager
def _opened(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the contents of a file under a file lock, because test processes run in parallel."""
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
                problem = "damaged: not the results of tests"
                raise ProfileError.about(problem, str(path), todo=todo)
        yield contents
    finally:
        os.close(folder)
