from pathlib import Path

import torch
from logbook import Logbook
from torch import nn

torch.manual_seed(1)
logbook = Logbook(Path("runs"))
model = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(6):
    x = torch.randn(16, 5)
    loss = (model(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    logbook.log(step, loss.item(), len(x))
print(f"result {loss.item():.9f}")
