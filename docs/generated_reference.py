"""A Sphinx extension that writes the tables of the reference from the rows of the code.

A page names a table in a line of its own, `<!-- generated: NAME -->`. The line is replaced while
the page is read: no file is written, and what the page says cannot differ from the code.
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING

import torchrepro

if TYPE_CHECKING:
    from collections.abc import Callable

    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

MARK = re.compile(r"^<!-- generated: ([a-z-]+) -->$", re.MULTILINE)


def public_names() -> str:
    """Return the documentation of every public name: functions, classes, exceptions."""
    kinds: dict[str, list[str]] = {"Functions": [], "Classes": [], "Exceptions": []}
    for name in torchrepro.__all__:
        value = getattr(torchrepro, name)
        if not inspect.isclass(value):
            kinds["Functions"].append(f".. autofunction:: torchrepro.{name}")
        elif issubclass(value, Exception):
            kinds["Exceptions"].append(
                f".. autoexception:: torchrepro.{name}\n   :show-inheritance:"
            )
        else:
            kinds["Classes"].append(f".. autoclass:: torchrepro.{name}\n   :members:")
    return "\n\n".join(
        f"## {kind}\n\n```{{eval-rst}}\n" + "\n\n".join(entries) + "\n```"
        for kind, entries in kinds.items()
    )


TABLES: dict[str, Callable[[], str]] = {"public-names": public_names}


def write_tables(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace the marks in the text of a page."""
    source[0] = MARK.sub(lambda mark: TABLES[mark[1]](), source[0])


def pages_with_tables(app: Sphinx, env: BuildEnvironment, *_: object) -> list[str]:
    """Return the pages to read again in each build, whether their file has changed or not."""
    return [
        page
        for page in env.found_docs
        if MARK.search(env.doc2path(page).read_text(encoding="utf-8"))
    ]


def setup(app: Sphinx) -> dict[str, bool]:
    """Tell Sphinx of the extension."""
    app.connect("source-read", write_tables)
    app.connect("env-get-outdated", pages_with_tables)
    return {"parallel_read_safe": True}
