"""Each outcome says what really happened, and strict profiles stop on three of them."""

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


def test_a_write_that_does_not_hold_is_ineffective_and_stops_a_strict_profile(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    """What was written and cannot be read back is never called applied; nothing is left behind."""
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
    """A user's own value that serves the guarantee is kept and is no conflict, on any machine."""
    monkeypatch.setitem(process_state._ABSENCES, "npu", lambda: absence)
    monkeypatch.setenv("HCCL_DETERMINISTIC", exported)
    values = {"guarantee": "repeatable", "env": {"HCCL_DETERMINISTIC": "true"}}

    with torchrepro.apply(values) as applied:
        row = applied.report["env.HCCL_DETERMINISTIC"]

    assert (outcome, exported) == (row.outcome, row.after)


def test_an_exported_contradiction_is_kept_and_stops_a_strict_profile(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    """The user's value stays and is said; a strict profile names it before it changes anything."""
    monkeypatch.setenv(VARIABLE, ":0:0")
    before = world()

    with torchrepro.apply({"env": {VARIABLE: ":4096:8"}}) as applied:
        row = applied.report[f"env.{VARIABLE}"]
    with pytest.raises(torchrepro.ApplyError, match=VARIABLE):
        torchrepro.apply("debug-strict")

    assert (row.outcome, row.after) == (Outcome.CONFLICT, ":0:0")
    assert before == world()


def test_a_variable_that_torchrepro_has_set_is_not_the_users_until_the_program_changes_it() -> None:
    """A profile within may change what the one around it has set, and keeps what a program has."""
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
def test_what_a_knob_needs_may_be_set_by_the_profile_around(
    around: dict[str, Any], within: dict[str, Any], name: str
) -> None:
    """Without it nothing would act on the knob, which is then unsupported."""
    with torchrepro.apply(around):
        outcome = torchrepro.plan(within).report[name].outcome

    assert (outcome, torchrepro.plan(within).report[name].outcome) == (
        Outcome.APPLIED,
        Outcome.UNSUPPORTED,
    )


@settings(max_examples=40)
@given(data=st.data())
def test_the_plan_is_what_apply_does(data: st.DataObject, profiles: Any) -> None:
    """What a dry run shows is what apply reports, within another profile too.

    Only a write that torch refuses, or that does not hold, is known no sooner than it is made.
    Every knob that a profile names has one row, as an object, as a table and as JSON.
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


def test_of_two_knobs_that_are_one_switch_the_last_is_in_force(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What an earlier knob has moved is set again, and what a later one has moved is ineffective.

    Before torch 2.9 convolutions and RNNs had one float32 precision, as they have here.
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


def test_what_nothing_acts_on_is_written_and_has_a_standing_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A knob on which nothing acts here is ineffective, set all the same, and stops the strict."""
    monkeypatch.setattr(Knob, "inert", lambda *_: "nothing reads it")

    with torchrepro.apply(FLAG) as applied:
        row, flag = applied.report[NAME], torch.backends.cudnn.deterministic
    with pytest.raises(torchrepro.ApplyError, match="nothing reads it"):
        torchrepro.apply(FLAG | {"guarantee": "aligned"})

    assert (row.standing, row.why, flag) == ("ineffective", "nothing reads it", True)
    assert row.standing in STANDINGS
