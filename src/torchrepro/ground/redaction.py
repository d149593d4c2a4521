"""Hides secrets in texts, values and command lines before they are shown or written."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from shlex import quote
from typing import Any
from urllib.parse import urlsplit

HIDDEN = "(hidden)"  # replaces a secret

_PARTS = frozenset(
    (
        *("apikey", "auth", "authorization", "bearer", "cookie", "cookies", "cred", "creds"),
        *("credential", "credentials", "dsn", "jwt", "key", "keys", "otp", "pass", "passphrase"),
        *("passwd", "password", "pat", "private", "pw", "pwd", "sas", "secret", "secrets", "sig"),
        *("signature", "token", "tokens", "webhook"),
    )
)
"""A name sounds secret if it contains one of these words."""

_INSIDE = ("accesskey", "apikey", "credential", "passphrase", "passwd", "password", "secret")
_LIKE_TOKEN = re.compile(r"token(?!iz)")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_NOT_IN_NAMES = re.compile(r"[^a-z0-9]+")

_TOKEN_SHAPES = re.compile(
    r"\b(?:gh[a-z]_|github_pat_|glpat-|hf_|sk-|pk-|rk_|xox[a-z]-|AKIA|ASIA|AIza|ya29\.|eyJ|npm_|"
    r"pypi-|dop_v1_|SG\.)[A-Za-z0-9_.\-]{8,}"
)
"""The tokens of well-known services, by their prefixes."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://[^\s\"'<>]+")
_AFTER_SCHEME = re.compile(r"\b(bearer|basic|digest)\s+[^\s\"',]+", re.IGNORECASE)
_PIECES = re.compile(r"[\s,;\"'{}\[\]=&@|]+")

_ORDINARY_TOKEN = re.compile(
    r"[A-Z]?[a-z]{1,19}\d{0,4}"  # train, Adam, resnet50
    r"|[A-Z]{1,12}\d{0,4}"  # SGD, FP16
    r"|(?:[A-Z]{0,3}[a-z]+){1,4}[A-Z]{0,3}\d{0,3}"  # AdamW, DataLoader
    r"|\d{1,8}[A-Za-z]{0,3}"  # 512, 7b, 10ms
    r"|\d{1,3}[eE]\d{1,3}"  # 1e4
)

_ORDINARY_CHARACTERS = re.compile(r"[A-Za-z0-9_./:+,\[\]\-]{0,200}")
_LONG = 8  # a word of at least so many letters must have vowels
_UNREADABLE = 6  # the most letters per vowel in a readable word
_SHORT = 6  # shorter values are not searched for in other text: they are too common
_LONG_SECRET = 12  # shorter values are searched for as whole words only
_EVERYDAY = re.compile(r"[a-z]{1,10}|\d{1,5}|[Tt]rue|[Ff]alse|/[^\n]*")

_PRIVATE = frozenset(
    (
        *("access", "account", "api", "cert", "certificate", "client", "conn", "connection"),
        *("email", "env", "header", "headers", "license", "login", "mfa", "nonce", "passcode"),
        *("passwd", "pin", "salt", "session", "tok", "totp", "uri", "url", "user", "username"),
        "webhook",
    )
)
"""Words in the name of an option whose value is hidden, in addition to `_PARTS`."""

_LONGEST_FLAG = 3  # an option with one dash and more characters may contain its value
_CODE = ("-c", "-H", "-e")  # options that are followed by code, a header or a variable
_NAMING = ("-m", "-f", "-i", "-o")
"""Options of one letter whose value is shown. `-m` names a module of Python, and the rest name
files by POSIX's convention. A file need not exist yet. Any other letter may precede a password."""
_NUMBER = re.compile(r"[+-]?(\d{1,12}(\.\d{0,12})?|\.\d{1,12})([eE][+-]?\d{1,3})?")


def sounds_secret(name: str) -> bool:
    """Whether a variable, an option or a key of this name may be a secret."""
    parts = [part for part in _NOT_IN_NAMES.split(_CAMEL.sub("_", name).lower()) if part]
    parts += [part for part in _NOT_IN_NAMES.split(name.lower()) if part]
    folded = "".join(_NOT_IN_NAMES.split(name.lower()))
    return (
        any(part in _PARTS or part.endswith(("pass", "pwd")) for part in parts)
        or any(word in folded for word in _INSIDE)
        or _LIKE_TOKEN.search(folded) is not None
    )


def secret_values(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the secret values in `variables`, and their parts.

    A value is secret if the name of its variable sounds secret. Every login in a URL is secret.
    """
    secrets: set[str] = set()
    for name, value in variables.items():
        if sounds_secret(name):
            keys = {piece for piece in _PIECES.split(value) if not ordinary(piece)}
            secrets |= {value, value.strip(), *(key for key in keys if len(key) >= _LONG)}
        urls = _URL.findall(value) if "://" in value else []  # the pattern is slow on long texts
        for url in urls:
            login, at, _ = url.partition("://")[2].partition("/")[0].rpartition("@")
            if at:
                user, _, password = login.partition(":")
                secrets.add(password or user)
    return tuple(filter(None, secrets))


def ordinary(text: str) -> bool:
    """Whether `text` consists of words and numbers only, unlike keys and tokens."""
    if not _ORDINARY_CHARACTERS.fullmatch(text):
        return False
    for token in filter(None, re.split(r"[^A-Za-z0-9]+", text)):
        letters = [letter for letter in token.lower() if letter.isalpha()]
        vowels = sum(letter in "aeiouy" for letter in letters)
        readable = len(letters) < _LONG or vowels * _UNREADABLE >= len(letters)
        if not readable or not _ORDINARY_TOKEN.fullmatch(token):
            return False
    return True


def url_without_login(url: str) -> str:
    """Return `url` with its login, query, fragment and parts that look like keys hidden."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return HIDDEN
    path = "/".join(part if ordinary(part) else HIDDEN for part in parts.path.split("/"))
    login = f"{HIDDEN}@" if "@" in parts.netloc else ""
    rest = f"?{HIDDEN}" if parts.query or parts.fragment else ""
    shown_host = host if ordinary(host) else HIDDEN
    return f"{parts.scheme}://{login}{shown_host}{f':{port}' if port else ''}{path}{rest}"


def without_secrets(value: Any, secrets: Iterable[str]) -> Any:
    """Return the JSON `value` with `secrets`, logins and tokens hidden in every key and text."""
    return cleaner(secrets)(value)


def cleaner(secrets: Iterable[str]) -> Callable[[Any], Any]:
    """Return a function that hides `secrets` in one value, as `without_secrets` does."""
    patterns = []
    for secret in sorted(secrets, key=lambda text: (-len(text), text)):
        everyday = _EVERYDAY.fullmatch(secret) and (secret[0] != "/" or os.path.exists(secret))  # noqa: PTH110 - unlike Path's method it never raises
        if len(secret) < _SHORT or everyday:
            continue  # hiding it would also hide ordinary text
        # The secret itself, and as Python escapes it within single or double quotes.
        quoted, among_quotes = repr(secret)[1:-1], repr(f"{secret}\"'")[1:-4]
        pattern = "|".join(map(re.escape, dict.fromkeys((secret, quoted, among_quotes))))
        if len(secret) < _LONG_SECRET:
            pattern = rf"(?<![A-Za-z0-9])(?:{pattern})(?![A-Za-z0-9])"
        patterns.append(re.compile(pattern))

    def clean_url(match: re.Match[str]) -> str:
        url = match.group()
        login = "@" in url.partition("://")[2].partition("/")[0]
        return url_without_login(url) if login or "?" in url else url

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            for pattern in patterns:
                value = pattern.sub(HIDDEN, value)
            if "://" in value:
                value = _URL.sub(clean_url, value)
            value = _TOKEN_SHAPES.sub(HIDDEN, value)
            return _AFTER_SCHEME.sub(rf"\1 {HIDDEN}", value)
        if isinstance(value, Mapping):
            return {clean(str(key)): clean(member) for key, member in value.items()}
        return [clean(member) for member in value] if isinstance(value, list | tuple) else value

    return clean


def shareable(words: Sequence[str], secrets: Iterable[str]) -> list[str]:
    """Return `words` with `(hidden)` in place of each word that may be a secret.

    Numbers, names of options, existing files and ordinary words are shown. A value is hidden if
    its option or key sounds secret, or is a single letter that is not in `_NAMING`. Code, headers,
    JSON, text that looks like a key, and text that contains one of `secrets` are hidden, too. In a
    URL, only the login, the query, the fragment and parts that look like keys are hidden.
    """
    secrets = tuple(secrets)
    # The first word is the program, which often is an existing file.
    shown = [word if _is_file(word) or ordinary(word) else HIDDEN for word in words[:1]]
    hiding, right_after, before = False, False, ""
    for word in words[1:]:
        is_option = word.startswith("-") and not _NUMBER.fullmatch(word)
        if right_after or (hiding and not is_option):
            shown.append(HIDDEN)
        else:
            shown.append(_shareable_word(word, before))
        name = word.lstrip("-")
        # A plain word may announce a secret as well: `login password 445566`.
        hides = sounds_secret(word) if name == word else _is_private(name) or word in _CODE
        right_after = "=" not in word and hides
        hiding = right_after or (hiding and not is_option)
        before = word
    clean = cleaner(secrets)
    for at, text in enumerate(shown):
        value = text.partition("=")[2]
        shown[at] = HIDDEN if text in secrets or (value and value in secrets) else clean(text)
    return shown


def shell_line(words: Sequence[str]) -> str:
    """Return `words` as one line for a shell, without quotes around words with `(hidden)`."""
    return " ".join(word if HIDDEN in word else quote(word) for word in words)


def _is_private(name: str) -> bool:
    words = _NOT_IN_NAMES.split(name.lower())
    return sounds_secret(name) or not _PRIVATE.isdisjoint(words)


def _shareable_word(word: str, before: str) -> str:
    name, equals, value = word.partition("=")
    if "://" in name:
        return url_without_login(word)
    if equals:
        return _shareable_assignment(name, value)
    if _NUMBER.fullmatch(word):
        return word
    if word.startswith("-") and not word.startswith("--"):
        harmless = len(word) <= _LONGEST_FLAG and ordinary(word[1:])
    else:
        one_letter = len(before) == 2 and before[0] == "-" and before[1].isalpha()  # noqa: PLR2004 - the dash and the letter
        harmless = _is_file(word) or ((not one_letter or before in _NAMING) and ordinary(word))
    return word if harmless else HIDDEN


def _shareable_assignment(name: str, value: str) -> str:
    if not ordinary(name.lstrip("-+~@")):
        return HIDDEN
    if _is_private(name):
        return f"{name}={HIDDEN}"
    if "=" in value:  # nested, as in --set=key=value
        inner, _, last = value.partition("=")
        return f"{name}={_shareable_assignment(inner, last)}"
    return f"{name}={_shareable_word(value, name)}"


def _is_file(word: str) -> bool:
    return ("/" in word or "." in word) and os.path.exists(word)  # noqa: PTH110 - never raises
