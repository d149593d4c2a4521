"""What every program here does with the values that a library gave it."""

import hashlib

import numpy as np
import torch


def train_on(values: object) -> None:
    """Take three steps of SGD on some numbers and print a digest of the parameters."""
    numbers = np.nan_to_num(np.asarray(values, dtype=np.float64)).ravel()[:4096]
    data = torch.tensor(numbers / (1.0 + np.abs(numbers).max()), dtype=torch.float64)
    model = torch.nn.Linear(len(data), 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(data).square().sum().backward()
        optimizer.step()
    parameters = torch.cat([each.detach().ravel() for each in model.parameters()])
    print(hashlib.sha256(parameters.numpy().tobytes()).hexdigest())
