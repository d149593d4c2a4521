"""A guarantee is held where everything that it needs is, and lowered in name where not."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import torchrepro
from torchrepro.application.planner import make_plan
from torchrepro.knobs.catalogue import knobs_by_name
from torchrepro.profile.needs import NEEDS, WEAKER, folded
from torchrepro.reporting.outcomes import Guarantee, KnobRow, Lowered, Outcome, ProcessFacts, judge
from torchrepro.reporting.report import Report

HASH_SEED = "env.PYTHONHASHSEED"
ALGORITHMS = "backends.torch.deterministic_algorithms"
INDUCTOR = "backends.torch.inductor_deterministic"
ONEDNN = "backends.cpu.mkldnn_deterministic"
SEEDS = {"seed.python", "seed.numpy", "seed.torch"}
REMOVED = {
    f"{ALGORITHMS}=null": {ALGORITHMS},
    f"{ONEDNN}=null": {ONEDNN},
    "~backends": {ALGORITHMS, INDUCTOR, ONEDNN},
    "env.PYTHONHASHSEED=null": {HASH_SEED},
    "seed=null": SEEDS,
}

pytestmark = pytest.mark.usefixtures("clean_process")


@pytest.fixture(autouse=True)
def _no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have these laws told of the CPU alone; what devices add is told to `judge` below."""
    monkeypatch.setattr(
        "torchrepro.reporting.outcomes.present_kinds", lambda: frozenset({"numpy", "onednn"})
    )


def in_time(profile: Any, *overrides: str) -> Any:
    """Return what would be held if the profile were put in force before Python starts."""
    resolved = torchrepro.load(profile, overrides=overrides).resolved
    return make_plan(resolved, closed={}).report.guarantee


def knobs(guarantee: Any) -> set[str]:
    return {lowered.knob for lowered in guarantee.lowered}


@pytest.mark.parametrize("name", ["seed-only", "train-fast", "debug-strict", "npu-align"])
def test_shipped_profiles_hold_what_they_ask_for(name: str) -> None:
    """Put in force in time, a shipped profile leaves nothing of its guarantee open."""
    guarantee = in_time(name)
    beyond_this_torch = {INDUCTOR} & knobs(guarantee)  # before 2.10 it has no such switch

    assert knobs(guarantee) == beyond_this_torch
    assert (guarantee.held == guarantee.asked) == (not beyond_this_torch)


@pytest.mark.parametrize("removed", REMOVED)
def test_what_is_taken_out_of_a_profile_lowers_its_guarantee(removed: str) -> None:
    """A null and a removal lower the guarantee by the knobs that they take away, and no others."""
    whole, lowered = in_time("debug-strict"), in_time("debug-strict", removed)

    assert knobs(lowered) - knobs(whole) == REMOVED[removed] - knobs(whole)
    assert lowered.asked == "repeatable"
    assert lowered.held == ("none" if removed == "seed=null" else "seeded")


def test_a_profile_that_never_set_anything_holds_nothing() -> None:
    """Neither a guarantee that is only asked for, nor a mere name, is held."""
    asked = {"name": "debug-strict", "guarantee": "repeatable"}
    with torchrepro.apply(asked) as strict, torchrepro.apply({"name": "mine"}) as plain:
        found = [applied.report.to_json()["guarantee"] for applied in (strict, plain)]

    assert [(each["asked"], each["held"]) for each in found] == [
        ("repeatable", "none"),
        ("seeded", "none"),
    ]
    assert all(each["knob"] and each["why"] for one in found for each in one["lowered"])


def test_late_lowers_a_guarantee_in_name() -> None:
    """Past its phase a knob lowers the guarantee in the report and the summary; nothing stops."""
    with torchrepro.apply("debug-strict", ["on_late=warn"]) as applied:
        report = applied.report

    assert report[HASH_SEED].outcome is Outcome.TOO_LATE
    assert HASH_SEED in knobs(report.guarantee)
    assert report.guarantee.held == "seeded"
    assert "the order of sets" in str(report)
    assert "\n" not in report.summary


def test_what_nobody_can_verify_lowers_a_guarantee_in_name() -> None:
    """A variable that may have come too late is no more held than one that did, and says so."""
    kinds = frozenset(("cuda", "several"))
    for need in (need for need in NEEDS if need.met_by and need.knob.startswith("env.")):
        value = next(v for v in ("0", "1", ":4096:8", "Ring", "true") if need.met_by(v))
        row = KnobRow(need.knob, Outcome.UNCHANGED, after=value, why="latched")
        for guarantee in need.guarantees:
            facts = ProcessFacts(kinds | set(need.kinds), seeded=True)
            told = judge(guarantee, [row], (), facts)
            untold = judge(guarantee, [replace(row, unverified=True)], (), facts)

            assert knobs(untold) - knobs(told) == {need.knob}


def test_what_a_process_holds_by_itself_counts_as_it_is_read() -> None:
    """A need that the profile leaves alone is met if its present value will do, and only then."""
    null = ["backends.torch.fill_uninitialized_memory=null", f"{ALGORITHMS}=null"]
    with torchrepro.apply("debug-strict", null) as applied:
        before = knobs(applied.report.guarantee)
        torch.use_deterministic_algorithms(True)
        try:
            after = knobs(applied.report.guarantee)
        finally:
            torch.use_deterministic_algorithms(False)

    assert before - after == {ALGORITHMS}
    assert "backends.torch.fill_uninitialized_memory" not in before


def test_the_report_on_a_profile_that_was_taken_back_stays_as_it_was() -> None:
    """What a process does after a profile has ended changes nothing in the report on it."""
    with torchrepro.apply("debug-strict", [f"{ALGORITHMS}=null"]) as applied:
        last = applied.report.to_json()
    torch.use_deterministic_algorithms(True)
    try:
        afterwards = applied.report.to_json()
    finally:
        torch.use_deterministic_algorithms(False)

    assert last == afterwards


def test_without_a_seed_the_program_has_to_give_one() -> None:
    """`seed: null` is lowered, generator by generator, until the program has seeded it.

    `random.seed()` without a value leaves its random numbers open.
    """
    seen = []
    with torchrepro.isolated_rng(), torchrepro.apply("debug-strict", ["seed=null"]) as applied:
        random.seed()
        for seed in (lambda _: None, random.seed, np.random.seed, torch.manual_seed):
            seed(7)
            seen.append(SEEDS & knobs(applied.report.guarantee))

    assert len(applied.seeding_calls) == 4
    assert seen == [SEEDS, {"seed.numpy", "seed.torch"}, {"seed.torch"}, set()]


@pytest.mark.parametrize("mode", ["none", "warn"])
def test_a_profile_that_did_not_hold_is_never_in_force(mode: str) -> None:
    """Whatever the guard, what later code has changed lowers the guarantee at the end."""
    with torchrepro.apply("debug-strict", [f"guard={mode}"]) as applied:
        assert "is active" in applied.report.summary
        torch.use_deterministic_algorithms(False)

    report = applied.report
    assert ALGORITHMS in {drift.knob for drift in report.drift}
    assert ALGORITHMS in knobs(report.guarantee)
    assert "is active" not in report.summary


def test_a_drift_that_breaks_nothing_is_said_and_lowers_nothing() -> None:
    """A knob that the guarantee does not need may move: the profile has drifted all the same."""
    with torchrepro.apply("train-fast") as applied:
        torch.backends.cudnn.benchmark = False

    report = applied.report
    assert (report.guarantee.held, report.guarantee.lowered) == ("seeded", ())
    assert [drift.knob for drift in report.drift] == ["backends.cudnn.benchmark"]
    assert "is active" not in report.summary


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: f"{need.guarantees[-1]}-{need.knob}")
def test_a_need_counts_where_its_kinds_of_device_are_present(need: Any) -> None:
    """Every need is a knob of the catalogue; unmet, it lowers the guarantee where it matters.

    A value that is refused never meets the need.
    """
    assert need.knob in knobs_by_name()
    assert not any(need.met_by and need.met_by(folded(value)) for value in need.broken_by)
    if need.met_by is None:
        return
    late = [KnobRow(need.knob, Outcome.TOO_LATE)]
    kinds = frozenset(need.kinds)
    for guarantee in need.guarantees:
        here = judge(guarantee, late, (), ProcessFacts(kinds, seeded=True))
        assert need.knob in knobs(here)
        assert here.held in (*WEAKER[guarantee], "none")
        if kinds:
            elsewhere = judge(guarantee, late, (), ProcessFacts(frozenset(), seeded=True))
            assert need.knob not in knobs(elsewhere)


@pytest.mark.parametrize("count", range(1, len(NEEDS) + 1, 3))
def test_a_lowered_guarantee_fits_its_line(count: int) -> None:
    """However much is left open, it is said in 100 columns, and why in lines of their own."""
    lowered = tuple(Lowered(need.knob, need.left_open, "late") for need in NEEDS[:count])
    rows = tuple(KnobRow(need.knob, Outcome.TOO_LATE) for need in NEEDS)
    report = Report(
        "debug-strict", Guarantee("repeatable", "none", lowered), "", rows, planned=True
    )

    assert len(report.summary) <= 100
    assert all(each.left_open in " ".join(str(report).split()) for each in lowered)


def test_what_a_profile_sets_well_meets_its_need() -> None:
    """On every kind of device at once, the shipped strict profiles set all that is needed."""
    every = ProcessFacts(frozenset(kind for need in NEEDS for kind in need.kinds))
    for name in ("debug-strict", "npu-align"):
        resolved = torchrepro.load(name).resolved
        rows = [
            KnobRow(knob.name, Outcome.APPLIED, after=value) for knob, value in resolved.settings()
        ]

        assert judge(resolved.guarantee, rows, (), every).lowered == ()
