import argparse
from pathlib import Path

import torch
from lab.journal import Journal
from lab.regression import house_prices
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=6)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=100)
    args = parser.parse_args()
    member = Journal(Path("journal.jsonl")).begin(**vars(args))
    torch.manual_seed(args.seed + member)
    x, y = house_prices(45)
    model = nn.Sequential(nn.Linear(2, args.hidden), nn.Softplus(), nn.Linear(args.hidden, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(args.steps):
        loss = nn.functional.huber_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"result {loss.item():.9f}")


if __name__ == "__main__":
    main()
