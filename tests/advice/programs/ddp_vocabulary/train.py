import random

import numpy as np
import torch
import torch.distributed as dist
from text import NextWord
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


class Trainer:
    def __init__(self, lr: float, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.data = NextWord()
        words = len(self.data.index)
        net = nn.Sequential(nn.Embedding(words, 8), nn.Linear(8, words))
        self.model = DistributedDataParallel(net)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=lr)
        sampler = DistributedSampler(self.data, shuffle=False)
        self.loader = DataLoader(self.data, batch_size=6, sampler=sampler)

    def fit(self) -> float:
        for first, second in self.loader:
            loss = nn.functional.cross_entropy(self.model(first), second)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return loss.item()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loss = Trainer(lr=0.5, seed=9).fit()
    if dist.get_rank() == 0:
        print(f"result {loss:.9f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
