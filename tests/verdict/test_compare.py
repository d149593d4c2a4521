"""Two runs are the same, or the first difference is named: its step, its op, and what follows."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrepro.trace import store
from torchrepro.verdict.comparison import compare
from torchrepro.verdict.value import Kind, Verdict

from .traces import Op, Run, Step, Writer, chain, compared, computed, first_of, follow, value, write

OPS = 12


def _run(steps: int = 3, ops: int = OPS) -> Run:
    return [Step(chain(ops, step=step), losses=(1.5,)) for step in range(steps)]


def _changed(run: Run, step: int, place: int) -> Run:
    ops = run[step].ops
    other = computed(ops[place], *ops[place].inputs, salt="other")
    later = follow(ops[place + 1 :], ops[place].outputs[0], other.outputs[0])
    return [*run[:step], replace(run[step], ops=(*ops[:place], other, *later)), *run[step + 1 :]]


def test_a_run_is_the_same_as_itself(tmp_path: Path) -> None:
    """Every step, op and byte is compared, and nothing differs."""
    left, right = write(tmp_path / "a", _run()), write(tmp_path / "b", _run())

    verdict = compare(left, right)

    assert verdict.same
    assert verdict.first is None
    assert (verdict.left, verdict.right) == (str(left), str(right))
    assert (verdict.compared.steps, verdict.compared.ops, verdict.compared.ranks) == (3, 36, 1)
    assert verdict.compared.bytes == 8 * 36
    assert verdict.losses == tuple((step, 1.5, 1.5) for step in range(3))
    assert sum(cell.same for cell in verdict.map) == 36
    assert sum(cell.differing for cell in verdict.map) == 0
    assert verdict.notes == ()


@given(st.integers(0, 2), st.integers(0, OPS - 1))
@settings(max_examples=30)
def test_another_output_is_found_where_it_is(step: int, place: int) -> None:
    """An op that computes something else is the first difference, all after it propagates it."""
    run = _run()
    verdict = compared(run, _changed(run, step, place))

    first, op = first_of(verdict), run[step].ops[place]
    assert (first.kind, first.step) == (Kind.OUTPUTS, step)
    assert (first.op, first.module) == (op.op, op.module)
    assert first.left is not None
    assert first.left.output_fingerprints == (op.outputs[0].hex(),)
    assert first.left.input_fingerprints == tuple(each[:8].hex() for each in op.inputs)
    assert (verdict.propagated, verdict.independent) == (OPS - place - 1, 0)
    assert sum(count for _, count in verdict.by_module) == OPS - place
    assert verdict.by_module[0][0] == first.module


@given(st.integers(0, 2), st.integers(0, OPS), st.sampled_from(("aten::add", "aten::tanh")))
@settings(max_examples=40)
def test_an_op_more_is_found_where_it_is(step: int, place: int, op: str) -> None:
    """An op that only one run has is the difference, whichever run it is, and the only one."""
    run = _run()
    more = Op(op, "layers.1", inputs=(value("x"),), outputs=(value("new"),), source="new.py:3")
    ops = run[step].ops
    longer = [
        *run[:step],
        replace(run[step], ops=(*ops[:place], more, *ops[place:])),
        *run[step + 1 :],
    ]

    for verdict in (compared(run, longer), compared(longer, run)):
        first = first_of(verdict)
        assert (first.kind, first.step, first.source) == (Kind.ONLY_ONE, step, "new.py:3")
        assert (first.left is None) != (first.right is None)
        assert (verdict.propagated, verdict.independent) == (0, 0)
        assert verdict.by_module == (("layers.1", 1),)


@given(st.integers(0, OPS - 1))
@settings(max_examples=15)
def test_an_op_more_whose_result_all_else_uses_is_found(place: int) -> None:
    """Where everything after an op that was added differs, the op is still what is named."""
    run = _run()
    ops = run[1].ops
    read = ops[place - 1].outputs[0] if place else value("batch", 1)
    more = computed(Op("aten::clamp", source="new.py:3"), read)
    later = follow(ops[place:], read, more.outputs[0])
    verdict = compared(run, [run[0], Step((*ops[:place], more, *later)), run[2]])

    assert (first_of(verdict).kind, first_of(verdict).op) == (Kind.ONLY_ONE, "aten::clamp")
    assert verdict.propagated == OPS - place


def test_the_map_counts_every_record_of_every_step() -> None:
    """In each step, what agrees and what differs of a module adds up to its records."""
    run = _run()
    verdict = compared(run, _changed(run, 1, 7))
    cells = {(cell.step, cell.module): (cell.same, cell.differing) for cell in verdict.map}

    assert cells == {
        (step, f"layers.{layer}"): (3, 0) for step in range(3) for layer in range(4)
    } | {(1, "layers.2"): (1, 2), (1, "layers.3"): (0, 3)}


def test_a_second_cause_is_counted_apart() -> None:
    """A later op that differs although its inputs are the same is independent of the first."""
    run = _run()
    verdict = compared(run, _changed(_changed(run, 1, OPS - 1), 2, OPS - 1))

    assert (verdict.propagated, verdict.independent) == (0, 1)


def test_inputs_that_change_no_output_are_no_difference() -> None:
    """A batch that nothing comes of, as where a mask hides it, does not make runs differ."""
    mask = Op("aten::mul", inputs=(value("x"), value("zeros")), outputs=(value("zero"),))
    other = replace(mask, inputs=(value("y"), value("zeros")))

    assert compared([Step((mask,))], [Step((other,))]).same


def test_numbers_that_mean_something_else_do_not_pass_for_the_same() -> None:
    """Two traces number sites and arguments each for itself; what counts is what they stand for."""
    op = chain(1)[0]
    for other in (
        replace(op, argument="(_, 0.25)"),
        replace(op, op="aten::sub"),
        replace(op, shapes="float32[1, 2]"),
    ):
        verdict = compared([Step((replace(op, argument="(_, 0.5)"),))], [Step((other,))])

        assert not verdict.same


def test_the_lines_of_a_program_may_move() -> None:
    """Another source line, as after an edit elsewhere in the file, is no difference."""
    run = _run()
    moved = [Step(tuple(replace(op, source="train.py:7") for op in step.ops)) for step in run]
    verdict = compared(run, moved)

    assert verdict.same
    assert verdict.compared.ops == 3 * OPS


FIRST, (*OPS_OF_SECOND,), LAST = _run()[0], _run()[1].ops, _run()[2]
MORE = Op("aten::tanh", "layers.1", outputs=(value("more"),))
CHANGES: dict[str, Run] = {
    "same": _run(),
    "less": [FIRST, Step((*OPS_OF_SECOND[:5], *OPS_OF_SECOND[6:])), LAST],
    "more": [FIRST, Step((*OPS_OF_SECOND[:5], MORE, *OPS_OF_SECOND[5:])), LAST],
    "other": _changed(_run(), 1, 9),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_long_step_is_compared_in_parts(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many records are held at once has no influence on the verdict."""
    whole = compared(_run(), CHANGES[change])
    monkeypatch.setattr(store, "MANY", 4)
    parts = compared(_run(), CHANGES[change])

    def answer(verdict: Verdict) -> tuple[object, ...]:
        first = verdict.first and (verdict.first.step, verdict.first.kind, verdict.first.op)
        return first, verdict.propagated, verdict.map, verdict.by_module

    assert answer(parts) == answer(whole)


def test_a_run_that_still_writes_is_compared_up_to_its_last_whole_step(tmp_path: Path) -> None:
    """What has been committed is compared, and the verdict says that the run goes on."""
    run = _run()
    done = write(tmp_path / "done", run)
    writer = Writer(tmp_path / "running", {"finished": None})
    for number, step in enumerate(run[:2]):
        writer.step(number, step)

    verdict = compare(done, tmp_path / "running")
    writer.step(2, run[2])
    writer.store.close()

    assert (first_of(verdict).kind, first_of(verdict).step) == (Kind.ENDED, 2)
    assert verdict.compared.steps == 2
    assert any("B was killed or still runs" in note for note in verdict.notes)


def test_comparing_imports_no_torch(tmp_path: Path) -> None:
    """Two runs are compared on a machine, and in a moment, that has no torch to spare."""
    write(tmp_path / "a", _run())
    write(tmp_path / "b", _changed(_run(), 1, 3))
    code = (
        "import sys; from torchrepro.verdict.comparison import compare;"
        f"compare({str(tmp_path / 'a')!r}, {str(tmp_path / 'b')!r});"
        "sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
