import numpy as np
import torch
from layers import History, Scale
from torch import nn

torch.manual_seed(10)
rng = np.random.default_rng(10)
table = np.empty((40, 6), dtype=np.float32)
for row in table:
    row[:] = rng.normal(size=6)
x = torch.from_numpy(table)
model = nn.Sequential(Scale(6), nn.ReLU(), Scale(6))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = History(5, 6)
for batch in x.split(8):
    target = history.add(batch.mean(0)).sum(0)
    loss = (model(batch) - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"result {loss.item():.9f}")
