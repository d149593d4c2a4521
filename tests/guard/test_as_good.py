"""A value that is equivalent for the guarantee is kept and reported, and is no drift."""

# ruff: noqa: PT012 - what raises is a step, or the end of the profile

import os
import sys
import sysconfig
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchrepro
from torchrepro.application.planner import plan
from torchrepro.knobs.catalogue import knobs_by_name
from torchrepro.lock.diff import differences_of
from torchrepro.manifest.contents import manifest, write_manifest
from torchrepro.profile.needs import NEEDS
from torchrepro.reporting import process_state
from torchrepro.reporting.outcomes import Outcome

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
GOOD = {  # variables that nothing in this process reads: what is asked for, and what is equivalent
    CUBLAS: (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring", "Tree", "Tree,Ring"),
    "NCCL_PROTO": ("Simple", "LL128"),
    "HCCL_DETERMINISTIC": ("true", "TRUE", "strict"),
    "HCCL_ALGO": ("level0:NA;level1:ring", "level0:NA;level1:NHR"),
    "LCCL_DETERMINISTIC": ("1", "true"),
}
BAD = {
    CUBLAS: (":0:0", ":4096:2", ""),
    "NCCL_ALGO": ("^Tree", "another", ""),
    "NCCL_PROTO": ("^LL", "Simples"),
    "HCCL_DETERMINISTIC": ("false", "0", "yes", ""),
    "HCCL_ALGO": ("ring", ""),
    "LCCL_DETERMINISTIC": ("0", "yes"),
}
CHOICES = st.sampled_from(
    [(name, text) for rows in (GOOD, BAD) for name, texts in rows.items() for text in texts]
)
LIBRARY = """
import os

def enable(**variables):
    os.environ.update(variables)

def clear_and_restore():
    old = os.environ.copy()
    os.environ.clear()
    os.environ.update(old)

def turn_off():
    import torch
    torch.use_deterministic_algorithms(False)
"""
FILE = os.path.join(sysconfig.get_path("purelib"), "some_framework.py")  # noqa: PTH118 - its text
ENABLE, RESTORE, TURN_OFF = f"{FILE}:5", f"{FILE}:10", f"{FILE}:14"


@pytest.fixture
def framework():
    """Return the functions of a library that is installed next to torch."""
    functions: dict[str, Any] = {"__name__": "some_framework"}
    exec(compile(LIBRARY, FILE, "exec"), functions)
    return functions


@pytest.fixture
def apply(clean_process):
    """Return `torchrepro.apply` under a guard that stops, in a process without the variables."""
    return partial(torchrepro.apply, "debug-strict", ["guard=error"])


def is_kept(name, text):
    """Return whether a plan keeps `text`, exported, if a profile requests another value."""
    os.environ[name] = text
    try:
        row = plan({"guarantee": "repeatable", "env": {name: GOOD[name][0]}}).report[f"env.{name}"]
    finally:
        del os.environ[name]
    assert row.outcome in (Outcome.UNCHANGED, Outcome.UNSUPPORTED, Outcome.CONFLICT)
    return row.outcome is not Outcome.CONFLICT


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(choice=CHOICES, hidden=st.sampled_from(["", process_state.NOT_HERE]))
def test_a_plan_keeps_exactly_the_texts_whose_write_is_no_drift(clean_process, choice, hidden):
    """A plan keeps an exported text exactly if the guard reports no drift when it is written.

    The report then has the value in effect, with any hardware.
    """
    name, text = choice
    values = {"guarantee": "repeatable", "env": {name: GOOD[name][0]}}
    with pytest.MonkeyPatch.context() as patch:
        for kind in process_state._ABSENCES:
            patch.setitem(process_state._ABSENCES, kind, lambda: hidden)
        kept = is_kept(name, text)
        with torchrepro.apply(values) as applied:
            os.environ[name] = text
            report = applied.report

    assert kept == (report.drift == ()) == (text in GOOD[name])
    assert report[f"env.{name}"].after == (text if kept else GOOD[name][0])
    changed = kept and text != GOOD[name][0]
    assert [rewrite.now for rewrite in report.as_good] == [text] * changed


def test_an_equivalent_value_meets_the_need_of_the_guarantee():
    """A value that is equivalent by a variable's row lowers no guarantee that needs the knob."""
    compared = 0
    for need in NEEDS:
        knob = knobs_by_name()[need.knob]
        if knob.enough is None or need.met_by is None:
            continue
        for text in (*GOOD.get(knob.variable, ()), *BAD.get(knob.variable, ())):
            if not knob.legal.complaint(text):
                assert knob.enough(text) == need.met_by(text), (need.knob, text)
                compared += 1
    assert compared > len(GOOD)


def test_a_value_that_its_library_refuses_is_drift_on_its_hardware(clean_process, monkeypatch):
    """HCCL refuses `1`: this is drift with an NPU; without one no library reads it.

    A workspace without a size is drift everywhere: cuBLAS accepts it, and sums in varying order.
    """
    drifted = {}
    for absence in ("", process_state.NOT_HERE):
        for kind in process_state._ABSENCES:
            monkeypatch.setitem(process_state._ABSENCES, kind, lambda absence=absence: absence)
        with torchrepro.apply(
            {"env": {"HCCL_DETERMINISTIC": "true", CUBLAS: ":4096:8"}}
        ) as applied:
            os.environ.update({"HCCL_DETERMINISTIC": "1", CUBLAS: ":0:0"})
            drifted[absence] = {drift.knob for drift in applied.report.drift}

    both = {"env.HCCL_DETERMINISTIC", f"env.{CUBLAS}"}
    assert drifted == {"": both, process_state.NOT_HERE: {f"env.{CUBLAS}"}}


@pytest.mark.parametrize("later", [":0:0", ":0:1"])
def test_the_first_write_is_reported_with_the_line_of_the_program(apply, framework, step, later):
    """The report names the first writer and the program's line, not code that restores a value.

    A later write does not hide the first one, which is reported as the first.
    """
    with pytest.raises(torchrepro.DriftError) as caught, apply():
        mine = next_line()
        framework["enable"](CUBLAS_WORKSPACE_CONFIG=":0:0")
        framework["clear_and_restore"]()
        os.environ[CUBLAS] = later
        step()

    (drift,) = caught.value.drift
    assert (drift.now, drift.where, drift.called) == (later, ENABLE, mine)
    assert drift.moved_on == ("first" in str(caught.value)) == (later != ":0:0")
    assert str(caught.value).count(ENABLE) == str(caught.value).count(mine) == 1
    assert RESTORE not in str(caught.value)


def test_an_equivalent_write_is_reported_although_a_library_restored_it(apply, framework, step):
    """A run continues with an equivalent value, and its report names the value with both lines."""
    with apply() as applied:
        mine = next_line()
        framework["enable"](CUBLAS_WORKSPACE_CONFIG=":16:8")
        framework["clear_and_restore"]()
        step()
        report = applied.report
        os.environ[CUBLAS] = ":4096:8"
        put_back = applied.report

    (rewrite,) = report.as_good
    assert (rewrite.was, rewrite.now) == (":4096:8", ":16:8")
    assert (rewrite.where, rewrite.called) == (ENABLE, mine)
    assert report.drift == put_back.drift == put_back.as_good == ()
    assert report.to_json()["as_good"][0]["now"] == ":16:8"
    assert mine in report.table()
    assert (report[f"env.{CUBLAS}"].after, put_back[f"env.{CUBLAS}"].after) == (":16:8", ":4096:8")


def test_all_changes_by_one_line_are_listed_once(apply, framework, step):
    """torch's flag and inductor's, which one call turns off, are one write in every message."""
    with pytest.raises(torchrepro.DriftError) as caught, apply() as applied:
        mine = next_line()
        framework["turn_off"]()
        step()

    assert {(drift.where, drift.called) for drift in caught.value.drift} == {(TURN_OFF, mine)}
    table = applied.report.table()
    assert table.count("the same line") == len(caught.value.drift) - 1
    assert str(caught.value).count(TURN_OFF) == str(caught.value).count(mine) == 1


def test_a_diff_shows_the_value_in_effect(clean_process, tmp_path):
    """Runs that each repeat under different workspaces differ in manifest and recording."""
    for name, text in (("plain", ":4096:8"), ("changed", ":16:8")):
        with (
            torchrepro.apply("debug-strict", ["guard=none"]) as applied,
            torchrepro.record(tmp_path / name / "trace"),
        ):
            torch.ones(2).sum()
            torchrepro.end_step()  # the recording has described the process by now
            os.environ[CUBLAS] = text
            write_manifest(tmp_path / name, manifest(applied.resolved, applied.report))

    for folder in ("", "trace"):
        found = differences_of(str(tmp_path / "plain" / folder), str(tmp_path / "changed" / folder))
        rows = [(each.key, each.left, each.right) for each in found.substantial]
        assert rows == [(f"env.{CUBLAS}", ":4096:8", ":16:8")]


def next_line():
    """Return the line after the caller's line."""
    frame = sys._getframe(1)
    return f"{frame.f_code.co_filename}:{frame.f_lineno + 1}"
