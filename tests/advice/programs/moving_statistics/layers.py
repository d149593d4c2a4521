import torch
from torch import nn


class MovingNorm(nn.Module):
    """Normalises by a mean and a variance that follow the batches."""

    def __init__(self, features: int, momentum: float = 0.1) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("variance", torch.empty(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), self.momentum)
            self.variance.lerp_(x.var(0), self.momentum)
        return (x - self.mean) * torch.rsqrt(self.variance.abs().clamp(1e-3, 1e3) + 1e-5)
