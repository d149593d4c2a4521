"""A run that is killed and started again is the uninterrupted run, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from .kills import Outcome, Plan, inexact, outcomes, random_steps

HERE = Path(__file__).parent
STEPS, FIRST = 18, 6
"""Optimizer steps of every program, and the first one after its first checkpoint."""

PROGRAMS = ("lightning", "fabric", "fabric_loader", "accelerate", "huggingface", "own_loop")

SHARED = ("lightning", "fabric", "accelerate", "accelerate_dispatched")
"""Those that take `WORLD_SIZE` processes as a launcher starts them."""

PROFILES = ("debug-strict", "npu-align", "seed-only", "train-fast")

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


@pytest.fixture
def found(
    fork_python: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> Callable[[str, list[Plan]], list[Outcome]]:
    """Carry out plans with the program of this name."""
    return lambda name, plans: outcomes(fork_python, HERE / f"{name}_program.py", tmp_path, plans)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_killed_run_goes_on_as_the_uninterrupted_one(name, found) -> None:
    """Killed in mid-epoch and started again, a program comes to the weights of a whole run."""
    plans = [Plan(workers=0, kills=random_steps(STEPS, FIRST, 1))]

    assert inexact(plans, found(name, plans)) == []


@pytest.mark.slow
@pytest.mark.parametrize("program", ["lightning", "fabric", "accelerate", "huggingface"])
def test_variants_of_a_program_go_on_as_well(program, found) -> None:
    """Killed in its second epoch, each variant is the uninterrupted run under every profile.

    It has 0 and 2 workers by turns.
    """
    variants = [options for own, options in VARIANTS.values() if own == program]
    plans = [
        Plan(2 * ((at + turn) % 2), (11,), profile, options=options)
        for at, options in enumerate(variants)
        for turn, profile in enumerate(PROFILES)
    ]

    assert inexact(plans, found(program, plans)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PROGRAMS, "accelerate_dispatched"])
def test_ten_kills(name, found) -> None:
    """Killed ten times at random, with 0 and 2 workers: always the uninterrupted run's weights.

    So it is where two processes share each step.
    """
    kills = random_steps(STEPS, FIRST, 10)
    alone = [Plan(workers, kills) for workers in (0, 2) if name in PROGRAMS]
    shared = [Plan(0, kills, world=2)] if name in SHARED else []

    outcomes = found(name, alone + shared)

    assert inexact(alone + shared, outcomes) == []
    assert len({outcome.weights for outcome in outcomes[: len(alone)]}) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("data", ["augmented", "odd"])
def test_one_process_may_load_the_batches_of_two(data, found) -> None:
    """Saved anywhere, one batch before an epoch's last and at it too, it is the uninterrupted run.

    So is a program that knows what accelerate skips in, and an epoch of an odd number of batches.
    """
    plans = [
        Plan(
            0, (every + 2,), world=2, options={"skips_for_all": skips, "data": data, "every": every}
        )
        for skips in (False, True)
        for every in SAVES
    ]

    assert inexact(plans, found("accelerate_dispatched", plans)) == []
