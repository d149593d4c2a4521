"""Shows an answer in a step of GitHub Actions: at the line in the pull request, and as a summary.

https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrepro.ground.console import Part, as_text
from torchrepro.ground.redaction import cleaner
from torchrepro.manifest.contents import known_secrets

_ESCAPED: dict[str, str | int | None] = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_ESCAPED_IN_PROPERTY = {**_ESCAPED, ":": "%3A", ",": "%2C"}
_FENCE = re.compile("`{3,}")

SOURCES = (("origin", "where"), ("first", "source"), ("numbers", "where", "source"))
"""Keys of an answer that name a line of the program, as ``file:line``, the best first."""


def show_in_step(answer: Mapping[str, Any], shown: Sequence[Part], *, passed: bool) -> None:
    """Annotate the line of an answer that is no, and add the answer to the summary of the step.

    Writes one workflow command to stderr, and appends Markdown to the file that GitHub names. Does
    nothing outside of GitHub Actions. Secrets are hidden.
    """
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return
    text = cleaner(known_secrets())(as_text(*shown)).strip()
    if not passed:
        sys.stderr.write(annotation(text, line_of(answer)) + "\n")
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        fence = max((*_FENCE.findall(text), "``"), key=len) + "`"
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(f"### torchrepro\n\n{fence}text\n{text}\n{fence}\n")


def annotation(text: str, source: str) -> str:
    """Return the workflow command that shows `text` at `source`, a text such as ``file:line``."""
    title, _, rest = text.partition("\n")
    properties = {"title": title}
    path, _, number = source.rpartition(":")
    root = Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd()).resolve()
    if path and Path(path).resolve().is_relative_to(root):
        file = Path(path).resolve().relative_to(root).as_posix()
        properties = {"file": file, "line": number, **properties}
    listed = ",".join(
        f"{name}={_escaped(value, _ESCAPED_IN_PROPERTY)}" for name, value in properties.items()
    )
    return f"::error {listed}::{_escaped(rest or title, _ESCAPED)}"


def line_of(answer: Mapping[str, Any]) -> str:
    """Return the line of the program that an answer names, or an empty text."""
    for keys in SOURCES:
        value: Any = answer
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, str) and value:
            return value
    return ""


def _escaped(text: str, table: dict[str, str | int | None]) -> str:
    return text.translate(str.maketrans(table))
