import torch
from torch.utils.data import DataLoader, TensorDataset


def reviews(count: int = 48, length: int = 12, words: int = 50) -> DataLoader:
    tokens = torch.randint(0, words, (count, length))
    labels = (tokens.float().mean(1) > words / 2).float()
    return DataLoader(TensorDataset(tokens, labels), batch_size=16, shuffle=True)
