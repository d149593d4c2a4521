"""Digests of steps and of the end state; caches between steps change none of them.

Writes without an op, and writes after the last step, are compared as well.
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import _disable_current_modes

import torchrepro
from torchrepro.trace import recording_levels
from torchrepro.trace.fingerprint import fingerprint
from torchrepro.trace.reader import read_run

from .conftest import Net, Recorder, Seen, line_of, seen

if TYPE_CHECKING:
    from collections.abc import Callable


def _freeze(net: Net, _: torch.optim.Optimizer) -> None:
    net.layers[0].linear.weight.requires_grad_(not net.layers[0].linear.weight.requires_grad)
    net.layers[0].linear.weight.grad = None


def _other_memory(net: Net, _: torch.optim.Optimizer) -> None:
    weight = net.layers[1].linear.weight
    weight.data = weight.data.t().contiguous().t()


def _other_dtype(net: Net, optimizer: torch.optim.Optimizer) -> None:
    wide = net.layers[0].linear.bias.dtype == torch.float64
    net.to(torch.float32 if wide else torch.float64)
    optimizer.state.clear()


def _other_parameter(net: Net, optimizer: torch.optim.Optimizer) -> None:
    linear = net.layers[2].linear
    linear.bias = torch.nn.Parameter(linear.bias.detach().clone())
    optimizer.param_groups[0]["params"] = list(net.parameters())


def _other_model(net: Net, _: torch.optim.Optimizer) -> None:
    class Other(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net.layers[0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.inner(x)
            return found

    with torch.no_grad():
        Other()(torch.ones(2, 4, dtype=net.layers[0].linear.bias.dtype))


CHANGES: dict[str, Callable[[Net, Any], object]] = {
    "nothing": lambda net, optimizer: None,
    "freeze": _freeze,
    "memory": _other_memory,
    "dtype": _other_dtype,
    "parameter": _other_parameter,
    "model": _other_model,
    "rate": lambda net, optimizer: optimizer.param_groups[0].update(lr=0.5),
    "written outside torch": lambda net, optimizer: (
        net.layers[2].linear.weight.detach().numpy().__iadd__(1)
    ),
}


def _recorded(changes: list[str], level: str) -> list[Seen]:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with tempfile.TemporaryDirectory() as folder:
        with torchrepro.record(Path(folder) / "run", level=level):
            for change in ["nothing", *changes]:
                CHANGES[change](net, optimizer)
                optimizer.zero_grad()
                batch = torch.ones(5, 4, dtype=net.layers[0].linear.bias.dtype)
                net(batch).square().mean().backward()
                optimizer.step()
        (trace,) = read_run(Path(folder) / "run")
        found = seen(trace)
        trace.close()
    return found


@pytest.mark.slow
@settings(max_examples=15)
@given(st.lists(st.sampled_from(sorted(CHANGES)), max_size=6), st.sampled_from(["step", "module"]))
def test_cached_facts_about_parameters_change_no_record(changes: list[str], level: str) -> None:
    """Records are the same as in a recording without the cache."""
    with mock.patch.object(recording_levels, "is_", return_value=False):
        anew = _recorded(changes, level)

    assert _recorded(changes, level) == anew


def test_level_step_records_gradients_before_and_parameters_after(
    net: Net, recorded: Recorder
) -> None:
    """Each step has fingerprints of all gradients before it and of all parameters after it."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    there: list[tuple[bytes, ...]] = []

    def program() -> None:
        for step in range(3):
            optimizer.zero_grad()
            net(torch.full((2, 4), float(step))).square().mean().backward()
            there.extend((fingerprint(one.grad),) for one in net.parameters())
            optimizer.step()
            there.extend((fingerprint(one),) for one in net.parameters())

    found = [one for one in seen(recorded(program, level="step")) if one.op[-1] != ")"]

    assert [one.outputs for one in found] == there
    assert [(one.op, one.module, one.argument) for one in found[:12]] == [
        (op, f"layers.{number}.linear", name)
        for op in ("gradient", "parameter")
        for number in range(3)
        for name in ("weight", "bias")
    ]


OPTIONS: list[dict[str, Any]] = [
    *({"level": "op"}, {"level": "step"}, {"level": "module"}),
    *({"detail": True}, {"every": 2}, {"statistics": True}),
]


def _trained(passes: int) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        *(torch.nn.Conv1d(2, 3, 3), torch.nn.Tanh(), torch.nn.Flatten()),
        torch.nn.Linear(12, 2),
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(passes):  # the first gradient may be a view, the second is written into it
            net(torch.rand(5, 2, 6)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("passes", [1, 2])
def test_all_levels_store_the_same_digests_of_a_step(tmp_path: Path, passes: int) -> None:
    """Digests of gradients and parameters depend on their memory only, also for a view.

    They do not depend on earlier steps, also if those are not recorded.
    """
    found = []
    for number, options in enumerate(OPTIONS):
        with torchrepro.record(tmp_path / str(number), **options):
            _trained(passes)
        (trace,) = read_run(tmp_path / str(number))
        losses = [loss.fingerprint for loss in trace.losses]
        rows = trace.steps.values()
        found.append([*((row.gradients, row.arguments, row.parameters) for row in rows), losses])
        trace.close()
    for level in ("op", "module", "step"):
        with torchrepro.record(tmp_path / level, level=level, steps=(2, 2)):
            _trained(passes)
        (trace,) = read_run(tmp_path / level)
        row = trace.steps[2]
        assert (row.gradients, row.arguments, row.parameters) == found[0][2]
        trace.close()

    assert all(all(row) for row in found[0])
    assert found[1:] == found[:1] * (len(OPTIONS) - 1)


MOMENTS = ("first", "between a view and what reads it", "after the forward", "after the backward")


@pytest.mark.parametrize("options", [{}, {"detail": True}], ids=str)
def test_the_time_at_which_another_thread_computes_makes_no_difference(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Runs are the same if a thread computes the same, at any moment of a step."""
    for moment in MOMENTS:
        with torchrepro.record(tmp_path / moment, **options):
            _beside_a_thread(moment)

    for moment in MOMENTS[1:]:
        verdict = torchrepro.compare(tmp_path / MOMENTS[0], tmp_path / moment)
        assert verdict.same, (moment, verdict.first)


def _beside_a_thread(moment: str) -> None:
    torch.manual_seed(0)
    linear, last = torch.nn.Linear(4, 3), torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD([*linear.parameters(), *last.parameters()], lr=0.1)
    data = torch.rand(5, 4)
    thread = threading.Thread(target=lambda: torch.ones(3).mul(2).t().add(1))

    def at(now: str) -> None:
        if now == moment:
            thread.start()
            thread.join()

    at("first")
    view = linear.weight.t()
    at("between a view and what reads it")
    loss = last(data @ view + linear.bias).square().mean()
    at("after the forward")
    loss.backward()
    at("after the backward")
    optimizer.step()


def _record_to_the_end(folder: Path, at_the_end: Callable[[Any, Any], object], level: str) -> None:
    """Train a model with uninitialized memory, and do something after the last step."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    with torchrepro.record(folder, level=level):
        if level == "op":  # which alone sees that nothing has written it
            net.register_parameter("unused", torch.nn.Parameter(torch.empty(500)))
            net.register_buffer("scratch", torch.empty(500))
        net.register_buffer("cache", torch.empty(500), persistent=False)
        for _ in range(2):
            net(torch.randn(4, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        at_the_end(net, optimizer)


def _replace(net: Any, _optimizer: Any) -> None:
    net[0].weight.data = torch.from_numpy(np.ones((3, 3), dtype="f"))


def _write(net: Any, _optimizer: Any) -> None:
    net[0].weight.detach().numpy()[0] = 7


def _write_buffer(net: Any, _optimizer: Any) -> None:
    net[1].running_mean.numpy()[:] = 3


def _write_state(net: Any, optimizer: Any) -> None:
    optimizer.state[net[0].weight]["exp_avg"].numpy()[:] = 3


def _set_rate(_net: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


WRITTEN = {
    "a parameter whose memory is another": (_replace, "parameter 0 of Adam"),
    "a parameter": (_write, "parameter 0 of Adam"),
    "a buffer": (_write_buffer, "1.running_mean"),
    "the state of an optimizer": (_write_state, "exp_avg of parameter 0 of Adam"),
    "a learning rate": (_set_rate, "the arguments of Adam"),
}


@pytest.mark.parametrize("level", ["op", "module", "step"])
def test_a_write_after_the_last_op_is_a_difference(tmp_path: Path, level: str) -> None:
    """The write is named; runs without it are the same despite uninitialized memory."""
    _record_to_the_end(tmp_path / "plain", lambda *_: None, level)
    for number, (write, named) in enumerate([(lambda *_: None, ""), *WRITTEN.values()]):
        _record_to_the_end(tmp_path / str(number), write, level)
        verdict = torchrepro.compare(tmp_path / "plain", tmp_path / str(number))

        assert verdict.same != bool(named), named
        assert verdict.first is None or named in verdict.first.what


def test_a_deleted_model_is_not_compared(tmp_path: Path) -> None:
    """A model that was deleted before the end is not kept alive, and not in the end state."""
    with torchrepro.record(tmp_path / "run"):
        net = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        del net, optimizer

    (trace,) = read_run(tmp_path / "run")
    assert trace.meta.get("end") is None


def test_lines_that_hide_ops_are_reported(tmp_path: Path) -> None:
    """A note names the line that disables all modes; code of torch, as in printing, is ignored."""
    for run in "ab":
        with torchrepro.record(tmp_path / run):
            weight = torch.ones(3)
            str(weight)
            with _disable_current_modes():  # hides
                weight.mul_(3)
    verdict = torchrepro.compare(tmp_path / "a", tmp_path / "b")

    line = line_of(":  # hides", __file__)
    assert verdict.notes == (
        f"ops that test_steps.py:{line} hides from all modes of torch were not recorded or "
        "compared",
    )
