"""Lay a profile's defaults list, its own values and the overrides on top of each other.

The rules are Hydra's (https://hydra.cc/docs/advanced/defaults_list): the entries of a defaults
list in order, the file itself where `_self_` stands, sections merged key by key. They are applied
here rather than by Hydra because each value has to keep the line that set it, and because a
profile in force from code must not pay for importing Hydra.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchrepro.errors import Problem, ProfileError
from torchrepro.profile.document import (
    MAX_DEPTH,
    Document,
    read_document,
    refuse_instructions,
    refuse_interpolation,
)
from torchrepro.profile.find import SHIPPED, Folder, Found, find, search_path

MAX_DOCUMENTS = 64
NOT_INHERITED = ("name", "description")  # what a file calls itself, not what it asks for


@dataclass(slots=True)
class Composition:
    """The merged values of a profile and, for every dotted key, the place that set it."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    only_shipped: bool = True
    """No file but torchrepro's own took part, and no override."""

    def place(self, key: str) -> str:
        """Return where `key`, something in it, or the nearest section around it was set."""
        inside = [name for name in self.origins if name.startswith(f"{key}.")]
        if key not in self.origins and inside:
            return self.origins[inside[-1]]
        while key and key not in self.origins:
            key = key.rpartition(".")[0]
        return self.origins.get(key, "")


def compose(
    name: str, overrides: Sequence[str] = (), folders: tuple[Folder, ...] = ()
) -> Composition:
    """Compose the profile `name` with `overrides` such as ``backends.cudnn.benchmark=true``.

    Bare names are looked up in `folders`, then on the search path. Raises `ProfileError`.
    """
    composition = Composition()
    _Chain(composition, (*folders, *search_path())).add_named(name)
    override(composition, overrides)
    return composition


def compose_document(document: Document, folders: tuple[Folder, ...] = ()) -> Composition:
    """Compose values that were not read from a file of the search path."""
    composition = Composition(only_shipped=False)
    _Chain(composition, (*folders, *search_path())).add(document, folders)
    return composition


def override(composition: Composition, overrides: Sequence[str]) -> None:
    """Lay `overrides`, written in Hydra's grammar, on top of `composition`."""
    for text in overrides:
        key, value = _parse_override(text)
        composition.only_shipped = False
        place = f"override {text}"
        check_values(value, place, key)
        for part in reversed(key.split(".")):
            value = {part: value}
        lines = dict.fromkeys(flatten(value), place)
        _merge(composition.values, value)
        _forget_sections(composition.origins, key)
        composition.origins.update(lines)


WHOLE = ("device.fallback", "device.modules", "streams", "ranks")
"""One value each: their keys are not a profile's."""


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


class _Chain:
    """Follows defaults lists, depth first, and refuses one that leads back to itself."""

    def __init__(self, composition: Composition, folders: tuple[Folder, ...]) -> None:
        self.composition = composition
        self.folders = folders
        self.open: list[Found] = []
        self.read = 0

    def add_named(self, name: str, beside: tuple[Folder, ...] = (), asked_by: str = "") -> None:
        found = find(name, (*beside, *self.folders), asked_by)
        if found.path in [other.path for other in self.open]:
            chain = " -> ".join([*(other.name for other in self.open), found.name])
            raise ProfileError(
                Problem("a profile inherits from itself", asked_by, "defaults", chain)
            )
        self.read += 1
        if self.read > MAX_DOCUMENTS:
            raise ProfileError(
                Problem(f"more than {MAX_DOCUMENTS} files in one defaults list", asked_by)
            )
        if not found.path.is_relative_to(SHIPPED):
            self.composition.only_shipped = False
        self.open.append(found)
        self.add(read_document(found.path, found.where), (_beside(found),))
        self.open.pop()
        if not self.open:
            self.composition.values.setdefault("name", found.name)

    def add(self, document: Document, beside: tuple[Folder, ...]) -> None:
        for entry in document.defaults:
            if entry == "_self_":
                self._add_values(document)
            else:
                own = self._take_names()
                self.add_named(entry, beside, document.place("defaults"))
                self._take_names()
                self.composition.values |= own[0]
                self.composition.origins |= own[1]

    def _take_names(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Take out, and return, what the files so far call themselves, and where they say it."""
        values, origins = self.composition.values, self.composition.origins
        return (
            {key: values.pop(key) for key in NOT_INHERITED if key in values},
            {key: origins.pop(key) for key in NOT_INHERITED if key in origins},
        )

    def _add_values(self, document: Document) -> None:
        _merge(self.composition.values, document.values)
        keys = document.lines or flatten(document.values)
        self.composition.origins |= {key: document.place(key) for key in keys}


def _beside(found: Found) -> Folder:
    """Return the folder in which a defaults list looks first: the one its own file is in.

    A profile called ``team/strict`` finds ``team/base`` by that name, as Hydra does.
    """
    inside = found.name.count("/")
    return Folder(found.path.parents[inside], str(found.path.parents[inside]))


def _merge(onto: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        below = onto.get(key)
        if isinstance(value, Mapping):
            section = below if isinstance(below, dict) else {}
            onto[key] = section
            _merge(section, value)
        else:
            onto[key] = value


def _forget_sections(origins: dict[str, str], key: str) -> None:
    """Drop the origins of what `key` lies in: a value that was there is a section now."""
    while "." in key:
        key = key.rpartition(".")[0]
        origins.pop(key, None)


def _parse_override(text: str) -> tuple[str, Any]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    place = f"override {text}"
    todo = "write key=value, as in seed=7 or backends.cudnn.benchmark=false"
    try:
        parsed = OverridesParser.create().parse_override(text)
    except (HydraException, RecursionError, ValueError):
        raise ProfileError(Problem("not an override", place, todo=todo)) from None
    if parsed.is_sweep_override():
        raise ProfileError(
            Problem("a sweep needs Hydra's --multirun; here one value is set", place)
        )
    depth = parsed.key_or_group.count(".")
    if parsed.package is not None or not parsed.key_or_group or depth > MAX_DEPTH:
        raise ProfileError(Problem("not an override", place, todo=todo))
    value = None if parsed.is_delete() else _plain(parsed.value())
    return parsed.key_or_group.replace("/", "."), value


def _plain(value: Any) -> Any:
    """Return a parsed override value with Hydra's quoted keys as plain text."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return value


def check_values(value: Any, place: str, key: str) -> None:
    """Raise `ProfileError` for an instruction or an interpolation anywhere in `value`."""
    refuse_instructions(key.rpartition(".")[2], place, key)
    if isinstance(value, str):
        refuse_interpolation(value, place, key)
    elif isinstance(value, dict):
        for inner, entry in value.items():
            check_values(entry, place, f"{key}.{inner}" if key else str(inner))
    elif isinstance(value, list):
        for entry in value:
            check_values(entry, place, key)
