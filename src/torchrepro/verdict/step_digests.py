"""Compares two traces by what their steps come to, and by how far they go."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torchrepro.verdict.columns import MAIN, NAMES, StepComparison
from torchrepro.verdict.evidence import NO_VALUE
from torchrepro.verdict.value import Divergence, Kind, Side

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrepro.trace.reader import Trace
    from torchrepro.verdict.columns import Pair


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

    def step(self, number: int) -> StepComparison:
        """Compare one step."""
        for phase, name in self.fields:
            one, other = (side[number].get(name) for side in (self._left, self._right))
            if one and other and one != other:
                return StepComparison(
                    first=partial(self._described, number, phase, name, one, other)
                )
        return StepComparison()

    @property
    def anything(self) -> bool:
        """Whether both runs have at least one digest of these fields in common."""
        return any(
            self._left[number].get(name) and self._right[number].get(name)
            for number in self.pair.steps
            for _, name in self.fields
        )

    def otherwise(self) -> Divergence | None:
        """Return the first difference of all steps: of their digests, or of seeded generators."""
        found = (self.step(number).first for number in self.pair.steps)
        first = next((one for one in found if one is not None), None)
        return first() if first else Streams(self.pair).otherwise()

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
    """Compares the states of the random generators."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def unequal(self, number: int) -> list[str]:
        """Return the generators whose states differ when a step ends."""
        left, right = (trace.steps[number].random for trace in self.pair.traces)
        return [name for name in left if name in right and left[name] != right[name]]

    def otherwise(self) -> Divergence | None:
        """Return where a generator that the profiles of both runs seed is in another state.

        One that nobody seeded has another state in every run. What is drawn from it and used is
        seen in what is computed.
        """
        for number in self.pair.steps:
            names = [name for name in self.unequal(number) if self._is_seeded(name)]
            if names:
                what = f"the states of {', '.join(names)} differ when the step ends"
                return at_step(self.pair, number, Kind.RANDOM, what)
        return None

    def _is_seeded(self, generator: str) -> bool:
        knob = f"seed.{generator.partition(':')[0]}"
        knobs = ((trace.meta.get("knobs") or {}).get(knob) for trace in self.pair.traces)
        return all(text not in NO_VALUE for text in knobs)


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


CUT = " (killed, ended by os._exit, or it still runs)"


def ended(pair: Pair) -> Divergence | None:
    """Return where one of two runs ended that were the same up to there.

    What a run that was killed would have done is not known: it is never the same as another.
    """
    last = [_last_step(trace) for trace in pair.traces]
    if not pair.steps:
        return at_step(pair, max(min(last), 0), Kind.ENDED, _nothing_in_common(pair, last))
    short = last.index(min(last))
    asked = pair.traces[short].meta.get("steps")
    if last[0] != last[1] and not (asked and last[short] >= asked[1]):
        shorter, longer = pair.names[short], pair.names[1 - short]
        killed = CUT if pair.traces[short].is_truncated else ""
        what = f"{shorter} ended after step {last[short]}{killed}; {longer} goes on to {max(last)}"
        return at_step(pair, last[short] + 1, Kind.ENDED, what)
    cut = [side for side, trace in enumerate(pair.traces) if trace.is_truncated]
    if not cut:
        return None  # more of it was not to be recorded
    names = " and ".join(pair.names[side] for side in cut)
    step = min(last[side] for side in cut)
    return at_step(pair, step + 1, Kind.ENDED, f"{names} ended after step {step}{CUT}")


def _last_step(trace: Trace) -> int:
    """Return the number of the last step; what only other threads did after it is none."""
    steps = list(trace.steps.values())
    if steps and not steps[-1].finished and steps[-1].records:
        its = steps[-1]
        of_main = trace.connection.execute(
            "select 1 from record where id >= ? and id < ? and thread = ? limit 1",
            (its.first, its.first + its.records, MAIN),
        ).fetchone()
        steps = steps if of_main else steps[:-1]
    return steps[-1].step if steps else -1


def _nothing_in_common(pair: Pair, last: list[int]) -> str:
    empty = [name for name, step in zip(pair.names, last, strict=True) if step < 0]
    if empty:
        return f"no step was recorded in {' and '.join(empty)}"
    return "no step was recorded in both runs"


def missing(
    left: Mapping[tuple[int, int], Trace],
    right: Mapping[tuple[int, int], Trace],
) -> list[Divergence]:
    """Return the processes that only one of two runs has."""
    return [
        Divergence.without_op(
            rank,
            0,
            Kind.ENDED,
            f"only {NAMES[(rank, ordinal) not in left]} has {_process(ordinal)} of rank {rank}",
        )
        for rank, ordinal in sorted(left.keys() ^ right.keys())
    ]


def _process(ordinal: int) -> str:
    return f"process {ordinal}" if ordinal else "a recording"
