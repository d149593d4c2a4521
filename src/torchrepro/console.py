"""Tables and lines for people: as text, as HTML, on a terminal; and every line on standard error.

Colours appear only on a terminal, and nothing is cut off anywhere else. rich is imported when
something is rendered, so a table can be made by whoever has something to show.
"""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from functools import cache, singledispatch
from typing import TYPE_CHECKING, Any

from torchrepro.messages import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import TextIO, TypeAlias

    Part: TypeAlias = "Table | str"

_WIDE = 200  # columns where no terminal says how many there are


@dataclass(frozen=True, slots=True)
class Styled:
    """The text of a cell, with the style in which a terminal shows it."""

    text: str
    style: str


@dataclass(frozen=True, slots=True)
class Table:
    """A plain table."""

    headings: tuple[str, ...]
    """Empty for a list of labels and texts, which has no headings."""

    rows: tuple[tuple[str | Styled, ...], ...]
    fold: int
    """The column that takes several lines where there is no room."""

    first_style: str = ""
    """The style of the first column."""


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]], fold: int = -1) -> Table:
    """Return a table; the column `fold` takes several lines where there is no room."""
    cells = (tuple(c if isinstance(c, Styled) else str(c) for c in row) for row in rows)
    return Table(tuple(headings), tuple(cells), len(headings) - 1 if fold < 0 else fold)


def listing(rows: Iterable[Sequence[str]], style: str = "") -> Table:
    """Return rows of a label, which has this style, and a text, without headings."""
    return Table((), tuple(map(tuple, rows)), fold=1, first_style=style)


@singledispatch
def parts(value: Any) -> tuple[Part, ...]:
    """Return the tables and lines that show `value`.

    Whoever makes values of a class registers how they are rendered.
    """
    return (repr(value),)


class Displayed:
    """A value that shows itself as `parts` says.

    A notebook asks for `_repr_html_`:
    https://ipython.readthedocs.io/en/stable/config/integrating.html
    """

    __slots__ = ()

    def __str__(self) -> str:
        return as_text(*parts(self))

    def _repr_html_(self) -> str:
        return as_html(*parts(self))


def say(*lines: object) -> None:
    """Tell standard error each of `lines`, where there is one: `pythonw` has none."""
    for line in lines if sys.stderr is not None else ():
        sys.stderr.write(f"torchrepro: {line}\n")


def show(*parts: Part) -> None:
    """Print tables and lines to standard output, with colours if it is a terminal."""
    _show(sys.stdout, parts)


def show_aside(*parts: Part) -> None:
    """Print tables and lines to standard error, where there is one."""
    if sys.stderr is not None:
        _show(sys.stderr, parts)


def _show(stream: TextIO, parts: Iterable[Part]) -> None:
    if stream.isatty():
        _print(_rich()(stderr=stream is sys.stderr), parts)
    else:
        stream.write(as_text(*parts) + "\n")


def as_text(*parts: Part) -> str:
    """Return tables and lines as plain text, without trailing blanks."""
    stream = io.StringIO()
    _print(_rich()(file=stream, width=_WIDE, no_color=True), parts)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def as_html(*parts: Part) -> str:
    """Return tables and lines as HTML, as a notebook shows them."""
    console = _rich()(record=True, file=io.StringIO(), width=_WIDE)
    _print(console, parts)
    html: str = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
    return html


def height(columns: int, *parts: Part) -> int:
    """Return how many lines tables and lines take on a terminal of so many columns."""
    stream = io.StringIO()
    _print(_rich()(file=stream, width=columns, no_color=True), parts)
    from rich.cells import cell_len

    lines = (cell_len(line.rstrip()) for line in stream.getvalue().splitlines())
    return sum(max(1, -(-length // columns)) for length in lines)


@cache
def _rich() -> Any:
    import random

    state = random.getstate()  # rich draws from the global generator while it is imported
    from rich.console import Console

    random.setstate(state)
    return Console


def _print(console: Any, parts: Iterable[Part]) -> None:
    for part in parts:
        if isinstance(part, str):
            console.print(_text(part), highlight=False, soft_wrap=True)
        else:
            console.print(_grid(part), highlight=False)


def _grid(table: Table) -> Any:
    from rich.table import Table as Grid

    grid = Grid(
        box=None,
        pad_edge=False,
        header_style="bold",
        show_edge=False,
        show_header=bool(table.headings),
    )
    for position, heading in enumerate(table.headings or ("", "")):
        grid.add_column(heading, no_wrap=position != table.fold, overflow="fold")
    grid.columns[0].style = table.first_style
    for row in table.rows:
        grid.add_row(*map(_text, row))
    return grid


def _text(cell: str | Styled) -> Any:
    """Return the text of a cell: what others wrote must not steer the terminal that shows it."""
    from rich.text import Text

    if isinstance(cell, Styled):
        return Text(cell.text, cell.style)
    return Text("\n".join(map(printable, cell.split("\n"))))
