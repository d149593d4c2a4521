"""A program that goes on within an epoch by itself, and whose samples cannot, is told."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import torchrepro

TOLD = "may not be those of the uninterrupted run"


class Rows(Dataset[Any]):
    """Rows that draw, or do not."""

    def __init__(self, draws: bool) -> None:
        self.draws = draws

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(1) if self.draws else torch.ones(1) * index


def at_the_step(saved: torch.Tensor, dataset: Any) -> None:
    batches = iter(DataLoader(dataset, batch_size=2))
    next(batches)
    torch.set_rng_state(saved)
    list(batches)


def at_both(saved: torch.Tensor, dataset: Any) -> None:
    torch.set_rng_state(saved)
    at_the_step(saved, dataset)


def around_an_evaluation(saved: torch.Tensor, dataset: Any) -> None:
    for _ in DataLoader(dataset, batch_size=2):
        kept = torch.get_rng_state()
        torch.rand(3)
        torch.set_rng_state(kept)


def by_fork_rng(saved: torch.Tensor, dataset: Any) -> None:
    for _ in DataLoader(dataset, batch_size=2):
        with torch.random.fork_rng():
            torch.rand(3)


@pytest.mark.parametrize(
    ("puts_back", "draws", "is_told"),
    [
        (at_the_step, True, True),
        (at_the_step, False, False),
        (at_both, True, False),
        (around_an_evaluation, True, False),
        (by_fork_rng, True, False),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_state_that_is_put_back_too_late_is_told(
    puts_back: Callable[..., None],
    draws: bool,
    is_told: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is told where samples draw and the generator was put back within the epoch alone."""
    saved = torch.get_rng_state()
    with torchrepro.apply("seed-only"):
        puts_back(saved, Rows(draws))

    assert (TOLD in capsys.readouterr().err) == is_told
