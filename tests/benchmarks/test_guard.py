"""What the drift guard costs a step, on the workloads that recording is measured on."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchrepro
from torchrepro import guard
from torchrepro.console import as_text, table

from .paired import compare, require
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


def show(title: str, *rows: tuple[str, ...]) -> None:
    """Print a table of what was measured."""
    print(f"\n{as_text(title, table(('', 'measured'), rows))}")


@pytest.mark.parametrize("mode", ["warn", "error"])
@pytest.mark.parametrize("make", [convolutional, transformer], ids=lambda make: make.__name__)
def test_the_guard_costs_next_to_nothing_of_a_step(make: Callable[[], Step], mode: str) -> None:
    """A guarded step takes at most 1.005 times as long as one under the same profile unguarded."""
    torch.manual_seed(0)
    step = make()
    measured = compare(under("none", step), under(mode, step), BOUND, seconds=8, error=1e-4)

    show(
        f"{make.__name__}, guard: {mode}, {measured.plain * 1e3:.0f} ms a step",
        measured.cells("guarded / not", BOUND),
    )
    require(not measured.refutes(BOUND), f"{BOUND} times an unguarded step")


@pytest.mark.parametrize("workspace", [":4096:8", ":16:8"], ids=["as set", "equivalent"])
def test_reading_all_knobs_takes_as_long_as_a_few_ops(workspace: str) -> None:
    """A check of all knobs of debug-strict takes at most as long as 150 ops; none is slow to read.

    So it does where one of them has another value that is equivalent. An op is the addition of two
    tensors of 64 x 64, which takes a microsecond or two.
    """
    tensor = torch.ones(64, 64)
    with torchrepro.apply("debug-strict", ["guard=error"]):
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace
        knobs = [each for each, _ in guard._watched]
        seen = compare(
            lambda: _seconds(lambda: tensor + tensor),
            lambda: _seconds(lambda: guard.check(guard.guards)),
            CHECK,
            seconds=4,
        )
        slowest = max(
            (_seconds(partial(guard.reading, each.knob)), each.knob.name) for each in knobs
        )
        write = _seconds(lambda: setattr(torch.backends.cudnn, "benchmark", False))
    plain = _seconds(lambda: setattr(torch.backends.cudnn, "benchmark", False))
    show(
        f"debug-strict, {len(knobs)} knobs, a workspace of {workspace}",
        ("an op", f"{seen.plain * 1e6:.1f} us"),
        ("a check", f"{seen.other * 1e6:.1f} us"),
        seen.cells("ops that a check takes", CHECK),
        (f"slowest of them: {slowest[1]}", f"{slowest[0] * 1e6:.1f} us"),
        ("a write that is watched (guard: error)", f"{write * 1e6:.1f} us"),
        ("a write that is not", f"{plain * 1e6:.1f} us"),
    )
    require(not seen.refutes(CHECK), f"{CHECK} ops for a check of all knobs")


def _seconds(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(TIMES // 5):
            work()
        times.append((time.perf_counter() - start) / (TIMES // 5))
    return min(times)
