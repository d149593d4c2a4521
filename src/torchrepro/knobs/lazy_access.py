"""Accesses of other packages: a row names one, which is imported when it is first used."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrepro.imports import named

if TYPE_CHECKING:
    from torchrepro.knobs.knob import Access

_ALWAYS_ACTIVE = object()
_HAND_ON = "seeding.loader_hook:hand_on"
"""What is told of the values that data-loading workers inherit."""


@dataclass(frozen=True, slots=True)
class LazyAccess:
    """The access behind `path`, which start-up pays for only if a profile uses it."""

    path: str
    """Module and object, relative to torchrepro: ``seeding.loader_hook:seeding_policy``."""

    at_rest: Any = _ALWAYS_ACTIVE
    """The value with which nothing is installed; while it holds, nothing is imported either."""

    inherited: bool = False
    """Whether data-loading workers get the value however they are started.

    A worker that is forked has it in any case; one that is spawned starts from nothing.
    """

    def read(self) -> Any:
        return self.at_rest if self._resting else self._access().read()

    def write(self, value: Any) -> None:
        if not self._resting or value != self.at_rest:
            self._access().write(value)
            self._hand_on()

    def save(self) -> Any:
        return self.at_rest if self._resting else self._access().save()

    def restore(self, saved: Any) -> None:
        if not self._resting:
            self._access().restore(saved)
            self._hand_on()

    def refuses(self, value: Any) -> str:
        if value == self.at_rest:
            return ""
        refuses = getattr(self._access(), "refuses", None)
        return str(refuses(value)) if refuses else ""

    def __getattr__(self, name: str) -> Any:
        """Return what else the access can tell, such as `holds`; one at rest tells nothing."""
        if name.startswith("__") or self._resting:
            raise AttributeError(name)
        return getattr(self._access(), name)

    @property
    def _resting(self) -> bool:
        module = self.path.partition(":")[0]
        return self.at_rest is not _ALWAYS_ACTIVE and f"torchrepro.{module}" not in sys.modules

    def _access(self) -> Access:
        access: Access = named(self.path)
        return access

    def _hand_on(self) -> None:
        """Have workers that are started afresh put the present value in force, if it is any."""
        if self.inherited:
            value = self.read()
            named(_HAND_ON)(self.path, None if value == self.at_rest else value)
