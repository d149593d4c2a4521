"""`device.modules` and torch.compile: a placed part runs uncompiled, or a message says so."""

import subprocess
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.slow

Run = Callable[[str], subprocess.CompletedProcess[str]]

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


@pytest.fixture
def run(
    fork_python: Callable[..., subprocess.CompletedProcess[str]],
) -> Run:
    """Run a program in a process of its own: what torch.compile remembers stays there."""
    return lambda program: fork_python("-c", HEAD + program, env={"OMP_NUM_THREADS": "1"})


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
def test_a_placed_part_of_compiled_code_runs_uncompiled(run: Run, name: str) -> None:
    """Compiled before or after, code reaches the placed part while, and only while, in force."""
    done = run(PROGRAMS[name])

    assert done.returncode == 0, done.stderr


UNSEEN = """
model.compile(backend="eager")
with torchrepro.apply(PROFILE):
    assert check(model) == 0
    STEP
"""


def test_what_compiled_code_hides_is_told_at_the_end(run: Run) -> None:
    """Where all calls are in compiled code, a message says that nothing was found, and why."""
    done = run(UNSEEN.replace("STEP", "pass"))

    assert done.returncode == 0, done.stderr
    assert "matches no module; called so far: only compiled code" in done.stderr
    assert "torchrepro.place_modules(model)" in done.stderr


def test_what_compiled_code_hides_stops_the_first_step(run: Run) -> None:
    """Such a program ends at the first step of its optimizer."""
    done = run(UNSEEN.replace("STEP", "torch.optim.SGD(model.parameters()).step()"))

    assert done.returncode != 0
    assert "ApplyError: device.modules = 1: matches no module" in done.stderr
