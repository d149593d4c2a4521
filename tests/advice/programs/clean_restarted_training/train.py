import argparse
from pathlib import Path

import torch
from checkpoint import Checkpoint
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--path", type=Path, default=Path("last.pt"))
    args = parser.parse_args()
    torch.manual_seed(20)
    x = torch.randn(args.steps, 10, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    checkpoint = Checkpoint(args.path, model, optimizer)
    for _ in range(2):
        for step in range(checkpoint.load(), args.steps):
            loss = (model(x[step]).squeeze(1) - x[step].amin(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == args.steps // 2:
                checkpoint.save(step + 1)
    print(f"result {loss.item():.9f}")


if __name__ == "__main__":
    main()
