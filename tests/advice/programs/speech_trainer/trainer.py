from pathlib import Path

import torch
from torch import nn


class Trainer:
    def __init__(self, model: nn.Module, folder: Path, lr: float = 0.05) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.last = folder / "last.pt"
        self.step = 0
        if self.last.exists():
            state = torch.load(self.last)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]

    def save(self) -> None:
        self.last.parent.mkdir(parents=True, exist_ok=True)
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
            },
            self.last,
        )

    def fit(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        for x, y in batches:
            loss = nn.functional.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1
        self.save()
        return loss.item()
