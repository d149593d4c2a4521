"""accelerate's loaders: one without the first batches of an epoch goes on in that epoch.

accelerate, and with it the Hugging Face Trainer, resumes an epoch with `skip_first_batches`, which
returns another loader. The epoch of that one counts as one of the loader that it was made from.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from torchrepro.frameworks.hooking import in_force
from torchrepro.patching import MissingHookError, wrap, wrap_everywhere
from torchrepro.seeding.loader_places import (
    batches_of_pass,
    is_at_end,
    place_of,
    reads_items,
    skip_batches,
)

if TYPE_CHECKING:
    from types import ModuleType
    from weakref import ReferenceType

_stood_for: WeakKeyDictionary[Any, ReferenceType[Any]] = WeakKeyDictionary()
"""Loaders without first batches, each with the one that it was made from."""


def hook_loaders(module: ModuleType) -> ExitStack:
    """Wrap what accelerate's `data_loader` makes loaders with, wherever it was imported to.

    Raises `MissingHookError` where a function is not there.
    """
    with ExitStack() as undo:
        wrap_everywhere(undo, module, "skip_first_batches", _skipping)
        mixin = getattr(module, "DataLoaderStateMixin", None)
        if mixin is None:
            raise MissingHookError("DataLoaderStateMixin")
        wrap(undo, mixin, "end", _ending)
        return undo.pop_all()


def saved_loaders(prepared: list[Any]) -> list[int | None]:
    """Return which epoch each loader that an Accelerator has `prepared` counts; None for none."""
    return [_saved(loader) for loader in prepared]


def _saved(loader: Any) -> int | None:
    iteration = getattr(loader, "iteration", None)
    # accelerate counts it when the program asks for one more batch than there are
    return None if iteration is None else iteration + is_at_end(base_loader(loader))


def places_at_end(prepared: list[Any]) -> set[int]:
    """Return the numbers of the places of loaders of which accelerate knows that they are done.

    A rank to which another one sends its batches has none from which it could be seen.
    """
    done = [loader for loader in prepared if getattr(loader, "end_of_dataloader", False)]
    places = (place_of(base_loader(loader)) for loader in done)
    return {place["number"] for place in places if place is not None}


def take_up_loaders(prepared: list[Any], iterations: list[int | None]) -> None:
    """Have the loaders that an Accelerator has `prepared` count on from the saved `iterations`."""
    for loader, iteration in zip(prepared, iterations, strict=False):
        if iteration is not None and hasattr(loader, "iteration"):
            loader.iteration = iteration


def base_loader(loader: Any) -> Any:
    """Return the loader of torch that one of accelerate's iterates; any other as it is."""
    return getattr(loader, "base_dataloader", loader)


def _skipping(original: Any) -> Any:
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if in_force() is None:
            return original(dataloader, num_batches)
        number = num_batches * _batches_at_once(dataloader)
        number = batches_of_pass(base_loader(dataloader), number)
        skipped = original(dataloader, number)
        leaves_nothing = skip_batches(base_loader(dataloader), base_loader(skipped), number)
        if not leaves_nothing and hasattr(dataloader, "iteration"):
            _share_iteration(dataloader, skipped)
        return skipped

    return skip_first_batches


def _batches_at_once(loader: Any) -> int:
    """Return how many batches of the loader of torch one batch of `loader` is made of.

    A `DataLoaderDispatcher` loads one for each process, and accelerate skips as many as it is told
    where it has a sampler to skip in.
    """
    dispatched = type(loader).__name__ == "DataLoaderDispatcher" and not loader.split_batches
    return loader.state.num_processes if dispatched and not reads_items(loader) else 1


def _share_iteration(loader: Any, skipped: Any) -> None:
    """Have the epoch of `skipped` count as one of `loader`, whose samplers learn which it is.

    accelerate's own set_epoch does not reach them through the sampler that skips.
    """
    skipped.iteration = loader.iteration
    loader.set_epoch(loader.iteration)
    _stood_for[skipped] = ref(loader)


def _ending(original: Any) -> Any:
    def end(self: Any) -> Any:
        loader = _stood_for[self]() if self in _stood_for else None
        if loader is not None:
            loader.iteration = self.iteration
        return original(self)

    return end
