"""Tables and lines for people, and how much is said: as text, as HTML, on a terminal.

A table that is wider than the terminal is shown as records, one block of ``name: value`` lines for
each row, so no column is lost. Text has one line for each row of a table, however long, as what
reads a pipe expects it; a label's text is prose, and has several. Colours appear only on a
terminal. rich is imported when something is rendered, so a table can be made by whoever has
something to show.
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

from torchrepro.ground.messages import ends_in_line_number, printable, shortened

_UNBOUNDED = 10**9  # columns
_PROSE_LINE = 100  # columns of a label with its text, however wide the terminal is
_PAGE = 200  # columns of a page, which can be scrolled
_GAP = 2  # columns between two columns of a table
_PROSE = 24  # columns that a text of several words needs at least
_WORD = re.compile(r"\S+")


class Styled(NamedTuple):
    """The text of a cell, with the style in which a terminal shows it."""

    text: str
    style: str


class UnbrokenText(str):
    """The text of a cell that is copied in one piece, such as a command, and so never folded."""

    __slots__ = ()


class Table(NamedTuple):
    """A plain table."""

    headings: tuple[str, ...]  # empty for a list of labels and texts, which has no headings
    rows: tuple[tuple[str | Styled, ...], ...]
    fold: int  # the column that takes several lines where a terminal has no room
    first_style: str = ""  # the style of the first column


Part: TypeAlias = Table | str


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


class Verbosity(StrEnum):
    """How much is said."""

    QUIET = "quiet"  # errors, and a guarantee that is lowered

    NORMAL = "normal"  # one line, and what needs attention

    VERBOSE = "verbose"  # every knob


VARIABLES: Mapping[Verbosity, str] = {
    Verbosity.VERBOSE: "TORCHREPRO_VERBOSE",
    Verbosity.QUIET: "TORCHREPRO_QUIET",
}
"""The variable that asks for each, the one that wins first; empty and 0 ask for nothing."""


def verbosity() -> Verbosity:
    """Return how much is to be said in this process."""
    asked = (each for each, name in VARIABLES.items() if os.environ.get(name, "") not in ("", "0"))
    return next(asked, Verbosity.NORMAL)


def environment_for(wanted: Verbosity) -> dict[str, str]:
    """Return the variables by which a process and all that it starts say as much as is `wanted`."""
    return {name: str(int(each is wanted)) for each, name in VARIABLES.items()}


def say(*lines: object) -> None:
    """Write each of `lines` to standard error, unless it is closed, as in some services."""
    for line in lines if sys.stderr is not None else ():
        sys.stderr.write(f"torchrepro: {line}\n")


def note(*lines: object) -> None:
    """Say what is neither an error nor lowers a guarantee; nothing if quiet."""
    if verbosity() is not Verbosity.QUIET:
        say(*lines)


@cache
def say_once(line: str) -> None:
    """Say a line the first time that this process has it to say."""
    say(line)


def show(*parts: Part) -> None:
    """Print tables and lines to standard output, with colours if it is a terminal."""
    _show(sys.stdout, parts)


def show_aside(*parts: Part) -> None:
    """Print tables and lines to standard error, where there is one."""
    if sys.stderr is not None:
        _show(sys.stderr, parts)


def _show(stream: TextIO, parts: Sequence[Part]) -> None:
    text = _printed(_rich()(file=stream), parts) if stream.isatty() else as_text(*parts)
    stream.write(f"{text}\n")


def as_text(*parts: Part) -> str:
    """Return tables and lines as plain text, without trailing blanks: one line for each row."""
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

    state = random.getstate()  # rich draws from the global generator while it is imported
    from rich.console import Console

    random.setstate(state)
    return Console


def _printed(console: Any, parts: Iterable[Part]) -> str:
    with console.capture() as captured:
        _print(console, parts)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _print(console: Any, parts: Iterable[Part]) -> None:
    # What is wider than `room` is broken by the terminal, not by rich.
    room, console.width = console.width, _UNBOUNDED
    for part in parts:
        for each in [_text(part)] if isinstance(part, str) else _laid_out(part, console, room):
            console.print(each, highlight=False)


def _laid_out(table: Table, console: Any, room: int) -> Iterator[Any]:
    import rich.table
    from rich.measure import Measurement
    from rich.text import Text

    if not table.headings:
        room = min(room, _PROSE_LINE)
    rows = [list(map(_text, row)) for row in table.rows]
    for row in rows if table.first_style else ():
        row[0].style = table.first_style
    headings = [Text(heading, "bold") for heading in table.headings]
    shown = [headings, *rows] if headings else rows
    if not shown:
        return
    measured = [
        [Measurement.get(console, console.options, cell) for cell in column]
        for column in zip(*shown, strict=True)
    ]
    widths = [max(each.maximum for each in column) for column in measured]
    fold = table.fold
    left = room - sum(widths) + widths[fold] - _GAP * (len(widths) - 1)
    longest_word = max(each.minimum for each in measured[fold])
    if not headings or left >= min(widths[fold], max(_PROSE, longest_word)):
        width = max(left, min(widths[fold], _PROSE))
        grid = rich.table.Table.grid(padding=(0, _GAP, 0, 0))
        for row in shown:
            if not row[fold].no_wrap:
                row[fold] = Text("\n").join(_broken(row[fold], console, width))
            grid.add_row(*row)
        yield grid
        return
    first, other, further = "", "  ", "    "  # indents of lines of a record, and of what goes on
    for row in rows:
        indent = first
        for heading, cell in zip(headings, row, strict=True):
            label = Text.assemble(heading, ": ", style="bold") if heading else Text()
            for line in _broken(label + cell, console, room - len(further)) if cell else ():
                yield Text.assemble(indent, line)
                indent = further
            indent = other if cell else indent


def _broken(text: Any, console: Any, width: int) -> Iterator[Any]:
    """Yield a text as lines of so many columns, broken between words.

    A longer word is left to the terminal, from which it is copied in one piece; rich would fold it.
    A longer ``file:line`` is cut in the middle, so that its line number is seen.
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
    # What others wrote must not steer the terminal.
    text = "\n".join(map(printable, cell.split("\n")))
    return Text(text, no_wrap=isinstance(cell, UnbrokenText) or None)
