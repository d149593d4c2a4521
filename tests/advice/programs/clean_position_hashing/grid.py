import torch
from torch import nn


class HashGrid(nn.Module):
    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(size, width)
        self.size = size

    def forward(self, points: list[tuple[int, int]]) -> torch.Tensor:
        rows = [hash(point) % self.size for point in points]
        return self.table(torch.tensor(rows))


def occupied(count: int) -> list[tuple[int, int]]:
    return list({(number * 7 % 11, number * 5 % 13) for number in range(count)})
