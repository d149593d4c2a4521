import numpy as np
import torch
from torch.utils.data import Dataset


class Sample:
    __slots__ = ("label", "pixels")

    def __init__(self, pixels: np.ndarray, label: int) -> None:
        self.pixels = pixels
        self.label = label

    def jittered(self, strength: float) -> np.ndarray:
        rng = np.random.default_rng(id(self))
        return self.pixels + strength * rng.standard_normal(self.pixels.shape)


class Images(Dataset):
    def __init__(self, count: int, side: int = 4, strength: float = 0.1) -> None:
        self.strength = strength
        grid = np.linspace(0, 1, side * side)
        self.samples = [Sample(np.roll(grid, number), number % side) for number in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        sample = self.samples[index]
        return torch.from_numpy(sample.jittered(self.strength)).float(), sample.label
