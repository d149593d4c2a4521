"""Two traces of the same process in two runs."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torchrepro.trace.reading import Trace
    from torchrepro.verdict.value import Divergence

PROPAGATED, INDEPENDENT, ALONE = "propagated", "independent", "alone"
"""How a record differs: as its inputs do, although they are equal, or for want of a partner."""

NAMES = ("A", "B")
"""What sentences call the two runs: their folders are long, and often alike."""


@dataclass(frozen=True)
class Pair:
    """The traces of one process in both runs."""

    left: Trace
    right: Trace
    runs: tuple[str, str]
    """The folders, as they were named."""

    @property
    def names(self) -> tuple[str, str]:
        """What sentences call the two runs."""
        return NAMES

    @cached_property
    def steps(self) -> Sequence[int]:
        """The steps that both have."""
        return [step for step in self.left.steps if step in self.right.steps]

    @property
    def traces(self) -> tuple[Trace, Trace]:
        """Both traces."""
        return self.left, self.right


@dataclass(slots=True)
class StepFound:
    """What the comparison of one step found."""

    tally: Counter[str] = field(default_factory=Counter)
    """Records that differ, by how they do, the first one included."""
    totals: Mapping[str, int] = field(default_factory=dict)
    """Records of each module."""
    differing: Mapping[str, int] = field(default_factory=dict)
    """Records of each module that differ."""
    first: Callable[[], Divergence] | None = None
    """Describes the first difference; None if there is none."""
    sort: str = INDEPENDENT
    """How the first one differs."""
    place: float = math.inf
    """Where it is in the left run: the id of a record, or what lies between two."""

    def add(self, other: StepFound) -> None:
        """Take in what was found in another part of the step, or on other threads."""
        if other.first is not None and (self.first is None or other.place < self.place):
            self.first, self.sort, self.place = other.first, other.sort, other.place
        self.tally.update(other.tally)
        self.totals = _sum(self.totals, other.totals)
        self.differing = _sum(self.differing, other.differing)


def _sum(left: Mapping[str, int], right: Mapping[str, int]) -> Mapping[str, int]:
    """Return the sum of two counts, neither of which may be changed: steps share them."""
    if not left or not right:
        return left or right
    total = Counter(left)
    total.update(right)
    return total
