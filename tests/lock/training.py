"""A small training program in a repository, whose numbers are locked and checked."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..verification.repositories import commit, git, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TRAIN = """
import sys, torch
import acme, model

torch.manual_seed(model.SEED)
net = model.Net()
optimizer = torch.optim.SGD(net.parameters(), lr=model.LR)
for step in range(3):
    batch = torch.randn(64, 1024)
    loss = net(batch) * acme.SCALE
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
MODEL = """
import torch

SEED = 3
LR = 0.1


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(1024, 8)
        self.second = torch.nn.Linear(8, 1)

    def forward(self, batch):
        hidden = self.first(batch).tanh()
        score = self.second(hidden)
        # sums of so many numbers depend on how many threads add them up
        flat = batch.flatten()
        scale = 1 + flat.sum() / 64 + flat.square().mean() + flat @ flat.roll(1) / 64
        return score.square().mean() * scale
"""
FILES = {
    "train.py": TRAIN,
    "model.py": MODEL,
    "plain.yaml": "name: plain\nseed: 1\n",
    ".gitignore": "*.log\n",
}
COMMAND = (sys.executable, "train.py")


@dataclass
class Training:
    """The program, and the commands about its lock."""

    folder: Path
    run: Callable[..., tuple[Any, str, str]]

    def commit(self, files: dict[str, str] | None = None, message: str = "work") -> str:
        """Commit files, and all that is there."""
        return commit(self.folder, files or {}, message)

    def write(self, files: dict[str, str]) -> None:
        """Write files and leave them uncommitted."""
        write(self.folder, files)

    def change(self, name: str, before: str, after: str) -> None:
        """Replace a text in a file, in which it has to be."""
        file = self.folder / name
        text = file.read_text()
        assert before in text
        # Python takes compiled code of the same second and size for that of the file.
        while int(file.stat().st_mtime) == int(time.time()):
            time.sleep(0.05)
        file.write_text(text.replace(before, after))

    def git(self, *words: str) -> str:
        """Run git in the folder."""
        return git(self.folder, *words)

    def lock(self, *options: object, command: tuple[str, ...] = COMMAND) -> tuple[Any, str, str]:
        """Write the lock."""
        return self.run("lock", "plain.yaml", "-o", "repro.lock", *options, "--", *command)

    def check(
        self, *options: object, command: tuple[str, ...] = COMMAND, lock: str = "repro.lock"
    ) -> tuple[Any, dict[str, Any]]:
        """Check the lock; returns the status and what it says of the numbers."""
        status, out, err = self.run("check", lock, *options, "--json", "--", *command)
        assert not err, err
        return status, json.loads(out)["numbers"]

    @property
    def contents(self) -> dict[str, Any]:
        """What the lock holds."""
        return json.loads((self.folder / "repro.lock").read_text())
