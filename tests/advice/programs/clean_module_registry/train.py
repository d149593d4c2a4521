import random

import torch
from registry import LAYERS
from torch import nn


def main() -> None:
    random.seed(16)
    torch.manual_seed(16)
    model = nn.Sequential(*(make(6) for _, make in LAYERS.items()), nn.Linear(6, 1))
    groups = {name: [] for name in ("decay", "plain")}
    for name, parameter in model.named_parameters():
        groups["plain" if name.endswith("bias") else "decay"].append(parameter)
    settings = {"decay": 0.1, "plain": 0.0}
    optimizer = torch.optim.AdamW(
        [{"params": group, "weight_decay": settings[name]} for name, group in groups.items()],
        lr=1e-2,
    )
    order = list(range(32))
    random.shuffle(order)
    x = torch.randn(32, 6)[order]
    for batch in x.split(8):
        loss = (model(batch).squeeze(1) - batch.sum(1)).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"result {loss.item():.9f}")


if __name__ == "__main__":
    main()
