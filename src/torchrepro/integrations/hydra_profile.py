"""The profile that a composed Hydra config requests, with the place that set each value.

The config source (step 2 in `hydra`) notes in `chosen` what Hydra asked it for. The callback
(step 3) gets the profile from `resolved_profile`.

Nobody reserved the word `repro` for torchrepro. A profile is what ``+repro=`` names, a name on our
search path, or a file of the app that inherits one of ours. Anything else is the app's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchrepro.errors import ProfileError
from torchrepro.manifest.started import APP
from torchrepro.messages import Problem, near, shown
from torchrepro.process_state import changed_files, named_then, profile_of_then
from torchrepro.profile.compose import compose, key_of, parsed
from torchrepro.profile.composition import (
    EXTRA,
    NOT_INHERITED,
    Composition,
    Origin,
    flatten,
    plain,
)
from torchrepro.profile.load import SECTION, from_mapping, validate
from torchrepro.profile.search_path import (
    PIECES,
    folders_for,
    is_name,
    is_piece,
    piece_named,
    search_path,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.profile.search_path import Folder


GROUP = SECTION
APPS_OWN = "main="  # begins the origin of the app's own config folder, Hydra's provider "main"
CALLBACK = "torchrepro"  # its name among the callbacks of an app, and in its defaults list

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is optional in PyYAML's builds


def values_in(path: Path) -> Any:
    """Return what the YAML file `path` of an app holds, or None if it cannot be read."""
    try:
        return yaml.load(path.read_text(encoding="utf-8-sig"), Loader=_Loader)  # noqa: S506 - safe
    except (OSError, UnicodeError, ValueError, yaml.YAMLError, RecursionError):
        return None


def files_named(name: str, folders: Iterable[Folder]) -> list[Path]:
    """Return the files that Hydra would compose as `name`, symbolic links included."""
    paths = [folder.path / f"{name.removesuffix('.yaml')}.yaml" for folder in folders]
    return [path for path in paths if path.is_file()]


def apps_own(folders: Iterable[Folder]) -> list[Folder]:
    """Return those of `folders` that belong to the app itself."""
    return [folder for folder in folders if folder.origin.startswith(APPS_OWN)]


def close_name(word: str, folders: Iterable[Folder]) -> str:
    """Return the profile, in `folders` or on the search path, whose name is closest to `word`."""
    return near(word, [name for each in (*folders, *search_path()) for name in each.names()])


def inherits_a_profile(path: Path, folders: Sequence[Folder], above: tuple[Path, ...] = ()) -> bool:
    """Whether the file `path`, in one of the app's own `folders`, inherits a profile of ours.

    A name that is nearly one of ours counts: the file is then refused at its line, and Hydra never
    composes it. `above` are the files that inherit `path`.
    """
    values = values_in(path)
    entries = values.get("defaults") if isinstance(values, Mapping) else None
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, str) or entry == "_self_":
            continue
        if not is_name(entry):
            if entry.startswith("pkg://"):
                return True
            continue
        files = [*files_named(entry, folders), *files_named(piece_named(entry), folders)]
        others = [file for file in files if file not in (*above, path)]
        if others:
            if inherits_a_profile(others[0], folders, (*above, path)):
                return True
        elif any(folder.file(entry) for folder in folders_for(entry)) or close_name(entry, ()):
            return True
    return False


class Choice:
    """Names of profiles and pieces, in the order in which they are merged."""

    def __init__(self) -> None:
        self.profiles: list[str] = []
        self._pieces: list[str] = []
        self._folders: tuple[Folder, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything is chosen."""
        return bool(self.profiles or self._pieces)

    def clear(self) -> None:
        """Forget all of it."""
        self.profiles.clear()
        self._pieces.clear()

    def forget(self, group: str) -> None:
        """Forget what was chosen of `group`, which an override deleted afterwards."""
        if group == GROUP:
            self.profiles.clear()
        if group == f"{GROUP}.{PIECES}":
            self._pieces.clear()

    def add(self, name: str, folders: tuple[Folder, ...]) -> None:
        """Note that `name` was chosen, to be looked up in `folders` first.

        Hydra asks for the last entry of a defaults list first.
        """
        chosen = self._pieces if is_piece(name) else self.profiles
        if name not in chosen:
            chosen.insert(0, name)
        self._folders = folders

    def may_be_the_apps_own(self) -> bool:
        """Whether the profile is a file of the app that inherits none of ours."""
        own = apps_own(self._folders)
        files = [file for name in self.profiles for file in files_named(name, own)]
        return bool(files) and not inherits_a_profile(files[0], own)

    @property
    def overrides(self) -> list[str]:
        """The pieces as an override of a profile."""
        return _as_override(self._pieces)

    def compose(self) -> Composition:
        """Return the profile with its pieces, or the pieces alone; raises `ProfileError`."""
        if self.profiles:
            return compose(self.profiles[0], self.overrides, self._folders)
        if self._pieces:
            composition = compose(self._pieces[0], _as_override(self._pieces[1:]), self._folders)
            composition.name_it(", ".join(self._pieces), Origin(f"+{GROUP}/{PIECES}"))
            return composition
        return Composition()


def _as_override(pieces: Sequence[str]) -> list[str]:
    return [f"{PIECES}=[{','.join(pieces)}]"] if pieces else []


chosen = Choice()
"""What the source was asked for while Hydra composed."""


def resolved_profile(config: DictConfig) -> ResolvedProfile | None:
    """Return the profile that `config` asks for, or None if it asks for none.

    Raises `ProfileError` for one that is refused, or chosen in a way that leaves it without effect.
    """
    for text in _overrides(config):
        if text.startswith("~"):
            chosen.forget(key_of(text))
    names = chosen.profiles
    if len(names) > 1:
        raise ProfileError.about(
            "two profiles at once",
            found=f"{GROUP}: [{', '.join(names)}]",
            todo="write a profile that inherits both: defaults: [one, two, _self_]",
        )
    if not _is_requested(config):
        section = _plain_section(config)
        if isinstance(section, str) and (close := close_name(section, ())):
            raise ProfileError(_plain_value(section, close))
        return None
    asked = _asked(config)
    return profile_of_then(*asked) or _composed_profile(config, asked)


def _composed_profile(
    config: DictConfig, asked: tuple[str, Sequence[str]]
) -> ResolvedProfile | None:
    """Return the profile in the section of a config that asks for one, if it is there."""
    names = chosen.profiles
    section = config.get(GROUP)
    if section is None:
        if names:
            raise ProfileError.about(
                f"the profile was placed in another package than `{GROUP}`, so it is not in force",
                found=", ".join(names),
                todo=f"choose it without a package: +{GROUP}={names[0]}",
            )
        return None
    if not isinstance(section, DictConfig):
        raise ProfileError(_plain_value(section, ""))
    try:
        composition = from_mapping(section, where=APP)
        from_files = chosen.compose()
    except ProfileError as error:
        raise ProfileError(
            [_with_override(problem, config) for problem in error.problems]
        ) from None
    _set_origins(composition, from_files, config)
    if EXTRA in composition.values:
        composition.typed |= _typed(composition, config)
    if not chosen and _choices(config):  # a file of the app that is a profile because it was chosen
        composition.name_it(_choices(config)[0], Origin(APP))
    composition.asked = (asked[0], *asked[1]) if asked[0] else ()
    try:
        return validate(composition).resolved
    except ProfileError as error:
        raise ProfileError([_with_way_out(problem, names) for problem in error.problems]) from None


def values_of_then(name: str, folders: tuple[Folder, ...]) -> dict[str, Any] | None:
    """Return the values of the profile `name` in the run that is repeated here, or None.

    Notes a line where the files give another profile now, or none.
    """
    then = named_then(name)
    if then is None:
        return None
    if then.asked[:1] == (name,) and _of_files_alone(then):
        try:
            now = validate(compose(name, then.asked[1:], folders)).resolved.digest
        except ProfileError as error:
            now = str(error.problems[0].what)
        if now != then.digest:
            _changed_since.append(changed_files(name, now))
    values: dict[str, Any] = plain(then.values)
    return values


_changed_since: list[str] = []  # lines about files of profiles, to be said once a job starts


def lines_on_changed_files() -> list[str]:
    """Return what is to be said about files of profiles that have changed since then, once."""
    lines = list(dict.fromkeys(_changed_since))
    _changed_since.clear()
    return lines


def _of_files_alone(resolved: ResolvedProfile) -> bool:
    """Whether all values come from files of profiles and from overrides that stand for themselves.

    Others depend on the config of the app, which is not composed yet.
    """
    of_app = any(origin.set_by == APP for origin in resolved.origins.values())
    return not of_app and not any("${" in text for text in resolved.asked)


def _asked(config: DictConfig) -> tuple[str, list[str]]:
    """Return the profile that `config` chose, and what was laid on top of it."""
    keys = {text: key_of(text) for text in _overrides(config)}
    own = [text for text, key in keys.items() if key.startswith(f"{GROUP}.")]
    own = [text for text in own if keys[text] != f"{GROUP}.{PIECES}"]  # they are chosen as well
    words = [text.lstrip("+").replace(f"{GROUP}.", "", 1) for text in own]
    return (chosen.profiles or [""])[0], [*chosen.overrides, *words]


def note_on_the_apps_own(config: DictConfig) -> str:
    """Return a line for an app whose `repro` is its own; empty where it has none."""
    if _is_requested(config) or _plain_section(config) is None:
        return ""
    return (
        f"`{GROUP}` in this app's config is the app's own and asks for no profile "
        "(to run under one: torchrepro run PROFILE -- COMMAND)"
    )


def _is_requested(config: DictConfig) -> bool:
    """Whether a profile was chosen, or the command line added all that is there by a `+`."""
    if chosen or _choices(config):
        return True
    section = _plain_section(config)
    added = [text for text in _overrides(config) if text.startswith("+")]
    return (
        isinstance(section, dict)
        and bool(section)
        and all(any(_sets(text, key) for text in added) for key in section)
    )


def _choices(config: DictConfig) -> list[str]:
    """Return what the command line adds as the whole of `repro`."""
    added = [text for text in _overrides(config) if text.startswith("+")]
    return [text.partition("=")[2] for text in added if key_of(text) == GROUP]


def _plain_section(config: DictConfig) -> Any:
    """Return the plain values under `repro`, with their interpolations as written."""
    try:
        if OmegaConf.is_missing(config, GROUP) or GROUP not in config:
            return None
        copy: Any = OmegaConf.to_container(OmegaConf.masked_copy(config, GROUP), resolve=False)
        if OmegaConf.is_interpolation(config, GROUP) and ":" not in copy[GROUP]:  # no resolver
            value: Any = config[GROUP]
            return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        return copy[GROUP]
    except OmegaConfBaseException:
        return None


def _with_way_out(problem: Problem, names: list[str]) -> Problem:
    """Return `problem` with what to do if its key or its file is the app's own."""
    if problem.todo or not names:
        return problem
    todo = ""
    if problem.where == APP:
        todo = f"if `{GROUP}` is the app's own: torchrepro run {names[0]} -- COMMAND"
    elif chosen.may_be_the_apps_own():
        todo = (
            f"if {names[0]} is the app's own and no profile, choose it in the app's defaults list, "
            f"`- {GROUP}: {names[0]}`: what +{GROUP}= names is a profile"
        )
    return problem._replace(todo=todo)


def _plain_value(value: Any, close: str) -> Problem:
    name = close or "NAME"
    return Problem(
        f"`{GROUP}` is a plain value in this app's config, so no profile is in force",
        key=GROUP,
        found=shown(value),
        near=close if close != value else "",
        todo=f"choose the profile in the defaults list, `- {GROUP}: {name}`, "
        f"or on the command line, +{GROUP}={name}; if it is the app's own and no profile, "
        f"~hydra.callbacks.{CALLBACK} leaves it alone",
    )


def _set_origins(composition: Composition, from_files: Composition, config: DictConfig) -> None:
    """Give every value its origin: an override, the app's own config, or a file's line."""
    for key in NOT_INHERITED:
        if key in from_files.values:  # pieces alone keep their names
            composition.values.setdefault(key, from_files.values[key])
    for key, value in flatten(composition.values).items():
        file = from_files.origins.get(key)
        line = _override_of(key, config)
        if line is not None:
            composition.origins[key] = Origin(f"override {line}", "", value, file)
        elif file is not None and file.value == value:
            composition.origins[key] = file
        else:
            composition.origins[key] = Origin(APP, "", value, file)


def _typed(composition: Composition, config: DictConfig) -> set[str]:
    """Return the keys that have the very value which an override of this run gives them."""
    given: dict[str, Any] = {}
    for text in _overrides(config):
        with suppress(ProfileError):  # an override of the app's own config may be anything
            given |= flatten(parsed(text).nested())
    values = flatten(composition.values)
    return {key for key, value in values.items() if given.get(f"{GROUP}.{key}") == value}


def _with_override(problem: Problem, config: DictConfig) -> Problem:
    """Return `problem` with the override that set its value, if one did, as its place."""
    key = problem.key.removeprefix(f"{GROUP}.")
    line = _override_of(key, config) if key else None
    return problem._replace(where=f"override {line}") if line else problem


def _override_of(key: str, config: DictConfig) -> str | None:
    return next((text for text in reversed(_overrides(config)) if _sets(text, key)), None)


def _overrides(config: DictConfig) -> list[str]:
    # Unresolved: an override shows what was written, never what a resolver makes of it.
    written: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    return list(written)


def _sets(override: str, key: str) -> bool:
    name, value = key_of(override), override.partition("=")[2]
    if name == GROUP:  # a profile that is chosen, or values that are written in its place
        return value.startswith("{") and key.rpartition(".")[2] in value
    whole = f"{GROUP}.{key}."
    return whole.startswith(f"{name}.") or f"{name}.".startswith(whole)
