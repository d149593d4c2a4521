import torch
from readers import Readers
from torch import nn


class Autoencoder(nn.Module):
    def __init__(self, width: int, code: int) -> None:
        super().__init__()
        self.encode = nn.Linear(width, code)
        self.decode = nn.Linear(code, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(torch.tanh(self.encode(x)))


torch.manual_seed(6)
torch.set_num_threads(1)
model = Autoencoder(6, 3)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
for batch in Readers(documents=12, workers=3):
    loss = (model(batch) - batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"result {loss.item():.9f}")
