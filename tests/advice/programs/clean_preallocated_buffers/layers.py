import torch
from torch import nn


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))
        self.bias = nn.Parameter(torch.empty(width))
        nn.init.orthogonal_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight)


class History:
    def __init__(self, steps: int, width: int) -> None:
        self.rows = torch.empty(steps, width)
        self.used = 0

    def add(self, row: torch.Tensor) -> torch.Tensor:
        torch.mul(row, 0.5, out=self.rows[self.used])
        self.used += 1
        return self.rows[: self.used]
