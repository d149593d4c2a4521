"""Nondeterministic functions of libraries (in `libraries.yaml`), and suggested edits of calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from torchrepro.profile.document import LOADER
from torchrepro.verdict.program_text import module_of

if TYPE_CHECKING:
    from torchrepro.verdict.program_text import Module, Node
    from torchrepro.verdict.value import Edit


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryRow:
    """A library function whose result may differ between runs, and the remedy."""

    function: str  #: Patterns of `fnmatch` for ``package.Class.function``.
    leaves_open: str  #: What varies, as in ``the order of the groups``.
    how: str  #: The type of `remedy`, such as ``keyword``; the table explains all types.
    remedy: str
    edited: str = ""  #: Patterns of the functions whose calls are edited; `function` by default.
    documentation: str

    @property
    def package(self) -> str:
        return self.function.partition(".")[0]

    def edits(self, function: str) -> bool:
        return _fits(function, self.edited or self.function.rpartition(".")[2])


def _fits(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns.split())


def table_of(name: str) -> Mapping[str, Any]:
    """Return the contents of a YAML file of this folder."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return dict(yaml.load(text, LOADER))  # noqa: S506 - safe


_ROWS = table_of("libraries.yaml").items()
LIBRARIES = tuple(LibraryRow(function=function, **row) for function, row in _ROWS)


def library_row(called: str) -> LibraryRow | None:
    """Return the first row that matches a function such as ``polars.DataFrame.group_by``, or None.

    For an object that is called or iterated, `called` ends in ``__call__`` or ``__iter__``.
    """
    return next((row for row in LIBRARIES if _fits(called, row.function)), None)


def edits_of(row: LibraryRow, location: str) -> Iterator[Edit]:
    """Yield edits that make the call at ``file:line`` repeatable, the likeliest first.

    An edit may change another line of the file, such as the line that creates the called object.
    The file is valid Python after each edit. Yields nothing if no call accepts the remedy.
    """
    file, _, number = location.rpartition(":")
    module = module_of(file)
    insertions = _insertions(row, module, int(number)) if number.isdecimal() else ()
    edits = (module.edit(node, text, start) for node, start, text in insertions)
    yield from filter(None, edits)


def _insertions(row: LibraryRow, module: Module, at: int) -> Iterator[tuple[Node, int, str]]:
    """Yield (node, column, text): `text` replaces the source from `column` to the node's end."""
    for call in _edited_calls(row, module, at):
        end = call.end_col_offset or 0
        if row.how == "keyword":
            name, _, value = row.remedy.partition("=")
            existing = [keyword.value for keyword in call.keywords if keyword.arg == name]
            for old in existing:
                if old.lineno == old.end_lineno:
                    yield old, old.col_offset, value
            if existing:
                continue
            for comma in (", ", ""):  # one of the two is valid Python
                yield call, end - 1, f"{comma}{row.remedy})"
        elif row.how == "function" and isinstance(call.func, ast.Attribute):
            yield call.func, (call.func.end_col_offset or 0) - len(call.func.attr), row.remedy
        elif row.how == "after_making":
            for node in module.nodes:
                if isinstance(node, ast.Assign) and node.value is call:
                    yield node, end, f"; {row.remedy.format(ast.unparse(node.targets[0]))}"
    if row.how != "after_import":
        return
    for node in module.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported = ast.unparse(node).split()[1]  # the first, if the line imports several
            if imported.rstrip(",").partition(".")[0] == row.package:
                yield node, node.end_col_offset or 0, f"; {row.remedy}"


def _edited_calls(row: LibraryRow, module: Module, at: int) -> list[ast.Call]:
    """Return the calls that `row` edits. Calls on or above line `at` come first, nearest first."""
    calls = [node for node in module.nodes if isinstance(node, ast.Call)]
    return sorted(
        (call for call in calls if row.edits(module.called(call))),
        key=lambda call: (call.lineno > at, max(at - (call.end_lineno or 0), call.lineno - at, 0)),
    )
