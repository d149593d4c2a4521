"""A read of uninitialized memory is reported with the line that allocated it."""

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

import torchrepro
from torchrepro.verdict.value import UninitializedRead, Verdict

from .conftest import line_of


@pytest.fixture
def filled() -> Iterator[None]:
    """Fill uninitialized memory with NaN, as a strict profile does."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _verdict(folder: Path, program: Callable[[float], object]) -> Verdict:
    for name, left_over in (("a", 3.0), ("b", 5.0)):
        with torchrepro.record(folder / name):
            program(left_over)
    return torchrepro.compare(folder / "a", folder / "b")


def _leave(value: float, *sizes: int) -> None:
    """Write a value into memory, without a record, and free the memory."""
    with _disable_current_modes():  # type: ignore[no-untyped-call]
        for size in sizes:
            _ = [torch.full((size,), value) for _ in range(300)]


READ = ".square().mean()  # read"


def _trained(scale: torch.Tensor, steps: int = 3) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = (model(torch.randn(8, 4)) * scale).square().mean()  # read
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _partly() -> torch.Tensor:
    memory = torch.empty(4)  # in part
    memory[:2] = 1.0
    return memory


ALLOCATED: dict[str, Callable[[], torch.Tensor]] = {
    "a tensor": lambda: torch.empty(4),  # a tensor
    "a parameter": lambda: nn.Parameter(torch.empty(4)),  # a parameter
    "a view": lambda: torch.empty(2, 4)[0].view(4),  # a view
    "a copy": lambda: nn.Parameter(torch.ones(1).new_empty(4)).detach().clone(),  # a copy
    "in part": _partly,
}


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("name", ALLOCATED)
def test_a_loss_that_uninitialized_memory_made_nan_is_reported_with_both_lines(
    tmp_path: Path, name: str
) -> None:
    """If runs agree on a loss of NaN, the lines that read and allocated the memory are named."""
    verdict = _verdict(tmp_path, lambda _: _trained(ALLOCATED[name]()))

    allocated = f"{__file__}:{line_of(f'  # {name}', __file__)}"
    read = f"{__file__}:{line_of(READ, __file__)}"
    assert verdict.same
    assert verdict.program.unwritten == (
        UninitializedRead(allocated, read, "aten::mul.Tensor", is_nan=True),
    )
    assert verdict.notes[:2] == (
        "loss is nan from step 0 on",
        f"{Path(read).name} reads uninitialized memory: "
        f"{Path(allocated).name} allocated it, as torch.empty does",
    )


def test_runs_that_diverge_by_uninitialized_memory_name_the_line(tmp_path: Path) -> None:
    """If runs first differ by uninitialized memory, the line that allocated it is named."""

    def program(left_over: float) -> None:
        scale = torch.empty(4)  # allocated
        # What an allocator hands out depends on all that the process did before: here it is chosen.
        (ctypes.c_float * 4).from_address(scale.data_ptr())[:] = [left_over] * 4
        _trained(scale)

    verdict = _verdict(tmp_path, program)

    allocated, read = (f"{__file__}:{line_of(mark, __file__)}" for mark in ("  # allocated", READ))
    assert verdict.first is not None
    assert (verdict.first.step, verdict.first.source) == (0, read)
    assert "uninitialized memory" in verdict.first.what
    assert [(each.allocated, each.read) for each in verdict.program.unwritten] == [
        (allocated, read)
    ]


def _scratch_of_ctc(left_over: float) -> None:
    _leave(left_over, 12 * 3 * 11)
    layer = nn.Linear(5, 6)
    logits = layer(torch.randn(12, 3, 5)).log_softmax(2)
    targets, inputs = torch.randint(1, 6, (3, 5)), torch.tensor([12, 7, 9])
    functional.ctc_loss(logits, targets, inputs, torch.tensor([5, 2, 3])).backward()  # type: ignore[no-untyped-call]


def _noise_of_rrelu(left_over: float) -> None:
    _leave(left_over, 40)
    layer, activation = nn.Linear(5, 5), nn.RReLU().eval()
    activation(layer(torch.randn(8, 5))).sum().backward()


def _noise_of_training(_: float) -> None:
    nn.RReLU()(nn.Linear(5, 5)(torch.randn(8, 5))).sum().backward()


def _shared(left_over: float) -> None:
    _leave(left_over, 64)
    (torch.empty(64).share_memory_().fill_(1.0) * 2).sum()


def _growing_cache(_: float) -> None:
    layer, memory = nn.Linear(4, 4), torch.empty(10, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e38)
    for place in range(5):
        memory[place] = layer(torch.ones(4)).detach()
        loss = (layer(torch.ones(4)) * memory[: place + 1]).square().sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@pytest.mark.parametrize(
    "program", [_scratch_of_ctc, _noise_of_rrelu, _noise_of_training, _shared, _growing_cache]
)
@pytest.mark.parametrize("fill", [False, True])
def test_uninitialized_memory_without_effect_is_not_reported(
    tmp_path: Path, program: Callable[[float], None], *, fill: bool
) -> None:
    """Memory that an op does not use, or writes first, is no difference and no cause."""

    def seeded(left_over: float) -> None:
        torch.manual_seed(0)
        program(left_over)

    torch.use_deterministic_algorithms(fill)
    try:
        verdict = _verdict(tmp_path, seeded)
    finally:
        torch.use_deterministic_algorithms(False)

    assert verdict.same
    assert verdict.program.unwritten == ()


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ([1.0, float("inf"), 1.0], "loss is inf at step 1"),
        ([1.0, float("nan"), float("nan")], "loss is nan from step 1 on"),
        ([1.0, 1.0, 1.0], ""),
    ],
)
def test_a_loss_that_is_not_finite_is_reported(
    tmp_path: Path, scales: list[float], words: str
) -> None:
    """The first step whose loss is not finite is reported, also for equal runs."""

    def program(_: float) -> None:
        weight, trained = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight, trained], lr=0.1)
        for scale in scales:
            (weight.detach() * weight * scale).sum().backward()  # type: ignore[no-untyped-call]
            weight.grad, trained.grad = None, torch.ones(2)
            optimizer.step()

    verdict = _verdict(tmp_path, program)

    assert verdict.same
    assert "".join(verdict.notes) == words


PROGRAM = """
import torch
model = torch.nn.Linear(2, 1)
scale = torch.nn.Parameter({scale})
optimizer = torch.optim.SGD([scale, *model.parameters()], lr=0.1)
for _ in range(2):
    (model(torch.ones(3, 2)) * scale).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "is_said"), [("torch.empty(1)", True), ("torch.ones(1)", False)])
def test_a_run_reports_parameters_that_are_nan(
    tmp_path: Path, scale: str, *, is_said: bool
) -> None:
    """Under a profile that fills memory with NaN, a run reports NaN and how to find the line."""
    program = tmp_path / "train.py"
    program.write_text(PROGRAM.format(scale=scale))
    words = [sys.executable, "-m", "torchrepro", "run", "debug-strict", "--"]

    ran = subprocess.run(
        [*words, sys.executable, str(program)], capture_output=True, text=True, check=True
    )

    assert ("parameters are nan at the end" in ran.stderr) == is_said
    assert ("torchrepro verify -- COMMAND" in ran.stderr) == is_said


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_no_op_of_torch_is_a_false_alarm(
    fork_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """Equal inputs give equal outputs for each op: memory that it does not write is ignored."""
    done = fork_python(Path(__file__).with_name("op_database.py"))

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the same: "), done.stdout
