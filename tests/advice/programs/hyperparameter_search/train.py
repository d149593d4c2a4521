import argparse

import torch
from search import random_search
from torch import nn


def fit(lr: float, steps: int) -> float:
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        x = torch.randn(16, 3)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=10)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    lr, tries = random_search(lambda lr: fit(lr, 2), args.seconds, args.seed)
    print(f"lr {lr:.4f} after {tries} tries")
    print(f"result {fit(lr, 6):.9f}")


if __name__ == "__main__":
    main()
