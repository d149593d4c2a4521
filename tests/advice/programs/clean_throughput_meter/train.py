import argparse

import torch
from meters import Throughput
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    meter = Throughput()
    for _ in range(args.steps):
        x = torch.randn(args.batch_size, 8)
        loss = nn.functional.cross_entropy(model(x), x[:, 0].gt(0).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meter.update()
    print(f"{meter.compute(args.batch_size):.1f} samples per second")
    print(f"result {loss.item():.9f}")


if __name__ == "__main__":
    main()
