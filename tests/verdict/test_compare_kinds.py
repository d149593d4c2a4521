"""What kind of difference comes first, and what is said of where it came from."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

import torchrepro
from torchrepro.trace.format import UNINITIALISED
from torchrepro.verdict.comparison import compare
from torchrepro.verdict.render import headline
from torchrepro.verdict.value import Divergence, Kind

from .traces import Op, Run, Step, computed, follow, value, write


def _first(left: Run, right: Run) -> Divergence:
    with TemporaryDirectory() as folder:
        verdict = compare(write(Path(folder, "left"), left), write(Path(folder, "right"), right))
    assert not verdict.same
    assert verdict.first is not None
    return verdict.first


def _trained(
    step: int,
    weight: bytes,
    *,
    batch: bytes | None = None,
    bias: bytes = value("bias"),
    through_view: bool = False,
) -> tuple[Step, bytes]:
    """Return a step of training and the weight that its optimizer leaves behind."""
    data = batch or value("batch", step)
    view = value("view", weight)
    transposed = Op("aten::t", "fc", inputs=(weight,))
    used = view if through_view else weight
    out = computed(Op("aten::addmm", "fc"), bias, data, used)
    gradient = computed(Op("aten::mm", "fc", "backward"), out.outputs[0])
    new = computed(Op("aten::add_", "", "optimizer"), weight, gradient.outputs[0])
    ops = (transposed, out, gradient, new) if through_view else (out, gradient, new)
    return Step(ops), new.outputs[0]


def _training(steps: int = 4) -> list[Step]:
    weight, run = value("init"), []
    for number in range(steps):
        step, weight = _trained(number, weight)
        run.append(step)
    return run


def _weight_before(number: int) -> bytes:
    weight = value("init")
    for step in range(number):
        _, weight = _trained(step, weight)
    return weight


def test_another_argument() -> None:
    """An op that was called with another number is that, although it makes no odds this time."""
    op = replace(computed(Op("aten::dropout"), value("x")), argument="(_, 0.5, True)")
    first = _first([Step((op,))], [Step((replace(op, argument="(_, 0.4, True)"),))])

    assert first.kind is Kind.ARGUMENT
    assert "0.5" in first.what
    assert "0.4" in first.what


def test_another_shape_is_another_output() -> None:
    """Outputs of the same bytes and another shape differ."""
    op = computed(Op("aten::add", shapes="float32[4]"), value("x"))
    first = _first([Step((op,))], [Step((replace(op, shapes="float32[2, 2]"),))])

    assert first.kind is Kind.OUTPUTS
    assert first.left is not None
    assert first.right is not None
    assert (first.left.outputs, first.right.outputs) == ("float32[4]", "float32[2, 2]")


def test_other_batches() -> None:
    """A batch that differs as it enters the main process is other data."""
    loaded = Op("DataLoader", phase="data", outputs=(value("batch"),))
    first = _first([Step((loaded,))], [Step((replace(loaded, outputs=(value("other"),)),))])

    assert (first.kind, first.op) == (Kind.DATA, "DataLoader")


def test_data_that_no_loader_handed_over() -> None:
    """A tensor that no op wrote, new in every step, is data where it is first used."""
    run = _training()
    step, _ = _trained(2, _weight_before(2), batch=value("another"))
    later = Op("aten::cat", outputs=(value("another"), value("batch", 2)))  # no origin: too late
    left, right = ([*run[:2], Step((*each.ops, later))] for each in (run[2], step))
    first = _first(left, right)

    assert (first.kind, first.step, first.op) == (Kind.DATA, 2, "aten::addmm")
    assert first.what.startswith("input 1 of aten::addmm")


@pytest.mark.parametrize("through_view", [False, True])
def test_a_weight_that_numpy_wrote(*, through_view: bool) -> None:
    """A weight that is not what the optimizer left is told, and in which run, also by its view."""
    runs: list[list[Step]] = [[], []]
    for run, side in zip(runs, ("kept", "changed"), strict=True):
        weight = value("init")
        for number in range(4):
            if side == "changed" and number == 2:
                weight = value("numpy")
            step, weight = _trained(number, weight, through_view=through_view)
            run.append(step)

    for left, right, changed in ((*runs, "B"), (*runs[::-1], "A")):
        first = _first(left, right)

        assert (first.kind, first.step, first.op) == (Kind.INPUT, 2, "aten::addmm")
        assert f"in {changed} something other than torch has changed it" in first.what
        assert "aten::add_ at step 1 (optimizer)" in first.what


def test_a_weight_that_both_runs_changed() -> None:
    """Where neither run has what its optimizer left, both have changed it."""
    runs = []
    for side in ("left", "right"):
        step, _ = _trained(2, value(side, "numpy"))
        runs.append([*_training()[:2], step])
    first = _first(*runs)

    assert (first.kind, first.step) == (Kind.INPUT, 2)
    assert "in both runs something other than torch has changed it" in first.what


def test_a_frozen_weight_that_changed() -> None:
    """A value that was the same a step before, and that no op wrote, has been changed."""
    run = _training()
    step, _ = _trained(2, _weight_before(2), bias=value("numpy"))
    first = _first(run, [*run[:2], step])

    assert (first.kind, first.step) == (Kind.INPUT, 2)
    assert "in A what it was in the step before" in first.what
    assert "input 0 of aten::addmm" in first.what


def test_another_tensor() -> None:
    """An op that was given another result of the same program has another argument."""
    one, two = (computed(Op("aten::relu", "one"), value(n)) for n in "ab")
    left, right = (computed(Op("aten::sum"), op.outputs[0]) for op in (one, two))
    first = _first([Step((one, two, left))], [Step((one, two, right))])

    assert (first.kind, first.op) == (Kind.ARGUMENT, "aten::sum")
    assert "another tensor" in first.what


def test_other_numbers_of_tensors() -> None:
    """An op that was given a tensor more has another argument."""
    left = computed(Op("aten::cat"), value("a"), value("b"))
    right = computed(Op("aten::cat"), value("a"))
    first = _first([Step((left,))], [Step((right,))])

    assert (first.kind, first.what) == (Kind.ARGUMENT, "2 tensors as input and 1")


def test_memory_that_nothing_had_written() -> None:
    """An op that read memory as the allocator gave it is told to have done so."""
    left = computed(Op("aten::add"), UNINITIALISED, value("x"))
    right = replace(left, outputs=(value("garbage"),))
    first = _first([Step((left,))], [Step((right,))])

    assert first.kind is Kind.OUTPUTS
    assert first.what == "input 0 is memory that nothing had written"


def test_memory_that_an_op_only_writes_is_not_blamed() -> None:
    """Random numbers go to memory that nothing had written, which says nothing of their cause."""
    left = computed(Op("aten::bernoulli_.float"), UNINITIALISED)
    first = _first([Step((left,))], [Step((replace(left, outputs=(value("drawn"),)),))])

    assert (first.kind, first.what) == (Kind.OUTPUTS, "")


def test_what_a_level_does_not_record_is_said() -> None:
    """A gradient that differs is named, and that the cause may lie before it in the step."""
    left = tuple(
        Op("gradient", "fc", "backward", argument=name, outputs=(value(name),))
        for name in ("weight", "bias")
    )
    right = tuple(replace(op, outputs=(value(op.argument, "other"),)) for op in left)
    with TemporaryDirectory() as folder:
        meta = {"level": "step"}
        verdict = compare(
            write(Path(folder, "left"), [Step(left)], meta),
            write(Path(folder, "right"), [Step(right)], meta),
        )

    assert verdict.first is not None
    assert (verdict.first.kind, verdict.first.op) == (Kind.VALUES, "gradient")
    assert verdict.first.left is not None
    assert verdict.first.left.argument == "weight"
    assert "inputs not recorded" in verdict.first.kind
    assert headline(verdict).endswith("at the latest in the backward pass of fc")
    assert "show that gradients differ" in verdict.advice.cause  # type: ignore[union-attr]
    assert (verdict.propagated, verdict.independent) == (1, 0)
    assert verdict.compared.level == "step"


def test_an_op_in_place_of_another_is_said() -> None:
    """Where a run does another op, both are named."""
    run = _training(1)
    other = computed(Op("aten::linear", "fc"), *run[0].ops[0].inputs)
    later = follow(run[0].ops[1:], run[0].ops[0].outputs[0], other.outputs[0])
    first = _first(run, [Step((other, *later))])

    assert (first.kind, first.op) == (Kind.ONLY_ONE, "aten::addmm")
    assert first.what == "only A has it; B goes on with aten::linear in fc"


def test_an_op_more_stands_where_it_ran_though_its_neighbour_moved() -> None:
    """An op that both runs have, at another place, does not say where one beside it was put in."""
    moved, more, first, last = (
        computed(Op(f"aten::{name}"), value(name)) for name in ("view", "exp", "relu", "sum")
    )
    found = _first([Step((first, last, moved))], [Step((moved, more, first, last))])

    assert (found.kind, found.op) == (Kind.ONLY_ONE, "aten::exp")
    assert found.what == "only B has it; A goes on with aten::relu"


def test_a_meta_tensor_of_one_run_is_an_op_more(tmp_path: Path) -> None:
    """A meta tensor has no bytes: that one run made one does not put it on another device."""
    for run in ("left", "right"):
        with torchrepro.record(tmp_path / run):
            if run == "left":
                torch.zeros(3, device="meta")
            torch.ones(3).sin()
    first = compare(tmp_path / "left", tmp_path / "right").first

    assert first is not None
    assert (first.kind, first.op) == (Kind.ONLY_ONE, "aten::zeros")


def test_parameters_that_differ_although_no_op_does() -> None:
    """What changes a parameter after its last use is seen in what the step leaves behind."""
    run = _training()
    left, right = (
        [*run[:3], replace(run[3], parameters=value(side))] for side in ("left", "right")
    )
    first = _first(left, right)

    assert (first.step, first.phase, first.op) == (3, "optimizer", "parameters")
