"""A run on the simulated accelerator, recorded: nothing is fetched from it before a step ends."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from simulated_npu import log, vary

import torchrepro

OnNpu = Callable[..., Any]


def trained(folder: str, fault: float = 0.0) -> tuple[int, list[float]]:
    """Train for two steps, recorded if there is a folder; return the copies that were made.

    Those of the second step are counted, and not its end: the first tries the device's arithmetic.
    The weights are returned with them.
    """
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    net.to("npu")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batches = [torch.full((3, 4), float(number)).to("npu") for number in (1, 2)]
    moves = 0
    with torchrepro.record(folder) if folder else nullcontext():
        for number, batch in enumerate(batches):
            optimizer.zero_grad()
            log.clear()
            loss = net(batch + fault * number).square().sum()
            if not folder:
                loss.detach().clone()  # a recording keeps the loss until the step has ended
            loss.backward()
            moves = _moves()
            optimizer.step()
    return moves, [value for one in net.parameters() for value in one.cpu().flatten().tolist()]


def _moves() -> int:
    return sum("_to_copy" in name or "_copy_from" in name or "item" in name for name in log)


def test_a_run_on_an_accelerator_is_recorded_without_waiting(on_npu: OnNpu, tmp_path: Any) -> None:
    """Within a step no more is copied than without a recording, and the weights are the same."""
    assert on_npu(trained, str(tmp_path / "one")) == on_npu(trained, "")


def computed(folder: str, *varying: str) -> None:
    """Record ops whose results are read by the next ones; `varying` ones are a little off."""
    vary(*varying)
    value = torch.linspace(-1, 1, 16).to("npu")
    with torchrepro.record(folder):
        ((value * 2).tanh() + 1).sum()


def test_what_an_op_makes_and_another_reads_is_compared(on_npu: OnNpu, tmp_path: Any) -> None:
    """Runs diverge at the op whose result differs, and not at a later one that shows it."""
    on_npu(computed, str(tmp_path / "one"))
    on_npu(computed, str(tmp_path / "two"), "aten::tanh")

    first = torchrepro.compare(tmp_path / "one", tmp_path / "two").first
    assert first is not None
    assert first.op == "aten::tanh"


def test_runs_on_an_accelerator_are_compared(on_npu: OnNpu, tmp_path: Any) -> None:
    """Two equal runs are the same; another argument is found at its op and step."""
    for name, fault in (("one", 0.0), ("two", 0.0), ("three", 1.0)):
        on_npu(trained, str(tmp_path / name), fault)

    assert torchrepro.compare(tmp_path / "one", tmp_path / "two").same
    first = torchrepro.compare(tmp_path / "one", tmp_path / "three").first
    assert first is not None
    assert (first.step, first.phase, first.op) == (1, "forward", "aten::add.Tensor")
