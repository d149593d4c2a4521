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
LIBRARIES = ("python", "numpy", "torch")
sys.path.append(str(HERE))
program = import_module("ways_program")
WAYS = program.WAYS


@pytest.fixture
def outcomes_of(fork_python, tmp_path):
    """Execute plans with the program of ways."""
    return lambda plans: outcomes(fork_python, PROGRAM, tmp_path, plans)


def _is_its_turn(way, profile):
    return profile is None or ([*WAYS].index(way) + PROFILES.index(profile)) % 2


def _plans(profile):
    for name, way in WAYS.items():
        workers = 0 if _is_its_turn(name, profile) else 2
        if way.only is not None:
            workers = way.only
        yield Plan(workers, (KILLED_AT,), profile, options={"way": name})


def _libraries(name):
    """The libraries whose seed counts in plain Python: torch's begins every network."""
    way = WAYS[name]
    noisy = way.dataset in (program.HostNoise, program.AllNoise)
    orders = way.sampler is program.DrawingSampler
    return {"torch", *(["python"] if noisy else []), *(["numpy"] if noisy or orders else [])}


@pytest.mark.slow
@pytest.mark.parametrize("profile", [None, *PROFILES], ids=lambda name: name or "plain")
def test_every_way_is_exact_under_every_profile(profile, outcomes_of):
    """Killed and resumed, every way gives the uninterrupted run, as in plain Python.

    It has 0 workers under two of the profiles and in plain Python, and 2 workers under the others.
    """
    plans = [*_plans(profile)]

    assert inexact(plans, outcomes_of(plans)) == []


@pytest.mark.slow
@pytest.mark.parametrize("profile", [None, *PROFILES], ids=lambda name: name or "plain")
def test_seeds_count_as_in_plain_python(profile, outcomes_of):
    """A seed that the program sets changes at least the same results as in plain Python.

    Every way is tried without a profile, and alternately under two of the four.
    """
    tried = {
        name: LIBRARIES if profile is None else _libraries(name)
        for name, way in WAYS.items()
        if way.only in (None, 0) and _is_its_turn(name, profile)
    }
    plans = [
        Plan(0, (), profile, options={"way": way, "other_seed": other})
        for way, libraries in tried.items()
        for other in (None, *libraries)
    ]

    weights = iter(outcomes_of(plans))

    for way, libraries in tried.items():
        base = next(weights).weights
        counting = {library for library in libraries if next(weights).weights != base}
        assert counting == _libraries(way), way


@pytest.mark.slow
def test_two_ranks_are_exact_under_every_profile(outcomes_of):
    """Two ranks that save and resume independently give the uninterrupted run.

    They share the steps: the fifth is in the middle of the second epoch. They have 0 and 2 workers
    alternately.
    """
    plans = [
        Plan(2 * ((at + turn) % 2), (5,), profile, world=2, options={"way": way})
        for at, way in enumerate(("both, distributed sampler", "step, distributed sampler"))
        for turn, profile in enumerate((None, *PROFILES))
    ]

    assert inexact(plans, outcomes_of(plans)) == []


def test_the_table_has_every_shipped_profile():
    """The profiles of the table are the shipped ones."""
    shipped = Path(torchrepro.__file__).parent / "conf" / "repro"

    assert {path.stem for path in shipped.glob("*.yaml")} == set(PROFILES)
