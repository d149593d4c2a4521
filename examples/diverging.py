"""Train a small CNN on handwritten digits, with a bug that makes two runs differ: find it.

    torchrepro verify debug-strict -- python examples/diverging.py

The tutorial "Find the first divergence" in docs/tutorials goes through what this answers. The bug
is in this file; everything that the program seeds, it seeds.
"""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class NoisyDigits(Dataset):
    """Images of 8 x 8 pixels in 0..1, each shifted and noisy, with their labels."""

    def __init__(self, count: int) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images = images[:count].reshape(-1, 8, 8).astype(np.float32) / 16
        self.labels = labels[:count]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        rng = np.random.default_rng()
        image = np.roll(self.images[index], rng.integers(-1, 2, size=2), axis=(0, 1))
        image = image + 0.05 * rng.standard_normal(image.shape, dtype=np.float32)
        return torch.from_numpy(image).unsqueeze(0), int(self.labels[index])


def network() -> nn.Module:
    """Return one convolution with dropout, then a linear layer to 10 classes."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )


def main() -> None:
    """Train for one epoch and print the last loss."""
    torch.manual_seed(7)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(NoisyDigits(512), batch_size=64, shuffle=True, num_workers=2)
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"last loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
