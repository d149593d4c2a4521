"""Markdown from plain text and from rows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from sphinx.pycode import ModuleAnalyzer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ADDRESS = re.compile(r"https?://[^\s,;()]+")
_CODE = re.compile(r"(``?[^`]+``?)")


def prose(text: str) -> str:
    """Return plain text, in which only `code` is marked up, as Markdown that shows it as it is."""
    parts = _CODE.split(" ".join(text.split()))
    return "".join(
        part if at % 2 else re.sub(r"([\\*_<\[\]])", r"\\\1", part) for at, part in enumerate(parts)
    )


def code(text: object) -> str:
    """Return text as code, backticks included."""
    words = str(text)
    return f"`` {words} ``" if "`" in words else f"`{words}`"


def linked(text: str) -> str:
    """Return plain text with its addresses as links."""
    found = ADDRESS.findall(text)
    words = [prose(part) for part in ADDRESS.split(text)]
    links = [f"<{address}>" for address in found]
    return "".join(piece for pair in zip(words, [*links, ""], strict=True) for piece in pair)


def records(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a list of labels with their text, without those that have none."""
    return "\n".join(f"- **{label}**: {text}" for label, text in pairs if text)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose cells are Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )


def attribute_docs(module: str) -> dict[tuple[str, str], str]:
    """Return what a module says of its variables and of the attributes of its classes.

    The key is the class, empty for the module itself, and the name. An attribute is described by
    the string below it, which Python itself throws away.
    """
    analyzer = ModuleAnalyzer.for_module(module)
    return {
        key: " ".join(" ".join(text).split()) for key, text in analyzer.find_attr_docs().items()
    }
