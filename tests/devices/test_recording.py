"""A recording on the simulated accelerator copies nothing to the host before a step ends."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from simulated_npu import log, vary

import torchrepro

OnNpu = Callable[..., Any]


def trained(folder: str, fault: float = 0.0) -> tuple[int, list[float]]:
    """Train for two steps, recorded if there is a folder; return the copies to the host.

    Only copies of the second step before its end count: the first step tests the arithmetic of
    the device. Returns the weights too.
    """
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    net.to("npu")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batches = [torch.full((3, 4), float(number)).to("npu") for number in (1, 2)]
    copies = 0
    with torchrepro.record(folder) if folder else nullcontext():
        for number, batch in enumerate(batches):
            optimizer.zero_grad()
            log.clear()
            net(batch + fault * number).square().sum().backward()
            copies = log.to_host
            optimizer.step()
    return copies, [value for one in net.parameters() for value in one.cpu().flatten().tolist()]


def test_a_run_on_an_accelerator_is_recorded_without_waiting(on_npu: OnNpu, tmp_path: Any) -> None:
    """Within a step nothing is copied to the host, and the weights are the same."""
    unrecorded = on_npu(trained, "")
    assert unrecorded[0] == 0
    assert on_npu(trained, str(tmp_path / "one")) == unrecorded


def long_step(folder: str) -> int:
    """Record a step with more small tensors than a batch has; return the copies to the host."""
    value = torch.linspace(-1, 1, 16).to("npu")
    with torchrepro.record(folder):
        value = value * 2
        torchrepro.end_step()
        log.clear()
        for _ in range(1500):
            value = value * 1.01
        return log.to_host


def test_a_full_batch_stays_on_the_device(on_npu: OnNpu, tmp_path: Any) -> None:
    """For any number of tensors in a step, their fingerprints are copied at its end."""
    assert on_npu(long_step, str(tmp_path / "run")) == 0


def computed(folder: str, *varying: str) -> None:
    """Record ops whose results are read by later ops; with `varying` they differ slightly."""
    vary(*varying)
    value = torch.linspace(-1, 1, 16).to("npu")
    with torchrepro.record(folder):
        ((value * 2).tanh() + 1).sum()


def test_a_result_that_another_op_reads_is_compared(on_npu: OnNpu, tmp_path: Any) -> None:
    """Runs diverge at the op whose result differs, not at a later op that reads it."""
    on_npu(computed, str(tmp_path / "one"))
    on_npu(computed, str(tmp_path / "two"), "aten::tanh")

    first = torchrepro.compare(tmp_path / "one", tmp_path / "two").first
    assert first is not None
    assert first.op == "aten::tanh"


def test_runs_on_an_accelerator_are_compared(on_npu: OnNpu, tmp_path: Any) -> None:
    """Two equal runs are the same; a different argument is found at its op and step."""
    for name, fault in (("one", 0.0), ("two", 0.0), ("three", 1.0)):
        on_npu(trained, str(tmp_path / name), fault)

    assert torchrepro.compare(tmp_path / "one", tmp_path / "two").same
    first = torchrepro.compare(tmp_path / "one", tmp_path / "three").first
    assert first is not None
    assert (first.step, first.phase, first.op) == (1, "forward", "aten::add.Tensor")
