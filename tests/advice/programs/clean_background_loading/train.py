import random

import numpy as np
import torch
from loading import ahead
from torch import nn

random.seed(13)
np.random.seed(13)
torch.manual_seed(13)
model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for batch in ahead(8, depth=3):
    loss = (model(batch).squeeze(1) - batch.amax(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"result {loss.item():.9f}")
