"""Print tables and lines for people, as plain text, as HTML or on a terminal.

If a table is wider than the terminal, each row is printed as a block of ``name: value`` lines, so
that no column is lost. Plain text has one line for each row of a table, however long, so that
programs can parse it; only prose beside a label is wrapped. Colours appear only on a terminal.
rich is imported at the first output, so a `Table` can be made without importing it.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cache, singledispatch
from typing import Any, NamedTuple, TextIO, TypeAlias

from torchrepro.ground.errors import ends_in_line_number, printable, shortened

_UNBOUNDED = 10**9  # columns
_PROSE_LINE = 100  # the most columns of a label and its text
_PAGE = 200  # columns of a page, which can be scrolled
_GAP = 2  # columns between two columns of a table
_PROSE = 24  # the fewest columns for a text of several words
_WORD = re.compile(r"\S+")


class Styled(NamedTuple):
    """The text of a cell, and its style on a terminal."""

    text: str
    style: str


class UnbrokenText(str):
    """The text of a cell that is never wrapped, because users copy it, such as a command."""

    __slots__ = ()


class Table(NamedTuple):
    """The content of a table, before it is printed."""

    headings: tuple[str, ...]  # empty for a list of labels and texts
    rows: tuple[tuple[str | Styled, ...], ...]
    fold: int  # the column that is wrapped if the terminal is too narrow
    first_style: str = ""  # the style of the first column


Part: TypeAlias = Table | str


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]], fold: int = -1) -> Table:
    """Return a table; on a narrow terminal, the column `fold` (by default the last) is wrapped."""
    cells = (tuple(c if isinstance(c, Styled) else str(c) for c in row) for row in rows)
    return Table(tuple(headings), tuple(cells), len(headings) - 1 if fold < 0 else fold)


def listing(rows: Iterable[Sequence[str]], style: str = "") -> Table:
    """Return a table without headings; each row is a label, shown in `style`, and a text."""
    return Table((), tuple(map(tuple, rows)), fold=1, first_style=style)


@singledispatch
def parts(value: Any) -> tuple[Part, ...]:
    """Return the tables and lines that show `value`.

    The module of a class registers the implementation for this class with `parts.register`.
    """
    return (repr(value),)


class Displayed:
    """A value whose text and HTML come from `parts`.

    A notebook calls `_repr_html_`:
    https://ipython.readthedocs.io/en/stable/config/integrating.html
    """

    __slots__ = ()

    def __str__(self) -> str:
        return as_text(*parts(self))

    def _repr_html_(self) -> str:
        return as_html(*parts(self))


class Verbosity(StrEnum):
    """How much torchrepro prints."""

    QUIET = "quiet"  # errors, and a lowered guarantee

    NORMAL = "normal"  # one line, and what needs attention

    VERBOSE = "verbose"  # every knob


VARIABLES: Mapping[Verbosity, str] = {
    Verbosity.VERBOSE: "TORCHREPRO_VERBOSE",
    Verbosity.QUIET: "TORCHREPRO_QUIET",
}
"""Each level's environment variable. The first set variable wins. Empty and 0 mean not set."""


def verbosity() -> Verbosity:
    """Return the verbosity of this process."""
    for level, name in VARIABLES.items():
        if os.environ.get(name, "") not in ("", "0"):
            return level
    return Verbosity.NORMAL


def environment_for(wanted: Verbosity) -> dict[str, str]:
    """Return the variables that set the verbosity `wanted` for a process and its children."""
    return {name: str(int(level is wanted)) for level, name in VARIABLES.items()}


def say(*lines: object) -> None:
    """Write each of `lines` to standard error; do nothing if it is closed, as in some services."""
    if sys.stderr is not None:
        for line in lines:
            sys.stderr.write(f"torchrepro: {line}\n")


def note(*lines: object) -> None:
    """Write `lines` as `say` does, except in quiet mode; for lines that only inform."""
    if verbosity() is not Verbosity.QUIET:
        say(*lines)


@cache
def say_once(line: str) -> None:
    """Write `line` as `say` does, but only at the first call with this text in a process."""
    say(line)


def show(*parts: Part) -> None:
    """Print tables and lines to standard output, with colours if it is a terminal."""
    _show(sys.stdout, parts)


def show_aside(*parts: Part) -> None:
    """Print tables and lines to standard error; do nothing if it is closed."""
    if sys.stderr is not None:
        _show(sys.stderr, parts)


def _show(stream: TextIO, parts: Sequence[Part]) -> None:
    text = _printed(_rich()(file=stream), parts) if stream.isatty() else as_text(*parts)
    stream.write(f"{text}\n")


def as_text(*parts: Part) -> str:
    """Return tables and lines as plain text, one line for each row, without trailing spaces."""
    return _printed(_rich()(file=io.StringIO(), color_system=None, width=_UNBOUNDED), parts)


def as_html(*parts: Part) -> str:
    """Return tables and lines as HTML, as a notebook shows them."""
    console = _rich()(file=io.StringIO(), record=True, width=_PAGE)
    _print(console, parts)
    html: str = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
    return html


@cache
def _rich() -> Any:
    import random

    state = random.getstate()  # the import of rich draws from the global generator
    from rich.console import Console

    random.setstate(state)
    return Console


def _printed(console: Any, parts: Iterable[Part]) -> str:
    with console.capture() as captured:
        _print(console, parts)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _print(console: Any, parts: Iterable[Part]) -> None:
    # The terminal wraps lines that are wider than `room`; rich must not.
    room, console.width = console.width, _UNBOUNDED
    for part in parts:
        lines = [_text(part)] if isinstance(part, str) else _laid_out(part, console, room)
        for line in lines:
            console.print(line, highlight=False)


def _laid_out(table: Table, console: Any, room: int) -> Iterator[Any]:
    """Yield a table as a grid if it fits into `room` columns, else as one record for each row."""
    import rich.table
    from rich.measure import Measurement
    from rich.text import Text

    if not table.headings:
        room = min(room, _PROSE_LINE)
    rows = [list(map(_text, row)) for row in table.rows]
    if table.first_style:
        for row in rows:
            row[0].style = table.first_style
    headings = [Text(heading, "bold") for heading in table.headings]
    shown = [headings, *rows] if headings else rows
    if not shown:
        return
    measured = [
        [Measurement.get(console, console.options, cell) for cell in column]
        for column in zip(*shown, strict=True)
    ]
    widths = [max(cell.maximum for cell in column) for column in measured]
    fold = table.fold
    fold_room = room - sum(widths) + widths[fold] - _GAP * (len(widths) - 1)
    longest_word = max(cell.minimum for cell in measured[fold])
    if not headings or fold_room >= min(widths[fold], max(_PROSE, longest_word)):
        width = max(fold_room, min(widths[fold], _PROSE))
        grid = rich.table.Table.grid(padding=(0, _GAP, 0, 0))
        for row in shown:
            if not row[fold].no_wrap:
                row[fold] = Text("\n").join(_broken(row[fold], console, width))
            grid.add_row(*row)
        yield grid
        return
    first_field, next_field, continuation = "", "  ", "    "  # indents within a record
    for row in rows:
        indent = first_field
        for heading, cell in zip(headings, row, strict=True):
            if not cell:
                continue
            label = Text.assemble(heading, ": ", style="bold") if heading else Text()
            for line in _broken(label + cell, console, room - len(continuation)):
                yield Text.assemble(indent, line)
                indent = continuation
            indent = next_field


def _broken(text: Any, console: Any, width: int) -> Iterator[Any]:
    """Yield a text as lines of at most `width` columns, broken between words.

    A word longer than `width` stays whole, so that users can copy it. rich would break the word.
    Only a ``file:line`` is cut in the middle, so that its line number stays visible.
    """
    from rich.cells import cell_len

    for word in reversed(list(_WORD.finditer(text.plain))):
        if cell_len(word[0]) > width and ends_in_line_number(word[0]):
            start, end = word.span()
            short = shortened(word[0], width)
            text = text[:start].append(short, text.get_style_at_offset(console, start)) + text[end:]
    for line in text.split(allow_blank=True):
        breaks, start, empty = [], 0, True
        for word in _WORD.finditer(line.plain):
            if not empty and cell_len(line.plain[start : word.end()]) > width:
                start = word.start()
                breaks.append(start)
            empty = False
        for piece in line.divide(breaks):
            piece.rstrip()
            yield piece


def _text(cell: str | Styled) -> Any:
    from rich.text import Text

    if isinstance(cell, Styled):
        return Text(cell.text, cell.style)
    # The text may come from a file or a program, and must not control the terminal.
    text = "\n".join(map(printable, cell.split("\n")))
    return Text(text, no_wrap=isinstance(cell, UnbrokenText) or None)
