"""Every record has its origin: step, phase, module, op and line."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from .conftest import Net, Recorder, line_of, seen, train

TRAINING = Path(__file__).with_name("conftest.py")


def test_ops_of_an_optimizer_have_its_phase_and_the_line_that_calls_step(
    net: Net, recorded: Recorder
) -> None:
    """Ops of an optimizer have the phase "optimizer" and the line of the program's call.

    What it does to one parameter has the module of that.
    """
    records = seen(recorded(lambda: train(net, foreach=False)))

    found = [one for one in records if one.phase == "optimizer"]
    assert records[-1].phase == "optimizer"
    assert {one.line for one in found} == {line_of("  # of the shared training", TRAINING)}
    assert found[0].op == "SGD.step()"
    modules = {one.module for one in found if one.op.startswith("aten")}
    assert modules == {f"layers.{layer}.linear" for layer in range(3)}


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_ops_and_their_gradients_keep_their_module(
    net: Net, recorded: Recorder, reentrant: bool
) -> None:
    """Under activation checkpointing, the second forward is in the backward phase."""

    def program() -> None:
        x = torch.ones(2, 4, requires_grad=True)
        for layer in net.layers:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        x.sum().backward()

    net(torch.ones(2, 4))  # the model's own call is what names its modules
    found = seen(recorded(lambda: (net(torch.ones(2, 4)), program())))
    backward = [one for one in found if one.phase == "backward"]
    for op in ("aten::tanh", "aten::tanh_backward"):
        modules = [one.module for one in backward if one.op == op]
        assert modules == [f"layers.{layer}" for layer in (2, 1, 0)]


def test_wrappers_do_not_change_the_names_of_modules(net: Net, recorded: Recorder) -> None:
    """Modules of a model within a wrapper that only calls it have their names without it."""

    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x)

    bare = seen(recorded(lambda: train(net, steps=1)))
    wrapped = seen(recorded(lambda: train(Wrapper(net), steps=1)))

    assert [one.module for one in bare] == [one.module for one in wrapped]


def test_a_second_model_has_other_names(recorded: Recorder) -> None:
    """Modules of two models have different names."""
    one, two = torch.nn.Sequential(torch.nn.ReLU()), torch.nn.Sequential(torch.nn.ReLU())
    x = torch.ones(3)
    found = seen(recorded(lambda: (one(x), two(x))))

    assert len({record.module for record in found if record.op == "aten::relu"}) == 2


def test_a_closure_runs_as_forward_and_backward(net: Net, recorded: Recorder) -> None:
    """Ops of an optimizer's closure are not in the optimizer's phase."""
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    found = seen(recorded(lambda: optimizer.step(closure)))
    assert {one.phase for one in found if one.op == "aten::tanh"} == {"forward"}
    assert {one.phase for one in found if one.op == "aten::tanh_backward"} == {"backward"}


def test_batches_of_torchdata_loaders_are_recorded_once(recorded: Recorder) -> None:
    """Each batch of torch's and of torchdata's loaders is recorded once."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = torch.utils.data.TensorDataset(torch.arange(6.0))
    for kind in (torch.utils.data.DataLoader, StatefulDataLoader):
        found = seen(recorded(lambda kind=kind: [batch.sum() for (batch,) in kind(data, 3)]))
        assert len([one for one in found if one.op == "DataLoader"]) == 2


def test_threads_are_recorded_until_the_recording_ends(recorded: Recorder) -> None:
    """Ops have the number of their thread, 0 for the first; a thread may outlive the recording."""
    begun, go = threading.Event(), threading.Event()
    values: list[float] = []

    def work() -> None:
        torch.ones(3).cos()
        begun.set()
        go.wait(300)
        values.append(torch.ones(3).sum().item())

    thread = threading.Thread(target=work)

    def program() -> None:
        torch.ones(3).sin()
        thread.start()
        assert begun.wait(300)

    found = seen(recorded(program))
    go.set()
    thread.join(300)

    numbers = {one.op: one.thread for one in found}
    assert (numbers["aten::sin"], numbers["aten::cos"]) == (0, 1)
    assert "aten::sum" not in numbers
    assert values == [3.0]


def test_a_failed_optimizer_step_ends_at_the_next_backward_pass(
    net: Net, recorded: Recorder
) -> None:
    """Later ops do not belong to the optimizer that raised."""

    class Failing(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            raise OSError("no step")

    def program() -> None:
        net(torch.ones(2, 4)).sum().backward()
        with pytest.raises(OSError, match="no step"):
            Failing(net.parameters()).step()
        net(torch.ones(2, 4)).sum().backward()
        torch.tanh(torch.ones(7))

    *_, last = seen(recorded(program))
    assert (last.op, last.phase) == ("aten::tanh", "forward")
