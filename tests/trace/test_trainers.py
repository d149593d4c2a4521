"""Programs that use trainers of other libraries are recorded unchanged."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import torchrepro
from torchrepro.trace.reader import read_run

if TYPE_CHECKING:
    from collections.abc import Callable
    from subprocess import CompletedProcess

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
LAYERS = HERE.parent / "policies"  # known_layers.py lets torchvision be imported anywhere
IMPORTS = f"""
import sys
sys.path.insert(0, {str(LAYERS)!r})
import torch
from known_layers import let_torchvision_be_imported
let_torchvision_be_imported()
"""
LIGHTNING = f"""{IMPORTS}
import lightning

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()
    def validation_step(self, batch, index):
        self.log("mean", self.net(batch[0]).mean())
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

data = torch.utils.data.TensorDataset(torch.randn(32, 8))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
trainer = lightning.Trainer(max_epochs=2, logger=False, enable_checkpointing=False,
                            accelerator="cpu", enable_progress_bar=False)
trainer.fit(Model(), loader, loader)
"""
HUGGING_FACE = f"""{IMPORTS}
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        ids = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(index))
        return {{"input_ids": ids, "labels": torch.tensor(index % 2)}}

model = BertForSequenceClassification(BertConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
    vocab_size=50, max_position_embeddings=32))
Trainer(model=model, train_dataset=Data(), args=TrainingArguments(
    "out", max_steps=4, per_device_train_batch_size=4, gradient_accumulation_steps=2,
    report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True)).train()
"""
PROGRAMS = {
    # name: program, its steps, a module that it has
    "lightning": (LIGHTNING, 8, "net.0"),
    "hugging face": (HUGGING_FACE, 4, "bert.encoder.layer.0.attention.self.query"),
}


@pytest.fixture
def recorded(
    fork_python: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> Callable[[str, str], Path]:
    """Record a program with `torchrepro run` in a folder of this name."""

    def recorded(program: str, name: str) -> Path:
        (tmp_path / "program.py").write_text(program, encoding="utf-8")
        run = ("-m", "torchrepro", "run", "seed-only", "--record", name, "--", sys.executable)
        done = fork_python(*run, "program.py")
        assert done.returncode == 0, done.stderr[-2000:]
        return tmp_path / name

    return recorded


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_trainer_is_recorded_unchanged(name: str, recorded) -> None:
    """Two runs of a trainer are recorded step by step, with the model's names, and are equal."""
    program, steps, module = PROGRAMS[name]
    one, two = (recorded(program, run) for run in ("one", "two"))

    verdict = torchrepro.compare(one, two)
    assert verdict.same, verdict.first
    (trace,) = read_run(one)
    assert sum(step.finished for step in trace.steps.values()) == steps
    assert len(trace.losses) >= steps
    sites = trace.sites.values()
    assert {"forward", "backward"} <= {site.phase for site in sites if site.module == module}
    trace.close()
