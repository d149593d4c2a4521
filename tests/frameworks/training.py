"""Shared parts of the training programs: data with random augmentation, a network with dropout."""

import random
from pathlib import Path

import numpy as np
import torch

ITEMS, WIDTH = 48, 8
STEPS = 18  # of every program
ACCUMULATED = 2
"""Batches for a step; two processes take half as many, and then one is a step."""

HERE = Path(__file__).parent
START = f"""
import sys
sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent / "policies")!r}]
import torch
from known_layers import let_torchvision_be_imported
let_torchvision_be_imported()
"""
"""How the text of a program begins that imports a framework, with or without torchvision."""


class Augmented(torch.utils.data.Dataset):
    """Rows with noise from each of the three generators."""

    def __len__(self):
        return ITEMS

    def __getitem__(self, index):
        noise = torch.randn(WIDTH) * 0.1 + random.random() + float(np.random.rand())
        return torch.full((WIDTH,), index / ITEMS) + noise


class Odd(Augmented):
    """Fewer rows, with an odd number of batches."""

    def __len__(self):
        return ITEMS - 4


class Stream(torch.utils.data.IterableDataset):
    """The rows in order, divided among workers; `torch` adds noise to each."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for index in range(first, ITEMS, step):
            yield torch.full((WIDTH,), index / ITEMS) + torch.randn(WIDTH) * 0.1


class Counted(Stream):
    """A stream with a length."""

    def __len__(self):
        return ITEMS


DATA = {"augmented": Augmented, "odd": Odd, "stream": Stream, "counted": Counted}


def loader_of(data="augmented", generator=None, kind="torch", **options):
    """Return a loader over one of `DATA`, with its own generator of this seed.

    It is a loader of torch or of torchdata.
    """
    dataset, loader = DATA[data](), torch.utils.data.DataLoader
    if kind == "torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader = StatefulDataLoader
    if isinstance(dataset, torch.utils.data.IterableDataset):
        options.pop("shuffle", None)
    if generator is not None:
        options["generator"] = torch.Generator().manual_seed(generator)
    return loader(dataset, batch_size=4, **options)


def network():
    """Return a network with dropout."""
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(), torch.nn.Linear(WIDTH, 1)
    )


def weights(model):
    """Return every parameter as bytes."""
    return b"".join(each.detach().cpu().numpy().tobytes() for each in model.parameters())
