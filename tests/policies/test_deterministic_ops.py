"""The deterministic implementations of torchrepro leave the result of a loop over the elements."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

import torchrepro

PROFILE = {
    "backends": {"torch": {"deterministic_algorithms": "error"}},
    "device": {"fallback": "cpu"},
}
SIZES = st.lists(st.integers(1, 4), max_size=3).map(tuple)
KINDS = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])


def _numbers(size: tuple[int, ...], kind: torch.dtype, first: int) -> torch.Tensor:
    count = torch.Size(size).numel()
    return torch.arange(first, first + count).reshape(size).to(kind)


@st.composite
def puts(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw a tensor, dense or not, indices with duplicates, and as many values."""
    kind, size = draw(KINDS), draw(SIZES)
    target = _numbers(size, kind, 100)
    if draw(st.booleans()):
        target = target.t() if target.dim() == 2 else target.expand(2, *size).clone()[0]
    count = target.numel()
    places = draw(st.lists(st.integers(-count, count - 1), max_size=8))
    return target, torch.tensor(places, dtype=torch.int64), _numbers((len(places),), kind, 1)


@pytest.mark.slow
@given(case=puts())
def test_put_equals_a_loop(case: tuple[torch.Tensor, ...]) -> None:
    """Of several values for one index the last stays, for all layouts, types and signs.

    `put` computes the same in another tensor.
    """
    target, places, values = case
    before = target.clone()
    expected = target.clone().flatten()
    for place, value in zip(places.tolist(), values, strict=True):
        expected[place] = value
    with torchrepro.apply(PROFILE):
        copied = target.put(places, values)
        assert torch.equal(before, target)
        result = target.put_(places, values)

    assert result is target
    assert torch.equal(expected.reshape(target.shape), target)
    assert torch.equal(copied, target)


@st.composite
def unpoolings(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Draw pooled values of two or three dimensions, indices with duplicates, and a size."""
    dims = draw(st.sampled_from([2, 3]))
    size = draw(st.lists(st.integers(0, 3), min_size=1, max_size=2))
    size += draw(st.lists(st.integers(1, 3), min_size=dims, max_size=dims))
    output = tuple(draw(st.lists(st.integers(1, 4), min_size=dims, max_size=dims)))
    values = _numbers(tuple(size), draw(st.sampled_from([torch.float32, torch.float64])), 1)
    area = torch.Size(output).numel()
    count = values.numel()
    places = draw(st.lists(st.integers(0, area - 1), min_size=count, max_size=count))
    indices = torch.tensor(places, dtype=torch.int64).reshape(size)
    if draw(st.booleans()) and len(size) == 4 and dims == 2:
        values = values.to(memory_format=torch.channels_last)
    return values, indices, output


def _unpooled(values: torch.Tensor, indices: torch.Tensor, output: tuple[int, ...]) -> torch.Tensor:
    dims = len(output)
    result = torch.zeros((*values.shape[:-dims], *output), dtype=values.dtype)
    planes = zip(
        result.flatten(-dims).reshape(-1, torch.Size(output).numel()),
        values.flatten(-dims).reshape(-1, values.shape[-dims:].numel()),
        indices.flatten(-dims).reshape(-1, values.shape[-dims:].numel()),
        strict=True,
    )
    for plane, its_values, its_places in planes if result.numel() else ():
        for place, value in zip(its_places.tolist(), its_values, strict=True):
            plane[place] = value
    return result


def _call_unpool(values: torch.Tensor, indices: torch.Tensor, output: Any) -> torch.Tensor:
    if len(output) == 2:
        return torch.ops.aten.max_unpool2d(values, indices, output)
    return torch.ops.aten.max_unpool3d(values, indices, output, [1, 1, 1], [0, 0, 0])


@pytest.mark.slow
@given(case=unpoolings())
def test_unpooling_equals_a_loop(case: tuple[Any, ...]) -> None:
    """In each plane the last value for an index stays, and all other elements are zero."""
    values, indices, output = case
    with torchrepro.apply(PROFILE):
        first, second = _call_unpool(*case), _call_unpool(*case)

    assert torch.equal(_unpooled(values, indices, output), first)
    assert torch.equal(first, second)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_without_duplicate_indices_unpooling_equals_that_of_torch(dims: int) -> None:
    """Without duplicate indices, results, gradients and layouts equal those of torch."""
    pool = getattr(functional, f"max_pool{dims}d")
    unpool = getattr(functional, f"max_unpool{dims}d")
    x = torch.randn(2, 3, *[6] * dims, requires_grad=True)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        y = unpool(*pool(x, 2, return_indices=True), 2)
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        return y.detach(), gradient

    expected = run()
    with torchrepro.apply(PROFILE):
        result = run()

    assert all(map(torch.equal, expected, result))
    assert [each.stride() for each in expected] == [each.stride() for each in result]


def test_an_output_given_by_the_caller_is_filled() -> None:
    """`out=` is resized and filled as torch does it."""
    values, indices = torch.ones(1, 2, 2), torch.tensor([[[0, 5], [5, 9]]])
    output = torch.empty(0)
    with torchrepro.apply(PROFILE):
        result = torch.ops.aten.max_unpool2d.out(values, indices, [4, 4], out=output)

    assert result is output
    assert torch.equal(_unpooled(values, indices, (4, 4)), output)


def _put(places: list[int], values: torch.Tensor, **more: Any) -> torch.Tensor:
    return torch.zeros(4).put_(torch.tensor(places, **more), values)


WRONG = {
    "a place too far": lambda: _put([4], torch.ones(1)),
    "a place too far back": lambda: _put([-5], torch.ones(1)),
    "fewer values than places": lambda: _put([1, 2], torch.ones(1)),
    "values of another type": lambda: _put([1], torch.ones(1, dtype=torch.float64)),
    "places that are no whole numbers": lambda: _put([1], torch.ones(1), dtype=torch.float32),
    "an index out of the plane": lambda: _call_unpool(
        torch.ones(1, 2, 2), torch.full((1, 2, 2), 16), [4, 4]
    ),
    "an index below zero": lambda: _call_unpool(
        torch.ones(1, 2, 2), torch.full((1, 2, 2), -1), [4, 4]
    ),
    "indices of another shape": lambda: _call_unpool(
        torch.ones(1, 2, 2), torch.zeros(1, 2, 1, dtype=torch.int64), [4, 4]
    ),
    "indices of another type": lambda: _call_unpool(
        torch.ones(1, 2, 2), torch.zeros(1, 2, 2, dtype=torch.int32), [4, 4]
    ),
    "too few dimensions": lambda: _call_unpool(
        torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.int64), [4, 4]
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_torch_refuses_are_refused(name: str) -> None:
    """Arguments that do not match raise the same type of error as in torch."""
    with pytest.raises((RuntimeError, IndexError)) as without:
        WRONG[name]()
    with torchrepro.apply(PROFILE), pytest.raises((RuntimeError, IndexError)) as within:
        WRONG[name]()

    assert type(without.value) is type(within.value)
    assert "deterministic" not in str(within.value)
