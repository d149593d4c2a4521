import threading

import torch
from torch import nn


class Replica(threading.Thread):
    def __init__(self, number: int, steps: int) -> None:
        super().__init__(name=f"replica-{number}")
        self.generator = torch.Generator().manual_seed(number)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.normal_(0, 0.3, generator=self.generator)
        self.steps = steps

    def run(self) -> None:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05)
        for _ in range(self.steps):
            x = torch.randn(16, 4, generator=self.generator)
            loss = (self.net(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
