"""The profile that a composed Hydra config asks for, with the place that set each value."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from torchrepro.errors import Problem, ProfileError
from torchrepro.integrations.hydra_choice import GROUP, chosen
from torchrepro.profile.composition import EXTRA, NOT_INHERITED, Composition, flatten
from torchrepro.profile.load import from_mapping, validate
from torchrepro.profile.origin import Origin
from torchrepro.profile.overrides import key_of, parsed

if TYPE_CHECKING:
    from torchrepro.profile.resolved import Resolved

APP = "this app's config"


def resolved_profile(config: DictConfig) -> Resolved | None:
    """Return the profile that `config` asks for, or None if it asks for none.

    Raises `ProfileError` for one that is refused, or chosen in a way that leaves it without effect.
    """
    for text in _overrides(config):
        if text.startswith("~"):
            chosen.forget(key_of(text))
    section = config.get(GROUP)
    names = chosen.profiles
    if len(names) > 1:
        raise ProfileError(
            Problem(
                "two profiles at once",
                found=f"{GROUP}: [{', '.join(names)}]",
                todo="write a profile that inherits both: defaults: [one, two, _self_]",
            )
        )
    if section is None and names:
        raise ProfileError(
            Problem(
                f"the profile was put elsewhere than `{GROUP}`, so it is not in force",
                found=", ".join(names),
                todo=f"choose it without a package: +{GROUP}={names[0]}",
            )
        )
    if section is None:
        return None
    if not isinstance(section, DictConfig):
        raise ProfileError(
            Problem(
                f"`{GROUP}` is a plain value in this app's config, so no profile is in force",
                found=str(section),
                todo=f"choose the profile in the defaults list: `- {GROUP}: {section}`, "
                f"or on the command line: +{GROUP}={section}",
            )
        )
    try:
        composition = from_mapping(section, where=APP)
        from_files = chosen.compose()
    except ProfileError as error:
        raise ProfileError(
            [_with_override(problem, config) for problem in error.problems]
        ) from None
    _remember_places(composition, from_files, config)
    if EXTRA in composition.values:
        composition.typed |= _typed(composition, config)
    return validate(composition).resolved


def _remember_places(composition: Composition, from_files: Composition, config: DictConfig) -> None:
    """Give every value the place that set it: an override, the app's own config, a file's line."""
    composition.notes += from_files.notes
    for key in NOT_INHERITED:
        if key in from_files.values:  # pieces alone are called what they are
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
    """Return `problem` with the override that set its value as its place, if one did."""
    key = problem.key.removeprefix(f"{GROUP}.")
    line = _override_of(key, config) if key else None
    return replace(problem, where=f"override {line}") if line else problem


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
