"""Whether one thing takes at most so many times as long as another, on a machine that is not quiet.

The two are timed in turn, and each pair gives a ratio. Half of all ratios lie below their median,
so how many of those measured do is a matter of tossing fair coins, whatever the noise looks like:
two of the sorted ratios hold the median between them with a known chance.
"""

import math
import operator
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

FIRST_LOOK = 8
"""Pairs before the first look at them; there are twice as many at each later one."""

LOOKS = 8
"""Looks after which an open question stays open."""

ERROR = 0.01
"""How often the first look may be wrong; each later one half as often, so all of them add up."""


@dataclass(frozen=True)
class Comparison:
    """What pairs of timings say: the median of each side, and that of the pairs in its interval."""

    plain: float
    other: float
    median: float
    low: float
    high: float
    pairs: int

    def refutes(self, bound: float) -> bool:
        """Whether the whole interval lies above `bound`."""
        return self.low > bound

    def decides(self, bound: float) -> bool:
        """Whether the whole interval lies on one side of `bound`."""
        return self.refutes(bound) or self.high <= bound

    def cells(self, name: str, bound: float, scale: float = 1, unit: str = "") -> tuple[str, str]:
        """Return the cells of a table's row: what is asked, what was seen, and how surely."""
        median, low, high = (f"{value * scale:.3f}" for value in (self.median, self.low, self.high))
        undecided = "" if self.decides(bound) else ", undecided"
        return (
            f"{name} (at most {bound * scale:g}{unit})",
            f"{median}{unit} ({low} to {high}, {self.pairs} pairs{undecided})",
        )


def compare(
    plain: Callable[[], float],
    other: Callable[[], float],
    bound: float,
    *,
    by: Callable[[float, float], float] = operator.truediv,
    seconds: float = 12,
) -> Comparison:
    """Time `plain` and `other` in turn until it is clear on which side of `bound` they compare.

    Both return the seconds that they took. After so many seconds, or the last look, it ends as it
    is; the first look is always taken.
    """
    plain(), other()  # the first call of anything loads and allocates
    end = time.monotonic() + seconds
    pairs: list[tuple[float, float]] = []
    for look in range(LOOKS):
        while len(pairs) < FIRST_LOOK << look and (look == 0 or time.monotonic() < end):
            pairs.append(_pair(plain, other, len(pairs)))
        seen = _comparison(pairs, by, ERROR / 2**look)
        if seen.decides(bound) or time.monotonic() >= end:
            break
    return seen


def require(held: bool, bound: str) -> None:
    """Fail in CI, which says so by the variable CI, if a measurement missed a bound.

    Elsewhere the miss is printed and not fatal: another program on the machine may be its cause.
    """
    if held:
        return
    if os.environ.get("CI"):
        pytest.fail(f"missed: {bound}")
    pytest.xfail(f"missed on this machine: {bound}")


def interval(values: Sequence[float], error: float) -> tuple[float, float]:
    """Return the two of `values` between which the true median lies, but for a chance of `error`.

    With too few values to say, everything.
    """
    ordered = sorted(values)
    outside, below = 0, 0  # `below` of the values are left out at each end
    while (outside := outside + math.comb(len(ordered), below)) / 2 ** len(ordered) <= error / 2:
        below += 1
    return (ordered[below - 1], ordered[-below]) if below else (-math.inf, math.inf)


def _pair(
    plain: Callable[[], float], other: Callable[[], float], number: int
) -> tuple[float, float]:
    """Time both, the one that came second last time first."""
    if number % 2:
        return plain(), other()
    later = other()
    return plain(), later


def _comparison(
    pairs: Sequence[tuple[float, float]], by: Callable[[float, float], float], error: float
) -> Comparison:
    compared = [by(other, plain) for plain, other in pairs]
    plain, other = (statistics.median(side) for side in zip(*pairs, strict=True))
    median = statistics.median(compared)
    return Comparison(plain, other, median, *interval(compared, error), len(pairs))
