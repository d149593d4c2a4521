from pathlib import Path

import torch
from checkpoints import Keeper
from torch import nn


class Trainer:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.LSTM(3, 5, batch_first=True)
        self.head = nn.Linear(5, 1)
        parameters = [*self.model.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.RMSprop(parameters, lr=1e-2)
        self.keeper = Keeper(Path("model.pt"), seconds=0.03)

    def step(self) -> float:
        x = torch.randn(8, 6, 3)
        states, _ = self.model(x)
        loss = (self.head(states[:, -1]).squeeze(1) - x.sum((1, 2))).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.keeper.maybe_save(self.model)
        return loss.item()


if __name__ == "__main__":
    trainer = Trainer(5)
    for _ in range(20):
        loss = trainer.step()
    print(f"copies {trainer.keeper.copies}")
    print(f"result {loss:.9f}")
