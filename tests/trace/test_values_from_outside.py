"""Where numbers enter torch and leave it: tensors made from values, the arguments of optimizers,
results that are not tensors, and objects that ranks send each other.
"""

from __future__ import annotations

import _thread
import json
import time
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import torchrepro
from torchrepro.trace.reader import read_run

from .conftest import line_of, seen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from .conftest import Recorder


def test_every_step_records_the_arguments_of_its_optimizer(recorded: Recorder) -> None:
    """Each step has one record of the arguments of its groups: numbers and tensors."""
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
        (step, "optimizer", line_of("  # a step", __file__)) for step in range(2)
    ]


@pytest.mark.parametrize(("defaults", "names"), [({"lr": 1.0}, ["lr"]), ({}, ["lr", "note"])])
def test_an_omitted_default_is_not_recorded_as_an_argument(
    recorded: Recorder, defaults: dict[str, float], names: list[str]
) -> None:
    """A key without a default is a note of the program, unless there are no defaults at all."""

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
def test_a_tensor_created_from_values_is_recorded_at_its_line(
    recorded: Recorder, name: str
) -> None:
    """A tensor from Python or numpy values is recorded at its line when an op first reads it."""
    trace = recorded(lambda: NEW_TENSORS[name]().view(2, 1).add(1))

    made = [one for one in seen(trace) if one.op == "new tensor"]
    read = next(one for one in seen(trace) if one.op.startswith("aten::view"))
    assert [one.line for one in made] == [line_of(f"  # {name}", __file__)]
    assert made[0].outputs[0].startswith(read.inputs[0])


def test_a_new_tensor_with_aliases_is_recorded_once(recorded: Recorder) -> None:
    """A new tensor has one record, whichever of its aliases is read."""

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


def test_values_set_into_a_tensor_are_recorded_at_their_line(recorded: Recorder) -> None:
    """An assignment of a number, or of an array, to an element is recorded with its value.

    It is a new tensor of that line; torch 2.15 fills by a number, which is an argument of the op.
    """

    def program() -> None:
        tensor = torch.zeros(4)
        tensor[0] = 3.5  # a number
        tensor[1:3] = torch.from_numpy(np.ones(2, "float32"))  # an array

    ops = ("new tensor", "aten::fill_.Scalar")
    made = [one for one in seen(recorded(program)) if one.op in ops]
    lines = [line_of(f"  # {mark}", __file__) for mark in ("a number", "an array")]
    assert [one.line for one in made] == lines


returned: list[int] = [0]


@torch.library.custom_op("torchrepro_tests::counted", mutates_args=())
def counted(x: torch.Tensor) -> int:
    """Return a value that does not depend on the input."""
    return returned[0]


@torch.library.custom_op("torchrepro_tests::shared", mutates_args=())
def shared(x: torch.Tensor) -> float:
    """Return a value that does not depend on the input."""
    return returned[0] / 3


def _written_by_numpy(value: int) -> torch.Tensor:
    tensor = torch.ones(3) + 0
    tensor.numpy()[0] = value
    return tensor


def _own_op(op: Callable[[torch.Tensor], object], value: int) -> None:
    returned[0] = value
    op(torch.ones(2))


def _on_a_thread_of_its_own(value: int) -> None:
    done: list[bool] = []

    def compute() -> None:
        torch.ones(3) * value
        done.append(True)

    _thread.start_new_thread(compute, ())
    while not done:
        time.sleep(0.001)


def _through_a_view_of_inference(value: int) -> None:
    with torch.inference_mode():
        base = torch.zeros(4) + 0
        base.sum()
        base[:2].fill_(value)
        base.sum()


def _of_unset_memory_in_inference(_value: int) -> None:
    with torch.inference_mode():
        base = torch.empty(4000)
        base[:2].fill_(1)
        base[:2] * 2


SHOWN: dict[str, Callable[[int], Any]] = {
    "equal": lambda value: torch.equal(torch.ones(3), _written_by_numpy(value)),
    "allclose": lambda value: torch.allclose(torch.ones(3), _written_by_numpy(value)),
    "item": lambda value: _written_by_numpy(value)[0].item(),
    "an op of one's own that counts": lambda value: _own_op(counted, value),
    "an op of one's own that shares": lambda value: _own_op(shared, value),
    "a thread that threading has not started": _on_a_thread_of_its_own,
    "memory of inference that a view of it has written": _through_a_view_of_inference,
}


@pytest.mark.parametrize("program", [*SHOWN, "unset"])
@pytest.mark.parametrize("asked", [{}, {"statistics": True, "detail": True}], ids=str)
def test_another_value_is_a_difference(tmp_path: Path, program: str, asked: dict[str, Any]) -> None:
    """An equal value is no difference, and uninitialized memory is none either."""
    run = SHOWN.get(program, _of_unset_memory_in_inference)
    for name, value in (("a", 1), ("b", 1), ("c", 2)):
        with torchrepro.record(tmp_path / name, **asked):
            run(value)

    assert torchrepro.compare(tmp_path / "a", tmp_path / "b").same
    assert torchrepro.compare(tmp_path / "a", tmp_path / "c").same == (program not in SHOWN)


def test_a_number_within_the_tolerance_is_no_difference(tmp_path: Path) -> None:
    """The tolerance also applies to numbers that `item` returns."""
    for name, value in (("a", 1.0), ("b", 1.0 + 1e-7)):
        with torchrepro.record(tmp_path / name, statistics=True):
            torch.full((1,), value, dtype=torch.float64).item()

    assert not torchrepro.compare(tmp_path / "a", tmp_path / "b").same
    assert torchrepro.compare(tmp_path / "a", tmp_path / "b", rtol=1e-5).same


@pytest.fixture
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def _save(folder: Path) -> None:
    dcp.save({"weights": torch.ones(3), "step": 4}, checkpoint_id=folder / "checkpoint")


SENT: dict[str, Callable[[Path], object]] = {
    "a checkpoint of torch.distributed": _save,
    "broadcast": lambda _: dist.broadcast_object_list([uuid.uuid4()]),
    "gathered by all": lambda _: dist.all_gather_object([None], uuid.uuid4()),
    "gathered": lambda _: dist.gather_object(uuid.uuid4(), [None]),
    "scattered": lambda _: dist.scatter_object_list([None], [uuid.uuid4()]),
}


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.usefixtures("_group")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", SENT)
def test_an_object_that_is_new_in_every_run_is_no_difference(tmp_path: Path, way: str) -> None:
    """Its pickled bytes are not compared; the ops before and after are."""
    for name in ("a", "b"):
        with torchrepro.record(tmp_path / name):
            torch.ones(2).sin()
            SENT[way](tmp_path / f"of {name}")
            torch.ones(2).cos()

    ops = {record.op for record in seen(read_run(tmp_path / "a")[0])}
    assert {"aten::sin", "aten::cos"} <= ops
    assert torchrepro.compare(tmp_path / "a", tmp_path / "b").same
