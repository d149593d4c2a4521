"""`Checkpoint.steps`: a loop that draws its own batches goes on as if never interrupted."""

import random
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

import torchrepro

STEPS = 9


class Interrupted(Exception):  # noqa: N818 - it is no error, but what happens to the run
    """The run was ended from outside."""


def _batch(text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return windows of `text` at random places, drawn as programs without loaders draw them."""
    places = torch.randint(len(text) - 4, (3,))
    noise = random.random() + float(np.random.random())
    return torch.stack([text[p : p + 4] for p in places]) + noise, text[places + 4]


def _train(folder: Path | None, every: int, stop: int | None, profile: Any) -> dict[str, Any]:
    """Train to the end, or until step `stop` is done; return the weights that it leaves."""
    with ExitStack() as stack:
        if profile is not None:
            stack.enter_context(torchrepro.apply(profile))
        else:
            random.seed(5), np.random.seed(5), torch.manual_seed(5)
        text = torch.rand(64)
        model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        checkpoint = torchrepro.Checkpoint(folder, model=model, optimizer=optimizer)
        with suppress(Interrupted):
            for step in checkpoint.steps(STEPS):
                if step % 4 == 0:
                    _batch(text)  # an evaluation draws as well
                inputs, targets = _batch(text)
                loss = (model(inputs).squeeze(1) - targets).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                checkpoint.save(every)
                if step + 1 == stop:
                    raise Interrupted
    return model.state_dict()


@pytest.mark.parametrize("profile", [None, {"seed": 5}, "seed-only"], ids=str)
@settings(max_examples=8, deadline=None)
@given(stop=st.integers(1, STEPS), every=st.integers(1, 4))
def test_an_interrupted_loop_of_steps_ends_with_the_weights_of_a_whole_one(
    profile: Any, stop: int, every: int
) -> None:
    """Wherever the loop was interrupted, the run that goes on ends with the same bits."""
    with torchrepro.isolated_rng(), TemporaryDirectory() as folder:
        whole = _train(None, 1, None, profile)
        _train(Path(folder), every, stop, profile)
        resumed = _train(Path(folder), every, None, profile)

    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_loop_that_is_done_does_nothing_more(tmp_path: Path) -> None:
    """A run that has come to its end takes no further step when it is started again."""
    checkpoint = torchrepro.Checkpoint(tmp_path)
    for _ in checkpoint.steps(3):
        checkpoint.save()

    assert list(torchrepro.Checkpoint(tmp_path).steps(3)) == []
    assert list(torchrepro.Checkpoint(tmp_path).steps(5)) == [3, 4]


@pytest.mark.parametrize("epochs", [0, 2])
def test_a_place_that_nobody_counts_is_not_saved(tmp_path: Path, epochs: int) -> None:
    """Where neither batches nor steps runs, `save` says what to do, and writes nothing."""
    checkpoint = torchrepro.Checkpoint(tmp_path)
    for _ in checkpoint.epochs(epochs):
        with pytest.raises(torchrepro.SeedingError, match=r"checkpoint\.steps\(N\)"):
            checkpoint.save(every=2)
    if not epochs:
        checkpoint = torchrepro.Checkpoint(tmp_path)
        with pytest.raises(torchrepro.SeedingError, match=r"checkpoint\.batches\(loader\)"):
            checkpoint.save()

    assert list(tmp_path.iterdir()) == []


def test_steps_within_epochs_are_refused(tmp_path: Path) -> None:
    """Steps are those of the whole run: within an epoch they are refused, after one they run."""
    checkpoint = torchrepro.Checkpoint(tmp_path)
    for _ in checkpoint.epochs(2):
        with pytest.raises(torchrepro.SeedingError, match="within epochs"):
            next(checkpoint.steps(1))
        break

    assert list(checkpoint.steps(2)) == [0, 1]


def _steps(checkpoint: torchrepro.Checkpoint, count: int) -> None:
    for _ in checkpoint.steps(count):
        checkpoint.save()


def _batches(checkpoint: torchrepro.Checkpoint, count: int) -> None:
    loader = DataLoader(torch.arange(2.0), batch_size=1)
    for _ in checkpoint.epochs(count):
        for _ in checkpoint.batches(loader):
            checkpoint.save()


def _steps_then_batches(checkpoint: torchrepro.Checkpoint, count: int) -> None:
    _steps(checkpoint, 1)
    _batches(checkpoint, count)


@pytest.mark.parametrize(
    ("then", "now", "other"),
    [
        (_steps, _batches, "saved in a loop of steps, and this is one of batches"),
        (_batches, _steps, "saved in a loop of batches, and this is one of steps"),
        (_steps, _steps, ""),
        (_steps_then_batches, _steps_then_batches, ""),
    ],
)
def test_a_checkpoint_of_another_loop_is_refused(
    tmp_path: Path, then: Any, now: Any, other: str
) -> None:
    """Steps are no batches: what one loop saved, the other refuses."""
    with torchrepro.apply("seed-only"):
        then(torchrepro.Checkpoint(tmp_path), 1)
    refused = pytest.raises(torchrepro.SeedingError, match=other) if other else nullcontext()
    with torchrepro.apply("seed-only"), refused:
        now(torchrepro.Checkpoint(tmp_path), 9)
