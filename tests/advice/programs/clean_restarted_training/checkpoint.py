from pathlib import Path

import torch
from torch import nn


class Checkpoint:
    def __init__(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.path = path
        self.model = model
        self.optimizer = optimizer
        path.unlink(missing_ok=True)

    def save(self, step: int) -> None:
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**states, "step": step}, self.path)

    def load(self) -> int:
        if not self.path.exists():
            return 0
        state = torch.load(self.path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return state["step"]
