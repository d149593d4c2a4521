import numpy as np
import torch
from proteins import LETTERS


def encode(sequence: str) -> np.ndarray:
    return np.array([LETTERS.index(letter) + 1 for letter in sequence], dtype=np.uint8)


def pad(sequences: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = [len(sequence) for sequence in sequences]
    batch = np.empty((len(sequences), max(lengths)), dtype=np.uint8)
    for row, sequence in zip(batch, sequences, strict=True):
        row[: len(sequence)] = encode(sequence)
    return torch.from_numpy(batch).float() / len(LETTERS), torch.tensor(lengths)
