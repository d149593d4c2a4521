"""What the drift guard costs a step, on the workloads that recording is measured on."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchrepro
from torchrepro.application import guard

from .paired import Comparison, hold
from .workloads import Step, convolutional, transformer

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.benchmark

BOUND = 1.005
CHECK = 150
"""How many additions of two small tensors may pass while all knobs of a profile are read."""

TIMES = 2000


def under(mode: str, step: Step) -> Callable[[], float]:
    """Return a function that takes the time of a step under a profile with this guard."""

    def run() -> float:
        with torchrepro.apply("debug-strict", [f"guard={mode}"]):
            step()  # what a first step sets up is not what a step costs
            start = time.perf_counter()
            step()
            return time.perf_counter() - start

    return run


@pytest.mark.parametrize("mode", ["warn", "error"])
@pytest.mark.parametrize("make", [convolutional, transformer], ids=lambda make: make.__name__)
def test_the_guard_costs_next_to_nothing_of_a_step(make: Callable[[], Step], mode: str) -> None:
    """A guarded step takes at most 1.005 times as long as one under the same profile unguarded."""
    torch.manual_seed(0)
    step = make()
    title, plain = f"{make.__name__}, guard: {mode}", ("an unguarded step", under("none", step))

    hold(title, BOUND, plain, ("a guarded one", under(mode, step)), seconds=8, error=1e-4)


@pytest.mark.parametrize("workspace", [":4096:8", ":16:8"], ids=["as set", "equivalent"])
def test_reading_all_knobs_takes_as_long_as_a_few_ops(workspace: str) -> None:
    """A check of all knobs of debug-strict takes at most as long as 150 ops; none is slow to read.

    So it does where one of them has another value that is equivalent. An op is the addition of two
    tensors of 64 x 64, which takes a microsecond or two.
    """
    tensor = torch.ones(64, 64)

    def write() -> float:
        return _seconds(lambda: setattr(torch.backends.cudnn, "benchmark", False))

    unwatched = write()
    with torchrepro.apply("debug-strict", ["guard=error"]):
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace
        knobs = [each.knob for each, _ in guard._watched]

        def more(_: Comparison) -> list[tuple[str, str]]:
            slowest = max((_seconds(partial(guard.reading, knob)), knob.name) for knob in knobs)
            return [
                (f"slowest of them: {slowest[1]}", f"{slowest[0] * 1e6:.1f} us"),
                ("a write that is watched (guard: error)", f"{write() * 1e6:.1f} us"),
                ("a write that is not", f"{unwatched * 1e6:.1f} us"),
            ]

        hold(
            f"debug-strict, {len(knobs)} knobs, a workspace of {workspace}",
            CHECK,
            ("an op", lambda: _seconds(lambda: tensor + tensor)),
            ("a check", lambda: _seconds(lambda: guard.check(guard.guards))),
            more,
            seconds=4,
        )


def _seconds(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(TIMES // 5):
            work()
        times.append((time.perf_counter() - start) / (TIMES // 5))
    return min(times)
