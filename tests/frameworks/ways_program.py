"""Ways to train and resume that are exact in plain Python, one row per way.

The author of the program seeds and saves everything himself, without torchrepro.
"""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils import data
from training import weights

ITEMS, WIDTH, BATCH, EPOCHS, EVERY = 24, 4, 4, 3, 4
STEPS = ITEMS // BATCH * EPOCHS
SEED = 11


def _seeded(library, seed):
    if library == "python":
        random.seed(seed)
    elif library == "numpy":
        np.random.seed(seed)
    else:
        torch.manual_seed(seed)


def row(index, noise=0.0):
    return torch.linspace(0.1, 1, WIDTH) * (index + 1) / ITEMS + noise


class Plain(data.Dataset):
    """Draws nothing."""

    def __len__(self):
        return ITEMS

    def __getitem__(self, index):
        return row(index)


class TorchNoise(Plain):
    def __getitem__(self, index):
        return row(index) + torch.randn(WIDTH) * 0.1


class HostNoise(Plain):
    def __getitem__(self, index):
        return row(index, random.random() + float(np.random.rand()))


class AllNoise(Plain):
    def __getitem__(self, index):
        return row(index, random.random() + float(np.random.rand())) + torch.randn(WIDTH) * 0.1


class OwnNoise(Plain):
    """Draws each sample's noise from a new generator."""

    def __getitem__(self, index):
        return row(index, random.Random(index).random())


class Batched(TorchNoise):
    """Reads whole batches."""

    def __getitems__(self, indices):
        noise = torch.randn(len(indices), WIDTH)
        return [row(index) + noise[number] for number, index in enumerate(indices)]


class Stream(data.IterableDataset):
    def __iter__(self):
        info = data.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for index in range(first, ITEMS, step):
            yield self.item(index)

    def item(self, index):
        return row(index)


class NoisyStream(Stream):
    def item(self, index):
        return row(index) + torch.randn(WIDTH) * 0.1


class DrawingSampler(data.Sampler):
    """Draws its order from numpy at the beginning of an epoch."""

    def __init__(self, rng=None):
        self.rng = rng or np.random

    def __len__(self):
        return ITEMS

    def __iter__(self):
        return iter(self.rng.permutation(ITEMS).tolist())


class Skipping(data.Sampler):
    """Begins at a given position, so that no batch has to be loaded again."""

    def __init__(self):
        self.start, self.epoch = 0, 0

    def __len__(self):
        return ITEMS - self.start

    def __iter__(self):
        order = torch.randperm(ITEMS, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        start, self.start = self.start, 0
        return iter(order[start:])


def drawing_collate(rows):
    return torch.stack(rows) + torch.randn(())


def author_init(worker):
    np.random.seed(torch.initial_seed() % 2**32 + worker)


@dataclass(frozen=True)
class Way:
    """How a custom loop loads, draws, saves and resumes."""

    dataset: Callable[[], Any] = TorchNoise
    options: dict[str, Any] = field(default_factory=lambda: {"shuffle": True})
    sampler: Callable[[], Any] | None = None
    generator: int | None = None  # the seed of a generator that the loader is given
    at_start: bool = True  # the generators are saved as they were when the epoch began
    at_step: bool = True  # they are saved as they are after the step
    host: bool = False  # those of `random` and numpy are saved as well
    dropout: float = 0.5
    stateful: bool = False
    whole_epochs: bool = False  # a checkpoint is written at the end of an epoch only
    seeds_once: bool = False  # a run that goes on puts the generators back instead of seeding them
    only: int | None = None  # the one number of workers with which it is exact in plain Python


def _rng(host):
    states = {"torch": torch.get_rng_state()}
    if host:
        states |= {"python": random.getstate(), "numpy": np.random.get_state()}
    return states


def _put(states):
    torch.set_rng_state(states["torch"])
    if "python" in states:
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])


def _loader(way, workers):
    dataset, options = way.dataset(), dict(way.options)
    if way.sampler is not None:
        options = {"sampler": way.sampler(), **options}
        options.pop("shuffle", None)
    if isinstance(dataset, data.IterableDataset):
        options.pop("shuffle", None)
    if not workers:
        options.pop("persistent_workers", None)
        options.pop("multiprocessing_context", None)
    if way.generator is not None:
        options["generator"] = torch.Generator().manual_seed(way.generator)
    kind = data.DataLoader
    if way.stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader

        kind = StatefulDataLoader
    if "batch_sampler" in options:
        options["batch_sampler"] = options["batch_sampler"]()
    else:
        options["batch_size"] = BATCH
    return kind(dataset, num_workers=workers, **options)


def _own(loader):
    parts = (loader, loader.sampler)
    found = [getattr(part, "generator", None) or getattr(part, "rng", None) for part in parts]
    return [each for each in found if isinstance(each, torch.Generator | np.random.Generator)]


def _read_own(loader):
    return [
        g.get_state() if isinstance(g, torch.Generator) else g.bit_generator.state
        for g in _own(loader)
    ]


def _put_own(loader, states):
    for own, state in zip(_own(loader), states, strict=True):
        if isinstance(own, torch.Generator):
            own.set_state(state)
        else:
            own.bit_generator.state = state


def train(folder, workers, after_step, way="both", other_seed=None):
    """Train by one of `WAYS`; resume from `folder` if the run was interrupted.

    `other_seed` is the library that gets another seed.
    """
    way = WAYS[way]
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    path = folder / f"own-{rank}.pt"
    if not (way.seeds_once and path.exists()):
        for library in ("python", "numpy", "torch"):
            _seeded(library, SEED + (library == other_seed))
    if world > 1:
        torch.distributed.init_process_group("gloo")
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(way.dropout), torch.nn.Linear(WIDTH, 1)
    )
    net = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = _loader(way, workers)

    def save(epoch, done, start, own):
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "epoch": epoch,
            "done": done,
            "step": step,
            "start": start,
            "own": own,
            "now": _rng(way.host),
            "loader": loader.state_dict() if way.stateful else None,
        }
        torch.save(state, path)

    saved = None
    if path.exists():
        saved = torch.load(path, weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    resumed_from = None if saved is None else saved["step"]
    step = resumed_from or 0
    for epoch in range(0 if saved is None else saved["epoch"], EPOCHS):
        going_on, saved = saved, None  # for the epoch that was interrupted alone
        done = 0 if going_on is None else going_on["done"]
        if isinstance(loader.sampler, data.DistributedSampler):
            loader.sampler.set_epoch(epoch)
        if isinstance(loader.sampler, Skipping):
            loader.sampler.epoch, loader.sampler.start = epoch, done * BATCH
        if going_on is not None and way.at_start:
            _put(going_on["start"])
        if going_on is not None and way.stateful:
            loader.load_state_dict(going_on["loader"])
        elif going_on is not None:
            _put_own(loader, going_on["own"])
        start, own = _rng(way.host), _read_own(loader)
        batches = iter(loader)
        if not (way.stateful or isinstance(loader.sampler, Skipping)):
            for _ in range(done):
                next(batches)
        if going_on is not None and way.at_step and not way.whole_epochs:
            _put(going_on["now"])
        for number, batch in enumerate(batches, done):
            net(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % EVERY == 0 and not way.whole_epochs:
                save(epoch, number + 1, start, own)
                if world > 1:
                    torch.distributed.barrier()
            after_step(step)
        if way.whole_epochs:
            save(epoch + 1, 0, _rng(way.host), _read_own(loader))
    return weights(model), resumed_from


def _split():
    own = torch.Generator().manual_seed(5)
    return data.random_split(TorchNoise(), [ITEMS - 4, 4], generator=own)[0]


def _weighted():
    return data.WeightedRandomSampler([1.0 + n % 3 for n in range(ITEMS)], ITEMS)


def _distributed():
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    return data.DistributedSampler(Plain(), world, rank, seed=7)


def _own_generator_sampler():
    return data.RandomSampler(Plain(), generator=torch.Generator().manual_seed(9))


def _own_numpy_sampler():
    return DrawingSampler(np.random.default_rng(4))


def _batches():
    return data.BatchSampler(data.RandomSampler(Plain()), BATCH, drop_last=True)


WAYS = {
    "both": Way(),
    "both, random and numpy": Way(AllNoise, host=True),
    "both, collate draws": Way(options={"shuffle": True, "collate_fn": drawing_collate}),
    "both, whole batches": Way(Batched),
    "both, seeded once": Way(AllNoise, host=True, seeds_once=True),
    "epochs, seeded once": Way(AllNoise, host=True, whole_epochs=True, seeds_once=True),
    "both, in order": Way(options={}),
    "both, host noise in workers": Way(HostNoise, host=True),
    "both, batch sampler": Way(options={"batch_sampler": _batches}),
    "both, weighted": Way(sampler=_weighted),
    "both, replacement": Way(
        sampler=lambda: data.RandomSampler(Plain(), replacement=True, num_samples=ITEMS)
    ),
    "both, subset": Way(sampler=lambda: data.SubsetRandomSampler(range(4, ITEMS))),
    "both, split": Way(_split),
    "both, distributed sampler": Way(sampler=_distributed),
    "both, numpy's order": Way(sampler=DrawingSampler, host=True),
    "both, own generator": Way(generator=3),
    "both, sampler's generator": Way(sampler=_own_generator_sampler),
    "both, sampler's numpy": Way(sampler=_own_numpy_sampler),
    "both, worker_init_fn": Way(
        HostNoise, options={"shuffle": True, "worker_init_fn": author_init}, host=True
    ),
    "step, persistent workers": Way(
        OwnNoise,
        options={"persistent_workers": True},
        sampler=_distributed,
        at_start=False,
    ),
    "both, drop_last": Way(options={"shuffle": True, "drop_last": True}),
    "both, prefetch": Way(OwnNoise, options={"shuffle": True}, generator=8),
    "start": Way(at_step=False, dropout=0.0),
    "start, random and numpy": Way(AllNoise, at_step=False, dropout=0.0, host=True),
    "step, distributed sampler": Way(Plain, sampler=_distributed, at_start=False),
    "step, in order": Way(OwnNoise, options={}, at_start=False),
    "step, skipping sampler": Way(OwnNoise, sampler=Skipping, at_start=False),
    "step, stream": Way(Stream, at_start=False),
    "both, stream": Way(Stream),
    "both, noisy stream in workers": Way(NoisyStream, only=2),
    "epochs": Way(whole_epochs=True),
    "epochs, random and numpy": Way(AllNoise, whole_epochs=True, host=True),
    "epochs, own generator": Way(generator=3, whole_epochs=True),
    "epochs, noisy stream": Way(NoisyStream, whole_epochs=True),
    "stateful": Way(OwnNoise, stateful=True, at_start=False),
    "stateful, both, noise": Way(stateful=True, only=0),
}
"""Name -> way. Each is exact with 0 and with 2 workers, unless it says with how many."""
