"""What may be asked of two runs: the same random numbers, the same bits, or nearly the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torchrepro.errors import Problem, TraceError
from torchrepro.verdict.digests import AT_EVERY_LEVEL, Digests, Streams
from torchrepro.verdict.judging import (
    Bits,
    Tolerance,
    refuse_missing_statistics,
    refuse_unequal_algorithms,
)
from torchrepro.verdict.records import Records

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrepro.verdict.pair import Pair, StepFound
    from torchrepro.verdict.value import Divergence


class Comparison(Protocol):
    """A comparison of two traces, step by step."""

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
    level: str = ""
    """What `Compared.level` is to say; empty for the level of the recordings."""


def _bits(pair: Pair) -> Comparison:
    if _levels(pair)[0] != _levels(pair)[1]:
        return Digests(pair, AT_EVERY_LEVEL)
    records = Records(pair, Bits(pair))
    refuse_unequal_algorithms(records.algorithms)
    return records


streams = Asked(Streams, level="streams")
"""The same states of all random generators, as the guarantee `seeded` has it."""

bits = Asked(_bits)
"""The same bits, as the guarantee `repeatable` has it; on the same kinds of device."""


def tolerance(rtol: float, atol: float) -> Asked:
    """Return what asks for nearly the same values, as `aligned` has it; it takes statistics."""

    def comparison(pair: Pair) -> Comparison:
        refuse_missing_statistics(pair)
        levels = _levels(pair)
        if levels[0] != levels[1]:
            raise TraceError(
                Problem(
                    "recorded at other levels, which have no statistics in common",
                    found=" and ".join(levels),
                    todo="record both at the same level",
                )
            )
        return Records(pair, Tolerance(pair, rtol, atol))

    return Asked(comparison, (rtol, atol))


def _levels(pair: Pair) -> tuple[str, str]:
    left, right = (str(trace.meta.get("level", "op")) for trace in pair.traces)
    return left, right
