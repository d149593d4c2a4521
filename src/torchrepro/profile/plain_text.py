"""What no text of a profile may hold: instructions, interpolations, characters that steer."""

from __future__ import annotations

import re

from torchrepro.errors import ProfileError
from torchrepro.messages import Problem, shown

MAX_TEXT = 4096  # characters of one key or value

_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that steer what shows them: control, direction of writing, half a character."""


def refuse_characters(text: str, where: str, key: str) -> None:
    """Raise `ProfileError` for a text that no table, terminal or pattern should meet."""
    if len(text) > MAX_TEXT:
        what = f"a text of {len(text):,} characters"
        raise ProfileError(
            Problem(what, where, key, shown(text), legal=f"at most {MAX_TEXT:,} characters")
        )
    if _STEERING.search(text):
        raise ProfileError(
            Problem(
                "a character that cannot be seen and steers what shows it", where, key, shown(text)
            )
        )


def refuse_instructions(word: str, where: str, key: str) -> None:
    """Raise `ProfileError` if `word` is a key such as ``_target_``, which tells Hydra to act."""
    if len(word) > 1 and word.startswith("_") and word.endswith("_"):
        raise ProfileError(
            Problem("a profile is data and runs no code", where, key, todo=f"remove `{word}`")
        )


def refuse_interpolation(text: str, where: str, key: str) -> None:
    """Raise `ProfileError` if `text` asks for something outside the profile."""
    if "${" in text:
        raise ProfileError(
            Problem(
                "a profile is data: it interpolates nothing and calls no resolver",
                where,
                key,
                shown(text),
                todo="write the value itself, or override it where the program is started",
            )
        )
    if text == "???":
        raise ProfileError(
            Problem("a value is missing here", where, key, text, todo="write it, or remove the key")
        )
