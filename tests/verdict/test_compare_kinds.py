"""What kind of difference comes first, and what is said of where it came from."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import torchrepro
from torchrepro.trace.format import UNINITIALISED
from torchrepro.verdict.render import headline
from torchrepro.verdict.value import Kind

from .traces import Op, Step, compared, computed, diverged, first_of, follow, value

X, Y, A, B = (value(name) for name in "xyab")
DROPOUT = replace(computed(Op("aten::dropout"), X), argument="(_, 0.5, True)")
BATCH = Op("DataLoader", phase="data", outputs=(X,))
ADD = computed(Op("aten::add", shapes="float32[4]"), X)
READS = computed(Op("aten::add"), UNINITIALISED, X)
DRAWS = computed(Op("aten::bernoulli_.float"), UNINITIALISED)
ONE, TWO = (computed(Op("aten::relu", "one"), each) for each in (A, B))
MOVED, MORE, FIRST, LAST = (
    computed(Op(f"aten::{name}"), value(name)) for name in ("view", "exp", "relu", "sum")
)

CASES: dict[str, tuple[list[Op], list[Op], Kind, str, str]] = {
    "another argument, although it makes no odds this time": (
        *([DROPOUT], [replace(DROPOUT, argument="(_, 0.4, True)")]),
        *(Kind.ARGUMENT, "aten::dropout", "(_, 0.5, True) and (_, 0.4, True)"),
    ),
    "another shape of the same bytes": (
        *([ADD], [replace(ADD, shapes="float32[2, 2]")]),
        *(Kind.OUTPUTS, "aten::add", ""),
    ),
    "another batch as it enters the main process": (
        *([BATCH], [replace(BATCH, outputs=(Y,))]),
        *(Kind.DATA, "DataLoader", "the batches differ as they enter the main process"),
    ),
    "another result of the same program": (
        [ONE, TWO, computed(Op("aten::sum"), *ONE.outputs)],
        [ONE, TWO, computed(Op("aten::sum"), *TWO.outputs)],
        Kind.ARGUMENT,
        "aten::sum",
        "input 0 of aten::sum is another tensor: written by aten::relu in one at step 0 (forward) "
        "in A, by aten::relu in one at step 0 (forward) in B",
    ),
    "a tensor more": (
        *([computed(Op("aten::cat"), A, B)], [computed(Op("aten::cat"), A)]),
        *(Kind.ARGUMENT, "aten::cat", "2 tensors as input and 1"),
    ),
    "memory as the allocator gave it": (
        *([READS], [replace(READS, outputs=(Y,))]),
        *(Kind.OUTPUTS, "aten::add", "input 0 is memory that nothing had written"),
    ),
    "memory that an op only writes, which is not blamed": (
        *([DRAWS], [replace(DRAWS, outputs=(Y,))]),
        *(Kind.OUTPUTS, "aten::bernoulli_.float", ""),
    ),
    "an op that stands where it ran though its neighbour moved": (
        *([FIRST, LAST, MOVED], [MOVED, MORE, FIRST, LAST]),
        *(Kind.ONLY_ONE, "aten::exp", "only B has it; A goes on with aten::relu"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_differs_first_is_said(case: str) -> None:
    """The kind of difference, the op, and a sentence where there is more to say."""
    left, right, kind, op, what = CASES[case]
    first = diverged([Step(tuple(left))], [Step(tuple(right))])

    assert (first.kind, first.op, first.what) == (kind, op, what)


def _trained(
    step: int,
    weight: bytes,
    *,
    batch: bytes | None = None,
    bias: bytes = value("bias"),
    through_view: bool = False,
) -> tuple[Step, bytes]:
    data = batch or value("batch", step)
    transposed = Op("aten::t", "fc", inputs=(weight,))
    used = value("view", weight) if through_view else weight
    out = computed(Op("aten::addmm", "fc"), bias, data, used)
    gradient = computed(Op("aten::mm", "fc", "backward"), out.outputs[0])
    new = computed(Op("aten::add_", "", "optimizer"), weight, gradient.outputs[0])
    ops = (transposed, out, gradient, new) if through_view else (out, gradient, new)
    return Step(ops), new.outputs[0]


def _training(steps: int = 4, *, numpy: int = -1, through_view: bool = False) -> list[Step]:
    """Return a training in which numpy writes the weight before a step."""
    weight, run = value("init"), []
    for number in range(steps):
        weight = value("numpy") if number == numpy else weight
        step, weight = _trained(number, weight, through_view=through_view)
        run.append(step)
    return run


def _weight_before(number: int) -> bytes:
    return _training(number)[-1].ops[-1].outputs[0]


def test_data_that_no_loader_handed_over() -> None:
    """A tensor that no op wrote, new in every step, is data where it is first used."""
    run = _training()
    step, _ = _trained(2, _weight_before(2), batch=value("another"))
    later = Op("aten::cat", outputs=(value("another"), value("batch", 2)))  # no origin: too late
    first = diverged(*([*run[:2], Step((*each.ops, later))] for each in (run[2], step)))

    assert (first.kind, first.step, first.op) == (Kind.DATA, 2, "aten::addmm")
    assert first.what.startswith("input 1 of aten::addmm")


@pytest.mark.parametrize("through_view", [False, True])
def test_a_weight_that_numpy_wrote(*, through_view: bool) -> None:
    """A weight that is not what the optimizer left is named, and in which run, also by its view."""
    runs = [_training(numpy=at, through_view=through_view) for at in (-1, 2)]

    for left, right, changed in ((*runs, "B"), (*runs[::-1], "A")):
        first = diverged(left, right)

        assert (first.kind, first.step, first.op) == (Kind.INPUT, 2, "aten::addmm")
        assert f"in {changed} something other than torch has changed it" in first.what
        assert "aten::add_ at step 1 (optimizer)" in first.what


def test_a_weight_that_both_runs_changed() -> None:
    """Where neither run has what its optimizer left, both have changed it."""
    steps = (_trained(2, value(side, "numpy"))[0] for side in ("left", "right"))
    first = diverged(*([*_training()[:2], step] for step in steps))

    assert (first.kind, first.step) == (Kind.INPUT, 2)
    assert "in both runs something other than torch has changed it" in first.what


def test_a_frozen_weight_that_changed() -> None:
    """A value that was the same a step before, and that no op wrote, has been changed."""
    step, _ = _trained(2, _weight_before(2), bias=value("numpy"))
    first = diverged(_training(), [*_training()[:2], step])

    assert (first.kind, first.step) == (Kind.INPUT, 2)
    assert "in A what it was in the step before" in first.what
    assert "input 0 of aten::addmm" in first.what


def test_what_equals_a_constant_by_chance() -> None:
    """An input that equals what `ones` wrote, but was no such tensor, is data like any other."""
    ones = Op("aten::ones", outputs=(A,))
    first = diverged(
        *([Step((ones, computed(Op("aten::mul"), A, mask)))] for mask in (A, value("mask")))
    )

    assert (first.kind, first.op) == (Kind.DATA, "aten::mul")
    assert "input 1 of aten::mul equals in A what aten::ones" in first.what


def test_what_a_level_does_not_record_is_said() -> None:
    """A gradient that differs is named, and that the cause may lie before it in the step."""
    left, right = (
        [
            Step(
                tuple(
                    Op("gradient", "fc", "backward", argument=name, outputs=(value(name, run),))
                    for name in ("weight", "bias")
                )
            )
        ]
        for run in "ab"
    )
    verdict = compared(left, right, {"level": "step"})
    first = first_of(verdict)

    assert (first.kind, first.op) == (Kind.VALUES, "gradient")
    assert first.left is not None
    assert first.left.argument == "weight"
    assert "inputs not recorded" in first.kind
    assert headline(verdict).endswith("at the latest in the backward pass of fc")
    assert "show that gradients differ" in verdict.advice.cause  # type: ignore[union-attr]
    assert (verdict.propagated, verdict.independent) == (1, 0)
    assert verdict.compared.level == "step"


def test_an_op_in_place_of_another_is_said() -> None:
    """Where a run does another op, both are named."""
    run = _training(1)
    other = computed(Op("aten::linear", "fc"), *run[0].ops[0].inputs)
    later = follow(run[0].ops[1:], run[0].ops[0].outputs[0], other.outputs[0])
    first = diverged(run, [Step((other, *later))])

    assert (first.kind, first.op) == (Kind.ONLY_ONE, "aten::addmm")
    assert first.what == "only A has it; B goes on with aten::linear in fc"


def test_a_meta_tensor_of_one_run_is_an_op_more(tmp_path: Path) -> None:
    """A meta tensor has no bytes: that one run made one does not put it on another device."""
    for run in ("left", "right"):
        with torchrepro.record(tmp_path / run):
            if run == "left":
                torch.zeros(3, device="meta")
            torch.ones(3).sin()
    first = first_of(torchrepro.compare(tmp_path / "left", tmp_path / "right"))

    assert (first.kind, first.op) == (Kind.ONLY_ONE, "aten::zeros")


def test_parameters_that_differ_although_no_op_does() -> None:
    """What changes a parameter after its last use is seen in what the step leaves behind."""
    run = _training()
    first = diverged(*([*run[:3], replace(run[3], parameters=value(side))] for side in "ab"))

    assert (first.step, first.phase, first.op) == (3, "optimizer", "parameters")
