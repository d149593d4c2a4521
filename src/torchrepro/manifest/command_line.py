"""The command line of a process as it may be shown: what could be a secret is left out."""

from __future__ import annotations

import os
import re
from shlex import quote
from typing import TYPE_CHECKING

from torchrepro.hidden import (
    HIDDEN,
    ordinary,
    sounds_secret,
    url_without_login,
    without_secrets,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_PRIVATE = frozenset(
    (
        *("access", "account", "api", "cert", "certificate", "client", "conn", "connection"),
        *("email", "env", "header", "headers", "license", "login", "mfa", "nonce", "passcode"),
        *("passwd", "pin", "salt", "session", "tok", "totp", "uri", "url", "user", "username"),
        "webhook",
    )
)
"""Parts of an option's name after which nothing is shown, besides those that sound secret."""

_SPLIT = re.compile(r"[^a-z0-9]+")
_LONGEST_FLAG = 3
"""Characters of an option with one dash; a longer one may have its value written to it."""

_NUMBER = re.compile(r"[+-]?(\d{1,12}(\.\d{0,12})?|\.\d{1,12})([eE][+-]?\d{1,3})?")


def shareable(words: Sequence[str], secrets: Iterable[str]) -> list[str]:
    """Return `words` with `(hidden)` in the place of every one that is not known to be harmless.

    Shown are numbers, names of options, existing files, and words that look like words. A value
    is hidden if its option or key sounds secret or has one letter, if it is code, a header or
    JSON, if it looks like a key, or if one of `secrets` is in it; a URL loses its login and query.
    """
    secrets = tuple(secrets)
    shown = [_first(word) for word in words[:1]]
    hiding, right_after, before = False, False, ""
    for word in words[1:]:
        is_option = word.startswith("-") and not _NUMBER.fullmatch(word)
        if right_after or (hiding and not is_option):
            shown.append(HIDDEN)
        else:
            shown.append(_shown(word, before))
        right_after = "=" not in word and _hides_what_follows(word)
        hiding = right_after or (hiding and not is_option)
        before = word
    return [_without(text, secrets) for text in shown]


def shell_line(words: Sequence[str]) -> str:
    """Return `words`, of which some may be hidden, as one line that a shell takes."""
    return " ".join(word if HIDDEN in word else quote(word) for word in words)


def _without(text: str, secrets: tuple[str, ...]) -> str:
    value = text.partition("=")[2]
    if text in secrets or (value and value in secrets):
        return HIDDEN
    cleaned: str = without_secrets(text, secrets)
    return cleaned


def _first(word: str) -> str:
    """Return the program: a file that is there."""
    return word if _is_file(word) or ordinary(word) else HIDDEN


def _hides_what_follows(word: str) -> bool:
    name = word.lstrip("-")
    if name == word:  # no option, as in `login password 445566`
        return sounds_secret(word)
    return _is_private(name) or word in ("-c", "-H", "-e")


def _is_private(name: str) -> bool:
    return sounds_secret(name) or any(part in _PRIVATE for part in _SPLIT.split(name.lower()))


def _shown(word: str, before: str) -> str:
    """Return one word, which follows the word `before`, as it may be shown."""
    name, equals, value = word.partition("=")
    if "://" in name:
        return url_without_login(word)
    if equals:
        return _assignment(name, value)
    return word if _harmless(word, before) else HIDDEN


def _harmless(word: str, before: str) -> bool:
    if _NUMBER.fullmatch(word):
        return True
    if word.startswith("-") and not word.startswith("--"):
        return len(word) <= _LONGEST_FLAG and ordinary(word[1:])
    if _one_letter(before) and before != "-m":
        return _is_file(word)
    return _is_file(word) or ordinary(word)


def _assignment(name: str, value: str) -> str:
    if not ordinary(name.lstrip("-+~@")):
        return HIDDEN
    if _is_private(name):
        return f"{name}={HIDDEN}"
    if "=" in value:  # an assignment within one, as in --set key=value
        inner, _, last = value.partition("=")
        return f"{name}={_assignment(inner, last)}"
    return f"{name}={_shown(value, '')}"


def _one_letter(word: str) -> bool:
    return len(word) == 2 and word[0] == "-" and word[1].isalpha()  # noqa: PLR2004 - the dash and the letter


def _is_file(word: str) -> bool:
    return ("/" in word or "." in word) and os.path.exists(word)  # noqa: PTH110 - never raises
