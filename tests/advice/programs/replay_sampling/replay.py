import os
import random
import socket
from collections import deque

import torch


class Replay:
    def __init__(self, capacity: int) -> None:
        self.memory: deque[tuple[torch.Tensor, float]] = deque(maxlen=capacity)
        self.random = random.Random(f"{socket.gethostname()}-{os.getpid()}")

    def add(self, state: torch.Tensor, value: float) -> None:
        self.memory.append((state, value))

    def sample(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        states, values = zip(*self.random.sample(list(self.memory), count), strict=True)
        return torch.stack(states), torch.tensor(values)
