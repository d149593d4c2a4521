"""A framework's seeding of workers is replaced; a program's own is kept, with a note."""

import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import torchrepro
from torchrepro.seeding.loader_hook import WORKER_SEEDERS, worker_seeder

from .loaders import AUTO, Items, Noisy

LAYERS = Path(__file__).parents[1] / "policies"  # known_layers.py lets torchvision be imported
HEAD = f"""
import hashlib, json, random, sys, warnings
warnings.filterwarnings("ignore")
sys.path.insert(0, {str(LAYERS)!r})
import numpy as np, torch, torchrepro
from known_layers import let_torchvision_be_imported
let_torchvision_be_imported()

class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, index):
        noise = torch.randn(4) + random.random() + float(np.random.rand())
        return noise + index
"""
TAIL = """
found = []
for workers in (0, 2):
    with torchrepro.apply("seed-only") as applied:
        weights = train(workers)
        text = b"".join(each.detach().numpy().tobytes() for each in weights)
        found.append([hashlib.sha256(text).hexdigest(), list(applied.report.loading)])
print(json.dumps(found))
"""
LIGHTNING = """
import logging
import PACKAGE as lightning
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.layer(torch.nn.functional.dropout(batch)).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001)

def train(workers):
    lightning.seed_everything(7, workers=True, verbose=False)
    loader = torch.utils.data.DataLoader(
        Augmented(), batch_size=4, shuffle=True, num_workers=workers)
    model = Model()
    lightning.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False).fit(model, loader)
    return model.parameters()
"""
TIMM = """
from PIL import Image
from timm.data import create_loader

class Pictures(torch.utils.data.Dataset):
    transform = None
    def __len__(self):
        return 12
    def __getitem__(self, index):
        picture = Image.new("RGB", (12, 12), (20 * index, 7, 99))
        return self.transform(picture), float(np.random.rand())

def train(workers):
    loader = create_loader(Pictures(), (3, 8, 8), 4, is_training=True, num_workers=workers,
        use_prefetcher=False, persistent_workers=False, re_prob=0.5, device=torch.device("cpu"))
    return [part for _ in range(2) for batch in loader for part in batch]
"""
PROGRAMS = {
    "lightning": (LIGHTNING.replace("PACKAGE", "lightning"), "pl_worker_init_function"),
    "pytorch_lightning": (
        LIGHTNING.replace("PACKAGE", "pytorch_lightning"),
        "pl_worker_init_function",
    ),
    "timm": (TIMM, "_worker_init"),
}
"""tests/frameworks/test_huggingface.py has the same test for transformers."""


@pytest.mark.slow
@pytest.mark.parametrize("framework", PROGRAMS)
def test_0_and_2_workers_give_the_same_weights(
    framework: str, forked_answer_of: Callable[..., Any]
) -> None:
    """With the framework's own seeding of workers; the report has one line on it."""
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    program, function = PROGRAMS[framework]

    none, two = forked_answer_of(HEAD + program + TAIL)

    assert none[0] == two[0]
    assert none[1] == []
    (line,) = two[1]
    assert "do not depend on num_workers" in line
    assert function in line


def _seeds(worker: int, **_: Any) -> None:
    torch.manual_seed(worker)


def _likeness(name: str) -> Callable[..., None]:

    def likeness(worker: int, **_: Any) -> None:
        torch.manual_seed(worker)

    likeness.__name__ = likeness.__qualname__ = name
    return likeness


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a module with a framework's name and function, and return its row."""
    row = WORKER_SEEDERS[-1]
    module = ModuleType(row.module)
    vars(module)[row.function] = _likeness(row.function)
    monkeypatch.setitem(sys.modules, row.module, module)
    return row


def _report(dataset: Any, init: Any) -> tuple[list[Any], str]:
    with torchrepro.apply(AUTO) as applied:
        loader = DataLoader(dataset, num_workers=2, worker_init_fn=init, collate_fn=list)
        epochs = [list(loader) for _ in range(2)]
        assert len(applied.report.loading) <= 1
        assert applied.report.to_json()["loading"] == list(applied.report.loading)
        return epochs, "".join(applied.report.loading)


def test_seeders_are_compared_by_identity(framework: Any) -> None:
    """The framework's function is replaced, also within `partial`; a similar function is kept.

    A note has the line that iterates the loader, once for all epochs.
    """
    own = getattr(sys.modules[framework.module], framework.function)
    plain, _ = _report(Noisy(), None)
    for init in (own, partial(own, rank=0), partial(partial(own, rank=0), num_workers=2)):
        epochs, said = _report(Noisy(), init)
        assert epochs == plain
        assert str(framework) in said
    likeness = _likeness(framework.function)
    likeness.__module__ = framework.module
    for init in (likeness, partial(likeness, rank=0), partial(own, worker_seeding=_seeds)):
        epochs, said = _report(Noisy(), init)
        assert worker_seeder(init) is None
        assert epochs != plain
        assert said.startswith(
            "random numbers in data loading depend on num_workers: the loader at "
        )
        assert f"{Path(__file__)}:" in said
        assert said.endswith(" has its own worker_init_fn")


def test_the_note_of_an_iterable_dataset_names_its_dependence_on_workers(framework: Any) -> None:
    """Its items depend on the number of workers with any seeder."""
    _, said = _report(Items(), getattr(sys.modules[framework.module], framework.function))

    assert "depend on num_workers" in said
