"""A guarantee is satisfied if all its needs are met, and is lowered otherwise."""

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
    """Simulate a machine with a CPU alone; a test of `judge` below covers the needs of devices."""
    monkeypatch.setattr(
        "torchrepro.reporting.outcomes.present_kinds", lambda: frozenset({"numpy", "onednn"})
    )


def in_time(profile: Any, *overrides: str) -> Any:
    """Return the guarantee if the profile were applied before Python starts."""
    resolved = torchrepro.load(profile, overrides=overrides).resolved
    return make_plan(resolved, closed={}).report.guarantee


def knobs(guarantee: Any) -> set[str]:
    return {lowered.knob for lowered in guarantee.lowered}


@pytest.mark.parametrize("name", ["seed-only", "train-fast", "debug-strict", "npu-align"])
def test_shipped_profiles_satisfy_their_guarantees(name: str) -> None:
    """Applied in time, a shipped profile satisfies all needs of its guarantee."""
    guarantee = in_time(name)
    beyond_this_torch = {INDUCTOR} & knobs(guarantee)  # before 2.10 it has no such switch

    assert knobs(guarantee) == beyond_this_torch
    assert (guarantee.held == guarantee.asked) == (not beyond_this_torch)


@pytest.mark.parametrize("removed", REMOVED)
def test_removing_a_knob_from_a_profile_lowers_its_guarantee(removed: str) -> None:
    """A null and a removal lower the guarantee by exactly the knobs that they remove."""
    whole, lowered = in_time("debug-strict"), in_time("debug-strict", removed)

    assert knobs(lowered) - knobs(whole) == REMOVED[removed] - knobs(whole)
    assert lowered.asked == "repeatable"
    assert lowered.held == ("none" if removed == "seed=null" else "seeded")


def test_a_profile_without_settings_satisfies_no_guarantee() -> None:
    """The name of a guarantee alone does not satisfy it."""
    asked = {"name": "debug-strict", "guarantee": "repeatable"}
    with torchrepro.apply(asked) as strict, torchrepro.apply({"name": "mine"}) as plain:
        found = [applied.report.to_json()["guarantee"] for applied in (strict, plain)]

    assert [(each["asked"], each["held"]) for each in found] == [
        ("repeatable", "none"),
        ("seeded", "none"),
    ]
    assert all(each["knob"] and each["why"] for one in found for each in one["lowered"])


def test_a_late_knob_lowers_the_guarantee() -> None:
    """After its latch, a knob lowers the guarantee in the report and the summary; nothing stops."""
    with torchrepro.apply("debug-strict", ["on_late=warn"]) as applied:
        report = applied.report

    assert report[HASH_SEED].outcome is Outcome.TOO_LATE
    assert HASH_SEED in knobs(report.guarantee)
    assert report.guarantee.held == "seeded"
    assert "the order of sets" in str(report)
    assert "\n" not in report.summary


def test_a_variable_that_cannot_be_verified_lowers_the_guarantee() -> None:
    """A variable that may be too late counts as late, and the report says so."""
    kinds = frozenset(("cuda", "several"))
    for need in (need for need in NEEDS if need.met_by and need.knob.startswith("env.")):
        value = next(v for v in ("0", "1", ":4096:8", "Ring", "true") if need.met_by(v))
        row = KnobRow(need.knob, Outcome.UNCHANGED, after=value, why="latched")
        for guarantee in need.guarantees:
            facts = ProcessFacts(kinds | set(need.kinds), seeded=True)
            told = judge(guarantee, [row], (), facts)
            untold = judge(guarantee, [replace(row, unverified=True)], (), facts)

            assert knobs(untold) - knobs(told) == {need.knob}


def test_a_need_that_the_process_already_meets_counts() -> None:
    """If the profile does not set a need, the current value of the process decides."""
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


def test_the_report_of_an_undone_profile_does_not_change() -> None:
    """Changes after the end of a profile do not change its report."""
    with torchrepro.apply("debug-strict", [f"{ALGORITHMS}=null"]) as applied:
        last = applied.report.to_json()
    torch.use_deterministic_algorithms(True)
    try:
        afterwards = applied.report.to_json()
    finally:
        torch.use_deterministic_algorithms(False)

    assert last == afterwards


def test_without_a_seed_the_program_must_seed_every_generator() -> None:
    """`seed: null` lowers the guarantee per generator, until the program seeds it.

    `random.seed()` without a value does not count.
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
def test_a_later_change_lowers_the_guarantee_at_the_end(mode: str) -> None:
    """Whatever the guard is set to, a change by later code lowers the guarantee at the end."""
    with torchrepro.apply("debug-strict", [f"guard={mode}"]) as applied:
        assert "is active" in applied.report.summary
        torch.use_deterministic_algorithms(False)

    report = applied.report
    assert ALGORITHMS in {drift.knob for drift in report.drift}
    assert ALGORITHMS in knobs(report.guarantee)
    assert "is active" not in report.summary


def test_a_drift_outside_the_guarantee_is_reported_and_lowers_nothing() -> None:
    """If a knob that the guarantee does not need changes, the report shows only the drift."""
    with torchrepro.apply("train-fast") as applied:
        torch.backends.cudnn.benchmark = False

    report = applied.report
    assert (report.guarantee.held, report.guarantee.lowered) == ("seeded", ())
    assert [drift.knob for drift in report.drift] == ["backends.cudnn.benchmark"]
    assert "is active" not in report.summary


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: f"{need.guarantees[-1]}-{need.knob}")
def test_a_need_counts_if_its_device_types_are_present(need: Any) -> None:
    """Every need is a knob of the catalogue; unmet, it lowers the guarantee on its devices.

    A refused value never meets the need.
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
    """The line has at most 100 columns for any number of unmet needs; reasons have other lines."""
    lowered = tuple(Lowered(need.knob, need.left_open, "late") for need in NEEDS[:count])
    rows = tuple(KnobRow(need.knob, Outcome.TOO_LATE) for need in NEEDS)
    report = Report(
        "debug-strict", Guarantee("repeatable", "none", lowered), "", rows, planned=True
    )

    assert len(report.summary) <= 100
    assert all(each.left_open in " ".join(str(report).split()) for each in lowered)


def test_the_strict_profiles_meet_all_needs_on_all_devices() -> None:
    """On all device types at once, the shipped strict profiles set every need."""
    every = ProcessFacts(frozenset(kind for need in NEEDS for kind in need.kinds))
    for name in ("debug-strict", "npu-align"):
        resolved = torchrepro.load(name).resolved
        rows = [
            KnobRow(knob.name, Outcome.APPLIED, after=value) for knob, value in resolved.settings()
        ]

        assert judge(resolved.guarantee, rows, (), every).lowered == ()
