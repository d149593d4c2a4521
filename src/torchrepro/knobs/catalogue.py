"""All rows, in the order in which they are set: environment, then flags, then seeds.

And what they say about a knob, in words.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from torchrepro.errors import ProfileError
from torchrepro.knobs.policy_rows import POLICIES, SEEDS
from torchrepro.knobs.torch_rows import CPU, CUDA, CUDNN, NPU, TORCH
from torchrepro.knobs.variables import ENV, WITHOUT_EFFECT, allowed
from torchrepro.messages import near

if TYPE_CHECKING:
    from torchrepro.knobs.knob import Knob

# Inside torch, the NPU's level comes after the flag that its setter also moves. The seeds are
# last: whatever an earlier write draws from a generator must not show in the numbers of the run.
CATALOGUE: tuple[Knob, ...] = (
    *ENV,
    *(*TORCH, *CUDA, *CUDNN, *CPU, *NPU),
    *POLICIES,
    *SEEDS,
)


@cache
def knobs_by_name() -> dict[str, Knob]:
    """Return every row under its name."""
    return {knob.name: knob for knob in CATALOGUE}


@cache
def other_names() -> dict[str, tuple[Knob, ...]]:
    """Return, for every alias that is not itself a row, the rows it means."""
    names: dict[str, tuple[Knob, ...]] = {}
    for knob in CATALOGUE:
        for alias in knob.aliases:
            if alias not in knobs_by_name():
                names[alias] = (*names.get(alias, ()), knob)
    return names


def rows_for_key(key: str) -> tuple[Knob, ...]:
    """Return the rows that the dotted `key` of a profile sets."""
    if key in knobs_by_name():
        return (knobs_by_name()[key],)
    obeying = tuple(knob for knob in CATALOGUE if knob.profile_key == key)
    return obeying or other_names().get(key, ())


def explanations(name: str) -> list[dict[str, str]]:
    """Return an explanation of every row that `name` means.

    `name` is a row's name, a key of a profile, an alias, a variable, or the last word of a name.
    Raises `ProfileError` with a near match for anything else.
    """
    if name in WITHOUT_EFFECT:
        raise ProfileError.about(f"{name} does nothing: {WITHOUT_EFFECT[name]}")
    rows = _rows_called(name)
    variable = name.removeprefix("env_extra.")
    if not rows and variable in allowed():
        row = allowed()[variable]
        does, values = f"{row.why}.", row.legal.words
        return [{"knob": f"env_extra.{variable}", "does": does, "values": values}]
    if not rows:
        keys = [
            *(knob.profile_key for knob in CATALOGUE),
            *(f"env_extra.{row}" for row in allowed()),
        ]
        words = {key.rpartition(".")[2]: key for key in reversed(keys)}
        close = words.get(near(name, words), "") or near(name, keys)
        raise ProfileError.about(
            f"unknown knob '{name}'",
            near=close,
            todo="`torchrepro plan PROFILE` shows the knobs that a profile sets",
        )
    return [_explanation(knob) for knob in rows]


def _rows_called(name: str) -> tuple[Knob, ...]:
    sections = (f"{name}.", f"backends.{name}.")
    return (
        rows_for_key(name)
        or rows_for_key(f"env.{name}")
        or tuple(
            knob
            for knob in CATALOGUE
            if knob.name.endswith(f".{name}") or knob.name.startswith(sections)
        )
    )


def _explanation(knob: Knob) -> dict[str, str]:
    takes = str(knob.phase)
    return {
        "knob": knob.name,
        "does": knob.summary,
        "values": knob.legal.words,
        "latches": takes if takes != "any time" else "never: takes effect at any time",
        "reaches": str(knob.scope),
        "for": knob.hardware,
        "costs": knob.cost,
        "profile key": knob.profile_key if knob.profile_key != knob.name else "",
        "also called": ", ".join(knob.aliases),
        "since": f"torch {knob.since}" if knob.since[:1].isdigit() else knob.since,
        "source": knob.source,
    }
