"""Helpers for messages: a problem with hints, a near match, a value on one line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, NamedTuple

from torchrepro.ground.redaction import HIDDEN, sounds_secret

WIDE = 80  # a message shows so many characters of a value
_ELLIPSIS = "..."
_SOURCE_LINE = re.compile(r"[^\s/\\]+:\d+[^\w\s]*$")  # file name, line, and closing punctuation
MANY = 12  # a list of more names is too long to read


class Problem(NamedTuple):
    """One problem of a request, with all that a user needs to fix it."""

    what: str
    """The rule that is broken."""

    where: str = ""
    """``file:line``, the override, or the argument that holds the value."""

    key: str = ""
    """The dotted key of the profile."""

    found: str = ""
    """The value found, as the user wrote it."""

    legal: str = ""
    """The legal values."""

    near: str = ""
    """A legal value close to the one found."""

    todo: str = ""
    """How to fix it."""

    def __str__(self) -> str:
        where, found = self.where, self.found
        if sounds_secret(self.key.rpartition(".")[2]):
            where, found = where.partition("=")[0], found and HIDDEN
        subject = f"{self.key} = {found}" if self.key and found else self.key or found
        if where.startswith("override "):  # the override already shows key and value
            subject = ""
        what = "\n".join(map(printable, self.what.split("\n")))
        lines = [": ".join(filter(None, (printable(where), printable(subject), what)))]
        hints = (("did you mean", self.near), ("legal", self.legal), ("to do", self.todo))
        lines += [f"    {label}: {printable(text)}" for label, text in hints if text]
        return "\n".join(lines)


def near(word: str, words: Iterable[str]) -> str:
    """Return the entry of `words` closest to `word`, or an empty string if none is close."""
    folded = {entry.casefold(): entry for entry in words}
    matches = get_close_matches(word.casefold(), folded, n=1)
    return folded[matches[0]] if matches else ""


def some(words: Iterable[str]) -> str:
    """Return `words` on one line; after the first dozen, only the number of the rest."""
    pool = list(words)
    rest = len(pool) - MANY
    return ", ".join(pool[:MANY]) + (f", ... ({rest} more)" if rest > 0 else "")


def shown(value: Any) -> str:
    """Return `value` as a user would write it in YAML, on a line of at most `WIDE` characters."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        text = value if isinstance(value, str) else repr(value)
    except ValueError:  # Python refuses to print integers of several thousand digits
        text = "a number of thousands of digits"
    return shortened(printable(text) or "''", WIDE)


def shortened(text: str, length: int) -> str:
    """Return `text` cut to `length`, in the middle if it ends in ``file:line``, else at its end."""
    if len(text) <= length:
        return text
    room = length - len(_ELLIPSIS)
    source_line = _SOURCE_LINE.search(text[-length:])
    end = source_line[0][-room:] if source_line else ""
    return text[: room - len(end)] + _ELLIPSIS + end


def ends_in_line_number(text: str) -> bool:
    """Whether `text` ends in ``file:line``, with or without a bracket or a full stop."""
    return _SOURCE_LINE.search(text[-WIDE:]) is not None


def printable(text: str) -> str:
    """Return `text` with control characters escaped, so that it cannot control a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def size(number: float) -> str:
    """Return a number of bytes as text with a unit, such as ``1.5 GB``."""
    for unit in _UNITS:
        if number < 1000 or unit == _UNITS[-1]:  # noqa: PLR2004 - the ratio of two units
            break
        number /= 1000
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.3g} {unit}"
