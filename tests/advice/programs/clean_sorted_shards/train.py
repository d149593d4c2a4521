import torch
from shards import read_all
from torch import nn

torch.manual_seed(18)
model = nn.Sequential(nn.Linear(4, 8), nn.ELU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for rows in read_all(10):
    x = torch.from_numpy(rows)
    loss = (model(x).squeeze(1) - x.prod(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"result {loss.item():.9f}")
