"""Ops of threads other than the main thread are compared over the whole run."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrepro.trace.format import PARTLY
from torchrepro.verdict.value import Kind

from .traces import Op, Run, Step, chain, compared, computed, diverged, first_of, value

STEPS = 5


def _work(batches: Iterable[int], thread: int = 1) -> list[Op]:
    """Return the ops of a thread that prepares batches: a view and two ops for each."""
    done: list[Op] = []
    for batch in batches:
        view = Op("aten::view", inputs=(value("raw", batch),))
        one = computed(Op("aten::stack"), value("raw", batch))
        done += [view, one, computed(Op("aten::mul", argument="(_, 0.5)"), one.outputs[0])]
    return [replace(op, thread=thread) for op in done]


def _run(*lanes: Sequence[Op], cuts: Sequence[Sequence[int]] = (), steps: int = STEPS) -> Run:
    run = []
    for step in range(steps):
        beside = []
        for lane, cut in zip(lanes, cuts, strict=True):
            ends = [0, *cut[: steps - 1], len(lane)]
            beside += lane[ends[step] : ends[step + 1]]
        run.append(Step((*chain(3, step=step), *beside)))
    return run


def _cuts(lane: Sequence[Op]) -> st.SearchStrategy[list[int]]:
    places = st.integers(0, len(lane))
    return st.lists(places, min_size=STEPS - 1, max_size=STEPS - 1).map(sorted)


LANE = _work(range(4))


@given(st.data())
@settings(max_examples=40)
def test_the_distribution_of_work_over_threads_is_not_a_difference(data: st.DataObject) -> None:
    """It does not matter which thread runs which part of the work, nor when."""

    def run() -> Run:
        pieces = data.draw(st.permutations(LANE))
        shared = [replace(op, thread=data.draw(st.integers(1, 3))) for op in pieces]
        return _run(shared, cuts=[data.draw(_cuts(shared))])

    verdict = compared(run(), run())

    assert verdict.same
    assert verdict.notes == ()
    assert sum(cell.same for cell in verdict.map) == 3 * STEPS + len(LANE)


@given(place=st.integers(0, len(LANE) - 1), one=_cuts(LANE), other=_cuts(LANE), last=st.booleans())
@settings(max_examples=40)
def test_a_different_result_is_found_whenever_it_was_computed(
    place: int, one: list[int], other: list[int], *, last: bool
) -> None:
    """A different result of a thread is named, with the step that it has in the left run.

    This also holds if all later ops of the thread differ.
    """
    wrong = computed(LANE[place], value("other"), salt="other")
    later = LANE[place + 1 :] if last else [computed(op, value("o")) for op in LANE[place + 1 :]]
    lane = [*LANE[:place], replace(wrong, thread=1), *later]
    verdict = compared(_run(LANE, cuts=[one]), _run(lane, cuts=[other]))

    first = first_of(verdict)
    assert first.thread == "worker 1"
    assert first.left is not None
    assert first.op == LANE[place].op
    assert first.left.output_fingerprints == tuple(each.hex() for each in LANE[place].outputs)
    assert first.step == sum(cut <= place for cut in one)
    counted = verdict.propagated + verdict.independent
    assert counted == (0 if last else len(LANE) - place - 1)


ITEMS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=15)


@given(ITEMS, ITEMS)
@settings(max_examples=40)
def test_as_many_ops_as_possible_are_matched(
    left: list[tuple[str, int]], right: list[tuple[str, int]]
) -> None:
    """Equal ops of another thread go together first, then all that have a namesake."""
    lanes = [
        [Op(f"aten::{name}", outputs=(value(name, n),), thread=1) for name, n in items]
        for items in (left, right)
    ]
    runs = [_run(lane, cuts=[[0, 0, 0, 0]]) for lane in lanes]
    verdict = compared(*runs)

    main = 3 * STEPS
    assert sum(cell.same for cell in verdict.map) == main + (Counter(left) & Counter(right)).total()
    names = [Counter(name for name, _ in items) for items in (left, right)]
    if not verdict.notes:
        shared = (names[0] & names[1]).total()
        total = sum(cell.same + cell.differing for cell in verdict.map)
        assert total == main + len(left) + len(right) - shared


def test_equal_inputs_with_unequal_outputs_are_reported_as_such() -> None:
    """An op of another thread with equal inputs and a different output does not count as data."""
    other = [*LANE[:4], replace(LANE[4], outputs=(value("x"),)), *LANE[5:]]
    first = diverged(_run(LANE, cuts=[[3, 6, 9, 9]]), _run(other, cuts=[[6, 9, 9, 12]]))

    assert (first.kind, first.step) == (Kind.OUTPUTS, 1)


def test_an_additional_op_of_a_thread_is_found() -> None:
    """An op in the middle of a thread's work, in one run only, is a difference."""
    more = computed(Op("aten::tanh", thread=1), value("x"))
    longer = [*LANE[:5], more, *LANE[5:]]
    for left, right, has in ((LANE, longer, "B"), (longer, LANE, "A")):
        first = diverged(*(_run(lane, cuts=[[3, 6, 9, 9]]) for lane in (left, right)))

        assert (first.kind, first.step, first.op) == (Kind.ONLY_ONE, 1, "aten::tanh")
        assert first.what == f"only {has} has it"


def test_a_thread_that_only_one_run_has_is_found() -> None:
    """Work of a thread without a counterpart is a difference, even a single op."""
    first = diverged(_run(), _run(LANE[:1], cuts=[[1, 1, 1, 1]]))

    assert (first.kind, first.thread) == (Kind.ONLY_ONE, "worker 1")


@given(st.integers(1, len(LANE) - 1), st.integers(1, len(LANE) - 1))
@settings(max_examples=30)
def test_truncated_threads_are_noted(left: int, right: int) -> None:
    """Additional ops at the end of a thread, before the program ended, are a note in either run."""
    second = [replace(op, thread=2) for op in _work(range(10, 14))]
    cuts = [[0, 0, 0, 0], [0, 0, 0, 0]]
    verdict = compared(_run(LANE, second[:left], cuts=cuts), _run(LANE[:right], second, cuts=cuts))

    assert verdict.same
    assert len(verdict.notes) == 2
    ops = len(LANE) - right
    assert verdict.notes[0].startswith(
        f"A has {ops} more op{'s' * (ops != 1)} at one end of thread worker 1"
    )
    assert verdict.notes[1].startswith(f"B has {len(second) - left} more op")


def test_ops_of_threads_after_the_last_step_are_not_a_step() -> None:
    """A run whose threads continue after its last step is not longer than another run."""
    whole = _run(LANE, cuts=[[3, 6, 9, 9]])
    longer = [*_run(LANE[:9], cuts=[[3, 6, 9, 9]]), Step(tuple(LANE[9:]), finished=False)]

    assert compared(longer, _run(LANE[:9], cuts=[[3, 6, 9, 9]])).same
    for verdict in (compared(longer, whole), compared(whole, longer)):
        assert verdict.same
        assert len(verdict.notes) == 1


def test_a_truncated_pool_is_noted() -> None:
    """If threads share work, additional work of one run before its end is a note."""
    work = [Op("aten::add", inputs=(value(n),), outputs=(value(n, 1),)) for n in range(8)]
    left = [replace(op, thread=1 + n % 2) for n, op in enumerate(work)]
    right = [replace(op, thread=1 + (n // 2) % 2) for n, op in enumerate(work[:7])]
    verdict = compared(_run(left, cuts=[[2, 4, 6, 8]]), _run(right, cuts=[[2, 4, 6, 7]]))

    assert verdict.same
    assert len(verdict.notes) == 1


def test_a_thread_that_died_is_no_thread_that_was_cut_off() -> None:
    """A thread that works on for steps in one run, and has ended in the other, is a difference."""
    cuts = [[3, 6, 9, 12]]
    first = diverged(_run(LANE, cuts=cuts), _run(LANE[:3], cuts=[[3, 3, 3, 3]]))

    assert (first.kind, first.step) == (Kind.ONLY_ONE, 1)
    assert "only A has it" in first.what


@given(st.integers(0, 2), st.integers(0, 2))
@settings(max_examples=20)
def test_a_recording_may_begin_in_the_midst_of_a_thread(left: int, right: int) -> None:
    """Where some steps are recorded, half of what they catch of a thread is enough in common."""
    work = _work(range(8))
    runs = [_run(work[3 * begin : 3 * begin + 12], cuts=[[6]], steps=2) for begin in (left, right)]

    assert compared(*runs, first=4).same


def test_an_earlier_difference_of_the_main_thread_is_named() -> None:
    """The first difference of a step in the left run is named, whatever its thread."""
    ops, other = chain(3), chain(3, weights="v")
    beside = _work([0])
    wrong = [replace(op, outputs=(value("x", at),)) for at, op in enumerate(beside)]
    for left, right, thread in (
        ((*ops, *beside), (*other, *wrong), "MainThread"),
        ((*beside, *ops), (*wrong, *other), "worker 1"),
    ):
        assert diverged([Step(left)], [Step(right)]).thread == thread


@pytest.mark.parametrize(("begins", "same"), [(PARTLY, True), (b"", False)])
def test_runs_with_different_every_may_differ_in_inputs_only(begins: bytes, *, same: bool) -> None:
    """What stands for memory set in part depends on the steps seen before; bytes do not."""
    ops = [replace(LANE[1], outputs=(value(1), (begins + value(name))[:16])) for name in "ab"]
    runs = [_run([op], cuts=[[0, 1, 1, 1]]) for op in ops]
    verdict = compared(*runs, {"every": 1}, {"every": 2})

    assert verdict.same is same
    assert same or first_of(verdict).thread == "worker 1"
