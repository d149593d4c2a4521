import lightning as L
import torch
from module import Autoencoder
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    waves = torch.linspace(0, 20, 12 * 40).sin().reshape(40, 12)
    loader = DataLoader(TensorDataset(waves), batch_size=10, shuffle=True)
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Autoencoder(), loader)
    print(f"result {trainer.callback_metrics['loss'].item():.9f}")


if __name__ == "__main__":
    main()
