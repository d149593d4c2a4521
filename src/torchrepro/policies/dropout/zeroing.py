"""Dropout as the identity, for every caller in the process."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torchrepro.policies import compiled
from torchrepro.policies.dropout import coverage, written_masks
from torchrepro.policies.dropout import ops as dropout_ops

_installed: list[ExitStack] = []  # what takes the overrides back, while they are there


@dataclass(frozen=True, slots=True)
class DropoutPolicy:
    """Whether dropout is zeroed: `keep` leaves torch alone, `zero` overrides its dropout."""

    def read(self) -> Any:
        return "zero" if _installed else "keep"

    def write(self, value: str) -> None:
        if value == self.read():
            return
        if value == "zero":
            _installed.append(_zero())
        else:
            _installed.pop().close()

    save = read
    restore = write


def _zero() -> ExitStack:
    with ExitStack() as undo:
        undo.callback(compiled.forget_compiled)  # the last step: nothing zeroed is compiled after
        for call in dropout_ops.override():
            undo.callback(call)
        undo.callback(written_masks.restore)
        written_masks.zero()
        undo.callback(coverage.unwatch)
        coverage.watch()
        compiled.tag("dropout zero")
        undo.callback(compiled.untag, "dropout zero")
        return undo.pop_all()
