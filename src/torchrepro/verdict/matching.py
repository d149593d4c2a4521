"""Matches the records of two runs, of which some were added, left out or moved.

Records of the main thread are matched in their order, so that the fewest are left over. Often more
than one matching does that. Of these, the one is chosen whose pairs differ in the fewest columns:
otherwise an op that reads by chance what another reads elsewhere would be taken for that op. What
is left over may have moved.

What other threads did is one multiset of records: when they did it, and which of a pool, is an
accident. The order of a thread decides only which of its records are left over.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

Array = Any  # an array of numpy
Pairs = tuple[Array, Array]
"""Of the left run and of the right one: records, or places of those that belong together."""

FREE, CUT_OFF, FED = -1, -2, -3  # in place of a partner: there is none, or none is expected

CELLS, CELLS_PER_RECORD = 1 << 22, 16
"""How much is looked at for the fewest records left over; beyond it, equal ones are paired that are
there as often in both runs."""

NEVER = 1 << 40
"""The cost of a pair that must not be. A matching of other pairs costs less."""

UNREACHED = 1 << 61
_NO_PAIRS = (np.zeros(0, int), np.zeros(0, int))

CUT_OFF_STEPS = 1
"""Ends of steps that records at an end of a thread may span and still count as cut off."""


_MIX, _SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(29)
"""An odd number whose multiples of 64 bits look random: D. Knuth, TAOCP 3, 6.4."""


@dataclass(frozen=True, slots=True)
class Matching:
    """The partner of each record of two runs: its place, `FREE` or `CUT_OFF`."""

    partners: Pairs

    @classmethod
    def none(cls, left: Array, right: Array) -> Matching:
        return cls((np.full(len(left), FREE), np.full(len(right), FREE)))

    @property
    def pairs(self) -> Pairs:
        """The places of records that have a partner, in the order of the left run."""
        partners = self.partners[0]
        places = np.flatnonzero(partners >= 0)
        return places, partners[places]

    @property
    def in_order(self) -> Pairs:
        """Most of the pairs, in the same order in both runs."""
        left, right = self.pairs
        if (np.diff(right) > 0).all():
            return left, right
        rising = _rising(right.tolist())
        return left[rising], right[rising]

    def free(self, side: int) -> Array:
        """Return the places of the records of one run that have no partner."""
        return np.flatnonzero(self.partners[side] == FREE)

    def join(self, pairs: Pairs) -> None:
        left, right = pairs
        self.partners[0][left] = right
        self.partners[1][right] = left

    def join_neighbours(self, left: Array, right: Array) -> None:
        """Join free neighbours of joined records if they have the same token."""
        mine, theirs = self.partners
        for turn in (-1, 1):
            while True:
                here, there = self.pairs
                here, there = here + turn, there + turn
                inside = (here >= 0) & (there >= 0) & (here < len(left)) & (there < len(right))
                here, there = here[inside], there[inside]
                found = (
                    (mine[here] == FREE) & (theirs[there] == FREE) & (left[here] == right[there])
                )
                if not found.any():
                    break
                self.join((here[found], there[found]))

    def join_equal(self, left: Array, right: Array, *, as_often: bool = False) -> None:
        """Join free records with the same token, the first with the first.

        With `as_often` only those whose token is there as often in both runs.
        """
        here, there = self.free(0), self.free(1)
        one, other = (np.argsort(each, kind="stable") for each in (left[here], right[there]))
        mine, theirs = left[here][one], right[there][other]
        turn = np.arange(len(mine)) - np.searchsorted(mine, mine, "left")
        start = np.searchsorted(theirs, mine, "left")
        often = np.searchsorted(theirs, mine, "right") - start
        found = turn < often
        if as_often:
            found = np.searchsorted(mine, mine, "right") - np.arange(len(mine)) + turn == often
        self.join((here[one[found]], there[other[(start + turn)[found]]]))


def match(left: Array, right: Array, rounds: Sequence[Sequence[str]]) -> Matching:
    """Match records of the main thread by the columns of each round, the finest first."""
    if np.array_equal(left["key"], right["key"]):
        places = np.arange(len(left))
        return Matching((places, places))
    found = Matching.none(left, right)
    finest = ("line", *rounds[0])
    head, tail = _equal_ends(*_tokens((left, right), finest))
    for many, first, other in ((head, 0, 0), (tail, len(left) - tail, len(right) - tail)):
        found.join((np.arange(first, first + many), np.arange(other, other + many)))
    between = left[head : len(left) - tail], right[head : len(right) - tail]
    pairs, by_lines = _in_order((left, right), between, rounds[0])
    found.join((pairs[0] + head, pairs[1] + head))
    names = finest if by_lines else rounds[0]
    tokens = _tokens((left, right), names)
    found.join_equal(*tokens, as_often=True)
    found.join_neighbours(*tokens)
    found.join_equal(*tokens, as_often=True)
    for names in rounds if len(found.free(0)) and len(found.free(1)) else ():
        # Only within the gap between two pairs.
        each = zip(found.in_order, _tokens((left, right), names), strict=True)
        found.join_equal(
            *(
                mixed([np.searchsorted(anchors, np.arange(len(some)), "right"), some])
                for anchors, some in each
            )
        )
    return found


def mixed(columns: Sequence[Array]) -> Array:
    """Return a hash of 64 bits for each row of some columns."""
    found = np.zeros(len(columns[0]), "uint64")
    for column in columns:
        found = (found ^ column.astype("uint64")) * _MIX
        found ^= found >> _SHIFT
    return found


def _tokens(sides: Pairs, names: Sequence[str]) -> Pairs:
    left, right = (mixed([side[name] for name in names]) for side in sides)
    return left, right


def _equal_ends(left: Array, right: Array) -> tuple[int, int]:
    shorter = min(len(left), len(right))
    unequal = np.flatnonzero(left[:shorter] != right[:shorter])
    head = int(unequal[0]) if len(unequal) else shorter
    rest = shorter - head
    unequal = np.flatnonzero(left[::-1][:rest] != right[::-1][:rest])
    return head, int(unequal[0]) if len(unequal) else rest


def _in_order(runs: Pairs, between: Pairs, finest: Sequence[str]) -> tuple[Pairs, bool]:
    """Match what is between equal ends, by lines if it is one program and else by ops.

    An edit of the program shifts its lines. If one run did all that the other did, and some ops
    more, that says which of the two it is. Returns the pairs, and whether lines tell.
    """
    shorter = min(map(len, between))
    columns = [name for name in finest if name != "key"]
    by_line = fewest_left_over(*_tokens(between, ("key", "line")), _prices(between, columns, 1))
    if by_line is not None and len(by_line[0]) == shorter:
        return by_line, True
    by_op = _by_op(between, columns)
    if by_op is not None and len(by_op[0]) == shorter:
        return by_op, False
    if by_line is None or not _lines_do_the_same(runs, between):
        return by_op or _NO_PAIRS, False
    found = [by_line]
    ends = (
        [-1, *places.tolist(), len(side)] for places, side in zip(by_line, between, strict=True)
    )
    for (here, here_next), (there, there_next) in zip(*map(pairwise, ends), strict=True):
        if here_next - here > 1 and there_next - there > 1:
            gap = between[0][here + 1 : here_next], between[1][there + 1 : there_next]
            one, other = _by_op(gap, columns) or _NO_PAIRS
            found.append((one + here + 1, other + there + 1))
    one, other = (np.concatenate(places) for places in zip(*found, strict=True))
    return (one, other), True


def _by_op(sides: Pairs, columns: Sequence[str]) -> Pairs | None:
    dearer = min(*map(len, sides), 1000) + 1  # than all lines
    prices = _prices(sides, columns, dearer) + _prices(sides, ["line"], 1)
    return fewest_left_over(*_tokens(sides, ("key",)), prices)


def _prices(sides: Pairs, names: Sequence[str], price: int) -> list[tuple[Array, Array, int]]:
    return [(sides[0][name], sides[1][name], price) for name in names]


def _lines_do_the_same(runs: Pairs, between: Pairs) -> bool:
    ops: list[dict[int, set[int]]] = [{}, {}]
    for side, found in zip(runs, ops, strict=True):
        for line, key in set(zip(side["line"].tolist(), side["key"].tolist(), strict=True)):
            found.setdefault(line, set()).add(key)
    common = set(between[0]["line"].tolist()).intersection(between[1]["line"].tolist())
    same = sum(ops[0][line] == ops[1][line] for line in common)
    return bool(common) and 10 * same >= 9 * len(common)


def fewest_left_over(
    left: Array, right: Array, prices: Sequence[tuple[Array, Array, int]] = ()
) -> Pairs | None:
    """Match equal tokens in their order; None if it is too much work.

    The fewest are left over. Of such matchings it is the one whose pairs cost least: each price is
    paid where two arrays differ. Of those that cost the same, it is the one in which what is left
    over comes first: what differs because of an item more then follows it.

    S. Wu, U. Manber, G. Myers, W. Miller, "An O(NP) sequence comparison algorithm", Information
    Processing Letters 35 (6), 1990. https://doi.org/10.1016/0020-0190(90)90035-V
    """
    if len(left) > len(right):
        turned = fewest_left_over(right, left, [(b, a, price) for a, b, price in prices])
        return turned and turned[::-1]
    more, skipped = len(right) - len(left), 0
    most = max(CELLS, CELLS_PER_RECORD * (len(left) + len(right)))
    while skipped <= len(left) and (skipped + 1) * (more + skipped + 1) * (len(left) + 1) <= most:
        found = _within(left, right, prices, skipped)
        if found is not None:
            return found
        skipped = len(left) if skipped < len(left) < 2 * skipped else 2 * skipped or 1
    return None


def _within(
    left: Array, right: Array, prices: Sequence[tuple[Array, Array, int]], skipped: int
) -> Pairs | None:
    """Return the best matching that leaves over at most so many of the shorter sequence, if any.

    `costs` has what it costs at least to match the beginnings of both. It is kept by how many of
    the shorter sequence were left over, by diagonal, and by how far the shorter one is matched. A
    diagonal is how much further the longer one is: a pair stays on it, an item left over of the
    longer one leads to the next, one of the shorter one to the one before.
    """
    size, more = len(left), len(right) - len(left)
    sums: dict[int, Array] = {}  # what it costs to pair all on a diagonal
    for diagonal in range(-skipped, more + skipped + 1):
        first, end = max(0, -diagonal), min(size, len(right) - diagonal)
        one, other = slice(first, end), slice(first + diagonal, end + diagonal)
        price = (left[one] != right[other]) * NEVER
        for mine, theirs, each in prices:
            price += (mine[one] != theirs[other]) * each
        paid = np.full(size + 1, NEVER)
        paid[0] = 0
        paid[first + 1 : end + 1] = price
        sums[diagonal] = np.cumsum(paid)
    nowhere = np.full(size + 1, UNREACHED)
    costs: dict[tuple[int, int], Array] = {}
    for gaps in range(skipped + 1):
        for diagonal in range(-gaps, more + skipped - gaps + 1):
            enters = costs.get((gaps, diagonal - 1), nowhere).copy()
            by_shorter = costs.get((gaps - 1, diagonal + 1), nowhere)
            enters[1:] = np.minimum(enters[1:], by_shorter[:-1])
            if gaps == diagonal == 0:
                enters[0] = 0
            total = sums[diagonal]
            costs[gaps, diagonal] = np.minimum.accumulate(enters - total) + total
    gaps = next((gaps for gaps in range(skipped + 1) if costs[gaps, more][size] < NEVER), -1)
    if gaps < 0:
        return None
    place, diagonal = size, more
    stretches: list[tuple[Array, Array]] = []
    while place or diagonal or gaps:
        its = costs[gaps, diagonal][: place + 1]
        entered = np.flatnonzero(np.diff(its) != np.diff(sums[diagonal][: place + 1]))
        begin = int(entered[-1]) + 1 if len(entered) else 0
        lefts = np.arange(begin, place)
        stretches.append((lefts, lefts + diagonal))
        place = begin
        by_shorter = costs.get((gaps - 1, diagonal + 1), nowhere)
        if place and by_shorter[place - 1] == its[place]:
            gaps, diagonal, place = gaps - 1, diagonal + 1, place - 1
        elif diagonal or gaps:
            diagonal -= 1
    mine, theirs = zip(*[_NO_PAIRS, *stretches[::-1]], strict=True)
    return np.concatenate(mine), np.concatenate(theirs)


def _rising(numbers: Sequence[int]) -> Array:
    """Return the places of the most numbers that rise.

    https://en.wikipedia.org/wiki/Longest_increasing_subsequence
    """
    lowest: list[int] = []  # the smallest number at which a run of each length ends
    last_places: list[int] = []
    previous: list[int] = []
    for place, number in enumerate(numbers):
        length = bisect_left(lowest, number)
        previous.append(last_places[length - 1] if length else -1)
        lowest[length : length + 1] = [number]
        last_places[length : length + 1] = [place]
    run: list[int] = []
    place = last_places[-1] if last_places else -1
    while place >= 0:
        run.append(place)
        place = previous[place]
    return np.array(run[::-1], int)


def match_threads(
    left: Array, right: Array, rounds: Sequence[Sequence[str]], *, partial: bool
) -> Matching:
    """Match what threads beside the main one did in all steps.

    Records at an end of a thread that only one run has may have been cut off by the end of the
    recording, or by its beginning where it is `partial`. They are a difference if both runs have
    records more at the same end, if they span more than about a step, or if the runs have less than
    half in common.
    """
    sides = left, right
    found = Matching.none(left, right)
    for names in (("thread_name", *rounds[0]), rounds[0]):
        found.join_equal(*_tokens(sides, names))
    if len(found.free(0)) or len(found.free(1)):
        lanes = [_lanes(side) for side in sides]
        for name in {*left["thread_name"].tolist(), *right["thread_name"].tolist()}:
            of_name = [
                [lane for lane in its if side["thread_name"][lane[0]] == name]
                for side, its in zip(sides, lanes, strict=True)
            ]
            _note_cut_off(found, sides, of_name, partial=partial)
        _note_cut_off(found, sides, lanes, partial=partial)
    by_result = ("key", "argument", "shape", "outputs")  # when a step ends tells inputs apart
    for names in (by_result, *rounds[1:]) if "outputs" in rounds[0] else rounds[1:]:
        for columns in (("thread_name", *names), names):
            found.join_equal(*_tokens(sides, columns))
    return found


def _lanes(records: Array) -> list[Array]:
    order = np.argsort(records["thread"], kind="stable")
    lanes = np.split(order, np.flatnonzero(np.diff(records["thread"][order])) + 1)
    return [lane for lane in lanes if len(lane)]


def _note_cut_off(
    found: Matching, sides: Pairs, lanes: Sequence[Sequence[Array]], *, partial: bool
) -> None:
    """Expect no partner for what is left over of some threads, if it was cut off."""
    surplus: list[tuple[int, Array]] = []
    at_head, at_tail, sizes = set[int](), set[int](), [0, 0]
    for side, partners in enumerate(found.partners):
        for lane in lanes[side]:
            paired = np.flatnonzero(partners[lane] != FREE)
            if not len(paired) or len(paired) <= paired[-1] - paired[0]:
                return
            sizes[side] += len(lane)
            for end, at in ((lane[: paired[0]], at_head), (lane[paired[-1] + 1 :], at_tail)):
                if len(end):
                    at.add(side)
                    surplus.append((side, end))
                    steps = sides[side]["step"][end]
                    if steps[-1] - steps[0] > CUT_OFF_STEPS:
                        return
    if (at_head and not partial) or len(at_head) > 1 or len(at_tail) > 1:
        return
    in_common = sizes[0] - sum(len(end) for side, end in surplus if side == 0)
    if 2 * in_common >= min(sizes):
        for side, end in surplus:
            found.partners[side][end] = CUT_OFF
