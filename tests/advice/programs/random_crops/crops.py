import time

import numpy as np
import torch
from torch.utils.data import Dataset


def seed_worker(worker: int) -> None:
    np.random.seed((time.time_ns() + worker) % 2**32)


class Crops(Dataset):
    def __init__(self, count: int, side: int, crop: int) -> None:
        self.images = torch.rand(count, side, side)
        self.crop = crop

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> torch.Tensor:
        image = self.images[index]
        top, left = np.random.randint(0, image.shape[-1] - self.crop + 1, size=2)
        return image[None, top : top + self.crop, left : left + self.crop]
