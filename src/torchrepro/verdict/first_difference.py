"""What the first difference of two runs is, and where it came from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrepro.trace.format import (
    BETWEEN,
    INPUT,
    NEW_TENSOR,
    OPTIMIZER_STEP,
    OUTPUT,
    RETURNED,
    SAMPLE,
    UNINITIALISED,
    Record,
    Site,
)
from torchrepro.verdict.columns import INPUTLESS, MAIN, NAMES
from torchrepro.verdict.evidence import DRAWING, OVERWRITING
from torchrepro.verdict.render import counted, moment
from torchrepro.verdict.value import Distance, Divergence, Element, Kind, Side

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torchrepro.trace.reader import Trace
    from torchrepro.verdict.columns import Pair

MOST = 8
"""Inputs whose origin is searched for. Each may cost a pass over a trace."""

LOOK_BACK = 3
"""Steps within which an optimizer has written a parameter that it trains."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """How two records diverge, and where the difference came from."""

    kind: Kind
    what: str
    threads: tuple[str, ...] = ()
    """The threads that wrote the input in which the records differ."""


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The ids of the first records that differ; None for the run that has no such record."""

    left: int | None
    right: int | None
    instead: int | None = None
    """The id of what the run without the record did at its place."""
    read: Sequence[tuple[int, int]] = ()
    """Pairs of records shortly before that differ only in what they read."""


MADE_OUTSIDE = {
    "DataLoader": "the batches differ as they enter the main process",
    NEW_TENSOR: "the program made this tensor from other values",
}
"""Ops whose records are data that torch did not compute, and what it means if they differ."""

_FEW_OPTIONS = 3


@dataclass(frozen=True, slots=True)
class RecordView:
    """A record with what its numbers stand for in its trace."""

    trace: Trace
    record: Record
    step: int

    @classmethod
    def read(cls, trace: Trace, number: int) -> RecordView:
        """Return a record by its id."""
        return cls(trace, trace.record(number), trace.step_of(number))

    @property
    def site(self) -> Site:
        """Where the program made it."""
        return self.trace.sites[self.record.site]

    @property
    def argument(self) -> str:
        """The arguments that are not tensors."""
        return self.trace.arguments[self.record.argument]

    @property
    def thread(self) -> str:
        """The name of the thread it ran on."""
        return self.trace.threads.get(self.record.thread, str(self.record.thread))

    @property
    def inputs(self) -> list[bytes]:
        """The fingerprint of each input."""
        return _pieces(self.record.inputs, INPUT)

    @property
    def outputs(self) -> list[bytes]:
        """The fingerprint of each output."""
        return _pieces(self.record.outputs, OUTPUT)


def _pieces(text: bytes, length: int) -> list[bytes]:
    return [text[start : start + length] for start in range(0, len(text), length)]


def describe(
    pair: Pair, difference: FirstDifference, out_of_tolerance: str | None = None
) -> Divergence:
    """Return the first difference with its kind and what is known of its origin."""
    left, right = (
        None if number is None else RecordView.read(trace, number)
        for trace, number in zip(pair.traces, (difference.left, difference.right), strict=True)
    )
    if left is not None and out_of_tolerance is not None:
        kind = Kind.DATA if left.site.op in MADE_OUTSIDE else Kind.OUTPUTS
        found = Explanation(kind, out_of_tolerance)
    elif left is not None and right is not None:
        left, right = _first_reader(pair, difference.read) or (left, right)
        found = _explain(pair, left, right, difference.read)
    else:
        found = _explain_lone(pair, left, right, difference)
    return divergence(pair, left, right, found)


def _first_reader(
    pair: Pair, read: Sequence[tuple[int, int]]
) -> tuple[RecordView, RecordView] | None:
    """Return the first op that read what something other than torch had changed.

    Its outputs may agree by chance, so that it is not itself a difference.
    """
    for one, other in read:
        left, right = RecordView.read(pair.left, one), RecordView.read(pair.right, other)
        inputs = [Input(pair, left, right, place) for place in _unequal(left, right)]
        if left.outputs and inputs and _explain_inputs(inputs[:MOST]).kind is Kind.INPUT:
            return left, right
    return None


def divergence(
    pair: Pair, left: RecordView | None, right: RecordView | None, found: Explanation
) -> Divergence:
    """Return the divergence that a verdict shows for two records, of which one may be missing."""
    shown = left or right
    if shown is None:
        raise ValueError("a divergence has a record in one of the runs")
    site = shown.site
    elements, distances = _compare_tensors(left, right) if left and right else ((), ())
    return Divergence(
        rank=pair.left.rank,
        step=shown.step,
        phase=site.phase,
        module=site.module,
        op=site.op,
        source=site.source,
        kind=found.kind,
        thread=shown.thread,
        left=_side(pair.runs[0], left),
        right=_side(pair.runs[1], right),
        elements=elements,
        distances=distances,
        what=found.what,
        writers=found.threads,
        record=shown.record.id - 1,
        after_last=pair.is_after_last(shown.step),
    )


def _side(run: str, one: RecordView | None) -> Side | None:
    if one is None:
        return None
    return Side(
        run=run,
        source=one.site.source,
        outputs=one.site.outputs,
        argument="" if _is_optimizer_step(one) else one.argument,
        input_fingerprints=tuple(value.hex() for value in one.inputs),
        output_fingerprints=tuple(value.hex() for value in one.outputs),
    )


def _compare_tensors(
    left: RecordView, right: RecordView
) -> tuple[tuple[Element, ...], tuple[Distance, ...]]:
    kept = [one.trace.tensors(one.record.id) for one in (left, right)]
    if not all(kept):
        return (), ()
    from torchrepro.verdict.tensor_diff import differences  # it imports numpy

    return differences(*kept)


def _explain_lone(
    pair: Pair, left: RecordView | None, right: RecordView | None, difference: FirstDifference
) -> Explanation:
    has, lacks = NAMES if left else NAMES[::-1]
    other = pair.right if left else pair.left
    shown = left or right
    row = other.steps[shown.step] if shown else None
    on_main = shown is not None and shown.record.thread == MAIN  # other threads may end at any time
    if row is not None and not row.finished and difference.instead is None and on_main:
        within = "" if pair.is_after_last(row.step) else f" in the middle of step {row.step},"
        return Explanation(Kind.ENDED, f"{lacks} ended{within} before this op")
    if difference.instead is None:
        return Explanation(Kind.ONLY_ONE, f"only {has} has it")
    instead = RecordView.read(other, difference.instead).site
    where = f" in {instead.module}" if instead.module else ""
    what = f"only {has} has it; {lacks} goes on with {instead.op}{where}"
    return Explanation(Kind.ONLY_ONE, what)


def _explain(
    pair: Pair, left: RecordView, right: RecordView, read: Sequence[tuple[int, int]]
) -> Explanation:
    given = _explain_what_was_given(left, right)
    if given is not None:
        return given
    unequal = _unequal(left, right)
    if not unequal:
        if left.site.op in INPUTLESS:
            return Explanation(Kind.VALUES, "")
        return Explanation(Kind.OUTPUTS, _explain_outputs(left))
    earlier = [
        (RecordView.read(pair.left, one), RecordView.read(pair.right, other)) for one, other in read
    ]
    inputs = [
        Input(pair, one, other, place)
        for one, other in [(left, right), *reversed(earlier)]
        for place in _unequal(one, other)
    ]
    return _explain_inputs(inputs[:MOST])


def _explain_what_was_given(left: RecordView, right: RecordView) -> Explanation | None:
    """Explain records that differ in what the program gave them; None if that agrees."""
    op = left.site.op
    if _is_optimizer_step(left):
        return Explanation(Kind.ARGUMENT, _unequal_options(left, right))
    if op.endswith(RETURNED):
        return Explanation(Kind.DATA, _explain_returned(op, left.argument, right.argument))
    if left.argument != right.argument:
        what = f"{left.argument or 'none'} and {right.argument or 'none'}"
        return Explanation(Kind.ARGUMENT, what)
    if op in MADE_OUTSIDE:
        return Explanation(Kind.DATA, MADE_OUTSIDE[op])
    if len(left.inputs) != len(right.inputs):
        what = f"{counted(len(left.inputs), 'tensor')} as input and {len(right.inputs)}"
        return Explanation(Kind.ARGUMENT, what)
    return None


def _explain_returned(op: str, left: str, right: str) -> str:
    """Return how a function of the program differs that was called as a batch was loaded."""
    (sample, numbers), (other, others) = (
        argument.removeprefix(SAMPLE).partition(BETWEEN)[::2]
        if argument.startswith(SAMPLE)
        else ("", argument)
        for argument in (left, right)
    )
    if sample != other:
        return f"another sample: index {sample or 'unknown'} and {other or 'unknown'}"
    same = f" for the same sample {sample}" if sample else ""
    if numbers != others:
        return f"{op} was given other numbers{same}: {numbers or 'none'} and {others or 'none'}"
    return f"{op} returned other values{same}"


def _is_optimizer_step(one: RecordView) -> bool:
    """Whether the record is of the arguments of an optimizer."""
    return one.site.phase == "optimizer" and one.site.op.endswith(OPTIMIZER_STEP)


def _unequal_options(left: RecordView, right: RecordView) -> str:
    """Return the arguments in which an optimizer's groups differ, with both values."""
    groups = [_groups_of(one) for one in (left, right)]
    if not all(groups):
        return "which cannot be read"
    if len(groups[0]) != len(groups[1]):
        return f"{counted(len(groups[0]), 'group')} of parameters and {len(groups[1])}"
    several = len(groups[0]) > 1
    found = [
        f"{name}{f' of group {number}' * several}: {_option(one, name)} and {_option(other, name)}"
        for number, (one, other) in enumerate(zip(*groups, strict=True))
        for name in {**one, **other}
        if _option(one, name) != _option(other, name)  # as text: NaN equals itself there
    ]
    return "; ".join(found[:_FEW_OPTIONS]) or "an argument that is a tensor"


def _groups_of(one: RecordView) -> list[dict[str, Any]]:
    """Return the arguments of the groups of an optimizer; a trace may hold anything instead."""
    try:
        groups = json.loads(one.argument)
    except (ValueError, RecursionError):
        return []
    return [each for each in groups if isinstance(each, dict)] if isinstance(groups, list) else []


def _option(group: dict[str, Any], name: str) -> str:
    return json.dumps(group[name]) if name in group else "not set"


def _unequal(left: RecordView, right: RecordView) -> list[int]:
    pairs = enumerate(zip(left.inputs, right.inputs, strict=False))
    return [place for place, (one, other) in pairs if one != other]


def _explain_outputs(left: RecordView) -> str:
    name = left.site.op.rpartition("::")[2].partition(".")[0]
    if name in OVERWRITING | DRAWING or left.site.op.endswith("out"):
        return ""
    places = [str(place) for place, value in enumerate(left.inputs) if value == UNINITIALISED]
    return f"input {', '.join(places)} is memory that nothing had written" if places else ""


@dataclass(frozen=True, slots=True)
class Input:
    """An input in which two records differ."""

    pair: Pair
    left: RecordView
    right: RecordView
    place: int

    @property
    def values(self) -> tuple[bytes, bytes]:
        """Its fingerprint in both runs."""
        return self.left.inputs[self.place], self.right.inputs[self.place]

    @property
    def name(self) -> str:
        """What a sentence calls it."""
        return f"input {self.place} of {self.left.site.op}"

    def in_step_before(self) -> tuple[bytes | None, bytes | None]:
        """Return what the same op read there in the step before, in both runs."""
        before = (_in_step_before(self.left), _in_step_before(self.right))
        left, right = (
            one.inputs[self.place] if one and self.place < len(one.inputs) else None
            for one in before
        )
        return left, right


def _explain_inputs(inputs: Sequence[Input]) -> Explanation:
    """Return the origin of unequal inputs. All that was recorded before them agrees."""
    missed = _steps_missed(inputs[0])
    written = [
        _last_writers(trace, one.record.id, {each.values[side] for each in inputs})
        for side, (trace, one) in enumerate(
            zip(inputs[0].pair.traces, (inputs[0].left, inputs[0].right), strict=True)
        )
    ]
    for each in inputs:
        writers = written[0].get(each.values[0]), written[1].get(each.values[1])
        if missed and all(one is None or one.step != each.left.step for one in writers):
            return Explanation(
                Kind.UNSEEN, f"{each.name} differs, and nothing in this step wrote it{missed}"
            )
        explanation = _explain_by_writers(each, *writers) or _explain_by_step_before(each)
        if explanation is not None:
            return explanation
    first = inputs[0]
    if UNINITIALISED in first.values:
        name = NAMES[first.values.index(UNINITIALISED)]
        what = f"{first.name} is memory that nothing had written in {name}"
        return Explanation(Kind.DATA, what)
    return Explanation(
        Kind.DATA,
        f"{inputs[-1].name} differs, and no op that was recorded wrote it: "
        "a batch, a constant, or a parameter as it was at the start",
    )


def _steps_missed(this: Input) -> str:
    """Return which steps before this one were not recorded op by op; nothing if none was missed."""
    number = this.left.step
    before = [step for step in this.pair.left.steps if step < number]
    if not before:
        return ""
    rows = [[trace.steps.get(step) for trace in this.pair.traces] for step in before]
    in_full = [
        row.step
        for row, other in rows
        if row and other and row.level == other.level == "op" and not row.dropped | other.dropped
    ]
    first, last = max(in_full, default=before[0] - 1) + 1, number - 1
    if first > last:
        return ""
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    return f"; the ops of {steps}, which may have, were not recorded in both runs"


def _explain_by_writers(
    this: Input, left: RecordView | None, right: RecordView | None
) -> Explanation | None:
    if left is None and right is None:
        return None
    threads = tuple(dict.fromkeys(one.thread for one in (left, right) if one is not None))
    if left is not None and right is not None:
        return Explanation(
            Kind.ARGUMENT,
            f"{this.name} is another tensor: written by {_op(this.pair, left)} in {NAMES[0]}, "
            f"by {_op(this.pair, right)} in {NAMES[1]}",
            threads,
        )
    writer, keeps, changed = (left, *NAMES) if left else (right, *NAMES[::-1])
    return Explanation(
        Kind.INPUT,
        f"{this.name} is in {keeps} what {_op(this.pair, writer)} wrote; "
        f"in {changed} something other than torch has changed it since",
        threads,
    )


def _explain_by_step_before(this: Input) -> Explanation | None:
    """Explain an input that stayed as it was or was trained; None if it is new in every step."""
    before = this.in_step_before()
    kept = [value == now for value, now in zip(before, this.values, strict=True)]
    if all(kept):
        return Explanation(
            Kind.DATA,
            f"{this.name} has differed since before this step, without effect until now",
        )
    if any(kept):
        keeps, changed = NAMES if kept[0] else NAMES[::-1]
        return Explanation(
            Kind.INPUT,
            f"{this.name} is in {keeps} what it was in the step before; "
            f"in {changed} something other than torch has changed it since",
        )
    if before[0] is None or before[0] != before[1]:
        return None
    trace, now = this.pair.left, this.left
    recent = [row.first for step, row in trace.steps.items() if step >= now.step - LOOK_BACK]
    trained = _last_writers(trace, now.record.id, [before[0]], recent[0] - 1).get(before[0])
    if trained is None or trained.site.phase != "optimizer":
        return None
    return Explanation(
        Kind.INPUT,
        f"{this.name} was trained until the step before; in both runs something other than "
        "torch has changed it since",
    )


def _op(pair: Pair, one: RecordView | None) -> str:
    if one is None:
        return "nothing"
    where = f" in {one.site.module}" if one.site.module else ""
    when = moment(one.step, after_last=pair.is_after_last(one.step))
    return f"{one.site.op}{where}{when and f' {when}'} ({one.site.phase})"


def _last_writers(
    trace: Trace, before: int, values: Iterable[bytes], after: int = 0
) -> Mapping[bytes, RecordView]:
    """Return for each value the last record between two others that wrote it, if there is one.

    It reads backward and stops when all are found. A value that nothing wrote costs a pass over
    all records between the two.
    """
    missing = set(values)
    found: dict[bytes, RecordView] = {}
    for part in trace.parts_before(before) if missing else ():
        for value in tuple(missing):
            number = part.last_writer(value, before)
            if number is not None:
                missing.remove(value)
                if number > after:
                    found[value] = RecordView(trace, part.record(number), trace.step_of(number))
        if not missing or part.first <= after + 1:
            break
    return found


def _in_step_before(this: RecordView) -> RecordView | None:
    """Return the same occurrence of the same op in the step before.

    Only the main thread has one: other threads do not run in step.
    """
    trace, key = this.trace, this.site.key
    earlier = [step for step in trace.steps if step < this.step]
    if not earlier or this.record.thread != MAIN:
        return None
    number = _occurrences(trace, this.step, key).index(this.record.id)
    then = _occurrences(trace, earlier[-1], key)
    return RecordView.read(trace, then[number]) if number < len(then) else None


def _occurrences(trace: Trace, step: int, key: tuple[str, str, str]) -> list[int]:
    sites = {number for number, site in trace.sites.items() if site.key == key}
    return [
        number
        for part in trace.parts(step)
        for number, thread, site in zip(
            part.ids, part.outline.threads, part.outline.sites, strict=True
        )
        if thread == MAIN and site in sites
    ]
