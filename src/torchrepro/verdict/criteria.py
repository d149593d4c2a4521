"""When runs and their records count as the same: by bits, or by statistics within a tolerance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torchrepro.errors import TraceError
from torchrepro.messages import Problem
from torchrepro.verdict.columns import NAMES
from torchrepro.verdict.recordings import FIELDS, at_step, unequal_losses
from torchrepro.verdict.render import counted
from torchrepro.verdict.value import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchrepro.trace.format import Loss
    from torchrepro.verdict.columns import Pair
    from torchrepro.verdict.value import Divergence


RERECORD = (
    "record both again with --statistics, or under a profile whose guarantee is aligned, "
    "and compare them with --rtol and --atol"
)

ALIGNED = (1e-3, 1e-5)
"""The rtol and atol of the guarantee `aligned`, unless others are given.

A thousandth is ten thousand times the rounding of float32. Another order of summation stays within
it through many steps; another random number, a skipped op or a lost sample does not. bfloat16
rounds by 0.004 and needs ``rtol`` 0.016: https://docs.pytorch.org/docs/stable/testing.html.
``atol``, for values near zero, is what the same page has for float32.
"""

Statistics = tuple[int, float | None, float | None, float | None, float | None]
"""Count, mean, norm, low and high of an output."""


BY_BITS = (
    ("key", "argument", "shape", "inputs", "outputs"),
    ("key", "argument", "shape", "inputs"),
    ("key", "argument", "shape"),
    ("key",),
)
BY_STATISTICS = (
    ("key", "argument", "size"),
    ("key", "size"),
    ("key",),
    ("spot", "size"),  # devices have ops of their own for the same module
)


@dataclass(frozen=True, slots=True)
class Criteria:
    """What it takes for two runs to count as the same."""

    tolerance: tuple[float, float] | None = None
    """rtol and atol, where statistics are compared and not bits."""
    needs_partner: bool = True
    """Whether a record that only one run has is a difference.

    Across devices and precisions it is none: each may have ops of its own.
    """
    notes: tuple[str, ...] = ()
    """Why these criteria were chosen, where nobody named them."""
    note_if_different: str = ""
    """What else is to be said if the runs differ."""

    @property
    def matched_by(self) -> Sequence[Sequence[str]]:
        """The columns by which records are matched, the finest first."""
        return BY_BITS if self.tolerance is None else BY_STATISTICS


def criteria_for(
    pairs: Sequence[Pair], given: tuple[float, float] | None, *, one_program: bool = False
) -> Criteria:
    """Return the criteria for the traces of two runs; `given` are rtol and atol.

    Without them the criterion is the same bits, unless both runs were recorded under the guarantee
    `aligned`, which has a tolerance of its own. Equal bits are within any tolerance, so bits are
    compared where the recordings have no statistics in common. `one_program` says that both runs
    are of one command on one machine.
    """
    notes: tuple[str, ...] = ()
    if given is None and pairs and all(_is_aligned(pair) for pair in pairs):
        given = ALIGNED
        notes = (
            "the tolerance is that of the guarantee `aligned`, under which both were recorded",
        )
    if given is None:
        return Criteria()
    obstacle = next(filter(None, map(_lacks_statistics, pairs)), "")
    if obstacle:
        within = f"whether they agree within rtol={given[0]:g}, atol={given[1]:g} cannot be told"
        return Criteria(note_if_different=f"{within}: {obstacle}")
    return Criteria(given, one_program, notes)


def levels(pair: Pair) -> tuple[str, str]:
    """Return the levels of detail at which two traces were recorded."""
    left, right = (str(trace.meta.get("level", "op")) for trace in pair.traces)
    return left, right


def _is_aligned(pair: Pair) -> bool:
    return all(trace.meta.get("guarantee") == "aligned" for trace in pair.traces)


def _lacks_statistics(pair: Pair) -> str:
    """Return why there are no statistics to compare, and what to record; else nothing."""
    left, right = levels(pair)
    if left != right:
        return (
            f"the levels {left} and {right} have no statistics in common; record both at one level"
        )
    if left != "op":
        return f"the level {left} has no statistics of tensors; record both at the level op"
    lacking = [
        name
        for name, trace in zip(NAMES, pair.traces, strict=True)
        if not trace.meta.get("statistics")
    ]
    if not lacking:
        return ""
    have = "has" if len(lacking) == 1 else "have"
    return f"{' and '.join(lacking)} {have} no statistics of tensors; {RERECORD}"


def excess(
    left: Sequence[Statistics], right: Sequence[Statistics], rtol: float, atol: float
) -> str:
    """Return in words what is out of tolerance; nothing if all outputs are within it."""
    if len(left) != len(right):
        return f"statistics of {counted(len(left), 'output')} and of {len(right)}"
    if not left:
        return "they differ, and no statistics of them were recorded"
    for place, (one, other) in enumerate(zip(left, right, strict=True)):
        what = out_of_tolerance(one, other, rtol, atol)
        if what:
            return f"output {place}: {what}"
    return ""


def out_of_tolerance(left: Statistics, right: Statistics, rtol: float, atol: float) -> str:
    """Return which statistic shows that elements are out of tolerance, if one does.

    With elements within ``atol + rtol * |right|``, means are at most ``atol + rtol * rms`` apart,
    rms likewise (Minkowski), and extremes at most ``atol + rtol * max|right|``. The bound of the
    mean is relative to the rms because values around zero cancel in the mean.
    """
    if left[0] != right[0]:
        return f"{left[0]} and {right[0]} numbers besides NaN"
    rms = [_rms(one) for one in (left, right)]
    sizes = [abs(value) for value in right[3:] if value is not None and math.isfinite(value)]
    largest = max(sizes, default=0.0)
    rows: tuple[tuple[str, float | None, float | None, float | None], ...] = (
        ("mean", left[1], right[1], rms[1]),
        ("root mean square", rms[0], rms[1], rms[1]),
        ("lowest", left[3], right[3], largest),
        ("highest", left[4], right[4], largest),
    )
    for name, one, other, scale in rows:
        if not _near(one, other, atol + rtol * (scale or 0.0)):
            return f"{name} {_shown(one)} and {_shown(other)}"
    return ""


def unequal_loss(pair: Pair, step: int, criteria: Criteria) -> Callable[[], Divergence] | None:
    """Return what describes a loss of a step that is out of tolerance, if one is."""
    rtol, atol = criteria.tolerance or (0.0, 0.0)

    def differ(left: Loss, right: Loss) -> bool:
        return not _near(left.value, right.value, atol + rtol * abs(right.value or 0.0))

    what = unequal_losses(pair, step, differ)
    return partial(at_step, pair, step, Kind.VALUES, what, *FIELDS[0]) if what else None


def refuse_unequal_algorithms(used: tuple[frozenset[str], frozenset[str]]) -> None:
    """Raise `TraceError` if the bits of two runs cannot be compared at all."""
    if used[0] and used[1] and used[0] != used[1]:
        raise TraceError(
            Problem(
                "the two runs computed on other kinds of device, whose fingerprints differ",
                found=" and ".join(", ".join(sorted(names)) for names in used),
                todo=RERECORD,
            )
        )


def _rms(statistics: Statistics) -> float | None:
    count, _, norm, *_ = statistics
    return None if norm is None or not count else norm / math.sqrt(count)


def _near(left: float | None, right: float | None, most: float) -> bool:
    if left is None or right is None or left == right:  # SQLite has no NaN: it is None as well
        return left is right or left == right
    return math.isfinite(left) and math.isfinite(right) and abs(left - right) <= most


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"
