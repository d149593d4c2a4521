import torch
from torch import nn

from net.waves import Waves


class Regressor(nn.Module):
    def __init__(self, inputs: int, waves: int) -> None:
        super().__init__()
        self.waves = Waves(inputs, waves)
        self.head = nn.Linear(waves, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.waves(x)).squeeze(1)
