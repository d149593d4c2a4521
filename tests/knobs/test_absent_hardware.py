"""Knobs for absent hardware are `unsupported`, are set anyway, and share one line of text."""

import fnmatch
import json
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import torchrepro
from torchrepro.ground.console import as_text, parts
from torchrepro.knobs.catalogue import knobs_by_name
from torchrepro.lock.lock_file import check, write_lock
from torchrepro.reporting import process_state
from torchrepro.reporting.outcomes import Outcome
from torchrepro.reporting.process_state import _ABSENCES, HARDWARE, NOT_HERE, absent_hardware
from torchrepro.reporting.report import absent_lines

World = Callable[[], dict[str, Any]]
PROFILES = ("debug-strict", "npu-align", "train-fast", "seed-only")

pytestmark = pytest.mark.usefixtures("clean_process")


@pytest.fixture(params=["", NOT_HERE])
def absence(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Simulate a machine with all hardware or with none; returns the reason for the absence."""
    words: str = request.param
    for kind in _ABSENCES:
        monkeypatch.setitem(process_state._ABSENCES, kind, lambda: words)
    return words


@pytest.mark.parametrize("profile", PROFILES)
def test_exactly_the_knobs_for_absent_hardware_are_unsupported(
    profile: str, absence: str, world: World
) -> None:
    """Exactly the knobs for absent hardware are unsupported for that reason, also in JSON.

    Their variables are set while the profile is active, and everything is undone.
    """
    before = world()
    with torchrepro.apply(profile) as applied:
        report = applied.report
        wanted = applied.resolved.environment().items()
        not_set = {f"env.{name}" for name, text in wanted if os.environ.get(name) != text}
    for row in report:
        hardware = knobs_by_name()[row.knob].hardware
        assert bool(row.absent) == bool(hardware and absence), row
        if row.absent:
            assert row.outcome is Outcome.UNSUPPORTED
            assert row.why.startswith(f"{hardware}: {NOT_HERE}")
    late = {row.knob for row in report if row.outcome is Outcome.TOO_LATE or "not set" in row.why}

    assert not_set <= late
    assert [row["absent"] for row in report.to_json()["knobs"]] == [row.absent for row in report]
    assert before == world()


@pytest.mark.parametrize("profile", PROFILES)
def test_a_line_counts_the_knobs_that_are_not_in_the_table(profile: str, absence: str) -> None:
    """Each row is in the table or in the line for absent hardware; the summary counts the rest.

    This applies to plans, to reports and to their complete tables.
    """
    plan = torchrepro.plan(profile)
    with torchrepro.apply(profile) as applied:
        texts = {str(plan): plan.report, applied.report.table(): applied.report}
        texts |= {str(applied): applied.report, as_text(*parts(applied.report)): applied.report}
    for text, report in texts.items():
        absent = [row for row in report if row.absent]
        lines = [line for line in text.splitlines() if line.endswith(f": {NOT_HERE}")]
        names = [name for name in HARDWARE if any(name in row.why for row in absent)]

        assert lines == absent_lines(report)
        assert len(lines) == bool(absence)
        assert not absent or lines[0].startswith(f"{len(absent)} settings for {names[0]}")
        assert all(name in lines[0] for name in names)
        assert not any(row.knob in text for row in absent)
        others = [row for row in report.having(Outcome.UNSUPPORTED) if not row.absent]
        if not report.guarantee.lowered:  # a summary that says so may have no room for numbers
            assert ("unsupported" in report.summary) == bool(others)
            assert not others or f"{len(others)} unsupported" in report.summary


def test_locks_with_and_without_the_hardware_record_the_same_settings(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A knob that could be set has the same value in the locks of both machines."""
    lock = tmp_path / "repro.lock"
    differing = {}
    for here, there in (("", NOT_HERE), (NOT_HERE, "")):
        for words in (here, there):
            for kind in _ABSENCES:
                monkeypatch.setitem(process_state._ABSENCES, kind, lambda words=words: words)
            if words == here:
                write_lock(lock, "debug-strict", ())
                held = json.loads(lock.read_text())["report"]["knobs"]
        found = check(lock)
        differing[here] = [each.key for each in found.forbidden if each.section == "knobs"]
        assert any(row["absent"] for row in held) == bool(here)

    assert differing == {"": [], NOT_HERE: []}


def test_a_late_variable_for_absent_hardware_neither_stops_nor_relaunches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A variable after its latch matters only if some library would have read it.

    It is set for child processes, also over the value of another profile, and undone.
    """
    name = "CUBLAS_WORKSPACE_CONFIG"
    profile = {"on_late": "error", "env": {name: ":4096:8"}}
    inner = {"guarantee": "repeatable", "env": {name: ":16:8"}}
    monkeypatch.setitem(process_state.LATCHES, "cuda", (lambda: True, "CUDA is initialised"))
    monkeypatch.setitem(process_state._ABSENCES, "cuda", lambda: NOT_HERE)

    with torchrepro.apply(profile) as applied:
        row = applied.report[f"env.{name}"]
        seen = [os.environ[name]]
        with torchrepro.apply(inner):
            seen.append(os.environ[name])
        seen.append(os.environ[name])
        monkeypatch.setitem(process_state._ABSENCES, "cuda", str)
        late = applied.report[f"env.{name}"]
    with pytest.raises(torchrepro.LateError):
        torchrepro.apply(profile)

    assert seen == [":4096:8", ":16:8", ":4096:8"]
    assert name not in os.environ
    assert (row.outcome, row.is_set, row.state) == (Outcome.UNSUPPORTED, True, ":4096:8")
    assert row.why == f"CUDA: {NOT_HERE}; set for child processes"
    assert late.outcome is Outcome.TOO_LATE


@pytest.mark.parametrize("built_for", ["cuda", "hip", ""])
@pytest.mark.parametrize(
    ("file", "driven"),
    [
        ("/dev/nvidia0", {"cuda"}),
        ("/dev/nvmap", {"cuda"}),
        ("/dev/kfd", {"hip"}),
        ("/dev/dxg", {"cuda", "hip"}),
        ("/dev/davinci0", set()),
        ("/dev/dri/renderD128", set()),
    ],
)
def test_a_gpu_needs_a_driver_and_a_torch_of_the_same_maker(
    monkeypatch: pytest.MonkeyPatch, file: str, driven: set[str], built_for: str
) -> None:
    """A torch built for the GPUs of another maker has no GPU, whatever drivers are installed."""
    monkeypatch.setattr(process_state, "glob", lambda pattern: fnmatch.filter([file], pattern))
    version = SimpleNamespace(**{each: "1" for each in (built_for,) if each})
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=version))

    assert ("CUDA" in absent_hardware()) == (built_for not in driven)
