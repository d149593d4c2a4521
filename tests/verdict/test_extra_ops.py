"""Records of two runs are matched, and additional ops of one run are found."""

import math
import random
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchrepro
from torchrepro.trace.reader import read_run
from torchrepro.verdict.matching import cheapest_alignment
from torchrepro.verdict.render import counted
from torchrepro.verdict.value import Kind, Verdict

from .traces import Op, Step, compared, diverged, value

NAMES = ("x", "y", "z", "w")  # tensors that a program begins with, each of six elements
MOST = 5  # statements that one run may do more

VALUES = (
    *("{a}.exp()", "{a}.relu()", "{a}.neg()", "{a} + {b}", "{a} * {b}", "{a} / 0", "{a} * 0"),
    *("{a} - {a}", "{a}.nan_to_num()", "{a}.nan_to_num() + {b}", "torch.zeros_like({a})"),
    *("{a} * {a}.nan_to_num().sum().item()", "{a}.cumsum(0)"),
)
"""What makes a tensor of six elements. Some results are the same whatever they are made from."""

LOOKS = (
    *("{a}.view(-1)", "{a}.reshape(2, 3).t()", "{a}.reshape(-1).view(torch.uint8)"),
    *("{a}.view(torch.int32)[-1:]", "{a}.sum()", "{a}.max().item()", "{a}[{a} > 0].sum()"),
    *("{a}.reshape(3, 2).mean(0)", "{a}.exp()", "{a} / 0"),
)
"""What only looks at a tensor."""

WRITES = (
    *("{a}.add_(1)", "{a}.mul_({b})", "{a}.copy_({b})", "{a}.zero_()", "{a}.nan_to_num_()"),
    "{a}.view(torch.int32)[-1:].bitwise_xor_(1)",
    "{a}.reshape(-1).view(torch.int32)[-1:].bitwise_xor_(1)",
    *("{a}[:3].mul_(2)", "{a}.reshape(2, 3)[0].zero_()"),
)
"""What writes a tensor in place, some of it through a view."""

HEAD = """
def run(extra, end_step):
    torch.manual_seed({seed})
    x, y = torch.randn(6), torch.randn(6)
    z, w = x.clone(), torch.zeros(6)
    for step in range({steps}):
"""
INDENT = " " * 8

Facts = tuple[object, ...]  # of a record: step, op, line; arguments, shapes, inputs, outputs
SAME = slice(0, 3)  # what two records have in common that belong together


def _text(seed: int, steps: int, *lines: str) -> str:
    return HEAD.format(seed=seed, steps=steps) + "\n".join(INDENT + line for line in lines)


@dataclass(frozen=True)
class Program:
    """A program; one of its runs executes additional statements."""

    seed: int
    longer: str  # the text of that run
    shorter: str  # the same text where a flag decides

    @classmethod
    def of(cls, seed: int, *, edited: bool = False) -> "Program":
        """Return the program of a seed; `edited` ones have the extra lines in one text only."""
        chance = random.Random(seed)
        lines = list(_statements(chance))
        more = [_alike(chance, lines) for _ in range(chance.randint(1, MOST))]
        steps = chance.choice((1, 1, 3))
        place = chance.randint(0, len(lines))
        before, after = lines[:place], [*lines[place:], "end_step()"]
        when = f"step == {steps - 1 and chance.randint(0, steps - 1)}"
        block = _block(when, more) if edited else _guarded(chance, f"extra and {when}", more)
        longer = _text(seed, steps, *before, *block, *after)
        return cls(seed, longer, _text(seed, steps, *before, *after) if edited else longer)

    @classmethod
    def of_lines(cls, extra: Sequence[str], tail: Sequence[str]) -> "Program":
        """Return the program that does the lines of `tail`, and before them, in one run, more."""
        text = _text(0, 1, *(_block("extra", extra) if extra else ()), *tail)
        return cls(0, text, text)

    def record(self, folder: Path, *, extra: bool) -> Path:
        """Record a run, which does the statements more if `extra` is set."""
        scope: dict[str, Any] = {"torch": torch}
        text = self.longer if extra else self.shorter
        exec(compile(text, f"/program-{self.seed}.py", "exec"), scope)
        with torchrepro.record(folder), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some views are resized on purpose
            scope["run"](extra, torchrepro.end_step)
        return folder


def _block(when: str, lines: Sequence[str]) -> list[str]:
    return [f"if {when}:", *(f"    {line}" for line in lines)]


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
    """Return statements for one run only: separate lines, or additional loop iterations."""
    if chance.random() < 0.7:
        return _block(when, more)
    a, b, c, *more = (chance.choice(NAMES) for _ in range(3 + len(more)))
    body = chance.choice(LOOKS + WRITES).format(a="t", b=b)
    return [f"for t in ({a}, {b}, *(({', '.join(more)},) if {when} else ()), {c}, {a}): {body}"]


def _answers(longer: Sequence[Facts], shorter: Sequence[Facts], *, lines: bool) -> list[Facts]:
    """Return the candidates for the first record that only the longer run has.

    The other run is the longer one without some records, of which the answer is the first. Records
    that belong together agree in step and op, and with `lines` in line. Those are left out without
    which the others differ in the fewest facts.
    """
    same = SAME if lines else slice(0, 2)

    def cost(one: Facts, other: Facts) -> float:
        if one[same] != other[same]:
            return math.inf
        return sum(a != b for a, b in zip(one[3:], other[3:], strict=True))

    size, other = len(longer), len(shorter)
    after = {(size, other): 0.0}  # what it costs at least to match the ends, by where they begin
    for there in range(other, -1, -1):
        for here in range(there + size - other, there - 1, -1):
            left_out = after.get((here + 1, there), math.inf)
            paired = after.get((here + 1, there + 1), math.inf)
            if here < size and there < other and paired < math.inf:
                paired += cost(longer[here], shorter[there])
            if (here, there) != (size, other):
                after[here, there] = min(left_out, paired)
    least = after[0, 0]
    assert least < math.inf
    found, before = [], 0.0
    for place, one in enumerate(longer[: other + 1]):
        if before + after.get((place + 1, place), math.inf) <= least:
            found.append(one)
        if place < other:
            before += cost(one, shorter[place])
    return found


def records_of(folder: Path) -> list[Facts]:
    """Return the content of each record of a run."""
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
    """Return the content of the record that a verdict names as additional."""
    first = verdict.first
    assert first is not None
    side = first.left or first.right
    assert side is not None
    texts = ("".join(texts) for texts in (side.input_fingerprints, side.output_fingerprints))
    facts = (side.argument, side.outputs, *map(bytes.fromhex, texts))
    return (first.step, first.op, side.source, *facts)


FEW, MANY = 100, 200
MEMORY = Path("/dev/shm")  # where small files are quick: to write a trace waits for the disk

ONE_BIT = "x.reshape(-1).view(torch.int32)[-1:].bitwise_xor_(1)"
CASES = {
    "a write through a view, then views of what agrees by chance": Program.of_lines(
        [ONE_BIT],
        [
            *("y = x / 0", "z = y - y", "w = z.nan_to_num() + x"),
            "for t in (y, z, w): t.reshape(-1).view(torch.uint8)",
        ],
    ),
    "an op, a write and the op again": Program.of_lines(
        ["x.exp()", "x[:1].add_(1)"], ["x.exp()", "y.exp()", "(x * 0).exp()"]
    ),
    "a number is read before what it is read from is written": Program.of_lines(
        ["x.sum().item()", "x.mul_(2)"], ["x.sum().item()", "(x + y).sum().item()"]
    ),
    "views of the same memory": Program.of_lines(
        ["x.view(-1)", "x.view(2, 3)[0].zero_()"],
        ["x.view(-1)", "w = x * 1", "w.view(-1)", "w.view(2, 3)"],
    ),
    "a turn more of a loop": Program.of_lines(
        [], ["for t in (z, x, *((y,) if extra else ()), x, z): t.add_(1)", "z.sum()"]
    ),
}
"""What was once taken for something else: lines that one run has, and those after them."""


@contextmanager
def _folder() -> Iterator[Path]:
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        yield Path(folder)


def _wrong(program: Program, *, more_in_left: bool, same_lines: bool = True) -> str:
    """Return what is wrong with the verdict on a program; empty if it is right."""
    with _folder() as folder:
        plain = program.record(folder / "plain", extra=False)
        more = program.record(folder / "more", extra=True)
        verdict = torchrepro.compare(*((more, plain) if more_in_left else (plain, more)))
        longer, shorter = records_of(more), records_of(plain)
    right = _answers(longer, shorter, lines=same_lines)
    first, others = verdict.first, len(longer) - len(shorter) - 1
    if first is None:
        return "it says the same"
    has = "A" if more_in_left else "B"
    if first.kind is not Kind.ONLY_ONE or not first.what.startswith(f"only {has} has it"):
        return f"it says {first.kind}: {first.what}, at {first.op} {first.source}"
    if first_of(verdict) not in right:
        return f"it names {first.op} {first.source}"
    if others and not any(
        one.startswith(f"{counted(others, 'more op')} ") for one in verdict.notes
    ):
        return f"it counts {verdict.notes}"
    return ""


def _require_all_found(seeds: Iterable[int], *, edited: bool = False) -> None:
    programs = {seed: Program.of(seed, edited=edited) for seed in seeds}
    wrong = {
        seed: found
        for seed, program in programs.items()
        if (found := _wrong(program, more_in_left=bool(seed % 2), same_lines=not edited))
    }
    texts = [f"seed {seed}: {what}\n{programs[seed].longer}" for seed, what in wrong.items()]
    assert not wrong, f"{len(wrong)} of {len(programs)}\n" + "\n".join(texts[:5])


@pytest.mark.slow
def test_additional_ops_are_found_at_the_first_of_them() -> None:
    """The first op that only one run has is named, wherever the ops were inserted."""
    _require_all_found(range(FEW))


@pytest.mark.slow
def test_additional_ops_are_found_in_hundreds_of_programs() -> None:
    """The first op that only one run has is named in each of 200 programs."""
    _require_all_found(range(FEW, FEW + MANY))


def test_additional_ops_are_found_in_an_edited_program() -> None:
    """The numbers of the lines after the additional ones do not matter."""
    _require_all_found(range(FEW // 2), edited=True)


@pytest.mark.parametrize("more_in_left", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_additional_ops_equal_to_others_are_not_changes_from_outside(
    name: str, *, more_in_left: bool
) -> None:
    """The verdict names the ops that only one run has, not the tensors that they changed."""
    assert not _wrong(CASES[name], more_in_left=more_in_left)


def test_each_run_may_have_additional_ops() -> None:
    """An op of one run is not matched with an equal op of the other run on another line."""
    program = Program.of_lines(
        ["z.exp()", "x.mul_(2)"], ["y = x + z", "if not extra: z.exp()", "y.sum()"]
    )
    with _folder() as folder:
        runs = [program.record(folder / str(extra), extra=extra) for extra in (False, True)]
        first = torchrepro.compare(*runs).first

    assert first is not None
    assert (first.kind, first.op) == (Kind.ONLY_ONE, "aten::exp")
    assert first.what == "only B has it; A continues with aten::add.Tensor"


LETTERS = st.lists(st.sampled_from(range(3)), max_size=9)
UNIQUE = st.lists(st.integers(), unique=True, min_size=1, max_size=40)


def _op(name: str, number: object) -> Op:
    return Op(f"aten::{name}", outputs=(value(number),))


@given(UNIQUE, st.data())
@settings(max_examples=40)
def test_moved_ops_are_matched(items: list[int], data: st.DataObject) -> None:
    """Ops with unique names are matched wherever they moved: the runs are the same."""
    left = [_op(f"op{item}", item) for item in items]
    start = data.draw(st.integers(0, len(left)))
    end = data.draw(st.integers(start, len(left)))
    rest = left[:start] + left[end:]
    place = data.draw(st.integers(0, len(rest)))

    assert compared([Step((*left,))], [Step((*rest[:place], *left[start:end], *rest[place:]))]).same


def test_the_first_of_a_longer_sequence_of_equal_ops_is_the_additional_one() -> None:
    """An op that was inserted before an op of its name is named, though all later ones differ."""
    left = [Step((_op("a", 1), _op("b", 1), _op("c", 1)))]
    first = diverged(left, [Step((_op("a", 1), _op("b", 2), _op("b", 3), _op("c", 2)))])

    assert first.kind is Kind.ONLY_ONE
    assert first.right is not None
    assert first.right.output_fingerprints == (value(2).hex(),)


def test_an_additional_op_is_found_by_values_if_all_lines_are_shifted() -> None:
    """Lines only decide between pairs that are equally good otherwise, however many differ."""
    left = [_op("a", "first"), *(_op("a", "same") for _ in range(8)), _op("b", 1)]
    one, other = (
        Step(tuple(replace(op, source=f"train.py:{line}") for line, op in enumerate(ops)))
        for ops in (left, [_op("a", "more"), *left])
    )

    first = diverged([one], [other])

    assert first.kind is Kind.ONLY_ONE
    assert first.right is not None
    assert first.right.output_fingerprints == (value("more").hex(),)


@given(LETTERS, LETTERS, st.randoms(use_true_random=False))
def test_an_alignment_has_the_fewest_unmatched_and_then_the_cheapest_pairs(
    one: list[int], other: list[int], chance: Random
) -> None:
    """No matching in order leaves fewer records, and none that leaves as few has cheaper pairs."""
    left, right = np.array(one, int), np.array(other, int)
    facts = [
        np.array([chance.randint(0, 1) for _ in side], int) for _ in "ab" for side in (one, other)
    ]
    prices = [(facts[0], facts[1], 2), (facts[2], facts[3], 1)]

    found = cheapest_alignment(left, right, prices)

    assert found is not None
    pairs = list(zip(*(places.tolist() for places in found), strict=True))
    costs = {
        (i, j): sum(int(a[i] != b[j]) * price for a, b, price in prices)
        for i in range(len(one))
        for j in range(len(other))
    }
    assert all(one[i] == other[j] for i, j in pairs)
    assert all(i < k and j < n for (i, j), (k, n) in pairwise(pairs))
    assert (-len(pairs), sum(costs[pair] for pair in pairs)) == _best(one, other, costs)


def _best(one: list[int], other: list[int], prices: dict[tuple[int, int], int]) -> tuple[int, int]:

    @cache
    def rest(i: int, j: int) -> tuple[int, int]:
        if i == len(one) or j == len(other):
            return 0, 0
        found = [rest(i + 1, j), rest(i, j + 1)]
        if one[i] == other[j]:
            pairs, price = rest(i + 1, j + 1)
            found.append((pairs - 1, price + prices[i, j]))
        return min(found)

    return rest(0, 0)


def test_sequences_with_little_in_common_end_the_search_early() -> None:
    """Long searches are cut off; a few additional records among thousands are found."""
    chance = np.random.default_rng(0)
    left, right = (chance.integers(0, 300, 20_000) for _ in "ab")

    assert cheapest_alignment(left, right) is None
    found = cheapest_alignment(left, np.concatenate([left[:5000], right[:9], left[5000:]]))
    assert found is not None
    assert len(found[0]) == len(left)
