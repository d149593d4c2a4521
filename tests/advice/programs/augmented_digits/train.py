import argparse

import torch
from torch import nn
from vision.digits import batch
from vision.seeding import seed_all


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    seed_all(args.seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(25, 16), nn.Dropout(0.1), nn.Linear(16, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(args.steps):
        images, labels = batch(20)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"result {loss.item():.9f}")


if __name__ == "__main__":
    main()
