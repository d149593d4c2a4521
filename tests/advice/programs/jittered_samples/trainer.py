import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Trainer:
    def __init__(self, model: nn.Module, data: Dataset, lr: float = 0.05) -> None:
        self.model = model
        self.loader = DataLoader(data, batch_size=8, shuffle=True)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def epoch(self) -> float:
        for pixels, labels in self.loader:
            loss = nn.functional.cross_entropy(self.model(pixels), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return loss.item()
