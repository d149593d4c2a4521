"""Describes the first difference of two runs: its kind, its origin, and how far tensors differ."""

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
    UNINITIALIZED_INPUT,
)
from torchrepro.verdict.criteria import NAMES, Pair
from torchrepro.verdict.diagnosis import DATALOADER, DRAWING, OVERWRITING, PLAIN, op_name
from torchrepro.verdict.render import counted, moment
from torchrepro.verdict.value import Distance, Divergence, Element, Kind, RunAtDivergence

if TYPE_CHECKING:
    from torchrepro.trace.format import Site
    from torchrepro.trace.reader import Trace

MOST = 8  # the most inputs whose origin is searched: each search may read a whole trace
LOOK_BACK = 3  # steps within which an optimizer writes each parameter that it trains
_FEW_OPTIONS = 3
SHOWN = 5  # elements that a divergence lists

MADE_OUTSIDE = {
    DATALOADER: "the batches differ as they enter the main process",
    NEW_TENSOR: "the program created this tensor from different values",
}
"""Ops whose records are data from outside torch, and the meaning of a difference in them."""

INPUTLESS = frozenset({"parameter", "gradient", "module"})
"""Ops whose records have a value, but not the inputs that it was computed from.

A record of a collective names only this rank's contribution.
"""

KeptTensor = tuple[str, int, str, str, bytes]
"""``input`` or ``output``, its position, dtype, shape and memory."""


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first record that differs, by its id in each run. A run that lacks it has None."""

    left: int | None
    right: int | None
    sort: str  # how the record differs, for example `records.ALONE`
    position: float  # in the left run: the id of a record, or a number between two ids
    instead: int | None = None  # id of the record that the other run has at this position
    read: Sequence[tuple[int, int]] = ()  # earlier pairs with equal outputs and different inputs


class Explanation(NamedTuple):
    """The kind of a divergence, with the origin of the difference in words."""

    kind: Kind
    what: str = ""
    writers: tuple[str, ...] = ()  # the threads that wrote the differing input


class RecordView(NamedTuple):
    """A record of a trace, together with the site, the argument and the thread of the record."""

    trace: Trace
    id: int
    step: int
    site: Site
    argument: str
    thread: str
    is_on_main: bool
    inputs: Sequence[bytes]
    outputs: Sequence[bytes]  # fingerprints

    @classmethod
    def read(cls, trace: Trace, number: int) -> RecordView:
        record = trace.record(number)
        return cls(
            *(trace, number, trace.step_of(number), trace.sites[record.site]),
            trace.arguments[record.argument],
            trace.threads.get(record.thread, str(record.thread)),
            record.thread == MAIN,
            [record.inputs[at : at + INPUT] for at in range(0, len(record.inputs), INPUT)],
            [record.outputs[at : at + OUTPUT] for at in range(0, len(record.outputs), OUTPUT)],
        )

    @property
    def is_optimizer_step(self) -> bool:
        return self.site.phase == "optimizer" and self.site.op.endswith(OPTIMIZER_STEP)

    @property
    def op(self) -> str:
        return f"{self.site.op}{f' in {self.site.module}' if self.site.module else ''}"

    def at_divergence(self, run: str) -> RunAtDivergence:
        return RunAtDivergence(
            run=run,
            source=self.site.source,
            outputs=self.site.outputs,
            argument="" if self.is_optimizer_step else self.argument,
            input_fingerprints=tuple(value.hex() for value in self.inputs),
            output_fingerprints=tuple(value.hex() for value in self.outputs),
        )


def describe(
    pair: Pair, difference: FirstDifference, out_of_tolerance: str | None = None
) -> Divergence:
    """Return a divergence that describes `difference`, with its origin as far as it is known."""
    left, right = (
        None if number is None else RecordView.read(trace, number)
        for trace, number in zip(pair.traces, (difference.left, difference.right), strict=True)
    )
    shown = left or right
    if shown is None:
        raise ValueError("a divergence has a record in one of the runs")
    if left is None or right is None:
        explanation = _explain_lone(pair, shown, difference.instead, only_left=right is None)
    elif out_of_tolerance is not None:
        kind = Kind.DATA if left.site.op in MADE_OUTSIDE else Kind.OUTPUTS
        explanation = Explanation(kind, out_of_tolerance)
    else:
        earlier = [
            (RecordView.read(pair.left, left_id), RecordView.read(pair.right, right_id))
            for left_id, right_id in difference.read
        ]
        # If something outside torch changed a tensor, the first op that read the tensor may have
        # returned equal results by chance. The runs then diverge at this op, before `difference`.
        for earlier_left, earlier_right in earlier:
            inputs = _unequal_inputs(earlier_left, earlier_right)
            if earlier_left.outputs and inputs and _explain_inputs(pair, inputs).kind is Kind.INPUT:
                left = shown = earlier_left
                right = earlier_right
                break
        explanation = _explain(pair, left, right, earlier)
    kept = [record.trace.tensors(record.id) if record else [] for record in (left, right)]
    elements, distances = differences(*kept)
    return Divergence(
        rank=pair.left.rank,
        step=shown.step,
        phase=shown.site.phase,
        module=shown.site.module,
        op=shown.site.op,
        source=shown.site.source,
        kind=explanation.kind,
        thread=shown.thread,
        left=left and left.at_divergence(pair.runs[0]),
        right=right and right.at_divergence(pair.runs[1]),
        elements=elements,
        distances=distances,
        what=explanation.what,
        writers=explanation.writers,
        record=shown.id - 1,
        after_last=pair.is_after_last(shown.step),
        before_model=shown.id <= (shown.trace.meta.get("built") or 0),
    )


def _explain_lone(
    pair: Pair, shown: RecordView, instead: int | None, *, only_left: bool
) -> Explanation:
    """Explain a record that only one run has. `instead` is the other run's next record, or None."""
    has, lacks = NAMES if only_left else NAMES[::-1]
    other_trace = pair.right if only_left else pair.left
    if instead is not None:
        next_op = RecordView.read(other_trace, instead).op
        return Explanation(Kind.ONLY_ONE, f"only {has} has it; {lacks} continues with {next_op}")
    row = other_trace.steps[shown.step]
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
    if left.is_optimizer_step:
        return Explanation(Kind.ARGUMENT, _unequal_options(left, right))
    if left.argument != right.argument:
        arguments = f"{left.argument or 'none'} and {right.argument or 'none'}"
        return Explanation(Kind.ARGUMENT, arguments)
    if op in MADE_OUTSIDE:
        return Explanation(Kind.DATA, MADE_OUTSIDE[op])
    if len(left.inputs) != len(right.inputs):
        counts = f"{counted(len(left.inputs), 'tensor')} as input and {len(right.inputs)}"
        return Explanation(Kind.ARGUMENT, counts)
    if _unequal_inputs(left, right):
        before = chain.from_iterable(_unequal_inputs(*both) for both in reversed(earlier))
        return _explain_inputs(pair, [*_unequal_inputs(left, right), *before])
    if op in INPUTLESS:
        return Explanation(Kind.VALUES)
    if op_name(op) in OVERWRITING | DRAWING or op.endswith("out"):
        return Explanation(Kind.OUTPUTS)
    positions = [str(at) for at, value in enumerate(left.inputs) if value == UNINITIALIZED_INPUT]
    note = f"input {', '.join(positions)} is uninitialized memory" if positions else ""
    return Explanation(Kind.OUTPUTS, note)


def _unequal_options(left: RecordView, right: RecordView) -> str:
    by_run: list[list[dict[str, str]]] = []
    for record in (left, right):
        try:
            groups = json.loads(record.argument)
            # Compare as text, because the text of NaN equals itself.
            by_run.append(
                [{name: json.dumps(option) for name, option in group.items()} for group in groups]
            )
        except (ValueError, RecursionError, TypeError, AttributeError):  # a damaged trace
            return "which cannot be read"
    if not all(by_run):
        return "which cannot be read"
    if len(by_run[0]) != len(by_run[1]):
        return f"{counted(len(by_run[0]), 'group')} of parameters and {len(by_run[1])}"
    several = len(by_run[0]) > 1
    differing = [
        f"{name}{f' of group {number}' * several}: "
        f"{mine.get(name, 'not set')} and {theirs.get(name, 'not set')}"
        for number, (mine, theirs) in enumerate(zip(*by_run, strict=True))
        for name in {**mine, **theirs}
        if mine.get(name) != theirs.get(name)
    ]
    return "; ".join(differing[:_FEW_OPTIONS]) or "an argument that is a tensor"


class Input(NamedTuple):
    """An input that differs between two paired records."""

    left: RecordView
    right: RecordView
    position: int

    @property
    def values(self) -> tuple[bytes, bytes]:
        return self.left.inputs[self.position], self.right.inputs[self.position]

    @property
    def name(self) -> str:
        return f"input {self.position} of {self.left.site.op}"


def _unequal_inputs(left: RecordView, right: RecordView) -> list[Input]:
    pairs = enumerate(zip(left.inputs, right.inputs, strict=False))
    return [Input(left, right, position) for position, (mine, theirs) in pairs if mine != theirs]


def _explain_inputs(pair: Pair, inputs: Sequence[Input]) -> Explanation:
    """Return the origin of unequal inputs of an op. All earlier records are known to be equal."""
    inputs = inputs[:MOST]
    first = inputs[0]
    missed = _steps_missed(pair, first.left.step)
    written = [
        _last_writers(trace, record.id, {unequal.values[run] for unequal in inputs})
        for run, (trace, record) in enumerate(zip(pair.traces, first[:2], strict=True))
    ]
    for unequal in inputs:
        writers = written[0].get(unequal.values[0]), written[1].get(unequal.values[1])
        if missed and all(writer is None or writer.step != unequal.left.step for writer in writers):
            return Explanation(
                Kind.UNSEEN, f"{unequal.name} differs, and nothing in this step wrote it{missed}"
            )
        explanation = _explain_by_writers(pair, unequal, *writers) or _explain_by_step_before(
            unequal
        )
        if explanation is not None:
            return explanation
    if UNINITIALIZED_INPUT in first.values:
        name = NAMES[first.values.index(UNINITIALIZED_INPUT)]
        note = f"{first.name} is uninitialized memory in {name}"
        return Explanation(Kind.DATA, note)
    return Explanation(
        Kind.DATA,
        f"{inputs[-1].name} differs, and no recorded op wrote it: "
        "a batch, a constant, or an initial parameter",
    )


def _steps_missed(pair: Pair, number: int) -> str:
    before = [step for step in pair.left.steps if step < number]
    if not before:
        return ""
    in_full = [
        step
        for step in pair.steps
        if step < number and all(row.level == "op" and not row.dropped for row in pair.rows(step))
    ]
    first, last = max(in_full, default=before[0] - 1) + 1, number - 1
    if first > last:
        return ""
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    return f"; the ops of {steps}, which may have written it, were not recorded in both runs"


def _explain_by_writers(
    pair: Pair, this: Input, left: RecordView | None, right: RecordView | None
) -> Explanation | None:
    writers = [writer for writer in (left, right) if writer is not None]
    if not writers:
        return None
    ops = []
    for writer in writers:
        when = moment(writer.step, after_last=pair.is_after_last(writer.step))
        ops.append(f"{writer.op}{when and f' {when}'} ({writer.site.phase})")
    threads = tuple(dict.fromkeys(writer.thread for writer in writers))
    if left is not None and right is not None:
        written = f"written by {ops[0]} in {NAMES[0]}, by {ops[1]} in {NAMES[1]}"
        return Explanation(Kind.ARGUMENT, f"{this.name} is a different tensor: {written}", threads)
    keeps, changed = NAMES if left else NAMES[::-1]
    if op_name(writers[0].site.op) in PLAIN:
        equal = f"in {keeps} {this.name} equals the output of {ops[0]}, maybe by chance"
        return _explain_by_step_before(this) or Explanation(
            Kind.DATA, f"{equal}; in {changed} no recorded op wrote it"
        )
    return Explanation(
        Kind.INPUT,
        f"in {keeps} {this.name} is the output of {ops[0]}; "
        f"in {changed} something outside torch has changed it since",
        threads,
    )


def _explain_by_step_before(this: Input) -> Explanation | None:
    """Explain an input by its value in the previous step; None if that value explains nothing."""
    before = [
        record.inputs[this.position] if record and this.position < len(record.inputs) else None
        for record in map(_in_step_before, this[:2])
    ]
    kept = [value == now for value, now in zip(before, this.values, strict=True)]
    if all(kept):
        return Explanation(
            Kind.DATA,
            f"{this.name} differed already before this step, without effect until now",
        )
    if any(kept):
        keeps, changed = NAMES if kept[0] else NAMES[::-1]
        return Explanation(
            Kind.INPUT,
            f"in {keeps} {this.name} is unchanged since the previous step; "
            f"in {changed} something outside torch has changed it",
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
        f"{this.name} was trained until the previous step; in both runs something outside "
        "torch has changed it since",
    )


def _last_writers(
    trace: Trace, before: int, values: Iterable[bytes], after: int = 0
) -> Mapping[bytes, RecordView]:
    """Return for each value the last record that wrote it, between the ids `after` and `before`.

    The search runs backwards until all writers are found. If a value has no writer, all records
    between the two ids are read.
    """
    missing = set(values)
    writers: dict[bytes, RecordView] = {}
    if not missing:
        return writers
    for part in trace.parts_before(before):
        for value in tuple(missing):
            number = part.last_writer(value, before)
            if number is not None:
                missing.remove(value)
                if number > after:
                    writers[value] = RecordView.read(trace, number)
        if not missing or part.first <= after + 1:
            break
    return writers


def _in_step_before(this: RecordView) -> RecordView | None:
    """Return the record of the previous step that corresponds to the given record, or None.

    The nth record of an op corresponds to the nth record of the same op in the previous step. Only
    records of the main thread are searched: timing decides the steps of other threads' records.
    """
    trace, key = this.trace, this.site.key
    earlier = [step for step in trace.steps if step < this.step]
    if not earlier or not this.is_on_main:
        return None
    now, before = (
        [
            record.id
            for record in trace.records(step)
            if record.thread == MAIN and trace.sites[record.site].key == key
        ]
        for step in (this.step, earlier[-1])
    )
    at = now.index(this.id)
    return RecordView.read(trace, before[at]) if at < len(before) else None


def differences(
    left: Iterable[KeptTensor], right: Iterable[KeptTensor]
) -> tuple[tuple[Element, ...], tuple[Distance, ...]]:
    """Return the first differing elements in the kept tensors of two records, and distances.

    Tensors whose shapes differ, or whose dtype is not in `DECODED`, are skipped.
    """
    mine, theirs = (
        {f"{role} {at}": (dtype, shape, data) for role, at, dtype, shape, data in kept}
        for kept in (left, right)
    )
    elements: list[Element] = []
    distances: list[Distance] = []
    for name in filter(theirs.__contains__, mine):
        (dtype, shape, memory), (other_dtype, other_shape, other_memory) = mine[name], theirs[name]
        if not {dtype, other_dtype} <= {*DECODED} or shape != other_shape or not memory:
            continue
        one, other = decoded(dtype, memory), decoded(other_dtype, other_memory)
        if one.tobytes() != other.tobytes():
            ulps = _ulps(dtype, memory, other_memory) if dtype == other_dtype else None
            sizes = tuple(map(int, re.findall(r"\d+", shape)))
            distance, unequal = _difference(name, sizes, one, other, ulps)
            distances.append(distance)
            elements += islice(unequal, SHOWN - len(elements))
    return tuple(elements), tuple(distances)


def decoded(dtype: str, memory: bytes) -> Any:
    """Return the elements of a tensor as a numpy array. The tensor must not be empty."""
    if dtype in BY_TORCH:
        torch = import_module("torch")
        torch_dtype = getattr(torch, dtype)
        return torch.frombuffer(bytearray(memory), dtype=torch_dtype).float().numpy()
    return np.frombuffer(memory, dtype)


BY_TORCH = ("bfloat16", "float8_e5m2", "float8_e4m3fn")
"""Dtypes that numpy lacks; torch converts them to float32 without rounding."""

DECODED = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128", *BY_TORCH),
)
"""The dtypes of tensors that are decoded."""

SIGNED_MAGNITUDES: Mapping[str, str] = {
    "float64": "uint64",
    "float32": "uint32",
    "float16": "uint16",
    "bfloat16": "uint16",
    "float8_e5m2": "uint8",
    "float8_e4m3fn": "uint8",
}
"""Float dtypes and unsigned integers of the same size. Read as integers, consecutive magnitudes
are consecutive integers."""


def _ulps(dtype: str, left: bytes, right: bytes) -> Any:
    code = SIGNED_MAGNITUDES.get(dtype)
    if code is None:
        return None
    sign = np.uint64(1 << 8 * np.dtype(code).itemsize - 1)
    mine, theirs = (np.frombuffer(memory, code).astype("uint64") for memory in (left, right))
    larger, smaller = (find(mine & ~sign, theirs & ~sign) for find in (np.maximum, np.minimum))
    return np.where((mine ^ theirs) & sign, larger + smaller, larger - smaller)


def _difference(
    name: str, shape: tuple[int, ...], left: Any, right: Any, ulps: Any
) -> tuple[Distance, Iterator[Element]]:
    wide = "complex128" if "c" in (left.dtype.kind, right.dtype.kind) else "float64"
    if left.dtype != right.dtype:
        unequal = (left != right) & ~((left != left) & (right != right))  # noqa: PLR0124 - NaN
    else:  # byte by byte, so that -0.0 differs from 0.0 and NaN may equal NaN
        mine, theirs = (np.ascontiguousarray(array).view("uint8") for array in (left, right))
        size = -1, left.dtype.itemsize
        unequal = (mine.reshape(size) != theirs.reshape(size)).any(axis=1)
    finite = np.isfinite(left) & np.isfinite(right)
    elements = (
        Element(
            name,
            tuple(map(int, np.unravel_index(position, shape) if shape else ())),
            str(left[position].item()),
            str(right[position].item()),
            int(ulps[position]) if ulps is not None and finite[position] else None,
        )
        for position in np.flatnonzero(unequal).tolist()
    )
    total = int(unequal.sum()), left.size
    mine, theirs = (array.astype(wide)[finite] for array in (left, right))
    if not mine.size:
        return Distance(name, None, None, None, None, *total), elements
    apart, scale = np.abs(mine - theirs), np.abs(theirs)
    relative = apart[scale > 0] / scale[scale > 0]
    lengths = float(np.linalg.norm(mine) * np.linalg.norm(theirs))
    distance = Distance(
        name,
        float(apart.max()),
        float(relative.max()) if relative.size else None,
        float(np.vdot(theirs, mine).real / lengths) if lengths else None,
        None if ulps is None else int(ulps[finite].max()),
        *total,
    )
    return distance, elements
