"""What the page draws: curves over steps, and the map of which modules agree in which steps."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from torchrepro.verdict import render

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrepro.verdict.value import Cell, Divergence


WIDTH = 720.0
POINTS = 720
"""More points than this do not show; of each group of steps the lowest and highest are kept."""

APART = 45.0
"""About how far the marks of the upward axis are from each other."""

COLUMNS, ROWS = 240, 64
"""Cells of a map at most."""

SHADES = 5
"""0 for the same; the others for a growing share of differing records."""

_LARGEST, _SMALLEST = 1e300, 1e-300  # beyond them a range cannot be computed with

Curve = list[tuple[float, float | None]]


class Tick(NamedTuple):
    """A mark on an axis."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over steps, ready to be drawn."""

    height: float
    low: float
    high: float
    """The first and the last step."""

    paths: tuple[str, ...]
    across: tuple[Tick, ...]
    upward: tuple[Tick, ...]
    marked: float | None = None
    """Where the first divergence is."""

    def across_of(self, step: float) -> float:
        """Return where a step is."""
        return _across(step, self.low, self.high)


def _across(step: float, low: float, high: float) -> float:
    return WIDTH * (step - low) / (high - low)


def chart(curves: Sequence[Curve], height: float, step: int | None = None) -> Chart | None:
    """Return the chart of `curves`, with `step` marked; None where none has a finite value."""
    drawable: list[Curve] = [
        [(x, y if y is not None and abs(y) < _LARGEST else None) for x, y in curve]
        for curve in curves
    ]
    values = [y for curve in drawable for _, y in curve if y is not None]
    if not values:
        return None
    steps = [x for curve in curves for x, _ in curve]
    low_x, high_x = _widened(min(steps), max(steps))
    low_y, high_y = _widened(min(values), max(values))

    def upward(y: float) -> float:
        return height * (1 - (y - low_y) / (high_y - low_y))

    paths = []
    for curve in drawable:
        path, drawing = "", False
        for x, y in _thinned(curve):
            if y is not None:
                at = f"{_across(x, low_x, high_x):.1f},{upward(y):.1f}"
                # A stroke of no length shows a point that stands alone as a dot.
                path += f"L{at}" if drawing else f"M{at}h0"
            drawing = y is not None
        paths.append(path)
    return Chart(
        height,
        low_x,
        high_x,
        tuple(paths),
        tuple(
            Tick(_across(tick.at, low_x, high_x), tick.text)
            for tick in ticks(low_x, high_x)
            if tick.at == int(tick.at)
        ),
        tuple(Tick(upward(tick.at), tick.text) for tick in ticks(low_y, high_y, height / APART)),
        _across(step, low_x, high_x) if step is not None and low_x <= step <= high_x else None,
    )


def ticks(low: float, high: float, about: float = 5) -> list[Tick]:
    """Return round numbers within a range, about as many as asked for."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= rough)
    numbers = range(math.ceil(low / step), math.floor(high / step) + 1)
    return [Tick(number * step, f"{number * step:.6g}") for number in numbers]


def _widened(low: float, high: float) -> tuple[float, float]:
    """Return a range that is not empty."""
    if high - low > _SMALLEST:
        return low, high
    room = abs(low) * 0.1 or 1.0
    return low - room, low + room


def _thinned(curve: Curve) -> Curve:
    if len(curve) <= POINTS:
        return curve
    each = -(-2 * len(curve) // POINTS)
    kept: Curve = []
    for at in range(0, len(curve), each):
        group = [(y, x) for x, y in curve[at : at + each] if y is not None]
        ends = {min(group), max(group)} if group else {(None, curve[at][0])}
        kept += sorted((x, y) for y, x in ends)
    return kept


@dataclass(frozen=True, slots=True)
class AgreementMap:
    """Counts of records by groups of steps (columns) and of modules (rows)."""

    columns: tuple[tuple[int, int], ...]
    """First and last step of each column."""

    rows: tuple[str, ...]
    """Names of modules, in the order in which they first ran; ``layers.*`` is a group."""

    counts: Sequence[Sequence[Sequence[int]]]
    """Records that are the same and that differ, by row and column."""

    marked: tuple[int, int] | None = None
    """Column and row of the first divergence."""

    after: int | None = None
    """The number of what comes after the last step, if there is a cell of it."""

    @property
    def ends(self) -> tuple[str, str]:
        """What the first column is called, and the last one."""
        first, last = self.columns[0][0], self.columns[-1][1]
        one, other = (
            render.step_name(step, after_last=step == self.after) for step in (first, last)
        )
        return one, "" if first == last else other

    def outlines(self) -> list[list[tuple[int, str]]]:
        """Return for each row its shades, each with an SVG path one unit wide and high per cell."""
        found = []
        for row in self.counts:
            paths: dict[int, str] = defaultdict(str)
            start = 0
            for shade, alike in groupby(_shade(same, differing) for same, differing in row):
                length = len(list(alike))
                if shade is not None:
                    paths[shade] += f"M{start},0h{length}v1h-{length}z"
                start += length
            found.append(sorted(paths.items()))
        return found

    def flat_counts(self) -> list[int]:
        """Return all counts in one list: same and differing, cell by cell, row by row."""
        return [number for row in self.counts for cell in row for number in cell]


def agreement_map(
    cells: Sequence[Cell], first: Divergence | None = None, *, after_last: bool = False
) -> AgreementMap | None:
    """Return the map of `cells`, the last of which may be after all steps; None without cells."""
    if not cells:
        return None
    groups = _grouped(list(dict.fromkeys(cell.module for cell in cells)))
    steps = sorted({cell.step for cell in cells})
    each = -(-len(steps) // COLUMNS)
    columns = [steps[at : at + each] for at in range(0, len(steps), each)]
    column_of = {step: number for number, some in enumerate(columns) for step in some}
    rows = list(dict.fromkeys(groups.values()))
    row_of = {name: rows.index(row) for name, row in groups.items()}
    counts = [[[0, 0] for _ in columns] for _ in rows]
    for cell in cells:
        sums = counts[row_of[cell.module]][column_of[cell.step]]
        sums[0] += cell.same
        sums[1] += cell.differing
    marked = None
    if first and first.step in column_of and first.module in row_of:
        marked = column_of[first.step], row_of[first.module]
    return AgreementMap(
        tuple((some[0], some[-1]) for some in columns),
        tuple(rows),
        counts,
        marked,
        steps[-1] if after_last else None,
    )


def _shade(same: int, differing: int) -> int | None:
    """Return the shade of a cell; None for one without records."""
    if not differing:
        return 0 if same else None
    return 1 + min(SHADES - 2, (SHADES - 1) * differing // (same + differing))


def _grouped(names: Sequence[str]) -> dict[str, str]:
    """Return the row of each module: itself, or the group of all below a module it is in."""
    if len(names) <= ROWS:
        return {name: name for name in names}
    rows: dict[str, str] = {}
    for depth in range(max(name.count(".") for name in names), 0, -1):
        rows = {name: _above(name, depth) for name in names}
        if len(set(rows.values())) <= ROWS:
            return rows
    rows = rows or {name: name for name in names}
    kept = set(list(dict.fromkeys(rows.values()))[: ROWS - 1])
    return {name: row if row in kept else "(other modules)" for name, row in rows.items()}


def _above(name: str, depth: int) -> str:
    parts = name.split(".")
    return name if len(parts) <= depth else ".".join(parts[:depth]) + ".*"
