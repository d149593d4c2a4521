import math

import torch
from torch import nn


def spiral(points: int) -> tuple[torch.Tensor, torch.Tensor]:
    t = torch.linspace(0.5, 3 * math.pi, points)
    arm = torch.stack([t * t.cos(), t * t.sin()], 1) / 10
    return torch.cat([arm, -arm]), torch.cat([torch.zeros(points), torch.ones(points)])


x, y = spiral(40)
model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
for step in range(8):
    batch = torch.randperm(len(x))[:20]
    loss = nn.functional.binary_cross_entropy_with_logits(model(x[batch]), y[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
print(f"result {loss.item():.9f}")
