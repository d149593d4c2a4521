"""Policies that are imported only once a profile asks for more than they do at rest."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrepro.knobs.knob import Access


@dataclass(frozen=True, slots=True)
class OnDemand:
    """The `policy` of the module `home`, which start-up pays for only if it acts."""

    home: str
    at_rest: Any
    """The value with which nothing is installed."""

    def _policy(self) -> Access:
        policy: Access = import_module(self.home).policy
        return policy

    def _idle(self) -> bool:
        return self.home not in sys.modules

    def read(self) -> Any:
        return self.at_rest if self._idle() else self._policy().read()

    def refuses(self, value: Any) -> str:
        refuses = getattr(self._policy(), "refuses", None) if value != self.at_rest else None
        return str(refuses(value)) if refuses else ""

    def write(self, value: Any) -> None:
        if value != self.at_rest or not self._idle():
            self._policy().write(value)

    def save(self) -> Any:
        return None if self._idle() else self._policy().save()

    def restore(self, saved: Any) -> None:
        if not self._idle():
            self._policy().restore(self.at_rest if saved is None else saved)
