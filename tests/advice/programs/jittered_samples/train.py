import random

import numpy as np
import torch
from samples import Images
from torch import nn
from trainer import Trainer

if __name__ == "__main__":
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    trainer = Trainer(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), Images(32))
    for _ in range(2):
        loss = trainer.epoch()
    print(f"result {loss:.9f}")
