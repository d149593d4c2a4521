import lightning as L
import torch
from torch import nn


class Predictor(L.LightningModule):
    def __init__(self, words: int = 20, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.head = nn.Linear(4 * width, words)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        context, target = batch
        logits = self.head(self.embed(context).flatten(1))
        loss = nn.functional.cross_entropy(logits, target)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)
