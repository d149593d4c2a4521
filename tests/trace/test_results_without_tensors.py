"""What an op returns that is no tensor is compared by its value; what hides ops is seen."""

from __future__ import annotations

import _thread
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchrepro

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

returned: list[int] = [0]


@torch.library.custom_op("torchrepro_tests::counted", mutates_args=())
def counted(x: torch.Tensor) -> int:
    """Return what no input tells."""
    return returned[0]


@torch.library.custom_op("torchrepro_tests::shared", mutates_args=())
def shared(x: torch.Tensor) -> float:
    """Return what no input tells."""
    return returned[0] / 3


def _written_by_numpy(value: int) -> torch.Tensor:
    tensor = torch.ones(3) + 0
    tensor.numpy()[0] = value
    return tensor


def _own_op(op: Callable[[torch.Tensor], object], value: int) -> None:
    returned[0] = value
    op(torch.ones(2))


def _on_a_thread_of_its_own(value: int) -> None:
    done: list[bool] = []

    def compute() -> None:
        torch.ones(3) * value
        done.append(True)

    _thread.start_new_thread(compute, ())
    while not done:
        time.sleep(0.001)


def _through_a_view_of_inference(value: int) -> None:
    with torch.inference_mode():
        base = torch.zeros(4) + 0
        base.sum()
        base[:2].fill_(value)
        base.sum()


def _of_unset_memory_in_inference(_value: int) -> None:
    with torch.inference_mode():
        base = torch.empty(4000)
        base[:2].fill_(1)
        base[:2] * 2


SHOWN: dict[str, Callable[[int], Any]] = {
    "equal": lambda value: torch.equal(torch.ones(3), _written_by_numpy(value)),
    "allclose": lambda value: torch.allclose(torch.ones(3), _written_by_numpy(value)),
    "item": lambda value: _written_by_numpy(value)[0].item(),
    "an op of one's own that counts": lambda value: _own_op(counted, value),
    "an op of one's own that shares": lambda value: _own_op(shared, value),
    "a thread that threading has not started": _on_a_thread_of_its_own,
    "memory of inference that a view of it has written": _through_a_view_of_inference,
}


@pytest.mark.parametrize("program", [*SHOWN, "unset"])
@pytest.mark.parametrize("asked", [{}, {"statistics": True, "detail": True}], ids=str)
def test_another_value_is_a_difference(tmp_path: Path, program: str, asked: dict[str, Any]) -> None:
    """The same value is none, and neither is what lies in memory that nobody wrote."""
    run = SHOWN.get(program, _of_unset_memory_in_inference)
    for name, value in (("a", 1), ("b", 1), ("c", 2)):
        with torchrepro.record(tmp_path / name, **asked):
            run(value)

    assert torchrepro.compare(tmp_path / "a", tmp_path / "b").same
    assert torchrepro.compare(tmp_path / "a", tmp_path / "c").same == (program not in SHOWN)


def test_a_number_that_differs_within_a_tolerance_is_no_difference(tmp_path: Path) -> None:
    """What `item` returns is a number like those in tensors."""
    for name, value in (("a", 1.0), ("b", 1.0 + 1e-7)):
        with torchrepro.record(tmp_path / name, statistics=True):
            torch.full((1,), value, dtype=torch.float64).item()

    assert not torchrepro.compare(tmp_path / "a", tmp_path / "b").same
    assert torchrepro.compare(tmp_path / "a", tmp_path / "b", rtol=1e-5).same
