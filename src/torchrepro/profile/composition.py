"""Values that are laid on top of each other, each with its origin."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.imports import installed_version

if TYPE_CHECKING:
    from collections.abc import Iterator


class Origin(NamedTuple):
    """The place that set a value, and the one before it."""

    set_by: str
    """``file:line``, the override, or the argument."""

    package: str = ""
    """The distribution of the file; with its version, if another process wrote the origin."""

    value: Any = None
    replaced: Origin | None = None
    """The origin of the value that stood there before."""

    def earlier(self) -> Iterator[Origin]:
        """Yield the origins of the values that this one replaced, the nearest first."""
        before = self.replaced
        while before is not None:
            yield before
            before = before.replaced

    def to_json(self) -> dict[str, Any]:
        """Return the origin as plain JSON values."""
        return {
            "set_by": self.set_by,
            "package": versioned(self.package),
            "replaced": [
                {"value": each.value, "set_by": each.set_by, "package": versioned(each.package)}
                for each in self.earlier()
            ],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Origin:
        """Return the origin that `to_json` wrote."""
        before: Origin | None = None
        for each in reversed(content["replaced"]):
            before = cls(each["set_by"], each["package"], each["value"], before)
        return cls(content["set_by"], content["package"], None, before)


@cache
def versioned(distribution: str) -> str:
    """Return a distribution with the version that is installed, as in ``acme-profiles 1.2.0``."""
    version = installed_version(distribution)
    return f"{distribution} {version}" if version else distribution


NOT_INHERITED = (
    "name",
    "description",
)  # they describe the file itself and change nothing in a process
EXTRA = "env_extra"
"""The section of variables that are not in the catalogue."""

WHOLE = ("device.fallback", "device.modules", "streams", "ranks")
"""Keys whose value is a mapping of the user's own words, and so one value."""


@dataclass(slots=True)
class Composition:
    """The merged values of a profile and, for every dotted key, the place that set it."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    typed: set[str] = field(default_factory=set)
    """Dotted keys whose value the user who starts the run wrote: an override, a dict in code."""

    only_shipped: bool = True
    """Whether only torchrepro's own files were composed, without overrides."""

    asked: tuple[str, ...] = ()
    """The name or path that was asked for, and the overrides; empty for values from elsewhere."""

    def add(
        self, values: Mapping[str, Any], places: Mapping[str, str], package: str, *, typed: bool
    ) -> None:
        """Lay `values` on top; `places` says for every dotted key what sets it."""
        before = dict(self.origins)
        leaves = flatten(values)
        _merge(self.values, values)
        for key, value in leaves.items():
            if value != {}:  # an empty section takes nothing away
                self._forget(key)
        self.typed = self.typed | leaves.keys() if typed else self.typed - leaves.keys()
        for key, place in places.items():
            self.origins[key] = Origin(place, package, leaves.get(key), before.get(key))

    def name_it(self, name: str, origin: Origin) -> None:
        """Give the profile a name, unless it has one."""
        if "name" not in self.values:
            self.values["name"] = name
            self.origins["name"] = origin._replace(value=name)

    @contextmanager
    def without_names(self) -> Iterator[None]:
        """Within the block, ignore the names and descriptions of the files laid on top."""
        own = self._pop_names()
        yield
        self._pop_names()
        for key, (value, origin) in own.items():
            self.values[key] = value
            if origin is not None:
                self.origins[key] = origin

    def _pop_names(self) -> dict[str, tuple[Any, Origin | None]]:
        values, origins = self.values, self.origins
        named = [key for key in NOT_INHERITED if key in values]
        return {key: (values.pop(key), origins.pop(key, None)) for key in named}

    def place(self, key: str) -> str:
        """Return where `key`, something in it, or the nearest section around it was set."""
        inside = [name for name in self.origins if name.startswith(f"{key}.")]
        if key not in self.origins and inside:
            return self.origins[inside[-1]].set_by
        while key and key not in self.origins:
            key = key.rpartition(".")[0]
        return self.origins[key].set_by if key else ""

    def _forget(self, key: str) -> None:
        """Drop the origins of the sections around `key` and of the keys inside it."""
        for name in [name for name in self.origins if name.startswith(f"{key}.")]:
            del self.origins[name]
        while "." in key:
            key = key.rpartition(".")[0]
            self.origins.pop(key, None)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested `values` under dotted keys; an empty section is a leaf."""
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and dotted not in WHOLE:
            leaves |= flatten(value, f"{dotted}.")
        else:
            leaves[dotted] = value
    return leaves


def plain(value: Any) -> Any:
    """Return a value as plain JSON values: a frozen section as a dict, its keys as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value


def walk(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `value` and everything in it, each with its dotted key; an entry has its list's."""
    yield key, value
    if isinstance(value, Mapping):
        for inner, entry in value.items():
            yield from walk(entry, f"{key}.{inner}" if key else str(inner))
    elif isinstance(value, list):
        for entry in value:
            yield from walk(entry, key)


def _merge(onto: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        below = onto.get(key)
        if isinstance(value, Mapping):
            section = below if isinstance(below, dict) else {}
            onto[key] = section
            _merge(section, value)
        else:
            onto[key] = value
