import lightning as L
from data import Text
from model import Predictor


def main() -> None:
    L.seed_everything(50)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Predictor(), datamodule=Text())
    print(f"result {trainer.callback_metrics['loss'].item():.9f}")


if __name__ == "__main__":
    main()
