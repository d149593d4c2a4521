"""What is asked of the runs of a command: what the guarantee of its profile promises."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torchrepro.verdict import asked
from torchrepro.verdict.comparing import answer, compare
from torchrepro.verdict.words import place

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrepro.verdict.value import Verdict

RTOL, ATOL = 1e-3, 1e-5
"""What `aligned` takes for nearly the same, if nobody says more.

A thousandth is ten thousand times the rounding of float32, so another order of summation stays
within it through many steps, while another random number, a skipped op or a lost sample does not.
bfloat16 rounds by 0.004: there ``rtol`` 0.016 is to be given, which is what
https://docs.pytorch.org/docs/stable/testing.html has for it. Of what is near zero, ``atol`` is
what the same page has for float32.
"""


@dataclass(frozen=True, slots=True)
class Question:
    """A way to ask whether two runs are the same."""

    name: str
    ask: Callable[[str, str], Verdict]
    statistics: bool = False
    """Whether the runs have to be recorded with statistics."""


def question_of(guarantee: str, rtol: float | None = None, atol: float | None = None) -> Question:
    """Return what a guarantee promises as a question; a tolerance that is given comes first."""
    if rtol is not None or atol is not None:
        return _within(rtol or 0.0, atol or 0.0)
    return QUESTIONS[guarantee]


def _within(rtol: float, atol: float) -> Question:
    return Question(
        "tolerance",
        lambda left, right: compare(left, right, rtol=rtol, atol=atol),
        statistics=True,
    )


def _streams(left: str, right: str) -> Verdict:
    """Compare random generators, and note whether the bits agree, which nobody has promised."""
    verdict = answer(left, right, asked.streams)
    bits = compare(left, right)
    found = (
        f"bit for bit they part {place(bits.first)}"
        if bits.first
        else "bit for bit they are the same as well"
    )
    promised = "" if verdict.same is bits.same else ", which `seeded` leaves open"
    return replace(verdict, notes=(f"{found}{promised}", *verdict.notes))


QUESTIONS = {
    "seeded": Question("streams", _streams),
    "repeatable": Question("bits", compare),
    "aligned": _within(RTOL, ATOL),
}
"""What each guarantee promises."""
