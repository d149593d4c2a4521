import torch
from torch import nn


class PrivateOptimizer:
    """Clips the gradient and adds Gaussian noise to it before each step."""

    def __init__(self, model: nn.Module, frozen: set[nn.Parameter], lr: float, std: float) -> None:
        self.trainable = set(model.parameters()) - frozen
        self.inner = torch.optim.SGD(list(self.trainable), lr=lr)
        self.std = std

    def step(self, loss: torch.Tensor) -> None:
        self.inner.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(list(self.trainable), 1.0)
        for parameter in self.trainable:
            parameter.grad += self.std * torch.randn_like(parameter)
        self.inner.step()
