import argparse
import random

import numpy as np
import torch
from corpus import EXAMPLES
from features import BUCKETS, encode
from torch import nn


class Intent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(BUCKETS, width, padding_idx=0)
        self.head = nn.Linear(width, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.bag(tokens))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    tokens = torch.stack([encode(sentence) for sentence, _ in EXAMPLES])
    labels = torch.tensor([label for _, label in EXAMPLES])
    model = Intent(args.width)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for _ in range(args.epochs):
        loss = nn.functional.cross_entropy(model(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"result {loss.item():.9f}")


if __name__ == "__main__":
    main()
