"""Tables for people: colours only on a terminal, nothing cut off anywhere else."""

from __future__ import annotations

import io
import os
import random
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchrepro.knobs.catalogue import knobs_by_name
from torchrepro.messages import printable, shown, some
from torchrepro.report import Outcome

_state = random.getstate()  # rich draws from the global generator while it is imported
from rich.console import Console  # noqa: E402
from rich.filesize import decimal  # noqa: E402
from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402

random.setstate(_state)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torchrepro.policies.effects import Effect
    from torchrepro.report import Drift, Report, Row

STYLES = {
    "applied": "green",
    "unchanged": "dim",
    "unsupported": "dim",
    "too_late": "yellow",
    "ineffective": "bold red",
    "conflict": "bold red",
    "failed": "bold red",
    "drifted": "bold red",
}
_WIDE = 200  # columns where no terminal says how many there are


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]], fold: int = -1) -> Table:
    """Return a plain table; the column `fold` takes several lines where there is no room."""
    grid = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    last = len(headings) - 1 if fold < 0 else fold
    for position, heading in enumerate(headings):
        grid.add_column(heading, no_wrap=position != last, overflow="fold")
    for row in rows:
        grid.add_row(*(cell if isinstance(cell, Text) else _text(str(cell)) for cell in row))
    return grid


def listing(rows: Iterable[Sequence[str]]) -> Table:
    """Return rows of a label and a text, without headings."""
    grid = Table(box=None, pad_edge=False, show_edge=False, show_header=False)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(*(_text(cell) for cell in row))
    return grid


def _text(words: str) -> Text:
    """Return `words` for a cell: what others wrote must not steer the terminal that shows it."""
    return Text("\n".join(map(printable, words.split("\n"))))


def announce(report: Report) -> None:
    """Tell standard error what was put in force: the summary, then every knob that was touched.

    Knobs that are so already, as far as that can be told, or are not here are counted only, unlike
    a policy that cannot be put in force; ranks but the first stay silent.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    quiet = (Outcome.UNCHANGED, Outcome.UNSUPPORTED)
    rows = tuple(
        row for row in report if row.outcome not in quiet or row.unverified or _is_refused(row)
    )
    head = f"torchrepro: {report.summary}"
    parts = (head, report.digest, report_table(replace(report, rows=rows)))
    if sys.stderr.isatty():
        _print(Console(stderr=True), *parts)
    else:
        sys.stderr.write(as_text(*parts) + "\n")


def _is_refused(row: Row) -> bool:
    """Whether a policy was asked for that cannot be put in force."""
    knob = knobs_by_name().get(row.knob)
    return row.outcome is Outcome.UNSUPPORTED and knob is not None and knob.warn_if_unsupported


def announce_end(report: Report, announced: Report) -> None:
    """Tell standard error in one line what did not stay at the end of a run as it was announced."""
    if (report.guarantee, report.drift) == (announced.guarantee, announced.drift):
        return
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"torchrepro: at the end, {report.summary}\n")


def announce_effects(report: Report) -> None:
    """Tell standard error what the policies of a run have done, if they have done anything."""
    if os.environ.get("RANK", "0") != "0" or not (report.effects or report.unseen):
        return
    parts = _effects_parts(report)
    title = f"torchrepro: {report.profile}, what its policies did:"
    if sys.stderr.isatty():
        _print(Console(stderr=True), title, *parts)
    else:
        sys.stderr.write(as_text(title, *parts) + "\n")


def report_parts(report: Report) -> tuple[Table | str, ...]:
    """Return all that a report says: its knobs, its summary, drift, what its policies have done."""
    drift = (drift_table(report.drift),) if report.drift else ()
    said = (report.summary, report.digest)
    return report_table(report), *said, *drift, *_effects_parts(report)


def _effects_parts(report: Report) -> tuple[Table | str, ...]:
    effects = (effects_table(report.effects),) if report.effects else ()
    unseen = (f"torch's deterministic flag cannot see: {some(report.unseen)}",)
    return *effects, *(unseen if report.unseen else ())


def drift_table(drift: Iterable[Drift]) -> Table:
    """Return the table of the knobs that later code has changed."""
    rows = [
        (
            Text("drifted", STYLES["drifted"]),
            each.knob,
            _change(each.was, each.now),
            each.when,
            each.where or "not seen",
        )
        for each in drift
    ]
    return table(("", "knob", "was -> is", "seen", "written at"), rows)


def effects_table(effects: Iterable[Effect]) -> Table:
    """Return the table of what policies have done, the most frequent first."""
    rows = [
        (str(effect.calls), effect.policy, effect.subject, effect.what, effect.where, moved)
        for effect in sorted(effects, key=lambda effect: -effect.calls)
        for moved in [decimal(effect.moved) if effect.moved else ""]
    ]
    return table(("calls", "policy", "op or module", "what", "where", "moved"), rows, fold=4)


def report_table(report: Report) -> Table:
    """Return the table of a report or of a plan."""
    rows = [
        (
            _outcome(row),
            row.knob,
            _change(row.before, row.after),
            row.why,
        )
        for row in report
    ]
    change = "now -> then" if report.planned else "before -> after"
    return table(("outcome", "knob", change, "why"), rows)


def _outcome(row: Row) -> Text:
    mark = ", unverified" if row.unverified else ""
    return Text(f"{row.outcome}{mark}", "yellow" if mark else STYLES[str(row.outcome)])


def _change(before: Any, after: Any) -> str:
    then = "-" if after is None else shown(after)
    if before == after:
        return then
    return f"{'-' if before is None else shown(before)} -> {then}"


def show(*parts: Table | str) -> None:
    """Print tables and lines to standard output, with colours if it is a terminal."""
    if sys.stdout.isatty():
        _print(Console(), *parts)
    else:
        sys.stdout.write(as_text(*parts) + "\n")


def as_text(*parts: Table | str) -> str:
    """Return tables and lines as plain text, without trailing blanks."""
    stream = io.StringIO()
    _print(Console(file=stream, width=_WIDE, no_color=True), *parts)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def as_html(*parts: Table | str) -> str:
    """Return tables and lines as HTML, as a notebook shows them."""
    console = Console(record=True, file=io.StringIO(), width=_WIDE)
    _print(console, *parts)
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def _print(console: Console, *parts: Table | str) -> None:
    for part in parts:
        cleaned = _text(part) if isinstance(part, str) else part
        console.print(cleaned, highlight=False, soft_wrap=isinstance(part, str))
