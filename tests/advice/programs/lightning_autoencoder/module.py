import lightning as L
import torch
from torch import nn


class Autoencoder(L.LightningModule):
    def __init__(self, features: int = 12, code: int = 3) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, code), nn.ReLU())
        self.decoder = nn.Linear(code, features)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        (x,) = batch
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)
