"""A small training on one device: ``python -m torchrepro.selftest.training cuda``."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 4
BATCH = 16


def train(device: str) -> float:
    """Train a convolution, dropout and a linear layer on random images; return the last loss."""
    count = STEPS * BATCH
    images = TensorDataset(torch.randn(count, 1, 8, 8), torch.randint(4, (count,)))
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten()),
        *(nn.Dropout(0.2), nn.Linear(4 * 6 * 6, 4)),
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss = torch.zeros(())
    for image, label in DataLoader(images, batch_size=BATCH, shuffle=True):
        loss = nn.functional.cross_entropy(model(image.to(device)), label.to(device))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    train(sys.argv[1])
