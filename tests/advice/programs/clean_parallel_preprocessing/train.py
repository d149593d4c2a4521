from multiprocessing import get_context

import numpy as np
import torch
from features import describe
from torch import nn


def main() -> None:
    torch.manual_seed(7)
    with get_context("fork").Pool(3) as pool:
        described = pool.map(describe, [f"document {number}" for number in range(24)], chunksize=2)
    print(f"{len({process for process, _ in described})} processes")
    x = torch.from_numpy(np.stack([features for _, features in described]))
    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 6))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for batch in x.split(8):
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"result {loss.item():.9f}")


if __name__ == "__main__":
    main()
