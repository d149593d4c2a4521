"""The map of a comparison: how many records of each module agree in each step, in few cells."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrepro.verdict import render

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torchrepro.verdict.value import Cell, Divergence


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

    def outlines(self) -> list[list[tuple[int, str]]]:
        """Return for each row its shades, each with an SVG path one unit wide and high per cell."""
        return [_outline(row) for row in self.counts]

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


def _outline(row: Sequence[tuple[int, int]]) -> list[tuple[int, str]]:
    paths: dict[int, list[str]] = defaultdict(list)
    for shade, start, length in _stretches([_shade(*cell) for cell in row]):
        paths[shade].append(f"M{start},0h{length}v1h-{length}z")
    return [(shade, "".join(parts)) for shade, parts in sorted(paths.items())]


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
