"""Compose a profile: its defaults list, its own values, pieces and overrides, in this order.

The rules are Hydra's (https://hydra.cc/docs/advanced/defaults_list): the entries of a defaults
list are laid on top of each other in order, the file itself where `_self_` stands, and sections
are merged key by key. They are applied here and not by Hydra for two reasons: each value keeps
the line that set it, and code that applies a profile does not pay for importing Hydra.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchrepro.errors import ProfileError
from torchrepro.knobs.knob import SCHEMA_VERSION
from torchrepro.messages import Problem, printable, shown
from torchrepro.profile.document import (
    MAX_DEPTH,
    Document,
    read_document,
    refuse_instructions,
    refuse_interpolation,
)
from torchrepro.profile.resolved import NOT_INHERITED, Origin, flatten, plain, versioned
from torchrepro.profile.search_path import (
    PIECES,
    SHIPPED,
    Folder,
    ProfileFile,
    find,
    is_piece,
    piece_named,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torchrepro.profile.resolved import ResolvedProfile

SCHEMA = "schema"
MAX_DOCUMENTS = 64
MAX_KEYS = 2000  # keys of all files of one profile, each counted as often as it is read


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
        before, leaves = self.origins, flatten(values)
        _merge(self.values, values)
        written = {key for key, value in leaves.items() if value != {}}
        # Neither the sections around these keys nor what was inside them are what somebody wrote.
        around = {section for key in written for section in _around(key)}
        kept = {
            name: origin
            for name, origin in before.items()
            if name not in around and written.isdisjoint(_around(name))
        }
        new = {k: Origin(at, package, leaves.get(k), before.get(k)) for k, at in places.items()}
        self.origins = kept | new
        self.typed = self.typed | leaves.keys() if typed else self.typed - leaves.keys()

    def name_it(self, name: str, origin: Origin) -> None:
        """Give the profile a name, unless it has one."""
        if "name" not in self.values:
            name = printable(name).translate(str.maketrans("()", "[]"))  # as `PROFILE_NAME` has it
            self.values["name"] = name
            self.origins["name"] = origin._replace(value=name)

    def place(self, key: str) -> str:
        """Return where `key`, something in it, or the nearest section around it was set."""
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


def compose(
    name: str,
    overrides: Sequence[str] = (),
    folders: tuple[Folder, ...] = (),
    *,
    typed: bool = True,
) -> Composition:
    """Compose the profile `name` with `overrides` such as ``backends.cudnn.benchmark=true``.

    Bare names are found in `folders` and on the search path. `typed` says whether the user who
    starts the run wrote the overrides. Raises `ProfileError`.
    """
    layers = _Layers(Composition(asked=(name, *overrides)), folders)
    layers.add_named(name)
    return layers.finished(overrides, typed=typed)


def compose_document(
    document: Document, overrides: Sequence[str] = (), folders: tuple[Folder, ...] = ()
) -> Composition:
    """Compose values that were not read from a file of the search path."""
    layers = _Layers(Composition(only_shipped=False), folders)
    layers.add(document, None, inherited=False)
    return layers.finished(overrides)


def compose_resolved(resolved: ResolvedProfile, overrides: Sequence[str]) -> Composition:
    values = plain(resolved.values)
    composition = Composition(values, dict(resolved.origins), only_shipped=False)
    composition.typed |= flatten(values).keys()  # judged when they were resolved
    return _Layers(composition, ()).finished(overrides)


class _Layers:
    """Follows defaults lists, depth first, and refuses one that leads back to itself."""

    def __init__(self, composition: Composition, folders: tuple[Folder, ...]) -> None:
        self.composition = composition
        self.folders = folders
        self.being_read: list[ProfileFile] = []
        self.read_before: set[Path] = set()
        self.documents = 0
        self.keys = 0
        self.undone: dict[str, Problem] = {}

    def add_named(self, name: str, named_at: str = "", *, inherited: bool = False) -> None:
        # A profile may inherit from another one of the same name, but not from itself.
        beside = [one.folder._replace(prefix="") for one in self.being_read[-1:]]
        being_read = [other.path for other in self.being_read]
        try:
            found = find(name, self.folders, named_at, beside, being_read)
        except ProfileError:
            again = find(name, self.folders, named_at, beside) if being_read else None
            if again is None or again.path not in being_read:
                raise
            chain = " -> ".join([*(other.name for other in self.being_read), again.name])
            what = "a profile inherits from itself"
            raise ProfileError.about(what, named_at, "defaults", chain) from None
        self.documents += 1
        if self.documents > MAX_DOCUMENTS:
            what = f"more than {MAX_DOCUMENTS} files in one defaults list"
            raise ProfileError.about(what, named_at)
        if not found.path.is_relative_to(SHIPPED):
            self.composition.only_shipped = False
        self.being_read.append(found)
        self.add(read_document(found.path, found.where), found, inherited=inherited)
        self.being_read.pop()
        if not self.being_read and not is_piece(found.name):
            self.composition.name_it(found.name, Origin(found.where, found.folder.package))

    def add(self, document: Document, found: ProfileFile | None, *, inherited: bool) -> None:
        self.keys += len(document.lines)
        if self.keys > MAX_KEYS:
            what = f"more than {MAX_KEYS:,} keys in the files of one profile"
            raise ProfileError.about(what, document.where)
        schema, newest = document.values.get(SCHEMA), SCHEMA_VERSION.high or 1
        if isinstance(schema, int) and schema > newest:  # whose keys may be unknown here
            raise ProfileError.about(
                "written for a newer torchrepro",
                document.place(SCHEMA),
                SCHEMA,
                shown(schema),
                legal=f"up to {newest}, which is what {versioned('torchrepro')} reads",
                todo="upgrade torchrepro: pip install --upgrade torchrepro",
            )
        for entry in document.defaults:
            if entry != "_self_":
                self.add_named(entry, document.place("defaults"), inherited=True)
                continue
            left_out = NOT_INHERITED if inherited else ()
            values = {key: v for key, v in document.values.items() if key not in left_out}
            # The keys of sections have their lines as well, for problems with the section itself.
            keys = [key for key in document.lines or flatten(values) if key not in left_out]
            before = self.composition.origins
            places = {key: document.place(key) for key in keys}
            package = found.folder.package if found else ""
            self.composition.add(values, places, package, typed=document.typed)
            again = found is not None and found.path in self.read_before
            for key, value in flatten(values).items():
                # A file that is inherited twice must not undo what another one set in between.
                self.undone.pop(key, None)
                earlier = before.get(key)
                if again and earlier and earlier.value != value:
                    self.undone[key] = Problem(
                        f"{earlier.set_by} sets {key} to {shown(earlier.value)}, and is undone by "
                        "a file that was inherited before it and is inherited again",
                        places[key],
                        key,
                        shown(value),
                        todo="inherit that file in one place only, or set the value in the "
                        "profile itself",
                    )
        if found is not None:
            self.read_before.add(found.path)

    def finished(self, overrides: Sequence[str], *, typed: bool = True) -> Composition:
        """Lay the pieces among `overrides` on top, and the other overrides on these, in order."""
        given = [(key_of(text), f"override {text}", parsed(text)) for text in overrides]
        for key, place, values in given:
            if key == PIECES:
                named = values[PIECES]
                pieces = [named] if isinstance(named, str) else named
                if not isinstance(pieces, list) or not all(isinstance(p, str) for p in pieces):
                    what, legal = "pieces are named in a list", f"{PIECES}=[dropout-zero,host-rng]"
                    raise ProfileError.about(what, place, PIECES, shown(named), legal)
                for piece in pieces:
                    self.add_named(piece_named(piece), place, inherited=True)
        for key, place, values in given:
            if key != PIECES:
                places = dict.fromkeys(flatten(values), place)
                self.composition.add(values, places, "", typed=typed)
        if given:
            self.composition.only_shipped = False
        for key, problem in self.undone.items():
            present = self.composition.origins.get(key)  # gone with its section, perhaps
            if present is not None and present.set_by == problem.where:
                raise ProfileError(problem)
        return self.composition


def parsed(text: str) -> dict[str, Any]:
    """Return what an override in Hydra's grammar sets, in sections; a deletion sets null.

    Raises `ProfileError` for one that is not plain.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    place = f"override {text}"
    todo = "write key=value, as in seed=7 or backends.cudnn.benchmark=false"
    try:
        found = OverridesParser.create().parse_override(text)
    except (HydraException, RecursionError, ValueError):
        raise ProfileError.about("not an override", place, todo=todo) from None
    if found.is_sweep_override():
        raise ProfileError.about("a sweep needs Hydra's --multirun; here one value is set", place)
    depth = found.key_or_group.count(".")
    if found.package is not None or not found.key_or_group or depth > MAX_DEPTH:
        raise ProfileError.about("not an override", place, todo=todo)
    values: Any = None if found.is_delete() else plain(found.value())
    key = found.key_or_group.replace("/", ".")
    check_values(values, place, key)
    for part in reversed(key.split(".")):
        values = {part: values}
    nested: dict[str, Any] = values
    return nested


def key_of(text: str) -> str:
    """Return the dotted key that an override names, without parsing what it sets it to."""
    return text.partition("=")[0].lstrip("+~").replace("/", ".")


def check_values(value: Any, place: str, key: str) -> None:
    """Raise `ProfileError` for an instruction or an interpolation anywhere in `value`."""
    for inner, entry in walk(value, key):
        refuse_instructions(inner.rpartition(".")[2], place, inner)
        if isinstance(entry, str):
            refuse_interpolation(entry, place, inner)


def walk(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `value` and everything in it, each with its dotted key; an entry has its list's."""
    yield key, value
    if isinstance(value, Mapping):
        for inner, entry in value.items():
            yield from walk(entry, f"{key}.{inner}" if key else str(inner))
    elif isinstance(value, list):
        for entry in value:
            yield from walk(entry, key)
