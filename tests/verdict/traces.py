"""Synthetic traces: runs with ops and data flow that are written by a test."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torchrepro.trace.format import FORMAT, Row, StepRow
from torchrepro.trace.store import Store
from torchrepro.verdict.comparison import compare
from torchrepro.verdict.value import Divergence, Verdict

Statistics = tuple[int, float | None, float | None, float | None, float | None]


def value(*parts: object) -> bytes:
    """Return the fingerprint of a tensor with a name."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


@dataclass(frozen=True)
class Op:
    """A record in the notation of the tests."""

    op: str = "aten::add"
    module: str = ""
    phase: str = "forward"
    inputs: tuple[bytes, ...] = ()
    outputs: tuple[bytes, ...] = ()
    argument: str = ""
    source: str = "train.py:1"
    shapes: str = "float32[2]"
    thread: int = 0
    statistics: tuple[Statistics, ...] = ()
    tensors: tuple[tuple[str, int, str, str, bytes], ...] = ()
    """Role, position, dtype, shape, data."""

    @property
    def site(self) -> tuple[str, ...]:
        """The key of the site in a trace."""
        return self.phase, self.module, self.op, self.source, self.shapes


@dataclass(frozen=True)
class Step:
    """A step in the notation of the tests."""

    ops: tuple[Op, ...] = ()
    parameters: bytes = b""
    gradients: bytes = b""
    arguments: bytes = b""
    random: Mapping[str, str] = field(default_factory=dict)
    losses: tuple[float | None, ...] = ()
    finished: bool = True
    level: str = ""
    """The level of the trace by default."""
    dropped: bool = False
    """Whether its records are dropped, as for a limited size of the trace."""
    thread: int = 0
    """The thread that ended the step and computed its losses."""


Run = list[Step]

META: Mapping[str, Any] = {
    "format": FORMAT,
    "level": "op",
    "rank": 0,
    "world_size": 1,
    "ordinal": 0,
    "algorithm": {"cpu": "xxh3-128", "others": "torchrepro-1"},
    "finished": True,
}


class Writer:
    """Writes a trace like the recorder: sites and arguments are numbered by first use."""

    def __init__(self, folder: Path, meta: Mapping[str, Any] | None = None) -> None:
        values = {**META, **(meta or {})}
        folder.mkdir(parents=True, exist_ok=True)
        ordinal = f".{values['ordinal']}" if values["ordinal"] else ""
        self.store = Store(folder / f"rank{values['rank']}{ordinal}.sqlite", shrinks=True)
        self.finished = values.pop("finished")
        self.store.write_meta({key: each for key, each in values.items() if each is not None})
        self.level = str(values["level"])
        self.records = 0
        self.sites: dict[tuple[str, ...], int] = {}
        self.arguments: dict[str, int] = {"": 0}
        self.threads = 0

    def step(self, number: int, step: Step) -> None:
        """Write one step."""
        last = max((op.thread for op in step.ops), default=0)
        for thread in range(self.threads, last + 1):
            self.store.add_threads([f"worker {thread}" if thread else "MainThread"])
        self.threads = max(self.threads, last + 1)
        rows = [self._row(op) for op in step.ops]
        first, self.records = self.records + 1, self.records + len(rows)
        self.store.add_records(rows)
        for position, op in enumerate(step.ops):
            self.store.add_statistics(
                (first + position, output, *one) for output, one in enumerate(op.statistics)
            )
            self.store.add_tensors((first + position, *one) for one in op.tensors)
        self.store.add_losses(
            (loss, value(repr(loss)), "train.py:9", step.thread) for loss in step.losses
        )
        self.store.end_step(
            StepRow(
                step=number,
                first=first,
                records=len(rows),
                bytes=8 * len(rows),
                parameters=step.parameters,
                gradients=step.gradients,
                arguments=step.arguments,
                random=step.random,
                finished=step.finished,
                level=step.level or self.level,
                thread=step.thread,
            )
        )
        if step.dropped:
            self.store.drop(number)

    def close(self) -> None:
        """Write the end of the trace, unless its run was cut off."""
        if self.finished:
            self.store.finish({})
        else:
            self.store.close()

    def _row(self, op: Op) -> Row:
        if op.site not in self.sites:
            self.sites[op.site] = len(self.sites) + 1
            self.store.add_sites([op.site])
        if op.argument not in self.arguments:
            self.arguments[op.argument] = len(self.arguments)
            self.store.add_arguments([op.argument])
        return (
            op.thread,
            self.sites[op.site],
            self.arguments[op.argument],
            b"".join(each[:8] for each in op.inputs),
            b"".join(op.outputs),
        )


def write(
    folder: Path, run: Iterable[Step], meta: Mapping[str, Any] | None = None, *, first: int = 0
) -> Path:
    """Write a run as one trace into a folder, steps numbered from `first` on."""
    run = list(run)
    steps = {"steps": (first, first + len(run) - 1)} if first else {}
    writer = Writer(folder, {**steps, **(meta or {})})
    for number, step in enumerate(run, start=first):
        writer.step(number, step)
    writer.close()
    return folder


def compared(
    left: Iterable[Step],
    right: Iterable[Step],
    meta: Mapping[str, Any] | None = None,
    meta_of_right: Mapping[str, Any] | None = None,
    *,
    first: int = 0,
    **tolerance: float,
) -> Verdict:
    """Return the verdict on two runs with one process each; a single `meta` is for both."""
    with TemporaryDirectory() as folder:
        a = write(Path(folder, "a"), left, meta, first=first)
        other = meta if meta_of_right is None else meta_of_right
        return compare(a, write(Path(folder, "b"), right, other, first=first), **tolerance)


def diverged(left: Iterable[Step], right: Iterable[Step], *metas: Any, **named: Any) -> Divergence:
    """Return the first divergence of two runs, which must diverge."""
    return first_of(compared(left, right, *metas, **named))


def first_of(verdict: Verdict) -> Divergence:
    """Return the first divergence of a verdict that has one."""
    assert not verdict.same
    assert verdict.first is not None
    return verdict.first


def chain(ops: int, *, step: int = 0, modules: int = 4, weights: object = "w") -> tuple[Op, ...]:
    """Return a chain of ops: each reads the output of the previous one and a weight."""
    names = ("aten::addmm", "aten::relu", "aten::mul", "aten::add")
    found: list[Op] = []
    last = value("batch", step)
    for place in range(ops):
        weight = value(weights, step, place)
        op = Op(names[place % len(names)], f"layers.{place * modules // ops}")
        found.append(computed(op, last, weight))
        last = found[-1].outputs[0]
    return tuple(found)


def computed(op: Op, *inputs: bytes, salt: object = "") -> Op:
    """Return an op whose outputs are determined by its inputs."""
    return replace(op, inputs=inputs, outputs=(value(op.site, op.argument, inputs, salt),))


def follow(ops: Sequence[Op], old: bytes, new: bytes) -> tuple[Op, ...]:
    """Return ops with one value replaced, and with all values that depend on it."""
    other = {old: new}
    found = []
    for op in ops:
        inputs = tuple(other.get(each, each) for each in op.inputs)
        changed = computed(op, *inputs) if inputs != op.inputs and op.outputs else op
        changed = replace(changed, inputs=inputs)
        other.update(zip(op.outputs, changed.outputs, strict=True))
        found.append(changed)
    return tuple(found)
