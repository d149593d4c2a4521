"""The example on real data keeps its promise: same profile and seed, same weights."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DIGITS = Path(__file__).parent.parent / "examples" / "digits.py"


def _train(folder: Path, *words: str) -> dict[str, str]:
    """Train in `folder` and return what the example printed, label to value."""
    hidden = ("CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED", "PYTEST_VERSION")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [sys.executable, str(DIGITS), "epochs=2", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split() for line in done.stdout.splitlines())


@pytest.mark.slow
def test_the_weights_of_the_example_depend_on_the_seed_alone(tmp_path: Path) -> None:
    """Equal under one profile, also without workers; another seed, or no profile, gives others."""
    one = _train(tmp_path, "+repro=debug-strict")
    two = _train(tmp_path, "+repro=debug-strict", "num_workers=0")
    other = _train(tmp_path, "+repro=debug-strict", "repro.seed=8")
    free = [_train(tmp_path)["weights"] for _ in range(2)]

    assert one == two
    assert one["weights"] != other["weights"]
    assert free[0] != free[1]
    assert float(one["accuracy"]) > 0.7
    assert list(tmp_path.glob("outputs/*/*/.hydra/repro.json"))
