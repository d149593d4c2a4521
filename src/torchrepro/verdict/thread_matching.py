"""Which record of another thread of one run is which of the other's.

Threads that did the same go together, then threads of which one was cut off. All that is left is
matched in any order, because a pool shares its work among its threads as it comes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torchrepro.verdict.matching import Names
    from torchrepro.verdict.other_threads import Array, OtherThreads

FREE, CUT_OFF = -1, -2

MANY = 100
"""Threads that are looked through for one that was cut off; each is held against each."""

A_BIT = 1
"""Ends of steps that a thread may have outlived another by, and still be one that was cut off."""

Span = tuple[int, int]


@dataclass(frozen=True)
class Overlap:
    """What two threads have in common, as lengths: before it, itself, and after it."""

    before: tuple[int, int]
    common: int
    after: tuple[int, int]


class ThreadMatching:
    """The partner of each record, `FREE` for want of one, `CUT_OFF` where none is to be expected.

    With `partial`, recording began when threads were under way, so that they may be cut off at
    their beginning as well.
    """

    def __init__(
        self, left: OtherThreads, right: OtherThreads, rounds: Sequence[Names], *, partial: bool
    ) -> None:
        numpy = import_module("numpy")
        self.sides = left, right
        self.partial = partial
        self.partners = [numpy.full(len(side), FREE, "int64") for side in self.sides]
        self._content = [side.tokens(rounds[0], numpy.arange(len(side))) for side in self.sides]
        self._orders = [numpy.argsort(side.ids) for side in self.sides]
        self._pair_equal_threads()
        self._pair_other_threads(rounds[0])
        self._cut_off_what_only_one_has()
        for names in rounds[1:]:
            self._pair_in_any_order(("names", *names))
            self._pair_in_any_order(names)

    def pairs(self) -> tuple[Array, Array]:
        """Return the places of records that have a partner, in the order of the left run."""
        places = self._orders[0]
        places = places[self.partners[0][places] >= 0]
        return places, self.partners[0][places]

    def in_order(self, side: int, state: int) -> Array:
        """Return the places of the records of one run that are in a state, in that run's order."""
        places = self._orders[side]
        return places[self.partners[side][places] == state]

    def _pair_equal_threads(self) -> None:
        """Pair threads that did the same."""
        waiting: dict[bytes, list[Span]] = defaultdict(list)
        for span in self.sides[1].spans():
            waiting[self._content[1][slice(*span)].tobytes()].append(span)
        for span in self.sides[0].spans():
            same = waiting[self._content[0][slice(*span)].tobytes()]
            if same:
                self._join_spans(span[0], same.pop(0)[0], span[1] - span[0])

    def _pair_other_threads(self, names: Names) -> None:
        """Pair what is the same in any order; take threads for cut off where less is left then."""
        before = [partners.copy() for partners in self.partners]
        self._pair_in_any_order(names)
        left_over = self._left_over()
        if not left_over:
            return
        plain, self.partners = self.partners, before
        self._pair_cut_off_threads()
        if any((partners == CUT_OFF).any() for partners in self.partners):
            self._pair_in_any_order(names)
        if self._left_over() >= left_over:
            self.partners = plain

    def _left_over(self) -> int:
        return sum(int((partners == FREE).sum()) for partners in self.partners)

    def _pair_cut_off_threads(self) -> None:
        """Pair threads that did the same until one of them was cut off, the longer ones first."""
        left, right = (
            sorted(self._free_spans(side), key=lambda span: span[0] - span[1])[:MANY]
            for side in (0, 1)
        )
        tokens = [self._content[1][slice(*span)] for span in right]
        others = dict(zip(right, tokens, strict=True))
        for span in left:
            self._pair_cut_off(span, self._content[0][slice(*span)], others)

    def _free_spans(self, side: int) -> Iterator[Span]:
        for start, end in self.sides[side].spans():
            if self.partners[side][start] == FREE:
                yield start, end

    def _pair_cut_off(self, span: Span, mine: Array, others: dict[Span, Array]) -> None:
        found = [
            (overlap, other)
            for other, theirs in others.items()
            for overlap in [_overlap(mine, theirs, anywhere=self.partial)]
            if overlap is not None and self._is_cut_off(overlap, (span, other))
        ]
        if not found:
            return
        overlap, other = max(found, key=lambda each: each[0].common)
        del others[other]
        starts = [
            each[0] + before for each, before in zip((span, other), overlap.before, strict=True)
        ]
        self._join_spans(starts[0], starts[1], overlap.common)
        for partners, each, start in zip(self.partners, (span, other), starts, strict=True):
            partners[each[0] : start] = CUT_OFF
            partners[start + overlap.common : each[1]] = CUT_OFF

    def _is_cut_off(self, overlap: Overlap, spans: tuple[Span, Span]) -> bool:
        """Whether what one thread has more was done in about the time of a step."""
        half = min(end - start for start, end in spans) / 2
        return overlap.common >= half and all(
            self._are_close(side, start, start + before) and self._are_close(side, end - after, end)
            for side, (start, end), before, after in zip(
                self.sides, spans, overlap.before, overlap.after, strict=True
            )
        )

    def _are_close(self, side: OtherThreads, start: int, end: int) -> bool:
        return start == end or int(side.steps[end - 1] - side.steps[start]) <= A_BIT

    def _cut_off_what_only_one_has(self) -> None:
        """Cut off the ends of threads that shared their work, where all else has a partner."""
        free = [self.in_order(side, FREE) for side in (0, 1)]
        if bool(len(free[0])) == bool(len(free[1])):
            return
        number = 0 if len(free[0]) else 1
        side, partners = self.sides[number], self.partners[number]
        ends = [(end - _length_of_end(partners[start:end]), end) for start, end in side.spans()]
        whole = sum(end - start for start, end in ends) == len(free[number])
        begun = all(
            start > first for (start, _), (first, _) in zip(ends, side.spans(), strict=True)
        )
        if whole and begun and all(self._are_close(side, *each) for each in ends):
            partners[free[number]] = CUT_OFF

    def _pair_in_any_order(self, names: Names) -> None:
        """Pair free records that are alike, the earlier with the earlier."""
        left, right = (self.in_order(side, FREE) for side in (0, 1))
        if not (len(left) and len(right)):
            return
        tokens = (
            side.tokens(names, places)
            for side, places in zip(self.sides, (left, right), strict=True)
        )
        one, other = _alike(*tokens)
        self._join(left[one], right[other])

    def _join_spans(self, left: int, right: int, length: int) -> None:
        numpy = import_module("numpy")
        self._join(numpy.arange(left, left + length), numpy.arange(right, right + length))

    def _join(self, left: Array, right: Array) -> None:
        self.partners[0][left] = right
        self.partners[1][right] = left


def _overlap(left: Array, right: Array, *, anywhere: bool) -> Overlap | None:
    """Return what two threads have in common, where that is all but their ends."""
    for before in _starts(left, right[0], anywhere=anywhere):
        found = _common(left[before:], right)
        if found:
            return Overlap((before, 0), found, (len(left) - before - found, len(right) - found))
    for before in _starts(right, left[0], anywhere=anywhere):
        found = _common(left, right[before:])
        if found:
            return Overlap((0, before), found, (len(left) - found, len(right) - before - found))
    return None


def _starts(tokens: Array, first: int, *, anywhere: bool) -> Iterator[int]:
    if not anywhere:
        yield 0
        return
    yield from map(int, import_module("numpy").flatnonzero(tokens == first)[:MANY])


def _common(left: Array, right: Array) -> int:
    """Return the length of the shorter of two if it is all that the longer one begins with."""
    length = min(len(left), len(right))
    return length if (left[:length] == right[:length]).all() else 0


def _length_of_end(partners: Array) -> int:
    """Return how many of the last records have no partner."""
    numpy = import_module("numpy")
    paired = numpy.flatnonzero(partners != FREE)
    return int(len(partners) - (paired[-1] + 1 if len(paired) else 0))


def _alike(left: Array, right: Array) -> tuple[Array, Array]:
    """Return the places of equal tokens, the first with the first, the second with the second."""
    numpy = import_module("numpy")
    one, other = (numpy.argsort(tokens, kind="stable") for tokens in (left, right))
    left, right = left[one], right[other]
    turn = numpy.arange(len(left)) - numpy.searchsorted(left, left, "left")
    start = numpy.searchsorted(right, left, "left")
    found = turn < numpy.searchsorted(right, left, "right") - start
    return one[found], other[(start + turn)[found]]
