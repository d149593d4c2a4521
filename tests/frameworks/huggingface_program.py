"""A program of the Hugging Face Trainer as its users write one, without torchrepro."""

import logging
import os

import torch
from training import ACCUMULATED, DATA, STEPS, Augmented, network, weights
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

EVERY = 4

logging.getLogger("transformers").setLevel(logging.ERROR)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x):
        output = self.net(x)
        return {"loss": output.square().mean(), "output": output}


class AfterStep(TrainerCallback):
    def __init__(self, after_step):
        self.after_step = after_step

    def on_step_begin(self, args, state, control, **_):
        if state.global_step:  # by now the step before is done, and saved where that was its turn
            self.after_step(state.global_step)


def collated(rows):
    return {"x": torch.stack(rows)}


def train(folder, workers, after_step, every=EVERY, data="augmented"):
    world = int(os.environ.get("WORLD_SIZE", "1"))
    resumed_from = get_last_checkpoint(folder)
    arguments = TrainingArguments(
        str(folder),
        num_train_epochs=3,
        max_steps=STEPS if data == "stream" else -1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=ACCUMULATED // world,
        learning_rate=0.01,
        save_steps=every,
        eval_strategy="steps",
        eval_steps=3,
        dataloader_num_workers=workers,
        remove_unused_columns=False,
        use_cpu=True,
        ddp_backend="gloo" if world > 1 else None,
        ddp_find_unused_parameters=False,
        report_to=[],
        disable_tqdm=True,
    )
    model = Model()
    trainer = Trainer(
        model,
        arguments,
        collated,
        DATA[data](),
        Augmented(),
        callbacks=[AfterStep(after_step)],
    )
    trainer.train(resume_from_checkpoint=resumed_from is not None)
    assert trainer.state.global_step == STEPS
    return weights(model), resumed_from
