"""The numbers of single tests, in a file beside them: what the fixture `repro_numbers` asks for."""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrepro.errors import ProfileError
from torchrepro.imports import import_torch, installed_version
from torchrepro.lock.lock_file import by_lines, write_in_place
from torchrepro.lock.numbers import (
    Numbers,
    StepNumbers,
    digest_of_all,
    exact,
    first_difference,
)
from torchrepro.manifest.contents import MACHINES
from torchrepro.manifest.environment import kind_of_machine
from torchrepro.messages import some
from torchrepro.trace.fingerprint import fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

FOLDER = "repro_numbers"
"""The name of the folder beside a test that holds the numbers of its module."""

FORMAT = 1


def numbers_of_training(losses: Any, model: Any = None) -> Numbers:
    """Return losses, and what the state of a model is, as the numbers of a lock.

    `losses` are numbers or tensors of one, or a single one. Raises `ProfileError` for others.
    """
    import_torch()
    each: Iterable[Any] = losses if isinstance(losses, list | tuple) else [losses]
    steps = {}
    for step, loss in enumerate(each):
        try:
            value = loss.item() if hasattr(loss, "item") else loss
            steps[step] = StepNumbers((exact(float(value)),), "")
        except (TypeError, ValueError, RuntimeError):
            legal = "a list of floats, or of tensors of one number"
            found = type(loss).__name__
            raise ProfileError.about("no loss", "repro_numbers", found=found, legal=legal) from None
    state = {} if model is None else model.state_dict()
    tensors = (state[name] for name in sorted(state) if hasattr(state[name], "dtype"))
    end = digest_of_all(fingerprint(tensor.detach()) for tensor in tensors)
    return Numbers(steps, end)


@dataclass(frozen=True, slots=True)
class NumbersOfTest:
    """One test, and the file that holds its numbers."""

    path: Path
    name: str
    profile: str | None
    """The name of the profile that is in force for the test."""

    def held_to(self, numbers: Numbers, reason: str) -> str:
        """Return in what the numbers differ from those of the file; empty if in nothing.

        With a reason they are written. Where there are none yet they are written as well, unless
        the variable `CI` is set: then that is what is returned.
        """
        machine = kind_of_machine()
        with self._opened() as contents:
            section = contents[MACHINES].get(machine, {})
            held = section.get(self.name)
            if held is None and not reason and os.environ.get("CI"):
                others = [each for each in contents[MACHINES] if each != machine]
                there = f"; it has some of {some(others)}" if others and not section else ""
                return (
                    f"{self.path} holds no numbers of {self.name} for {machine}{there}\n"
                    f'  to add them: pytest --repro-update "why" {self.path.parent.parent}'
                )
            if held is not None and not reason:
                locked = Numbers.from_json(held, str(self.path))
                first = first_difference(locked, numbers)
                return "" if first is None else "\n".join([str(first), *self._other(held)])
            its = {**numbers.to_json(), **self._settings()}
            section[self.name] = {**its, "reason": reason} if reason else its
            contents[MACHINES][machine] = section
            write_in_place(self.path, by_lines(contents) + "\n")
        return ""

    def _settings(self) -> dict[str, Any]:
        return {"torch": installed_version("torch"), "profile": self.profile}

    def _other(self, held: Any) -> Iterator[str]:
        for name, now in self._settings().items():
            if held.get(name) != now:
                yield f"  {name}: {held.get(name)} in the lock, {now} here"
        yield f"  as it is: {self.path}"
        yield '  if that is as it should be: pytest --repro-update "why"'

    @contextmanager
    def _opened(self) -> Iterator[dict[str, Any]]:
        """Read the file, while no other process of the same tests reads or writes it."""
        nothing: dict[str, Any] = {"tests": FORMAT, MACHINES: {}}
        if not self.path.exists() and os.environ.get("CI"):
            yield nothing
            return
        self.path.parent.mkdir(exist_ok=True)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            contents = nothing
            if self.path.exists():
                try:
                    contents = json.loads(self.path.read_text(encoding="utf-8"))
                    valid = contents["tests"] == FORMAT and isinstance(contents[MACHINES], dict)
                except (ValueError, TypeError, KeyError):
                    valid = False
                if not valid:
                    todo = 'remove it, then pytest --repro-update "why"'
                    what = "damaged: no numbers of tests"
                    raise ProfileError.about(what, str(self.path), todo=todo)
            yield contents
        finally:
            os.close(folder)
