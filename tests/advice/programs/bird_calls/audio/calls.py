from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset


class Calls(Dataset):
    def __init__(self, folder: Path, classes: int) -> None:
        self.files = list(folder.glob("*.npy"))
        self.classes = classes

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        file = self.files[index]
        return torch.from_numpy(np.load(file)).log1p(), int(file.stem[-2:]) % self.classes
