import torch

BUCKETS = 64


def encode(sentence: str, length: int = 6) -> torch.Tensor:
    words = sentence.lower().split()[:length]
    indices = [1 + hash(word) % (BUCKETS - 1) for word in words]
    return torch.tensor(indices + [0] * (length - len(indices)))
