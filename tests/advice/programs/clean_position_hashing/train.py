import argparse

import torch
from grid import HashGrid, occupied
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--points", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(15)
    points = occupied(args.points)
    heights = torch.tensor([(x - 5) * (y - 6) / 30 for x, y in points])
    model = nn.Sequential(HashGrid(args.size, 4), nn.Linear(4, 1), nn.Flatten(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for _ in range(5):
        loss = (model(points) - heights).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"result {loss.item():.9f}")


if __name__ == "__main__":
    main()
