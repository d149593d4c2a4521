"""From a name, a path or plain values to a validated `Profile`, or one readable error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion

from torchrepro.errors import ProfileError
from torchrepro.imports import installed_version
from torchrepro.messages import Problem, shown
from torchrepro.profile.compose import compose, compose_document, compose_resolved
from torchrepro.profile.composition import EXTRA, versioned
from torchrepro.profile.document import Document
from torchrepro.profile.overrides import check_values
from torchrepro.profile.resolved import ResolvedProfile
from torchrepro.profile.search_path import incomplete_packs, is_piece, search_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrepro.profile.composition import Composition
    from torchrepro.profile.schema import Profile
    from torchrepro.profile.search_path import Folder


SECTION = "repro"
"""Key under which the config of a whole program holds its profile."""

REFUSED = "_refused_"
"""Key under which a config carries the reason why its profile was refused while Hydra composed.

No file can hold such a key. The reason is quoted as in a URL, because it shows what the file says:
a config would take `${` in it for an interpolation.
"""


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

    Of the config of a whole program, its section `repro`.
    `typed` says whether whoever starts the run wrote the overrides, rather than a file.

    The shipped profiles skip pydantic, whose import costs more than putting one in force: the
    tests hold their files to exactly the values that validation gives.
    """
    _refuse_other_types(source, overrides)
    given = getattr(source, "resolved", source)  # a Profile is valid already
    if isinstance(given, ResolvedProfile):
        return validate(compose_resolved(given, overrides)).resolved if overrides else given
    mapping = isinstance(source, Mapping) or _is_dictconfig(source)
    if mapping and SECTION in source:
        return resolve(_section(source), overrides, typed=typed)
    if mapping:
        composition = from_mapping(source, overrides)
    else:
        composition = compose(str(source), overrides, typed=typed)
    if composition.only_shipped:
        return ResolvedProfile.of(composition.values, composition)
    return validate(composition).resolved


def _section(config: Any) -> Any:
    """Return the profile in the `config` of a program; raises `ProfileError` if there is none."""
    section = config.get(SECTION)
    if section is None:
        todo = f"choose one, +{SECTION}=NAME, or apply one by its name"
        raise ProfileError.about("this config asks for no profile", key=SECTION, todo=todo)
    return section


def validate(composition: Composition) -> Profile:
    """Validate composed values; raises `ProfileError` that names where each value was set."""
    from pydantic import ValidationError

    from torchrepro.profile.consent import refuse_without_consent
    from torchrepro.profile.schema import Profile
    from torchrepro.profile.validation_errors import problems

    try:
        profile = Profile.model_validate(composition.values)
    except ValidationError as error:
        raise ProfileError(problems(error, composition)) from None
    profile.remember(composition)
    refuse_without_consent(composition)

    wanted = {package: text for package, text in profile.requires.items() if text is not None}
    check_requirements(wanted, composition)
    return profile


def from_mapping(source: Any, overrides: Sequence[str] = (), where: str = "") -> Composition:
    """Compose a dict or a DictConfig, whose interpolations are resolved first.

    Raises `ProfileError` for a resolver call such as ``${oc.env:HOME}``: what a profile asks for
    must not depend on the machine, and a report must not carry its secrets.
    """
    where = where or ("the DictConfig" if _is_dictconfig(source) else "the dict")
    values = _plain_config(source, where) if _is_dictconfig(source) else _plain(source)
    check_values(values, where, "")
    defaults = values.pop("defaults", None)
    if defaults is not None and not (
        isinstance(defaults, list) and all(isinstance(entry, str) for entry in defaults)
    ):
        raise ProfileError.about(
            "a defaults list holds names of profiles", where, "defaults", str(defaults)
        )
    entries = tuple(defaults or ())
    if "_self_" not in entries:
        entries = (*entries, "_self_")
    # A config is composed from files, whoever hands it over.
    typed = not any(map(_is_dictconfig, (source, source.get(EXTRA))))
    return compose_document(Document(where, values, entries, typed=typed), overrides)


def _refuse_other_types(source: Any, overrides: Any) -> None:
    """Raise `ProfileError` for an argument that is no profile, or no list of overrides."""
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


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def _plain_config(config: Any, where: str) -> dict[str, Any]:
    from urllib.parse import unquote

    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    raw: Any = OmegaConf.to_container(config, resolve=False)
    if REFUSED in raw:
        raise ProfileError.about(unquote(str(raw[REFUSED])))
    _refuse_resolvers(raw, where, "")
    try:
        values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        what = str(error).splitlines()[0]
        key = str(getattr(error, "full_key", "") or "")
        raise ProfileError.about(what, where, key) from None
    plain: dict[str, Any] = _plain(values)
    return plain


def _refuse_resolvers(value: Any, where: str, key: str) -> None:
    if isinstance(value, Mapping):
        for inner, entry in value.items():
            _refuse_resolvers(entry, where, f"{key}.{inner}" if key else str(inner))
    elif isinstance(value, list):
        for entry in value:
            _refuse_resolvers(entry, where, key)
    elif isinstance(value, str) and "${" in value and ":" in value:
        raise ProfileError.about(
            "a profile calls no resolver", where, key, value, todo="write the value itself"
        )


NOTHING = "-"
PROFILE, PIECE = "profile", "piece"


@dataclass(frozen=True, slots=True)
class ListedProfile:
    """One profile, or one piece to lay on top of profiles, on the search path."""

    name: str
    guarantee: str
    origin: str
    description: str
    kind: str = PROFILE

    def to_json(self) -> dict[str, Any]:
        """Return the entry as plain JSON values."""
        return {key: value for key, value in asdict(self).items() if key != "kind"}


def listed() -> list[ListedProfile]:
    """Return every profile and piece on the search path; a broken one says so."""
    entries = [_listed(name, folder) for folder in search_path() for name in folder.names()]
    broken = [
        ListedProfile(
            f"{pack}/" if pack else NOTHING, NOTHING, origin, f"refused: {_first_line(problem)}"
        )
        for pack, origin, problem in incomplete_packs()
    ]
    return entries + broken


def _first_line(problem: Problem) -> str:
    return str(problem).partition("\n")[0]


def _listed(name: str, folder: Folder) -> ListedProfile:
    origin = f"package {versioned(folder.package)}" if folder.package else folder.origin
    kind = PIECE if is_piece(name) else PROFILE
    try:
        values = compose(name).values
    except ProfileError as error:
        return ListedProfile(
            name, NOTHING, origin, f"refused: {_first_line(error.problems[0])}", kind
        )
    promised = str(values.get("guarantee", NOTHING if kind == PIECE else "seeded"))
    return ListedProfile(name, promised, origin, str(values.get("description", "")), kind)


def check_requirements(requires: Mapping[str, str], composition: Composition) -> None:
    """Raise `ProfileError` for every package that is absent or of another version."""
    problems = []
    for package, wanted in requires.items():
        key = f"requires.{package}"
        place = composition.place(key)
        try:
            specifier = _specifier(wanted)
        except InvalidSpecifier:
            problems.append(
                Problem("not a version range", place, key, shown(wanted), legal='">=2.6"')
            )
            continue
        installed = installed_version(package)
        if installed is None:
            problems.append(Problem("the package is not installed", place, key, wanted))
            continue
        if not _contains(specifier, installed):
            problems.append(
                Problem(
                    f"{package} {shown(installed)} is installed",
                    place,
                    key,
                    wanted,
                    todo=f"install {package}{wanted}, or take a profile made for {installed}",
                )
            )
    if problems:
        raise ProfileError(problems)


LONGEST = 200
_ORDINARY = re.compile(r"[\w.,<>=!~*+\- ]*", re.ASCII)


def _specifier(wanted: str) -> SpecifierSet:
    """Return the version range `wanted`; raises `InvalidSpecifier`.

    The operator === takes any text, and a number of thousands of digits is none to Python.
    """
    if len(wanted) > LONGEST or not _ORDINARY.fullmatch(wanted):
        raise InvalidSpecifier(wanted)
    return SpecifierSet(wanted)


def _contains(specifier: SpecifierSet, installed: str) -> bool:
    """Whether a version lies in the range; one that is none, as metadata may hold, does not."""
    try:
        return specifier.contains(installed, prereleases=True)
    except InvalidVersion:
        return False
