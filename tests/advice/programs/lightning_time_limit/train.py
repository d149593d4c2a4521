from datetime import timedelta

import lightning as L
import torch
from classifier import Classifier
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    L.seed_everything(15)
    x = torch.randn(64, 4)
    y = (x[:, 0] > x[:, 1]).long()
    trainer = L.Trainer(
        max_time=timedelta(seconds=3),
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True))
    print(f"steps {trainer.global_step}")
    print(f"result {trainer.callback_metrics['loss'].item():.9f}")


if __name__ == "__main__":
    main()
