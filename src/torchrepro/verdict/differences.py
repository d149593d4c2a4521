"""The differences within a step, and which of them is the first."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from itertools import compress, count
from operator import and_, ne, or_
from typing import TYPE_CHECKING

from torchrepro.verdict.explaining import Parting
from torchrepro.verdict.judging import both
from torchrepro.verdict.pair import ALONE, INDEPENDENT, PROPAGATED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrepro.verdict.alignment import Matched
    from torchrepro.verdict.columns import Columns
    from torchrepro.verdict.judging import Judge

FEW = 16
"""Records that read something else before the first difference: they may tell where it is from."""


@dataclass(frozen=True, slots=True)
class Differences:
    """What of a step differs."""

    left: Columns
    right: Columns
    matched: Matched
    differs: Sequence[bool]
    """Of each pair, in the order of the left run."""
    touched: Sequence[bool]
    """Whether it read something else."""
    only_left: Sequence[int]
    only_right: Sequence[int]
    """Places that have no partner and ought to."""

    @classmethod
    def of(cls, judge: Judge, left: Columns, right: Columns, matched: Matched) -> Differences:
        """Return what differs of two parts whose records are matched."""
        lone = (matched.only_left, matched.only_right) if judge.needs_partner else ((), ())
        differs = judge.differing(left, right, matched)
        touched = list(map(ne, *both("inputs", left, right, matched)))
        return cls(left, right, matched, differs, touched, *lone)

    def tally(self) -> Counter[str]:
        """Return how many records differ, by how they do."""
        total, propagated = sum(self.differs), sum(map(and_, self.differs, self.dependent()))
        return Counter(
            {
                PROPAGATED: propagated,
                INDEPENDENT: total - propagated,
                ALONE: len(self.only_left) + len(self.only_right),
            }
        )

    def modules(self) -> tuple[Counter[str], Counter[str]]:
        """Return the records of each module, and how many of them differ."""
        names, _ = both("modules", self.left, self.right, self.matched)
        alone = Counter(
            [self.left.structure.modules[place] for place in self.only_left]
            + [self.right.structure.modules[place] for place in self.only_right]
        )
        totals, differing = Counter(names), Counter(compress(names, self.differs))
        totals.update(alone)
        differing.update(alone)
        return totals, differing

    def first(self) -> tuple[str, Parting] | None:
        """Return how the first difference differs, and which records it is."""
        pair = next(compress(count(), self.differs), None)
        ends = len(self.left) + 1.0
        places = (
            ends if pair is None else float(self.matched.left[pair]),
            float(self.only_left[0]) if self.only_left else ends,
            self._place_of_right() if self.only_right else ends,
        )
        earliest = min(places)
        if earliest == ends:
            return None
        if pair is not None and places[0] == earliest:
            sort = PROPAGATED if self.dependent()[pair] else INDEPENDENT
            return sort, self._parting(pair)
        replaced = places[1] <= earliest + 0.5
        return ALONE, self._only_left() if replaced else self._only_right()

    def dependent(self) -> Sequence[bool]:
        """Return of each pair whether it can only pass a difference on."""
        effects, _ = both("effects", self.left, self.right, self.matched)
        return list(map(or_, self.touched, effects)) if any(effects) else self.touched

    def _parting(self, pair: int) -> Parting:
        here, there = self.left.ids, self.right.ids
        pairs = list(zip(self.matched.left[:pair], self.matched.right[:pair], strict=True))
        read = list(compress(pairs, self.touched[:pair]))[-FEW:]
        return Parting(
            here[self.matched.left[pair]],
            there[self.matched.right[pair]],
            read=[(here[one], there[other]) for one, other in read],
        )

    def _place_of_right(self) -> float:
        """Return where the first record that only the right run has would stand in the left."""
        partners = dict(zip(self.matched.right, self.matched.left, strict=True))
        before = range(self.only_right[0] - 1, -1, -1)
        return 0.5 + next((partners[place] for place in before if place in partners), -1)

    def _only_left(self) -> Parting:
        place = self.only_left[0]
        number = bisect_left(self.matched.left, place)
        after = self.matched.right[number - 1] + 1 if number else 0
        return Parting(self.left.ids[place], None, _at(self.right.ids, after))

    def _only_right(self) -> Parting:
        after = int(self._place_of_right() + 0.5)
        return Parting(None, self.right.ids[self.only_right[0]], _at(self.left.ids, after))


def _at(ids: Sequence[int], place: int) -> int | None:
    return ids[place] if place < len(ids) else None
