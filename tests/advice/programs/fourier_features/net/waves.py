import math

import torch
from torch import nn


class Waves(nn.Module):
    """Cosines of learned directions, as features."""

    def __init__(self, inputs: int, waves: int) -> None:
        super().__init__()
        self.directions = nn.Parameter(torch.empty(waves, inputs))
        self.phases = nn.Parameter(torch.empty(waves))
        self.scale = math.sqrt(2 / waves)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.directions)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * torch.cos(nn.functional.linear(x, self.directions, self.phases))
