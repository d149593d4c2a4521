"""A small model, its items, and a loop that trains it, for programs that compute the same."""

import os
from collections.abc import Callable, Sequence
from functools import wraps

import numpy as np
import torch
from torch import nn

STEPS = 4
Tensors = Sequence[torch.Tensor]


def perceptron(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 12), *(middle or [nn.Tanh()]), nn.Linear(12, 3))


def items_of(step: int, *shape: int) -> torch.Tensor:
    items = np.random.default_rng(step).standard_normal(shape or (8, 6), np.float32)
    return torch.from_numpy(items)


def trained(
    model: nn.Module,
    loss: Callable[[int], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    steps: int = STEPS,
    after_step: Callable[[int], object] = lambda _step: None,
) -> Tensors:
    """Train a model, on the squares of what it makes of its items unless another loss is given."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        found = loss(step) if loss else model(items_of(step)).square().mean()
        found.backward()
        optimizer.step()
        after_step(step)
    return [*model.parameters(), *model.buffers()]


def training(
    model: Callable[[], nn.Sequential] = perceptron,
) -> Callable[[Callable[[nn.Sequential, int], torch.Tensor]], Callable[[], Tensors]]:
    """Return the program that trains a model with this loss."""

    def program(loss: Callable[[nn.Sequential, int], torch.Tensor]) -> Callable[[], Tensors]:
        @wraps(loss)
        def run() -> Tensors:
            made = model()
            return trained(made, lambda step: loss(made, step))

        return run

    return program


def memory_that_is_dirty() -> None:
    """Free memory with random content, for the allocator to reuse."""
    for size in (6, 24, 48, 240, 512, 3000):
        held = [np.frombuffer(os.urandom(4 * size), np.float32).copy() for _ in range(20)]
        del held
