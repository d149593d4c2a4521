"""Curves over steps, as paths of SVG with round numbers on their axes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


WIDTH = 720.0
POINTS = 720
"""More points than this do not show; of each group of steps the lowest and highest are kept."""

APART = 45.0
"""About how far the marks of the upward axis are from each other."""

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


def chart(curves: Sequence[Curve], height: float, step: int | None = None) -> Chart | None:
    """Return the chart of `curves`, with `step` marked; None where none has a finite value."""
    drawable = [[(x, _drawable_value(y)) for x, y in curve] for curve in curves]
    values = [y for curve in drawable for _, y in curve if y is not None]
    if not values:
        return None
    steps = [x for curve in curves for x, _ in curve]
    low_x, high_x = _widened(min(steps), max(steps))
    low_y, high_y = _widened(min(values), max(values))

    def upward(y: float) -> float:
        return height * (1 - (y - low_y) / (high_y - low_y))

    def across(x: float) -> float:
        return _across(x, low_x, high_x)

    paths = tuple(
        _path([(across(x), None if y is None else upward(y)) for x, y in _thinned(curve)])
        for curve in drawable
    )
    marked = across(step) if step is not None and low_x <= step <= high_x else None
    whole = [tick for tick in ticks(low_x, high_x) if tick.at == int(tick.at)]
    return Chart(
        height,
        low_x,
        high_x,
        paths,
        tuple(Tick(across(tick.at), tick.text) for tick in whole),
        tuple(Tick(upward(tick.at), tick.text) for tick in ticks(low_y, high_y, height / APART)),
        marked,
    )


def _across(step: float, low: float, high: float) -> float:
    return WIDTH * (step - low) / (high - low)


def ticks(low: float, high: float, about: float = 5) -> list[Tick]:
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
