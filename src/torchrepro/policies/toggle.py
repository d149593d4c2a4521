"""A policy that is on or off."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchrepro.policies import compiled

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Toggle:
    """A policy with two values, whose installation changes what compiled code computes."""

    off: str
    on: str
    name: str
    """What code that was compiled under it is known by."""

    install: Callable[[ExitStack], None]
    """Puts the policy in force, and what takes it back onto the stack."""

    _undo: list[ExitStack] = field(default_factory=list)

    @property
    def is_on(self) -> bool:
        """Whether the policy is in force."""
        return bool(self._undo)

    def read(self) -> str:
        return self.on if self.is_on else self.off

    def write(self, value: str) -> None:
        if value == self.read():
            return
        if value == self.on:
            self._undo.append(self._installed())
        else:
            self._undo.pop().close()

    save = read
    restore = write

    def _installed(self) -> ExitStack:
        with ExitStack() as undo:
            undo.enter_context(compiled.kept_apart(self.name))
            self.install(undo)
            compiled.forget_compiled()
            return undo.pop_all()
