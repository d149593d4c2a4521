"""Compares runs whose steps were recorded at several levels, each step by what both have of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from torchrepro.verdict.columns import StepComparison
from torchrepro.verdict.recordings import AT_EVERY_LEVEL, FIELDS, Digests
from torchrepro.verdict.value import AT_ONE_LEVEL, Agreed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torchrepro.verdict.columns import Pair
    from torchrepro.verdict.criteria import Tolerance
    from torchrepro.verdict.value import Divergence

_Sort = TypeVar("_Sort", bool, tuple[tuple[str, str], ...])


@dataclass(frozen=True, slots=True)
class Way:
    """A way in which a step can be compared."""

    name: str
    """As it stands after a number of steps."""
    fields: tuple[tuple[str, str], ...] = ()
    """The digests that are compared; none where records are."""


RECORDS = {level: Way(name) for level, name in AT_ONE_LEVEL.items()}
"""How steps are compared that both runs recorded at one level."""

DIGESTS = Way(AT_ONE_LEVEL["step"], FIELDS)
"""How steps are compared whose records one of the runs has no longer."""

AT_UNEQUAL_LEVELS = Way("by parameters and losses", AT_EVERY_LEVEL)

LOSSES = Way("by losses")
"""How steps are compared within a tolerance that have no statistics."""

WAYS = (*RECORDS.values(), DIGESTS, AT_UNEQUAL_LEVELS, LOSSES)
"""From the finest to the coarsest."""


class WayOf(Protocol):
    """Says how a step that both runs have is compared."""

    def __call__(self, pair: Pair, step: int, /) -> Way:
        """Return the way of one step."""


def way_of_bits(pair: Pair, step: int) -> Way:
    """Return how a step that both runs have is compared by its bits."""
    rows = [trace.steps[step] for trace in pair.traces]
    if rows[0].level != rows[1].level:
        return AT_UNEQUAL_LEVELS
    if any(row.dropped for row in rows) or not _are_recorded_alike(pair, rows[0].level):
        return DIGESTS
    return RECORDS[rows[0].level]


def _are_recorded_alike(pair: Pair, level: str) -> bool:
    """Whether equal runs have equal records of a step, which both recorded at `level`."""
    one, other = (trace.meta for trace in pair.traces)
    return all((one.get(key) or None) == (other.get(key) or None) for key in DECIDING[level])


DECIDING: Mapping[str, Sequence[str]] = {
    "op": ("detail",),
    "module": (),
    "step": ("level", "every"),
}
"""Level of a step -> settings of a recording on which its records depend.

With detail other inputs are read. At level `step` parameters have the names that the recording has
learnt, and one that records some steps in full learns more of them.
"""


def way_within_tolerance(pair: Pair, step: int) -> Way:
    """Return how a step that both runs have is compared within a tolerance."""
    found = way_of_bits(pair, step)
    return found if is_in_full(found) else LOSSES


def is_in_full(way: Way) -> bool:
    """Whether all that a step computed is compared, and not its state at the end alone."""
    return way in (RECORDS["op"], RECORDS["module"])


def ways_of(pairs: Sequence[Pair], way_of: WayOf) -> dict[int, Way]:
    """Return how each step is compared; where processes differ in it, the coarsest way."""
    found: dict[int, Way] = {}
    for pair in pairs:
        for step in pair.steps:
            found[step] = max(found.get(step, WAYS[0]), way_of(pair, step), key=WAYS.index)
    return dict(sorted(found.items()))


def agreed_before(pairs: Sequence[Pair], way_of: WayOf, step: int) -> Agreed | None:
    """Return the last steps before this one, at which the runs are known to agree."""
    ways = ways_of(pairs, way_of)
    before = {number: way for number, way in ways.items() if number < step}
    if not before:
        return None
    last = max(before)
    in_full = [number for number, way in before.items() if is_in_full(way)]
    then_in_full = step in ways and is_in_full(ways[step])
    return Agreed(last, before[last].name, max(in_full, default=None), then_in_full)


class Comparison(Protocol):
    """Compares some steps of two traces."""

    @property
    def anything(self) -> bool:
        """Whether there is anything to compare."""

    def step(self, number: int) -> StepComparison:
        """Compare one step."""

    def besides_records(self) -> Divergence | None:
        """Return what differs although no record does."""

    def notes(self) -> list[str]:
        """Return what a reader has to know of the comparison."""


class InParts:
    """Compares each step with the part that is for it."""

    def __init__(self, parts: Mapping[int, Comparison]) -> None:
        self._of_step = parts
        self._parts = list(dict.fromkeys(parts.values()))

    @property
    def anything(self) -> bool:
        """Whether there is anything to compare."""
        return any(part.anything for part in self._parts)

    def step(self, number: int) -> StepComparison:
        """Compare one step."""
        return self._of_step[number].step(number)

    def besides_records(self) -> Divergence | None:
        """Return what differs first although no record does."""
        found = [one for part in self._parts if (one := part.besides_records()) is not None]
        return min(found, key=lambda one: one.step, default=None)

    def notes(self) -> list[str]:
        """Return what a reader has to know of those parts that compare records."""
        return [
            note for part in self._parts if not isinstance(part, Digests) for note in part.notes()
        ]


@dataclass(frozen=True, eq=False)
class LossesWithin:
    """Compares the losses of steps that have no statistics."""

    tolerance: Tolerance

    @property
    def anything(self) -> bool:
        """Whether both runs have a loss of one of the steps."""
        pair = self.tolerance.pair
        left, right = ({loss.step for loss in trace.losses} for trace in pair.traces)
        return not (left & right).isdisjoint(pair.steps)

    def step(self, number: int) -> StepComparison:
        """Compare one step."""
        found = self.tolerance.unequal_losses(number)
        return StepComparison(first=None if found is None else lambda: found)

    def besides_records(self) -> Divergence | None:
        """Return what else differs: nothing that could be compared."""
        return None

    def notes(self) -> list[str]:
        """Return what was not compared."""
        steps = self.tolerance.pair.steps
        return [f"{len(steps):,} steps have no statistics of tensors: their losses were compared"]


def in_parts(
    pair: Pair,
    way_of: WayOf,
    sort: Callable[[Way], _Sort],
    part: Callable[[Pair, _Sort], Comparison],
) -> Comparison:
    """Return what compares the steps of a pair: one part for each sort of steps, by their way."""
    sorts = {number: sort(way_of(pair, number)) for number in pair.steps}
    if len(set(sorts.values())) < 2:  # noqa: PLR2004 - all steps of one sort
        return part(pair, next(iter(sorts.values()), sort(WAYS[0])))
    steps: dict[_Sort, list[int]] = {}
    for number, its in sorts.items():
        steps.setdefault(its, []).append(number)
    parts = {its: part(pair.among(numbers), its) for its, numbers in steps.items()}
    return InParts({number: parts[its] for number, its in sorts.items()})
