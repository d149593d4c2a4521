import random

import numpy as np
import torch
from layers import MovingNorm
from torch import nn


def batches(count: int, size: int, features: int):
    for _ in range(count):
        x = torch.randn(size, features)
        yield x, x.pow(2).sum(1)


def main() -> None:
    random.seed(12)
    np.random.seed(12)
    torch.manual_seed(12)
    model = nn.Sequential(
        nn.Linear(6, 32), MovingNorm(32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for x, y in batches(6, 16, 6):
        loss = nn.functional.l1_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"result {loss.item():.9f}")


if __name__ == "__main__":
    main()
