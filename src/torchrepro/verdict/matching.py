"""Which record of a step of one run is which of the other's, on the main thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrepro.verdict.alignment import FREE, in_sequence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrepro.verdict.columns import Columns

    Names = Sequence[str]


@dataclass(frozen=True, slots=True)
class Matched:
    """Places of two sequences of records that belong together, in the order of the left one."""

    left: Sequence[int]
    right: Sequence[int]
    only_left: Sequence[int] = ()
    only_right: Sequence[int] = ()


def match(left: Columns, right: Columns, rounds: Sequence[Names]) -> Matched:
    """Match records in their order by the columns of each round, the finest first."""
    if go_together(left, right):
        return Matched(range(len(left)), range(len(right)))
    places = range(len(left)), range(len(right))
    partners = in_sequence(
        [left.tokens(names, places[0]) for names in rounds],
        [right.tokens(names, places[1]) for names in rounds],
    )
    matched = [place for place, partner in enumerate(partners) if partner != FREE]
    only_left = [place for place, partner in enumerate(partners) if partner == FREE]
    taken = {*partners}
    return Matched(
        matched,
        [partners[place] for place in matched],
        only_left,
        [place for place in places[1] if place not in taken],
    )


def go_together(left: Columns, right: Columns) -> bool:
    """Whether each record goes with the one at its own place."""
    return left.structure.keys == right.structure.keys
