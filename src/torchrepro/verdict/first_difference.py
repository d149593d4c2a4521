"""What the first difference of two runs is, where it came from, and how far kept tensors differ."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from torchrepro.trace.format import (
    INPUT,
    MAIN,
    NEW_TENSOR,
    OPTIMIZER_STEP,
    OUTPUT,
    UNINITIALISED,
)
from torchrepro.verdict.criteria import NAMES, Pair
from torchrepro.verdict.diagnosis import DATALOADER, DRAWING, OVERWRITING, PLAIN, op_name
from torchrepro.verdict.render import counted, moment
from torchrepro.verdict.value import Distance, Divergence, Element, Kind, RunAtDivergence

if TYPE_CHECKING:
    from torchrepro.trace.format import Site
    from torchrepro.trace.reader import Trace

MOST = 8  # inputs whose origin is searched for: each may cost a pass over a trace
LOOK_BACK = 3  # steps within which an optimizer has written a parameter that it trains
_FEW_OPTIONS = 3
SHOWN = 5  # elements that a divergence has

MADE_OUTSIDE = {
    DATALOADER: "the batches differ as they enter the main process",
    NEW_TENSOR: "the program made this tensor from other values",
}
"""Ops whose records are data that torch did not compute, and what it means if they differ."""

INPUTLESS = frozenset({"parameter", "gradient", "module"})
"""Ops whose records name a value, but not what it was computed from.

A record of a collective names only this rank's contribution.
"""

KeptTensor = tuple[str, int, str, str, bytes]
"""``input`` or ``output``, its position, dtype, shape and memory."""


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The ids of the first records that differ; None for the run that has no such record."""

    left: int | None
    right: int | None
    sort: str  # how it differs
    place: float  # where it is in the left run: the id of a record, or between two ids
    instead: int | None = None  # the id of what the run without the record did at its place
    read: Sequence[tuple[int, int]] = ()  # pairs shortly before that only read something else


class Explanation(NamedTuple):
    """How two records diverge, and where the difference came from."""

    kind: Kind
    what: str = ""
    writers: tuple[str, ...] = ()  # the threads that wrote the input in which the records differ


class RecordView(NamedTuple):
    """A record with what its numbers stand for in its trace."""

    trace: Trace
    id: int
    step: int
    site: Site
    argument: str
    thread: str
    is_on_main: bool
    inputs: Sequence[bytes]
    outputs: Sequence[bytes]  # the fingerprint of each

    @classmethod
    def read(cls, trace: Trace, number: int) -> RecordView:
        its = trace.record(number)
        return cls(
            *(trace, number, trace.step_of(number), trace.sites[its.site]),
            trace.arguments[its.argument],
            trace.threads.get(its.thread, str(its.thread)),
            its.thread == MAIN,
            [its.inputs[at : at + INPUT] for at in range(0, len(its.inputs), INPUT)],
            [its.outputs[at : at + OUTPUT] for at in range(0, len(its.outputs), OUTPUT)],
        )

    @property
    def is_optimizer_step(self) -> bool:
        return self.site.phase == "optimizer" and self.site.op.endswith(OPTIMIZER_STEP)

    @property
    def op(self) -> str:
        return f"{self.site.op}{f' in {self.site.module}' if self.site.module else ''}"


def describe(
    pair: Pair, difference: FirstDifference, out_of_tolerance: str | None = None
) -> Divergence:
    """Return the first difference with its kind and what is known of its origin."""
    left, right = (
        None if number is None else RecordView.read(trace, number)
        for trace, number in zip(pair.traces, (difference.left, difference.right), strict=True)
    )
    shown = left or right
    if shown is None:
        raise ValueError("a divergence has a record in one of the runs")
    if left is None or right is None:
        found = _explain_lone(pair, shown, difference.instead, only_left=right is None)
    elif out_of_tolerance is not None:
        kind = Kind.DATA if left.site.op in MADE_OUTSIDE else Kind.OUTPUTS
        found = Explanation(kind, out_of_tolerance)
    else:
        earlier = [
            (RecordView.read(pair.left, one), RecordView.read(pair.right, other))
            for one, other in difference.read
        ]
        # An op that read what something other than torch had changed may by chance have written the
        # same, so that it is not itself a difference.
        for one, other in earlier:
            inputs = _unequal(one, other)
            if one.outputs and inputs and _explain_inputs(pair, inputs).kind is Kind.INPUT:
                left = shown = one
                right = other
                break
        found = _explain(pair, left, right, earlier)
    kept = [one.trace.tensors(one.id) if one else [] for one in (left, right)]
    elements, distances = differences(*kept)
    sides = [
        RunAtDivergence(
            run=run,
            source=one.site.source,
            outputs=one.site.outputs,
            argument="" if one.is_optimizer_step else one.argument,
            input_fingerprints=tuple(value.hex() for value in one.inputs),
            output_fingerprints=tuple(value.hex() for value in one.outputs),
        )
        if one
        else None
        for run, one in zip(pair.runs, (left, right), strict=True)
    ]
    return Divergence(
        rank=pair.left.rank,
        step=shown.step,
        phase=shown.site.phase,
        module=shown.site.module,
        op=shown.site.op,
        source=shown.site.source,
        kind=found.kind,
        thread=shown.thread,
        left=sides[0],
        right=sides[1],
        elements=elements,
        distances=distances,
        what=found.what,
        writers=found.writers,
        record=shown.id - 1,
        after_last=pair.is_after_last(shown.step),
        before_model=shown.id <= (shown.trace.meta.get("built") or 0),
    )


def _explain_lone(
    pair: Pair, shown: RecordView, instead: int | None, *, only_left: bool
) -> Explanation:
    """Explain a record that one run has; `instead` is what the other did in its place."""
    has, lacks = NAMES if only_left else NAMES[::-1]
    other = pair.right if only_left else pair.left
    if instead is not None:
        goes_on = RecordView.read(other, instead).op
        return Explanation(Kind.ONLY_ONE, f"only {has} has it; {lacks} goes on with {goes_on}")
    row = other.steps[shown.step]
    if row.finished or not shown.is_on_main:  # other threads may end at any time
        return Explanation(Kind.ONLY_ONE, f"only {has} has it")
    within = "" if pair.is_after_last(row.step) else f" in the middle of step {row.step},"
    return Explanation(Kind.ENDED, f"{lacks} ended{within} before this op")


def _explain(
    pair: Pair,
    left: RecordView,
    right: RecordView,
    earlier: Sequence[tuple[RecordView, RecordView]],
) -> Explanation:
    op = left.site.op
    # First, what the program gave them.
    if left.is_optimizer_step:
        return Explanation(Kind.ARGUMENT, _unequal_options(left, right))
    if left.argument != right.argument:
        what = f"{left.argument or 'none'} and {right.argument or 'none'}"
        return Explanation(Kind.ARGUMENT, what)
    if op in MADE_OUTSIDE:
        return Explanation(Kind.DATA, MADE_OUTSIDE[op])
    if len(left.inputs) != len(right.inputs):
        what = f"{counted(len(left.inputs), 'tensor')} as input and {len(right.inputs)}"
        return Explanation(Kind.ARGUMENT, what)
    # Then, what they read.
    if _unequal(left, right):
        before = chain.from_iterable(_unequal(*both) for both in reversed(earlier))
        return _explain_inputs(pair, [*_unequal(left, right), *before])
    if op in INPUTLESS:
        return Explanation(Kind.VALUES)
    if op_name(op) in OVERWRITING | DRAWING or op.endswith("out"):
        return Explanation(Kind.OUTPUTS)
    places = [str(at) for at, value in enumerate(left.inputs) if value == UNINITIALISED]
    what = f"input {', '.join(places)} is memory that nothing had written" if places else ""
    return Explanation(Kind.OUTPUTS, what)


def _unequal_options(left: RecordView, right: RecordView) -> str:
    sides: list[list[dict[str, str]]] = []
    for one in (left, right):
        try:
            groups = json.loads(one.argument)
            # As text: NaN equals itself there.
            sides.append([{name: json.dumps(x) for name, x in each.items()} for each in groups])
        except (ValueError, RecursionError, TypeError, AttributeError):  # a trace may hold anything
            return "which cannot be read"
    if not all(sides):
        return "which cannot be read"
    if len(sides[0]) != len(sides[1]):
        return f"{counted(len(sides[0]), 'group')} of parameters and {len(sides[1])}"
    several = len(sides[0]) > 1
    found = [
        f"{name}{f' of group {number}' * several}: "
        f"{one.get(name, 'not set')} and {other.get(name, 'not set')}"
        for number, (one, other) in enumerate(zip(*sides, strict=True))
        for name in {**one, **other}
        if one.get(name) != other.get(name)
    ]
    return "; ".join(found[:_FEW_OPTIONS]) or "an argument that is a tensor"


class Input(NamedTuple):
    """An input in which two records differ."""

    left: RecordView
    right: RecordView
    place: int

    @property
    def values(self) -> tuple[bytes, bytes]:
        return self.left.inputs[self.place], self.right.inputs[self.place]

    @property
    def name(self) -> str:
        return f"input {self.place} of {self.left.site.op}"


def _unequal(left: RecordView, right: RecordView) -> list[Input]:
    pairs = enumerate(zip(left.inputs, right.inputs, strict=False))
    return [Input(left, right, place) for place, (one, other) in pairs if one != other]


def _explain_inputs(pair: Pair, inputs: Sequence[Input]) -> Explanation:
    """Return the origin of unequal inputs. All that was recorded before them agrees."""
    inputs = inputs[:MOST]
    first = inputs[0]
    missed = _steps_missed(pair, first.left.step)
    written = [
        _last_writers(trace, one.id, {each.values[side] for each in inputs})
        for side, (trace, one) in enumerate(zip(pair.traces, first[:2], strict=True))
    ]
    for each in inputs:
        writers = written[0].get(each.values[0]), written[1].get(each.values[1])
        if missed and all(one is None or one.step != each.left.step for one in writers):
            return Explanation(
                Kind.UNSEEN, f"{each.name} differs, and nothing in this step wrote it{missed}"
            )
        explanation = _explain_by_writers(pair, each, *writers) or _explain_by_step_before(each)
        if explanation is not None:
            return explanation
    if UNINITIALISED in first.values:
        name = NAMES[first.values.index(UNINITIALISED)]
        what = f"{first.name} is memory that nothing had written in {name}"
        return Explanation(Kind.DATA, what)
    return Explanation(
        Kind.DATA,
        f"{inputs[-1].name} differs, and no op that was recorded wrote it: "
        "a batch, a constant, or a parameter as it was at the start",
    )


def _steps_missed(pair: Pair, number: int) -> str:
    before = [step for step in pair.left.steps if step < number]
    if not before:
        return ""
    rows = [[trace.steps.get(step) for trace in pair.traces] for step in before]
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
    pair: Pair, this: Input, left: RecordView | None, right: RecordView | None
) -> Explanation | None:
    writers = [one for one in (left, right) if one is not None]
    if not writers:
        return None
    ops = []
    for one in writers:
        when = moment(one.step, after_last=pair.is_after_last(one.step))
        ops.append(f"{one.op}{when and f' {when}'} ({one.site.phase})")
    threads = tuple(dict.fromkeys(one.thread for one in writers))
    if left is not None and right is not None:
        what = f"written by {ops[0]} in {NAMES[0]}, by {ops[1]} in {NAMES[1]}"
        return Explanation(Kind.ARGUMENT, f"{this.name} is another tensor: {what}", threads)
    keeps, changed = NAMES if left else NAMES[::-1]
    if op_name(writers[0].site.op) in PLAIN:
        equal = f"{this.name} equals in {keeps} what {ops[0]} wrote, which may be chance"
        return _explain_by_step_before(this) or Explanation(
            Kind.DATA, f"{equal}; in {changed} no op that was recorded wrote it"
        )
    return Explanation(
        Kind.INPUT,
        f"{this.name} is in {keeps} what {ops[0]} wrote; "
        f"in {changed} something other than torch has changed it since",
        threads,
    )


def _explain_by_step_before(this: Input) -> Explanation | None:
    """Explain an input that stayed as it was or was trained; None if it is new in every step."""
    before = [
        one.inputs[this.place] if one and this.place < len(one.inputs) else None
        for one in map(_in_step_before, this[:2])
    ]
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
    now, trace = this.left, this.left.trace
    recent = [row.first for step, row in trace.steps.items() if step >= now.step - LOOK_BACK]
    trained = _last_writers(trace, now.id, [before[0]], recent[0] - 1).get(before[0])
    if trained is None or trained.site.phase != "optimizer":
        return None
    return Explanation(
        Kind.INPUT,
        f"{this.name} was trained until the step before; in both runs something other than "
        "torch has changed it since",
    )


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
                    found[value] = RecordView.read(trace, number)
        if not missing or part.first <= after + 1:
            break
    return found


def _in_step_before(this: RecordView) -> RecordView | None:
    """Return the same occurrence of the same op in the step before.

    Only the main thread has one: other threads do not run in step.
    """
    trace, key = this.trace, this.site.key
    earlier = [step for step in trace.steps if step < this.step]
    if not earlier or not this.is_on_main:
        return None
    sites = {number for number, site in trace.sites.items() if site.key == key}
    now, before = (
        [
            number
            for part in trace.parts(step)
            for number, thread, site in zip(
                part.ids, part.outline.threads, part.outline.sites, strict=True
            )
            if thread == MAIN and site in sites
        ]
        for step in (this.step, earlier[-1])
    )
    at = now.index(this.id)
    return RecordView.read(trace, before[at]) if at < len(before) else None


def differences(
    left: Iterable[KeptTensor], right: Iterable[KeptTensor]
) -> tuple[tuple[Element, ...], tuple[Distance, ...]]:
    """Return the first elements in which the kept tensors of two records differ, and distances.

    A tensor is left out whose type has no decoder, or whose shape differs.
    """
    mine, theirs = (
        {f"{role} {at}": (kind, shape, data) for role, at, kind, shape, data in kept}
        for kept in (left, right)
    )
    elements: list[Element] = []
    distances: list[Distance] = []
    for name in filter(theirs.__contains__, mine):
        (kind, shape, memory), (other_kind, other_shape, other_memory) = mine[name], theirs[name]
        if not {kind, other_kind} <= {*DECODED} or shape != other_shape or not memory:
            continue
        one, other = decoded(kind, memory), decoded(other_kind, other_memory)
        if one.tobytes() != other.tobytes():
            ulps = _ulps(kind, memory, other_memory) if kind == other_kind else None
            sizes = tuple(map(int, re.findall(r"\d+", shape)))
            distance, unequal = _difference(name, sizes, one, other, ulps)
            distances.append(distance)
            elements += islice(unequal, SHOWN - len(elements))
    return tuple(elements), tuple(distances)


def decoded(kind: str, memory: bytes) -> Any:
    """Return the memory of a tensor, of which there is some, as an array of its numbers."""
    if kind in BY_TORCH:
        torch = import_module("torch")
        dtype = getattr(torch, kind)
        return torch.frombuffer(bytearray(memory), dtype=dtype).float().numpy()
    return np.frombuffer(memory, kind)


BY_TORCH = ("bfloat16", "float8_e5m2", "float8_e4m3fn")
"""Types that numpy does not have; each of their numbers is one of float32."""

DECODED = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128", *BY_TORCH),
)
"""The types of tensors that are decoded."""

SIGNED_MAGNITUDES: Mapping[str, str] = {
    "float64": "uint64",
    "float32": "uint32",
    "float16": "uint16",
    "bfloat16": "uint16",
    "float8_e5m2": "uint8",
    "float8_e4m3fn": "uint8",
}
"""Integers as wide as a type of which the next larger magnitude is the next larger integer."""


def _ulps(dtype: str, left: bytes, right: bytes) -> Any:
    code = SIGNED_MAGNITUDES.get(dtype)
    if code is None:
        return None
    sign = np.uint64(1 << 8 * np.dtype(code).itemsize - 1)
    one, other = (np.frombuffer(each, code).astype("uint64") for each in (left, right))
    larger, smaller = (find(one & ~sign, other & ~sign) for find in (np.maximum, np.minimum))
    return np.where((one ^ other) & sign, larger + smaller, larger - smaller)


def _difference(
    name: str, shape: tuple[int, ...], left: Any, right: Any, ulps: Any
) -> tuple[Distance, Iterator[Element]]:
    wide = "complex128" if "c" in (left.dtype.kind, right.dtype.kind) else "float64"
    if left.dtype != right.dtype:
        unequal = (left != right) & ~((left != left) & (right != right))  # noqa: PLR0124 - NaN
    else:  # byte by byte
        one, other = (np.ascontiguousarray(each).view("uint8") for each in (left, right))
        size = -1, left.dtype.itemsize
        unequal = (one.reshape(size) != other.reshape(size)).any(axis=1)
    finite = np.isfinite(left) & np.isfinite(right)
    elements = (
        Element(
            name,
            tuple(map(int, np.unravel_index(place, shape) if shape else ())),
            str(left[place].item()),
            str(right[place].item()),
            int(ulps[place]) if ulps is not None and finite[place] else None,
        )
        for place in np.flatnonzero(unequal).tolist()
    )
    total = int(unequal.sum()), left.size
    one, other = (each.astype(wide)[finite] for each in (left, right))
    if not one.size:
        return Distance(name, None, None, None, None, *total), elements
    apart, scale = np.abs(one - other), np.abs(other)
    relative = apart[scale > 0] / scale[scale > 0]
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    distance = Distance(
        name,
        float(apart.max()),
        float(relative.max()) if relative.size else None,
        float(np.vdot(other, one).real / lengths) if lengths else None,
        None if ulps is None else int(ulps[finite].max()),
        *total,
    )
    return distance, elements
