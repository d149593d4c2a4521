"""Partially recorded runs are compared by common data, and no more is claimed."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import torchrepro
from torchrepro import Verdict
from torchrepro.ground.console import as_text
from torchrepro.verdict.render import headline, verdict_parts
from torchrepro.verdict.value import Agreed, Kind

STEPS = 12
STATE, ALL_LEVELS = "by parameters, gradients and losses", "by parameters and losses"


class _Model(torch.nn.Module):
    """A model with a buffer that no optimizer trains."""

    def __init__(self) -> None:
        super().__init__()
        self.into = torch.nn.Linear(4, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.out = torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.norm(self.into(x))))


def _scale(tensor: torch.Tensor) -> None:
    tensor.mul_(1.001)


def _write_outside_torch(tensor: torch.Tensor) -> None:
    tensor.detach().numpy()[0] += 1e-3


def _run(
    folder: Path,
    every: int,
    fault: str = "",
    at: int = -1,
    *,
    spoil: Callable[[torch.Tensor], None] = _scale,
    **asked: object,
) -> Path:
    torch.manual_seed(0)
    model = _Model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with torchrepro.record(folder, every=every, **asked):
        for step in range(STEPS):
            if step == at:
                tensor = dict([*model.named_parameters(), *model.named_buffers()])[fault]
                with torch.no_grad():
                    spoil(tensor)
            model(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return folder


def _steps_to_record(verdict: Verdict) -> tuple[int, int]:
    """Return the steps of the proposed call of `torchrepro.record`."""
    assert verdict.advice is not None
    call = ast.parse(verdict.advice.closer, mode="eval").body
    assert isinstance(call, ast.Call)
    named = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    assert set(named) == {"steps"}
    return named["steps"]


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("at", [1, 5, 6, 7, 8, 11])
def test_a_fault_between_two_full_steps_is_found_in_the_first_differing_step(
    tmp_path: Path, at: int, every: int
) -> None:
    """The verdict names that step, the last equal step, and how to record the steps in between.

    It does so whichever steps are in full in the other recording.
    """
    a, b = _run(tmp_path / "a", every), _run(tmp_path / "b", 4, "into.weight", at)

    verdict = torchrepro.compare(a, b)

    coarse, full = STATE if every == 4 else ALL_LEVELS, (at - 1) // 4 * 4
    by = "op by op" if full == at - 1 else coarse
    assert verdict.first is not None
    assert verdict.first.step == at
    assert verdict.agreed == Agreed(at - 1, by, full, then_in_full=at == 8)
    assert "agreed" in as_text(*verdict_parts(verdict))
    assert verdict.compared.by == (("op by op", 3), (coarse, 9))
    if at != 8:
        assert verdict.first.op == "loss"
        assert f"at step {at}, at the latest in the forward pass" in headline(verdict)
        assert _steps_to_record(verdict) == (at - 1, at + 1)


def test_a_fault_without_effect_on_parameters_is_between_two_full_steps(tmp_path: Path) -> None:
    """The verdict claims nothing about unrecorded ops; recording them finds the fault."""
    a, b = _run(tmp_path / "a", 4), _run(tmp_path / "b", 4, "norm.running_mean", 6)

    verdict = torchrepro.compare(a, b)

    assert verdict.first is not None
    assert (verdict.first.step, verdict.first.kind) == (8, Kind.UNSEEN)
    assert "the ops of steps 5 to 7" in verdict.first.what
    assert verdict.agreed == Agreed(7, STATE, 4, then_in_full=True)
    assert _steps_to_record(verdict) == (4, 9)
    closer = torchrepro.compare(
        _run(tmp_path / "c", 1, steps=(4, 9)),
        _run(tmp_path / "d", 1, "norm.running_mean", 6, steps=(4, 9)),
    )
    assert closer.first is not None
    assert (closer.first.step, closer.first.op) == (6, "aten::mul_.Tensor")


def test_recording_the_proposed_steps_shows_the_cause(tmp_path: Path) -> None:
    """They begin before the divergence, which shows a write to memory between two steps."""
    spoiled = {"fault": "out.weight", "at": 6, "spoil": _write_outside_torch}
    a, b = _run(tmp_path / "a", 4), _run(tmp_path / "b", 4, **spoiled)

    steps = _steps_to_record(torchrepro.compare(a, b))
    closer = torchrepro.compare(
        _run(tmp_path / "c", 1, steps=steps), _run(tmp_path / "d", 1, **spoiled, steps=steps)
    )

    assert closer.first is not None
    assert (closer.first.step, closer.first.kind) == (6, Kind.INPUT)
    assert closer.first.source.rpartition(":")[0] == __file__


def test_recordings_of_different_steps_are_compared_by_common_data(tmp_path: Path) -> None:
    """The answer has the number of steps for each mode, including the coarser ones."""
    runs = {every: _run(tmp_path / str(every), every) for every in (1, 3, 4)}

    verdicts = {
        pair: torchrepro.compare(*(runs[every] for every in pair)) for pair in ((1, 4), (3, 4))
    }

    assert all(verdict.same for verdict in verdicts.values())
    assert verdicts[1, 4].compared.by == (("op by op", 3), (ALL_LEVELS, 9))
    assert verdicts[3, 4].compared.by == (("op by op", 1), (STATE, 6), (ALL_LEVELS, 5))
    said = headline(verdicts[3, 4])
    assert f"12 steps (1 op by op, 6 {STATE}, 5 {ALL_LEVELS})" in said
