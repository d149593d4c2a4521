"""A program that saves its state within an epoch, and omits the state that its options name."""

from __future__ import annotations

PROGRAM = """
import os, random, sys
import numpy as np
import numpy.random
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

forgotten = sys.argv[1]
torch.manual_seed(0); random.seed(0); np.random.seed(0)
data, noise = (TensorDataset(torch.randn(8, 4)) for _ in range(2))
order, jitter = torch.Generator().manual_seed(1), np.random.default_rng(2)
sampler = DistributedSampler(data, num_replicas=1, rank=0)
ordered = DataLoader(data, batch_size=2, sampler=sampler)
shuffled = DataLoader(noise, batch_size=2, shuffle=True, generator=order)
model = torch.nn.Sequential(
    torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
start = step = 0
saved = None


def save():
    torch.save({
        "step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(), "scaler": scaler.state_dict(), "order": order_state,
        "python": random.getstate(), "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(), "jitter": jitter.bit_generator.state,
    }, "state.pt")


if os.path.exists("state.pt"):
    saved = torch.load("state.pt", weights_only=False)
    start = saved["step"]
    kept = saved["model"]
    if forgotten == "parameter":
        kept = {name: its for name, its in kept.items() if name != "3.weight"}
    if forgotten == "buffer":
        kept = {name: its for name, its in kept.items() if name != "1.running_mean"}
    model.load_state_dict(kept, strict=False)
    if forgotten != "optimizer":
        optimizer.load_state_dict(saved["optimizer"])
    if forgotten != "scheduler":
        scheduler.load_state_dict(saved["scheduler"])
    if forgotten != "scaler":
        scaler.load_state_dict(saved["scaler"])
    if forgotten != "order":
        order.set_state(saved["order"])
begun = start // 4 * 4 if forgotten == "place" else start
for epoch in range(start // 4, 3):
    sampler.set_epoch(0 if saved and forgotten == "epoch" else epoch)
    order_state = order.get_state()
    for position, ((batch,), (more,)) in enumerate(zip(ordered, shuffled)):
        if epoch * 4 + position < begun:
            continue
        if saved:
            if forgotten != "python":
                random.setstate(saved["python"])
            if forgotten != "numpy":
                np.random.set_state(saved["numpy"])
            if forgotten != "torch":
                torch.set_rng_state(saved["torch"])
            if forgotten != "jitter":
                jitter.bit_generator.state = saved["jitter"]
            if forgotten == "rate":
                optimizer.param_groups[0]["weight_decay"] = 0.1
            saved = None
        batch = batch + more + 0.1 * (random.random() + np.random.rand() + jitter.random())
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        step = epoch * 4 + position + 1
        if step in {saves}:
            save()
"""
"""Epochs have 4 steps, and there are 3 of them. It saves after the steps `saves`."""

FORGOTTEN = {
    "parameter": ("parameter", "3.weight"),
    "buffer": ("buffer", "1.running_mean"),
    "optimizer": ("optimizer", "momentum_buffer lr"),
    "rate": ("optimizer", "weight_decay"),
    "scheduler": ("scheduler", "StepLR"),
    "scaler": ("scaler", "GradScaler"),
    "python": ("generator", "python"),
    "numpy": ("generator", "numpy"),
    "torch": ("generator", "torch"),
    "order": ("generator", "order"),
    "jitter": ("generator", "jitter"),
    "place": ("loader", "train.py"),
    "epoch": ("sampler", "DistributedSampler"),
}
"""State that the program omits, by name -> the kind and the beginning of the name in the answer."""
