import argparse
import random

import numpy as np
import torch
from extraction import extract
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clips", type=int, default=24)
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    features = torch.from_numpy(extract(args.clips, args.workers))
    features = (features - features.mean(0)) / (features.std(0) + 1e-6)
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for batch in features.split(6):
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"result {loss.item():.9f}")


if __name__ == "__main__":
    main()
