"""Load a profile from a name, a path or plain values, or raise one readable error.

A profile is merged from the defaults list, the file's own values, pieces and overrides, in this
order. The rules are Hydra's (https://hydra.cc/docs/advanced/defaults_list): the entries of a
defaults list are merged in order, key by key, and `_self_` is the position of the file itself.
This module does not use Hydra for two reasons: it keeps the line of each value, and a program that
applies a profile does not spend time on the import of Hydra.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.ground.errors import Problem, ProfileError, shown
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

SECTION = "repro"  # the key of the profile in the config of a program

REFUSED = "_refused_"
"""The key of a config that explains why Hydra's composition refused the profile in the config.

A file with this key is refused. The reason is quoted as in a URL, because it may contain `${`
from the file, which would be an interpolation in a config.
"""

MAX_DOCUMENTS = 64
MAX_KEYS = 2000  # keys of all files of one profile; a file that is read twice counts twice


def load(profile: str, overrides: Sequence[str] = ()) -> Profile:
    """Load and validate a profile.

    `profile` is a name on the search path (``debug-strict``), a path to a YAML file, or
    ``pkg://package.path/name``. `overrides` are written as on a Hydra command line (``seed=7``,
    ``backends.cudnn.benchmark=false``). Raises `ProfileError`. Does not change the process.
    """
    _refuse_other_types(profile, overrides)
    return validate(compose(str(profile), overrides))


def resolve(source: Any, overrides: Sequence[str] = (), *, typed: bool = True) -> ResolvedProfile:
    """Return the plain values of `source`: a name, a path, a `Profile`, a DictConfig or a dict.

    If `source` is the config of a program, the section `repro` of the config is resolved. `typed`
    means that the user who starts the run wrote the overrides, not the author of a file.

    Shipped profiles are not validated with pydantic, because importing pydantic takes longer than
    applying a profile. Tests prove that validation would return exactly the same values.
    """
    _refuse_other_types(source, overrides)
    resolved = getattr(source, "resolved", source)  # a Profile is already validated
    if isinstance(resolved, ResolvedProfile):
        if not overrides:
            return resolved
        values = plain(resolved.values)
        composition = Composition(values, dict(resolved.origins), only_shipped=False)
        composition.typed |= flatten(values).keys()  # consent was checked when they were resolved
        return validate(_Layers(composition).finished(overrides)).resolved
    mapping = isinstance(source, Mapping) or _is_dictconfig(source)
    if mapping and SECTION in source:
        if source.get(SECTION) is None:
            todo = f"choose one, +{SECTION}=NAME, or apply one by its name"
            raise ProfileError.about("this config selects no profile", key=SECTION, todo=todo)
        return resolve(source[SECTION], overrides, typed=typed)
    if mapping:
        composition = from_mapping(source, overrides)
    else:
        composition = compose(str(source), overrides, typed=typed)
    if composition.only_shipped:
        return ResolvedProfile.of(composition.values, composition.origins, composition.asked)
    return validate(composition).resolved


def validate(composition: Composition) -> Profile:
    """Validate composed values, or raise a `ProfileError` that names where each value was set."""
    # The import of pydantic takes longer than applying a shipped profile.
    from torchrepro.profile.schema import validated

    return validated(composition)


def from_mapping(source: Any, overrides: Sequence[str] = (), where: str = "") -> Composition:
    """Compose a profile from a dict or a DictConfig. Interpolations in a DictConfig are resolved.

    Raises `ProfileError` for a call of a resolver such as ``${oc.env:HOME}``. The values must not
    depend on the machine, and a report must not contain secrets of the machine.
    """
    where = where or ("the DictConfig" if _is_dictconfig(source) else "the dict")
    values = _plain_config(source, where) if _is_dictconfig(source) else plain(source)
    check_values(values, where, "")
    entries = defaults_list(values.pop("defaults", None), where)
    # A config was composed from files, so its values count as values of files.
    typed = not any(map(_is_dictconfig, (source, source.get(EXTRA))))
    return compose_document(Document(where, values, entries, typed=typed), overrides)


def _refuse_other_types(source: Any, overrides: Any) -> None:
    is_profile = isinstance(source, str | PathLike | Mapping | ResolvedProfile)
    if not is_profile and not _is_dictconfig(source) and not hasattr(source, "resolved"):
        legal = "a name, a path, a Profile, a DictConfig or a dict"
        raise ProfileError.about("not a profile", found=type(source).__name__, legal=legal)
    is_list = isinstance(overrides, list | tuple)
    if not is_list or not all(isinstance(text, str) for text in overrides):
        legal = 'a list of texts such as ["seed=7"]'
        raise ProfileError.about("not a list of overrides", found=str(overrides), legal=legal)


def _is_dictconfig(source: Any) -> bool:
    # Compared by name, so that a caller without a config does not import omegaconf.
    return type(source).__name__ == "DictConfig"


def _plain_config(config: Any, source: str) -> Any:
    from urllib.parse import unquote

    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    raw: Any = OmegaConf.to_container(config, resolve=False)
    if REFUSED in raw:
        raise ProfileError.about(unquote(str(raw[REFUSED])))
    for inner, text in walk(raw):
        if isinstance(text, str) and "${" in text and ":" in text:
            todo = "write the value itself"
            raise ProfileError.about("a profile calls no resolver", source, inner, text, todo=todo)
    try:
        values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        message = str(error).splitlines()[0]
        key = str(getattr(error, "full_key", "") or "")
        raise ProfileError.about(message, source, key) from None
    return plain(values)


def compose(
    name: str,
    overrides: Sequence[str] = (),
    folders: tuple[ProfileFolder, ...] = (),
    *,
    typed: bool = True,
) -> Composition:
    """Compose the profile `name` with `overrides` such as ``backends.cudnn.benchmark=true``.

    Searches for names in `folders` and on the search path. `typed` means that the user who starts
    the run wrote the overrides. Raises `ProfileError`.
    """
    layers = _Layers(Composition(asked=(name, *overrides)), folders)
    layers.add_named(name)
    return layers.finished(overrides, typed=typed)


def compose_document(document: Document, overrides: Sequence[str] = ()) -> Composition:
    """Compose a profile from a document that is not a file on the search path, such as a dict."""
    layers = _Layers(Composition(only_shipped=False))
    layers.add(document, None, inherited=False)
    return layers.finished(overrides)


@dataclass(slots=True)
class _Layers:
    """Merges files into `composition`. Follows defaults lists depth first, and refuses a cycle."""

    composition: Composition
    folders: tuple[ProfileFolder, ...] = ()
    being_read: list[ProfileFile] = field(default_factory=list)
    read_before: list[Path] = field(default_factory=list)
    keys: int = 0
    undone: dict[str, Problem] = field(default_factory=dict)

    def add_named(self, name: str, named_at: str = "", *, inherited: bool = False) -> None:
        # A profile may inherit from another one of the same name, but not from itself.
        beside = [heir.folder._replace(prefix="") for heir in self.being_read[-1:]]
        being_read = [heir.path for heir in self.being_read]
        try:
            file = find(name, self.folders, named_at, beside, being_read)
        except ProfileError:
            again = find(name, self.folders, named_at, beside) if being_read else None
            if again is None or again.path not in being_read:
                raise
            chain = " -> ".join([*(heir.name for heir in self.being_read), again.name])
            message = "a profile inherits from itself"
            raise ProfileError.about(message, named_at, "defaults", chain) from None
        if len(self.read_before) + len(self.being_read) >= MAX_DOCUMENTS:
            message = f"more than {MAX_DOCUMENTS} files in one defaults list"
            raise ProfileError.about(message, named_at)
        if not file.path.is_relative_to(SHIPPED):
            self.composition.only_shipped = False
        self.being_read.append(file)
        self.add(read_document(file.path, file.where), file, inherited=inherited)
        self.being_read.pop()
        if not self.being_read and not is_piece(file.name):
            self.composition.name_it(file.name, ValueOrigin(file.where, file.folder.package))

    def add(self, document: Document, file: ProfileFile | None, *, inherited: bool) -> None:
        self.keys += len(document.lines)
        if self.keys > MAX_KEYS:
            message = f"more than {MAX_KEYS:,} keys in the files of one profile"
            raise ProfileError.about(message, document.source)
        schema, newest = document.values.get("schema"), SCHEMA_VERSION.high or 1
        if isinstance(schema, int) and schema > newest:  # it may have keys unknown to this version
            raise ProfileError.about(
                "written for a newer torchrepro",
                document.line_of("schema"),
                "schema",
                shown(schema),
                legal=f"up to {newest}, the newest that {versioned('torchrepro')} reads",
                todo="install a newer torchrepro",
            )
        for entry in document.defaults:
            if entry != "_self_":
                self.add_named(entry, document.line_of("defaults"), inherited=True)
                continue
            skipped = NOT_INHERITED if inherited else ()
            values = {key: v for key, v in document.values.items() if key not in skipped}
            # `lines` also has the keys of sections, since a section itself may be wrong.
            keys = [key for key in document.lines or flatten(values) if key not in skipped]
            before = self.composition.origins
            lines = {key: document.line_of(key) for key in keys}
            package = file.folder.package if file else ""
            self.composition.add(values, lines, package, typed=document.typed)
            again = file is not None and file.path in self.read_before
            for key, value in flatten(values).items():
                # A file that is inherited twice must not overwrite a value set in between.
                self.undone.pop(key, None)
                earlier = before.get(key)
                if again and earlier and earlier.value != value:
                    self.undone[key] = Problem(
                        f"{earlier.set_by} sets {key} to {shown(earlier.value)}, but a file that "
                        "was inherited before it is inherited again and overwrites it",
                        lines[key],
                        key,
                        shown(value),
                        todo="inherit that file in one place only, or set the value in the "
                        "profile itself",
                    )
        if file is not None:
            self.read_before.append(file.path)

    def finished(self, overrides: Sequence[str], *, typed: bool = True) -> Composition:
        """Add the pieces among `overrides`, and after them all other overrides in order."""
        parsed_overrides = [(key_of(text), f"override {text}", parsed(text)) for text in overrides]
        for key, origin, values in parsed_overrides:
            if key == PIECES:
                named = values[PIECES]
                pieces = [named] if isinstance(named, str) else named
                if not isinstance(pieces, list) or not all(isinstance(p, str) for p in pieces):
                    legal = f"{PIECES}=[dropout-zero,host-rng]"
                    message = "pieces are named in a list"
                    raise ProfileError.about(message, origin, PIECES, shown(named), legal)
                for piece in pieces:
                    self.add_named(piece_named(piece), origin, inherited=True)
        for key, origin, values in parsed_overrides:
            if key != PIECES:
                origins = dict.fromkeys(flatten(values), origin)
                self.composition.add(values, origins, "", typed=typed)
        if parsed_overrides:
            self.composition.only_shipped = False
        for key, problem in self.undone.items():
            last = self.composition.origins.get(key)  # None if its section was removed
            if last is not None and last.set_by == problem.where:
                raise ProfileError(problem)
        return self.composition


def parsed(text: str) -> dict[str, Any]:
    """Return the values that an override in Hydra's grammar sets, nested in sections.

    A deletion such as ``~seed`` sets null. Raises `ProfileError` for a sweep or a wrong override.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    origin = f"override {text}"
    todo = "write key=value, as in seed=7 or backends.cudnn.benchmark=false"
    try:
        override = OverridesParser.create().parse_override(text)
    except (HydraException, RecursionError, ValueError):
        raise ProfileError.about("not an override", origin, todo=todo) from None
    if override.is_sweep_override():
        message = "a sweep needs Hydra's --multirun; this sets only one value"
        raise ProfileError.about(message, origin)
    depth = override.key_or_group.count(".")
    if override.package is not None or not override.key_or_group or depth > MAX_DEPTH:
        raise ProfileError.about("not an override", origin, todo=todo)
    values: Any = None if override.is_delete() else plain(override.value())
    key = override.key_or_group.replace("/", ".")
    check_values(values, origin, key)
    for part in reversed(key.split(".")):
        values = {part: values}
    nested: dict[str, Any] = values
    return nested


_PLAIN_WORD = re.compile(r"[A-Za-z_/][\w.:/+@%-]*", re.ASCII)
_NOT_IN_KEYS, _ESCAPED = re.compile(r"[\\()\[\]{}:=, \t]"), r"\\\g<0>"  # a key cannot be quoted
_OTHER_WORDS = ("true", "false", "null", "nan", "inf")  # words that are not text for Hydra


def in_hydras_grammar(value: Any) -> str:
    """Return `value` as text in Hydra's grammar of overrides, which `parsed` reads."""
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
    """Return the dotted key of the override `text`, without parsing the value."""
    return text.partition("=")[0].lstrip("+~").replace("/", ".")


def check_values(value: Any, origin: str, key: str) -> None:
    """Raise `ProfileError` if `value` contains an instruction to Hydra or an interpolation."""
    for inner, entry in walk(value, key):
        refuse_instructions(inner.rpartition(".")[2], origin, inner)
        if isinstance(entry, str):
            refuse_interpolation(entry, origin, inner)


def walk(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) for `value` and all values inside. A list entry has the list's key."""
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
    """One profile, or one piece that can be added to a profile, on the search path."""

    name: str
    guarantee: str
    origin: str
    description: str
    kind: str = PROFILE

    def to_json(self) -> dict[str, Any]:
        """Return the entry as plain JSON values."""
        return {key: value for key, value in self._asdict().items() if key != "kind"}


def listed() -> list[ProfileEntry]:
    """Return profiles and pieces on the search path. The entry of a broken one has an error."""
    entries = []
    for folder in search_path():
        origin = f"package {versioned(folder.package)}" if folder.package else folder.origin
        for name in folder.names():
            profile_or_piece, promised = (PIECE, NOTHING) if is_piece(name) else (PROFILE, "seeded")
            try:
                values = compose(name).values
            except ProfileError as error:
                values = {"guarantee": NOTHING, "description": _refused(error.problem)}
            promise, about = values.get("guarantee", promised), values.get("description", "")
            entry = ProfileEntry(name, str(promise), origin, str(about), profile_or_piece)
            entries.append(entry)
    for pack in incomplete_packs():
        name = f"{pack.name}/" if pack.name else NOTHING
        about = _refused(pack.problem)
        entries.append(ProfileEntry(name, NOTHING, f"package {pack.owner}", about))
    return entries


def _refused(problem: Problem) -> str:
    return "refused: " + str(problem).partition("\n")[0]
