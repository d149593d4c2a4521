"""Each outcome reports the actual effect, and strict profiles stop on three outcomes."""

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchrepro
from torchrepro.knobs.knob import Attribute, Knob
from torchrepro.reporting import process_state
from torchrepro.reporting.outcomes import STANDINGS, Outcome
from torchrepro.reporting.process_state import NOT_HERE

FLAG = {"backends": {"cudnn": {"deterministic": True}}}
NAME = "backends.cudnn.deterministic"
VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
World = Callable[[], dict[str, Any]]


def test_a_write_without_effect_is_ineffective_and_stops_a_strict_profile(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    """A value that cannot be read back is never `applied`; a strict profile leaves no change."""
    before = world()
    monkeypatch.setattr(Attribute, "write", lambda self, value: None)

    with torchrepro.apply(FLAG) as applied:
        assert applied.report[NAME].outcome is Outcome.INEFFECTIVE
    with pytest.raises(torchrepro.ApplyError, match="ineffective") as caught:
        torchrepro.apply(FLAG | {"guarantee": "aligned"})

    assert caught.value.report is not None
    assert before == world()


@pytest.mark.parametrize("exported", ["strict", "TRUE", "true"])
@pytest.mark.parametrize(
    ("absence", "outcome"), [("", Outcome.UNCHANGED), (NOT_HERE, Outcome.UNSUPPORTED)]
)
def test_an_exported_equivalent_value_is_unchanged(
    exported: str, absence: str, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value of the user that gives the same guarantee is kept without a conflict."""
    monkeypatch.setitem(process_state._ABSENCES, "npu", lambda: absence)
    monkeypatch.setenv("HCCL_DETERMINISTIC", exported)
    values = {"guarantee": "repeatable", "env": {"HCCL_DETERMINISTIC": "true"}}

    with torchrepro.apply(values) as applied:
        row = applied.report["env.HCCL_DETERMINISTIC"]

    assert (outcome, exported) == (row.outcome, row.after)


def test_an_exported_contradiction_is_kept_and_stops_a_strict_profile(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    """The value of the user is kept and reported; a strict profile raises before any change."""
    monkeypatch.setenv(VARIABLE, ":0:0")
    before = world()

    with torchrepro.apply({"env": {VARIABLE: ":4096:8"}}) as applied:
        row = applied.report[f"env.{VARIABLE}"]
    with pytest.raises(torchrepro.ApplyError, match=VARIABLE):
        torchrepro.apply("debug-strict")

    assert (row.outcome, row.after) == (Outcome.CONFLICT, ":0:0")
    assert before == world()


def test_an_inner_profile_overrides_variables_of_the_outer_but_not_of_the_program() -> None:
    """An inner profile can change variables of the outer one, but keeps those of the program."""
    outer, inner = ({"env_extra": {"TEST_OF_TORCHREPRO": text}} for text in "12")
    strict = {"guarantee": "repeatable", **inner}

    with torchrepro.apply(outer):
        with torchrepro.apply(strict) as applied:
            row = applied.report["env_extra.TEST_OF_TORCHREPRO"]
        os.environ["TEST_OF_TORCHREPRO"] = "3"
        since = torchrepro.plan(inner).report["env_extra.TEST_OF_TORCHREPRO"]

    assert (row.outcome, row.before, row.after) == (Outcome.APPLIED, "1", "2")
    assert (since.outcome, since.after) == (Outcome.CONFLICT, "3")


@pytest.mark.parametrize(
    ("around", "within", "name"),
    [
        ({"seed": 1}, {"dataloader": {"seeding": "auto"}}, "dataloader.seeding"),
        (
            {"backends": {"torch": {"deterministic_algorithms": "error"}}},
            {"device": {"fallback": "cpu"}},
            "device.fallback",
        ),
    ],
)
def test_the_outer_profile_can_set_what_a_knob_needs(
    around: dict[str, Any], within: dict[str, Any], name: str
) -> None:
    """Without the needed setting the knob is unsupported."""
    with torchrepro.apply(around):
        outcome = torchrepro.plan(within).report[name].outcome

    assert (outcome, torchrepro.plan(within).report[name].outcome) == (
        Outcome.APPLIED,
        Outcome.UNSUPPORTED,
    )


@settings(max_examples=40)
@given(data=st.data())
def test_the_plan_shows_what_apply_does(data: st.DataObject, profiles: Any) -> None:
    """A dry run shows the report of apply, within another profile too.

    Only a write that torch refuses, or that has no effect, is unknown before it happens. Every
    knob of the profile has one row, in Python, in the table and in JSON.
    """
    try:
        with torchrepro.apply(data.draw(profiles)):
            values = data.draw(profiles)
            planned = torchrepro.plan(values).report
            with torchrepro.apply(values) as applied:
                report = applied.report
    except torchrepro.ProfileError:
        return
    named = [knob.name for knob, _ in applied.resolved.settings()]
    decoded = json.loads(json.dumps(report.to_json()))

    for expected, row in zip(planned, report, strict=True):
        tried = row.outcome in (Outcome.FAILED, Outcome.INEFFECTIVE)
        assert expected == row or (tried and expected.before == row.before), row
        assert (row.knob in report.table()) != bool(row.absent)
    assert named == [row.knob for row in report] == [row["knob"] for row in decoded["knobs"]]
    assert sum(report.counts.values()) == len(report) == len(set(named))


def test_the_last_of_two_knobs_for_one_switch_wins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A knob changed by an earlier one is set again; changed by a later one, it is ineffective.

    Before torch 2.9 convolutions and RNNs shared one float32 precision, as in this test.
    """
    conv, rnn = (f"backends.cudnn.{name}_fp32_precision" for name in ("conv", "rnn"))
    monkeypatch.setattr("torchrepro.knobs.torch_state._finest", lambda path: None)
    values = {"backends": {"cudnn": {"conv_fp32_precision": "ieee", "rnn_fp32_precision": "tf32"}}}
    planned = [step.expected.outcome for step in torchrepro.plan(values).steps]
    assert torch.backends.cudnn.allow_tf32

    with torchrepro.apply(values) as applied:
        rows = applied.report
        allowed = torch.backends.cudnn.allow_tf32

    assert allowed
    assert planned == [Outcome.APPLIED, Outcome.UNCHANGED]
    assert rows[conv].outcome is Outcome.INEFFECTIVE
    assert (rows[rnn].is_set, rows[rnn].before, rows[rnn].after) == (True, "ieee", "tf32")


def test_a_knob_without_effect_is_set_and_ineffective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A knob that no library uses is set, counts as ineffective, and stops strict profiles."""
    monkeypatch.setattr(Knob, "inert", lambda *_: "nothing reads it")

    with torchrepro.apply(FLAG) as applied:
        row, flag = applied.report[NAME], torch.backends.cudnn.deterministic
    with pytest.raises(torchrepro.ApplyError, match="nothing reads it"):
        torchrepro.apply(FLAG | {"guarantee": "aligned"})

    assert (row.standing, row.why, flag) == ("ineffective", "nothing reads it", True)
    assert row.standing in STANDINGS
