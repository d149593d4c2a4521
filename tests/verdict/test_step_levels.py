"""Comparison of runs whose steps have different levels, or dropped records."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from torchrepro import TraceError, compare
from torchrepro.ground.console import as_text
from torchrepro.verdict.page import page
from torchrepro.verdict.render import headline, verdict_parts
from torchrepro.verdict.value import Agreed, Kind

from .traces import Op, Step, chain, compared, diverged, first_of, value, write

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
def test_records_after_the_last_step_may_be_dropped(dropped_in: str) -> None:
    """Equal runs stay the same, and a note says that their ends were not compared."""
    whole = _run(tail=True)
    verdict = compared(*(_dropped(whole, 4) if name in dropped_in else whole for name in "AB"))

    assert verdict.same
    note = f"records after the last step were dropped in {dropped_in}, and are not compared"
    assert note in verdict.notes
    assert not any("the records of" in note for note in verdict.notes)
    assert verdict.compared.ops == 16


@pytest.mark.parametrize("levels", [("op", "op"), ("step", "op")])
def test_arguments_of_an_optimizer_outlive_the_records_of_their_step(
    levels: tuple[str, str],
) -> None:
    """Where no records say so any longer, a digest says that an optimizer was given others."""
    runs = [_dropped(_run(), 1), _run()]
    for side, (run, level) in enumerate(zip(runs, levels, strict=True)):
        run[1] = replace(run[1], arguments=value("arguments", side), level=level)
    first = diverged(*runs)

    assert (first.step, first.kind, first.op) == (1, Kind.ARGUMENT, "optimizer.step()")


def test_a_run_with_more_steps_than_one_whose_end_was_dropped_is_longer() -> None:
    """Only records after the last step are ignored, and no step."""
    left, right = _run(5), _dropped(_run(4, tail=True), 4)

    for runs in ((left, right), (right, left), (_dropped(left, 4), right)):
        assert not compared(*runs).same


@pytest.mark.parametrize("kept", [0, 1])
def test_only_compared_records_are_counted(kept: int) -> None:
    """Dropped records do not count as ops; the answer says how each step was compared."""
    dropped = _dropped(_run(), *range(kept, 4))
    verdict = compared(dropped, dropped)

    assert verdict.same
    assert verdict.compared.ops == 4 * kept
    said = headline(verdict)
    assert f"{4 - kept} {BY_STATE})" in said
    assert ("4 ops" in said) == bool(kept)
    text = " ".join(as_text(*verdict_parts(verdict)).split())
    unseen = "no step was compared op by op: a difference that affects no parameter, gradient or"
    assert (unseen in text) == (not kept)


def test_records_at_the_requested_level_are_counted_without_a_note() -> None:
    """If all steps are at the level `step`, the answer says so only once."""
    verdict = compared(_run(), _run(), {"level": "step"})

    assert verdict.compared.ops == 16
    assert "(recorded at level step)" in headline(verdict)
    assert BY_STATE not in headline(verdict)
    assert not verdict.notes


def _with_statistics(losses: Sequence[float]) -> list[Step]:
    """Return a run with all of step 0, and at most a loss of other steps."""
    full = tuple(replace(op, statistics=(STATISTICS,)) for op in chain(4))
    op = Op("parameter", "fc", "optimizer", outputs=(value("w"),))
    steps = [Step((op,), level="step", losses=(loss,) if loss else ()) for loss in losses]
    return [Step(full, losses=(1.0,)), *steps]


def test_only_losses_of_steps_without_statistics_are_compared_within_a_tolerance() -> None:
    """The answer does not claim that their parameters or gradients agree."""
    meta = {"statistics": True, "every": 9}
    left, right = (_with_statistics([1.0, 1.0, last]) for last in (1.0, 2.0))

    same = compared(left, left, meta, rtol=0.1)
    other = compared(left, right, meta, rtol=0.1)

    assert same.compared.by == (("op by op", 1), ("by losses", 3))
    assert any("3 steps have no statistics" in note for note in same.notes)
    assert (first_of(other).step, first_of(other).op) == (3, "loss")
    assert other.agreed is not None
    assert (other.agreed.step, other.agreed.by, other.agreed.in_full) == (2, "by losses", 0)


def test_losses_are_sufficient_to_compare_within_a_tolerance() -> None:
    """Without ops and losses nothing can be compared, and the message says what to record."""
    meta = {"statistics": True, "every": 9, "steps": (1, 3)}
    some, none = (_with_statistics([loss, loss])[1:] for loss in (1.0, 0.0))

    assert compared(some, some, meta, first=1, rtol=0.1).same
    with pytest.raises(TraceError, match=r"(?s)nothing was recorded.*level op, in full"):
        compared(none, none, meta, first=1, rtol=0.1)


def _by_state(*losses: float, gradient: str = "") -> list[Step]:
    """Return a run at level `step`, optionally with a different last gradient."""
    last = len(losses) - 1
    return [
        Step(
            (
                Op("gradient", "fc", "backward", outputs=(value(step, gradient * (step == last)),)),
                Op("parameter", "fc", "optimizer", outputs=(value("parameter", step),)),
            ),
            losses=(loss,),
        )
        for step, loss in enumerate(losses)
    ]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_loss_decides_in_which_pass_a_step_diverged_at_the_latest(where: str) -> None:
    """A differing gradient is the divergence only if the loss of its step is equal."""
    other = _by_state(1.0, 3.0 if where == "forward" else 2.0, gradient="other")
    verdict = compared(_by_state(1.0, 2.0), other, {"level": "step"})
    first = first_of(verdict)

    assert (first.phase, first.kind) == (where, Kind.VALUES)
    assert f"at the latest in the {where} pass" in headline(verdict)
    assert "equal inputs" not in as_text(*verdict_parts(verdict))
    html = page(verdict)
    assert f"{where}, at the latest" in html
    assert "equal inputs" not in html
    assert verdict.advice is not None
    if where == "forward":
        assert (first.what, first.source) == ("its loss differs: 2 and 3", "train.py:9")
        assert "losses differ" in verdict.advice.cause
    else:
        assert (first.op, first.module) == ("gradient", "fc")
        assert "gradients differ" in verdict.advice.cause
        assert (verdict.propagated, verdict.independent) == (0, 0)


def test_the_rank_with_a_differing_loss_is_named(tmp_path: Path) -> None:
    """Gradients that ranks sum differ on all of them, and do not show the origin."""
    for name, losses in (("a", (2.0, 2.0)), ("b", (2.0, 3.0))):
        for rank, loss in enumerate(losses):
            run = _by_state(1.0, loss, gradient=name)
            write(tmp_path / name, run, {"level": "step", "rank": rank, "world_size": 2})

    verdict = compare(tmp_path / "a", tmp_path / "b")

    assert (first_of(verdict).rank, first_of(verdict).op) == (1, "loss")
    assert headline(verdict).endswith("on rank 1")
    assert verdict.agreed == Agreed(0, BY_STATE, None)


def test_the_end_of_a_run_does_not_count_as_a_differing_generator_state() -> None:
    """One run may draw in its next step what the other draws after its last step, or never."""
    drawn = [replace(step, random={"torch": f"{at}"}) for at, step in enumerate(_run(6))]
    ends = [*drawn[:4], Step((), finished=False, random={"torch": "other"})]
    first = diverged(_dropped(drawn, 4), ends, {"knobs": {"seed.torch": "1"}})

    assert (first.kind, first.step) == (Kind.ENDED, 4)


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("kept", [False, True])
def test_a_closer_look_is_proposed_only_if_it_shows_more(first: int, *, kept: bool) -> None:
    """No command, if both runs have all ops of this step and the last, and their tensors."""
    run = _run(4)
    other = [*run[:2], replace(run[2], ops=chain(4, step=2, weights="v"))]
    meta = {"keep": ["layers.0"] * kept, "steps": (first, 3)}
    verdict = compared(run[first:3], other[first:], meta, first=first)

    assert verdict.advice is not None
    closer = verdict.advice.closer
    assert ("--steps 1:3" in closer) == (first == 2 or not kept)
    assert ("--keep layers.0" in closer) == (first == 1 and not kept)


@pytest.mark.parametrize(("by", "begins"), [("run", "torchrepro run p "), ("program", "")])
def test_a_program_that_records_itself_gets_the_call(by: str, begins: str) -> None:
    """If `run` recorded, its command is proposed, otherwise the call for the program."""
    run = _run(3)
    other = [*run[:2], replace(run[2], ops=chain(4, step=2, weights="v"))]
    verdict = compared(run, other, {"recorded_by": by, "profile": "p"})
    closer = verdict.advice.closer  # type: ignore[union-attr]

    folder = f"{verdict.left}-closer"
    call = f"torchrepro.record({folder!r}, steps=(1, 3), keep=['layers.0'])"
    assert closer.startswith(begins) if begins else closer == call
    assert ("--keep" in closer) == bool(begins)
