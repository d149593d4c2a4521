"""Compose a profile: its defaults list, its own values, pieces and overrides, in this order.

The rules are Hydra's (https://hydra.cc/docs/advanced/defaults_list): the entries of a defaults
list are laid on top of each other in order, the file itself where `_self_` stands, and sections
are merged key by key. They are applied here and not by Hydra for two reasons: each value keeps
the line that set it, and code that applies a profile does not pay for importing Hydra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.errors import ProfileError
from torchrepro.knobs.legal_values import SchemaVersion
from torchrepro.messages import Problem, shown
from torchrepro.profile.composition import (
    NOT_INHERITED,
    Composition,
    Origin,
    flatten,
    plain,
    versioned,
    walk,
)
from torchrepro.profile.document import (
    MAX_DEPTH,
    Document,
    read_document,
    refuse_instructions,
    refuse_interpolation,
)
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
    from collections.abc import Sequence
    from pathlib import Path

    from torchrepro.profile.resolved import ResolvedProfile

SCHEMA = "schema"
MAX_DOCUMENTS = 64
MAX_KEYS = 2000
"""Keys of all files of one profile, each counted as often as it is read."""


class Override(NamedTuple):
    """A dotted key and the value it is given; null for one that is deleted."""

    text: str
    key: str
    value: Any

    @property
    def place(self) -> str:
        """The place that messages name."""
        return f"override {self.text}"

    def nested(self) -> dict[str, Any]:
        """Return the value under its key, a mapping per section."""
        value = self.value
        for part in reversed(self.key.split(".")):
            value = {part: value}
        nested: dict[str, Any] = value
        return nested


def parsed(text: str) -> Override:
    """Parse an override in Hydra's grammar; raises `ProfileError` for one that is not plain."""
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
    value = None if found.is_delete() else plain(found.value())
    key = found.key_or_group.replace("/", ".")
    check_values(value, place, key)
    return Override(text, key, value)


def key_of(text: str) -> str:
    """Return the dotted key that an override names, without parsing what it sets it to."""
    return text.partition("=")[0].lstrip("+~").replace("/", ".")


def check_values(value: Any, place: str, key: str) -> None:
    """Raise `ProfileError` for an instruction or an interpolation anywhere in `value`."""
    for inner, entry in walk(value, key):
        refuse_instructions(inner.rpartition(".")[2], place, inner)
        if isinstance(entry, str):
            refuse_interpolation(entry, place, inner)


def compose(
    name: str,
    overrides: Sequence[str] = (),
    folders: tuple[Folder, ...] = (),
    *,
    typed: bool = True,
) -> Composition:
    """Compose the profile `name` with `overrides` such as ``backends.cudnn.benchmark=true``.

    Bare names are looked up in `folders` and on the search path. `typed` says whether the user who
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
    layers.add(document, None)
    return layers.finished(overrides)


def compose_resolved(resolved: ResolvedProfile, overrides: Sequence[str]) -> Composition:
    """Compose a profile that is resolved already with further `overrides`."""
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

    def add_named(self, name: str, named_at: str = "") -> None:
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
            raise ProfileError.about(
                f"more than {MAX_DOCUMENTS} files in one defaults list", named_at
            )
        if not found.path.is_relative_to(SHIPPED):
            self.composition.only_shipped = False
        self.being_read.append(found)
        self.add(read_document(found.path, found.where), found)
        self.being_read.pop()
        if not self.being_read and not is_piece(found.name):
            self.composition.name_it(found.name, Origin(found.where, found.folder.package))

    def add(self, document: Document, found: ProfileFile | None) -> None:
        self.keys += len(document.lines)
        if self.keys > MAX_KEYS:
            raise ProfileError.about(
                f"more than {MAX_KEYS:,} keys in the files of one profile", document.where
            )
        schema, newest = document.values.get(SCHEMA), SchemaVersion().newest
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
            if entry == "_self_":
                self._add_values(document, found)
            else:
                with self.composition.without_names():
                    self.add_named(entry, document.place("defaults"))

    def _add_values(self, document: Document, found: ProfileFile | None) -> None:
        package = found.folder.package if found else ""
        before = dict(self.composition.origins)
        # The keys of sections have their lines as well, for problems with the section itself.
        keys = document.lines or flatten(document.values)
        places = {key: document.place(key) for key in keys}
        self.composition.add(document.values, places, package, typed=document.typed)
        again = found is not None and found.path in self.read_before
        for key, value in flatten(document.values).items():
            # A file that is inherited twice must not undo what another file has set in between.
            self.undone.pop(key, None)
            earlier = before.get(key)
            if again and earlier and earlier.value != value and key not in NOT_INHERITED:
                later = self.composition.origins[key]
                self.undone[key] = Problem(
                    f"{earlier.set_by} sets {key} to {shown(earlier.value)}, and is undone by a "
                    "file that was inherited before it and is inherited again",
                    later.set_by,
                    key,
                    shown(later.value),
                    todo="inherit that file in one place only, or set the value in the profile "
                    "itself",
                )
        if found is not None:
            self.read_before.add(found.path)

    def finished(self, overrides: Sequence[str], *, typed: bool = True) -> Composition:
        """Lay the pieces among `overrides` on top, then the other overrides in their order."""
        given = [parsed(text) for text in overrides]
        for override in given:
            pieces = [override.value] if isinstance(override.value, str) else override.value
            if override.key != PIECES:
                continue
            if not isinstance(pieces, list) or not all(isinstance(each, str) for each in pieces):
                raise ProfileError.about(
                    "pieces are named in a list",
                    override.place,
                    PIECES,
                    shown(override.value),
                    legal=f"{PIECES}=[dropout-zero,host-rng]",
                )
            for piece in pieces:
                with self.composition.without_names():
                    self.add_named(piece_named(piece), override.place)
        for override in given:
            if override.key != PIECES:
                values = override.nested()
                places = dict.fromkeys(flatten(values), override.place)
                self.composition.add(values, places, "", typed=typed)
        if given:
            self.composition.only_shipped = False
        for key, problem in self.undone.items():
            present = self.composition.origins.get(key)  # gone with its section, perhaps
            if present is not None and present.set_by == problem.where:
                raise ProfileError(problem)
        return self.composition
