"""A loop on Fabric as its users write one.

It skips the batches of an epoch that are done, or restores its loader from the state.
"""

import os

import torch
from lightning.fabric import Fabric
from training import ACCUMULATED, STEPS, loader_of, network, weights

EVERY = 5


def train(folder, workers, after_step, every=EVERY, keeps_loader=False, **loading):
    world = int(os.environ.get("WORLD_SIZE", "1"))
    fabric = Fabric(accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto")
    fabric.launch()
    loader = loader_of(shuffle=True, num_workers=workers, **loading)
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.01))
    loader = fabric.setup_dataloaders(loader)
    state = {"model": model, "optimizer": optimizer, "epoch": 0, "batches": 0, "step": 0}
    if keeps_loader:
        state["loader"] = loader
    path = folder / "last.ckpt"
    resumed_from = path if path.exists() else None
    if resumed_from:
        fabric.load(path, state)
    for epoch in range(state["epoch"], 3):
        done = state["batches"]
        for number, batch in enumerate(loader, done + 1 if keeps_loader else 1):
            if number <= done:
                continue
            stepping = number % (ACCUMULATED // world) == 0
            with fabric.no_backward_sync(model, enabled=not stepping):
                fabric.backward(model(batch).square().mean())
            if stepping:
                optimizer.step()
                optimizer.zero_grad()
                state |= {"epoch": epoch, "batches": number, "step": state["step"] + 1}
                if state["step"] % every == 0:
                    fabric.save(path, state)
                after_step(state["step"])
        state["batches"] = 0
    assert state["step"] == STEPS
    return weights(model), resumed_from
