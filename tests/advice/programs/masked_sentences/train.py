import random

import numpy as np
import torch
from corpus import masked
from torch import nn

WORDS = 24


class Denoiser(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.mix = nn.Conv1d(width, width, 3, padding=1)
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.mix(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        return self.head(torch.relu(hidden))


def main() -> None:
    random.seed(20)
    np.random.seed(20)
    torch.manual_seed(20)
    inputs, targets = masked(sentences=24, length=10, words=WORDS)
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(4):
        rows = slice(step * 6, step * 6 + 6)
        logits = model(inputs[rows])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets[rows].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"result {loss.item():.9f}")


if __name__ == "__main__":
    main()
