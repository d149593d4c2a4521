"""Runs that computed the same are found to be the same, and recording them changes no bit."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import torchrepro

from .reproducible import PROGRAMS
from .reproducible_tensors import memory_that_is_dirty
from .small_models import STEPS, Tensors

RUNS = 3
PAIRS = RUNS - 1


def _bits(tensors: Tensors) -> list[bytes]:
    return [
        bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()) for tensor in tensors
    ]


def _verified(program: Callable[[], Tensors], folder: Path) -> None:
    """Run a program unrecorded and recorded; all has to be equal, and said to be."""
    memory_that_is_dirty()
    plain = _bits(program())
    for run in range(RUNS):
        memory_that_is_dirty()
        with torchrepro.record(folder / str(run)):
            recorded = program()
        assert _bits(recorded) == plain
    for run in range(1, RUNS):
        verdict = torchrepro.compare(folder / "0", folder / str(run))

        assert verdict.same, verdict.first
        assert verdict.compared.ops > 0


def test_at_least_fifty_runs_are_verified() -> None:
    """The table is as long as what is promised of it."""
    assert len(PROGRAMS) * PAIRS >= 50


@pytest.mark.filterwarnings("ignore")  # what old or new APIs a program uses is not the point
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_reproducible_program_is_found_to_be_one(name: str, tmp_path: Path) -> None:
    """Two runs of it are the same, and the bits are those of a run that is not recorded."""
    _verified(PROGRAMS[name], tmp_path)


def _compiled() -> Tensors:
    torch.compiler.reset()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    compiled = torch.compile(model)
    for _ in range(STEPS):
        compiled(torch.ones(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # compilers warn of much
def test_compiled_code_stays_compiled_and_is_found_to_be_the_same(tmp_path: Path) -> None:
    """A compiled model computes the same bits recorded or not, and is found to."""
    _verified(_compiled, tmp_path)


@pytest.mark.parametrize("level", ["step", "module"])
@pytest.mark.filterwarnings("ignore")
def test_coarser_levels_raise_no_alarm_either(level: str, tmp_path: Path) -> None:
    """What is recorded of steps or modules alone is the same in every run as well."""
    for name in ("transformer, AdamW fused", "becomes nan", "workers", "sparse", "attention"):
        for run in ("a", "b"):
            memory_that_is_dirty()
            with torchrepro.record(tmp_path / name / run, level=level):
                PROGRAMS[name]()
        verdict = torchrepro.compare(tmp_path / name / "a", tmp_path / name / "b")

        assert verdict.same, verdict.first
