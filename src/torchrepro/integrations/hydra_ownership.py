"""Whether what an app has under `repro` is a profile or the app's own.

Nobody reserved that word for torchrepro. So a mapping is read as a profile only if no other
program would write it: it has the keys of a profile, spelled right or nearly so, and values that
fit them. Step 2 of the way of a job, which `hydra` describes, asks for files; step 3 for values.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, get_args

import yaml

from torchrepro.knobs.catalogue import knobs_by_name, other_names
from torchrepro.messages import near
from torchrepro.profile.search_path import folders_for, is_name, piece_named, search_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from torchrepro.profile.search_path import Folder

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is optional in PyYAML's builds

CLOSE = 0.75
"""How alike a key is to one of a profile if it is that one mistyped: `sead`, and not `card`."""

_ONLY_PROFILES = ("guarantee", "backends", "on_late", "env_extra")
"""Keys that only a profile has, with any value."""

_COMMON = ("name", "description", "seed")
"""Keys of a profile that any experiment may have."""

_HYDRAS = ("defaults", "hydra")
"""Keys with which a config file changes more than its own group."""


class Ownership(Enum):
    """Whose a mapping is, as far as its contents show."""

    PROFILE = "a profile, well-formed or not"
    APP = "no profile: the app's own"
    EITHER = "what a profile and any other mapping may hold"


def ownership_of(values: Mapping[Any, Any]) -> Ownership:
    """Return whose the mapping `values` is: the value of a config, or all of a file."""
    meant = {key: _meant(str(key)) for key in values}
    if any(name in _ONLY_PROFILES or _is_a_setting(name) for name in meant.values()):
        return Ownership.PROFILE
    if "schema" in values and any(key in other_names() for key in values):
        return Ownership.PROFILE
    if not all(meant.values()):
        return Ownership.APP
    fits = {key: _fits(meant[key], value) for key, value in values.items()}
    if any(fits[key] and (meant[key] not in _COMMON or meant[key] != key) for key in values):
        return Ownership.PROFILE
    return Ownership.EITHER if all(meant[key] == key for key in values) else Ownership.APP


def mistyped(values: Mapping[Any, Any]) -> dict[str, str]:
    """Return the keys of `values` that are nearly keys of a profile, each with the right one."""
    return {str(key): name for key in values if (name := _meant(str(key))) and name != key}


def ownership_of_file(
    path: Path, folders: Sequence[Folder], above: tuple[Path, ...] = ()
) -> Ownership:
    """Return whose the file `path` is, which lies in one of the app's own `folders`.

    A file that is no mapping counts as a profile: it is then refused with its line, and never
    runs. `above` are the files that inherit it.
    """
    values = values_in(path)
    if not isinstance(values, Mapping):
        return Ownership.PROFILE
    defaults = values.get("defaults")
    rest = ownership_of({key: value for key, value in values.items() if key != "defaults"})
    if rest is Ownership.PROFILE or "defaults" not in values:
        return rest
    entries = defaults if isinstance(defaults, list) else []
    named = [entry for entry in entries if isinstance(entry, str) and entry != "_self_"]
    inherits = any(_names_a_profile(entry, folders, (*above, path)) for entry in named)
    return Ownership.PROFILE if inherits else Ownership.APP


def cannot_be_a_profile(path: Path) -> bool:
    """Whether the file `path`, which the command line names in ``+repro=``, is the app's own.

    It is a profile unless it holds keys that nobody would write in one.
    """
    values = values_in(path)
    if not isinstance(values, Mapping) or not values.keys() - set(_COMMON):
        return False
    return all(
        _fits(key, value)
        if key in _COMMON
        else not (str(key).startswith("_") or key in _HYDRAS or _meant_deep(str(key)))
        for key, value in values.items()
    )


def files_named(name: str, folders: Iterable[Folder]) -> list[Path]:
    """Return the files that Hydra would compose as `name`, symbolic links included."""
    paths = [folder.path / f"{name.removesuffix('.yaml')}.yaml" for folder in folders]
    return [path for path in paths if path.is_file()]


def values_in(path: Path) -> Any:
    """Return what the YAML file `path` of an app holds, or None if it cannot be read."""
    try:
        return yaml.load(path.read_text(encoding="utf-8-sig"), Loader=_Loader)  # noqa: S506 - safe
    except (OSError, UnicodeError, ValueError, yaml.YAMLError, RecursionError):
        return None


def close_name(word: str, folders: Iterable[Folder]) -> str:
    """Return the profile, in `folders` or on the search path, whose name is closest to `word`."""
    return near(word, [name for each in (*folders, *search_path()) for name in each.names()])


def _names_a_profile(entry: str, folders: Sequence[Folder], above: tuple[Path, ...]) -> bool:
    """Whether `entry` of a defaults list is the name of a profile, or nearly one."""
    if not is_name(entry):
        return entry.startswith("pkg://")
    for file in (*files_named(entry, folders), *files_named(piece_named(entry), folders)):
        if file not in above:
            return ownership_of_file(file, folders, above) is Ownership.PROFILE
    return any(folder.file(entry) for folder in folders_for(entry)) or bool(close_name(entry, ()))


@cache
def _fields() -> dict[str, frozenset[str]]:
    """Return the keys of a profile, each with the keys of its section, if it has one."""
    from pydantic import BaseModel

    from torchrepro.profile.schema import Profile

    found: dict[str, frozenset[str]] = {}
    for name, field in Profile.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        model = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
        found[field.alias or name] = frozenset(model.model_fields if model else ())
    return found


def _meant(key: str) -> str:
    """Return the key of a profile, or the name of a setting, that `key` is or nearly is."""
    return key if key in _fields() or _is_a_setting(key) else near(key, _fields(), CLOSE)


def _meant_deep(key: str) -> str:
    """Return the key or the setting that `key` is or nearly is, also without its section."""
    return _meant(key) or near(key, {name.rpartition(".")[2] for name in knobs_by_name()}, CLOSE)


def _is_a_setting(key: str) -> bool:
    """Whether `key` is a name of torch's own or a variable."""
    return f"env.{key}" in knobs_by_name() or ("." in key and key in other_names())


def _fits(key: str, value: Any) -> bool:
    """Whether `value` is one that the profile's `key` may have, or its section nearly."""
    from pydantic import ValidationError

    from torchrepro.profile.schema import Profile

    inner = _fields()[key]
    if inner and isinstance(value, Mapping):
        return any(near(str(name), inner) for name in value)
    try:
        Profile.model_validate({key: value})
    except ValidationError:
        return False
    return value is not None and value != {}
