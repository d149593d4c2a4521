"""A resolved profile as plain values: what a plan reads and a child process inherits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torchrepro.knobs.catalogue import CATALOGUE, knobs_by_name, other_names
from torchrepro.knobs.variable import variable
from torchrepro.profile.compose import NOT_INHERITED, flatten

if TYPE_CHECKING:
    from torchrepro.knobs.knob import Knob

STRICT = ("repeatable", "aligned")
NOT_A_KNOB = (*NOT_INHERITED, "schema", "guarantee", "on_late", "requires")
_POSITION = {knob.name: position for position, knob in enumerate(CATALOGUE)}


@dataclass(frozen=True, slots=True)
class Resolved:
    """The values that a valid profile sets, without the keys it leaves alone."""

    values: Mapping[str, Any]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Resolved:
        """Return `values` without every null and every empty section."""
        return cls(MappingProxyType(_without_null(values)))

    @property
    def name(self) -> str:
        """What the profile calls itself."""
        return str(self.values.get("name", "(unnamed)"))

    @property
    def guarantee(self) -> str:
        """What the profile promises; `seeded` unless it says more."""
        return str(self.values.get("guarantee", "seeded"))

    @property
    def strict(self) -> bool:
        """Whether a conflict, an ineffective or a failed knob stops the run."""
        return self.guarantee in STRICT

    @property
    def on_late(self) -> str:
        """What a knob past its phase leads to: relaunch, error or warn."""
        return str(self.values.get("on_late", "warn"))

    @property
    def digest(self) -> str:
        """SHA-256 of what the profile asks for, equal on every machine and Python.

        Name and description take no part: they change nothing in a process.
        """
        asked = {key: value for key, value in self.values.items() if key not in NOT_INHERITED}
        text = json.dumps(asked, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    def settings(self) -> list[tuple[Knob, Any]]:
        """Return every knob that the profile names with its value, in the catalogue's order."""
        asked: list[tuple[Knob, Any]] = []
        for key, value in flatten(
            {k: v for k, v in self.values.items() if k not in NOT_A_KNOB}
        ).items():
            asked += [(knob, value) for knob in knobs_for_key(key)]
        return sorted(asked, key=lambda pair: _POSITION.get(pair[0].name, -1))

    def environment(self) -> dict[str, str]:
        """Return the variables that the profile sets, for a process that has not started yet."""
        return {knob.variable: value for knob, value in self.settings() if knob.variable}


def knobs_for_key(key: str) -> tuple[Knob, ...]:
    """Return the rows that the profile's dotted `key` sets."""
    section, _, name = key.partition(".")
    if section == "env_extra":
        return (variable(name),) if name else ()
    if key in knobs_by_name():
        return (knobs_by_name()[key],)
    obeying = tuple(knob for knob in CATALOGUE if knob.profile_key == key)
    return obeying or other_names().get(key, ())


def _without_null(values: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in values.items():
        inner = _without_null(value) if isinstance(value, Mapping) else value
        if inner is not None and inner != {}:
            kept[key] = inner
    return kept
