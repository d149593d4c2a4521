"""Turn pydantic's errors into problems that name the file, the value and the legal values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from torchrepro.knobs.catalogue import CATALOGUE, knobs_by_name, other_names
from torchrepro.knobs.variables import allowed, refusal
from torchrepro.messages import Problem, near, shown, some
from torchrepro.profile.schema import Profile
from torchrepro.profile.search_path import PIECES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails

    from torchrepro.profile.composition import Composition


MAPPINGS = {  # keys whose value is a mapping of the user's own words
    "device.modules": knobs_by_name()["device.modules"].legal.words,
    "streams": knobs_by_name()["streams"].legal.words,
    "ranks": knobs_by_name()["ranks"].legal.words,
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


def problems(error: ValidationError, composition: Composition) -> list[Problem]:
    """Return one problem per value that `error` complains about."""
    found: dict[str, Problem] = {}
    for details in error.errors():
        for problem in _problems(details, composition):
            found.setdefault(problem.key, problem)
    return list(found.values())


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
        todo = f"to set it all the same, move it to `env_extra: {{{word}: ...}}`"
        if word in allowed():
            meant = ""
        else:
            meant = near(word, legal)
            todo += ", which needs the consent of whoever starts the run"
        what = "the catalogue does not know this variable"
        return Problem(what, place, key, found, near=meant, todo=todo)
    known = other_names().get(key) or other_names().get(f"torch.{key}") or other_names().get(word)
    elsewhere = [k.profile_key for k in CATALOGUE if k.profile_key.rpartition(".")[2] == word]
    meant = known[0].profile_key if known else next(iter(elsewhere), "") or near(word, legal)
    what = "unknown key"
    if known:
        what = "unknown key: another name of the state behind the one below"
    todo = "write it nested, a section per line" if "." in word else ""
    if key == PIECES:
        what, todo = "unknown key: pieces are not values of a profile", _HOW_TO_LAY_PIECES
    return Problem(what, place, key, found, some(legal), meant, todo)
