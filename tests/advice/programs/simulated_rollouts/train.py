import argparse
import random
from multiprocessing import get_context

import numpy as np
import torch
from simulation import rollout
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=40)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    starts = np.linspace(-1, 1, args.rollouts)
    with get_context("fork").Pool(args.processes) as pool:
        paths = torch.from_numpy(np.stack(pool.map(rollout, starts, chunksize=1))).float()
    model = nn.GRU(2, 6, batch_first=True)
    head = nn.Linear(6, 2)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=1e-2)
    for _ in range(4):
        states, _ = model(paths[:, :-1])
        loss = (head(states) - paths[:, 1:]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"result {loss.item():.9f}")


if __name__ == "__main__":
    main()
