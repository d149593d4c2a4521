"""A run that is killed and started again is the uninterrupted run, bit for bit."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from .kills import Plan, outcomes, random_steps, table

HERE = Path(__file__).parent
STEPS, FIRST = 18, 6
"""Optimizer steps of every program, and the first one after its first checkpoint."""

ONLY_WITH_US = frozenset({"fabric_loader", "own_loop", "accelerate_dispatched"})
"""Programs that need torchrepro: for the state of a loader, for `Checkpoint`, and because of how
accelerate counts the batches that it skips: for one process instead of all."""

PROGRAMS = ("lightning", "fabric", "fabric_loader", "accelerate", "huggingface", "own_loop")

SHARED = ("lightning", "fabric", "accelerate", "accelerate_dispatched")
"""Those that take `WORLD_SIZE` processes as a launcher starts them."""


VARIANTS = {
    "lightning, own generator": ("lightning", {"generator": 3}),
    # Lightning leaves out the validation of an epoch whose last batch is done as it resumes.
    "lightning, saved at the last batch": ("lightning", {"every": 6, "validates": False}),
    "lightning, stream": ("lightning", {"data": "stream"}),
    "lightning, stream with a length": ("lightning", {"data": "counted"}),
    "lightning, stateful": ("lightning", {"kind": "torchdata"}),
    "fabric, own generator": ("fabric", {"generator": 3}),
    "fabric, saved at the last batch": ("fabric", {"every": 6, "generator": 3}),
    "fabric, stream": ("fabric", {"data": "stream"}),
    "accelerate, own generator": ("accelerate", {"generator": 3}),
    "accelerate, saved at the last batch": ("accelerate", {"every": 6, "generator": 3}),
    "accelerate, seedable": ("accelerate", {"use_seedable_sampler": True}),
    "accelerate, stateful": ("accelerate", {"use_stateful_dataloader": True}),
    "huggingface, stream": ("huggingface", {"data": "stream"}),
    "huggingface, stream with a length": ("huggingface", {"data": "counted"}),
    "huggingface, saved at the last batch": ("huggingface", {"every": 6}),
}
"""Other ways in which these programs are written: the program, and what it is called with."""


SAVES = (4, 5, 6)
"""Steps of an epoch of six after which a checkpoint is written, the last one among them."""


def _program(name: str) -> Path:
    return HERE / f"{name}_program.py"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_killed_run_goes_on_as_the_uninterrupted_one(
    name: str, tmp_path: Path, fork_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """Killed in mid-epoch and started again, a program comes to the weights of a whole run."""
    plan = Plan(workers=0, kills=random_steps(STEPS, FIRST, 1))

    (outcome,) = outcomes(_program(name), tmp_path, [plan], run=fork_python)

    (resumed,) = outcome.resumed
    assert (resumed.killed, resumed.resumed_from is not None) == (9, True)
    assert resumed.equal, (plan, resumed)


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["debug-strict", "npu-align", "seed-only", "train-fast"])
@pytest.mark.parametrize("program", ["lightning", "fabric", "accelerate", "huggingface"])
def test_variants_of_a_program_go_on_as_well(program: str, profile: str, tmp_path: Path) -> None:
    """Killed in its second epoch, each variant is the uninterrupted run, with 0 and 2 workers."""
    variants = {name: options for name, (own, options) in VARIANTS.items() if own == program}
    named = [(name, workers) for name in variants for workers in (0, 2)]
    plans = [Plan(workers, (11,), profile, options=variants[name]) for name, workers in named]

    found = outcomes(_program(program), tmp_path, plans)

    resumed = [outcome.resumed[0] for outcome in found]
    assert all((each.killed, each.resumed_from is not None) == (9, True) for each in resumed)
    assert [case for case, each in zip(named, resumed, strict=True) if not each.equal] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_ten_kills(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Killed ten times at random, with 0 and 2 workers: always the uninterrupted run's weights."""
    kills = random_steps(STEPS, FIRST, 10)
    profiles = ("debug-strict",) if name in ONLY_WITH_US else ("debug-strict", None)
    plans = [Plan(workers, kills, profile) for profile in profiles for workers in (0, 2)]

    found = outcomes(_program(name), tmp_path, plans)

    with capsys.disabled():
        print(f"\n{table(name, plans, found)}")
    ours = found[:2]
    assert ours[0].weights == ours[1].weights
    for outcome in ours:
        for step, resumed in zip(kills, outcome.resumed, strict=True):
            assert (resumed.killed, resumed.resumed_from is not None) == (9, True)
            assert resumed.equal, (step, resumed)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
def test_ten_kills_of_two_processes(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes share each step: killed ten times, always the uninterrupted run's weights."""
    kills = random_steps(STEPS, FIRST, 10)
    without_us = [] if name in ONLY_WITH_US else [Plan(0, kills[:2], profile=None, world=2)]
    plans = [Plan(0, kills, world=2), *without_us]

    found = outcomes(_program(name), tmp_path, plans)

    with capsys.disabled():
        print(f"\n{table(name, plans, found)}")
    for step, resumed in zip(kills, found[0].resumed, strict=True):
        assert (resumed.killed, resumed.resumed_from is not None) == (9, True)
        assert resumed.equal, (step, resumed)


@pytest.mark.slow
@pytest.mark.parametrize("data", ["augmented", "odd"])
@pytest.mark.parametrize("skips_for_all", [False, True])
def test_one_process_may_load_the_batches_of_two(
    skips_for_all: bool, data: str, tmp_path: Path
) -> None:
    """Saved anywhere, one batch before an epoch's last and at it too, it is the uninterrupted run.

    So is a program that knows what accelerate skips in, and an epoch of an odd number of batches.
    """
    options = {"skips_for_all": skips_for_all, "data": data}
    plans = [Plan(0, (every + 2,), world=2, options={**options, "every": every}) for every in SAVES]

    found = outcomes(_program("accelerate_dispatched"), tmp_path, plans)

    assert [each.equal for outcome in found for each in outcome.resumed] == [True] * len(SAVES)
