"""What no op wrote, and what was written after the last step, is part of what is compared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

import torchrepro
from torchrepro.trace.reader import read_run

if TYPE_CHECKING:
    from collections.abc import Callable


def train(folder: Path, at_the_end: Callable[[Any, Any], object], level: str) -> None:
    """Train a model whose fresh memory nobody writes, and do something after the last step."""
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
def test_what_is_written_after_the_last_op_is_a_difference(tmp_path: Path, level: str) -> None:
    """It is named; two runs that write nothing are the same, whatever lies in fresh memory."""
    train(tmp_path / "plain", lambda *_: None, level)
    for number, (write, named) in enumerate([(lambda *_: None, ""), *WRITTEN.values()]):
        train(tmp_path / str(number), write, level)
        verdict = torchrepro.compare(tmp_path / "plain", tmp_path / str(number))

        assert verdict.same != bool(named), named
        assert verdict.first is None or named in verdict.first.what


def test_what_no_longer_lives_is_not_compared(tmp_path: Path) -> None:
    """A model that is gone as the recording ends is neither kept nor claimed."""
    with torchrepro.record(tmp_path / "run"):
        net = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        del net, optimizer

    (trace,) = read_run(tmp_path / "run")
    assert trace.meta.get("end") is None


def test_ops_that_no_mode_sees_are_said_to_be_unseen(tmp_path: Path) -> None:
    """A note names the line that takes all modes away; torch's own, as for printing, are none."""
    for run in "ab":
        with torchrepro.record(tmp_path / run):
            weight = torch.ones(3)
            str(weight)
            with _disable_current_modes():  # hides
                weight.mul_(3)
    verdict = torchrepro.compare(tmp_path / "a", tmp_path / "b")

    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (line,) = (number for number, text in enumerate(lines, 1) if text.endswith("# hides"))
    assert verdict.notes == (
        f"ops that test_end_state.py:{line} hides from all modes of torch were not recorded, nor "
        "compared",
    )
