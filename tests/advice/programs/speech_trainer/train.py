import random
from pathlib import Path

import numpy as np
import torch
from torch import nn
from trainer import Trainer


def frames(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(count, 8, 13)
    y = x.mean(2).gt(0).long()
    return list(zip(x, y, strict=True))


if __name__ == "__main__":
    random.seed(77)
    np.random.seed(77)
    torch.manual_seed(77)
    trainer = Trainer(nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 2)), Path("runs"))
    loss = trainer.fit(frames(6))
    print(f"step {trainer.step}")
    print(f"result {loss:.9f}")
