"""The example on real data keeps its promise: same profile and seed, same weights."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

DIGITS = Path(__file__).parent.parent / "examples" / "digits.py"
WORDS = ("+repro=debug-strict", "epochs=2")
IN_FORCE_FROM_THE_START = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONHASHSEED": "0"}
"""What the profile would start the run anew for."""

Run = subprocess.CompletedProcess[str]


def _told(done: Run) -> dict[str, str]:
    """Return what the example printed, label to value."""
    assert done.returncode == 0, done.stderr
    return dict(line.split() for line in done.stdout.splitlines())


def _typed(folder: Path) -> Run:
    """Train as a user who types the command in `folder`."""
    hidden = ("CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED", "PYTEST_VERSION")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.run(
        [sys.executable, str(DIGITS), *WORDS],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.slow
def test_the_weights_of_the_example_depend_on_the_seed_alone(
    tmp_path: Path, fork_python: Callable[..., Run]
) -> None:
    """Equal under one profile, also without workers; another seed, or no profile, gives others."""

    def train(*words: str) -> dict[str, str]:
        return _told(fork_python(DIGITS, *words, env=IN_FORCE_FROM_THE_START))

    one = _told(_typed(tmp_path))
    two = train(*WORDS, "num_workers=0")
    other = train(*WORDS, "repro.seed=8")
    free = [train("epochs=2")["weights"] for _ in range(2)]

    assert one == two
    assert one["weights"] != other["weights"]
    assert free[0] != free[1]
    assert float(one["accuracy"]) > 0.7
    assert list(tmp_path.glob("outputs/*/*/.hydra/repro.json"))
