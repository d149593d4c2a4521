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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from torchrepro.ground.console import as_text, table

FIRST_LOOK = 8
"""Pairs before the first look at them; there are twice as many at each later one."""

LOOKS = 8
"""Looks after which an open question stays open."""

ERROR = 0.01
"""How often the first look may be wrong; each later one half as often, so all of them add up."""

NEVER = 1e-6
"""The same where the truth may be the bound itself, so that chance alone would refute it: what is
said to cost nothing costs exactly as much. It takes 32 pairs to say anything."""


@dataclass(frozen=True)
class Estimate:
    """What rounds of timings say of a ratio: its median in its interval."""

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

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f}, {self.pairs} pairs)"

    def cells(self, name: str, bound: float, aim: float | None = None) -> tuple[str, str]:
        """Return the cells of a table's row: what is asked, what was seen, and how surely."""
        surely = "" if self.decides(bound) else ", undecided"
        missed = ", MISSED" if self.refutes(bound) else ""
        aimed = "" if aim is None else f", aim {aim:g}"
        return f"{name} (at most {bound:g}{aimed})", f"{self}{surely}{missed}"


@dataclass(frozen=True)
class Comparison(Estimate):
    """What pairs of timings say of two things: their ratio, and the median of each."""

    plain: float
    other: float


Round = Mapping[str, float]
"""The seconds that each of several things took, one right after the other."""


def seconds_of(what: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


@dataclass(frozen=True)
class Question:
    """A figure that each round gives, and what it is held to; no bound for one to be printed."""

    of: Callable[[Round], float]
    bound: float = math.nan


def compare(
    plain: Callable[[], float],
    other: Callable[[], float],
    bound: float,
    *,
    by: Callable[[float, float], float] = operator.truediv,
    seconds: float = 12,
    error: float = ERROR,
) -> Comparison:
    """Time `plain` and `other` in turn until it is clear on which side of `bound` they compare.

    Both return the seconds that they took. After so many seconds, or the last look, it ends as it
    is; the first look that can refute a bound is always taken.
    """
    question = Question(lambda took: by(took["other"], took["plain"]), bound)
    timers = {"other": other, "plain": plain}
    took, (seen,) = take_turns(timers, [question], seconds=seconds, error=error)
    return Comparison(seen.median, seen.low, seen.high, seen.pairs, took["plain"], took["other"])


def take_turns(
    timers: Mapping[str, Callable[[], float]],
    questions: Sequence[Question],
    *,
    seconds: float = 12,
    error: float = ERROR,
) -> tuple[Round, list[Estimate]]:
    """Time several things in turn until every question is decided, as `compare` does for two.

    Returns the median of each, and the answer to each question.
    """
    for timed in timers.values():
        timed()  # the first call of anything loads and allocates
    end = time.monotonic() + seconds
    rounds: list[Round] = []
    first = next(look for look in range(LOOKS) if _can_refute(look, error))
    for look in range(LOOKS):
        while len(rounds) < FIRST_LOOK << look and (look <= first or time.monotonic() < end):
            rounds.append(_round(timers, backward=bool(len(rounds) % 2)))
        answers = [_answer(rounds, question, error / 2**look) for question in questions]
        decided = all(
            math.isnan(question.bound) or answer.decides(question.bound)
            for question, answer in zip(questions, answers, strict=True)
        )
        if decided or (look >= first and time.monotonic() >= end):
            break
    return {name: statistics.median(took[name] for took in rounds) for name in timers}, answers


def _can_refute(look: int, error: float) -> bool:
    return interval(range(FIRST_LOOK << look), error / 2**look)[0] > -math.inf


def require(held: bool, bound: str) -> None:
    """Fail in CI, which says so by the variable CI, if a measurement missed a bound.

    Elsewhere the miss is printed and not fatal: another program on the machine may be its cause.
    """
    if held:
        return
    if os.environ.get("CI"):
        pytest.fail(f"missed: {bound}")
    pytest.xfail(f"missed on this machine: {bound}")


def show(title: str, rows: Iterable[tuple[str, ...]]) -> None:
    """Print a table of what was measured."""
    print(f"\n{as_text(title, table(('', 'measured'), rows))}")


Timed = tuple[str, Callable[[], float]]
"""What is timed, in words, and what returns the seconds that it took."""


def hold(
    title: str,
    bound: float,
    plain: Timed,
    other: Timed,
    more: Callable[[Comparison], Iterable[tuple[str, str]]] = lambda seen: (),
    **options: Any,
) -> None:
    """Require that `other` takes at most `bound` times as long as `plain`, and print both.

    `more` gives further rows of the table, and `options` are those of `compare`.
    """
    seen = compare(plain[1], other[1], bound, **options)
    took = ((plain[0], seen.plain), (other[0], seen.other))
    rows = [
        (name, f"{taken * 1e3:.1f} ms" if taken > 1e-3 else f"{taken * 1e6:.1f} us")
        for name, taken in took
    ]
    show(title, [*rows, *more(seen), seen.cells("ratio", bound)])
    require(not seen.refutes(bound), f"{bound:g} times {plain[0]}")


def interval(values: Sequence[float], error: float) -> tuple[float, float]:
    """Return the two of `values` between which the true median lies, but for a chance of `error`.

    With too few values to say, everything.
    """
    ordered = sorted(values)
    outside, below = 0, 0  # `below` of the values are left out at each end
    while (outside := outside + math.comb(len(ordered), below)) / 2 ** len(ordered) <= error / 2:
        below += 1
    return (ordered[below - 1], ordered[-below]) if below else (-math.inf, math.inf)


def _round(timers: Mapping[str, Callable[[], float]], *, backward: bool) -> Round:
    """Time each once; the one that came last in the round before comes first."""
    order = reversed(timers) if backward else iter(timers)
    return {name: timers[name]() for name in order}


def _answer(rounds: Sequence[Round], question: Question, error: float) -> Estimate:
    figures = [question.of(took) for took in rounds]
    return Estimate(statistics.median(figures), *interval(figures, error), len(rounds))
