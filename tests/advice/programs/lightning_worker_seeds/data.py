import os
import random

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset


class Sentences(Dataset):
    def __init__(self, count: int, length: int, words: int) -> None:
        self.tokens = torch.arange(count * length).reshape(count, length) * 7 % words

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.tokens[index]
        start = random.randrange(len(tokens) - 4)
        return tokens[start : start + 4], tokens[start + 4]


def seed_process(_: int) -> None:
    random.seed(os.getpid())


class Text(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        data = Sentences(32, 10, 20)
        return DataLoader(data, batch_size=8, num_workers=1, worker_init_fn=seed_process)
