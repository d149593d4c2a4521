"""Compares two traces by what their steps come to: parameters, gradients, losses, generators."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torchrepro.verdict.pair import StepFound
from torchrepro.verdict.value import Divergence, Kind, Side

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrepro.trace.reading import Trace
    from torchrepro.verdict.pair import Pair

FIELDS = (
    ("forward", "loss"),
    ("backward", "gradients"),
    ("optimizer", "parameters"),
)
"""What a step comes to, in the order in which it comes about: phase and name."""

AT_EVERY_LEVEL = (("forward", "loss"), ("optimizer", "parameters"))
"""What is fingerprinted in the same way at all levels: a gradient may be known as a view alone."""


class Digests:
    """Compares steps, for recordings whose records have nothing in common."""

    def __init__(self, pair: Pair, fields: Sequence[tuple[str, str]]) -> None:
        self.pair = pair
        self.fields = fields
        self._left, self._right = (_digests(trace) for trace in pair.traces)

    def step(self, number: int) -> StepFound:
        """Compare one step."""
        for phase, name in self.fields:
            one, other = (side[number].get(name) for side in (self._left, self._right))
            if one and other and one != other:
                return StepFound(first=partial(self._described, number, phase, name, one, other))
        return StepFound()

    def otherwise(self) -> Divergence | None:
        """Return the first difference of all steps."""
        found = (self.step(number).first for number in self.pair.steps)
        first = next((one for one in found if one is not None), None)
        return first() if first else None

    def notes(self) -> list[str]:
        """Say what was compared."""
        levels = " and ".join(str(trace.meta.get("level")) for trace in self.pair.traces)
        return [
            f"recorded at the levels {levels}: compared by the loss and the parameters "
            "of each step, not op by op"
        ]

    def _described(
        self, number: int, phase: str, name: str, left: bytes, right: bytes
    ) -> Divergence:
        sides = [
            Side(run, "", "", "", (), (digest.hex(),))
            for run, digest in zip(self.pair.runs, (left, right), strict=True)
        ]
        return at_step(self.pair, number, Kind.OUTPUTS, "", phase, name, tuple(sides))


class Streams:
    """Compares the states of the random generators alone."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def step(self, number: int) -> StepFound:
        """Compare one step."""
        names = self.unequal(number)
        if not names:
            return StepFound()
        what = f"the states of {', '.join(names)} differ when the step ends"
        return StepFound(first=partial(at_step, self.pair, number, Kind.RANDOM, what))

    def unequal(self, number: int) -> list[str]:
        """Return the generators whose states differ when a step ends."""
        left, right = (trace.steps[number].random for trace in self.pair.traces)
        return [name for name in left if name in right and left[name] != right[name]]

    def otherwise(self) -> Divergence | None:
        """Return nothing: steps are all there is."""
        return None

    def notes(self) -> list[str]:
        """Say what was compared."""
        return ["compared by the states of the random generators alone"]


def at_step(  # noqa: PLR0913, PLR0917 - the parts of a divergence
    pair: Pair,
    number: int,
    kind: Kind,
    what: str,
    phase: str = "",
    op: str = "",
    sides: tuple[Side | None, ...] = (None, None),
) -> Divergence:
    """Return a divergence of a step as a whole."""
    left, right = sides
    whole = Divergence.without_op(pair.left.rank, number, kind, what)
    return replace(whole, phase=phase, op=op, left=left, right=right)


def _digests(trace: Trace) -> Mapping[int, Mapping[str, bytes]]:
    found = {
        number: {"gradients": row.gradients, "parameters": row.parameters, "loss": b""}
        for number, row in trace.steps.items()
    }
    for loss in trace.losses:
        if loss.step in found:
            found[loss.step]["loss"] += loss.fingerprint
    return found
