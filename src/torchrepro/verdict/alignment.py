"""Which item of one sequence is which of another: linear, whatever was added, left out or moved.

Matching goes in rounds, from tokens that say all about an item to tokens that only name it. An item
whose token is unique on both sides is found again wherever it went, and its neighbours with it:
P. Heckel, "A technique for isolating differences between files", CACM 21 (4), 1978.
https://doi.org/10.1145/359460.359467
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from dataclasses import dataclass
from itertools import compress, count
from operator import ne
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from torchrepro.verdict.columns import Columns

    Names = Sequence[str]
    Tokens = Sequence[Hashable]

FREE = -1


@dataclass(frozen=True, slots=True)
class MatchedRecords:
    """Places of two sequences of records that belong together, in the order of the left one."""

    left: Sequence[int]
    right: Sequence[int]
    only_left: Sequence[int] = ()
    only_right: Sequence[int] = ()


def match(left: Columns, right: Columns, rounds: Sequence[Names]) -> MatchedRecords:
    """Match records in their order by the columns of each round, the finest first."""
    places = range(len(left)), range(len(right))
    if left.structure.keys == right.structure.keys:
        return MatchedRecords(*places)
    partners = in_sequence(
        [left.tokens(names, places[0]) for names in rounds],
        [right.tokens(names, places[1]) for names in rounds],
    )
    matched = [place for place in places[0] if partners[place] != FREE]
    taken = {*partners}
    return MatchedRecords(
        matched,
        [partners[place] for place in matched],
        _free(partners),
        [place for place in places[1] if place not in taken],
    )


class Matching:
    """Which left item goes with which right one, as far as is known."""

    def __init__(self, left: int, right: int) -> None:
        self.of_left = [FREE] * left
        self.of_right = [FREE] * right

    def join(self, left: int, right: int) -> None:
        """Note that two items are the same."""
        self.of_left[left] = right
        self.of_right[right] = left

    def join_where_free(self, left: int, right: int, tokens: tuple[Tokens, Tokens]) -> None:
        """Join two neighbours of joined items if they are alike and free."""
        if not (0 <= left < len(self.of_left) and 0 <= right < len(self.of_right)):
            return
        if self.of_right[right] == FREE and tokens[0][left] == tokens[1][right]:
            self.join(left, right)


def in_sequence(left: Sequence[Tokens], right: Sequence[Tokens]) -> list[int]:
    """Return the partner of each left item in a sequence that keeps its order, or `FREE`.

    `left` and `right` hold the tokens of each round, from the finest to the coarsest. Only the
    finest finds an item again that moved; a coarser one stays between what is matched already.
    """
    matching = Matching(len(left[0]), len(right[0]))
    _join_ends(matching, left[0], right[0])
    _match(matching, (left[0], right[0]))
    tokens: tuple[Tokens, Tokens] = (left[0], right[0])
    for pair in zip(left[1:], right[1:], strict=True):
        if not _both_free(matching):
            break
        tokens = _within_gaps(matching, pair)
        _match(matching, tokens)
    _join_in_order(matching, tokens)
    return matching.of_left


def _both_free(matching: Matching) -> bool:
    return FREE in matching.of_left and FREE in matching.of_right


def _join_ends(matching: Matching, left: Tokens, right: Tokens) -> None:
    """Join what both begin with, and what both end with."""
    shorter = min(len(left), len(right))
    head = _shared(left, right, shorter)
    tail = _shared(left[::-1], right[::-1], shorter - head)
    for index in range(head):
        matching.join(index, index)
    for back in range(1, tail + 1):
        matching.join(len(left) - back, len(right) - back)


def _shared(left: Tokens, right: Tokens, most: int) -> int:
    unequal = compress(count(), map(ne, left[:most], right[:most]))
    return next(unequal, most)


def _match(matching: Matching, tokens: tuple[Tokens, Tokens]) -> None:
    for left, right in _alike(matching, tokens):
        if len(left) == len(right) == 1:
            matching.join(left[0], right[0])
    _spread(matching, tokens)
    for left, right in _alike(matching, tokens):
        if len(left) == len(right):
            for pair in zip(left, right, strict=True):
                matching.join(*pair)


def _alike(
    matching: Matching, tokens: tuple[Tokens, Tokens]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the free left and the free right items of each token that both have."""
    right = _free_by_token(matching.of_right, tokens[1])
    for token, places in _free_by_token(matching.of_left, tokens[0]).items():
        if token in right:
            yield places, right[token]


def _free_by_token(partners: Sequence[int], tokens: Tokens) -> dict[Hashable, list[int]]:
    found: dict[Hashable, list[int]] = defaultdict(list)
    for place in _free(partners):
        found[tokens[place]].append(place)
    return found


def _free(partners: Sequence[int]) -> list[int]:
    return [place for place, partner in enumerate(partners) if partner == FREE]


def _spread(matching: Matching, tokens: tuple[Tokens, Tokens]) -> None:
    """Join alike neighbours of joined items; the two ends count as joined.

    Backward first: where a run of alike items is longer on one side, the item more is then the
    first of them, whose follower is everything that differs because of it.
    """
    size, other = len(matching.of_left), len(matching.of_right)
    for left in reversed(_free(matching.of_left)):
        after = other if left + 1 == size else matching.of_left[left + 1]
        if after != FREE:
            matching.join_where_free(left, after - 1, tokens)
    for left in _free(matching.of_left):
        before = matching.of_left[left - 1] if left else FREE
        if not left or before != FREE:
            matching.join_where_free(left, before + 1, tokens)


def _within_gaps(matching: Matching, tokens: tuple[Tokens, Tokens]) -> tuple[Tokens, Tokens]:
    """Return tokens that are equal only between the same two joined items that kept their order."""
    anchors = _rising(matching.of_left)
    here = {left: number for number, left in enumerate(anchors)}
    there = {matching.of_left[left]: number for number, left in enumerate(anchors)}
    return (
        list(zip(tokens[0], _gaps(len(matching.of_left), here), strict=True)),
        list(zip(tokens[1], _gaps(len(matching.of_right), there), strict=True)),
    )


def _gaps(size: int, anchors: dict[int, int]) -> Iterator[int]:
    gap = FREE
    for place in range(size):
        gap = anchors.get(place, gap)
        yield gap


def _rising(partners: Sequence[int]) -> list[int]:
    """Return the left places of the longest run of pairs that are in the same order on both sides.

    https://en.wikipedia.org/wiki/Longest_increasing_subsequence
    """
    lowest: list[int] = []  # the smallest partner that ends a run of each length
    enders: list[int] = []
    previous: dict[int, int] = {}
    for place, partner in enumerate(partners):
        if partner == FREE:
            continue
        length = bisect_left(lowest, partner)
        previous[place] = enders[length - 1] if length else FREE
        lowest[length : length + 1] = [partner]
        enders[length : length + 1] = [place]
    run: list[int] = []
    place = enders[-1] if enders else FREE
    while place != FREE:
        run.append(place)
        place = previous[place]
    return run[::-1]


def _join_in_order(matching: Matching, tokens: tuple[Tokens, Tokens]) -> None:
    waiting: dict[Hashable, deque[int]] = defaultdict(deque)
    for right in _free(matching.of_right):
        waiting[tokens[1][right]].append(right)
    for left in _free(matching.of_left):
        places = waiting.get(tokens[0][left])
        if places:
            matching.join(left, places.popleft())
