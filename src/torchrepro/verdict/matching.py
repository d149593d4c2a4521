"""Matching of the records of two runs, after ops were added, removed or moved.

Records of the main thread are aligned in order, with as few unmatched records as possible. Of all
such alignments, the alignment whose pairs differ in the fewest columns is chosen. Otherwise an op
could be matched with another op that happens to read equal values. Records that stay unmatched may
have moved, so they are matched out of order.

Records of other threads are matched in any order, because timing decides the order of ops and the
thread that runs an op. The order in a thread only decides which equal records stay unmatched.
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
"""Records, or positions of matched records: an array for the left run and one for the right."""

UNMATCHED, TRUNCATED, DOWNSTREAM = -1, -2, -3
"""In place of a partner: it is missing, or not expected because the recording was cut off, or
because the record depends on ignored records."""

CELLS, CELLS_PER_RECORD = 1 << 22, 16
"""Size of the largest table for the cheapest alignment, in total and per record. Longer sequences
are not aligned: only tokens that are equally frequent in both runs are matched."""

NEVER = 1 << 40
"""The cost of a forbidden pair. Any alignment without such pairs costs less."""

UNREACHED = 1 << 61
_NO_PAIRS = (np.zeros(0, int), np.zeros(0, int))

TRUNCATED_STEPS = 1
"""How many ends of steps the records at an end of a thread may span to count as truncated."""


_MIX, _SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(29)
"""An odd number for multiplicative hashing to 64 bits, and a shift: D. Knuth, TAOCP 3, 6.4."""


@dataclass(frozen=True, slots=True)
class Matching:
    """For each record of two runs, the position of its partner, or a constant like `UNMATCHED`."""

    partners: Pairs

    @classmethod
    def none(cls, left: Array, right: Array) -> Matching:
        return cls((np.full(len(left), UNMATCHED), np.full(len(right), UNMATCHED)))

    @property
    def pairs(self) -> Pairs:
        """The positions of matched records in both runs, in the order of the left run."""
        partners = self.partners[0]
        places = np.flatnonzero(partners >= 0)
        return places, partners[places]

    @property
    def in_order(self) -> Pairs:
        """The largest subset of `pairs` that has the same order in both runs."""
        left, right = self.pairs
        if (np.diff(right) > 0).all():
            return left, right
        rising = _rising(right.tolist())
        return left[rising], right[rising]

    def free(self, run: int) -> Array:
        """Return the positions of the unmatched records of one run."""
        return np.flatnonzero(self.partners[run] == UNMATCHED)

    def join(self, pairs: Pairs) -> None:
        left, right = pairs
        self.partners[0][left] = right
        self.partners[1][right] = left

    def join_neighbours(self, left: Array, right: Array) -> None:
        """Match two records with equal tokens that stand next to a matched pair in both runs."""
        mine, theirs = self.partners
        for shift in (-1, 1):
            while True:
                at_left, at_right = self.pairs
                at_left, at_right = at_left + shift, at_right + shift
                inside = (
                    (at_left >= 0)
                    & (at_right >= 0)
                    & (at_left < len(left))
                    & (at_right < len(right))
                )
                at_left, at_right = at_left[inside], at_right[inside]
                can_join = (
                    (mine[at_left] == UNMATCHED)
                    & (theirs[at_right] == UNMATCHED)
                    & (left[at_left] == right[at_right])
                )
                if not can_join.any():
                    break
                self.join((at_left[can_join], at_right[can_join]))

    def join_equal(self, left: Array, right: Array, *, as_often: bool = False) -> None:
        """Match unmatched records with equal tokens in order: the first with the first, and so on.

        If `as_often` is true, tokens that are not equally frequent in both runs are skipped.
        """
        lefts, rights = self.free(0), self.free(1)
        by_left, by_right = (
            np.argsort(tokens, kind="stable") for tokens in (left[lefts], right[rights])
        )
        mine, theirs = left[lefts][by_left], right[rights][by_right]
        rank = np.arange(len(mine)) - np.searchsorted(mine, mine, "left")
        start = np.searchsorted(theirs, mine, "left")
        copies = np.searchsorted(theirs, mine, "right") - start
        has_partner = rank < copies
        if as_often:
            has_partner = (
                np.searchsorted(mine, mine, "right") - np.arange(len(mine)) + rank == copies
            )
        self.join((lefts[by_left[has_partner]], rights[by_right[(start + rank)[has_partner]]]))


def match(left: Array, right: Array, rounds: Sequence[Sequence[str]]) -> Matching:
    """Match records of the main thread. Each of `rounds` lists the columns that must be equal."""
    if np.array_equal(left["key"], right["key"]):
        places = np.arange(len(left))
        return Matching((places, places))
    matching = Matching.none(left, right)
    finest = ("line", *rounds[0])
    head, tail = _equal_ends(*_tokens((left, right), finest))
    for size, i, j in ((head, 0, 0), (tail, len(left) - tail, len(right) - tail)):
        matching.join((np.arange(i, i + size), np.arange(j, j + size)))
    between = left[head : len(left) - tail], right[head : len(right) - tail]
    pairs, by_lines = _in_order((left, right), between, rounds[0])
    matching.join((pairs[0] + head, pairs[1] + head))
    names = finest if by_lines else rounds[0]
    tokens = _tokens((left, right), names)
    matching.join_equal(*tokens, as_often=True)
    matching.join_neighbours(*tokens)
    matching.join_equal(*tokens, as_often=True)
    if not (len(matching.free(0)) and len(matching.free(1))):
        return matching
    for names in rounds:
        # Match only within the gap between two pairs.
        runs = zip(matching.in_order, _tokens((left, right), names), strict=True)
        matching.join_equal(
            *(
                mixed([np.searchsorted(anchors, np.arange(len(some)), "right"), some])
                for anchors, some in runs
            )
        )
    return matching


def mixed(columns: Sequence[Array]) -> Array:
    """Return for each row a hash of 64 bits of its values in `columns`: the token of a record."""
    hashed = np.zeros(len(columns[0]), "uint64")
    for column in columns:
        hashed = (hashed ^ column.astype("uint64")) * _MIX
        hashed ^= hashed >> _SHIFT
    return hashed


def _tokens(sides: Pairs, names: Sequence[str]) -> Pairs:
    left, right = (mixed([records[name] for name in names]) for records in sides)
    return left, right


def _equal_ends(left: Array, right: Array) -> tuple[int, int]:
    shorter = min(len(left), len(right))
    unequal = np.flatnonzero(left[:shorter] != right[:shorter])
    head = int(unequal[0]) if len(unequal) else shorter
    rest = shorter - head
    unequal = np.flatnonzero(left[::-1][:rest] != right[::-1][:rest])
    return head, int(unequal[0]) if len(unequal) else rest


def _in_order(runs: Pairs, between: Pairs, finest: Sequence[str]) -> tuple[Pairs, bool]:
    """Align records in order. Returns the pairs, and whether lines were used.

    `runs` has all records, and `between` only those after the equal beginning and before the equal
    end. Lines are used if both runs have the same source, because an edit of the program shifts
    line numbers. Otherwise ops are used. An alignment that matches all records of the shorter run
    is accepted at once.
    """
    shorter = min(map(len, between))
    columns = [name for name in finest if name != "key"]
    by_line = cheapest_alignment(*_tokens(between, ("key", "line")), _prices(between, columns, 1))
    if by_line is not None and len(by_line[0]) == shorter:
        return by_line, True
    by_op = _by_op(between, columns)
    if by_op is not None and len(by_op[0]) == shorter:
        return by_op, False
    if by_line is None or not _lines_have_same_ops(runs, between):
        return by_op or _NO_PAIRS, False
    pieces = [by_line]
    ends = (
        [-1, *places.tolist(), len(records)]
        for places, records in zip(by_line, between, strict=True)
    )
    for (left_end, left_next), (right_end, right_next) in zip(*map(pairwise, ends), strict=True):
        if left_next - left_end > 1 and right_next - right_end > 1:
            gap = between[0][left_end + 1 : left_next], between[1][right_end + 1 : right_next]
            lefts, rights = _by_op(gap, columns) or _NO_PAIRS
            pieces.append((lefts + left_end + 1, rights + right_end + 1))
    lefts, rights = (np.concatenate(places) for places in zip(*pieces, strict=True))
    return (lefts, rights), True


def _by_op(sides: Pairs, columns: Sequence[str]) -> Pairs | None:
    dearer = min(*map(len, sides), 1000) + 1  # costs more than differences in all lines together
    prices = _prices(sides, columns, dearer) + _prices(sides, ["line"], 1)
    return cheapest_alignment(*_tokens(sides, ("key",)), prices)


def _prices(sides: Pairs, names: Sequence[str], price: int) -> list[tuple[Array, Array, int]]:
    return [(sides[0][name], sides[1][name], price) for name in names]


def _lines_have_same_ops(runs: Pairs, between: Pairs) -> bool:
    ops: list[dict[int, set[int]]] = [{}, {}]
    for records, ops_of_line in zip(runs, ops, strict=True):
        for line, key in set(zip(records["line"].tolist(), records["key"].tolist(), strict=True)):
            ops_of_line.setdefault(line, set()).add(key)
    common = set(between[0]["line"].tolist()).intersection(between[1]["line"].tolist())
    same = sum(ops[0][line] == ops[1][line] for line in common)
    return bool(common) and 10 * same >= 9 * len(common)


def cheapest_alignment(
    left: Array, right: Array, prices: Sequence[tuple[Array, Array, int]] = ()
) -> Pairs | None:
    """Return the cheapest alignment of equal tokens in order; None if the sequences are too long.

    As few tokens as possible stay unmatched. Of all such alignments, the cheapest is chosen. Each
    of the `prices` has an array for each run, and a price that a pair costs if its two elements in
    the arrays differ. If several alignments are equally cheap, unmatched tokens come as early as
    possible. An additional op then comes before the differences that it causes.

    S. Wu, U. Manber, G. Myers, W. Miller, "An O(NP) sequence comparison algorithm", Information
    Processing Letters 35 (6), 1990. https://doi.org/10.1016/0020-0190(90)90035-V
    """
    if len(left) > len(right):
        turned = cheapest_alignment(right, left, [(b, a, price) for a, b, price in prices])
        return turned and turned[::-1]
    surplus, skipped = len(right) - len(left), 0
    most = max(CELLS, CELLS_PER_RECORD * (len(left) + len(right)))
    while (
        skipped <= len(left) and (skipped + 1) * (surplus + skipped + 1) * (len(left) + 1) <= most
    ):
        pairs = _best_alignment(left, right, prices, skipped)
        if pairs is not None:
            return pairs
        skipped = len(left) if skipped < len(left) < 2 * skipped else 2 * skipped or 1
    return None


def _best_alignment(
    left: Array, right: Array, prices: Sequence[tuple[Array, Array, int]], skipped: int
) -> Pairs | None:
    """Return the best alignment with at most `skipped` unmatched tokens of `left`, or None.

    `left` is the shorter sequence. ``costs[gaps, diagonal][n]`` is the lowest cost of an alignment
    of ``left[:n]`` with ``right[:n + diagonal]`` that has `gaps` unmatched tokens of `left`. A pair
    of tokens stays on the same diagonal. An unmatched token of `right` leads to the next diagonal.
    An unmatched token of `left` leads to the previous diagonal.
    """
    size, surplus = len(left), len(right) - len(left)
    sums: dict[int, Array] = {}  # diagonal -> cumulated costs of its pairs
    for diagonal in range(-skipped, surplus + skipped + 1):
        first, end = max(0, -diagonal), min(size, len(right) - diagonal)
        on_left, on_right = slice(first, end), slice(first + diagonal, end + diagonal)
        price = (left[on_left] != right[on_right]) * NEVER
        for mine, theirs, extra_price in prices:
            price += (mine[on_left] != theirs[on_right]) * extra_price
        paid = np.full(size + 1, NEVER)
        paid[0] = 0
        paid[first + 1 : end + 1] = price
        sums[diagonal] = np.cumsum(paid)
    nowhere = np.full(size + 1, UNREACHED)
    costs: dict[tuple[int, int], Array] = {}
    for gaps in range(skipped + 1):
        for diagonal in range(-gaps, surplus + skipped - gaps + 1):
            enters = costs.get((gaps, diagonal - 1), nowhere).copy()
            by_shorter = costs.get((gaps - 1, diagonal + 1), nowhere)
            enters[1:] = np.minimum(enters[1:], by_shorter[:-1])
            if gaps == diagonal == 0:
                enters[0] = 0
            total = sums[diagonal]
            costs[gaps, diagonal] = np.minimum.accumulate(enters - total) + total
    gaps = next((gaps for gaps in range(skipped + 1) if costs[gaps, surplus][size] < NEVER), -1)
    if gaps < 0:
        return None
    position, diagonal = size, surplus
    stretches: list[tuple[Array, Array]] = []
    while position or diagonal or gaps:
        so_far = costs[gaps, diagonal][: position + 1]
        entered = np.flatnonzero(np.diff(so_far) != np.diff(sums[diagonal][: position + 1]))
        begin = int(entered[-1]) + 1 if len(entered) else 0
        lefts = np.arange(begin, position)
        stretches.append((lefts, lefts + diagonal))
        position = begin
        by_shorter = costs.get((gaps - 1, diagonal + 1), nowhere)
        if position and by_shorter[position - 1] == so_far[position]:
            gaps, diagonal, position = gaps - 1, diagonal + 1, position - 1
        elif diagonal or gaps:
            diagonal -= 1
    mine, theirs = zip(*[_NO_PAIRS, *stretches[::-1]], strict=True)
    return np.concatenate(mine), np.concatenate(theirs)


def _rising(numbers: Sequence[int]) -> Array:
    """Return the positions of the longest increasing subsequence of `numbers`.

    https://en.wikipedia.org/wiki/Longest_increasing_subsequence
    """
    lowest: list[int] = []  # for each length, the smallest last number of such a subsequence
    last_places: list[int] = []
    previous: list[int] = []
    for position, number in enumerate(numbers):
        length = bisect_left(lowest, number)
        previous.append(last_places[length - 1] if length else -1)
        lowest[length : length + 1] = [number]
        last_places[length : length + 1] = [position]
    run: list[int] = []
    position = last_places[-1] if last_places else -1
    while position >= 0:
        run.append(position)
        position = previous[position]
    return np.array(run[::-1], int)


def match_threads(
    left: Array, right: Array, rounds: Sequence[Sequence[str]], *, partial: bool
) -> Matching:
    """Match the records of all threads except the main thread, over all steps.

    Recordings end at different times, so additional records of one run at the end of a thread count
    as truncated. `partial` recordings also begin at different times, so this applies to the
    beginning of a thread too. The additional records count as a difference if both runs have some
    at the same end, if they span more than about a step, or if less than half of all are matched.
    """
    sides = left, right
    matching = Matching.none(left, right)
    for names in (("thread_name", *rounds[0]), rounds[0]):
        matching.join_equal(*_tokens(sides, names))
    if len(matching.free(0)) or len(matching.free(1)):
        lanes = [_lanes(records) for records in sides]
        for name in {*left["thread_name"].tolist(), *right["thread_name"].tolist()}:
            of_name = [
                [lane for lane in of_run if records["thread_name"][lane[0]] == name]
                for records, of_run in zip(sides, lanes, strict=True)
            ]
            _mark_truncated(matching, sides, of_name, partial=partial)
        _mark_truncated(matching, sides, lanes, partial=partial)
    by_result = ("key", "argument", "shape", "outputs")  # inputs may depend on the step's timing
    for names in (by_result, *rounds[1:]) if "outputs" in rounds[0] else rounds[1:]:
        for columns in (("thread_name", *names), names):
            matching.join_equal(*_tokens(sides, columns))
    return matching


def _lanes(records: Array) -> list[Array]:
    order = np.argsort(records["thread"], kind="stable")
    lanes = np.split(order, np.flatnonzero(np.diff(records["thread"][order])) + 1)
    return [lane for lane in lanes if len(lane)]


def _mark_truncated(
    matching: Matching, sides: Pairs, lanes: Sequence[Sequence[Array]], *, partial: bool
) -> None:
    """Mark unmatched records at the ends of threads as truncated, if `match_threads` permits it."""
    surplus: list[tuple[int, Array]] = []
    at_head, at_tail, sizes = set[int](), set[int](), [0, 0]
    for run, partners in enumerate(matching.partners):
        for lane in lanes[run]:
            paired = np.flatnonzero(partners[lane] != UNMATCHED)
            if not len(paired) or len(paired) <= paired[-1] - paired[0]:
                return
            sizes[run] += len(lane)
            for end, at in ((lane[: paired[0]], at_head), (lane[paired[-1] + 1 :], at_tail)):
                if len(end):
                    at.add(run)
                    surplus.append((run, end))
                    steps = sides[run]["step"][end]
                    if steps[-1] - steps[0] > TRUNCATED_STEPS:
                        return
    if (at_head and not partial) or len(at_head) > 1 or len(at_tail) > 1:
        return
    in_common = sizes[0] - sum(len(end) for run, end in surplus if run == 0)
    if 2 * in_common >= min(sizes):
        for run, end in surplus:
            matching.partners[run][end] = TRUNCATED
