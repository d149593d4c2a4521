"""Where seeding meets what reads a dataset for a DataLoader, in workers and the main process."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrepro.errors import SeedingError
from torchrepro.messages import Problem
from torchrepro.seeding import fetching

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchrepro.seeding.streams import Stream


def seed_readers_of_worker(worker: int, begun: Stream) -> None:
    """Have this process, data-loading worker number `worker`, seed whatever it reads.

    `begun` is the epoch's stream, from which its generators have just been started.
    """
    kinds = _kinds()
    kinds.create_fetcher = staticmethod(_InWorker(kinds.create_fetcher, kinds.Map, worker, begun))


@contextmanager
def seeded_readers(begun: Stream) -> Iterator[None]:
    """Seed the readers that are made within the block, which read in the main process."""
    kinds = _kinds()
    original = kinds.create_fetcher
    kinds.create_fetcher = staticmethod(partial(_make_apart, original, kinds.Map, begun))
    try:
        yield
    finally:
        kinds.create_fetcher = staticmethod(original)


def _kinds() -> Any:
    """Return torch's maker of readers.

    Private (``torch.utils.data._DatasetKind.create_fetcher``), because torch has no public place
    between a sampler and a dataset. Where it is gone, seeding a loader raises.
    """
    from torch.utils import data

    kinds = getattr(data, "_DatasetKind", None)
    if not hasattr(kinds, "create_fetcher"):
        raise SeedingError(
            Problem("this torch reads datasets in a way that torchrepro does not know")
        )
    return kinds


def _make_apart(
    original: Callable[..., Any], map_style: int, begun: Stream, kind: int, /, *rest: Any
) -> Any:
    if kind == map_style:
        return fetching.seed_map_apart(original(kind, *rest))
    return fetching.seed_items_apart(partial(original, kind, *rest), begun)


@dataclass(slots=True)
class _InWorker:
    """The maker of readers in a worker."""

    original: Callable[..., Any]
    map_style: int
    worker: int
    begun: Stream | None

    def __call__(self, kind: int, *rest: Any) -> Any:
        if kind == self.map_style:
            return fetching.seed_map(self.original(kind, *rest))
        # Only the first reader is made right after the worker was seeded; a worker that lives on
        # makes another for every epoch.
        begun, self.begun = self.begun, None
        return fetching.seed_items(partial(self.original, kind, *rest), self.worker, begun)
