"""Scripts started on two ranks, which meet on the loopback interface."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
]
_FOREIGN = ("TORCHREPRO_", "PYTEST_", "CUBLAS_WORKSPACE_CONFIG", "RANK", "WORLD_SIZE", "SLURM_")


@dataclass(frozen=True)
class Ended:
    """How a command ended and what it said."""

    status: int
    out: str
    err: str

    @property
    def went_on(self) -> int:
        """How many ranks came to the end of their script."""
        return self.out.count("went on")


def _environment() -> dict[str, str]:
    """Return the environment of a command, without what this process was started under."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return {**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def _script(folder: Path, script: Path | str) -> Path:
    if isinstance(script, Path):
        return script
    path = folder / "script.py"
    path.write_text(script, encoding="utf-8")
    return path


@pytest.fixture
def on_two_ranks(tmp_path):
    """Run a script, or the text of one, on two ranks."""

    def run(script, *words, before=()):
        ended = subprocess.run(
            [*before, *TORCHRUN, str(_script(tmp_path, script)), *words],
            cwd=tmp_path,
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    return run


@pytest.fixture
def distributed_digits():
    """Return the path of the example that trains on several processes."""
    return EXAMPLES / "digits_distributed.py"
