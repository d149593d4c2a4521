"""Where numbers enter torch: tensors made from values, and the arguments of optimizers."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from .conftest import seen

if TYPE_CHECKING:
    from .conftest import Recorder

LINES = Path(__file__).read_text(encoding="utf-8").splitlines()


def line_of(mark: str) -> int:
    """Return the number of the one line of this file that ends with the comment `mark`."""
    (number,) = (number for number, line in enumerate(LINES, 1) if line.endswith(f"  # {mark}"))
    return number


def test_the_arguments_of_an_optimizer_are_recorded_with_every_step(recorded: Recorder) -> None:
    """Each step has one record of what its groups are given, numbers and tensors alike."""
    weights = [torch.ones(2, requires_grad=True) for _ in range(2)]
    groups = [{"params": weights[:1], "lr": torch.tensor(0.5)}, {"params": weights[1:], "lr": 0.25}]
    optimizer = torch.optim.Adam(groups, lr=1.0, foreach=False, capturable=False)

    def program() -> None:
        for _ in range(2):
            sum(weight.sum() for weight in weights).backward()
            optimizer.step()  # a step
            groups[1]["lr"] = optimizer.param_groups[1]["lr"] = 0.125

    found = [one for one in seen(recorded(program)) if one.op == "Adam.step()"]
    rates = [[group["lr"] for group in json.loads(one.argument)] for one in found]

    assert rates == [["_", 0.25], ["_", 0.125]]
    assert [(one.step, one.phase, one.line) for one in found] == [
        (step, "optimizer", line_of("a step")) for step in range(2)
    ]


@pytest.mark.parametrize(("defaults", "names"), [({"lr": 1.0}, ["lr"]), ({}, ["lr", "note"])])
def test_what_an_optimizer_has_no_default_of_is_none_of_its_arguments(
    recorded: Recorder, defaults: dict[str, float], names: list[str]
) -> None:
    """A note that a program leaves in a group is left out, unless there are no defaults at all."""

    class Still(torch.optim.Optimizer):
        def step(self, closure: None = None) -> None:
            """Change nothing."""

    group = {"params": [torch.ones(2, requires_grad=True)], "lr": 0.5, "note": time.time()}
    optimizer = Still([group], defaults)

    (found,) = (one for one in seen(recorded(optimizer.step)) if one.op == "Still.step()")
    assert list(json.loads(found.argument)[0]) == names


NEW_TENSORS = {
    "tensor": lambda: torch.tensor([1.0, 2.0]),  # tensor
    "as_tensor": lambda: torch.as_tensor([1.0, 2.0]),  # as_tensor
    "from_numpy": lambda: torch.from_numpy(np.array([1.0, 2.0])),  # from_numpy
    "asarray": lambda: torch.asarray(np.array([1.0, 2.0])),  # asarray
    "Tensor": lambda: torch.Tensor([1.0, 2.0]),  # Tensor
    "new_tensor": lambda: torch.ones(1).new_tensor([1.0, 2.0]),  # new_tensor
}


@pytest.mark.parametrize("name", NEW_TENSORS)
def test_a_tensor_made_from_values_has_a_record_at_its_line(recorded: Recorder, name: str) -> None:
    """What Python and numpy hand to torch is recorded where it was made, once an op reads it."""
    trace = recorded(lambda: NEW_TENSORS[name]().view(2, 1).add(1))

    made = [one for one in seen(trace) if one.op == "new tensor"]
    read = next(one for one in seen(trace) if one.op.startswith("aten::view"))
    assert [one.line for one in made] == [line_of(name)]
    assert made[0].outputs[0].startswith(read.inputs[0])


def test_values_count_as_they_are_when_an_op_first_reads_them(recorded: Recorder) -> None:
    """Memory that numpy fills after torch got it is recorded with what the op reads."""

    def program(value: float) -> None:
        array = np.zeros(3)
        tensor = torch.from_numpy(array)
        array[:] = value
        tensor.add(1)

    one, other = (
        [
            each.outputs
            for each in seen(recorded(partial(program, value)))
            if each.op == "new tensor"
        ]
        for value in (1.0, 2.0)
    )
    assert one != other


def test_memory_that_is_read_under_several_names_is_recorded_once(recorded: Recorder) -> None:
    """A new tensor has one record, whichever alias of it is read, and looking changes nothing."""

    def program(look: bool) -> None:
        tensor = torch.from_numpy(np.ones(1 << 19))  # large: its views are read, not itself
        if look:
            tensor.detach().numpy().sum()
        tensor[:2].add(1)
        tensor[2:].add(1)

    found = [
        [one.outputs for one in seen(recorded(partial(program, look))) if one.op == "new tensor"]
        for look in (False, True)
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 1


def test_what_no_op_reads_has_no_record(recorded: Recorder) -> None:
    """A tensor that is only printed, such as a time, is no difference."""
    trace = recorded(lambda: (torch.tensor(time.time()), torch.ones(1).add(1)))

    assert "new tensor" not in {one.op for one in seen(trace)}


def test_values_set_into_a_tensor_are_recorded_at_their_line(recorded: Recorder) -> None:
    """An assignment of a number, or of an array, to an element is a new tensor of that line."""

    def program() -> None:
        tensor = torch.zeros(4)
        tensor[0] = 3.5  # a number
        tensor[1:3] = torch.from_numpy(np.ones(2, "float32"))  # an array

    made = [one for one in seen(recorded(program)) if one.op == "new tensor"]
    assert [one.line for one in made] == [line_of("a number"), line_of("an array")]
