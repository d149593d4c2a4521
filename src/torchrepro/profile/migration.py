"""Profiles that were written for another version of the schema.

Schema 0 is how settings were kept before there was a schema: a flat list of torch's own names and
of variables, with the values that torch's functions take. Each later schema is one more row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torchrepro.errors import ProfileError
from torchrepro.knobs.catalogue import knobs_by_name, other_names
from torchrepro.knobs.legal import SchemaVersion
from torchrepro.messages import Problem, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrepro.profile.document import Document

SCHEMA = "schema"
NEWEST = SchemaVersion().newest


@dataclass(frozen=True, slots=True)
class Moved:
    """A key of an older schema, and what says the same now."""

    keys: tuple[str, ...]
    value: Any


_PRECISION = {"true": "tf32", "false": "ieee", "highest": "ieee", "high": "tf32"}
_MODES = {"true": "error", "false": "none", "0": "none", "1": "warn", "2": "error"}
_SPELLINGS: Mapping[str, Mapping[str, str]] = {
    "torch.use_deterministic_algorithms": _MODES,
    "torch.set_deterministic_debug_mode": {**_MODES, "default": "none"},
    "torch.set_float32_matmul_precision": _PRECISION,
    "torch.backends.cuda.matmul.allow_tf32": _PRECISION,
    "torch.backends.cudnn.allow_tf32": _PRECISION,
    "allow_tf32": _PRECISION,
}
"""Name in code -> value as YAML writes it -> value in a profile, where the two differ."""


def _by_names_in_code(key: str, value: Any) -> Moved | None:
    """Return what a name of torch, or a variable, is called in a profile."""
    variable = knobs_by_name().get(f"env.{key}")
    knobs = (variable,) if variable else other_names().get(key, ())
    if not knobs:
        return None
    meant = _SPELLINGS.get(key, {}).get(shown(value), value)
    return Moved(tuple(dict.fromkeys(knob.profile_key for knob in knobs)), meant)


MIGRATIONS: Mapping[int, Callable[[str, Any], Moved | None]] = {0: _by_names_in_code}
"""Schema -> what a top-level key of it became in the next one; None where it stayed."""


def migrated(document: Document) -> tuple[Document, tuple[str, ...]]:
    """Return `document` in the newest schema, and what a reader should be told of the way there.

    Raises `ProfileError` for a document of a newer schema, or one whose keys come to mean the same.
    """
    schema = document.values.get(SCHEMA, NEWEST)
    if isinstance(schema, bool) or not isinstance(schema, int) or schema == NEWEST or schema < 0:
        return document, ()  # what is no version at all is judged with all other values
    if schema > NEWEST:
        from torchrepro.profile.origin import versioned

        raise ProfileError(
            Problem(
                "written for a newer torchrepro",
                document.place(SCHEMA),
                SCHEMA,
                shown(schema),
                legal=f"up to {NEWEST}, which is what {versioned('torchrepro')} reads",
                todo="upgrade torchrepro: pip install --upgrade torchrepro",
            )
        )
    moves: list[str] = []
    for version in range(schema, NEWEST):
        document = _next(document, MIGRATIONS[version], moves)
    said = f": {', '.join(moves)}" if moves else ""
    note = f"{document.place(SCHEMA)}: schema {schema} is read as schema {NEWEST}{said}"
    return replace(document, values={**document.values, SCHEMA: NEWEST}), (note,)


def _next(
    document: Document, moved: Callable[[str, Any], Moved | None], moves: list[str]
) -> Document:
    values: dict[str, Any] = {}
    lines = dict(document.lines)
    for key, value in document.values.items():
        place = document.place(key)
        target = moved(key, value)
        if target is None:
            _set(values, key, value, place)
            continue
        for new in target.keys:
            _set(values, new, target.value, place)
            if key in lines:
                lines[new] = lines[key]
            if new != key:
                moves.append(f"{key} is now {new}")
    return replace(document, values=values, lines=lines)


def _set(values: dict[str, Any], dotted: str, value: Any, place: str) -> None:
    """Lay `value` into nested `values`; raises `ProfileError` if another one is there."""
    *sections, last = dotted.split(".") if dotted in knobs_by_name() else [dotted]
    section = values
    for part in sections:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise ProfileError(Problem("a section of keys belongs here", place, dotted))
    present = section.get(last)
    if isinstance(present, dict) and isinstance(value, dict):
        for key, inner in value.items():
            _set(present, key, inner, place)
    elif last in section and present != value:
        raise ProfileError(
            Problem(
                f"the same is set twice, to {shown(present)} as well", place, dotted, shown(value)
            )
        )
    else:
        section[last] = dict(value) if isinstance(value, dict) else value
