"""The work of a recording for an accelerator: launches per step, and copies to the host."""

import time
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
from torchrepro.trace.device_fingerprint import device_fingerprint
from torchrepro.trace.waiting_outputs import WaitingOutputs

pytestmark = pytest.mark.benchmark

OnNpu = Callable[..., Any]

EVERY_OP = 300
"""Launches of a step of which every op is recorded; such a step has 102 or fewer when plain."""

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
    """A recorded step has at most 300 launches, and copies only at the end of a step."""
    plain_ops, plain_launches, *plain_copies = on_npu(third_step, name, "")
    _, launches, within, at_end = on_npu(third_step, name, str(tmp_path / "run"))
    rows = [
        ("ops of a plain step, views included", f"{plain_ops}"),
        ("launches of a plain step", f"{plain_launches}"),
        (f"launches of a recorded step (at most {EVERY_OP})", f"{launches}"),
        ("copies to the host, before and at the end", f"{within}, {at_end}"),
    ]
    print(f"\n{as_text(f'{name} on a simulated accelerator', table(('', 'count'), rows))}")

    assert plain_copies == [0, 0]
    assert within == 0
    assert at_end <= AT_END
    assert launches <= EVERY_OP


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


SMALL, MANY = 16, 512
"""The numbers of a small tensor, and how many such tensors are read."""

MICROSECONDS = 6
"""The host's time for each, which is asked for; a machine may be slower."""

FASTER = 3
"""How many times as long a tensor takes that is read alone."""


def microseconds(device: str) -> tuple[float, float]:
    """Return the least time of the host for a small tensor that waits, and for one read alone."""
    tensors = [torch.ones(SMALL, device=device) for _ in range(MANY)]
    waiting = WaitingOutputs()

    def wait() -> None:
        for tensor in tensors:
            waiting.add(tensor, 0)
        waiting.launch()

    def read_alone() -> None:
        for tensor in tensors:
            device_fingerprint(tensor)

    def least(call: Callable[[], None]) -> float:
        call()
        times = []
        for _ in range(20):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return min(times) / MANY * 1e6

    return least(wait), least(read_alone)


def test_the_hosts_time_for_a_small_tensor(on_npu: OnNpu) -> None:
    """A tensor that waits for its batch takes at most a third of the time of one read alone."""
    found = {"the host's memory": microseconds("cpu"), "simulated": on_npu(microseconds, "npu")}
    rows = [
        (f"{name}, {title}", f"{one:.1f} us")
        for name, pair in found.items()
        for title, one in zip(("waiting", "alone"), pair, strict=True)
    ]
    print(f"\n{as_text('a fingerprint of 16 numbers', table(('', 'the host'), rows))}")
    print(f"{MICROSECONDS} us are asked of a tensor that waits")

    assert all(waiting * FASTER <= alone for waiting, alone in found.values())
