"""Reproducible programs that read data, entropy, clocks or sets."""

import os
import random
import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from .small_models import STEPS, Tensors, items_of, perceptron, trained

ITEMS = 16


def _fitted(batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Tensors:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for items, wanted in batches:
        functional.mse_loss(model(items), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def _pairs() -> TensorDataset:
    return TensorDataset(items_of(0, ITEMS, 6), items_of(1, ITEMS, 3))


class Augmented(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Draws from every global generator, each of which has a seed in a worker."""

    def __init__(self) -> None:
        self.pairs = _pairs()

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        item, wanted = self.pairs[index]
        noise = torch.from_numpy(np.random.normal(size=6).astype(np.float32))
        return item * random.uniform(0.9, 1.1) + noise + torch.randn(6), wanted


class Sharded(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Yields every n-th item in each of n workers."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        worker, pairs = get_worker_info(), _pairs()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return (pairs[index] for index in range(first, ITEMS, step))


class Described(Dataset[dict[str, Any]]):
    """Yields nested samples with text."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = items_of(index, 6)
        return {"name": f"item {index}", "views": {"plain": item, "turned": [item.flip(0), "x"]}}


def _seeded(_worker: int) -> None:
    np.random.seed(torch.initial_seed() % 2**32)
    random.seed(torch.initial_seed())


def augmented_in_workers() -> Tensors:
    torch.manual_seed(8)
    return _fitted(DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=2))


def augmented_in_the_main_process() -> Tensors:
    torch.manual_seed(8)
    _seeded(0)
    return _fitted(DataLoader(Augmented(), batch_size=4, shuffle=True))


def workers_with_seeds_of_their_own() -> Tensors:
    torch.manual_seed(8)
    loader = DataLoader(Augmented(), batch_size=8, num_workers=2, worker_init_fn=_seeded)
    return _fitted(loader)


def sharded_by_workers() -> Tensors:
    torch.manual_seed(8)
    return _fitted(DataLoader(Sharded(), batch_size=4, num_workers=2))


def workers_that_stay() -> Tensors:
    generator = torch.Generator().manual_seed(4)
    settings = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3}
    loader = DataLoader(Augmented(), batch_size=8, shuffle=True, generator=generator, **settings)
    return _fitted(batch for _epoch in range(2) for batch in loader)


def sampled_by_weights() -> Tensors:
    draw = partial(WeightedRandomSampler, range(1, ITEMS + 1), ITEMS)
    sampler = draw(generator=torch.Generator().manual_seed(6))
    return _fitted(DataLoader(_pairs(), batch_size=4, sampler=sampler))


def nested_batches() -> Tensors:
    def pairs() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for batch in DataLoader(Described(), batch_size=4):
            turned, _words = batch["views"]["turned"]
            lengths = torch.tensor([[float(len(name))] for name in batch["name"]])
            yield batch["views"]["plain"] + turned, lengths.expand(-1, 3)

    return _fitted(pairs())


def names_of_runs() -> Tensors:
    model = perceptron()
    trained(model, lambda step: model(items_of(step)).mean())
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, f"{uuid4()}-{time.time()}-{os.getpid()}")
        torch.save(model.state_dict(), place)
        return list(torch.load(place).values())


def clocks_in_tensors_that_no_op_reads() -> Tensors:
    model, seen = perceptron(), []

    def loss(step: int) -> torch.Tensor:
        seen.append(torch.tensor([time.time(), time.monotonic()], dtype=torch.float64))
        seen.append(torch.from_numpy(np.array([time.time_ns()])))
        return model(items_of(step)).square().mean()

    return trained(model, loss)


def notes_in_groups_of_optimizers() -> Tensors:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def note(_step: int) -> None:
        optimizer.param_groups[0].update(since=time.time(), run=uuid4().hex)

    return trained(model, optimizer=optimizer, after_step=note)


def files_of_secret_names() -> Tensors:
    model = perceptron()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, secrets.token_hex(8))
        held = np.memmap(place, np.float32, "w+", shape=(STEPS, 8, 6))
        for step in range(STEPS):
            held[step] = items_of(step).numpy()
        return trained(model, lambda step: model(torch.from_numpy(held[step])).mean())


def files_of_listdir() -> Tensors:
    model = perceptron()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in random.SystemRandom().sample(range(STEPS), STEPS):
            np.save(folder / f"{number}.npy", items_of(number).numpy())
        files = [folder / each for each in sorted(os.listdir(folder))]  # noqa: PTH208 - on purpose
        return trained(model, lambda step: model(torch.from_numpy(np.load(files[step]))).mean())
