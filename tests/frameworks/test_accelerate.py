"""accelerate under a profile: its loaders, its switches, its checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import torchrepro

from .training import Augmented

if TYPE_CHECKING:
    from collections.abc import Iterator

sys.path.append(str(Path(__file__).parents[1] / "policies"))

from known_layers import let_torchvision_be_imported

let_torchvision_be_imported()
accelerate = pytest.importorskip("accelerate")

SKIPPED = 5


class Read(IterableDataset):
    """The same rows, read one after the other."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (Augmented()[index] for index in range(len(Augmented())))


def _loader(kind: str, workers: int) -> Any:
    if kind == "read":
        return DataLoader(Read(), batch_size=4, num_workers=workers)
    own = torchrepro.dataloader_kwargs("data") if kind == "named" else {}
    return DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=workers, **own)


def _epochs(kind: str, workers: int, *, dispatched: bool, skipped: int) -> list[torch.Tensor]:
    """Return three epochs of a prepared loader, the second without its first `skipped` batches."""
    config = accelerate.utils.DataLoaderConfiguration(dispatch_batches=dispatched)
    with torchrepro.apply("debug-strict"):
        accelerator = accelerate.Accelerator(dataloader_config=config)
        loader = accelerator.prepare(_loader(kind, workers))
        first = torch.stack(list(loader))
        rest = accelerator.skip_first_batches(loader, skipped) if skipped else loader
        return [first, torch.stack(list(rest)), torch.stack(list(loader))]


@pytest.mark.parametrize("dispatched", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["shuffled", "read", "named"])
def test_skipped_batches_are_left_out_of_the_epoch_that_they_belong_to(
    kind: str, workers: int, dispatched: bool
) -> None:
    """Without its first batches an epoch has the same others, and so has the next epoch."""
    whole = _epochs(kind, workers, dispatched=dispatched, skipped=0)

    rest = _epochs(kind, workers, dispatched=dispatched, skipped=SKIPPED)

    assert not torch.equal(whole[1], whole[2])
    assert torch.equal(rest[1], whole[1][SKIPPED:])
    assert torch.equal(rest[2], whole[2])


def test_skipped_batches_are_not_loaded() -> None:
    """A dataset is not asked for what is skipped."""

    class Counted(Augmented):
        asked = 0

        def __getitem__(self, index: int) -> torch.Tensor:
            Counted.asked += 1
            return super().__getitem__(index)

    with torchrepro.apply("debug-strict"):
        rest = accelerate.skip_first_batches(DataLoader(Counted(), batch_size=4), SKIPPED)
        batches = list(rest)

    assert (Counted.asked, len(rest)) == (len(Counted()) - 4 * SKIPPED, len(batches))


def test_without_a_profile_accelerate_is_as_it_was() -> None:
    """After a profile, its functions are its own again, wherever they were imported to."""
    before = accelerate.skip_first_batches

    with torchrepro.apply("debug-strict"):
        within = accelerate.accelerator.skip_first_batches

    assert within is not before
    assert accelerate.accelerator.skip_first_batches is accelerate.skip_first_batches is before
