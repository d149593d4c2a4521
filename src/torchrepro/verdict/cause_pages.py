"""The pages of `docs/causes`, which explain each cause that a verdict can name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_FOLDER = Path(__file__).parent.parent / "causes"
_COMMENTS = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)


class CausePage(NamedTuple):
    """A page about one cause, as Markdown without comments."""

    cause_id: str
    title: str
    text: str


def cause_pages() -> Mapping[str, CausePage]:
    """Return the page of each cause by the name of the cause, in alphabetical order."""
    pages = {}
    for path in sorted(_FOLDER.glob("*.md")):
        text = _COMMENTS.sub("", path.read_text(encoding="utf-8"))
        title = text.partition("\n")[0].removeprefix("# ")
        pages[path.stem] = CausePage(path.stem, title, text)
    return {name: page for name, page in pages.items() if name != "index"}
