"""A long step in parts: how much of two runs to look at together, so that memory stays bounded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrepro.verdict import columns
from torchrepro.verdict.alignment import Matched
from torchrepro.verdict.columns import joined

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchrepro.verdict.columns import Columns

    Part = tuple[Columns, Columns, Matched]


NOTHING = joined([])


class Feed:
    """What was read of a run and is not compared yet."""

    def __init__(self, parts: Iterator[Columns]) -> None:
        self._parts = parts
        self._next = next(parts, None)
        self.held = NOTHING

    @property
    def ended(self) -> bool:
        """Whether nothing more is to be read."""
        return self._next is None

    def fill(self) -> None:
        """Read on unless enough is held."""
        if self._next is not None and len(self.held) < columns.PART:
            self.held = joined([self.held, self._next])
            self._next = next(self._parts, None)

    def take(self, length: int) -> Columns:
        """Return so many of the records held, and hold them no more."""
        taken, self.held = self.held.part(0, length), self.held.part(length, len(self.held))
        return taken


def parts(left: Feed, right: Feed, match: Callable[[Columns, Columns], Matched]) -> Iterator[Part]:
    """Yield parts of two sequences that belong together, with the records that do.

    What has no partner at the end of a part may have it in the next one.
    """
    while True:
        left.fill()
        right.fill()
        ended = left.ended and right.ended
        length = min(len(left.held), len(right.held))
        if not ended and length >= columns.PART and _keep_pace(left.held, right.held, length):
            together = range(length)
            yield left.take(length), right.take(length), Matched(together, together)
            continue
        matched = match(left.held, right.held)
        if ended:
            yield left.held, right.held, matched
            return
        ends = max(matched.left, default=-1) + 1, max(matched.right, default=-1) + 1
        if not all(ends):
            ends = len(left.held), len(right.held)
        yield left.take(ends[0]), right.take(ends[1]), _up_to(matched, ends)


def _keep_pace(left: Columns, right: Columns, length: int) -> bool:
    one, other = (each.structure.keys for each in (left, right))
    return one[:length] == other[:length]


def _up_to(matched: Matched, ends: tuple[int, int]) -> Matched:
    return Matched(
        matched.left,
        matched.right,
        [place for place in matched.only_left if place < ends[0]],
        [place for place in matched.only_right if place < ends[1]],
    )
