"""From a name, a path or plain values to a validated `Profile`, or one readable error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.errors import ProfileError
from torchrepro.profile.compose import (
    check_values,
    compose,
    compose_document,
    compose_resolved,
    walk,
)
from torchrepro.profile.document import Document, defaults_list
from torchrepro.profile.resolved import EXTRA, ResolvedProfile, plain, versioned
from torchrepro.profile.search_path import incomplete_packs, is_piece, search_path

if TYPE_CHECKING:
    from torchrepro.messages import Problem
    from torchrepro.profile.compose import Composition
    from torchrepro.profile.schema import Profile


SECTION = "repro"  # key under which the config of a program holds its profile

REFUSED = "_refused_"
"""Key under which a config carries the reason why its profile was refused while Hydra composed.

No file can hold such a key. The reason is quoted as in a URL, because it may show `${` from the
file, which a config would take for an interpolation.
"""

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
        return validate(compose_resolved(given, overrides)).resolved if overrides else given
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
    from torchrepro.profile.validation import validate

    return validate(composition)


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
