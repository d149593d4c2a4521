"""Plain values of a profile with their origins, during and after the composition.

Every child process of `torchrepro run` imports this module, so it imports no file readers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.ground.errors import printable
from torchrepro.ground.imports import installed_version
from torchrepro.knobs.catalogue import CATALOGUE, rows_for_key
from torchrepro.knobs.variables import variable

if TYPE_CHECKING:
    from torchrepro.knobs.knob import Knob

EXTRA = "env_extra"  # the section of variables that are not in the catalogue

OPAQUE = ("device.fallback", "device.modules", "streams", "ranks")
"""Keys whose mapping is one value, since its keys are chosen by the user."""

STRICT = ("repeatable", "aligned")
NOT_INHERITED = ("name", "description")  # they describe a file and change nothing in a process
WITHOUT_EFFECT = (*NOT_INHERITED, "schema")
NOT_A_KNOB = (*WITHOUT_EFFECT, "guarantee", "on_late", "requires")
DEFAULTS = {"guarantee": "seeded", "on_late": "warn"}
"""The defaults of keys that set no knob."""

_POSITION = {knob.name: position for position, knob in enumerate(CATALOGUE)}


class ValueOrigin(NamedTuple):
    """The line, override or argument that set a value, and the origin of the replaced value."""

    set_by: str  # ``file:line``, the override, or the argument
    package: str = ""
    """The distribution of the file. If another process wrote the origin, a version follows."""

    value: Any = None
    replaced: ValueOrigin | None = None  # the origin of the value that this one replaced

    def to_json(self) -> dict[str, Any]:
        """Return the origin as plain JSON values, with the replaced origins from new to old."""
        replaced, origin = [], self.replaced
        while origin is not None:
            package = versioned(origin.package)
            replaced.append({"value": origin.value, "set_by": origin.set_by, "package": package})
            origin = origin.replaced
        return {"set_by": self.set_by, "package": versioned(self.package), "replaced": replaced}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ValueOrigin:
        before: ValueOrigin | None = None
        for origin in reversed(content["replaced"]):
            before = cls(origin["set_by"], origin["package"], origin["value"], before)
        return cls(content["set_by"], content["package"], None, before)


@cache
def versioned(distribution: str) -> str:
    """Return a distribution's name and installed version, as in ``acme-profiles 1.2.0``."""
    version = installed_version(distribution)
    return f"{distribution} {version}" if version else distribution


@dataclass(slots=True)
class Composition:
    """The merged values of a profile during composition, and the origin of every dotted key."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, ValueOrigin] = field(default_factory=dict)
    typed: set[str] = field(default_factory=set)  # keys set by the user who starts the run
    only_shipped: bool = True  # whether all values come from torchrepro's own files
    asked: tuple[str, ...] = ()  # requested name or path, and overrides; empty for plain values

    def add(
        self, values: Mapping[str, Any], set_by: Mapping[str, str], package: str, *, typed: bool
    ) -> None:
        """Merge `values` over the present values. `set_by` maps every dotted key to its origin."""
        before, leaves = self.origins, flatten(values)
        _merge(self.values, values)
        written = {key for key, value in leaves.items() if value != {}}
        # A new value makes origins obsolete: of keys inside it, and of sections around it.
        around = {section for key in written for section in _around(key)}
        kept = {
            name: origin
            for name, origin in before.items()
            if name not in around and written.isdisjoint(_around(name))
        }
        new = {
            key: ValueOrigin(line, package, leaves.get(key), before.get(key))
            for key, line in set_by.items()
        }
        self.origins = kept | new
        self.typed = self.typed | leaves.keys() if typed else self.typed - leaves.keys()

    def name_it(self, name: str, origin: ValueOrigin) -> None:
        """Set the name of the profile, if the profile has no name."""
        if "name" not in self.values:
            name = printable(name).translate(str.maketrans("()", "[]"))  # legal by `PROFILE_NAME`
            self.values["name"] = name
            self.origins["name"] = origin._replace(value=name)

    def origin_of(self, key: str) -> str:
        """Return the origin of `key`, else of a key inside `key`, else of a section around it."""
        if key not in self.origins:
            inside = [name for name in self.origins if name.startswith(f"{key}.")]
            if inside:
                return self.origins[inside[-1]].set_by
        while key and key not in self.origins:
            key = key.rpartition(".")[0]
        return self.origins[key].set_by if key else ""


def _around(key: str) -> Iterator[str]:
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


def _merge(onto: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping):
            below = onto.get(key)
            onto[key] = below if isinstance(below, dict) else {}
            _merge(onto[key], value)
        else:
            onto[key] = value


@dataclass(frozen=True, slots=True)
class ResolvedProfile:
    """The values of a valid profile, without null and empty sections."""

    values: Mapping[str, Any]
    origins: Mapping[str, ValueOrigin] = field(default_factory=dict, compare=False, repr=False)
    """Dotted key -> the origin of its value, if it is known."""
    asked: tuple[str, ...] = field(default=(), compare=False, repr=False)  # as in `Composition`

    @classmethod
    def of(
        cls,
        values: Mapping[str, Any],
        origins: Mapping[str, ValueOrigin] | None = None,
        asked: tuple[str, ...] = (),
    ) -> ResolvedProfile:
        """Return a profile from `values`, without nulls, empty sections and unused origins."""
        kept = _without_null(values)
        known = {key: origins[key] for key in flatten(kept) if key in origins} if origins else {}
        return cls(MappingProxyType(kept), MappingProxyType(known), asked)

    def to_json(self) -> dict[str, Any]:
        """Return the values and their origins as plain JSON values, for a child process."""
        return {
            "values": plain(self.values),
            "origins": {key: origin.to_json() for key, origin in self.origins.items()},
            "asked": list(self.asked),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ResolvedProfile:
        """Return the profile that `to_json` converted to `content`."""
        origins = {key: ValueOrigin.from_json(o) for key, o in content["origins"].items()}
        return cls.of(content["values"], origins, tuple(content["asked"]))

    @property
    def name(self) -> str:
        """The profile's name."""
        return str(self.values.get("name", "(unnamed)"))

    @property
    def guarantee(self) -> str:
        """The profile's guarantee, by default `seeded`."""
        return str(self.values.get("guarantee", DEFAULTS["guarantee"]))

    @property
    def strict(self) -> bool:
        """Whether the run stops if a knob is in conflict, has no effect, or fails."""
        return self.guarantee in STRICT

    @property
    def on_late(self) -> str:
        """The reaction to a knob set too late: relaunch, relaunch_or_warn, error or warn."""
        return str(self.values.get("on_late", DEFAULTS["on_late"]))

    @property
    def digest(self) -> str:
        """SHA-256 of the requested values, equal on every machine and in every Python version.

        The values are hashed as ASCII JSON with sorted keys and without spaces. For integers and
        strings, this is the canonical form of https://www.rfc-editor.org/rfc/rfc8785. Name,
        description and schema are not hashed, since they change nothing in a process.
        """
        effective = {key: value for key, value in self.values.items() if key not in WITHOUT_EFFECT}
        text = json.dumps(effective, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    def settings(self) -> list[tuple[Knob, Any]]:
        """Return the knobs that the profile sets, with the values, in the catalogue's order."""
        leaves = flatten({k: v for k, v in self.values.items() if k not in NOT_A_KNOB})
        pairs = [(knob, value) for key, value in leaves.items() for knob in knobs_for_key(key)]
        return sorted(pairs, key=lambda pair: _POSITION.get(pair[0].name, -1))

    def environment(self) -> dict[str, str]:
        """Return the environment variables that the profile sets, for a process to be started."""
        return {knob.variable: value for knob, value in self.settings() if knob.variable}


def knobs_for_key(key: str) -> tuple[Knob, ...]:
    """Return the knobs that the profile's dotted `key` sets."""
    section, _, name = key.partition(".")
    if section == EXTRA:
        return (variable(name),) if name else ()
    return rows_for_key(key)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> leaf of nested `values`. Empty sections and `OPAQUE` are leaves."""
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and dotted not in OPAQUE:
            leaves |= flatten(value, f"{dotted}.")
        else:
            leaves[dotted] = value
    return leaves


def plain(value: Any) -> Any:
    """Return `value` as plain JSON values: dicts with string keys, and lists."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value


def _without_null(values: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in values.items():
        inner = _without_null(value) if isinstance(value, Mapping) else value
        if inner is not None and inner != {}:
            kept[key] = inner
    return kept
