"""accelerate's loaders: one without the first batches of an epoch goes on in that epoch.

accelerate, and with it the Hugging Face Trainer, resumes an epoch with `skip_first_batches`, which
returns another loader. It is the same loader for us: its next iteration is the next epoch, or the
interrupted one, and begins where the skipped batches end, without loading them.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from torchrepro.frameworks.hooking import MissingHookError, in_force, wrap, wrap_everywhere
from torchrepro.seeding.loader import (
    LateStart,
    Place,
    bind_loader,
    loaders,
    loading_of,
    samplers_within,
)
from torchrepro.seeding.loader_places import known_loading, stand_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from weakref import ReferenceType

    from torchrepro.seeding.loader import Loading

_at_last_batch: WeakKeyDictionary[Loading, tuple[int, Callable[[], None]]] = WeakKeyDictionary()
"""What seeds loaders whose program was saved at the last batch of an epoch.

With the epoch after, and with what puts the generators where they were.
"""

_stood_for: WeakKeyDictionary[Any, ReferenceType[Any]] = WeakKeyDictionary()
"""Loaders without first batches, each with the one that it was made from."""


def hook_loaders(module: ModuleType) -> ExitStack:
    """Wrap what accelerate's `data_loader` makes loaders with, wherever it was imported to.

    Raises `MissingHookError` where a function is not there.
    """
    with ExitStack() as undo:
        wrap_everywhere(undo, module, "skip_first_batches", _skipping)
        wrap_everywhere(undo, module, "prepare_data_loader", _preparing)
        mixin = getattr(module, "DataLoaderStateMixin", None)
        if mixin is None:
            raise MissingHookError("DataLoaderStateMixin")
        wrap(undo, mixin, "end", _ending)
        return undo.pop_all()


def saved_loaders(prepared: list[Any]) -> list[dict[str, Any]]:
    """Return how far the loaders that an Accelerator has `prepared` have come, in their order."""
    return [_saved(loader) for loader in prepared]


def _saved(loader: Any) -> dict[str, Any]:
    iteration = getattr(loader, "iteration", None)
    loading = known_loading(base_loader(loader))
    if loading is None:  # it has not begun: in the resumed run it gets its name in its turn as well
        return {"name": None, "iteration": iteration}
    at_last = loading.is_at_last_batch
    if iteration is not None:
        iteration += at_last  # accelerate counts it when the program asks for one more
    return {
        "name": loading.name,
        "next_epoch": loading.next_epoch,
        "at_last_batch": at_last,
        "iteration": iteration,
    }


def take_up_loaders(
    prepared: list[Any], saved: list[dict[str, Any]], generators: Callable[[], None]
) -> None:
    """Have the loaders that an Accelerator has `prepared` go on as those that were `saved`.

    `generators` puts the generators where they were. A program that was at the last batch of an
    epoch may skip all of that epoch; what it draws until then does not count.
    """
    for loader, one in zip(prepared, saved, strict=False):
        if one["iteration"] is not None and hasattr(loader, "iteration"):
            loader.iteration = one["iteration"]
        if one["name"] is not None:
            base = base_loader(loader)
            bind_loader(base, one["name"])
            loading = loading_of(base)
            if loading is not None and loading.name == one["name"]:
                loading.go_to(Place(one["next_epoch"], 0))
                if one["at_last_batch"]:
                    _at_last_batch[loading] = one["next_epoch"], generators


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
    loading = stand_for(base, other, late)
    if loading is None:
        return
    epoch, generators = _at_last_batch.get(loading, (None, None))
    if generators is not None and epoch == loading.next_epoch and _leaves_nothing(base, number):
        loading.next_epoch -= 1
        loading.before_first_batch.append(generators)
    elif hasattr(loader, "iteration"):
        _share_iteration(loader, skipped)


def _sampler(base: Any) -> Any:
    return base.sampler if base.batch_sampler is None else base.batch_sampler


def _leaves_nothing(base: Any, number: int) -> bool:
    try:
        return 0 < len(base) <= number
    except TypeError:  # an IterableDataset without a length
        return False


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


def _preparing(original: Any) -> Any:
    def prepare_data_loader(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        bare = [] if in_force() is None else _without_generator(dataloader)
        for part in bare:
            loaders.adopted.add(part)  # a StatefulDataLoader begins an epoch as it is made
        prepared = original(dataloader, *args, **kwargs)
        for part in bare:
            if part.generator is None:
                loaders.adopted.discard(part)
        return prepared

    return prepare_data_loader


def _without_generator(loader: Any) -> list[Any]:
    """Return the samplers of `loader` that may have a generator of their own and have none.

    accelerate gives one to them where it shares batches out among processes.
    """
    tops = (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
    parts = [part for top in tops for part in samplers_within(top)]
    return [part for part in parts if hasattr(part, "generator") and part.generator is None]
