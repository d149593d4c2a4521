"""Small programs of which one run does a few ops more, and which op is the first of these."""

import math
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torchrepro
from torchrepro.trace.op_facts import facts_of
from torchrepro.trace.reader import read_run
from torchrepro.verdict.value import Verdict

Tensors = list[torch.Tensor]

NAMES = ("x", "y", "z", "w")
"""Tensors that a program begins with, each of six elements."""

MOST = 5
"""Statements that one run may do more."""

VALUES = (
    "{a}.exp()",
    "{a}.relu()",
    "{a}.neg()",
    "{a} + {b}",
    "{a} * {b}",
    "{a} / 0",
    "{a} * 0",
    "{a} - {a}",
    "{a}.nan_to_num()",
    "{a}.nan_to_num() + {b}",
    "torch.zeros_like({a})",
    "{a} * {a}.nan_to_num().sum().item()",
    "{a}.cumsum(0)",
)
"""What makes a tensor of six elements. Some results are the same whatever they are made from."""

LOOKS = (
    "{a}.view(-1)",
    "{a}.reshape(2, 3).t()",
    "{a}.reshape(-1).view(torch.uint8)",
    "{a}.view(torch.int32)[-1:]",
    "{a}.sum()",
    "{a}.max().item()",
    "{a}[{a} > 0].sum()",
    "{a}.reshape(3, 2).mean(0)",
    "{a}.exp()",
    "{a} / 0",
)
"""What only looks at a tensor."""

WRITES = (
    "{a}.add_(1)",
    "{a}.mul_({b})",
    "{a}.copy_({b})",
    "{a}.zero_()",
    "{a}.nan_to_num_()",
    "{a}.view(torch.int32)[-1:].bitwise_xor_(1)",
    "{a}.reshape(-1).view(torch.int32)[-1:].bitwise_xor_(1)",
    "{a}[:3].mul_(2)",
    "{a}.reshape(2, 3)[0].zero_()",
)
"""What writes a tensor in place, some of it through a view."""

HEAD = """
def run(extra, mark, in_turn, end_step):
    torch.manual_seed({seed})
    x, y = torch.randn(6), torch.randn(6)
    z, w = x.clone(), torch.zeros(6)
    for step in range({steps}):
"""
INDENT = " " * 8

Fact = object
Facts = tuple[Fact, ...]
"""What a record says: step, op and line; then arguments, shapes, inputs, outputs."""

SAME = slice(0, 3)
"""What two records have in common that belong together."""


@dataclass(frozen=True)
class Program:
    """A program, of which one run does some statements more."""

    seed: int
    head: str
    """The text that both runs have."""
    extra: Sequence[str]
    """The lines that only one run has; empty where a flag decides."""
    tail: str

    @classmethod
    def of(cls, seed: int, *, edited: bool = False) -> "Program":
        """Return the program of a seed; `edited` ones have the extra lines in one text only."""
        chance = random.Random(seed)
        lines = list(_statements(chance))
        more = [_alike(chance, lines) for _ in range(chance.randint(1, MOST))]
        steps = chance.choice((1, 1, 3))
        head = HEAD.format(seed=seed, steps=steps)
        place = chance.randint(0, len(lines))
        before, after = lines[:place], lines[place:]
        when = f"step == {steps - 1 and chance.randint(0, steps - 1)}"
        if edited:
            block = [f"if {when}:", *(f"    {line}" for line in ("mark()", *more, "mark()"))]
        else:
            block = []
            before += _guarded(chance, f"extra and {when}", more)
        after.append("end_step()")
        return cls(
            seed,
            "\n".join([head, *(INDENT + line for line in before)]),
            [INDENT + line for line in block],
            "\n".join(INDENT + line for line in after),
        )

    @classmethod
    def of_lines(cls, extra: Sequence[str], tail: Sequence[str]) -> "Program":
        """Return the program that does the lines of `tail`, and before them, in one run, more."""
        block = ["if extra:", *(f"    {line}" for line in ("mark()", *extra, "mark()"))]
        head = [HEAD.format(seed=0, steps=1), *(INDENT + line for line in (block if extra else ()))]
        return cls(0, "\n".join(head), (), "\n".join(INDENT + line for line in tail))

    def __str__(self) -> str:
        return "\n".join([self.head, *self.extra, self.tail])

    def record(self, folder: Path, *, extra: bool) -> Path:
        """Record a run, which does the statements more if `extra` is set."""
        with torchrepro.record(folder):
            self._run(_nothing, extra=extra)
        return folder

    def extra_places(self) -> range:
        """Return which of the ops of a run with the statements more are those of the statements."""
        marks: list[int] = []
        with OpCount() as ops:
            self._run(lambda: marks.append(ops.count), extra=True)
        return range(*marks)

    def _run(self, mark: Callable[[], None], *, extra: bool) -> None:
        def in_turn(before: Tensors, more: Tensors, after: Tensors) -> Iterator[torch.Tensor]:
            yield from before
            if more:
                mark()
                yield from more
                mark()
            yield from after

        text = str(self) if extra else f"{self.head}\n{self.tail}"
        scope: dict[str, Any] = {"torch": torch}
        exec(compile(text, f"/program-{self.seed}.py", "exec"), scope)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some views are resized on purpose
            scope["run"](extra, mark, in_turn, torchrepro.end_step)


class OpCount(TorchDispatchMode):
    """Counts the ops that compute something."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not facts_of(func).transparent
        return func(*args, **(kwargs or {}))


def _nothing() -> None:
    """Do nothing."""


def _statements(chance: random.Random) -> Iterator[str]:
    for _ in range(chance.randint(2, 9)):
        yield _statement(chance)


def _statement(chance: random.Random) -> str:
    a, b, c, d = (chance.choice(NAMES) for _ in range(4))
    kind = chance.random()
    if kind < 0.4:
        return f"{c} = {chance.choice(VALUES).format(a=a, b=b)}"
    if kind < 0.7:
        return chance.choice(LOOKS).format(a=a)
    if kind < 0.85:
        return chance.choice(WRITES).format(a=a, b=b)
    return f"for t in ({a}, {b}, {c}, {d}): {chance.choice(LOOKS + WRITES).format(a='t', b=b)}"


def _alike(chance: random.Random, lines: Sequence[str]) -> str:
    found = chance.choice(lines)
    if " = " in found:
        found = found.partition(" = ")[2]
    if chance.random() < 0.3:
        found = chance.choice(WRITES).format(a=chance.choice(NAMES), b=chance.choice(NAMES))
    if chance.random() < 0.3 and not found.startswith("for"):
        found = re.sub(rf"\b{chance.choice(NAMES)}\b", chance.choice(NAMES), found)
    return found


def _guarded(chance: random.Random, when: str, more: list[str]) -> list[str]:
    """Return statements that only a run with more does: lines of their own, or turns of a loop."""
    if chance.random() < 0.7:
        return [f"if {when}:", *(f"    {line}" for line in ("mark()", *more, "mark()"))]
    a, b, c, *more = (chance.choice(NAMES) for _ in range(3 + len(more)))
    body = chance.choice(LOOKS + WRITES).format(a="t", b=b)
    turns = f"in_turn([{a}, {b}], [{', '.join(more)}] if {when} else [], [{c}, {a}])"
    return [f"for t in {turns}: {body}"]


@dataclass(frozen=True)
class ExtraOps:
    """What the records of two runs say, the longer one's first, and which of them are more."""

    longer: Sequence[Facts]
    shorter: Sequence[Facts]
    places: range
    """The places of the records that only the longer run has."""
    lines: bool
    """Whether records that belong together have the same line."""

    @classmethod
    def of(cls, longer: Path, shorter: Path, places: range, *, lines: bool) -> "ExtraOps":
        """Read two runs, of which one has ops more at some places."""
        return cls(records_of(longer), records_of(shorter), places, lines)

    @cached_property
    def answers(self) -> dict[int, Facts]:
        """The records each of which is as good an answer as the first extra one, by place.

        The other run is the longer one without some records, the first of which is at the place.
        Records that belong together agree in step, op and line. In all else they differ in no more
        facts than if exactly the extra records are left out.
        """
        rest = [one for place, one in enumerate(self.longer) if place not in self.places]
        least = sum(map(self._cost, rest, self.shorter))
        assert least < math.inf
        after = self._costs_after()
        found, before = {}, 0.0
        for place, one in enumerate(self.longer):
            if before + after.get((place + 1, place), math.inf) <= least:
                found[place] = one
            if place == len(self.shorter):
                break
            before += self._cost(one, self.shorter[place])
        return found

    def _costs_after(self) -> dict[tuple[int, int], float]:
        """Return what it costs at least to match the ends of both, by where they begin."""
        size, other = len(self.longer), len(self.shorter)
        found = {(size, other): 0.0}
        for there in range(other, -1, -1):
            for here in range(there + size - other, there - 1, -1):
                left_out = found.get((here + 1, there), math.inf)
                paired = found.get((here + 1, there + 1), math.inf)
                if here < size and there < other and paired < math.inf:
                    paired += self._cost(self.longer[here], self.shorter[there])
                if (here, there) != (size, other):
                    found[here, there] = min(left_out, paired)
        return found

    def _cost(self, one: Facts, other: Facts) -> float:
        same = SAME if self.lines else slice(0, 2)
        if one[same] != other[same]:
            return math.inf
        return sum(a != b for a, b in zip(one[3:], other[3:], strict=True))


def records_of(folder: Path) -> list[Facts]:
    """Return what each record of a run says."""
    (trace,) = read_run(folder)
    try:
        return [
            (
                *(step, trace.sites[one.site].op, trace.sites[one.site].source),
                *(trace.arguments[one.argument], trace.sites[one.site].outputs),
                *(one.inputs, one.outputs),
            )
            for step in trace.steps
            for one in trace.records(step)
        ]
    finally:
        trace.close()


def first_of(verdict: Verdict) -> Facts:
    """Return what the record says that a verdict names as the one that only one run has."""
    first = verdict.first
    assert first is not None
    side = first.left or first.right
    assert side is not None
    texts = ("".join(texts) for texts in (side.input_fingerprints, side.output_fingerprints))
    facts = (side.argument, side.outputs, *map(bytes.fromhex, texts))
    return (first.step, first.op, side.source, *facts)
