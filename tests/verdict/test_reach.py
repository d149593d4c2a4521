"""A difference that affects no loss and no parameter is reported as such, and can be ignored."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import torchrepro
from torchrepro.ground.errors import TraceError
from torchrepro.verdict.render import headline, reach
from torchrepro.verdict.value import Verdict

from .traces import Op, Step, chain, compared, computed, value

Program = Callable[[float], object]


def _verdict(folder: Path, program: Program, **options: Any) -> Verdict:
    for name, seconds in (("a", 0.25), ("b", 0.5)):
        with torchrepro.record(folder / name, level=options.pop("level", "op")):
            program(seconds)
    return torchrepro.compare(folder / "a", folder / "b", **options)


def _line(text: str) -> str:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f"test_reach.py:{next(n for n, line in enumerate(lines, 1) if line.endswith(text))}"


Use = Callable[[Any], Any]


def _unused(_: object) -> float:
    return 0.0


def _trained(meter: Callable[[float], object], uses: Use = _unused) -> Program:
    def program(seconds: float) -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            loss = model(torch.randn(8, 4)).square().mean()
            measured = meter(seconds)
            optimizer.zero_grad()
            (loss + uses(measured)).backward()
            optimizer.step()
            seconds *= 1.5

    return program


class Meter:
    def __init__(self) -> None:
        self.total = torch.zeros(())

    def __call__(self, seconds: float) -> torch.Tensor:
        last = torch.tensor([seconds, 1.0])  # measured
        self.total = self.total + last[0] * 2
        return self.total.mean()


def _metered(uses: Use = _unused) -> Program:
    def program(seconds: float) -> None:
        _trained(Meter(), uses)(seconds)

    return program


def test_a_meter_affects_no_result(tmp_path: Path) -> None:
    """A tensor of the clock that no training uses does not affect losses and parameters."""
    verdict = _verdict(tmp_path, _metered())

    assert not verdict.same
    assert verdict.to_json()["reaches"] is False
    assert headline(verdict).startswith("not the same")
    assert reach(verdict) == (
        "losses and parameters of all 3 steps are the same; the runs computed different values at "
        f"{_line('# measured')}"
    )


def test_an_additional_op_without_use_affects_no_result(tmp_path: Path) -> None:
    """An unused op that only one run has does not affect losses and parameters."""
    program = _trained(lambda seconds: torch.ones(2) if seconds == 0.25 else None)
    verdict = _verdict(tmp_path, program)

    assert not verdict.same
    assert not verdict.reaches
    assert "all 3 steps are the same; one run has an additional op at test_reach.py:" in reach(
        verdict
    )


@pytest.mark.parametrize("level", ["op", "module", "step"])
def test_a_value_used_in_training_affects_results(tmp_path: Path, level: str) -> None:
    """A difference that affects a loss counts at every level, without a note."""
    verdict = _verdict(tmp_path, _metered(lambda seen: seen), level=level)

    assert not verdict.same
    assert verdict.reaches
    assert reach(verdict) == ""


WAYS_OUT: dict[str, Use] = {
    "numpy": lambda drawn: drawn.numpy(),
    "an array of numpy": np.asarray,
    "a list": lambda drawn: drawn.tolist(),
    "a number": lambda drawn: drawn[0].item(),
    "a text": repr,
    "a file": lambda drawn: torch.save(drawn, BytesIO()),
    "a file of safetensors": lambda drawn: safetensors.torch.save({"drawn": drawn}),
}


@pytest.mark.parametrize("way_out", WAYS_OUT.values(), ids=WAYS_OUT)
def test_random_numbers_that_leave_torch_differ(tmp_path: Path, way_out: Use) -> None:
    """Values that the program may print, save, or use outside torch count as read."""
    verdict = _verdict(tmp_path, lambda _: way_out(torch.rand(3)))

    assert not verdict.same
    assert verdict.first is not None
    assert verdict.first.op == "aten::rand"


def test_random_numbers_that_nothing_reads_are_a_note(tmp_path: Path) -> None:
    """The note names their line, and the runs are the same."""
    verdict = _verdict(tmp_path, lambda _: torch.rand(3).fill_(1).sum().item())  # drawn

    assert verdict.same
    assert verdict.propagated == verdict.independent == 0
    assert not verdict.to_json()["map"]
    assert f"random numbers drawn at {_line('# drawn')} (aten::rand)" in verdict.notes[-1]


def test_a_parameter_with_its_initial_random_value_differs(tmp_path: Path) -> None:
    """The final state of a module is compared, even if nothing else read it."""

    def program(_: float) -> nn.Module:
        model = nn.Linear(2, 2)
        with torch.no_grad():
            model.weight.fill_(1)
            model.bias.fill_(1)
            model(torch.ones(1, 2))
            model.bias.uniform_()
        return model

    models = []
    verdict = _verdict(tmp_path, lambda seconds: models.append(program(seconds)))

    assert not verdict.same


def test_equal_runs_have_no_difference_that_affects_a_result() -> None:
    """Without a difference there is none that reaches."""
    verdict = compared([Step(chain(3), parameters=value(1))], [Step(chain(3), parameters=value(1))])

    assert verdict.same
    assert not verdict.reaches


@pytest.mark.parametrize("steps", [([], 2), ([0, 1], 1), ([0], 2)])
def test_a_difference_may_affect_results_that_were_not_recorded(
    steps: tuple[list[int], int],
) -> None:
    """Without parameters, with unequal numbers of steps, or if cut off, a difference may matter."""
    ended, last = steps
    runs = [
        [
            Step(
                (*chain(3), computed(Op("aten::exp"), value(run, n))),
                parameters=value(n) if ended else b"",
                finished=not ended or n in ended or not run,
            )
            for n in range(last + (not run))
        ]
        for run in (0, 1)
    ]

    assert compared(*runs).reaches


def test_a_line_is_ignored_with_records_that_differ_only_because_of_it(tmp_path: Path) -> None:
    """The verdict counts the records of the line and those that differ only because of it."""
    verdict = _verdict(tmp_path, _metered(), ignore=[_line("# measured")])

    assert verdict.same
    assert [each.records for each in verdict.left_out] == [3]
    assert verdict.fed == 3 * 4
    assert verdict.notes[0] == (
        f"ignored: 3 records of {_line('# measured')} and 12 that differ only because of them"
    )


def test_an_additional_op_is_ignored(tmp_path: Path) -> None:
    """A line that only one run executes can be ignored too."""

    def meter(seconds: float) -> object:
        return torch.ones(2) if seconds == 0.25 else None  # one run

    verdict = _verdict(tmp_path, _trained(meter), ignore=[_line("# one run")])

    assert verdict.same


def test_another_cause_is_named_beside_an_ignored_line(tmp_path: Path) -> None:
    """If a second line causes a difference, it is named although the first is ignored."""

    def meter(seconds: float) -> object:
        torch.tensor(seconds).abs()  # the first
        return torch.tensor([seconds]) * 2  # the second

    verdict = _verdict(tmp_path, _trained(meter), ignore=[_line("# the first")])

    assert verdict.first is not None
    assert verdict.first.source.endswith(_line("# the second"))


def test_an_argument_that_is_not_a_line_is_rejected(tmp_path: Path) -> None:
    """A file without a line number is rejected before anything is compared."""
    with pytest.raises(TraceError, match=r"not a line(.|\n)*FILE:LINE"):
        torchrepro.compare(tmp_path, tmp_path, ignore=["train.py"])
