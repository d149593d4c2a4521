"""Records of two runs find each other again, whatever was added, left out or moved."""

from functools import cache
from itertools import pairwise
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torchrepro.verdict.matching import fewest_left_over
from torchrepro.verdict.value import Kind

from .traces import Op, Step, compared, diverged, value

LETTERS = st.lists(st.sampled_from(range(3)), max_size=9)
UNIQUE = st.lists(st.integers(), unique=True, min_size=1, max_size=40)


def _op(name: str, number: object) -> Op:
    return Op(f"aten::{name}", outputs=(value(number),))


@given(UNIQUE, st.data())
def test_what_moved_is_found_again(items: list[int], data: st.DataObject) -> None:
    """Ops with names of their own go with their like wherever they went: the runs are the same."""
    left = [_op(f"op{item}", item) for item in items]
    start = data.draw(st.integers(0, len(left)))
    end = data.draw(st.integers(start, len(left)))
    rest = left[:start] + left[end:]
    place = data.draw(st.integers(0, len(rest)))

    assert compared([Step((*left,))], [Step((*rest[:place], *left[start:end], *rest[place:]))]).same


def test_an_op_left_out_is_not_the_one_of_its_name_that_was_added_elsewhere() -> None:
    """An op that has a namesake beyond ops that both runs have is one that only one run has."""
    left = [_op("x", 1), _op("a", 1), _op("b", 1), _op("c", 1)]
    first = diverged([Step((*left,))], [Step((*left[1:], _op("x", 2)))])

    assert (first.kind, first.op) == (Kind.ONLY_ONE, "aten::x")
    assert first.right is None


def test_the_first_of_a_longer_run_of_alike_ops_is_the_one_more() -> None:
    """An op that was added before one of its name is named, though all after it differs."""
    left = [Step((_op("a", 1), _op("b", 1), _op("c", 1)))]
    first = diverged(left, [Step((_op("a", 1), _op("b", 2), _op("b", 3), _op("c", 2)))])

    assert first.kind is Kind.ONLY_ONE
    assert first.right is not None
    assert first.right.output_fingerprints == (value(2).hex(),)


@given(LETTERS, LETTERS, st.randoms(use_true_random=False))
def test_fewest_records_are_left_over_and_then_pairs_cost_least(
    one: list[int], other: list[int], chance: Random
) -> None:
    """No matching in order leaves fewer records, and none that leaves as few has cheaper pairs."""
    left, right = np.array(one, int), np.array(other, int)
    facts = [
        np.array([chance.randint(0, 1) for _ in side], int) for _ in "ab" for side in (one, other)
    ]
    prices = [(facts[0], facts[1], 2), (facts[2], facts[3], 1)]

    found = fewest_left_over(left, right, prices)

    assert found is not None
    pairs = list(zip(*(places.tolist() for places in found), strict=True))
    costs = {
        (i, j): sum(int(a[i] != b[j]) * price for a, b, price in prices)
        for i in range(len(one))
        for j in range(len(other))
    }
    assert all(one[i] == other[j] for i, j in pairs)
    assert all(i < k and j < n for (i, j), (k, n) in pairwise(pairs))
    assert (-len(pairs), sum(costs[pair] for pair in pairs)) == _best(one, other, costs)


def _best(one: list[int], other: list[int], prices: dict[tuple[int, int], int]) -> tuple[int, int]:

    @cache
    def rest(i: int, j: int) -> tuple[int, int]:
        if i == len(one) or j == len(other):
            return 0, 0
        found = [rest(i + 1, j), rest(i, j + 1)]
        if one[i] == other[j]:
            pairs, price = rest(i + 1, j + 1)
            found.append((pairs - 1, price + prices[i, j]))
        return min(found)

    return rest(0, 0)


def test_sequences_with_little_in_common_end_the_search_soon() -> None:
    """What is too much work is not sought; a few records more among thousands are found."""
    chance = np.random.default_rng(0)
    left, right = (chance.integers(0, 300, 20_000) for _ in "ab")

    assert fewest_left_over(left, right) is None
    found = fewest_left_over(left, np.concatenate([left[:5000], right[:9], left[5000:]]))
    assert found is not None
    assert len(found[0]) == len(left)
