import torch
from torch import nn


class Denoiser(nn.Module):
    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(features + 1, hidden), nn.SiLU(), nn.Linear(hidden, features)
        )

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.body(torch.cat([x, t[:, None]], dim=1))
