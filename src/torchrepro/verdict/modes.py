"""How each step of two runs is compared: by what both recordings have of it."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from torchrepro.verdict.recordings import AT_EVERY_LEVEL, FIELDS
from torchrepro.verdict.value import AT_ONE_LEVEL, Agreed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrepro.verdict.columns import Pair


class Mode(Enum):
    """How a step is compared, from the finest to the coarsest."""

    OPS = AT_ONE_LEVEL["op"], ()
    MODULES = AT_ONE_LEVEL["module"], ()
    STATE = AT_ONE_LEVEL["step"], ()
    DIGESTS = AT_ONE_LEVEL["step"], FIELDS
    """One of the runs no longer has the records of the step."""
    DIGESTS_OF_UNEQUAL_LEVELS = "by parameters and losses", AT_EVERY_LEVEL
    LOSSES = "by losses", FIELDS[:1]
    """Within a tolerance, where there are no statistics."""

    def __init__(self, words: str, fields: tuple[tuple[str, str], ...]) -> None:
        self.words = words
        """As it stands after a number of steps."""
        self.fields = fields
        """The digests that are compared; none where records are."""

    @property
    def is_in_full(self) -> bool:
        """Whether all that a step computed is compared, and not its state at the end alone."""
        return self in (Mode.OPS, Mode.MODULES)


AT_LEVEL = {"op": Mode.OPS, "module": Mode.MODULES, "step": Mode.STATE}
"""How steps are compared that both runs recorded at one level."""

DECIDING: Mapping[str, Sequence[str]] = {
    "op": ("detail",),
    "module": (),
    "step": ("level", "every"),
}
"""Level of a step -> settings of a recording on which its records depend.

With detail other inputs are read. At level `step` parameters have the names that the recording has
learnt, and one that records some steps in full learns more of them.
"""


def mode_of(pair: Pair, step: int, *, within_tolerance: bool) -> Mode:
    """Return how a step that both runs have is compared."""
    left, right = (trace.steps[step] for trace in pair.traces)
    one, other = (trace.meta for trace in pair.traces)
    if left.level != right.level:
        found = Mode.DIGESTS_OF_UNEQUAL_LEVELS
    elif (
        left.dropped
        or right.dropped
        or any((one.get(key) or None) != (other.get(key) or None) for key in DECIDING[left.level])
    ):
        found = Mode.DIGESTS
    else:
        found = AT_LEVEL[left.level]
    return Mode.LOSSES if within_tolerance and not found.is_in_full else found


def coarsest(modes: Sequence[Mapping[int, Mode]]) -> dict[int, Mode]:
    """Return how each step is compared; where processes differ in it, the coarsest mode."""
    order = list(Mode)
    found: dict[int, Mode] = {}
    for its in modes:
        for step, mode in its.items():
            found[step] = max(found.get(step, Mode.OPS), mode, key=order.index)
    return dict(sorted(found.items()))


def agreed_before(modes: Mapping[int, Mode], step: int) -> Agreed | None:
    """Return the last steps before this one, at which the runs are known to agree."""
    before = {number: mode for number, mode in modes.items() if number < step}
    if not before:
        return None
    last = max(before)
    in_full = [number for number, mode in before.items() if mode.is_in_full]
    then_in_full = step in modes and modes[step].is_in_full
    return Agreed(last, before[last].words, max(in_full, default=None), then_in_full)
