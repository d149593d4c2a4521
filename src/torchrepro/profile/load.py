"""From a name, a path or plain values to a validated `Profile`, or one readable error.

A profile is composed of its defaults list, its own values, pieces and overrides, in this order.
The rules are Hydra's (https://hydra.cc/docs/advanced/defaults_list): the entries of a defaults
list are laid on top of each other in order, the file itself where `_self_` stands, and sections
are merged key by key. They are applied here and not by Hydra for two reasons: each value keeps
the line that set it, and code that applies a profile does not pay for importing Hydra.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.ground.errors import ProfileError
from torchrepro.ground.messages import Problem, shown
from torchrepro.knobs.knob import SCHEMA_VERSION
from torchrepro.profile.document import (
    MAX_DEPTH,
    Document,
    defaults_list,
    read_document,
    refuse_instructions,
    refuse_interpolation,
)
from torchrepro.profile.resolved import (
    EXTRA,
    NOT_INHERITED,
    Composition,
    ResolvedProfile,
    ValueOrigin,
    flatten,
    plain,
    versioned,
)
from torchrepro.profile.search_path import (
    PIECES,
    SHIPPED,
    ProfileFile,
    ProfileFolder,
    find,
    incomplete_packs,
    is_piece,
    piece_named,
    search_path,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torchrepro.profile.schema import Profile

SECTION = "repro"  # key under which the config of a program holds its profile

REFUSED = "_refused_"
"""Key under which a config carries the reason why its profile was refused while Hydra composed.

No file can hold such a key. The reason is quoted as in a URL, because it may show `${` from the
file, which a config would take for an interpolation.
"""

MAX_DOCUMENTS = 64
MAX_KEYS = 2000  # keys of all files of one profile, each counted as often as it is read


def load(profile: str, overrides: Sequence[str] = ()) -> Profile:
    """Load and validate a profile.

    `profile` is a name on the search path (``debug-strict``), a path to a YAML file, or
    ``pkg://package.path/name``; `overrides` are written as on a Hydra command line
    (``seed=7``, ``backends.cudnn.benchmark=false``). Raises `ProfileError`; changes nothing.
    """
    _refuse_other_types(profile, overrides)
    return validate(compose(str(profile), overrides))


def resolve(source: Any, overrides: Sequence[str] = (), *, typed: bool = True) -> ResolvedProfile:
    """Return the plain values of `source`: a name, a path, a `Profile`, a DictConfig or a dict.

    Of the config of a program, the section `repro` is resolved.
    `typed` says whether the user who starts the run wrote the overrides, rather than a file.

    The shipped profiles skip pydantic, whose import costs more than applying one. Tests prove that
    validation would give exactly the same values.
    """
    _refuse_other_types(source, overrides)
    given = getattr(source, "resolved", source)  # a Profile is valid already
    if isinstance(given, ResolvedProfile):
        if not overrides:
            return given
        values = plain(given.values)
        composition = Composition(values, dict(given.origins), only_shipped=False)
        composition.typed |= flatten(values).keys()  # judged when they were resolved
        return validate(_Layers(composition).finished(overrides)).resolved
    mapping = isinstance(source, Mapping) or _is_dictconfig(source)
    if mapping and SECTION in source:
        if source.get(SECTION) is None:
            todo = f"choose one, +{SECTION}=NAME, or apply one by its name"
            raise ProfileError.about("this config asks for no profile", key=SECTION, todo=todo)
        return resolve(source[SECTION], overrides, typed=typed)
    if mapping:
        composition = from_mapping(source, overrides)
    else:
        composition = compose(str(source), overrides, typed=typed)
    if composition.only_shipped:
        return ResolvedProfile.of(composition.values, composition.origins, composition.asked)
    return validate(composition).resolved


def validate(composition: Composition) -> Profile:
    """Validate composed values; raises `ProfileError` that names where each value was set."""
    # pydantic takes longer to import than a shipped profile to be put in force.
    from torchrepro.profile.schema import validated

    return validated(composition)


def from_mapping(source: Any, overrides: Sequence[str] = (), where: str = "") -> Composition:
    """Compose a dict or a DictConfig, whose interpolations are resolved first.

    Raises `ProfileError` for a resolver call such as ``${oc.env:HOME}``: what a profile asks for
    must not depend on the machine, and a report must not carry its secrets.
    """
    where = where or ("the DictConfig" if _is_dictconfig(source) else "the dict")
    values = _plain_config(source, where) if _is_dictconfig(source) else plain(source)
    check_values(values, where, "")
    entries = defaults_list(values.pop("defaults", None), where)
    # A config is composed from files, even if code passes it on.
    typed = not any(map(_is_dictconfig, (source, source.get(EXTRA))))
    return compose_document(Document(where, values, entries, typed=typed), overrides)


def _refuse_other_types(source: Any, overrides: Any) -> None:
    is_profile = isinstance(source, str | PathLike | Mapping | ResolvedProfile)
    if not is_profile and not _is_dictconfig(source) and not hasattr(source, "resolved"):
        legal = "a name, a path, a Profile, a DictConfig or a dict"
        raise ProfileError.about("not a profile", found=type(source).__name__, legal=legal)
    listed = isinstance(overrides, list | tuple)
    if not listed or not all(isinstance(text, str) for text in overrides):
        legal = 'a list of texts such as ["seed=7"]'
        raise ProfileError.about("not a list of overrides", found=str(overrides), legal=legal)


def _is_dictconfig(source: Any) -> bool:
    # Looked at by name, so that a caller without a config does not pay for importing omegaconf.
    return type(source).__name__ == "DictConfig"


def _plain_config(config: Any, where: str) -> Any:
    from urllib.parse import unquote

    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    raw: Any = OmegaConf.to_container(config, resolve=False)
    if REFUSED in raw:
        raise ProfileError.about(unquote(str(raw[REFUSED])))
    for inner, text in walk(raw):
        if isinstance(text, str) and "${" in text and ":" in text:
            todo = "write the value itself"
            raise ProfileError.about("a profile calls no resolver", where, inner, text, todo=todo)
    try:
        values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        what = str(error).splitlines()[0]
        key = str(getattr(error, "full_key", "") or "")
        raise ProfileError.about(what, where, key) from None
    return plain(values)


def compose(
    name: str,
    overrides: Sequence[str] = (),
    folders: tuple[ProfileFolder, ...] = (),
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


def compose_document(document: Document, overrides: Sequence[str] = ()) -> Composition:
    """Compose values that were not read from a file of the search path."""
    layers = _Layers(Composition(only_shipped=False))
    layers.add(document, None, inherited=False)
    return layers.finished(overrides)


@dataclass(slots=True)
class _Layers:
    """Follows defaults lists, depth first, and refuses one that leads back to itself."""

    composition: Composition
    folders: tuple[ProfileFolder, ...] = ()
    being_read: list[ProfileFile] = field(default_factory=list)
    read_before: list[Path] = field(default_factory=list)
    keys: int = 0
    undone: dict[str, Problem] = field(default_factory=dict)

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
        if len(self.read_before) + len(self.being_read) >= MAX_DOCUMENTS:
            what = f"more than {MAX_DOCUMENTS} files in one defaults list"
            raise ProfileError.about(what, named_at)
        if not found.path.is_relative_to(SHIPPED):
            self.composition.only_shipped = False
        self.being_read.append(found)
        self.add(read_document(found.path, found.where), found, inherited=inherited)
        self.being_read.pop()
        if not self.being_read and not is_piece(found.name):
            self.composition.name_it(found.name, ValueOrigin(found.where, found.folder.package))

    def add(self, document: Document, found: ProfileFile | None, *, inherited: bool) -> None:
        self.keys += len(document.lines)
        if self.keys > MAX_KEYS:
            what = f"more than {MAX_KEYS:,} keys in the files of one profile"
            raise ProfileError.about(what, document.where)
        schema, newest = document.values.get("schema"), SCHEMA_VERSION.high or 1
        if isinstance(schema, int) and schema > newest:  # whose keys may be unknown here
            raise ProfileError.about(
                "written for a newer torchrepro",
                document.place("schema"),
                "schema",
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
            self.read_before.append(found.path)

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


_PLAIN_WORD = re.compile(r"[A-Za-z_/][\w.:/+@%-]*", re.ASCII)
_NOT_IN_KEYS, _ESCAPED = re.compile(r"[\\()\[\]{}:=, \t]"), r"\\\g<0>"  # a key cannot be quoted
_OTHER_WORDS = ("true", "false", "null", "nan", "inf")  # what Hydra's grammar takes for no text


def in_hydras_grammar(value: Any) -> str:
    """Return a value as an override sets it: what `parsed` reads."""
    if isinstance(value, Mapping):
        keys = (_NOT_IN_KEYS.sub(_ESCAPED, str(key)) for key in value)
        values = map(in_hydras_grammar, value.values())
        return f"{{{','.join(map(':'.join, zip(keys, values, strict=True)))}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(in_hydras_grammar, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if not isinstance(value, str):
        return str(value)
    if _PLAIN_WORD.fullmatch(value) and value.lower() not in _OTHER_WORDS:
        return value
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(value, Quote.single).with_quotes()


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


NOTHING = "-"
PROFILE, PIECE = "profile", "piece"


class ProfileEntry(NamedTuple):
    """One profile, or one piece to lay on top of profiles, on the search path."""

    name: str
    guarantee: str
    origin: str
    description: str
    kind: str = PROFILE

    def to_json(self) -> dict[str, Any]:
        """Return the entry as plain JSON values."""
        return {key: value for key, value in self._asdict().items() if key != "kind"}


def listed() -> list[ProfileEntry]:
    """Return every profile and piece on the search path; a broken one says so."""
    entries = []
    for folder in search_path():
        origin = f"package {versioned(folder.package)}" if folder.package else folder.origin
        for name in folder.names():
            kind = PIECE if is_piece(name) else PROFILE
            try:
                values = compose(name).values
            except ProfileError as error:
                guarantee, about = NOTHING, _refused(error.problem)
            else:
                guarantee = values.get("guarantee", NOTHING if kind == PIECE else "seeded")
                about = values.get("description", "")
            entries.append(ProfileEntry(name, str(guarantee), origin, str(about), kind))
    for pack in incomplete_packs():
        name = f"{pack.name}/" if pack.name else NOTHING
        about = _refused(pack.problem)
        entries.append(ProfileEntry(name, NOTHING, f"package {pack.owner}", about))
    return entries


def _refused(problem: Problem) -> str:
    return "refused: " + str(problem).partition("\n")[0]
