"""What may be asked of two runs: the same bits, or the same numbers within a tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torchrepro.verdict.digests import AT_EVERY_LEVEL, Digests
from torchrepro.verdict.judging import Bits, Tolerance, lacks_statistics, refuse_unequal_algorithms
from torchrepro.verdict.records import Records

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchrepro.verdict.pair import Pair, StepFound
    from torchrepro.verdict.value import Divergence

ALIGNED = (1e-3, 1e-5)
"""The rtol and atol of the guarantee `aligned`, if nobody gives others.

A thousandth is ten thousand times the rounding of float32, so another order of summation stays
within it through many steps, while another random number, a skipped op or a lost sample does not.
bfloat16 rounds by 0.004: there ``rtol`` 0.016 is to be given, which is what
https://docs.pytorch.org/docs/stable/testing.html has for it. Of what is near zero, ``atol`` is
what the same page has for float32.
"""


class Comparison(Protocol):
    """A comparison of two traces, step by step."""

    @property
    def anything(self) -> bool:
        """Whether the traces hold anything that is compared."""

    def step(self, number: int) -> StepFound:
        """Compare one step."""

    def otherwise(self) -> Divergence | None:
        """Return what differs although no step has shown it."""

    def notes(self) -> list[str]:
        """Return what a reader has to know of the comparison."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of two runs."""

    comparison: Callable[[Pair], Comparison]
    """Raises `TraceError` for recordings of which this cannot be asked."""
    tolerance: tuple[float, float] | None = None
    """rtol and atol, where statistics are compared and not bits."""
    notes: tuple[str, ...] = ()
    """Why this is asked, where nobody has named it."""
    if_unequal: str = ""
    """What more is to be said of runs that are not the same."""


def asked_of(
    pairs: Sequence[Pair], given: tuple[float, float] | None, *, one_program: bool = False
) -> Asked:
    """Return what is asked of the traces of two runs, of which `given` are rtol and atol.

    Without them it is the same bits, unless both runs were recorded under the guarantee `aligned`,
    which asks for a tolerance itself. Bits that agree are within any tolerance, so they are what
    is asked of recordings that have no statistics in common. `one_program` says that both runs
    are of one command on one machine, so that each op of one has its counterpart in the other.
    """
    notes: tuple[str, ...] = ()
    if given is None and pairs and all(_is_aligned(pair) for pair in pairs):
        given = ALIGNED
        notes = (
            "the tolerance is that of the guarantee `aligned`, under which both were recorded",
        )
    if given is None:
        return Asked(_bits)
    lacking = next(filter(None, map(_nothing_to_hold_to_a_tolerance, pairs)), "")
    if lacking:
        rtol, atol = given
        within = f"whether they agree within rtol={rtol:g}, atol={atol:g} cannot be told"
        return Asked(_bits, if_unequal=f"{within}: {lacking}")
    return Asked(
        lambda pair: Records(pair, Tolerance(pair, *given, needs_partner=one_program)), given, notes
    )


def _bits(pair: Pair) -> Comparison:
    if _levels(pair)[0] != _levels(pair)[1]:
        return Digests(pair, AT_EVERY_LEVEL)
    records = Records(pair, Bits(pair))
    refuse_unequal_algorithms(records.algorithms)
    return records


def _is_aligned(pair: Pair) -> bool:
    return all(trace.meta.get("guarantee") == "aligned" for trace in pair.traces)


def _nothing_to_hold_to_a_tolerance(pair: Pair) -> str:
    """Return why there is nothing that a tolerance works on, and what to record; else nothing."""
    levels = _levels(pair)
    if levels[0] != levels[1]:
        return (
            f"the levels {levels[0]} and {levels[1]} have no statistics in common; "
            "record both at one level"
        )
    if levels[0] != "op":
        return f"the level {levels[0]} has no statistics of tensors; record both at the level op"
    return lacks_statistics(pair)


def _levels(pair: Pair) -> tuple[str, str]:
    left, right = (str(trace.meta.get("level", "op")) for trace in pair.traces)
    return left, right
