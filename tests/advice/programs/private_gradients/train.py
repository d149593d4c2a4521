import argparse
import random

import numpy as np
import torch
from privacy import PrivateOptimizer
from torch import nn


def network(depth: int, width: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(5, width)]
    for _ in range(depth):
        layers += [nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, width)]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--seed", type=int, default=13)
    args = parser.parse_args()
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    model = network(args.depth, 8)
    optimizer = PrivateOptimizer(model, set(model[0].parameters()), lr=0.1, std=args.noise)
    x = torch.randn(32, 5)
    y = x[:, :1] * 2
    for _ in range(4):
        loss = (model(x) - y).square().mean()
        optimizer.step(loss)
    print(f"result {loss.item():.9f}")


if __name__ == "__main__":
    main()
