"""A loop on accelerate as its users write one, without torchrepro."""

import os
import re

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from training import ACCUMULATED, STEPS, loader_of, network, weights

EVERY = 4
EPOCHS = 3


def train(
    folder,
    workers,
    after_step,
    every=EVERY,
    generator=None,
    skips_for_all=False,
    data="augmented",
    **loading,
):
    world = int(os.environ.get("WORLD_SIZE", "1"))
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATED // world,
        dataloader_config=DataLoaderConfiguration(**loading),
    )
    loader = loader_of(data, generator=generator, shuffle=True, num_workers=workers)
    validation = loader_of(num_workers=workers)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, validation, loader = accelerator.prepare(model, optimizer, validation, loader)
    step, last = 0, _last(folder)
    if last is not None:
        accelerator.load_state(last)
        step = int(last.name.removeprefix("step_"))
    # Where the last batch of an epoch is done, its validation is still to come.
    first, done = divmod(max(step * ACCUMULATED // world - 1, 0), len(loader))
    done += bool(step)
    for epoch in range(first, EPOCHS):
        skipped = done * world if skips_for_all else done
        batches = accelerator.skip_first_batches(loader, skipped) if epoch == first else loader
        if loading.get("use_stateful_dataloader"):
            batches = loader  # which goes on by itself
        elif epoch == first and done == len(loader) and loading.get("dispatch_batches"):
            batches = ()  # of which accelerate cannot skip all
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                if step % every == 0:
                    accelerator.save_state(folder / f"step_{step}")
                    accelerator.wait_for_everyone()
                after_step(step)
        model.eval()
        with torch.no_grad():
            for batch in validation:
                accelerator.gather(model(batch).mean())
        model.train()
    assert step == STEPS, step
    return weights(model), last


def _last(folder):
    saved = [path for path in folder.iterdir() if re.fullmatch(r"step_\d+", path.name)]
    return max(saved, key=lambda path: int(path.name.removeprefix("step_")), default=None)
