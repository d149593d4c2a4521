"""The profile that a composed Hydra config requests, with the place that set each value.

The config source (step 2 in `hydra`) notes in `chosen` what Hydra asked it for. The callback
(step 3) gets the profile from `resolved_profile`.

Nobody reserved the word `repro` for torchrepro. A profile is what ``+repro=`` names, a name on our
search path, or a file of the app that inherits one of ours. Anything else is the app's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchrepro.errors import ProfileError
from torchrepro.messages import Problem, near, shown
from torchrepro.process_state import changed_files, original_meaning, original_profile
from torchrepro.profile.load import (
    SECTION,
    Composition,
    compose,
    from_mapping,
    key_of,
    parsed,
    validate,
)
from torchrepro.profile.resolved import EXTRA, NOT_INHERITED, Origin, flatten, plain
from torchrepro.profile.search_path import (
    PIECES,
    folders_for,
    is_name,
    is_piece,
    piece_named,
    search_path,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.profile.search_path import Folder


GROUP = SECTION
APPS_OWN = "main="  # begins the origin of the app's own config folder, Hydra's provider "main"
APP = "this app's config"  # the place of values that it sets
CALLBACK = "torchrepro"  # its name among the callbacks of an app, and in its defaults list

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is optional in PyYAML's builds


def values_in(path: Path) -> Any:
    """Return what the YAML file `path` of an app holds, or None if it cannot be read."""
    try:
        return yaml.load(path.read_text(encoding="utf-8-sig"), Loader=_Loader)  # noqa: S506 - safe
    except (OSError, UnicodeError, ValueError, yaml.YAMLError, RecursionError):
        return None


def files_named(name: str, folders: Iterable[Folder]) -> list[Path]:
    """Return the app's own files, in its `folders`, that Hydra would compose as `name`."""
    own = [folder.path for folder in folders if folder.origin.startswith(APPS_OWN)]
    paths = [path / f"{name.removesuffix('.yaml')}.yaml" for path in own]
    return [path for path in paths if path.is_file()]


def close_name(word: str, folders: Iterable[Folder] = ()) -> str:
    """Return the profile, in `folders` or on the search path, whose name is closest to `word`."""
    return near(word, [name for each in (*folders, *search_path()) for name in each.names()])


def inherits_a_profile(path: Path, folders: Sequence[Folder], above: tuple[Path, ...] = ()) -> bool:
    """Whether the app's file `path` inherits a profile of ours, by the app's own `folders`.

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
        elif any(folder.file(entry) for folder in folders_for(entry)) or close_name(entry):
            return True
    return False


@dataclass
class Choice:
    """The profiles and pieces that a config chooses, in the order in which they are merged."""

    profiles: list[str] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    folders: tuple[Folder, ...] = ()  # where they are searched for first

    def add(self, name: str, folders: tuple[Folder, ...]) -> None:
        """Note that `name` was chosen; Hydra asks for the last entry of a defaults list first."""
        names = self.pieces if is_piece(name) else self.profiles
        if name not in names:
            names.insert(0, name)
        self.folders = folders

    def compose(self) -> Composition:
        """Return the profile with its pieces, or the pieces alone; raises `ProfileError`."""
        if self.profiles:
            return compose(self.profiles[0], as_override(self.pieces), self.folders)
        if not self.pieces:
            return Composition()
        composition = compose(self.pieces[0], as_override(self.pieces[1:]), self.folders)
        composition.name_it(", ".join(self.pieces), Origin(f"+{GROUP}/{PIECES}"))
        return composition


def as_override(pieces: Sequence[str]) -> list[str]:
    return [f"{PIECES}=[{','.join(pieces)}]"] if pieces else []


chosen = Choice()  # what the source was asked for while Hydra composed


def resolved_profile(config: DictConfig) -> ResolvedProfile | None:
    """Return the profile that `config` asks for, or None if it asks for none.

    Raises `ProfileError` for one that is refused, or chosen in a way that leaves it without effect.
    """
    # Unresolved: an override shows what was written, never what a resolver makes of it.
    task: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    overrides: list[str] = list(task)  # one may be written twice, and the last one counts
    keys = {text: key_of(text) for text in overrides}
    for text, key in keys.items():
        if text.startswith("~") and key == GROUP:
            chosen.profiles.clear()
        if text.startswith("~") and key == f"{GROUP}.{PIECES}":
            chosen.pieces.clear()
    names = chosen.profiles
    if len(names) > 1:
        raise ProfileError.about(
            "two profiles at once",
            found=f"{GROUP}: [{', '.join(names)}]",
            todo="write a profile that inherits both: defaults: [one, two, _self_]",
        )

    # Whether a profile was chosen, or the command line added all that is there by a `+`.
    added = [text for text in keys if text.startswith("+")]
    typed = [text.partition("=")[2] for text in added if keys[text] == GROUP]
    plain_section = _plain_section(config)
    is_added = isinstance(plain_section, dict) and all(
        any(_sets(text, key) for text in added) for key in plain_section
    )
    if not (names or chosen.pieces or typed or (plain_section and is_added)):
        if isinstance(plain_section, str) and (close := close_name(plain_section)):
            raise ProfileError(_plain_value(plain_section, close))
        return None

    # The pieces are chosen as well, and so no overrides of values.
    own = [text for text in overrides if keys[text].startswith(f"{GROUP}.")]
    own = [text for text in own if keys[text] != f"{GROUP}.{PIECES}"]
    words = [text.lstrip("+").replace(f"{GROUP}.", "", 1) for text in own]
    asked = ((names or [""])[0], *as_override(chosen.pieces), *words)
    if repeated := original_profile(asked[0], asked[1:]):
        return repeated
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
        raise ProfileError([_at_override(each, overrides) for each in error.problems]) from None
    _set_origins(composition, from_files, overrides)
    if EXTRA in composition.values:
        composition.typed |= _typed(composition, overrides)
    if not names and not chosen.pieces and typed:  # `+repro={seed: 7}`
        composition.name_it(typed[0], Origin(APP))
    composition.asked = asked if asked[0] else ()
    try:
        return validate(composition).resolved
    except ProfileError as error:
        raise ProfileError([_with_way_out(problem) for problem in error.problems]) from None


def note_on_the_apps_own(config: DictConfig) -> str:
    """Return a line for an app that asks for no profile, and whose `repro` is its own."""
    if _plain_section(config) is None:
        return ""
    return (
        f"`{GROUP}` in this app's config is the app's own and asks for no profile "
        "(to run under one: torchrepro run PROFILE -- COMMAND)"
    )


def values_repeated(name: str, folders: tuple[Folder, ...]) -> dict[str, Any] | None:
    """Return the values of the profile `name` in the run that is repeated here, or None.

    Notes a line where the files give another profile now, or none.
    """
    original = original_meaning(name)
    if original is None:
        return None
    # Values that depend on the config of the app cannot be compared: it is not composed yet.
    of_app = any(origin.set_by == APP for origin in original.origins.values())
    of_files_alone = not of_app and not any("${" in text for text in original.asked)
    if original.asked[:1] == (name,) and of_files_alone:
        try:
            now = validate(compose(name, original.asked[1:], folders)).resolved.digest
        except ProfileError as error:
            now = error.problem.what
        if now != original.digest:
            _changed_since.append(changed_files(name, now))
    values: dict[str, Any] = plain(original.values)
    return values


_changed_since: list[str] = []  # lines about files of profiles, to be said once a job starts


def lines_on_changed_files() -> list[str]:
    """Return what is to be said about files that have changed since the original run, once."""
    lines = list(dict.fromkeys(_changed_since))
    _changed_since.clear()
    return lines


def _plain_section(config: DictConfig) -> Any:
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


def _with_way_out(problem: Problem) -> Problem:
    if problem.todo or not chosen.profiles:
        return problem
    name, todo = chosen.profiles[0], ""
    files = files_named(name, chosen.folders)
    if problem.where == APP:
        todo = f"if `{GROUP}` is the app's own: torchrepro run {name} -- COMMAND"
    elif files and not inherits_a_profile(files[0], chosen.folders):
        todo = (
            f"if {name} is the app's own and no profile, choose it in the app's defaults list, "
            f"`- {GROUP}: {name}`: what +{GROUP}= names is a profile"
        )
    return problem._replace(todo=todo)


def _set_origins(
    composition: Composition, from_files: Composition, overrides: Sequence[str]
) -> None:
    for key in NOT_INHERITED:
        if key in from_files.values:  # pieces alone keep their names
            composition.values.setdefault(key, from_files.values[key])
    for key, value in flatten(composition.values).items():
        file = from_files.origins.get(key)
        text = _override_of(key, overrides)
        if text is not None:
            composition.origins[key] = Origin(f"override {text}", "", value, file)
        elif file is not None and file.value == value:
            composition.origins[key] = file
        else:
            composition.origins[key] = Origin(APP, "", value, file)


def _typed(composition: Composition, overrides: Sequence[str]) -> set[str]:
    given: dict[str, Any] = {}
    for text in overrides:
        with suppress(ProfileError):  # an override of the app's own config may be anything
            given |= flatten(parsed(text))
    values = flatten(composition.values)
    return {key for key, value in values.items() if given.get(f"{GROUP}.{key}") == value}


def _at_override(problem: Problem, overrides: Sequence[str]) -> Problem:
    key = problem.key.removeprefix(f"{GROUP}.")
    text = _override_of(key, overrides) if key else None
    return problem._replace(where=f"override {text}") if text else problem


def _override_of(key: str, overrides: Sequence[str]) -> str | None:
    return next((text for text in reversed(overrides) if _sets(text, key)), None)


def _sets(override: str, key: str) -> bool:
    name, value = key_of(override), override.partition("=")[2]
    if name == GROUP:  # a profile that is chosen, or values that are written in its place
        return value.startswith("{") and key.rpartition(".")[2] in value
    inside = f"{GROUP}.{key}."
    return inside.startswith(f"{name}.") or f"{name}.".startswith(inside)
