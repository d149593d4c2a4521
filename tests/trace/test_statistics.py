"""Statistics of tensors: what they say, and of what."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from torchrepro.trace.statistics import PIECE, Statistics, statistics

NAN, INF = math.nan, math.inf
FLOATS = some.floats(-1e6, 1e6, width=32) | some.just(NAN)


@given(values=some.lists(FLOATS, max_size=40))
def test_they_are_those_of_the_numbers_that_are_none_of_them_nan(values: list[float]) -> None:
    """Count, mean, norm, low and high are what numpy says of all that is not NaN."""
    numbers = np.array([value for value in values if not math.isnan(value)], np.float64)
    found = statistics(torch.tensor(values))

    assert found.numbers == len(numbers)
    if not len(numbers):
        assert found == Statistics(0)
        return
    assert found.mean == pytest.approx(numbers.mean(), abs=1e-6)
    assert found.norm == pytest.approx(np.linalg.norm(numbers))
    assert (found.low, found.high) == (numbers.min(), numbers.max())


VALUES = [0.0, 1.0, 1.0, 0.0, 1.0]
SAME: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float32": lambda x: x,
    "float64": lambda x: x.double(),
    "float16": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "bool": lambda x: x.bool(),
    "uint8": lambda x: x.byte(),
    "int64": lambda x: x.long(),
    "uint64": lambda x: x.to(torch.uint64),
    "a gradient": lambda x: x.requires_grad_() * 1,
    "gaps": lambda x: torch.stack([x, x], 1)[:, 0],
    "negative": lambda x: torch._neg_view(-x),
    "imaginary": lambda x: torch.complex(x, -x).conj().imag,
    "quantised": lambda x: torch._make_per_tensor_quantized_tensor((x * 2 + 3).byte(), 0.5, 3),
    "mkldnn": lambda x: x.to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor([x[:2], x[2:]]),
    "jagged": lambda x: torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore")  # torch says of some layouts that they may still change
@pytest.mark.parametrize("kind", SAME)
def test_every_kind_of_tensor_has_those_of_its_numbers(kind: str) -> None:
    """The same numbers have the same statistics, however they are kept."""
    found = statistics(SAME[kind](torch.tensor(VALUES)))

    assert found == Statistics(5, pytest.approx(0.6), pytest.approx(math.sqrt(3)), 0.0, 1.0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_of_sparse_tensors_those_that_are_kept_count(layout: str) -> None:
    """Zeros that a sparse tensor leaves out are no numbers of it, and its indices are none."""
    tensor = getattr(torch.tensor([[0.0, 2.0], [0.0, 4.0]]), layout)()

    assert statistics(tensor) == Statistics(2, 3.0, math.sqrt(20), 2.0, 4.0)


def test_complex_numbers_are_two_each() -> None:
    """Real and imaginary parts are numbers of their own, conjugated where the tensor is."""
    tensor = torch.tensor([1 + 2j, 3 - 4j])

    assert statistics(tensor) == Statistics(4, 0.5, math.sqrt(30), -4.0, 3.0)
    assert statistics(tensor.conj()) == Statistics(4, 1.5, math.sqrt(30), -2.0, 4.0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "tensor",
    [torch.empty(0), torch.tensor([NAN]), torch.ones(3, device="meta"), torch.empty(4, 0, 3)],
    ids=["empty", "nan", "meta", "no rows"],
)
def test_without_numbers_there_is_nothing_to_say(tensor: torch.Tensor) -> None:
    """A tensor that holds no number has a count of 0 and nothing else."""
    assert statistics(tensor) == Statistics(0)


def test_infinities_are_numbers() -> None:
    """An infinity is the greatest number; the mean of both infinities is none."""
    assert statistics(torch.tensor([1.0, INF])) == Statistics(2, INF, INF, 1.0, INF)
    assert statistics(torch.tensor([-INF, INF])) == Statistics(2, None, INF, -INF, INF)
    apart = torch.cat([torch.full((PIECE,), INF), torch.full((PIECE,), -INF)])
    assert statistics(apart) == Statistics(2 * PIECE, None, INF, -INF, INF)


def test_small_numbers_are_not_lost_among_many() -> None:
    """What is added up is exact to the last digits that two runs are compared by."""
    tensor = torch.full((3 * PIECE + 7,), 0.1)
    tensor[PIECE + 5] = NAN
    found = statistics(tensor)

    assert found.numbers == len(tensor) - 1
    assert found.mean == pytest.approx(float(tensor[0]), rel=1e-12)
    assert found.norm == pytest.approx(float(tensor[0]) * math.sqrt(len(tensor) - 1), rel=1e-12)


def test_a_tensor_stays_as_it_was() -> None:
    """Reading changes neither a tensor nor the random numbers that come next."""
    tensor = torch.randn(10, requires_grad=True)
    generator = torch.get_rng_state()
    statistics(tensor)

    assert tensor._version == 0
    assert tensor.grad_fn is None
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), generator)
