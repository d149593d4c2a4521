"""Runs within a tolerance: comparison by statistics, and distances of kept tensors."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrepro.trace import store
from torchrepro.verdict.comparison import compare, compare_within
from torchrepro.verdict.criteria import ALIGNED, out_of_tolerance
from torchrepro.verdict.first_difference import DECODED, SIGNED_MAGNITUDES, decoded, differences
from torchrepro.verdict.value import Kind

from .traces import Op, Statistics, Step, compared, diverged, first_of, value, write

STATISTICS = {"statistics": True}
NUMBERS = st.floats(-1e6, 1e6)


def _of(numbers: list[float]) -> Statistics:
    norm = math.sqrt(math.fsum(number * number for number in numbers))
    return len(numbers), math.fsum(numbers) / len(numbers), norm, min(numbers), max(numbers)


def _op(name: str, numbers: list[float], *, op: str = "aten::addmm", side: str = "") -> Op:
    return Op(op, name, outputs=(value(numbers, side),), statistics=(_of(numbers),))


@given(
    st.lists(st.tuples(NUMBERS, st.floats(-1, 1)), min_size=1, max_size=20),
    st.floats(1e-6, 0.5),
    st.floats(1e-6, 10),
)
def test_runs_with_all_elements_within_the_tolerance_are_the_same(
    pairs: list[tuple[float, float]], rtol: float, atol: float
) -> None:
    """Tensors whose elements are within a tolerance have statistics that are within it."""
    right = [number for number, _ in pairs]
    left = [number + share * 0.999 * (atol + rtol * abs(number)) for number, share in pairs]

    assert out_of_tolerance(_of(left), _of(right), rtol, atol) == ""


@given(st.lists(NUMBERS, min_size=1, max_size=20), st.floats(1e-3, 0.1))
def test_a_shift_beyond_the_tolerance_is_found(numbers: list[float], rtol: float) -> None:
    """Elements that are all shifted by twice their tolerance are out of tolerance."""
    largest = max(map(abs, numbers))
    left = [number + 2 * rtol * largest + 1e-3 for number in numbers]

    assert out_of_tolerance(_of(left), _of(numbers), rtol, 1e-4)


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ((2, None, None, None, None), (2, None, None, None, None), True),
        ((2, None, None, 1.0, 1.0), (2, 1.0, 1.0, 1.0, 1.0), False),
        ((1, math.inf, math.inf, math.inf, math.inf),) * 2 + (True,),
        ((1, math.inf, math.inf, math.inf, math.inf), (1, 1.0, 1.0, 1.0, 1.0), False),
        ((1, 1.0, 1.0, 1.0, 1.0), (1, math.inf, math.inf, math.inf, math.inf), False),
        ((2, math.inf, math.inf, 1.0, math.inf), (2, math.inf, math.inf, 9.0, math.inf), False),
        ((0, None, 0.0, None, None), (0, None, 0.0, None, None), True),
        ((1, 1.0, 1.0, 1.0, 1.0), (2, 1.0, 1.4, 1.0, 1.0), False),
    ],
)
def test_values_that_are_not_finite_equal_only_themselves(
    left: Statistics, right: Statistics, *, same: bool
) -> None:
    """NaN, infinity and tensors without elements agree with their like, whatever the tolerance."""
    assert (out_of_tolerance(left, right, 0.5, 0.5) == "") == same


@pytest.mark.parametrize("many", [2, store.MANY])
def test_the_first_op_out_of_tolerance_is_named(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops within the tolerance pass, also with other dtypes; the first beyond it is named.

    It keeps its sentence where later parts of a long step differ as well.
    """
    monkeypatch.setattr(store, "MANY", many)
    left = [_op("one", [1.0, 2.0]), _op("two", [1.0, 2.0]), _op("three", [1.0, 2.0])]
    right = [_op("one", [1.001, 2.0]), _op("two", [1.1, 2.0]), _op("three", [9.0, 2.0])]
    right = [replace(op, shapes="bfloat16[2] npu:0", argument="bfloat16") for op in right]
    runs = [Step(tuple(left))], [Step(tuple(right))]
    verdict = compared(*runs, STATISTICS, rtol=0.01)
    first = first_of(verdict)

    assert verdict.tolerance == (0.01, 0.0)
    assert (first.module, first.kind) == ("two", Kind.OUTPUTS)
    assert first.what == "output 0: mean 1.5 and 1.55"
    assert verdict.by_module == (("two", 1), ("three", 1))
    assert compared(*runs, STATISTICS, rtol=0.01, atol=8).same


def test_ops_of_different_devices_are_matched_by_module() -> None:
    """If a device uses a different op for the same module, its result is compared."""
    a = [_op("one", [1.0]), _op("attention", [1.0, 2.0], op="aten::flash"), _op("two", [3.0])]
    b = [_op("one", [1.0]), _op("attention", [1.0, 5.0], op="npu::fusion"), _op("two", [3.0])]
    extra = Op("aten::_to_copy", "one", shapes="float32[7]", outputs=(value("copy"),))
    verdict = compared([Step(tuple(a))], [Step((b[0], extra, *b[1:]))], STATISTICS, rtol=0.1)

    assert first_of(verdict).module == "attention"
    assert "1 op has no counterpart in the other run: not compared" in verdict.notes


@pytest.mark.parametrize("wrong", [False, True])
def test_other_threads_are_compared_within_the_tolerance(*, wrong: bool) -> None:
    """Results of other threads are within the tolerance or named, whatever their timing."""
    left, right = (
        [replace(_op("one", [number]), thread=1) for number in numbers]
        for numbers in ((1.0, 2.0, 3.0), (1.01, 2.9 if wrong else 2.02, 3.0))
    )
    runs = (
        [Step(tuple(ops[:end])), Step(tuple(ops[end:]))] for ops, end in ((left, 1), (right, 2))
    )
    verdict = compared(*runs, STATISTICS, rtol=0.1)

    assert verdict.same is not wrong
    if verdict.first:
        assert (verdict.first.step, verdict.first.what) == (1, "output 0: mean 2 and 2.9")


def test_without_statistics_only_equal_bits_are_within_a_tolerance() -> None:
    """Unequal bits without statistics are not the same, and a note says what to record."""
    bare, other = [Step((_op("one", [1.0]),))], [Step((_op("one", [1.0], side="b"),))]
    same, unequal = (compared(bare, run, STATISTICS, {}, rtol=0.1) for run in (bare, other))

    assert (same.same, same.tolerance, same.notes) == (True, None, ())
    assert (unequal.same, unequal.tolerance) == (False, None)
    assert "B has no statistics of tensors" in unequal.notes[0]
    assert "--statistics" in unequal.notes[0]


@pytest.mark.parametrize("meta", [{"level": "step"}, {"level": "module"}, {}])
def test_unequal_bits_without_statistics_are_not_within_a_tolerance(
    meta: dict[str, str],
) -> None:
    """Where a record has no statistics, nobody can tell whether it is nearly the same."""
    a, b = (
        [Step((Op("gradient", "fc", outputs=(value(name),)), _op("one", [1.0])))] for name in "ab"
    )

    assert not compared(a, b, STATISTICS | meta, rtol=0.5, atol=9.0).same
    assert compared(a, a, STATISTICS | meta, rtol=0.5).same


def test_two_recordings_under_aligned_are_compared_within_its_tolerance() -> None:
    """The tolerance of `aligned` applies if both runs were recorded under it; a note says so."""
    runs = [[Step((_op("one", [number], side=f"{number}"),))] for number in (1.0, 1.0001)]
    aligned, seeded = ({**STATISTICS, "guarantee": each} for each in ("aligned", "seeded"))

    assert (compared(*runs, aligned).same, compared(*runs, aligned).tolerance) == (True, ALIGNED)
    assert not compared(*runs, aligned, rtol=1e-6).same
    assert not compared(*runs, aligned, seeded).same


def test_runs_without_an_op_in_common_are_not_the_same() -> None:
    """Within a tolerance, too, something must have been compared."""
    runs = ([Step((_op(name, [1.0], op=f"mine::{name}"),))] for name in "ab")

    assert diverged(*runs, STATISTICS, rtol=0.1).kind is Kind.INCOMPARABLE


def test_losses_are_compared_within_the_tolerance_whatever_op_computed_them() -> None:
    """Losses are compared as numbers if devices use different ops for them."""
    one = _op("one", [1.0])
    runs = [Step((one, _op("", [2.0])), losses=(2.0,))], [Step((one,), losses=(3.0,))]
    first = diverged(*runs, STATISTICS, rtol=0.1)

    assert (first.op, first.what) == ("loss", "its loss differs: 2 and 3")
    assert compared(*runs, STATISTICS, rtol=0.5).same


def test_an_op_without_counterpart_in_the_same_program_is_a_difference(tmp_path: Path) -> None:
    """If two runs of one program are on one machine, both must have the same ops."""
    whole = (_op("one", [1.0]), _op("two", [2.0], op="aten::relu"))
    a = write(tmp_path / "a", [Step(whole)], STATISTICS)
    b = write(tmp_path / "b", [Step(whole[:1])], STATISTICS)
    first = first_of(compare_within(a, b, (0.1, 0.1), one_program=True))

    assert compare(a, b, rtol=0.1).same
    assert (first.kind, first.op) == (Kind.ONLY_ONE, "aten::relu")


VALUES = [0.5, -0.0, 1.75, math.inf, math.nan, -3.0]


@pytest.mark.parametrize("name", DECODED)
def test_kept_tensors_are_read_as_torch_wrote_them(name: str) -> None:
    """For every dtype, the decoded memory equals the values in torch."""
    dtype = getattr(torch, name)
    numbers = VALUES if dtype.is_floating_point or dtype.is_complex else [0, 1, 3, 100]
    tensor = torch.tensor(numbers).to(dtype)
    data = bytes(tensor.view(torch.uint8).numpy())
    wide = torch.complex128 if dtype.is_complex else torch.float64

    read = torch.from_numpy(decoded(name, data).astype(str(wide).removeprefix("torch.")))

    torch.testing.assert_close(read, tensor.to(wide), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", list(SIGNED_MAGNITUDES))
@given(start=st.integers(0, 100), steps=st.integers(1, 20), negative=st.booleans())
def test_the_distance_in_ulp_counts_the_numbers_of_a_type(
    name: str, start: int, steps: int, negative: bool
) -> None:
    """So many steps to the next number of its type are so many ulp, also from below zero."""
    width = np.dtype(SIGNED_MAGNITUDES[name]).itemsize
    sign = 1 << 8 * width - 1 if negative else 0
    kept = [
        [("output", 0, name, "1", code.to_bytes(width, sys.byteorder))]
        for code in (start | sign, start + steps)
    ]

    elements, (distance,) = differences(*kept)

    expected = 2 * start + steps if negative else steps
    assert [each.ulp for each in elements] == [expected]
    assert (distance.max_ulp, distance.differing, distance.total) == (expected, 1, 1)


@pytest.mark.parametrize(
    ("one", "other"), [("float16", "bfloat16"), ("float8_e5m2", "float8_e4m3fn")]
)
def test_different_dtypes_have_no_distance_in_ulp(one: str, other: str) -> None:
    """The distance in ulp is defined only within one dtype."""
    width = np.dtype(SIGNED_MAGNITUDES[one]).itemsize
    kept = [[("output", 0, dtype, "1", bytes([0x11] * width))] for dtype in (one, other)]

    (element,), (distance,) = differences(*kept)

    assert (element.ulp, distance.max_ulp) == (None, None)
    assert distance.max_abs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_the_first_differing_elements_are_shown(dtype: torch.dtype) -> None:
    """If tensors were kept, a divergence shows its differing elements and their distance."""
    runs = []
    for side, wrong in (("a", 0), ("b", 4)):
        tensor = torch.arange(1, 13).reshape(3, 4).to(dtype)
        tensor[1:, 2] += wrong
        data = bytes(tensor.contiguous().view(torch.uint8).reshape(-1).numpy())
        kept = ("output", 0, str(dtype).removeprefix("torch."), "3,4", data)
        op = replace(_op("one", [1.0], side=side), tensors=(kept,))
        runs.append([Step((op,))])

    first = diverged(*runs)

    assert [(each.tensor, each.index) for each in first.elements] == [
        ("output 0", (1, 2)),
        ("output 0", (2, 2)),
    ]
    assert [float(each.left) for each in first.elements] == [7.0, 11.0]
    (distance,) = first.distances
    assert distance.max_abs == 4.0
    assert distance.max_rel == pytest.approx(4 / 11)
    assert distance.cosine is not None
    assert 0.9 < distance.cosine < 1
