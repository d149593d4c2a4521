"""A resolved profile as plain values: what a plan reads and a child process inherits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torchrepro.knobs.catalogue import CATALOGUE, rows_for_key
from torchrepro.knobs.knob import variable
from torchrepro.profile.composition import EXTRA, NOT_INHERITED, Origin, flatten, plain

if TYPE_CHECKING:
    from torchrepro.knobs.knob import Knob
    from torchrepro.profile.composition import Composition

STRICT = ("repeatable", "aligned")
WITHOUT_EFFECT = (*NOT_INHERITED, "schema")
NOT_A_KNOB = (*WITHOUT_EFFECT, "guarantee", "on_late", "requires")
DEFAULTS = {"guarantee": "seeded", "on_late": "warn"}
"""What a profile means by leaving out a key that is no knob."""
_POSITION = {knob.name: position for position, knob in enumerate(CATALOGUE)}


@dataclass(frozen=True, slots=True)
class ResolvedProfile:
    """The values that a valid profile sets, without the keys it leaves alone."""

    values: Mapping[str, Any]
    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False, repr=False)
    """Dotted key -> where its value comes from, as far as that is known."""
    asked: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """The name or path by which it was asked for, and the overrides; empty for plain values."""

    @classmethod
    def of(
        cls, values: Mapping[str, Any], composition: Composition | None = None
    ) -> ResolvedProfile:
        """Return `values` without every null and every empty section, as they were composed."""
        kept = _without_null(values)
        if composition is None:
            return cls(MappingProxyType(kept))
        origins = {k: o for k in flatten(kept) if (o := composition.origins.get(k)) is not None}
        return cls(MappingProxyType(kept), MappingProxyType(origins), composition.asked)

    def to_json(self) -> dict[str, Any]:
        """Return the values with their origins as plain JSON values, for a process below."""
        return {
            "values": plain(self.values),
            "origins": {key: origin.to_json() for key, origin in self.origins.items()},
            "asked": list(self.asked),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ResolvedProfile:
        """Return what `to_json` wrote."""
        origins = {k: Origin.from_json(each) for k, each in content["origins"].items()}
        values = _without_null(content["values"])
        return cls(MappingProxyType(values), MappingProxyType(origins), tuple(content["asked"]))

    @property
    def name(self) -> str:
        """What the profile calls itself."""
        return str(self.values.get("name", "(unnamed)"))

    @property
    def guarantee(self) -> str:
        """What the profile promises; `seeded` unless it says more."""
        return str(self.values.get("guarantee", DEFAULTS["guarantee"]))

    @property
    def strict(self) -> bool:
        """Whether a conflict, an ineffective or a failed knob stops the run."""
        return self.guarantee in STRICT

    @property
    def on_late(self) -> str:
        """What happens with a knob past its phase: relaunch, relaunch_or_warn, error or warn."""
        return str(self.values.get("on_late", DEFAULTS["on_late"]))

    @property
    def digest(self) -> str:
        """SHA-256 of what the profile asks for, equal on every machine and Python.

        It is that of the values as JSON with sorted keys, without spaces, in ASCII (the canonical
        form of https://www.rfc-editor.org/rfc/rfc8785 for the integers and texts of a profile).
        Name, description and schema are left out: they change nothing in a process.
        """
        effective = {key: value for key, value in self.values.items() if key not in WITHOUT_EFFECT}
        text = json.dumps(effective, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    def settings(self) -> list[tuple[Knob, Any]]:
        """Return every knob that the profile names with its value, in the catalogue's order."""
        settings: list[tuple[Knob, Any]] = []
        for key, value in flatten(
            {k: v for k, v in self.values.items() if k not in NOT_A_KNOB}
        ).items():
            settings += [(knob, value) for knob in knobs_for_key(key)]
        return sorted(settings, key=lambda pair: _POSITION.get(pair[0].name, -1))

    def environment(self) -> dict[str, str]:
        """Return the variables that the profile sets, for a process that has not started yet."""
        return {knob.variable: value for knob, value in self.settings() if knob.variable}


def knobs_for_key(key: str) -> tuple[Knob, ...]:
    """Return the rows that the profile's dotted `key` sets."""
    section, _, name = key.partition(".")
    if section == EXTRA:
        return (variable(name),) if name else ()
    return rows_for_key(key)


def _without_null(values: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in values.items():
        inner = _without_null(value) if isinstance(value, Mapping) else value
        if inner is not None and inner != {}:
            kept[key] = inner
    return kept
