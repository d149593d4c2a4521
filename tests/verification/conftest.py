"""Small real programs, and a profile that sets little, so that they start quickly."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from torchrepro.verification import runner
from torchrepro.verification.verifier import verify

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrepro.verification.result import Verification

PLAIN = """
schema: 1
name: plain
guarantee: repeatable
seed: 1
"""
TRAINING = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    batch = torch.randn(16, 4)
    {}
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
_OURS = ("TORCHREPRO_", "PYTHONHASHSEED", "MALLOC_", "TZ")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a separate folder, without variables that affect the result."""
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    for name in os.environ:
        if name.startswith(_OURS):
            monkeypatch.delenv(name)


@pytest.fixture
def own_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put recordings and copies without an explicit folder into the folder of the test."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))


@pytest.fixture
def forked(fork: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the programs that are verified in forks: each is recorded, none imports torch again."""

    def run(
        program: str,
        command: list[str],
        environment: dict[str, str],
        log: Path,
        limit: float | None,
        look: Callable[[], object] = lambda: None,
    ) -> int:
        assert command[0] == sys.executable
        log.write_bytes(b"")
        return fork(command[1:], environment, Path.cwd(), (os.devnull, log, log))

    monkeypatch.setattr(runner, "run_to_end", run)


@pytest.fixture
def plain() -> str:
    """The path of a profile that seeds, and asks for the same bits."""
    Path("plain.yaml").write_text(PLAIN, encoding="utf-8")
    return "./plain.yaml"


@pytest.fixture
def training() -> Callable[[str], list[str]]:
    """Write a training program with one extra line in each step; return its command."""

    def write(line: str = "pass", before: str = "") -> list[str]:
        Path("train.py").write_text(f"{before}\n{TRAINING.format(line)}", encoding="utf-8")
        return [sys.executable, "train.py"]

    return write


@pytest.fixture
def verified(plain: str, tmp_path: Path) -> Callable[..., Verification]:
    """Verify a command under the plain profile, into a folder of this test."""

    def verified(command: list[str], **options: Any) -> Verification:
        return verify(plain, command, **{"folder": tmp_path / "out", **options})

    return verified
