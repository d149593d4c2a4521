"""Seeded DataLoaders for a program that asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrepro.errors import SeedingError
from torchrepro.messages import Problem, shown
from torchrepro.seeding import loader_hook, loader_register, seed_plan
from torchrepro.seeding.loading import ExplicitLoading
from torchrepro.seeding.streams import judged_name
from torchrepro.seeding.whole import whole

if TYPE_CHECKING:
    from collections.abc import Callable


def dataloader_kwargs(
    name: str, epoch: int | None = None, worker_init_fn: Callable[[int], Any] | None = None
) -> dict[str, Any]:
    """Return `generator` and `worker_init_fn` for the DataLoader called `name`.

    Its order then depends on (seed, name, epoch); the numbers that a sample draws from Python's
    `random`, numpy's legacy generator, torch and `sample_rng` on (seed, name, rank, epoch, index):
    not on workers, not on what else drew numbers. Iterating it moves no global generator. The
    first iteration is `epoch` (0, or where a restored snapshot was), each further one the next;
    `set_epoch` names another.
    `worker_init_fn` runs in each worker as well. Raises `SeedingError` where no profile with a
    seed is in force.

    Wraps `DataLoader.__iter__` for as long as a loader made this way is alive.
    """
    seed_plan.current().root(judged_name(name))
    seed_plan.note(name)
    import torch

    first = loader_register.first_epoch(name) if epoch is None else epoch
    loading = ExplicitLoading(name, first, worker_init_fn)
    loader_hook.watch(loading)
    generator = torch.Generator()
    loading.start_order(generator)
    return {"generator": generator, "worker_init_fn": loading}


def set_epoch(loader: Any, epoch: int, start: int = 0) -> None:
    """Make the next iteration of `loader` the epoch `epoch`, leaving out its first `start` batches.

    The batches left out are not loaded. Calls `set_epoch` of the loader's samplers and dataset
    where they have one, as `DistributedSampler` does; works with workers that live on. Raises
    `SeedingError` if nothing in `loader` knows epochs, and for batches to be left out of an
    `IterableDataset` or of a loader that torchrepro does not seed.
    """
    number, left_out = whole("epoch", epoch), whole("start", start)
    loading = loader_register.loading_of(loader)
    if left_out and (loading is None or yields_items(loader)):
        why = "an IterableDataset" if loading is not None else "a loader that is not seeded here"
        raise SeedingError(
            Problem(f"batches of {why} cannot be left out", key="start", found=shown(start))
        )
    if not knows_epochs(loader):
        raise SeedingError(
            Problem("nothing in this loader knows epochs", found=shown(loader), todo=advice(loader))
        )
    if loading is not None:
        loading.next_epoch, loading.next_start = number, left_out
    for part in _others(loader):
        part.set_epoch(number)


def advice(loader: Any) -> str:
    """Return what makes torchrepro seed `loader`."""
    if loader_register.author_seeds(loader):
        return (
            "it has a generator or worker_init_fn of its own: give it "
            "torchrepro.dataloader_kwargs(name) instead"
        )
    return (
        "make it with torchrepro.dataloader_kwargs(name), or apply a profile with "
        "dataloader.seeding: auto"
    )


def knows_epochs(loader: Any) -> bool:
    """Whether `set_epoch` changes anything in `loader`."""
    return loader_register.loading_of(loader) is not None or bool(_others(loader))


def _others(loader: Any) -> list[Any]:
    """Return the parts of `loader` that have a `set_epoch` of their own."""
    return [part for part in _parts(loader) if callable(getattr(part, "set_epoch", None))]


def _parts(loader: Any) -> list[Any]:
    batches = getattr(loader, "batch_sampler", None)
    parts = [
        getattr(loader, "sampler", None),
        batches,
        getattr(batches, "sampler", None),
        getattr(loader, "dataset", None),
    ]
    return list({id(part): part for part in parts if part is not None}.values())


def yields_items(loader: Any) -> bool:
    """Whether `loader` reads an `IterableDataset`, which names no samples."""
    from torch.utils.data import IterableDataset

    return isinstance(getattr(loader, "dataset", None), IterableDataset)
