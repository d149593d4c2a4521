"""What verify leaves out: a line that somebody names, and steps of a program of hours."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrepro.errors import TraceError
from torchrepro.trace.reader import read_run
from torchrepro.verification.result import verification_json

pytestmark = pytest.mark.usefixtures("forked")

METER = "seconds = torch.tensor(__import__('time').time_ns() % 16777213).mul(2)"
ANOTHER = "batch[0, 0] = __import__('time').time_ns() % 16777213"


def _line_of(text: str) -> str:
    lines = Path("train.py").read_text(encoding="utf-8").splitlines()
    return f"train.py:{next(n for n, line in enumerate(lines, 1) if text in line)}"


def test_a_meter_can_be_left_out(training, verified):
    """With the line of a meter left out the runs are the same, and the answer says what was."""
    command = training(METER)
    found = verified(command, ignore=[_line_of("time_ns")])

    assert found.same
    assert found.verdict.notes[0] == f"left out: 6 records of {_line_of('time_ns')}"
    assert verification_json(found)["left_out"][0]["records"] == 6


def test_a_meter_reaches_nothing(training, verified):
    """Without that the runs differ, in nothing that is trained."""
    found = verified(training(METER), closer=False)

    assert not found.same
    assert verification_json(found)["reaches"] is False


def test_a_line_that_reaches_the_loss_cannot_be_left_out(training, verified):
    """A difference that reaches the loss is found, whatever is left out."""
    command = training(ANOTHER)
    found = verified(command, closer=False, ignore=[_line_of("time_ns")])

    assert not found.same
    assert found.verdict.reaches


def test_a_line_without_a_record_is_refused(training, verified):
    """A line that computes nothing is refused, with lines that do."""
    with pytest.raises(TraceError, match=r"nothing was recorded of this line") as refused:
        verified(training(), ignore=["train.py:1"])

    assert "legal: train.py:4" in str(refused.value)


def test_only_some_steps_are_recorded_in_full(training, verified):
    """`every` and `max_size` are those of a recording; a divergence is still looked at closely."""
    found = verified(training(ANOTHER), every=2, max_size="50MB")

    levels = [row.level for row in read_run(found.runs[0].folder)[0].steps.values()]
    assert levels[:3] == ["op", "step", "op"]
    assert read_run(found.runs[0].folder)[0].meta["max_size"] == 50_000_000
    assert not found.same
    assert found.verdict.first is not None
    assert found.verdict.first.elements
