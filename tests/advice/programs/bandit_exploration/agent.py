import os

import numpy as np
import torch
from torch import nn


class Agent:
    def __init__(self, arms: int, epsilon: float = 0.3) -> None:
        self.values = nn.Linear(3, arms)
        self.optimizer = torch.optim.RMSprop(self.values.parameters(), lr=1e-2)
        self.epsilon = epsilon
        self.arms = arms
        self.rng = np.random.RandomState(int.from_bytes(os.urandom(4), "little"))

    def act(self, context: torch.Tensor) -> int:
        if self.rng.rand() < self.epsilon:
            return int(self.rng.randint(self.arms))
        return int(self.values(context).argmax())

    def learn(self, context: torch.Tensor, arm: int, reward: float) -> float:
        loss = (self.values(context)[arm] - reward) ** 2
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()
