"""What is exact in plain Python is exact under every profile: a table of ways times profiles."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import torchrepro

from .kills import Plan, outcomes

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

HERE = Path(__file__).parent
PROGRAM = HERE / "ways_program.py"
KILLED_AT = 11
"""A step in the middle of the second epoch; the last checkpoint is of the eighth step."""


def _ways() -> Any:
    sys.path.insert(0, str(HERE))
    try:
        spec = importlib.util.spec_from_file_location("ways_program", PROGRAM)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["ways_program"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(HERE))
    return module.WAYS


WAYS = _ways()
PROFILES = ("debug-strict", "npu-align", "seed-only", "train-fast")


def _plans(way: str, profiles: tuple[str | None, ...], workers: tuple[int, ...]) -> list[Plan]:
    only = WAYS[way].only
    return [
        Plan(number, (KILLED_AT,), profile, options={"way": way})
        for profile in profiles
        for number in workers
        if only in (None, number)
    ]


def _inexact(plans: list[Plan], tmp_path: Path, **run: Any) -> list[str]:
    return [
        f"{plan.options['way']}: {plan.profile or 'plain Python'}, {plan.workers} workers"
        for plan, outcome in zip(plans, outcomes(PROGRAM, tmp_path, plans, **run), strict=True)
        for resumed in outcome.resumed
        if (resumed.killed, resumed.resumed_from is not None, resumed.equal) != (9, True, True)
    ]


def test_what_is_exact_in_plain_python_is_exact_under_a_profile(
    tmp_path: Path, fork_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """Killed and resumed in the main process, every way is the whole run, as in plain Python."""
    plans = [plan for way in WAYS for plan in _plans(way, (None, "seed-only"), (0,))]

    assert _inexact(plans, tmp_path, run=fork_python) == []


@pytest.mark.slow
@pytest.mark.parametrize("profile", [None, *PROFILES], ids=lambda name: name or "plain")
def test_every_way_is_exact_under_every_profile(profile: str | None, tmp_path: Path) -> None:
    """Killed and resumed with 0 and 2 workers, every way is the whole run under every profile."""
    plans = [plan for way in WAYS for plan in _plans(way, (profile,), (0, 2))]

    assert _inexact(plans, tmp_path) == []


def _seeds_that_count(
    profile: str | None, workers: int, tmp_path: Path, **run: Any
) -> set[tuple[str, str]]:
    """Return each way with each library whose seed changes what it trains.

    Two runs with the same seeds have to agree.
    """
    options = [
        {"way": way, "other_seed": other}
        for way in WAYS
        if WAYS[way].only in (None, workers)
        for other in (None, None, "python", "numpy", "torch")
    ]
    plans = [Plan(workers, (), profile, options=each) for each in options]
    found = [each.weights for each in outcomes(PROGRAM, tmp_path, plans, **run)]
    counting = set()
    for first in range(0, len(options), 5):
        base, again, *others = found[first : first + 5]
        assert base == again, options[first]
        for other, weights in zip(options[first + 2 : first + 5], others, strict=True):
            if weights != base:
                counting.add((other["way"], other["other_seed"]))
    return counting


@pytest.mark.slow
def test_runs_agree_and_seeds_count_as_in_plain_python(tmp_path: Path) -> None:
    """Two runs of every way agree, and a seed of the program's own changes at least what it did."""
    plain = _seeds_that_count(None, 0, tmp_path / "plain")

    for profile in PROFILES:
        assert _seeds_that_count(profile, 0, tmp_path / profile) >= plain
    assert {library for _, library in plain} == {"python", "numpy", "torch"}


@pytest.mark.slow
def test_two_ranks_are_exact_under_every_profile(tmp_path: Path) -> None:
    """Two ranks that save and resume by themselves are the whole run under every profile.

    They share the steps: the fifth is in the middle of the second epoch.
    """
    plans = [
        Plan(workers, (5,), profile, world=2, options={"way": way})
        for way in ("both, distributed sampler", "step, distributed sampler")
        for profile in (None, *PROFILES)
        for workers in (0, 2)
    ]

    assert _inexact(plans, tmp_path) == []


def test_the_table_knows_every_shipped_profile() -> None:
    """The profiles of the table are those that come with torchrepro."""
    shipped = Path(torchrepro.__file__).parent / "conf" / "repro"

    assert {path.stem for path in shipped.glob("*.yaml")} == set(PROFILES)
