"""How much work a recording gives an accelerator: launches of a step, and copies to the host."""

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
from torchrepro.console import as_text, table

pytestmark = pytest.mark.benchmark

OnNpu = Callable[..., Any]

ALONE = {"tiny_ops": 2964, "small_cnn": 2310}
"""Launches of a recorded step when each tensor was mixed by itself, with a stream after the other.

Counted in the same way at the last commit that did so, d8d8b3f.
"""

BOUND, AIM = 1 / 2, 1 / 3


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


def third_step(name: str, folder: str) -> tuple[int, int, int, int]:
    """Return what the third step of a program does on the device, recorded if there is a folder.

    These are its ops, its launches, and its copies to the host: before it ends, and as it ends.
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
        with torchrepro.record(folder) if folder else nullcontext():
            for _ in range(3):
                log.clear()
                step()
            return len(log), log.launches, within, log.to_host - within
    finally:
        handle.remove()


@pytest.mark.parametrize("name", ALONE)
def test_a_recorded_step_has_half_of_the_launches(on_npu: OnNpu, tmp_path: Path, name: str) -> None:
    """Fingerprints of a step take at most half of the launches that each alone would take.

    Nothing is copied to the host before the step ends.
    """
    plain = on_npu(third_step, name, "")
    ops, launches, within, at_end = on_npu(third_step, name, str(tmp_path / "run"))
    added, alone = launches - plain[1], ALONE[name] - plain[1]
    rows = [
        ("launches of a plain step", f"{plain[1]}"),
        ("recorded, each tensor alone", f"{ALONE[name]}"),
        (
            f"recorded (at most {BOUND:.2f}, aim {AIM:.2f})",
            f"{launches}, {launches / ALONE[name]:.2f}",
        ),
        ("added by the recording, of what it added", f"{added} of {alone}, {added / alone:.2f}"),
        ("ops that reach the device, views included", f"{ops}, plain {plain[0]}"),
        ("copies to the host, before and at the end", f"{within}, {at_end}"),
    ]
    print(f"\n{as_text(f'{name} on a simulated accelerator', table(('', 'count'), rows))}")

    assert (plain[2], within) == (0, 0)
    assert launches <= BOUND * ALONE[name]
