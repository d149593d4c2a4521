"""What is claimed of runs whose steps were recorded at several levels, or dropped in part."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from torchrepro import TraceError, compare
from torchrepro.console import as_text
from torchrepro.verdict.render import headline, verdict_parts

from .traces import Op, Step, chain, value, write

BY_STATE = "by parameters, gradients and losses"
STATISTICS = (1, 1.0, 1.0, 1.0, 1.0)


def _run(steps: int = 4, *, tail: bool = False) -> list[Step]:
    run = [
        Step(
            chain(4, step=number),
            losses=(1.0 + number,),
            parameters=value("parameters", number),
            gradients=value("gradients", number),
        )
        for number in range(steps)
    ]
    return [*run, Step(chain(6, step=steps), finished=False)] if tail else run


def _dropped(run: Sequence[Step], *which: int) -> list[Step]:
    return [replace(step, dropped=number in which) for number, step in enumerate(run)]


@pytest.mark.parametrize("dropped_in", ["A", "B", "A and B"])
def test_what_comes_after_the_last_step_may_be_dropped(tmp_path: Path, dropped_in: str) -> None:
    """Runs that are equal stay so, and it is said that their ends were not compared."""
    whole = _run(tail=True)
    left, right = (_dropped(whole, 4) if name in dropped_in else whole for name in "AB")

    verdict = compare(write(tmp_path / "a", left), write(tmp_path / "b", right))

    assert verdict.same
    note = f"what comes after the last step was dropped in {dropped_in}, and is not compared"
    assert note in verdict.notes
    assert not any("the records of" in note for note in verdict.notes)
    assert verdict.compared.ops == 16


def test_a_run_with_more_steps_than_one_whose_end_was_dropped_is_longer(tmp_path: Path) -> None:
    """Only what comes after the last step is left out, and no step with it."""
    left, right = _run(5), _dropped(_run(4, tail=True), 4)

    for one, other in ((left, right), (right, left), (_dropped(left, 4), right)):
        verdict = compare(write(tmp_path / "a", one), write(tmp_path / "b", other))
        assert not verdict.same
        for folder in "ab":
            (tmp_path / folder / "rank0.sqlite").unlink()


@pytest.mark.parametrize("kept", [0, 1])
def test_only_what_was_compared_is_counted(tmp_path: Path, kept: int) -> None:
    """Dropped records are none of the ops; how each step was compared stands in the answer."""
    dropped = _dropped(_run(), *range(kept, 4))
    verdict = compare(write(tmp_path / "a", dropped), write(tmp_path / "b", dropped))

    assert verdict.same
    assert verdict.compared.ops == 4 * kept
    said = headline(verdict)
    assert f"{4 - kept} {BY_STATE})" in said
    assert ("4 ops" in said) == bool(kept)
    text = " ".join(as_text(*verdict_parts(verdict)).split())
    unseen = "no step was compared op by op: what shows in no parameter, gradient or loss"
    assert (unseen in text) == (not kept)


def test_records_at_the_level_asked_for_are_counted_without_a_word_on_it(tmp_path: Path) -> None:
    """Where all steps are at level `step`, the answer says so once."""
    meta = {"level": "step"}
    verdict = compare(write(tmp_path / "a", _run(), meta), write(tmp_path / "b", _run(), meta))

    assert verdict.compared.ops == 16
    assert "(recorded at level step)" in headline(verdict)
    assert BY_STATE not in headline(verdict)
    assert not verdict.notes


def _with_statistics(losses: Sequence[float]) -> list[Step]:
    """Return a run of which step 0 is in full and the others have a loss at most."""
    full = tuple(replace(op, statistics=(STATISTICS,)) for op in chain(4))
    op = Op("parameter", "fc", "optimizer", outputs=(value("w"),))
    steps = [Step((op,), level="step", losses=(loss,) if loss else ()) for loss in losses]
    return [Step(full, losses=(1.0,)), *steps]


def test_within_a_tolerance_only_losses_are_claimed_of_steps_without_statistics(
    tmp_path: Path,
) -> None:
    """Neither parameters nor gradients of them are said to agree."""
    meta = {"statistics": True, "every": 9}
    left = write(tmp_path / "a", _with_statistics([1.0, 1.0, 1.0]), meta)
    right = write(tmp_path / "b", _with_statistics([1.0, 1.0, 2.0]), meta)

    same = compare(left, left, rtol=0.1)
    other = compare(left, right, rtol=0.1)

    assert same.compared.by == (("op by op", 1), ("by losses", 3))
    assert other.first is not None
    assert (other.first.step, other.first.op) == (3, "loss")
    assert other.agreed is not None
    assert (other.agreed.step, other.agreed.by, other.agreed.in_full) == (2, "by losses", 0)


def test_a_loss_is_enough_to_be_compared_within_a_tolerance(tmp_path: Path) -> None:
    """Without ops and without losses nothing is compared, and the message says what to record."""
    meta = {"statistics": True, "every": 9, "steps": (1, 3)}
    some = write(tmp_path / "some", _with_statistics([1.0, 1.0])[1:], meta, first=1)
    none = write(tmp_path / "none", _with_statistics([0.0, 0.0])[1:], meta, first=1)

    assert compare(some, some, rtol=0.1).same
    with pytest.raises(TraceError, match=r"(?s)nothing was recorded.*level op, in full"):
        compare(none, none, rtol=0.1)
