"""What the first difference of two runs is, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrepro.trace.format import UNINITIALISED
from torchrepro.verdict.columns import MAIN
from torchrepro.verdict.evidence import DRAWING, OVERWRITING
from torchrepro.verdict.tensor_diff import differences, in_step_before, last_written, seen
from torchrepro.verdict.value import Divergence, Kind, Side
from torchrepro.verdict.wording import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrepro.verdict.columns import Pair
    from torchrepro.verdict.tensor_diff import Seen

Explained = tuple[Kind, str]


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first records that differ, by their ids; None for the run that has none."""

    left: int | None
    right: int | None
    instead: int | None = None
    """What the run without the record did at its place."""
    read: Sequence[tuple[int, int]] = ()
    """Pairs of records shortly before that differ in what they read and in nothing else."""


def described(pair: Pair, parting: FirstDifference) -> Divergence:
    """Return the first difference with its kind and what is known of where it came from."""
    left = None if parting.left is None else seen(pair.left, parting.left)
    right = None if parting.right is None else seen(pair.right, parting.right)
    if left is not None and right is not None:
        left, right = _first_reader(pair, parting.read) or (left, right)
        kind, what = _explained(pair, left, right, parting.read)
    else:
        kind, what = _alone(pair, left, right, parting)
    return divergence(pair, left, right, kind, what)


def _first_reader(pair: Pair, read: Sequence[tuple[int, int]]) -> tuple[Seen, Seen] | None:
    """Return the first op that read what has changed outside torch, if that came to nothing yet."""
    for one, other in read:
        left, right = seen(pair.left, one), seen(pair.right, other)
        inputs = [Input(pair, left, right, place) for place in _unequal(left, right)]
        if left.outputs and inputs and _of_inputs(inputs[:MOST])[0] is Kind.INPUT:
            return left, right
    return None


def divergence(
    pair: Pair, left: Seen | None, right: Seen | None, kind: Kind, what: str
) -> Divergence:
    """Return the value that a verdict shows for two records, at least one of which is there."""
    shown = left or right
    if shown is None:
        raise ValueError("a divergence has a record in one of the runs")
    site = shown.site
    elements, distances = differences(left, right) if left and right else ((), ())
    return Divergence(
        rank=pair.left.rank,
        step=shown.step,
        phase=site.phase,
        module=site.module,
        op=site.op,
        source=site.source,
        kind=kind,
        thread=shown.thread,
        left=_side(pair.runs[0], left),
        right=_side(pair.runs[1], right),
        elements=elements,
        distances=distances,
        what=what,
    )


def _side(run: str, one: Seen | None) -> Side | None:
    if one is None:
        return None
    return Side(
        run=run,
        source=one.site.source,
        outputs=one.site.outputs,
        argument=one.argument,
        input_fingerprints=tuple(value.hex() for value in one.inputs),
        output_fingerprints=tuple(value.hex() for value in one.outputs),
    )


def _alone(
    pair: Pair, left: Seen | None, right: Seen | None, parting: FirstDifference
) -> Explained:
    has, lacks = pair.names if left else pair.names[::-1]
    other = pair.right if left else pair.left
    shown = left or right
    row = other.steps[shown.step] if shown else None
    on_main = shown is not None and shown.record.thread == MAIN  # others end when they like
    if row is not None and not row.finished and parting.instead is None and on_main:
        return Kind.ENDED, f"{lacks} ended in the middle of step {row.step}, before this op"
    if parting.instead is None:
        return Kind.ONLY_ONE, f"only {has} has it"
    instead = seen(other, parting.instead).site
    where = f" in {instead.module}" if instead.module else ""
    return Kind.ONLY_ONE, f"only {has} has it; {lacks} goes on with {instead.op}{where}"


def _explained(pair: Pair, left: Seen, right: Seen, read: Sequence[tuple[int, int]]) -> Explained:
    if left.argument != right.argument:
        return Kind.ARGUMENT, f"{left.argument or 'none'} and {right.argument or 'none'}"
    if left.site.op == "DataLoader":
        return Kind.DATA, "the batches differ as they enter the main process"
    if len(left.inputs) != len(right.inputs):
        return (
            Kind.ARGUMENT,
            f"{counted(len(left.inputs), 'tensor')} as input and {len(right.inputs)}",
        )
    unequal = _unequal(left, right)
    if not unequal:
        return Kind.OUTPUTS, _of_outputs(left)
    earlier = [(seen(pair.left, one), seen(pair.right, other)) for one, other in read]
    inputs = [
        Input(pair, one, other, place)
        for one, other in [(left, right), *reversed(earlier)]
        for place in _unequal(one, other)
    ]
    return _of_inputs(inputs[:MOST])


MOST = 8
"""Inputs whose origin is looked for: each may cost a pass over a trace."""

LOOK_BACK = 3
"""Steps within which an optimizer has written a parameter that it trains."""


def _unequal(left: Seen, right: Seen) -> list[int]:
    pairs = enumerate(zip(left.inputs, right.inputs, strict=False))
    return [place for place, (one, other) in pairs if one != other]


def _of_outputs(left: Seen) -> str:
    if left.site.op in ("parameter", "gradient", "module"):
        return "what it was computed from is not recorded at this level"
    name = left.site.op.rpartition("::")[2].partition(".")[0]
    if name in OVERWRITING | DRAWING or left.site.op.endswith("out"):
        return ""
    places = [str(place) for place, value in enumerate(left.inputs) if value == UNINITIALISED]
    return f"input {', '.join(places)} is memory that nothing had written" if places else ""


@dataclass(frozen=True, slots=True)
class Input:
    """An input in which two records differ."""

    pair: Pair
    left: Seen
    right: Seen
    place: int

    @property
    def values(self) -> tuple[bytes, bytes]:
        """Its fingerprint in both runs."""
        return self.left.inputs[self.place], self.right.inputs[self.place]

    @property
    def name(self) -> str:
        """What a sentence calls it."""
        return f"input {self.place} of {self.left.site.op}"

    def remembered(self) -> tuple[bytes | None, bytes | None]:
        """Return what the same op read there in the step before, in both runs."""
        before = (in_step_before(self.left), in_step_before(self.right))
        left, right = (
            one.inputs[self.place] if one and self.place < len(one.inputs) else None
            for one in before
        )
        return left, right


def _of_inputs(inputs: Sequence[Input]) -> Explained:
    """Return where unequal inputs came from: all that was recorded before them agrees."""
    written = [
        last_written(trace, one.record.id, {each.values[side] for each in inputs})
        for side, (trace, one) in enumerate(
            zip(inputs[0].pair.traces, (inputs[0].left, inputs[0].right), strict=True)
        )
    ]
    for each in inputs:
        writers = written[0].get(each.values[0]), written[1].get(each.values[1])
        explained = _by_writers(each, *writers) or _by_memory(each)
        if explained is not None:
            return explained
    first = inputs[0]
    if UNINITIALISED in first.values:
        name = first.pair.names[first.values.index(UNINITIALISED)]
        return Kind.DATA, f"{first.name} is memory that nothing had written in {name}"
    return (
        Kind.DATA,
        f"{inputs[-1].name} differs, and no op that was recorded wrote it: "
        "a batch, a constant, or a parameter as it was at the start",
    )


def _by_writers(this: Input, left: Seen | None, right: Seen | None) -> Explained | None:
    if left is None and right is None:
        return None
    names = this.pair.names
    if left is not None and right is not None:
        return (
            Kind.ARGUMENT,
            f"{this.name} is another tensor: written by {_told(left)} in {names[0]}, "
            f"by {_told(right)} in {names[1]}",
        )
    writer, keeps, changed = (left, *names) if left else (right, *names[::-1])
    return (
        Kind.INPUT,
        f"{this.name} is in {keeps} what {_told(writer)} wrote; "
        f"in {changed} something other than torch has changed it since",
    )


def _by_memory(this: Input) -> Explained | None:
    """Tell a value that stayed, or was trained, from one that is new in every step."""
    before = this.remembered()
    kept = [value == now for value, now in zip(before, this.values, strict=True)]
    if all(kept):
        return Kind.DATA, f"{this.name} has differed since before this step, to no effect until now"
    if any(kept):
        keeps, changed = this.pair.names if kept[0] else this.pair.names[::-1]
        return (
            Kind.INPUT,
            f"{this.name} is in {keeps} what it was in the step before; "
            f"in {changed} something other than torch has changed it since",
        )
    if before[0] is None or before[0] != before[1]:
        return None
    trace, now = this.pair.left, this.left
    recent = [row.first for step, row in trace.steps.items() if step >= now.step - LOOK_BACK]
    trained = last_written(trace, now.record.id, [before[0]], recent[0] - 1).get(before[0])
    if trained is None or trained.site.phase != "optimizer":
        return None
    return (
        Kind.INPUT,
        f"{this.name} was trained until the step before; in both runs something other than "
        "torch has changed it since",
    )


def _told(one: Seen | None) -> str:
    if one is None:
        return "nothing"
    where = f" in {one.site.module}" if one.site.module else ""
    return f"{one.site.op}{where} at step {one.step} ({one.site.phase})"
