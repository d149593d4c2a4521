"""The profile that a composed Hydra config asks for, with the place that set each value.

Between steps 2 and 3 of the way of a job, which `hydra` describes: the config source notes in
`chosen` what Hydra asked it for, and the callback gets the profile from `resolved_profile`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchrepro.errors import ProfileError
from torchrepro.integrations.hydra_ownership import Ownership, close_name, mistyped, ownership_of
from torchrepro.manifest.started import APP
from torchrepro.messages import Problem, shown, some
from torchrepro.process_state import changed_files, named_then, profile_of_then
from torchrepro.profile.compose import compose
from torchrepro.profile.composition import (
    EXTRA,
    NOT_INHERITED,
    Composition,
    Origin,
    flatten,
    plain,
)
from torchrepro.profile.load import SECTION, from_mapping, validate
from torchrepro.profile.overrides import key_of, parsed
from torchrepro.profile.search_path import PIECES, is_piece

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.profile.search_path import Folder


GROUP = SECTION
CALLBACK = "torchrepro"  # its name among the callbacks of an app, and in its defaults list
_IF_OWN = f"if it is the app's own and no profile, ~hydra.callbacks.{CALLBACK} leaves it alone"


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
    _refuse_two(names)
    if not _is_asked_for(config):
        _refuse_unchosen(_plain_section(config))
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
        _refuse_other_package(names)
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
        raise ProfileError([_of_the_app(problem, names) for problem in error.problems]) from None


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
    if _is_asked_for(config) or _plain_section(config) is None:
        return ""
    return (
        f"`{GROUP}` in this app's config is the app's own and asks for no profile "
        "(to run under one: torchrepro run PROFILE -- COMMAND)"
    )


def _refuse_two(names: list[str]) -> None:
    if len(names) > 1:
        raise ProfileError(
            Problem(
                "two profiles at once",
                found=f"{GROUP}: [{', '.join(names)}]",
                todo="write a profile that inherits both: defaults: [one, two, _self_]",
            )
        )


def _refuse_other_package(names: list[str]) -> None:
    if names:
        raise ProfileError(
            Problem(
                f"the profile was placed in another package than `{GROUP}`, so it is not in force",
                found=", ".join(names),
                todo=f"choose it without a package: +{GROUP}={names[0]}",
            )
        )


def _is_asked_for(config: DictConfig) -> bool:
    """Whether a profile was chosen on the search path, or added on the command line by a `+`."""
    if chosen:
        return True
    section = _plain_section(config)
    choices = _choices(config)
    if any(choice.startswith("{") for choice in choices):
        return True
    if not isinstance(section, dict):
        return False
    if choices:  # the source left it to Hydra, because its file does not show what it is
        return ownership_of(section) is not Ownership.APP
    added = [text for text in _overrides(config) if text.startswith("+")]
    return bool(section) and all(any(_sets(text, key) for text in added) for key in section)


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


def _refuse_unchosen(section: Any) -> None:
    """Raise `ProfileError` for what the app's author may have meant as a profile."""
    if isinstance(section, dict):
        if ownership_of(section) is Ownership.PROFILE:
            raise ProfileError(_values_in_place(section))
        return
    for word in section if isinstance(section, list) else [section]:
        close = close_name(word, ()) if isinstance(word, str) else ""
        if close:
            raise ProfileError(_plain_value(section, close))


def _of_the_app(problem: Problem, names: list[str]) -> Problem:
    """Return `problem` with what to do if its key is the app's own."""
    if problem.where != APP or problem.todo or not names:
        return problem
    todo = f"if `{GROUP}` is the app's own: torchrepro run {names[0]} -- COMMAND"
    return problem._replace(todo=todo)


def _plain_value(value: Any, close: str) -> Problem:
    name = close or "NAME"
    return Problem(
        f"`{GROUP}` is a plain value in this app's config, so no profile is in force",
        key=GROUP,
        found=shown(value),
        near=close if close != value else "",
        todo=f"choose the profile in the defaults list, `- {GROUP}: {name}`, "
        f"or on the command line, +{GROUP}={name}; {_IF_OWN}",
    )


def _values_in_place(values: dict[Any, Any]) -> Problem:
    wrong = ", ".join(f"{key} -> {right}" for key, right in mistyped(values).items())
    return Problem(
        f"`{GROUP}` in this app's config looks like a profile that nobody has chosen, "
        "so it is not in force",
        key=GROUP,
        found=f"{{{some(map(str, values))}}}",
        near=wrong,
        todo=f"write it to the file {GROUP}/NAME.yaml in the app's config folder and choose it, "
        f"`- {GROUP}: NAME` in the defaults list or +{GROUP}=NAME; {_IF_OWN}",
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
