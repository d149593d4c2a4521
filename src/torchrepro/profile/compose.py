"""Compose a profile: its defaults list, its own values, pieces and overrides, in this order.

The rules are Hydra's (https://hydra.cc/docs/advanced/defaults_list): the entries of a defaults
list are laid on top of each other in order, the file itself where `_self_` stands, and sections
are merged key by key. They are applied here and not by Hydra for two reasons: each value keeps
the line that set it, and code that applies a profile does not pay for importing Hydra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
)
from torchrepro.profile.document import Document, read_document
from torchrepro.profile.overrides import Override, parsed
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
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from torchrepro.profile.resolved import ResolvedProfile

SCHEMA = "schema"
MAX_DOCUMENTS = 64
MAX_KEYS = 2000
"""Keys of all files of one profile, each counted as often as it is read."""


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
    composition = Composition(asked=(name, *overrides))
    chain = _Layers(composition, folders)
    chain.add_named(name)
    _finish(composition, chain, overrides, typed=typed)
    return composition


def compose_document(
    document: Document, overrides: Sequence[str] = (), folders: tuple[Folder, ...] = ()
) -> Composition:
    """Compose values that were not read from a file of the search path."""
    composition = Composition(only_shipped=False)
    chain = _Layers(composition, folders)
    chain.add(document, None)
    _finish(composition, chain, overrides)
    return composition


def compose_resolved(resolved: ResolvedProfile, overrides: Sequence[str]) -> Composition:
    """Compose a profile that is resolved already with further `overrides`."""
    origins = dict(resolved.origins)
    values = plain(resolved.values)
    composition = Composition(values, origins, only_shipped=False)
    composition.typed |= flatten(values).keys()  # judged when they were resolved
    _finish(composition, _Layers(composition, ()), overrides)
    return composition


def _finish(
    composition: Composition, chain: _Layers, overrides: Sequence[str], *, typed: bool = True
) -> None:
    """Lay the pieces among `overrides` on top, then the other overrides in their order."""
    given = [parsed(text, typed=typed) for text in overrides]
    for override in given:
        if override.key == PIECES:
            for piece in _pieces(override):
                chain.add_piece(piece, override.place)
    for override in given:
        if override.key != PIECES:
            values = override.nested()
            places = dict.fromkeys(flatten(values), override.place)
            composition.add(values, places, "", typed=override.typed)
    if given:
        composition.only_shipped = False
    chain.refuse_undone()


def _pieces(override: Override) -> Iterable[str]:
    named = [override.value] if isinstance(override.value, str) else override.value
    if not isinstance(named, list) or not all(isinstance(each, str) for each in named):
        raise ProfileError.about(
            "pieces are named in a list",
            override.place,
            PIECES,
            shown(override.value),
            legal=f"{PIECES}=[dropout-zero,host-rng]",
        )
    return named


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
        found = self._found(name, named_at)
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

    def add_piece(self, name: str, named_at: str) -> None:
        """Lay the piece `name` on top."""
        with self.composition.without_names():
            self.add_named(piece_named(name), named_at)

    def add(self, document: Document, found: ProfileFile | None) -> None:
        self.keys += len(document.lines)
        if self.keys > MAX_KEYS:
            raise ProfileError.about(
                f"more than {MAX_KEYS:,} keys in the files of one profile", document.where
            )
        _refuse_newer_schema(document)
        for entry in document.defaults:
            if entry == "_self_":
                self._add_values(document, found)
            else:
                with self.composition.without_names():
                    self.add_named(entry, document.place("defaults"))

    def _found(self, name: str, named_at: str) -> ProfileFile:
        """Return the file that `name` means, other than those that are being read.

        So a profile may inherit from another one of the same name, but not from itself.
        """
        beside = [one.folder._replace(prefix="") for one in self.being_read[-1:]]
        being_read = [other.path for other in self.being_read]
        try:
            return find(name, self.folders, named_at, beside, being_read)
        except ProfileError:
            again = find(name, self.folders, named_at, beside) if being_read else None
            if again is None or again.path not in being_read:
                raise
        chain = " -> ".join([*(other.name for other in self.being_read), again.name])
        raise ProfileError.about("a profile inherits from itself", named_at, "defaults", chain)

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
                self.undone[key] = _undone(key, earlier, self.composition.origins[key])
        if found is not None:
            self.read_before.add(found.path)

    def refuse_undone(self) -> None:
        for key, problem in self.undone.items():
            present = self.composition.origins.get(key)  # gone with its section, perhaps
            if present is not None and present.set_by == problem.where:
                raise ProfileError(problem)


def _refuse_newer_schema(document: Document) -> None:
    """Raise one `ProfileError` for a document of a later schema, whose keys may be unknown here.

    Any other wrong version is reported together with all other wrong values.
    """
    schema, newest = document.values.get(SCHEMA), SchemaVersion().newest
    if isinstance(schema, int) and schema > newest:
        raise ProfileError.about(
            "written for a newer torchrepro",
            document.place(SCHEMA),
            SCHEMA,
            shown(schema),
            legal=f"up to {newest}, which is what {versioned('torchrepro')} reads",
            todo="upgrade torchrepro: pip install --upgrade torchrepro",
        )


def _undone(key: str, earlier: Origin, later: Origin) -> Problem:
    return Problem(
        f"{earlier.set_by} sets {key} to {shown(earlier.value)}, and is undone by a file that was "
        "inherited before it and is inherited again",
        later.set_by,
        key,
        shown(later.value),
        todo="inherit that file in one place only, or set the value in the profile itself",
    )
