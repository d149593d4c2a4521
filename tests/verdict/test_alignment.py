"""Items of two sequences find each other again, whatever was added, left out or moved."""

from functools import cache
from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from torchrepro.verdict.alignment import FREE, in_sequence
from torchrepro.verdict.fewest_gaps import FewestGaps

Item = tuple[str, int]

ITEMS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=30)
LETTERS = st.lists(st.sampled_from("abc"), max_size=9)
UNIQUE = st.lists(st.integers(), unique=True, min_size=1, max_size=40)


def _rounds(items: list[Item]) -> list[list[object]]:
    """Say all of an item, then only its name."""
    return [list(items), [name for name, _ in items]]


def _pairs(partners: list[int]) -> list[tuple[int, int]]:
    return [(left, right) for left, right in enumerate(partners) if right != FREE]


@given(ITEMS, ITEMS)
def test_partners_are_alike_and_nobody_has_two(left: list[Item], right: list[Item]) -> None:
    """An item goes with at most one other, of its own name."""
    pairs = _pairs(in_sequence(_rounds(left), _rounds(right)))

    assert all(left[one][0] == right[other][0] for one, other in pairs)
    assert len({other for _, other in pairs}) == len(pairs)


@given(UNIQUE, st.data())
def test_what_was_added_has_no_partner_and_all_else_has(
    items: list[int], data: st.DataObject
) -> None:
    """Items added anywhere, of a name that others have as well, are exactly those left over."""
    left = [("ab"[item % 2], item) for item in items]
    right, added = list(left), data.draw(st.integers(0, 5))
    for number in range(added):
        place = data.draw(st.integers(0, len(right)))
        right.insert(place, ("ab"[number % 2], 2**70 + number))

    partners = in_sequence(_rounds(left), _rounds(right))

    assert [right[partner] for partner in partners] == left


@given(UNIQUE, st.data())
def test_what_moved_is_found_again(items: list[int], data: st.DataObject) -> None:
    """A block of items goes with its like wherever it went."""
    left = [("a", item) for item in items]
    start = data.draw(st.integers(0, len(left)))
    end = data.draw(st.integers(start, len(left)))
    rest = left[:start] + left[end:]
    place = data.draw(st.integers(0, len(rest)))
    right = rest[:place] + left[start:end] + rest[place:]

    partners = in_sequence(_rounds(left), _rounds(right))

    assert [right[partner] for partner in partners] == left


@given(st.integers(1, 30), st.data())
def test_an_item_more_is_found_though_all_after_it_differs(size: int, data: st.DataObject) -> None:
    """Names alone tell which item was added if its neighbours have other names."""
    place = data.draw(st.integers(0, size))
    names = "abcdefg"
    left = [(names[number % 7], number) for number in range(size)]
    later = [(name, -number - 1) for name, number in left[place:]]
    right = [*left[:place], ("new", 0), *later]

    partners = in_sequence(_rounds(left), _rounds(right))

    assert partners == [*range(place), *range(place + 1, size + 1)]


def test_a_coarse_round_does_not_reach_across_what_is_matched() -> None:
    """An item left out here is not the one of the same name that was added there."""
    left = [("x", 1), ("a", 1), ("b", 1), ("c", 1)]
    right = [("a", 1), ("b", 1), ("c", 1), ("x", 2)]

    assert in_sequence(_rounds(left), _rounds(right)) == [FREE, 0, 1, 2]


def test_the_first_of_a_longer_run_of_alike_items_is_the_one_more() -> None:
    """An item that was added before one of its name has no partner, though all after it differs."""
    left = [("a", 1), ("b", 1), ("c", 1)]
    right = [("a", 1), ("b", 2), ("b", 3), ("c", 2)]

    assert in_sequence(_rounds(left), _rounds(right)) == [0, 2, 3]


@given(LETTERS, LETTERS, st.randoms(use_true_random=False))
def test_fewest_items_are_left_over_and_then_pairs_cost_least(
    one: list[str], other: list[str], chance: Random
) -> None:
    """No matching in order leaves fewer items, and none that leaves as few has cheaper pairs."""
    shorter, longer = (list(map(ord, items)) for items in sorted((one, other), key=len))
    prices = {(i, j): chance.randint(0, 3) for i in range(len(shorter)) for j in range(len(longer))}

    found = FewestGaps.of(shorter, longer)

    assert found is not None
    pairs = found.cheapest(lambda i, j: prices[i, j])
    assert all(shorter[i] == longer[j] for i, j in pairs)
    assert all(i < k and j < n for (i, j), (k, n) in pairwise(pairs))
    assert (-len(pairs), sum(prices[pair] for pair in pairs)) == _best(shorter, longer, prices)


def _best(one: list[int], other: list[int], prices: dict[tuple[int, int], int]) -> tuple[int, int]:
    """Return the most pairs, as a negative number, and what so many cost at least."""

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


def test_a_matching_that_is_too_much_work_is_not_sought() -> None:
    """Sequences that have next to nothing in common end the search soon."""
    chance = Random(0)
    left, right = ([chance.randrange(300) for _ in range(20_000)] for _ in "ab")

    assert FewestGaps.of(left, right) is None
    assert FewestGaps.of(left, left[:5000] + right[:3000] + left[5000:]) is not None
