"""A run that is killed and started again is bitwise the uninterrupted run."""

from dataclasses import replace
from pathlib import Path

import pytest

from .kills import Plan, inexact, outcomes, random_steps
from .training import STEPS

HERE = Path(__file__).parent
FIRST = 6  # the first step after the first checkpoint of each program

PROGRAMS = (
    "lightning",
    "fabric",
    "fabric_loader",
    "accelerate",
    "huggingface",
    "ignite",
    "own_loop",
)

OTHERWISE = {
    "fabric_loader": ("fabric", {"keeps_loader": True}),
    "accelerate_dispatched": ("accelerate", {"dispatch_batches": True}),
}
"""Names of programs that are another one, called with these options."""

SHARED = ("lightning", "fabric", "accelerate", "accelerate_dispatched")
"""Those that take `WORLD_SIZE` processes as a launcher starts them."""

PROFILES = ("debug-strict", "npu-align", "seed-only", "train-fast")

VARIANTS = {
    "lightning": [
        {"generator": 3},
        # Lightning leaves out the validation of an epoch whose last batch is done as it resumes.
        {"every": 6, "validates": False},
        {"data": "stream"},
        {"data": "counted"},
        {"kind": "torchdata"},
    ],
    "fabric": [{"generator": 3}, {"every": 6, "generator": 3}, {"data": "stream"}],
    "accelerate": [
        {"generator": 3},
        {"every": 6, "generator": 3},
        {"use_seedable_sampler": True},
        {"every": 6, "use_seedable_sampler": True},
        {"use_stateful_dataloader": True},
    ],
    "huggingface": [{"data": "stream"}, {"data": "counted"}, {"every": 6}],
    "ignite": [
        {"generator": 3},
        {"every": 6, "generator": 3},
        {"after_epochs": True, "generator": 3},
        {"data": "stream"},
        {"data": "counted"},
        {"kind": "torchdata"},
    ],
}
"""Other ways in which these programs are written: what `train` of a program is called with."""

SAVES = (4, 5, 6)
"""Steps of an epoch of six after which a checkpoint is written, the last one among them."""


@pytest.fixture
def outcome_of(fork_python, tmp_path):
    """Execute plans with the program of this name."""

    def outcome_of(name, plans):
        program, options = OTHERWISE.get(name, (name, {}))
        plans = [replace(plan, options={**options, **plan.options}) for plan in plans]
        return outcomes(fork_python, HERE / f"{program}_program.py", tmp_path, plans)

    return outcome_of


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_killed_run_resumes_as_the_uninterrupted_run(name, outcome_of):
    """Killed within an epoch and started again, it has the uninterrupted run's weights."""
    plans = [Plan(workers=0, kills=random_steps(STEPS, FIRST, 1))]

    assert inexact(plans, outcome_of(name, plans)) == []


@pytest.mark.slow
@pytest.mark.parametrize("program", VARIANTS)
def test_variants_of_a_program_resume_too(program, outcome_of):
    """Killed in its second epoch, each variant is the uninterrupted run with 0 and 2 workers.

    Profiles alternate: each variant has two of them, and each program all.
    """
    plans = [
        Plan(workers, (11,), profile, options=options)
        for at, options in enumerate(VARIANTS[program])
        for workers, profile in zip((0, 2), PROFILES[at % 2 :: 2], strict=True)
    ]

    assert inexact(plans, outcome_of(program, plans)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PROGRAMS, "accelerate_dispatched"])
def test_ten_kills(name, outcome_of):
    """Ten kills at random steps, five with 2 workers: always the uninterrupted run's weights.

    The same with two processes that share each step.
    """
    kills = random_steps(STEPS, FIRST, 10)
    alone = [Plan(0, kills[::2]), Plan(2, kills[1::2])] if name in PROGRAMS else []
    shared = [Plan(0, kills[::2], world=2)] if name in SHARED else []

    outcomes = outcome_of(name, alone + shared)

    assert inexact(alone + shared, outcomes) == []
    assert len({outcome.weights for outcome in outcomes[: len(alone)]}) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("data", ["augmented", "odd"])
def test_one_process_may_load_the_batches_of_two(data, outcome_of):
    """Saved at any step, also at an epoch's end, it is the uninterrupted run.

    The same for a program that knows the unit in which accelerate skips, and for an epoch with an
    odd number of batches.
    """
    plans = [
        Plan(
            0, (every + 2,), world=2, options={"skips_for_all": skips, "data": data, "every": every}
        )
        for skips in (False, True)
        for every in SAVES
    ]

    assert inexact(plans, outcome_of("accelerate_dispatched", plans)) == []
