"""What the catalogue knows about a knob, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrepro.errors import ProfileError
from torchrepro.knobs.allowed_variables import ALLOWED, WITHOUT_EFFECT
from torchrepro.knobs.catalogue import CATALOGUE, knobs_by_name, other_names
from torchrepro.messages import near

if TYPE_CHECKING:
    from torchrepro.knobs.knob import Knob


def explanations(name: str) -> list[dict[str, str]]:
    """Return an explanation of every row that `name` means.

    `name` is a row's name, a key of a profile, an alias, a variable, or the last word of a name.
    Raises `ProfileError` with a near match for anything else.
    """
    if name in WITHOUT_EFFECT:
        raise ProfileError.about(f"{name} does nothing: {WITHOUT_EFFECT[name]}")
    rows = _rows(name)
    variable = name.removeprefix("env_extra.")
    if not rows and variable in ALLOWED:
        return [_allowed(variable)]
    if not rows:
        keys = [*(knob.profile_key for knob in CATALOGUE), *(f"env_extra.{row}" for row in ALLOWED)]
        words = {key.rpartition(".")[2]: key for key in reversed(keys)}
        close = words.get(near(name, words), "") or near(name, keys)
        raise ProfileError.about(
            f"unknown knob '{name}'",
            near=close,
            todo="`torchrepro plan PROFILE` shows the knobs that a profile sets",
        )
    return [_explanation(knob) for knob in rows]


def _rows(name: str) -> tuple[Knob, ...]:
    by_name = knobs_by_name()
    for known in (name, f"env.{name}"):
        if known in by_name:
            return (by_name[known],)
    obeying = tuple(knob for knob in CATALOGUE if knob.profile_key == name)
    if obeying:
        return obeying
    if name in other_names():
        return other_names()[name]
    sections = (f"{name}.", f"backends.{name}.")
    return tuple(
        knob
        for knob in CATALOGUE
        if knob.name.endswith(f".{name}") or knob.name.startswith(sections)
    )


def _allowed(variable: str) -> dict[str, str]:
    row = ALLOWED[variable]
    return {
        "knob": f"env_extra.{variable}",
        "does": f"{row.why}.",
        "values": row.legal.words,
    }


def _explanation(knob: Knob) -> dict[str, str]:
    takes = str(knob.phase)
    return {
        "knob": knob.name,
        "does": knob.summary,
        "values": knob.legal.words,
        "latches": takes if takes != "any time" else "never: takes effect at any time",
        "reaches": str(knob.scope),
        "costs": knob.cost,
        "profile key": knob.profile_key if knob.profile_key != knob.name else "",
        "also called": ", ".join(knob.aliases),
        "since": f"torch {knob.since}" if knob.since[:1].isdigit() else knob.since,
        "source": knob.source,
    }
