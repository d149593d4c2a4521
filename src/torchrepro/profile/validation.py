"""Whether composed values are a profile: by the schema, by consent, and by what is installed.

What a profile may set in the environment: the variables of the catalogue and of the allow list
cannot choose code or hosts. A profile is data from others, so any other variable is set only with
the consent of the user who starts the run, given by its name or by an override that sets it. The
schema refuses dangerous variables in any case.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError

from torchrepro.errors import ProfileError
from torchrepro.imports import installed_version
from torchrepro.knobs.catalogue import CATALOGUE, knobs_by_name, other_names
from torchrepro.knobs.variables import allowed, refusal
from torchrepro.messages import Problem, near, shown, some
from torchrepro.profile.resolved import EXTRA
from torchrepro.profile.schema import Profile
from torchrepro.profile.search_path import PIECES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic_core import ErrorDetails

    from torchrepro.profile.compose import Composition


VARIABLE = "TORCHREPRO_ALLOW_ENV"
"""Variable with the names, separated by commas, that the user who starts the run consents to.

No profile can set it, nor any other variable of torchrepro.
"""

OPTION = "--allow-env"

MAPPINGS = {  # keys whose value is a mapping of the user's own words
    **{key: knobs_by_name()[key].legal.words for key in ("device.modules", "streams", "ranks")},
    "requires": 'a mapping such as {torch: ">=2.6"}',
}
_SECTION = "a section of keys belongs here"
_REWORDED = {
    "string_type": "not text",
    "model_type": _SECTION,
    "model_attributes_type": _SECTION,
    "dict_type": _SECTION,
    "mapping_type": _SECTION,
}
"""pydantic's messages, by the type of the error, in the words of a profile's author."""

_HOW_TO_LAY_PIECES = (
    "choose them with +repro/with=[dropout-zero] under Hydra, with=[dropout-zero] among overrides, "
    "or name them in `defaults`: [debug-strict, with/dropout-zero, _self_]"
)
LONGEST = 200  # characters of a version range

_ORDINARY = re.compile(r"[\w.,<>=!~*+\- ]*", re.ASCII)


def validate(composition: Composition) -> Profile:
    """Validate composed values; raises `ProfileError` that names where each value was set."""
    try:
        profile = Profile.model_validate(composition.values)
    except ValidationError as error:
        found: dict[str, Problem] = {}
        for details in error.errors():
            for problem in _problems(details, composition):
                found.setdefault(problem.key, problem)
        raise ProfileError(list(found.values())) from None
    profile.remember(composition.origins, composition.asked)
    unconsented = _without_consent(composition)
    unmet = [] if unconsented else _unmet(profile.requires, composition)
    if unconsented or unmet:
        raise ProfileError(unconsented or unmet)
    return profile


def _problems(details: ErrorDetails, composition: Composition) -> list[Problem]:
    context: Mapping[str, Any] = details.get("ctx", {})
    if details["type"] == "contradiction":
        return [
            Problem(reason, composition.place(key), key, value)
            for key, value, reason in context["found"]
        ]
    path = [str(part) for part in details["loc"]]
    if details["type"] == "variable":
        path.append(context["name"])
    inside = context.get("inside", ())
    path += inside
    key = ".".join(part for part in path if part != "[key]")  # pydantic's word for a key itself
    value = details["input"]
    for each in inside:
        value = value[each]
    if "name" in context and isinstance(value, dict):
        value = value.get(context["name"])
    found = shown(value)
    if isinstance(value, dict | list):
        found = "a section" if isinstance(value, dict) else "a list"
    place = composition.place(key)
    if details["type"] == "extra_forbidden":
        return [_unknown_key(path, found, place)]
    if details["type"] == "illegal":
        legal = context["legal"]
        close = near(found, legal.choices())
        return [Problem(context["complaint"], place, key, found, legal.words, close)]
    what = context.get("why") or _REWORDED.get(details["type"], details["msg"])
    legal = next((words for name, words in MAPPINGS.items() if key.startswith(name)), "")
    return [Problem(what, place, key, found, legal, todo=context.get("todo", ""))]


def _unknown_key(path: list[str], found: str, place: str) -> Problem:
    *sections, word = path
    key = ".".join(path)
    model: type[BaseModel] = Profile
    for section in sections:
        annotation = model.model_fields[section].annotation
        model = annotation if isinstance(annotation, type) else get_args(annotation)[0]
    legal = sorted(field.alias or name for name, field in model.model_fields.items())
    if sections == ["env"]:
        if why := refusal(word):
            return Problem(why, place, key, found)
        todo, meant = f"to set it all the same, move it to `env_extra: {{{word}: ...}}`", ""
        if word not in allowed():
            todo += ", which needs the consent of whoever starts the run"
            meant = near(word, legal)
        what = "the catalogue does not know this variable"
        return Problem(what, place, key, found, near=meant, todo=todo)
    if key == PIECES:
        what = "unknown key: pieces are not values of a profile"
        meant = near(word, legal)
        return Problem(what, place, key, found, some(legal), meant, _HOW_TO_LAY_PIECES)
    known = other_names().get(key) or other_names().get(f"torch.{key}") or other_names().get(word)
    # Somebody may leave its sections out.
    keys = [knob.profile_key for knob in reversed(CATALOGUE)]
    by_last_part = {key.rpartition(".")[2]: key for key in keys}
    meant = known[0].profile_key if known else by_last_part.get(word) or near(word, legal)
    what = "unknown key"
    if known:
        what = "unknown key: another name of the state behind the one below"
    todo = "write it nested, a section per line" if "." in word else ""
    return Problem(what, place, key, found, some(legal), meant, todo)


def allowed_by(names: Sequence[str]) -> str:
    """Return the value of `VARIABLE` that consents to `names` besides those it holds already.

    Raises `ProfileError` for a dangerous variable, or a text that cannot name a variable.
    """
    given = [*_consented(VARIABLE, os.environ.get(VARIABLE, "")), *_consented(OPTION, *names)]
    return ",".join(dict.fromkeys(given))


def _consented(where: str, *texts: str) -> list[str]:
    names = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    problems = [Problem(why, where, found=name) for name in names if (why := refusal(name))]
    if problems:
        raise ProfileError(problems)
    return names


def _without_consent(composition: Composition) -> list[Problem]:
    wrong = {
        name: str(value)
        for name, value in (composition.values.get(EXTRA) or {}).items()
        if value is not None
        and f"{EXTRA}.{name}" not in composition.typed
        and (name not in allowed() or allowed()[name].legal.complaint(str(value)))
    }
    if not wrong:
        return []
    consented = _consented(VARIABLE, os.environ.get(VARIABLE, ""))
    known = {knob.variable: f"env.{knob.variable}" for knob in CATALOGUE if knob.variable}
    known |= {name: f"{EXTRA}.{name}" for name in allowed()}
    problems = []
    for name, value in wrong.items():
        if name in consented:
            continue
        key = f"{EXTRA}.{name}"
        what = "not on the list of variables that a profile may set by itself"
        legal, close = "", known.get(near(name, known), "")
        if name in allowed():
            row = allowed()[name]
            what = "not a value that a profile may give this variable by itself"
            legal, close = row.legal.words, near(value, row.legal.choices())
        todo = (
            f"if you want it, consent: {OPTION} {name}, or {VARIABLE}={name} in the environment "
            f"(under Hydra, pytest and in code); or give the override {key}=... yourself"
        )
        place = composition.place(key)
        problems.append(Problem(what, place, key, shown(value), legal, close, todo))
    return problems


def _unmet(requires: Mapping[str, str | None], composition: Composition) -> list[Problem]:
    if all(wanted is None for wanted in requires.values()):
        return []
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.version import InvalidVersion

    problems = []
    for package, wanted in requires.items():
        if wanted is None:
            continue
        key = f"requires.{package}"
        place, installed = composition.place(key), installed_version(package)
        specifier, fits = None, False
        # The operator === takes any text, and Python refuses a number of thousands of digits.
        if len(wanted) <= LONGEST and _ORDINARY.fullmatch(wanted):
            with suppress(InvalidSpecifier):
                specifier = SpecifierSet(wanted)
        if specifier is not None and installed is not None:
            with suppress(InvalidVersion):  # metadata may hold any text as its version
                fits = specifier.contains(installed, prereleases=True)
        if specifier is None:
            what = "not a version range"
            problems.append(Problem(what, place, key, shown(wanted), '">=2.6"'))
        elif installed is None:
            problems.append(Problem("the package is not installed", place, key, wanted))
        elif not fits:
            what = f"{package} {shown(installed)} is installed"
            todo = f"install {package}{wanted}, or take a profile made for {installed}"
            problems.append(Problem(what, place, key, wanted, todo=todo))
    return problems
