"""Matches the items of two sequences, of which some were added, left out or moved.

Records are matched in their order first (`program_order`), so that as few as possible are left
over. Values decide only among such matchings. Otherwise an op that reads by chance what another
reads elsewhere would be taken for that op, and an op more would be found there.

What is left over, or all if that is too much, is matched in linear time. That goes in rounds, from
tokens that say all about an item to tokens that only name it. An item whose token is unique on both
sides is found wherever it moved, and its neighbours with it:
P. Heckel, "A technique for isolating differences between files", CACM 21 (4), 1978.
https://doi.org/10.1145/359460.359467
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from dataclasses import dataclass
from itertools import compress, count
from operator import gt, ne
from typing import TYPE_CHECKING, Any

from torchrepro.verdict.program_order import pairs_in_order

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

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
    whole: bool = False
    """Whether each record has the one at the same place for a partner."""
    moved: frozenset[int] = frozenset()
    """Places in `left` of records whose partners are not in the same order."""

    @classmethod
    def place_by_place(cls, length: int) -> MatchedRecords:
        """Match two sequences of one length, record by record."""
        return cls(range(length), range(length), whole=True)

    def column(
        self, name: str, left: Columns, right: Columns
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return a column of both sequences, of the records that have a partner."""
        one, other = left.column(name), right.column(name)
        if self.whole:
            return one, other
        return list(map(one.__getitem__, self.left)), list(map(other.__getitem__, self.right))


def match(left: Columns, right: Columns, rounds: Sequence[Names]) -> MatchedRecords:
    """Match records in their order by the columns of each round, the finest first."""
    if left.structure.keys == right.structure.keys:
        return MatchedRecords.place_by_place(len(left))
    matching = Matching(len(left), len(right))
    pairs, by_lines = pairs_in_order(left, right, rounds[0])
    matching.join_all(pairs)
    if not pairs:
        _join_ends(matching, _tokens(left, rounds[0]), _tokens(right, rounds[0]))
    if by_lines:  # what moved has its line as well
        rounds = [("lines", *rounds[0]), *rounds]
    if _some_are_free(matching):
        sides = ([_tokens(side, names) for names in rounds] for side in (left, right))
        _join_rest(matching, *sides)
    return _matched_records(matching)


def _tokens(side: Columns, names: Names) -> Tokens:
    return side.tokens(names, range(len(side)))


def _matched_records(matching: Matching) -> MatchedRecords:
    partners = matching.of_left
    matched = [place for place, partner in enumerate(partners) if partner != FREE]
    others = [partners[place] for place in matched]
    moved = frozenset[int]()
    if any(map(gt, others, others[1:])):
        moved = frozenset(matched).difference(_rising(partners))
    return MatchedRecords(matched, others, _free(partners), _free(matching.of_right), moved=moved)


class Matching:
    """The partner of each item, as far as it is known."""

    def __init__(self, left: int, right: int) -> None:
        self.of_left = [FREE] * left
        self.of_right = [FREE] * right

    def join(self, left: int, right: int) -> None:
        """Note that two items are the same."""
        self.of_left[left] = right
        self.of_right[right] = left

    def join_all(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Note that the items of each pair are the same."""
        for left, right in pairs:
            self.join(left, right)

    def join_where_free(self, left: int, right: int, tokens: tuple[Tokens, Tokens]) -> None:
        """Join two neighbours of joined items if they have the same token and are free."""
        if not (0 <= left < len(self.of_left) and 0 <= right < len(self.of_right)):
            return
        if self.of_right[right] == FREE and tokens[0][left] == tokens[1][right]:
            self.join(left, right)


def in_sequence(left: Sequence[Tokens], right: Sequence[Tokens]) -> list[int]:
    """Return the partner of each left item in a sequence that keeps its order, or `FREE`.

    `left` and `right` hold the tokens of each round, from the finest to the coarsest. Only the
    finest round finds items that moved. A coarser one matches between items that are matched.
    """
    matching = Matching(len(left[0]), len(right[0]))
    _join_ends(matching, left[0], right[0])
    _join_rest(matching, left, right)
    return matching.of_left


def _join_rest(matching: Matching, left: Sequence[Tokens], right: Sequence[Tokens]) -> None:
    """Join the items that are free, round by round."""
    _match(matching, (left[0], right[0]))
    tokens: tuple[Tokens, Tokens] = (left[0], right[0])
    for pair in zip(left[1:], right[1:], strict=True):
        if not _some_are_free(matching):
            break
        tokens = _within_gaps(matching, pair)
        _match(matching, tokens)
    _join_in_order(matching, tokens)


def _some_are_free(matching: Matching) -> bool:
    return FREE in matching.of_left and FREE in matching.of_right


def _join_ends(matching: Matching, left: Tokens, right: Tokens) -> None:
    """Join the equal items at the beginning and at the end."""
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
    for left, right in _by_token(matching, tokens):
        if len(left) == len(right) == 1:
            matching.join(left[0], right[0])
    _spread(matching, tokens)
    for left, right in _by_token(matching, tokens):
        if len(left) == len(right):
            for pair in zip(left, right, strict=True):
                matching.join(*pair)


def _by_token(
    matching: Matching, tokens: tuple[Tokens, Tokens]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the free items of both sides by token, where both sides have some."""
    right = _places_by_token(matching.of_right, tokens[1])
    for token, places in _places_by_token(matching.of_left, tokens[0]).items():
        if token in right:
            yield places, right[token]


def _places_by_token(partners: Sequence[int], tokens: Tokens) -> dict[Hashable, list[int]]:
    found: dict[Hashable, list[int]] = defaultdict(list)
    for place in _free(partners):
        found[tokens[place]].append(place)
    return found


def _free(partners: Sequence[int]) -> list[int]:
    return [place for place, partner in enumerate(partners) if partner == FREE]


def _spread(matching: Matching, tokens: tuple[Tokens, Tokens]) -> None:
    """Join neighbours of joined items if they have the same token; both ends count as joined.

    Backward comes first. Where a run of equal tokens is longer on one side, the surplus item is
    then the first of the run, and all that differs because of it follows it.
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
    """Return tokens that are equal only within the same gap between items joined in order."""
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
    """Return the left places of the most pairs that are in the same order on both sides.

    https://en.wikipedia.org/wiki/Longest_increasing_subsequence
    """
    lowest: list[int] = []  # the smallest partner at which a run of each length ends
    last_places: list[int] = []
    previous: dict[int, int] = {}
    for place, partner in enumerate(partners):
        if partner == FREE:
            continue
        length = bisect_left(lowest, partner)
        previous[place] = last_places[length - 1] if length else FREE
        lowest[length : length + 1] = [partner]
        last_places[length : length + 1] = [place]
    run: list[int] = []
    place = last_places[-1] if last_places else FREE
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
