"""Small training programs, with hooks for planted faults."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

PROGRAMS = __file__
STEPS = 9
WORDS, WIDTH, LENGTH, LAYERS = 32, 16, 8, 4
SAMPLES = 6


def line_of(mark: str, file: str) -> str:
    """Return ``file:line`` of the one line that ends with the comment ``# <mark>``."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.endswith(f"  # {mark}"))
    return f"{file}:{number}"


@dataclass
class Training:
    """The objects of a running program that a fault can change."""

    model: Any = None
    optimizer: Any = None
    harmful: bool = False
    """Whether the fault is active; the healthy run executes the same code."""
    step: int = 0
    call: int = 0
    """How often a planted kernel has been called in this step."""
    batch: Callable[[int, Any], Any] = lambda _step, batch: batch
    """The hook for every batch."""
    before_step: Callable[[int], None] = lambda _step: None
    """The hook at the beginning of a step."""
    data: Any = None
    """The dataset, for a program that has one."""

    def begin(self, step: int) -> None:
        """Begin a step."""
        self.step, self.call = step, 0
        self.before_step(step)


Plant = Callable[[Training], AbstractContextManager[None]]
Program = Callable[[Plant, bool], None]
"""Called with the fault and whether it is active."""


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.0)
        self.scale = WIDTH**-0.5

    def forward(self, hidden):
        query, key, value = self.mixed(self.first(hidden)).chunk(3, -1)
        scores = query @ key.transpose(-1, -2) * self.scale  # scores
        hidden = hidden + self.dropout(scores.softmax(-1) @ value)  # dropout
        wide = functional.gelu(self.up(self.second(hidden)))  # gelu
        return hidden + self.down(wide)  # down


class Transformer(nn.Module):
    """Predicts the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.register_buffer("order", torch.arange(LENGTH))
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)
        self.last = [LENGTH - 2, LENGTH - 1]

    def forward(self, text):
        hidden = self.words(text)  # words
        hidden = hidden + self.places[self.order]  # order
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden[:, self.last])  # last


class ConvNet(nn.Module):
    """Classifies small pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.out = nn.Linear(8, 5)

    def forward(self, pictures):
        found = self.second(self.first(pictures))  # pictures
        return self.out(found.mean((-1, -2)))  # mean


def texts() -> Iterator[torch.Tensor]:
    """Yield batches that the program creates without a loader."""
    generator = np.random.default_rng(3)
    for _ in range(STEPS):
        yield torch.from_numpy(generator.integers(WORDS, size=(4, LENGTH)))  # by hand


def pictures() -> TensorDataset:
    """Return pictures and their classes."""
    generator = np.random.default_rng(4)
    items = generator.standard_normal((STEPS * SAMPLES, 3, 8, 8), np.float32)
    kinds = torch.from_numpy(generator.integers(5, size=len(items)))
    return TensorDataset(torch.from_numpy(items), kinds)  # items


def transformer(
    optimizer: str = "foreach", batches: Callable[[], Iterable[Any]] = texts
) -> Program:
    """Return a program that trains a transformer with AdamW, without a loader."""

    def run(plant: Plant, harmful: bool) -> None:
        torch.manual_seed(1)
        model = Transformer()
        its = torch.optim.AdamW(model.parameters(), 1e-3, **{optimizer: True})
        training = Training(model, its, harmful)
        with plant(training):
            for step, made in enumerate(batches()):
                training.begin(step)
                text = training.batch(step, made)
                result = model(text)
                loss = functional.cross_entropy(result.flatten(0, 1), text[:, :2].flatten())
                loss.backward()  # backward of text
                its.step()  # AdamW
                its.zero_grad()

    return run


def conv_net(workers: int = 0, **options: Any) -> Program:
    """Return a program that trains a network of convolutions with SGD from a loader.

    The gradients of two halves of a batch are accumulated.
    """

    def run(plant: Plant, harmful: bool) -> None:
        torch.manual_seed(2)
        model = ConvNet()
        its = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, **options)
        training = Training(model, its, harmful, data=pictures())
        with plant(training):
            loader = DataLoader(training.data, batch_size=SAMPLES, num_workers=workers)
            for step, (items, kinds) in enumerate(loader):  # loader
                training.begin(step)
                batch = training.batch(step, (items, kinds))
                for half, wanted in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
                    (functional.cross_entropy(model(half), wanted) / 2).backward()  # half
                its.step()  # SGD
                its.zero_grad()

    return run
