"""Faults outside of the ops: races of threads, and a different order of summation."""

import threading
from pathlib import Path

import pytest
import torch

import torchrepro
from torchrepro.verdict.value import Kind

from .programs import line_of

TRIES, ADDITIONS = 40, 160


def _raced() -> float:
    parts = torch.randn(2, 20_000, generator=torch.Generator().manual_seed(1))
    total, gate = torch.zeros(20_000), threading.Barrier(2)

    def add(part: torch.Tensor) -> None:
        gate.wait()
        for number in range(ADDITIONS):
            total.add_(part, alpha=1 / (number + 3))  # race

    threads = [threading.Thread(target=add, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return float(total.double().sum())


def test_a_race_of_two_threads_is_found_at_its_op(tmp_path: Path) -> None:
    """Threads that add to one tensor without a lock diverge in this addition, in one of them."""
    results = []
    for run in range(TRIES):
        with torchrepro.record(tmp_path / str(run)):
            results.append(_raced())
        if results[-1] != results[0]:
            break
    else:
        pytest.fail(f"{TRIES} runs gave the same result")

    first = torchrepro.compare(tmp_path / "0", tmp_path / str(run)).first

    assert first is not None
    assert (first.phase, first.op) == ("forward", "aten::add_.Tensor")
    assert first.source == line_of("race", __file__)
    assert first.thread != "MainThread"


def test_a_different_order_of_summation_is_found_at_the_sum(tmp_path: Path) -> None:
    """With more threads, the first sum that is large enough to be split diverges."""
    items = torch.randn(1 << 20, generator=torch.Generator().manual_seed(7))
    sums = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        with torchrepro.record(tmp_path / str(threads)):
            for size in (10, 100, 1 << 20, 100):
                sums.append(items[:size].sum().item())  # reduction
                torchrepro.end_step()
    assert sums[2] != sums[6]

    verdict = torchrepro.compare(tmp_path / "1", tmp_path / "2")

    first = verdict.first
    assert first is not None
    assert (first.step, first.phase, first.op) == (2, "forward", "aten::sum")
    assert (first.kind, first.source) == (Kind.OUTPUTS, line_of("reduction", __file__))
    assert any("threads" in setting.name for setting in verdict.settings)
    assert verdict.advice is not None
    assert "threads" in verdict.advice.cause
