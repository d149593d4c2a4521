"""The example on real data keeps its promise: same profile and seed, same weights."""

import subprocess

import pytest

from .typed_example import DIGITS, IN_FORCE_FROM_THE_START, typed

WORDS = ("+repro=debug-strict", "epochs=2")
Run = subprocess.CompletedProcess[str]


def _told(done):
    assert done.returncode == 0, done.stderr
    return dict(line.split() for line in done.stdout.splitlines())


@pytest.mark.slow
def test_the_weights_of_the_example_depend_on_the_seed_alone(tmp_path, fork_python):
    """Equal under one profile, also without workers; another seed, or no profile, gives others."""

    def train(*words):
        return _told(fork_python(DIGITS, *words, env=IN_FORCE_FROM_THE_START))

    one = _told(typed(tmp_path, *WORDS))
    two = train(*WORDS, "num_workers=0")
    other = train(*WORDS, "repro.seed=8")
    free = [train("epochs=2")["weights"] for _ in range(2)]

    assert one == two
    assert one["weights"] != other["weights"]
    assert free[0] != free[1]
    assert float(one["accuracy"]) > 0.7
    assert list(tmp_path.glob("outputs/*/*/.hydra/repro.json"))
