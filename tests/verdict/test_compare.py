"""Two runs are the same, or the first difference is named with its origin."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchrepro
from torchrepro.trace import store
from torchrepro.trace.format import UNINITIALIZED_INPUT
from torchrepro.verdict.comparison import compare
from torchrepro.verdict.value import Kind, Verdict

from .traces import (
    Op,
    Run,
    Step,
    Writer,
    chain,
    compared,
    computed,
    diverged,
    first_of,
    follow,
    value,
    write,
)

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
def test_a_different_output_is_the_first_difference(step: int, place: int) -> None:
    """An op with a different output is the first difference; all later ones propagate it."""
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


@given(st.integers(0, 2), st.integers(0, OPS), st.booleans())
@settings(max_examples=40)
def test_an_additional_op_is_the_first_difference(step: int, place: int, is_used: bool) -> None:
    """An op that only one run has, whichever run it is, is the first difference and the only one.

    This also holds if everything after it reads its result and differs.
    """
    run, ops = _run(), _run()[step].ops
    read = ops[place - 1].outputs[0] if place else value("batch", step)
    more = computed(Op("aten::add", "layers.1", source="new.py:3"), read)
    later = follow(ops[place:], read, more.outputs[0]) if is_used else ops[place:]
    longer = [*run[:step], replace(run[step], ops=(*ops[:place], more, *later)), *run[step + 1 :]]

    for verdict in (compared(run, longer), compared(longer, run)):
        first = first_of(verdict)
        assert (first.kind, first.step, first.source) == (Kind.ONLY_ONE, step, "new.py:3")
        assert (first.left is None) != (first.right is None)
        assert (verdict.propagated, verdict.independent) == ((OPS - place) * is_used, 0)
        assert is_used or verdict.by_module == (("layers.1", 1),)


def test_the_map_counts_every_record_of_every_step() -> None:
    """In each step, equal and differing records of a module add up to its records."""
    run = _run()
    verdict = compared(run, _changed(run, 1, 7))
    cells = {(cell.step, cell.module): (cell.same, cell.differing) for cell in verdict.map}

    assert cells == {
        (step, f"layers.{layer}"): (3, 0) for step in range(3) for layer in range(4)
    } | {(1, "layers.2"): (1, 2), (1, "layers.3"): (0, 3)}


def test_a_second_cause_is_counted_separately() -> None:
    """A later op that differs although its inputs are equal is independent of the first one."""
    run = _run()
    verdict = compared(run, _changed(_changed(run, 1, OPS - 1), 2, OPS - 1))

    assert (verdict.propagated, verdict.independent) == (0, 1)


def test_a_differing_input_without_effect_is_not_a_difference() -> None:
    """A batch that affects no output, because a mask hides it, does not make runs differ."""
    mask = Op("aten::mul", inputs=(value("x"), value("zeros")), outputs=(value("zero"),))
    other = replace(mask, inputs=(value("y"), value("zeros")))

    assert compared([Step((mask,))], [Step((other,))]).same


def test_equal_numbers_of_different_sites_are_not_equal() -> None:
    """Each trace numbers its sites and arguments; comparison uses what the numbers refer to."""
    op = chain(1)[0]
    for other in (
        replace(op, argument="(_, 0.25)"),
        replace(op, op="aten::sub"),
        replace(op, shapes="float32[1, 2]"),
    ):
        verdict = compared([Step((replace(op, argument="(_, 0.5)"),))], [Step((other,))])

        assert not verdict.same


def test_a_shifted_source_line_is_not_a_difference() -> None:
    """A different line number, as after an edit elsewhere in the file, is not a difference."""
    run = _run()
    moved = [Step(tuple(replace(op, source="train.py:7") for op in step.ops)) for step in run]
    verdict = compared(run, moved)

    assert verdict.same
    assert verdict.compared.ops == 3 * OPS


def _beside(run: Run) -> Run:
    """Return a run in which another thread does the same as the main thread."""
    return [Step((*its.ops, *(replace(op, thread=1) for op in its.ops))) for its in run]


FIRST, (*OPS_OF_SECOND,), LAST = _run()[0], _run()[1].ops, _run()[2]
MORE = Op("aten::tanh", "layers.1", outputs=(value("more"),))
CHANGES: dict[str, tuple[Run, Run]] = {
    "same": (_run(), _run()),
    "less": (_run(), [FIRST, Step((*OPS_OF_SECOND[:5], *OPS_OF_SECOND[6:])), LAST]),
    "more": (_run(), [FIRST, Step((*OPS_OF_SECOND[:5], MORE, *OPS_OF_SECOND[5:])), LAST]),
    "other": (_run(), _changed(_run(), 1, 9)),
    "on another thread": (_beside(_run()), _beside(_changed(_run(), 1, 9))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_long_step_is_compared_in_parts(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of records in memory at once does not affect the verdict."""
    whole = compared(*CHANGES[change])
    monkeypatch.setattr(store, "MANY", 4)
    parts = compared(*CHANGES[change])

    def answer(verdict: Verdict) -> tuple[object, ...]:
        first = verdict.first and (verdict.first.step, verdict.first.kind, verdict.first.op)
        return first, verdict.propagated, verdict.map, verdict.by_module, verdict.compared

    assert answer(parts) == answer(whole)


def test_a_running_recording_is_compared_up_to_its_last_complete_step(tmp_path: Path) -> None:
    """Committed steps are compared, and the verdict says that the run still continues."""
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
    """Comparing two runs and showing the verdict works without importing torch."""
    write(tmp_path / "a", _run())
    write(tmp_path / "b", _changed(_run(), 1, 3))
    code = (
        "import sys; from torchrepro.verdict.comparison import compare;"
        "from torchrepro.verdict.page import page;"
        f"verdict = compare({str(tmp_path / 'a')!r}, {str(tmp_path / 'b')!r});"
        "assert verdict.advice; str(verdict); page(verdict); sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


BIAS, NUMPY, ANOTHER = map(value, ("bias", "numpy", "another"))


def _training(
    steps: int = 3,
    weight: bytes = b"",
    *,
    batch: bytes = b"",
    bias: bytes = b"",
    is_view: bool = False,
    later: tuple[Op, ...] = (),
) -> Run:
    """Return a training, optionally with a different weight, batch or bias in its last step."""
    trained, run = value("init"), []
    for step in range(steps):
        is_last = step == steps - 1
        trained = (is_last and weight) or trained
        data, its_bias = (is_last and batch) or value("batch", step), (is_last and bias) or BIAS
        transposed = Op("aten::t", "fc", inputs=(trained,))
        used = value("view", trained) if is_view else trained
        out = computed(Op("aten::addmm", "fc"), its_bias, data, used)
        gradient = computed(Op("aten::mm", "fc", "backward"), out.outputs[0])
        new = computed(Op("aten::add_", "", "optimizer"), trained, gradient.outputs[0])
        ops = (transposed, out, gradient, new) if is_view else (out, gradient, new)
        run.append(Step((*ops, *later) if is_last else ops))
        trained = new.outputs[0]
    return run


def _only(*ops: Op) -> Run:
    return [Step(ops)]


X, Y, A, B = (value(name) for name in "xyab")
DROPOUT = replace(computed(Op("aten::dropout"), X), argument="(_, 0.5, True)")
BATCH = Op("DataLoader", phase="data", outputs=(X,))
ADD = computed(Op("aten::add", shapes="float32[4]"), X)
READS = computed(Op("aten::add"), UNINITIALIZED_INPUT, X)
DRAWS = computed(Op("aten::bernoulli_.float"), UNINITIALIZED_INPUT)
ONE, TWO = (computed(Op("aten::relu", "one"), each) for each in (A, B))
MOVED, MORE, FIRST, LAST = (
    computed(Op(f"aten::{name}"), value(name)) for name in ("view", "exp", "relu", "sum")
)
ONES = Op("aten::ones", outputs=(A,))
LATER = (Op("aten::cat", outputs=(ANOTHER, value("batch", 2))),)  # no origin: too late

CASES: dict[str, tuple[Run, Run, Kind, int, str, str]] = {
    "another argument, although it makes no odds this time": (
        *(_only(DROPOUT), _only(replace(DROPOUT, argument="(_, 0.4, True)"))),
        *(Kind.ARGUMENT, 0, "aten::dropout", "(_, 0.5, True) and (_, 0.4, True)"),
    ),
    "another shape of the same bytes": (
        *(_only(ADD), _only(replace(ADD, shapes="float32[2, 2]"))),
        *(Kind.OUTPUTS, 0, "aten::add", ""),
    ),
    "another batch as it enters the main process": (
        *(_only(BATCH), _only(replace(BATCH, outputs=(Y,))), Kind.DATA, 0, "DataLoader"),
        "the batches differ as they enter the main process",
    ),
    "another result of the same program": (
        _only(ONE, TWO, computed(Op("aten::sum"), *ONE.outputs)),
        _only(ONE, TWO, computed(Op("aten::sum"), *TWO.outputs)),
        *(Kind.ARGUMENT, 0, "aten::sum"),
        "input 0 of aten::sum is a different tensor: written by aten::relu in one at step 0 "
        "(forward) in A, by aten::relu in one at step 0 (forward) in B",
    ),
    "a tensor more": (
        *(_only(computed(Op("aten::cat"), A, B)), _only(computed(Op("aten::cat"), A))),
        *(Kind.ARGUMENT, 0, "aten::cat", "2 tensors as input and 1"),
    ),
    "memory as the allocator gave it": (
        *(_only(READS), _only(replace(READS, outputs=(Y,))), Kind.OUTPUTS, 0, "aten::add"),
        "input 0 is uninitialized memory",
    ),
    "memory that an op only writes, which is not blamed": (
        *(_only(DRAWS), _only(replace(DRAWS, outputs=(Y,)))),
        *(Kind.OUTPUTS, 0, "aten::bernoulli_.float", ""),
    ),
    "an op that stands where it ran though its neighbour moved": (
        *(_only(FIRST, LAST, MOVED), _only(MOVED, MORE, FIRST, LAST)),
        *(Kind.ONLY_ONE, 0, "aten::exp", "only B has it; A continues with aten::relu"),
    ),
    "an op left out, though one of its name was added elsewhere": (
        *(_only(MORE, FIRST, LAST, MOVED), _only(FIRST, LAST, MOVED, replace(MORE, outputs=(X,)))),
        *(Kind.ONLY_ONE, 0, "aten::exp", "only A has it; B continues with aten::relu"),
    ),
    "an op in place of another": (
        *(_only(ONE), _only(computed(Op("aten::linear", "fc"), A))),
        *(Kind.ONLY_ONE, 0, "aten::relu", "only A has it; B continues with aten::linear in fc"),
    ),
    "data that no loader handed over": (
        *(_training(later=LATER), _training(batch=ANOTHER, later=LATER)),
        *(Kind.DATA, 2, "aten::addmm"),
        "input 1 of aten::addmm differs, and no recorded op wrote it: "
        "a batch, a constant, or an initial parameter",
    ),
    **{
        f"a weight that numpy wrote in {changed}, {shown}": (
            *(_training(weight=NUMPY * (name == changed), is_view=is_view) for name in "AB"),
            *(Kind.INPUT, 2, "aten::addmm"),
            f"in {kept} {shown} is the output of aten::add_ at step 1 (optimizer); "
            f"in {changed} something outside torch has changed it since",
        )
        for kept, changed in ("AB", "BA")
        for shown, is_view in (("input 2 of aten::addmm", False), ("input 0 of aten::t", True))
    },
    "a weight that numpy wrote in both": (
        *(_training(weight=value(run, "numpy")) for run in "ab"),
        *(Kind.INPUT, 2, "aten::addmm"),
        "input 2 of aten::addmm was trained until the previous step; in both runs something "
        "outside torch has changed it since",
    ),
    "a frozen weight that numpy wrote": (
        *(_training(), _training(bias=NUMPY)),
        *(Kind.INPUT, 2, "aten::addmm"),
        "in A input 0 of aten::addmm is unchanged since the previous step; "
        "in B something outside torch has changed it",
    ),
    "what equals a constant by chance": (
        *(_only(ONES, computed(Op("aten::mul"), A, mask)) for mask in (A, value("mask"))),
        *(Kind.DATA, 0, "aten::mul"),
        "in A input 1 of aten::mul equals the output of aten::ones at step 0 (forward), maybe by "
        "chance; in B no recorded op wrote it",
    ),
}
"""Two runs; what kind of difference comes first, its step and op, and what is said of it."""


@pytest.mark.parametrize("case", CASES)
def test_the_first_difference_is_described(case: str) -> None:
    """The verdict has the kind of difference, the op, and a sentence with details."""
    left, right, *expected = CASES[case]
    first = diverged(left, right)

    assert [first.kind, first.step, first.op, first.what] == expected


def test_a_meta_tensor_of_one_run_is_an_additional_op(tmp_path: Path) -> None:
    """A meta tensor has no bytes: creating one does not count as using another device."""
    for run in ("left", "right"):
        with torchrepro.record(tmp_path / run):
            if run == "left":
                torch.zeros(3, device="meta")
            torch.ones(3).sin()
    first = first_of(torchrepro.compare(tmp_path / "left", tmp_path / "right"))

    assert (first.kind, first.op) == (Kind.ONLY_ONE, "aten::zeros")


def test_parameters_may_differ_although_no_op_does() -> None:
    """A change to a parameter after its last use shows in its digest at the end of the step."""
    run = _training()
    first = diverged(*([*run[:2], replace(run[2], parameters=value(side))] for side in "ab"))

    assert (first.step, first.phase, first.op) == (2, "optimizer", "parameters")
