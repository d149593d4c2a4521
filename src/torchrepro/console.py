"""Tables and lines for people: as text, as HTML, on a terminal; and every line on standard error.

A table that is wider than the terminal is shown as records, one block of ``name: value`` lines for
each row, so no column is lost. Text has one line for each row of a table, however long, as what
reads a pipe expects it. Colours appear only on a terminal. rich is imported when something is
rendered, so a table can be made by whoever has something to show.
"""

from __future__ import annotations

import io
import re
import sys
from functools import cache, singledispatch
from itertools import zip_longest
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.messages import ends_in_line_number, printable, shortened
from torchrepro.verbosity import Verbosity, verbosity

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import TextIO, TypeAlias

    Part: TypeAlias = "Table | str"

_WIDE = 200  # columns of a page, which can be scrolled
_GAP = "  "  # between two columns
_PROSE = 24  # columns that a text of several words needs at least
_WORD = re.compile(r"\S+")
_INDENTS = ("", "  ", "    ")  # of the first line of a record, of its others, and of what goes on


class Styled(NamedTuple):
    """The text of a cell, with the style in which a terminal shows it."""

    text: str
    style: str


class Table(NamedTuple):
    """A plain table."""

    headings: tuple[str, ...]
    """Empty for a list of labels and texts, which has no headings."""

    rows: tuple[tuple[str | Styled, ...], ...]
    fold: int
    """The column that takes several lines where a terminal has no room."""

    first_style: str = ""
    """The style of the first column."""


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]], fold: int = -1) -> Table:
    """Return a table; the column `fold` takes several lines where a terminal has no room."""
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


def note(*lines: object) -> None:
    """Tell standard error what is neither an error nor lowers a guarantee; nothing if quiet."""
    if verbosity() is not Verbosity.QUIET:
        say(*lines)


@cache
def say_once(line: str) -> None:
    """Tell standard error a line the first time that this process has it to say."""
    say(line)


def show(*parts: Part) -> None:
    """Print tables and lines to standard output, with colours if it is a terminal."""
    _show(sys.stdout, parts)


def show_aside(*parts: Part) -> None:
    """Print tables and lines to standard error, where there is one."""
    if sys.stderr is not None:
        _show(sys.stderr, parts)


def _show(stream: TextIO, parts: Iterable[Part]) -> None:
    if stream.isatty():
        console = _rich()(stderr=stream is sys.stderr)
        _print(console, parts, console.width)
    else:
        stream.write(as_text(*parts) + "\n")


def as_text(*parts: Part) -> str:
    """Return tables and lines as plain text, without trailing blanks: one line for each row."""
    return "\n".join(_plain_lines(parts, inf))


def as_html(*parts: Part) -> str:
    """Return tables and lines as HTML, as a notebook shows them."""
    console = _rich()(record=True, file=io.StringIO(), width=_WIDE)
    _print(console, parts, _WIDE)
    html: str = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
    return html


def height(columns: int, *parts: Part) -> int:
    """Return how many lines tables and lines take on a terminal of so many columns."""
    lengths = map(_width, _plain_lines(parts, columns))
    return sum(max(1, -(-length // columns)) for length in lengths)


def _plain_lines(parts: Iterable[Part], room: float) -> list[str]:
    stream = io.StringIO()
    _print(_rich()(file=stream, width=_WIDE, no_color=True), parts, room)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


@cache
def _rich() -> Any:
    import random

    state = random.getstate()  # rich draws from the global generator while it is imported
    from rich.console import Console

    random.setstate(state)
    return Console


def _print(console: Any, parts: Iterable[Part], room: float) -> None:
    """Print tables within so many columns; a terminal breaks other lines by itself."""
    for part in parts:
        lines = [_text(part)] if isinstance(part, str) else _laid_out(part, console, room)
        for line in lines:
            console.print(line, highlight=False, soft_wrap=True)


def _laid_out(table: Table, console: Any, room: float) -> Iterator[Any]:
    """Return the lines of a table as a grid, or as records where it has no room as a grid."""
    headings = table.headings or ("", "")
    columns = list(zip(headings, *(map(_plain, row) for row in table.rows), strict=True))
    widths = [max(map(_width, "\n".join(cells).split("\n"))) for cells in columns]
    left = room - sum(widths) + widths[table.fold] - len(_GAP) * (len(widths) - 1)
    longest = max(map(_width, " ".join(columns[table.fold]).split()), default=0)
    if table.headings and left < min(widths[table.fold], max(_PROSE, longest)):
        return _records(table, console, room)
    if left < widths[table.fold]:
        widths[table.fold] = max(int(left), min(widths[table.fold], _PROSE))
    return _grid(table, console, widths)


def _grid(table: Table, console: Any, widths: Sequence[int]) -> Iterator[Any]:
    from rich.text import Text

    heading = tuple(Styled(each, "bold") for each in table.headings)
    for row in (heading, *table.rows) if heading else table.rows:
        first = Styled(_plain(row[0]), table.first_style) if table.first_style else row[0]
        cells = [
            _broken(_text(cell), console, width)
            for cell, width in zip((first, *row[1:]), widths, strict=True)
        ]
        for pieces in zip_longest(*cells, fillvalue=Text()):
            line = Text()
            for piece, width in zip(pieces, widths, strict=True):
                line.append_text(piece).append(" " * (width - piece.cell_len) + _GAP)
            line.rstrip()
            yield line


def _records(table: Table, console: Any, room: float) -> Iterator[Any]:
    """Return a block for each row: a line for each cell that is not empty, with its heading."""
    from rich.text import Text

    first, other, further = _INDENTS
    for row in table.rows:
        indent = first
        for heading, cell in zip(table.headings, row, strict=True):
            if not _plain(cell):
                continue
            label = Text(f"{printable(heading)}: " if heading else "", "bold")
            text = Text("").append_text(label).append_text(_text(cell))
            for line in _broken(text, console, int(room) - len(further)):
                yield Text(indent).append_text(line)
                indent = further
            indent = other


def _broken(text: Any, console: Any, width: int) -> list[Any]:
    """Return a text as lines of so many columns, broken between words.

    A longer word is left to the terminal, from which it is copied whole. A longer ``file:line`` is
    cut in the middle instead, so that its line number is seen where the file is named.
    """
    for word in reversed(list(_WORD.finditer(text.plain))):
        if _width(word[0]) > width and ends_in_line_number(word[0]):
            start, end = word.span()
            short = shortened(word[0], width)
            text = text[:start].append(short, text.get_style_at_offset(console, start)) + text[end:]
    return [piece for line in text.split(allow_blank=True) for piece in _pieces(line, width)]


def _pieces(line: Any, width: int) -> list[Any]:
    """Return a line as pieces of so many columns, each of which has at least one word."""
    breaks, start = [], -1
    for word in _WORD.finditer(line.plain):
        if start >= 0 and _width(line.plain[start : word.end()]) > width:
            breaks.append(word.start())
        if start < 0 or breaks[-1:] == [word.start()]:
            start = word.start() if breaks else 0
    pieces = list(line.divide(breaks))
    for piece in pieces:
        piece.rstrip()
    return pieces


def _width(text: str) -> int:
    """Return how many columns a line takes."""
    from rich.cells import cell_len

    return cell_len(text)


def _plain(cell: str | Styled) -> str:
    """Return the text of a cell: what others wrote must not steer the terminal that shows it."""
    if isinstance(cell, Styled):
        return cell.text
    return "\n".join(map(printable, cell.split("\n")))


def _text(cell: str | Styled) -> Any:
    from rich.text import Text

    return Text(_plain(cell), cell.style if isinstance(cell, Styled) else "")
