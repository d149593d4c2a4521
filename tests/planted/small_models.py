"""A small model, its items, and a loop that trains it, for programs that compute the same."""

from collections.abc import Callable, Sequence

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


def trained(model: nn.Module, loss: Callable[[int], torch.Tensor], steps: int = STEPS) -> Tensors:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
    return [*model.parameters(), *model.buffers()]
