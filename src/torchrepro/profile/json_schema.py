"""The JSON Schema of a profile file, for completion and hints in editors.

It is written for as many editors as possible: draft 7, without references (that draft ignores
a description beside a `$ref`), and with `markdownDescription`, which editors on VS Code's YAML
language server show as a formatted hint: https://github.com/redhat-developer/vscode-yaml.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrepro.knobs.catalogue import rows_for_key
from torchrepro.knobs.variables import allowed
from torchrepro.profile.composition import EXTRA
from torchrepro.profile.schema import Profile
from torchrepro.profile.search_path import PIECES, SHIPPED, Folder

if TYPE_CHECKING:
    from torchrepro.knobs.knob import Knob
    from torchrepro.knobs.legal_values import Legal

DRAFT = "http://json-schema.org/draft-07/schema#"
NULL = {"type": "null"}
_TRIED = range(1000)  # whole numbers that a variable might take
_FEW = 16  # of them are listed; more are a range


def json_schema() -> dict[str, Any]:
    """Return the schema of a profile or a piece: its keys, their values, its defaults list."""
    model = Profile.model_json_schema(by_alias=True)
    said = (
        "Profiles to inherit from, in order, and pieces to lay on top; `_self_` is this file. "
        f"A piece lies in the folder `{PIECES}` of its pack, as in `team/{PIECES}/zero`."
    )
    names = ["_self_", *Folder(SHIPPED, "").names()]
    section = _section(model, model.pop("$defs", {}), "")
    section["properties"] = {
        "defaults": {
            "type": "array",
            "items": {"type": "string", "examples": names},
            "description": said.replace("`", ""),
            "markdownDescription": said,
        },
        **section["properties"],
    }
    return {
        "$schema": DRAFT,
        "title": "torchrepro profile",
        "description": "What a run asks for; a key that is left out, or null, is left alone.",
        **section,
    }


def _section(model: dict[str, Any], definitions: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return a section with all that is below it in place of references."""
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            key: _entry(value, definitions, f"{prefix}{key}")
            for key, value in model["properties"].items()
        },
    }


def _entry(entry: dict[str, Any], definitions: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the schema of one key, described by the row of the catalogue that it sets."""
    said = {"description": " ".join(entry.get("description", "").split())}
    if "$ref" in entry:
        model = definitions[entry["$ref"].rpartition("/")[2]]
        said["description"] = said["description"] or model["description"]
        section = _section(model, definitions, f"{key}.")
        return said | section | {"type": ["object", "null"]}
    kept = {k: v for k, v in entry.items() if k not in ("title", "default", "description")}
    if key == EXTRA:
        without_consent = {
            name: {
                "description": f"{row.why}. Values: {row.legal.words}; null leaves it alone.",
                "type": ["string", "integer", "null"],
                "pattern": _pattern(row.legal, []),
            }
            for name, row in allowed().items()
        }
        return said | {"properties": without_consent, **_or_null(kept)}
    knobs = rows_for_key(key)
    if not knobs:
        return said | _or_null(kept)
    if knobs[0].variable:
        kept = {"anyOf": _texts(knobs[0].legal)}
    return _described(said["description"], knobs) | _or_null(kept)


def _or_null(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that also takes null, without alternatives where that is possible.

    An editor shows the hint of only one alternative.
    """
    one, *others = entry.get("anyOf", [entry, NULL])
    if others != [NULL] or not isinstance(one.get("type"), str):
        return entry
    words = {"enum": [*one["enum"], None]} if "enum" in one else {}
    return {**one, **words, "type": [one["type"], "null"]}


def _described(said: str, knobs: tuple[Knob, ...]) -> dict[str, Any]:
    """Return the hint about a key: what it does and costs, its values, and sources."""
    one = knobs[0]
    does = said.partition(" Cost: ")[0]
    cost = "; ".join(dict.fromkeys(knob.cost for knob in knobs))
    sources = dict.fromkeys(address for knob in knobs for address in _addresses(knob.source))
    linked = ", ".join(f"[{number}]({address})" for number, address in enumerate(sources, 1))
    lines = [does, f"Cost: {cost}.", f"Values: {one.legal.words}; null leaves it alone."]
    lines += [f"Sources: {linked}"] * bool(linked)
    return {"description": f"{does} Cost: {cost}.", "markdownDescription": "\n\n".join(lines)}


def _addresses(source: str) -> list[str]:
    return [word.strip(",;()") for word in source.split() if word.startswith("http")]


def _texts(legal: Legal) -> list[dict[str, Any]]:
    """Return the schemas of a variable: words to choose from, other text, unquoted digits."""
    words = [word.strip('"') for word in legal.choices()]
    numbers = [number for number in _TRIED if not legal.complaint(str(number))]
    digits: dict[str, Any] = {"enum": numbers}
    if len(numbers) > _FEW:
        highest = {"maximum": legal.high} if hasattr(legal, "high") else {}
        digits = {"type": "integer", "minimum": numbers[0], **highest}
    branches: list[dict[str, Any]] = [
        {"enum": [word for word in words if not legal.complaint(word)]},
        {"type": "string", "pattern": _pattern(legal, numbers)},
        digits,
        NULL,
    ]
    return [branch for branch in branches if branch.get("enum") != []]


def _pattern(legal: Legal, numbers: list[int]) -> str:
    """Return the pattern of a variable's text as JavaScript reads it, without flags."""
    pattern = getattr(legal, "pattern", None)
    if pattern is None:
        words = [word for word in legal.choices() if not legal.complaint(word)]
        return f"^({'|'.join([*words, '[0-9]+'] if numbers else words)})$"
    if getattr(legal, "ignore_case", False):
        pattern = "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in pattern)
    return f"^({pattern})$"
