"""What is exact in plain Python is exact under every profile: a table of ways times profiles."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

import torchrepro

from .kills import Plan, inexact, outcomes

HERE = Path(__file__).parent
PROGRAM = HERE / "ways_program.py"
KILLED_AT = 11
"""A step in the middle of the second epoch; the last checkpoint is of the eighth step."""


PROFILES = ("debug-strict", "npu-align", "seed-only", "train-fast")
DAILY = (None, "seed-only")
"""Under which every way is tried daily in the main process."""

LIBRARIES = ("python", "numpy", "torch")
sys.path.append(str(HERE))
program = import_module("ways_program")
WAYS = program.WAYS


@pytest.fixture
def found(fork_python, tmp_path):
    """Carry out plans with the program of ways."""
    return lambda plans: outcomes(fork_python, PROGRAM, tmp_path, plans)


def _plans(profile, workers):
    return [
        Plan(workers, (KILLED_AT,), profile, options={"way": name})
        for name, way in WAYS.items()
        if way.only in (None, workers)
    ]


def _turn(way, profile):
    return [*WAYS].index(way) + PROFILES.index(profile)


def _libraries(name):
    """The libraries whose seed counts in plain Python: torch's begins every network."""
    way = WAYS[name]
    noisy = way.dataset in (program.HostNoise, program.AllNoise)
    orders = way.sampler is program.DrawingSampler
    return {"torch", *(["python"] if noisy else []), *(["numpy"] if noisy or orders else [])}


@pytest.mark.slow
def test_what_is_exact_in_plain_python_is_exact_under_a_profile(found):
    """Killed and resumed in the main process, every way is the whole run, as in plain Python."""
    plans = [plan for profile in DAILY for plan in _plans(profile, 0)]

    assert inexact(plans, found(plans)) == []


@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
def test_every_way_is_exact_under_every_profile(profile, found):
    """Killed and resumed with 0 or 2 workers, every way is the whole run under every profile.

    Which of the two goes round: every way has both, and so has every profile.
    """
    plans = [
        plan
        for number in ((2,) if profile in DAILY else (0, 2))
        for plan in _plans(profile, number)
        if profile in DAILY
        or WAYS[plan.options["way"]].only is not None
        or _turn(plan.options["way"], profile) % 2 == (number == 0)
    ]

    assert inexact(plans, found(plans)) == []


@pytest.mark.slow
@pytest.mark.parametrize("profile", [None, *PROFILES], ids=lambda name: name or "plain")
def test_seeds_count_as_in_plain_python(profile, found):
    """A seed of the program's own changes at least what it did.

    Every way is tried without a profile, and under two of the four by turns.
    """
    tried = {
        plan.options["way"]: [
            library
            for library in LIBRARIES
            if profile is None or library in _libraries(plan.options["way"])
        ]
        for plan in _plans(profile, 0)
        if profile is None or _turn(plan.options["way"], profile) % 2
    }
    plans = [
        Plan(0, (), profile, options={"way": way, "other_seed": other})
        for way, libraries in tried.items()
        for other in (None, *libraries)
    ]

    weights = iter(found(plans))

    for way, libraries in tried.items():
        base = next(weights).weights
        counting = {library for library in libraries if next(weights).weights != base}
        assert counting == _libraries(way), way


@pytest.mark.slow
def test_two_ranks_are_exact_under_every_profile(found):
    """Two ranks that save and resume by themselves are the whole run under every profile.

    They share the steps: the fifth is in the middle of the second epoch. They have 0 and 2 workers
    by turns.
    """
    plans = [
        Plan(2 * ((at + turn) % 2), (5,), profile, world=2, options={"way": way})
        for at, way in enumerate(("both, distributed sampler", "step, distributed sampler"))
        for turn, profile in enumerate((None, *PROFILES))
    ]

    assert inexact(plans, found(plans)) == []


def test_the_table_knows_every_shipped_profile():
    """The profiles of the table are those that come with torchrepro."""
    shipped = Path(torchrepro.__file__).parent / "conf" / "repro"

    assert {path.stem for path in shipped.glob("*.yaml")} == set(PROFILES)
