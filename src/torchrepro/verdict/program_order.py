"""Matches the records of two runs in the order of the program, with few left over.

Of one program, records of one line belong together. A program may have been edited in between,
which shifts its lines: then ops are matched whatever their lines are, by how much they agree in.
"""

from __future__ import annotations

from itertools import chain, compress, count, pairwise
from operator import ne
from typing import TYPE_CHECKING, Any

from torchrepro.verdict.fewest_gaps import FewestGaps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torchrepro.verdict.columns import Columns
    from torchrepro.verdict.fewest_gaps import Cost

    Pairs = Sequence[tuple[int, int]]
    Sides = tuple[Columns, Columns]
    Prices = dict[str, int]
    """What it costs that two records differ in a column."""


def pairs_in_order(left: Columns, right: Columns, finest: Sequence[str]) -> tuple[Pairs, bool]:
    """Return the places of records that belong together, and whether their lines tell.

    `finest` are the columns in which records may agree. There are no pairs if it is too much work.
    """
    head, tail = _equal_ends(left, right, ("lines", *finest))
    ends = len(left) - tail, len(right) - tail
    between = left.part(head, ends[0]), right.part(head, ends[1])
    pairs, by_lines = _pairs_between((left, right), between, finest)
    if pairs is None:
        return [], False
    first = zip(range(head), range(head), strict=True)
    last = zip(range(ends[0], len(left)), range(ends[1], len(right)), strict=True)
    return [*first, *((head + one, head + other) for one, other in pairs), *last], by_lines


def _pairs_between(
    whole: Sides, between: Sides, finest: Sequence[str]
) -> tuple[Pairs | None, bool]:
    """Match what is between the ends, by lines if it is one program and else by ops.

    If one run did all that the other did, and some ops more, that says which of the two it is.
    """
    facts = [name for name in finest if name != "keys"]
    shorter = min(map(len, between))
    by_line = _cheapest(*between, ("keys", "lines"), dict.fromkeys(facts, 1))
    if by_line is not None and len(by_line) == shorter:
        return by_line, True
    by_op = _of_ops(*between, facts)
    if by_op is not None and len(by_op) == shorter:
        return by_op, False
    if by_line is None or not _lines_do_the_same(whole, between):
        return by_op, False
    return sorted([*by_line, *_within_gaps(between, by_line, facts)]), True


def _lines_do_the_same(whole: Sides, between: Sides) -> bool:
    """Whether nine of ten lines that both runs have between the ends do the same ops in both."""
    ops = [_ops_by_line(side) for side in whole]
    common = set(between[0].column("lines")).intersection(between[1].column("lines"))
    same = sum(ops[0][line] == ops[1][line] for line in common)
    return bool(common) and 10 * same >= 9 * len(common)


def _ops_by_line(side: Columns) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for line, key in set(zip(side.column("lines"), side.column("keys"), strict=True)):
        found.setdefault(line, set()).add(key)
    return found


def _within_gaps(sides: Sides, pairs: Pairs, facts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of ops of other lines between neighbouring pairs."""
    left, right = sides
    ends = [(-1, -1), *pairs, (len(left), len(right))]
    for (left_end, right_end), (left_next, right_next) in pairwise(ends):
        if left_next - left_end > 1 and right_next - right_end > 1:
            some = left.part(left_end + 1, left_next), right.part(right_end + 1, right_next)
            for one, other in _of_ops(*some, facts) or ():
                yield left_end + 1 + one, right_end + 1 + other


def _of_ops(left: Columns, right: Columns, facts: Sequence[str]) -> Pairs | None:
    """Match ops by how much they agree in, and by their lines where that is the same."""
    dearer = min(len(left), len(right)) + 1  # than all lines
    return _cheapest(left, right, ("keys",), {**dict.fromkeys(facts, dearer), "lines": 1})


def _cheapest(left: Columns, right: Columns, names: Sequence[str], prices: Prices) -> Pairs | None:
    """Match records that agree in `names`, with the fewest left over, at the lowest price."""
    if len(left) > len(right):
        turned = _cheapest(right, left, names, prices)
        return turned and [(one, other) for other, one in turned]
    tokens = (side.tokens(names, range(len(side))) for side in (left, right))
    found = FewestGaps.of(*_numbered(*tokens))
    return None if found is None else found.cheapest(_cost(left, right, prices))


def _numbered(*sides: Sequence[Any]) -> tuple[Sequence[int], ...]:
    """Return a number for each token: numbers are quicker to compare."""
    numbers = {token: number for number, token in enumerate(chain(*sides))}
    return tuple([numbers[token] for token in side] for side in sides)


def _cost(left: Columns, right: Columns, prices: Prices) -> Cost:
    """Return what it costs to pair two records: the prices of the columns in which they differ."""
    facts = [(left.column(name), right.column(name), price) for name, price in prices.items()]

    def cost(place: int, partner: int) -> int:
        total = 0
        for one, other, price in facts:
            if one[place] != other[partner]:
                total += price
        return total

    return cost


def _equal_ends(left: Columns, right: Columns, names: Sequence[str]) -> tuple[int, int]:
    """Return how many records at the beginning, and how many at the end, are equal."""
    columns = [(left.column(name), right.column(name)) for name in names]
    shorter = min(len(left), len(right))
    head = min(_shared(one, other, shorter) for one, other in columns)
    tail = min(_shared(one[::-1], other[::-1], shorter - head) for one, other in columns)
    return head, tail


def _shared(left: Sequence[Any], right: Sequence[Any], most: int) -> int:
    return next(compress(count(), map(ne, left[:most], right[:most])), most)
