"""A sweep of 15 runs of 100 MB each; prints by how many MB the process has grown."""

from __future__ import annotations

import resource
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

sys.path.append(str(Path(__file__).parent.parent / "policies"))
from known_layers import let_torchvision_be_imported

let_torchvision_be_imported()

RUNS = 15
WIDTH = 5000  # a square of float32 takes 100 MB


class Large(Dataset):
    def __init__(self):
        self.rows = torch.ones(WIDTH, WIDTH)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"x": self.rows[index, :4]}


def accelerators():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = nn.Linear(WIDTH, WIDTH)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    del accelerator, model, optimizer


def datasets():
    for _ in DataLoader(Large(), batch_size=2):
        pass


def iterators():
    iter(DataLoader(Large(), batch_size=2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.large = nn.Linear(WIDTH, WIDTH)
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return {"loss": self.layer(x).sum()}


def trainers():
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no"
        )
        Trainer(Model(), arguments, train_dataset=Large()).train()


def grown():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    run = globals()[sys.argv[1]]
    with torch.device("meta"):
        Model()
    if sys.argv[1] in ("accelerators", "trainers"):
        import accelerate  # noqa: F401 - an import is no part of a run
        import transformers.trainer  # noqa: F401
    began = grown()
    for _ in range(RUNS):
        run()
    print(grown() - began)
