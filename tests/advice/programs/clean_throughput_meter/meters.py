import time

import torch


class Throughput:
    def __init__(self) -> None:
        self.last = time.perf_counter()
        self.seconds: list[torch.Tensor] = []

    def update(self) -> None:
        now = time.perf_counter()
        self.seconds.append(torch.tensor(now - self.last))
        self.last = now

    def compute(self, batch_size: int) -> float:
        return (batch_size / torch.stack(self.seconds).mean()).item()
