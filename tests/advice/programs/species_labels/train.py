from pathlib import Path

import observations
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
table = Path("observations.csv")
observations.write(table)
x, y, classes = observations.read(table)
model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, classes))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(2):
    for inputs, labels in DataLoader(TensorDataset(x, y), batch_size=12, shuffle=True):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print(f"result {loss.item():.9f}")
