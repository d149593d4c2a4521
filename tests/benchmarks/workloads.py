"""The training steps that recording is measured on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Step = Callable[[], Any]


class Residual(nn.Module):
    """Two convolutions around a shortcut, as in a ResNet-18."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            projection = nn.Conv2d(before, after, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def convolutional() -> Step:
    """A ResNet-18-like network, batch 32x3x64x64, SGD with momentum."""
    layers: list[nn.Module] = [
        *(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)),
        *(nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
    ]
    channels = 64
    for after, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)):
        layers.append(Residual(channels, after, stride))
        channels = after
    layers += [Residual(512, 512, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    net = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    batch, targets = torch.randn(32, 3, 64, 64), torch.randint(0, 10, (32,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(batch), targets).backward()
        optimizer.step()

    return step


class Attention(nn.Module):
    """A pre-norm transformer layer around the fused attention of torch."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.queries(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def transformer() -> Step:
    """Four layers, d=256, sequence 128, batch 16, AdamW."""
    net = nn.Sequential(
        nn.Embedding(1000, 256), *(Attention(256, 8) for _ in range(4)), nn.Linear(256, 1000)
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    tokens = torch.randint(0, 1000, (16, 128))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    return step


def tiny_ops() -> Step:
    """A perceptron of eight layers, d=64: under 200 ops that take microseconds."""
    net = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())))
    return training(net, torch.randn(16, 64), lr=0.01, momentum=0.9)


def training(net: nn.Module, batch: torch.Tensor, **options: float) -> Step:
    """Return a step of SGD that makes the output of `net` small."""
    optimizer = torch.optim.SGD(net.parameters(), **options)

    def step() -> None:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()

    return step
