"""A program of Lightning as its users write one, without torchrepro."""

import logging
import os
import warnings

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from training import ACCUMULATED, STEPS, loader_of, network, weights

EVERY = 5

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()

    def training_step(self, batch, index):
        return self.net(batch).square().mean()

    def validation_step(self, batch, index):
        self.log("mean", self.net(batch).mean() + torch.rand(()))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class AfterStep(lightning.Callback):
    def __init__(self, after_step):
        self.after_step = after_step

    def on_train_batch_end(self, trainer, *_):
        self.after_step(trainer.global_step)


def train(folder, workers, after_step, every=EVERY, validates=True, **loading):
    loader = loader_of(shuffle=True, num_workers=workers, **loading)
    validation = loader_of(num_workers=workers) if validates else None
    world = int(os.environ.get("WORLD_SIZE", "1"))
    model, last = Model(), folder / "last.ckpt"
    resumed_from = last if last.exists() else None
    saving = ModelCheckpoint(folder, every_n_train_steps=every, save_last=True)
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=ACCUMULATED // world,
        callbacks=[saving, AfterStep(after_step)],
    )
    trainer.fit(model, loader, validation, ckpt_path=resumed_from)
    assert trainer.global_step == STEPS
    return weights(model), resumed_from
