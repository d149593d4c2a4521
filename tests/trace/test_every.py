"""Recordings with some steps in full and the others at level `step`."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from threading import Thread
from time import monotonic

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import torchrepro
from torchrepro.trace.op_mode import RecordingMode

from .conftest import Counting, Net, Recorder, Seen, seen, weights_trained

STEPS = 8


_train = partial(weights_trained, STEPS)


def _by_step(records: list[Seen]) -> dict[int, list[Seen]]:
    """Return records by step, without the lines of this file, which say nothing here."""
    return {
        step: [replace(one, line=0) for one in group]
        for step, group in groupby(records, attrgetter("step"))
    }


@pytest.mark.parametrize("level", ["op", "module"])
@pytest.mark.parametrize("every", [2, 3, 5])
def test_every_nth_step_is_recorded_in_full_and_the_others_at_level_step(
    recorded: Recorder, every: int, level: str
) -> None:
    """Each step has the same records as in a recording of all steps at the level of the step."""
    _train()  # older torch imports its compiler with the first optimizer, which computes something
    whole = {
        level: _by_step(seen(recorded(_train, level=level))),
        "step": _by_step(seen(recorded(_train, level="step"))),
    }

    trace = recorded(_train, level=level, every=every)

    found = _by_step(seen(trace))
    levels = {step: row.level for step, row in trace.steps.items() if row.finished}
    assert levels == {step: "step" if step % every else level for step in range(STEPS)}
    assert {step: found[step] for step in levels} == {
        step: whole[its][step] for step, its in levels.items()
    }


def _training_under_a_mode(first: int, end: int) -> tuple[list[str], list[bytes]]:
    """Train with a mode of the program that is entered in one step and exited in a later one."""
    mode = Counting()

    def around(step: int) -> None:
        if step == first:
            mode.__enter__()
        if step == end:
            assert _get_current_dispatch_mode_stack()[-1] is mode
            mode.__exit__(None, None, None)

    return mode.ops, _train(around)


@contextmanager
def _same_modes_afterwards() -> Iterator[None]:
    before = _get_current_dispatch_mode_stack()
    yield
    assert _get_current_dispatch_mode_stack() == before


def _train_within_backward(*, outside: bool) -> None:
    """Train with optimizers that step within the backward pass, and one after it if `outside`.

    The last steps are ended by hand and have no backward pass.
    """
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 1, bias=False))
    own = {weight: torch.optim.SGD([weight], 0.1) for weight in net.parameters()}
    last = torch.nn.Linear(1, 1)
    other = torch.optim.SGD(last.parameters(), 0.1)

    def update(weight: torch.Tensor) -> None:
        own[weight].step()
        own[weight].zero_grad()

    for weight in own:
        weight.register_post_accumulate_grad_hook(update)
    for _ in range(4):
        last(net(torch.randn(5, 4))).square().mean().backward()
        if outside:
            other.step()
            other.zero_grad()
    for _ in range(4):
        with torch.no_grad():
            net(torch.randn(5, 4))
        torchrepro.end_step()


@pytest.mark.parametrize("outside", [False, True])
def test_steps_that_end_within_a_backward_pass_are_recorded_as_without_every(
    recorded: Recorder, *, outside: bool
) -> None:
    """Each full step has every op once, in its phase; no mode stays on the stack."""
    program = partial(_train_within_backward, outside=outside)
    whole = recorded(program)
    expected = _by_step(seen(whole))

    for every in (2, 3, 4, 5):
        with _same_modes_afterwards():
            trace = recorded(program, every=every)

        found = _by_step(seen(trace))
        full = [step for step, row in trace.steps.items() if row.finished and row.level == "op"]
        assert full == [step for step, row in whole.steps.items() if row.finished][::every]
        assert [found[step] for step in full] == [expected[step] for step in full]


@pytest.mark.parametrize("end", range(2, STEPS))
def test_a_mode_of_the_program_may_be_entered_and_exited_in_any_step(
    tmp_path: Path, end: int
) -> None:
    """The program's mode sees all of its ops; ours sees the ops of full steps, as without it."""
    ops, weights = _training_under_a_mode(1, end)
    with torchrepro.record(tmp_path / "plain", every=3):
        _train()

    with _same_modes_afterwards(), torchrepro.record(tmp_path / "run", every=3):
        recorded_ops, recorded_weights = _training_under_a_mode(1, end)

    assert recorded_weights == weights
    rest = iter(recorded_ops)  # among them the ops that torchrepro reads tensors with
    assert all(op in rest for op in ops)
    verdict = torchrepro.compare(tmp_path / "plain", tmp_path / "run")
    assert verdict.same
    assert verdict.compared.by[0] == ("op by op", 3)


def test_a_recording_may_end_within_a_mode_of_the_program(tmp_path: Path) -> None:
    """The end of the block removes our mode from the stack, and no other."""
    for steps in range(1, 5):
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with Counting() as mode, _same_modes_afterwards():
            with torchrepro.record(tmp_path / str(steps), every=2):
                for _ in range(steps):
                    net(torch.ones(2, 4)).sum().backward()
                    optimizer.step()
            assert _get_current_dispatch_mode_stack() == [mode]


@pytest.mark.parametrize("every", [1, 2])
def test_a_recording_keeps_nothing_of_a_thread_that_has_ended(tmp_path: Path, every: int) -> None:
    """The mode of a thread is freed with the thread: a long run may start one in each step."""

    def modes() -> int:
        return sum(isinstance(one, RecordingMode) for one in gc.get_objects())

    gc.collect()
    before = modes()
    with torchrepro.record(tmp_path / "run", every=every):
        for _ in range(6):
            thread = Thread(target=lambda: torch.ones(2).sin())
            thread.start()
            thread.join()
            torchrepro.end_step()
        until = monotonic() + 60  # `join` returns before the thread has freed its mode
        while modes() != before + 1 and monotonic() < until:
            gc.collect()

        assert modes() == before + 1


def test_steps_and_every_can_be_combined(recorded: Recorder) -> None:
    """Of the requested steps, those whose number is a multiple of `every` are in full."""
    trace = recorded(_train, steps=(2, 5), every=4)

    levels = [(step, row.level) for step, row in trace.steps.items()]
    assert levels == [(2, "step"), (3, "step"), (4, "op"), (5, "step")]
