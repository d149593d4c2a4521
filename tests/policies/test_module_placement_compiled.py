"""`device.modules` and torch.compile: a placed part runs uncompiled, or a message says so."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

HEAD = """
import torch, torchrepro
from torch import nn
from torchrepro.policies import policy
PROFILE = {"device": {"modules": {"1": "cpu"}}}
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 2))
x = torch.randn(4, 8)
expected = model(x)

def ran():
    return sum(e.calls for e in policy.effects() if e.policy == "device.modules")

def check(compiled):
    before = ran()
    for _ in range(2):
        assert torch.allclose(compiled(x), expected)
    return ran() - before
"""


def _run(program: str) -> subprocess.CompletedProcess[str]:
    # A process of its own: what torch.compile remembers stays in the process.
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HEAD + program],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


PROGRAMS = {
    "a compiled model": """
compiled = torch.compile(model, backend="eager")
with torchrepro.apply(PROFILE):
    assert check(compiled) == 2
assert check(compiled) == 0
""",
    "a model that was compiled before": """
compiled = torch.compile(model, backend="eager")
assert check(compiled) == 0
with torchrepro.apply(PROFILE):
    assert check(compiled) == 2
assert check(compiled) == 0
""",
    "a compiled function, placed by hand": """
compiled = torch.compile(lambda x: model(x), backend="eager")
with torchrepro.apply(PROFILE):
    assert torchrepro.place_modules(model) == ("1",)
    assert check(compiled) == 2
assert check(compiled) == 0
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_placed_part_of_compiled_code_runs_uncompiled(name: str) -> None:
    """Compiled before or after, code reaches the placed part while, and only while, in force."""
    done = _run(PROGRAMS[name])

    assert done.returncode == 0, done.stderr


UNSEEN = """
model.compile(backend="eager")
with torchrepro.apply(PROFILE):
    assert check(model) == 0
    STEP
"""


def test_what_compiled_code_hides_is_told_at_the_end() -> None:
    """Where all calls are in compiled code, a message says that nothing was found, and why."""
    done = _run(UNSEEN.replace("STEP", "pass"))

    assert done.returncode == 0, done.stderr
    assert "matches no module; called so far: only compiled code" in done.stderr
    assert "torchrepro.place_modules(model)" in done.stderr


def test_what_compiled_code_hides_stops_the_first_step() -> None:
    """Such a program ends at the first step of its optimizer."""
    done = _run(UNSEEN.replace("STEP", "torch.optim.SGD(model.parameters()).step()"))

    assert done.returncode != 0
    assert "ApplyError: device.modules = 1: matches no module" in done.stderr
