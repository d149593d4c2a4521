"""What policies cost: the policy itself, ops that it does not concern, and none in force."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import torchrepro
from torchrepro.policies.run_on_cpu import on_cpu

from .paired import NEVER, hold, show
from .workloads import training

pytestmark = pytest.mark.benchmark

ZERO = {"dropout": "zero"}
HOST = {"device": {"rng": "host"}}
CPU = {"device": {"fallback": "cpu"}, "backends": {"torch": {"deterministic_algorithms": "error"}}}
DETERMINISTIC = {"backends": {"torch": {"deterministic_algorithms": "error"}}}


def _timed(profile: dict[str, Any] | None, work: Callable[[], object], times: int) -> float:
    """Return the seconds that `work` takes under `profile`, putting it in force not counted.

    Nor are the first calls: what ran before them has taken the processor's caches.
    """
    with torchrepro.apply(profile) if profile else nullcontext():
        for _ in range(max(times // 10, 1)):
            work()
        start = time.perf_counter()
        for _ in range(times):
            work()
        return time.perf_counter() - start


def _costs_nothing(
    title: str,
    plain: dict[str, Any] | None,
    other: dict[str, Any],
    work: Callable[[], object],
    times: int,
) -> None:
    without = ("without it", lambda: _timed(plain, work, times))
    hold(title, 1.0, without, ("under it", lambda: _timed(other, work, times)), error=NEVER)


def _transformer() -> Callable[[], object]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return training(model, torch.randn(16, 32, 64), lr=1e-3)


def _perceptron() -> Callable[[], object]:
    layers = [nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.5)] * 3
    return training(nn.Sequential(*layers), torch.randn(64, 256), lr=1e-3)


@pytest.mark.parametrize("make", [_transformer, _perceptron], ids=lambda make: make.__name__[1:])
def test_a_step_without_dropout_is_no_slower_than_one_with_it(
    make: Callable[[], Callable[[], object]],
) -> None:
    """Under `dropout: zero` a training step takes at most as long as with dropout."""
    title = f"dropout: zero, a step of a {make.__name__[1:]}"

    _costs_nothing(title, {"dropout": "keep"}, ZERO, make(), 10)


def test_with_no_policy_in_force_ops_cost_what_they_did() -> None:
    """After policies have come and gone, ops run as fast as if there had never been any."""
    x = torch.ones(64, 64)

    def gone() -> float:
        with torchrepro.apply(ZERO), torchrepro.apply(HOST), torchrepro.apply(CPU):
            pass
        return _timed(None, lambda: functional.dropout(x), 2000)

    def never() -> float:
        return _timed(None, lambda: functional.dropout(x), 2000)

    hold("no policy in force, F.dropout", 1.0, ("never", never), ("gone", gone), error=NEVER)


def test_host_random_numbers_cost_nothing_on_the_cpu() -> None:
    """Without an accelerator, drawing costs what it costs without the policy."""
    x = torch.empty(64, 64)

    _costs_nothing("device.rng: host, without an accelerator", None, HOST, x.normal_, 5000)


def test_fallback_costs_other_ops_nothing() -> None:
    """An op that has a deterministic kernel runs as fast with a fallback as without."""
    x = torch.ones(64, 64)
    title = "device.fallback: cpu, an op that never needs it"

    _costs_nothing(title, DETERMINISTIC, CPU, lambda: x + x, 20_000)


def test_figures_that_the_catalogue_quotes() -> None:
    """Prints what a random op costs while it is counted, and what drawing on the host adds."""
    small, large = torch.empty(16), torch.empty(1_000_000)
    uniform = torch.ops.aten.uniform_.default
    rows = []
    for name, tensor, times in (("16 numbers", small, 20_000), ("a million", large, 50)):
        plain = _timed(None, tensor.uniform_, times) / times
        counted = _timed(ZERO, tensor.uniform_, times) / times
        start = time.perf_counter()
        for _ in range(times):
            on_cpu(uniform, (tensor,), {})
        moved = (time.perf_counter() - start) / times
        rows += [
            (f"uniform_ of {name}", f"{plain * 1e6:.1f} us"),
            ("  counted by `dropout: zero`", f"{counted * 1e6:.1f} us"),
            ("  through the host, copies not counted", f"{moved * 1e6:.1f} us"),
        ]
    show("one random op", rows)
