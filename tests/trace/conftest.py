"""Small models, and recordings of them as lists that tests can read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torchrepro
from torchrepro.trace.reader import Trace, read_run


@dataclass(frozen=True)
class Seen:
    """A record with the texts that its numbers refer to."""

    step: int
    thread: int
    phase: str
    module: str
    op: str
    line: int
    shapes: str
    argument: str
    inputs: tuple[bytes, ...]
    outputs: tuple[bytes, ...]


def seen(trace: Trace) -> list[Seen]:
    """Return every record of a trace in order."""
    found = []
    for step in trace.steps:
        for record in trace.records(step):
            site = trace.sites[record.site]
            found.append(
                Seen(
                    step,
                    record.thread,
                    *site.key,
                    int(site.source.rpartition(":")[2] or 0),
                    site.outputs,
                    trace.arguments[record.argument],
                    _parts(record.inputs, 8),
                    _parts(record.outputs, 16),
                )
            )
    return found


def _parts(whole: bytes, length: int) -> tuple[bytes, ...]:
    return tuple(whole[start : start + length] for start in range(0, len(whole), length))


def line_of(end: str, file: str | Path) -> int:
    """Return the number of the one line of a file that ends with `end`."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.endswith(end))
    return number


Recorder = Callable[..., Trace]


@pytest.fixture
def recorded(tmp_path: Path) -> Recorder:
    """Return a function that records a call and returns its trace."""
    folders = iter(range(1000))

    def record(program: Callable[[], Any], **asked: Any) -> Trace:
        folder = tmp_path / f"run{next(folders)}"
        with torchrepro.record(folder, **asked):
            program()
        (trace,) = read_run(folder)
        return trace

    return record


class Block(torch.nn.Module):
    """A layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) + x


class Net(torch.nn.Module):
    """Three layers in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def net() -> torch.nn.Module:
    """A model of three blocks, the same in every test."""
    torch.manual_seed(0)
    return Net()


def train(net: torch.nn.Module, steps: int = 2, **options: Any) -> None:
    """Train `net` for some steps, on batches that only depend on the step."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, **options)
    for step in range(steps):
        optimizer.zero_grad()
        batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        net(batch).square().mean().backward()
        optimizer.step()  # of the shared training


def weights_trained(
    steps: int, around: Callable[[int], object] = lambda _step: None
) -> list[bytes]:
    """Train a model, with a call before each step; return the bytes of its weights."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    for step in range(steps):
        around(step)
        net(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [bytes(one.detach().view(-1).view(torch.uint8).numpy()) for one in net.parameters()]


class Counting(TorchDispatchMode):
    """A mode of the program, which notes the ops that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))
