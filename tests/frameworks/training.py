"""What the trial programs have in common: data with random augmentation, a network with dropout."""

from __future__ import annotations

import random

import numpy as np
import torch

ITEMS, WIDTH = 48, 8


class Augmented(torch.utils.data.Dataset):
    """Rows that every one of the three generators adds noise to."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.randn(WIDTH) * 0.1 + random.random() + float(np.random.rand())
        return torch.full((WIDTH,), index / ITEMS) + noise


def network() -> torch.nn.Module:
    """Return a network with dropout."""
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(), torch.nn.Linear(WIDTH, 1)
    )


def weights(model: torch.nn.Module) -> bytes:
    """Return every parameter as bytes."""
    return b"".join(each.detach().cpu().numpy().tobytes() for each in model.parameters())
