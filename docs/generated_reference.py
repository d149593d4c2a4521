"""A Sphinx extension that writes the tables of the reference from the rows of the code.

A page names a table in a line of its own, `<!-- generated: NAME -->`. The line is replaced while
the page is read: no file is written, and what the page says cannot differ from the code.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import reference_answers
import reference_borrowed
import reference_commands
import reference_ops
import reference_python
import reference_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

MARK = re.compile(r"^<!-- generated: ([a-z-]+) -->$", re.MULTILINE)

TABLES: dict[str, Callable[[], str]] = {
    "commands": reference_commands.commands,
    "exit-statuses": reference_commands.exit_statuses,
    "answers": reference_answers.answers,
    "borrowed": reference_borrowed.borrowed,
    "public-names": reference_python.public_names,
    "parts-of-answers": reference_python.parts_of_answers,
    "profile-keys": reference_rows.profile_keys,
    "knobs": reference_rows.knobs,
    "phases": reference_rows.phases,
    "obstacles": reference_rows.obstacles,
    "needs": reference_rows.needs,
    "outcomes": reference_rows.outcomes,
    "allowed-variables": reference_rows.allowed_variables,
    "useless-variables": reference_rows.variables_without_effect,
    "trace-tables": reference_rows.trace_tables,
    "torch-version": reference_ops.torch_version,
    "nondeterministic-profiles": reference_ops.profiles,
    "nondeterministic-ops": reference_ops.refused_ops,
    "slower-ops": reference_ops.slower_ops,
    "replaced-ops": reference_ops.replaced_ops,
}
"""Every table, by the name that a page gives."""


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
    app.connect("missing-reference", reference_python.link_short_names)
    app.connect("autodoc-process-docstring", reference_python.drop_words_of_python)
    return {"parallel_read_safe": True}
