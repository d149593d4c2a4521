import time

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Timer(L.Callback):
    def on_train_start(self, *_: object) -> None:
        self.began = time.time()

    def on_train_end(self, *_: object) -> None:
        print(f"trained for {time.time() - self.began:.2f} s")


class Regressor(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 10), nn.Dropout(0.1), nn.Linear(10, 1))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        (x,) = batch
        loss = (self.net(x).squeeze(1) - x.square().sum(1)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main() -> None:
    L.seed_everything(19, workers=True)
    loader = DataLoader(TensorDataset(torch.randn(48, 5)), batch_size=8, shuffle=True)
    trainer = L.Trainer(
        max_epochs=2,
        accumulate_grad_batches=3,
        accelerator="cpu",
        callbacks=[Timer()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regressor(), loader)
    print(f"result {trainer.callback_metrics['loss'].item():.9f}")


if __name__ == "__main__":
    main()
