"""The verdict as one HTML file that needs nothing else: no network, no fonts, no other files."""

from __future__ import annotations

import math
from base64 import b64encode
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrepro.messages import printable
from torchrepro.verdict import render
from torchrepro.verdict.value import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from jinja2 import Template

    from torchrepro.verdict.diagnosis import EscalationLevel
    from torchrepro.verdict.value import Cell, Divergence, Verdict


COLUMNS = 240
ROWS = 64
SHADES = 5
"""0 for the same; the others for a growing share of differing records."""


@dataclass(frozen=True, slots=True)
class AgreementMap:
    """Counts of records by groups of steps (columns) and of modules (rows)."""

    columns: tuple[tuple[int, int], ...]
    """First and last step of each column."""

    rows: tuple[str, ...]
    """Names of modules, in the order in which they first ran; ``layers.*`` is a group."""

    counts: tuple[tuple[tuple[int, int], ...], ...]
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

    def outlines(self) -> list[str]:
        """Return an SVG path for each shade, one unit wide and high per cell."""
        paths: dict[int, list[str]] = defaultdict(list)
        for y, row in enumerate(self.counts):
            for shade, start, length in _stretches([_shade(*cell) for cell in row]):
                paths[shade].append(f"M{start},{y}h{length}v.92h-{length}z")
        return ["".join(paths[shade]) for shade in range(SHADES)]

    def flat_counts(self) -> list[int]:
        """Return all counts in one list: same and differing, cell by cell, row by row."""
        return [number for row in self.counts for cell in row for number in cell]


def agreement_map(
    cells: Sequence[Cell], first: Divergence | None = None, *, after_last: bool = False
) -> AgreementMap | None:
    """Return the map of `cells`, the last of which may be after all steps; None without cells."""
    if not cells:
        return None
    names = list(dict.fromkeys(cell.module for cell in cells))
    groups = _grouped(names)
    columns = _column_groups(sorted({cell.step for cell in cells}))
    column_of = {step: number for number, steps in enumerate(columns) for step in steps}
    rows = list(dict.fromkeys(groups.values()))
    row_of = {name: number for number, name in enumerate(rows)}
    counts = [[[0, 0] for _ in columns] for _ in rows]
    for cell in cells:
        sums = counts[row_of[groups[cell.module]]][column_of[cell.step]]
        sums[0] += cell.same
        sums[1] += cell.differing
    marked = None
    if first and first.step in column_of and first.module in groups:
        marked = column_of[first.step], row_of[groups[first.module]]
    return AgreementMap(
        tuple((steps[0], steps[-1]) for steps in columns),
        tuple(rows),
        tuple(tuple((same, differing) for same, differing in row) for row in counts),
        marked,
        columns[-1][-1] if after_last else None,
    )


def _shade(same: int, differing: int) -> int | None:
    """Return the shade of a cell; None for one without records."""
    if not differing:
        return 0 if same else None
    return 1 + min(SHADES - 2, (SHADES - 1) * differing // (same + differing))


def _stretches(shades: Sequence[int | None]) -> Iterator[tuple[int, int, int]]:
    """Yield shade, start and length of each stretch of equal shades."""
    start = 0
    for end in range(1, len(shades) + 1):
        if end < len(shades) and shades[end] == shades[start]:
            continue
        shade = shades[start]
        if shade is not None:
            yield shade, start, end - start
        start = end


def _column_groups(steps: list[int]) -> list[list[int]]:
    """Return the steps in columns of as many steps each as the width asks for."""
    each = -(-len(steps) // COLUMNS)
    return [steps[at : at + each] for at in range(0, len(steps), each)]


def _grouped(names: list[str]) -> dict[str, str]:
    """Return the row of each module: itself, or the group of all below a module it is in."""
    if len(names) <= ROWS:
        return {name: name for name in names}
    deepest = max(name.count(".") for name in names)
    for depth in range(deepest, 0, -1):
        rows = {name: _above(name, depth) for name in names}
        if len(set(rows.values())) <= ROWS:
            return rows
    kept = dict.fromkeys(_above(name, 1) for name in names)
    shown = set(list(kept)[: ROWS - 1])
    return {
        name: row if row in shown else "(other modules)"
        for name in names
        for row in [_above(name, 1)]
    }


def _above(name: str, depth: int) -> str:
    parts = name.split(".")
    return name if len(parts) <= depth else ".".join(parts[:depth]) + ".*"


WIDTH = 720.0
POINTS = 720
"""More points than this do not show; of each group of steps the lowest and highest are kept."""

_LARGEST, _SMALLEST = 1e300, 1e-300  # beyond them a range cannot be computed with

Curve = list[tuple[float, float | None]]


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over steps, ready to be drawn."""

    height: float
    paths: tuple[str, ...]
    across: tuple[Tick, ...]
    upward: tuple[Tick, ...]
    marked: float | None = None
    """Where the first divergence is."""


def chart(curves: Sequence[Curve], height: float, step: int | None = None) -> Chart | None:
    """Return the chart of `curves`; None where none of them has a finite value."""
    drawable = [[(x, _drawable_value(y)) for x, y in curve] for curve in curves]
    values = [y for curve in drawable for _, y in curve if y is not None]
    if not values:
        return None
    steps = [x for curve in curves for x, _ in curve]
    low_x, high_x = _widened(min(steps), max(steps))
    low_y, high_y = _widened(min(values), max(values))

    def across(x: float) -> float:
        return WIDTH * (x - low_x) / (high_x - low_x)

    def upward(y: float) -> float:
        return height * (1 - (y - low_y) / (high_y - low_y))

    paths = tuple(
        _path([(across(x), None if y is None else upward(y)) for x, y in _thinned(curve)])
        for curve in drawable
    )
    marked = across(step) if step is not None and low_x <= step <= high_x else None
    whole = [tick for tick in ticks(low_x, high_x) if tick.at == int(tick.at)]
    return Chart(
        height,
        paths,
        tuple(Tick(across(tick.at), tick.text) for tick in whole),
        tuple(Tick(upward(tick.at), tick.text) for tick in ticks(low_y, high_y)),
        marked,
    )


def ticks(low: float, high: float, about: int = 5) -> list[Tick]:
    """Return round numbers within a range, about as many as asked for."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= rough)
    numbers = range(math.ceil(low / step), math.floor(high / step) + 1)
    return [Tick(number * step, f"{number * step:.6g}") for number in numbers]


def _drawable_value(value: float | None) -> float | None:
    return value if value is not None and abs(value) < _LARGEST else None


def _widened(low: float, high: float) -> tuple[float, float]:
    """Return a range that is not empty."""
    if high - low > _SMALLEST:
        return low, high
    room = abs(low) * 0.1 or 1.0
    return low - room, low + room


def _path(points: Iterable[tuple[float, float | None]]) -> str:
    """Return an SVG path that is broken where there is no value."""
    parts = []
    drawing = False
    for x, y in points:
        if y is not None:
            # A stroke of no length shows a point that stands alone as a dot.
            parts.append(f"L{x:.1f},{y:.1f}" if drawing else f"M{x:.1f},{y:.1f}h0")
        drawing = y is not None
    return "".join(parts)


def _thinned(curve: Curve) -> Curve:
    if len(curve) <= POINTS:
        return curve
    each = -(-2 * len(curve) // POINTS)
    kept: Curve = []
    for at in range(0, len(curve), each):
        group = [point for point in curve[at : at + each] if point[1] is not None]
        ends = {min(group, key=_height), max(group, key=_height)} if group else {curve[at]}
        kept += sorted(ends, key=lambda point: point[0])
    return kept


def _height(point: tuple[float, float | None]) -> float:
    return point[1] or 0.0


_FOLDER = Path(__file__).parent
_CURVES, _DIFFERENCE = 220.0, 90.0  # heights of the two charts
_MODULES = 16


def page(verdict: Verdict, title: str = "torchrepro", level: EscalationLevel | None = None) -> str:
    """Return the page of `verdict`; `level` is what to try next, if known."""
    curves, difference = _charts(verdict)
    return _template().render(
        verdict=verdict,
        first=verdict.first,
        ended=verdict.first is not None and verdict.first.kind is Kind.ENDED,
        title=title,
        level=level,
        words=render,
        map=agreement_map(verdict.map, verdict.first, after_last=verdict.compared.after_last),
        curves=curves,
        difference=difference,
        losses_agree=all(_alike(left, right) for _, left, right in verdict.losses),
        by_module=verdict.by_module[:_MODULES],
        more_modules=max(0, len(verdict.by_module) - _MODULES),
        most=max((number for _, number in verdict.by_module), default=1) or 1,
    )


def _charts(verdict: Verdict) -> tuple[Chart | None, Chart | None]:
    """Return the curves of both runs' losses, and of what lies between them if anything does."""
    step = verdict.first.step if verdict.first else None
    left = [(float(at), loss) for at, loss, _ in verdict.losses]
    right = [(float(at), loss) for at, _, loss in verdict.losses]
    apart = [
        (float(at), None if one is None or two is None else two - one)
        for at, one, two in verdict.losses
    ]
    return (
        chart((left, right), _CURVES, step),
        chart((apart,), _DIFFERENCE, step) if any(gap for _, gap in apart) else None,
    )


def _alike(left: float | None, right: float | None) -> bool:
    """Whether two losses are equal, as the same NaN is."""
    return left == right or str(left) == str(right)


@cache
def _template() -> Template:
    """Return the template, with style and script in it and the policy that allows only those.

    Every value that is put in is escaped, and what steers a terminal or the direction of text is
    written out, as names and source lines are the work of others
    (https://jinja.palletsprojects.com/en/stable/api/#autoescaping).
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def finalize(value: Any) -> Any:
        is_text = isinstance(value, str) and not isinstance(value, Markup)
        return printable(value) if is_text else value

    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style, script = (
        (_FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
    )
    environment.globals.update(
        style=Markup(style),  # noqa: S704 - a file of this package, not data
        script=Markup(script),  # noqa: S704
        style_hash=_hash(style),
        script_hash=_hash(script),
    )
    return environment.get_template("page.html")


def _hash(text: str) -> str:
    """Return `text` as a content security policy names it (https://www.w3.org/TR/CSP3/)."""
    return "sha256-" + b64encode(sha256(text.encode()).digest()).decode()
