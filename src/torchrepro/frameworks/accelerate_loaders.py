"""accelerate's loaders: one without the first batches of an epoch goes on in that epoch.

accelerate, and with it the Hugging Face Trainer, resumes an epoch with `skip_first_batches`, which
returns another loader. It is the same loader for us: its next iteration is the next epoch, or the
interrupted one, and begins where the skipped batches end, without loading them.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torchrepro.frameworks.hooking import in_force, wrap_everywhere
from torchrepro.seeding.loader import LateStart
from torchrepro.seeding.loader_places import stand_for

if TYPE_CHECKING:
    from types import ModuleType


def hook_loaders(module: ModuleType) -> ExitStack:
    """Wrap `skip_first_batches` of accelerate's `data_loader`, wherever it was imported to.

    Raises `MissingHookError` where there is none.
    """
    with ExitStack() as undo:
        wrap_everywhere(undo, module, "skip_first_batches", _skipping)
        return undo.pop_all()


def base_loader(loader: Any) -> Any:
    """Return the loader of torch that one of accelerate's iterates; any other as it is."""
    return getattr(loader, "base_dataloader", loader)


def _skipping(original: Any) -> Any:
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if in_force() is None:
            return original(dataloader, num_batches)
        number = num_batches * _batches_at_once(dataloader)
        skipped = original(dataloader, number)
        _go_on(dataloader, skipped, number)
        return skipped

    return skip_first_batches


def _batches_at_once(loader: Any) -> int:
    """Return how many batches of the loader of torch one batch of `loader` is made of.

    A `DataLoaderDispatcher` loads one for each process, and accelerate skips as many as it is told
    where it has a sampler to skip in.
    """
    dispatched = type(loader).__name__ == "DataLoaderDispatcher" and not loader.split_batches
    return loader.state.num_processes if dispatched and _has_batches(loader) else 1


def _has_batches(loader: Any) -> bool:
    from torch.utils.data import IterableDataset

    return not isinstance(loader.dataset, IterableDataset)


def _go_on(loader: Any, skipped: Any, number: int) -> None:
    """Have `skipped` be the same loader as `loader`, without its first `number` batches."""
    base, other = base_loader(loader), base_loader(skipped)
    late = None  # what has no samples to leave out is read and dropped, which accelerate does
    if _has_batches(other):
        late = LateStart(number, _sampler(base))
    stand_for(base, other, late)
    if hasattr(loader, "iteration"):
        _share_iteration(loader, skipped)


def _sampler(base: Any) -> Any:
    return base.sampler if base.batch_sampler is None else base.batch_sampler


def _share_iteration(loader: Any, skipped: Any) -> None:
    """Have the epoch of `skipped` count as one of `loader`, whose samplers learn which it is.

    accelerate's own set_epoch does not reach them through the sampler that skips.
    """
    skipped.iteration = loader.iteration
    loader.set_epoch(loader.iteration)
    loader.iteration += 1
