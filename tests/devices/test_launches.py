"""The work of a recording for an accelerator: launches per step, and copies to the host."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_npu import log
from simulated_npu.child import load
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import torchrepro
from torchrepro.ground.console import as_text, table

pytestmark = pytest.mark.benchmark

OnNpu = Callable[..., Any]

EACH = 18
"""Launches for each op: a dozen mix and add up the words of a tensor; some ops write several."""

AT_END = 4
"""Copies as a step ends: fingerprints of ops in one, then of parameters, the loss, generators."""


def small_cnn() -> Callable[[], None]:
    """Two convolutions with normalisation, and SGD with momentum."""
    net = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    batch, targets = torch.randn(8, 3, 32, 32), torch.arange(8)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(batch), targets).backward()
        optimizer.step()

    return step


def third_step(name: str, folder: str, level: str = "op") -> tuple[int, int, int, int]:
    """Return the ops, launches and copies of the third step, recorded if there is a folder.

    Copies to the host are counted during the step, and at its end.
    """
    torch.manual_seed(0)
    makers = {
        "small_cnn": small_cnn,
        "tiny_ops": load(
            "workloads", Path(__file__).parents[1] / "benchmarks/workloads.py"
        ).tiny_ops,
    }
    with torch.device("npu"):
        step = makers[name]()
    within = 0

    def ends(*_: Any) -> None:  # runs before the hook of a recording, which ends the step
        nonlocal within
        within = log.to_host

    handle = register_optimizer_step_post_hook(ends)
    try:
        with torchrepro.record(folder, level=level) if folder else nullcontext():
            for _ in range(3):
                log.clear()
                step()
            return len(log), log.launches, within, log.to_host - within
    finally:
        handle.remove()


@pytest.mark.parametrize("name", ["tiny_ops", "small_cnn"])
def test_a_recorded_step_adds_a_bounded_count_of_launches(
    on_npu: OnNpu, tmp_path: Path, name: str
) -> None:
    """A recording adds at most 18 launches per op, and copies only at the end of a step."""
    plain_ops, plain_launches, *plain_copies = on_npu(third_step, name, "")
    _, launches, within, at_end = on_npu(third_step, name, str(tmp_path / "run"))
    rows = [
        ("ops of a plain step, views included", f"{plain_ops}"),
        ("launches of a plain step", f"{plain_launches}"),
        ("launches of a recorded step", f"{launches}"),
        (f"added for each op (at most {EACH})", f"{(launches - plain_launches) / plain_ops:.1f}"),
        ("copies to the host, before and at the end", f"{within}, {at_end}"),
    ]
    print(f"\n{as_text(f'{name} on a simulated accelerator', table(('', 'count'), rows))}")

    assert plain_copies == [0, 0]
    assert within == 0
    assert at_end <= AT_END
    assert launches - plain_launches <= EACH * plain_ops


AT_LEVEL_STEP = 40
"""Launches of a step at level step: a batch of gradients and one of parameters, and the loss."""


@pytest.mark.parametrize("name", ["tiny_ops", "small_cnn"])
def test_a_step_of_parameters_alone_adds_few_launches(
    on_npu: OnNpu, tmp_path: Path, name: str
) -> None:
    """At level step, all gradients share a batch, and all parameters: the count is bounded."""
    _, plain_launches, *_ = on_npu(third_step, name, "")
    _, launches, within, at_end = on_npu(third_step, name, str(tmp_path / "run"), "step")

    added = launches - plain_launches
    print(f"\n{name} at level step: {added} launches added to {plain_launches}, {at_end} copies")

    assert within == 0
    assert at_end <= AT_END
    assert added <= AT_LEVEL_STEP
