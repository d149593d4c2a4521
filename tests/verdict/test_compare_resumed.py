"""A run resumed from a checkpoint is compared with the whole run step by step."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchrepro
from torchrepro.verdict.comparison import compare

Lose = Callable[[dict[str, Any]], object]
STEPS, SAVED = 6, 3


def _train(folder: Path, level: str, saved: bytes = b"", lose: Lose | None = None) -> bytes:
    """Train two models in turn, optionally resumed from `saved`; returns a checkpoint."""
    kept = io.BytesIO()
    with torchrepro.record(folder, level=level):
        torch.manual_seed(0)
        models = [
            nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)) for _ in range(2)
        ]
        optimizers = [torch.optim.Adam(model.parameters(), 0.01) for model in models]
        data, first = torch.rand(STEPS, 5, 3), 0
        if saved:
            state = torch.load(io.BytesIO(saved), weights_only=False)
            if lose is not None:
                lose(state)
            first = state["step"]
            for part, its in zip((*models, *optimizers), state["parts"], strict=True):
                part.load_state_dict(its or part.state_dict())
            if state["random"] is not None:
                torch.set_rng_state(state["random"])
            data = data.roll(state.get("moved", 0), 0)
        for step in range(first, STEPS):
            if step == SAVED and not saved:
                parts = [part.state_dict() for part in (*models, *optimizers)]
                random = torch.get_rng_state()
                torch.save({"step": step, "parts": parts, "random": random}, kept)
            model, optimizer = models[step % 2], optimizers[step % 2]
            optimizer.zero_grad()
            model(data[step]).square().mean().backward()
            optimizer.step()
    return kept.getvalue()


@pytest.mark.parametrize("level", ["op", "step"])
def test_an_exactly_resumed_run_is_the_same_from_its_first_step_on(
    tmp_path: Path, level: str
) -> None:
    """Steps are aligned by the parameters of all optimizers, and no earlier step is counted."""
    _train(tmp_path / "resumed", level, _train(tmp_path / "whole", level))

    verdict = compare(tmp_path / "whole", tmp_path / "resumed")

    assert verdict.same
    assert verdict.compared.steps == STEPS - SAVED
    assert verdict.notes[0] == f"B resumes from A: its step 0 is step {SAVED} of A"


LOST: dict[str, tuple[Lose, int, str]] = {
    "optimizer": (lambda state: state["parts"].__setitem__(3, None), 3, "state of the optimizer"),
    "generator": (lambda state: state.update(random=None), 3, "random generators (torch)"),
    "data": (lambda state: state.update(moved=1), 3, "the position in the data"),
    "buffer": (
        lambda state: state["parts"][0]["1.running_mean"].add_(1),
        STEPS - 1,
        "a buffer",
    ),
    "argument": (
        lambda state: state["parts"][3]["param_groups"][0].update(lr=0.02),
        3,
        "lr: 0.01 and 0.02",
    ),
}


@pytest.mark.parametrize("level", ["op", "step"])
@pytest.mark.parametrize("lost", LOST)
def test_a_state_that_was_not_restored_shows_at_the_first_step_it_affects(
    tmp_path: Path, level: str, lost: str
) -> None:
    """The step is numbered as in the whole run, and the cause names the state not restored."""
    lose, step, words = LOST[lost]
    _train(tmp_path / "resumed", level, _train(tmp_path / "whole", level), lose)

    verdict = compare(tmp_path / "whole", tmp_path / "resumed")

    assert verdict.first is not None
    assert verdict.first.step == step
    assert verdict.advice is not None
    assert words in verdict.advice.cause


def test_runs_with_equal_initial_parameters_are_aligned_at_their_first_steps(
    tmp_path: Path,
) -> None:
    """A first step that changes no parameter, as with learning rate 0, is not a checkpoint."""
    for name in "ab":
        with torchrepro.record(tmp_path / name):
            torch.manual_seed(0)
            model = nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), 0.0)
            for rate in (0.0, 0.1, 0.1):
                optimizer.param_groups[0]["lr"] = rate
                model(torch.rand(5, 3)).mean().backward()
                optimizer.step()

    verdict = compare(tmp_path / "a", tmp_path / "b")

    assert verdict.same
    assert (verdict.compared.steps, verdict.notes) == (3, ())
