import random

import torch
from torch.utils.data import Dataset


class Flipped(Dataset):
    def __init__(self, count: int, side: int, seed: int) -> None:
        self.images = torch.rand(count, 1, side, side)
        self.seed = seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> torch.Tensor:
        rng = random.Random(self.seed * 100_003 + index)
        image = self.images[index]
        if rng.random() < 0.5:
            image = image.flip(-1)
        return image * rng.uniform(0.8, 1.2)
