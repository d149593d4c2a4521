"""Statistics of tensors: their values, and the elements that count."""

import math
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import torchrepro
from torchrepro.trace.buffer import PIECE, TensorStatistics, statistics

from .conftest import Recorder

NAN, INF = math.nan, math.inf
FLOATS = some.floats(-1e6, 1e6, width=32) | some.just(NAN)


@given(values=some.lists(FLOATS, max_size=40))
def test_statistics_ignore_nan(values: list[float]) -> None:
    """Count, mean, norm, low and high equal numpy's, for all elements that are not NaN."""
    numbers = np.array([value for value in values if not math.isnan(value)], np.float64)
    found = statistics(torch.tensor(values))

    assert found.numbers == len(numbers)
    if not len(numbers):
        assert found == TensorStatistics(0)
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
def test_statistics_do_not_depend_on_the_type_of_tensor(kind: str) -> None:
    """Equal numbers have equal statistics in any layout and dtype."""
    found = statistics(SAME[kind](torch.tensor(VALUES)))

    assert found == TensorStatistics(5, pytest.approx(0.6), pytest.approx(math.sqrt(3)), 0.0, 1.0)


ONE_OF_EACH = torch.tensor([1 + 2j, 3 - 4j])
FEW = torch.tensor([[0.0, 2.0], [0.0, 4.0]])
OF_FEW = TensorStatistics(2, 3.0, math.sqrt(20), 2.0, 4.0)
APART = torch.cat([torch.full((PIECE,), INF), torch.full((PIECE,), -INF)])
EXACTLY: dict[str, tuple[Callable[[], torch.Tensor], TensorStatistics]] = {
    # The implicit zeros of a sparse tensor, and its indices, do not count.
    "coo": (FEW.to_sparse, OF_FEW),
    "csr": (FEW.to_sparse_csr, OF_FEW),
    "csc": (FEW.to_sparse_csc, OF_FEW),
    # Real and imaginary parts count separately, conjugated if the tensor is.
    "complex": (lambda: ONE_OF_EACH, TensorStatistics(4, 0.5, math.sqrt(30), -4.0, 3.0)),
    "conjugate": (ONE_OF_EACH.conj, TensorStatistics(4, 1.5, math.sqrt(30), -2.0, 4.0)),
    "empty": (lambda: torch.empty(0), TensorStatistics(0)),
    "nan": (lambda: torch.tensor([NAN]), TensorStatistics(0)),
    "meta": (lambda: torch.ones(3, device="meta"), TensorStatistics(0)),
    "no rows": (lambda: torch.empty(4, 0, 3), TensorStatistics(0)),
    # An infinity is the greatest number; both have no mean.
    "infinity": (lambda: torch.tensor([1.0, INF]), TensorStatistics(2, INF, INF, 1.0, INF)),
    "both": (lambda: torch.tensor([-INF, INF]), TensorStatistics(2, None, INF, -INF, INF)),
    "both, in pieces": (lambda: APART, TensorStatistics(2 * PIECE, None, INF, -INF, INF)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", EXACTLY)
def test_statistics_of_special_values(kind: str) -> None:
    """Without elements, the count is 0 and the rest is None."""
    make, expected = EXACTLY[kind]

    assert statistics(make()) == expected


def test_small_numbers_are_not_lost_in_a_large_sum() -> None:
    """Sums are exact enough for comparisons."""
    tensor = torch.full((3 * PIECE + 7,), 0.1)
    tensor[PIECE + 5] = NAN
    found = statistics(tensor)

    assert found.numbers == len(tensor) - 1
    assert found.mean == pytest.approx(float(tensor[0]), rel=1e-12)
    assert found.norm == pytest.approx(float(tensor[0]) * math.sqrt(len(tensor) - 1), rel=1e-12)


def _compute(number: int) -> None:
    for _ in range(60):
        torch.full((3,), float(number)).mul(1.0)


@pytest.mark.parametrize("ends", [1, 200], ids=lambda ends: f"{ends} steps")
def test_statistics_belong_to_the_op_of_their_thread(recorded: Recorder, ends: int) -> None:
    """Also if other threads record, or end steps, at the same time."""

    def program() -> None:
        threads = [threading.Thread(target=_compute, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for _ in range(ends - 1):
            torchrepro.end_step()
        for thread in threads:
            thread.join()
        torchrepro.end_step()

    often = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        trace = recorded(program, statistics=True)
    finally:
        sys.setswitchinterval(often)

    of_thread: dict[int, set[float | None]] = {}
    records = sum(step.records for step in trace.steps.values())
    for record, _, mean, *_ in trace.statistics_of(range(1, records + 1)):
        of_thread.setdefault(trace.record(record).thread, set()).add(mean)
    assert sorted(map(sorted, of_thread.values())) == [[float(number)] for number in range(8)]
