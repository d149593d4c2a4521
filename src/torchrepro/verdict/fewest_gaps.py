"""Matches two sequences in their order, so that the fewest items are left without a partner.

Often more than one matching does. Of these, the one is chosen whose pairs cost least. It takes time
in proportion to the length of the sequences, if one of them is the other with some items more, and
more the less they have in common.

S. Wu, U. Manber, G. Myers, W. Miller, "An O(NP) sequence comparison algorithm", Information
Processing Letters 35 (6), 1990. https://doi.org/10.1016/0020-0190(90)90035-V
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Cost = Callable[[int, int], int]
    """What it costs to pair the items at two places."""

WORK, LEAST_WORK = 8, 1000
"""Cells to look at for each item, and besides, beyond which no matching is sought."""

Reach = list[dict[int, int]]
"""By the gaps in the shorter sequence and by diagonal, how far into it a matching gets.

A gap is an item without a partner. The items of a pair are on diagonal `place in the shorter
sequence - place in the longer one`.
"""

PAIR, GAP_SHORTER, GAP_LONGER = range(3)
"""How a cell was reached: by a pair, or by an item that only one sequence has."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """The cells of one diagonal that matchings with the fewest gaps pass after so many gaps."""

    begin: int
    """Its first place in the shorter sequence."""
    costs: list[float]
    moves: bytearray
    """How each cell was reached at the least cost."""

    def cost(self, place: int) -> float:
        """Return the least cost to reach a cell, infinity for one that is not in the stretch."""
        number = place - self.begin
        return self.costs[number] if 0 <= number < len(self.costs) else math.inf


NOWHERE = Stretch(0, [], bytearray())


@dataclass(frozen=True, slots=True)
class FewestGaps:
    """All matchings of two sequences of names that leave the fewest items without a partner."""

    shorter: Sequence[int]
    longer: Sequence[int]
    forward: Reach
    backward: Reach
    """The reach from the ends of both."""

    @classmethod
    def of(cls, shorter: Sequence[int], longer: Sequence[int]) -> FewestGaps | None:
        """Return the matchings of two sequences; None if it is too much work to find them."""
        forward = _reach(shorter, longer)
        backward = _reach(shorter[::-1], longer[::-1])
        if forward is None or backward is None:
            return None
        found = cls(shorter, longer, forward, backward)
        cells = sum(
            end - begin + 1 for gaps in range(len(forward)) for _, begin, end in found._ranges(gaps)
        )
        return None if cells > _work_for(shorter, longer) else found

    def cheapest(self, cost: Cost) -> list[tuple[int, int]]:
        """Return the pairs of a matching that costs least.

        Of those that cost the same, it is the one whose gaps come first: what differs because of an
        item more then follows it.
        """
        levels: list[dict[int, Stretch]] = []
        for gaps in range(len(self.forward)):
            before = levels[-1] if levels else {}
            level: dict[int, Stretch] = {}
            for diagonal, begin, end in self._ranges(gaps):
                sources = before.get(diagonal - 1, NOWHERE), level.get(diagonal + 1, NOWHERE)
                level[diagonal] = self._stretch(range(begin, end + 1), diagonal, sources, cost)
            levels.append(level)
        return self._pairs(levels)

    def _ranges(self, gaps: int) -> Iterator[tuple[int, int, int]]:
        """Yield the diagonals, with the first and last place, that can be passed after gaps."""
        size, last = len(self.shorter), len(self.shorter) - len(self.longer)
        rest = len(self.forward) - 1 - gaps
        for diagonal, end in self.forward[gaps].items():
            other = last - diagonal
            if other not in self.backward[rest]:
                continue
            begin = max(size - self.backward[rest][other], diagonal, 0)
            # No matching has more gaps before a place, or after it, than lead there.
            if gaps:
                begin = max(begin, self.forward[gaps - 1].get(diagonal, -1) + 1)
            if rest:
                end = min(end, size - self.backward[rest - 1].get(other, -1) - 1)  # noqa: PLW2901 - it ends earlier
            if begin <= end:
                yield diagonal, begin, end

    def _stretch(
        self, places: range, diagonal: int, sources: tuple[Stretch, Stretch], cost: Cost
    ) -> Stretch:
        shorter, longer = self.shorter, self.longer
        by_shorter, by_longer = sources
        costs: list[float] = []
        moves = bytearray()
        for place in places:
            best, move = math.inf, PAIR
            if place == 0 == diagonal:
                best = 0.0
            elif costs and shorter[place - 1] == longer[place - 1 - diagonal]:
                best = costs[-1] + cost(place - 1, place - 1 - diagonal)
            if (by_gap := by_shorter.cost(place - 1)) < best:
                best, move = by_gap, GAP_SHORTER
            if (by_gap := by_longer.cost(place)) < best:
                best, move = by_gap, GAP_LONGER
            costs.append(best)
            moves.append(move)
        return Stretch(places.start, costs, moves)

    def _pairs(self, levels: Sequence[dict[int, Stretch]]) -> list[tuple[int, int]]:
        """Follow the moves from the end to the beginning."""
        pairs: list[tuple[int, int]] = []
        gaps, place = len(levels) - 1, len(self.shorter)
        diagonal = place - len(self.longer)
        while place or diagonal:
            stretch = levels[gaps][diagonal]
            move = stretch.moves[place - stretch.begin]
            if move == GAP_LONGER:
                diagonal += 1
                continue
            place -= 1
            if move == PAIR:
                pairs.append((place, place - diagonal))
            else:
                diagonal -= 1
                gaps -= 1
        return pairs[::-1]


def _work_for(shorter: Sequence[int], longer: Sequence[int]) -> int:
    return WORK * (len(shorter) + len(longer)) + LEAST_WORK


def _reach(shorter: Sequence[int], longer: Sequence[int]) -> Reach | None:
    """Return how far matchings get with ever more gaps, until one gets to the end of both."""
    most, work = 0, _work_for(shorter, longer)
    while work > 0:
        levels, work = _reach_with(shorter, longer, most, work)
        last = len(shorter) - len(longer)
        for gaps, level in enumerate(levels):
            if level.get(last) == len(shorter):
                return levels[: gaps + 1]
        most = 2 * most or 1
    return None


def _reach_with(
    shorter: Sequence[int], longer: Sequence[int], most: int, work: int
) -> tuple[Reach, int]:
    """Return how far matchings get with up to `most` gaps, and how much work may still be done."""
    size, other = len(shorter), len(longer)
    levels: Reach = []
    before: dict[int, int] = {}
    for gaps in range(most + 1):
        level: dict[int, int] = {}
        for diagonal in range(gaps, size - other - (most - gaps) - 1, -1):
            begin = before.get(diagonal, -1)
            if gaps == 0 == diagonal:
                begin = 0
            if -1 < (by_shorter := before.get(diagonal - 1, -1)) < size:
                begin = max(begin, by_shorter + 1)
            if (by_longer := level.get(diagonal + 1, -1)) - diagonal <= other:
                begin = max(begin, by_longer)
            work -= 1
            if begin < 0:
                continue
            place, there = begin, begin - diagonal
            while place < size and there < other and shorter[place] == longer[there]:
                place += 1
                there += 1
            level[diagonal] = place
            work -= place - begin
            if work <= 0:
                return [], 0
        levels.append(level)
        before = level
    return levels, work
