"""Seeding in the process that loads data: every sample starts from a stream of its own.

A request for samples carries the stream of its loader and epoch, so a worker needs to know nothing
else, and a sample's numbers depend on what it is and not on which process loads it, nor on what
was loaded before. An `IterableDataset` names no samples: there a worker draws from one stream per
epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import index as as_index
from typing import TYPE_CHECKING, Any

from torchrepro.errors import Problem, SeedingError, shown
from torchrepro.seeding.generators import HostState, host_state, seed_host

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from torchrepro.seeding.streams import Stream


@dataclass(frozen=True, slots=True)
class Request:
    """What a sampler asks for, and the stream whose parts the samples draw from."""

    stream: Stream
    index: Any


class _Draw:
    """What the host's generators are drawn for now."""

    __slots__ = ("generator", "stream")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.generator: np.random.Generator | None = None


_present: list[_Draw] = []  # empty outside of loading


def sample_rng() -> np.random.Generator:
    """Return the numpy `Generator` of the sample that is being loaded, ready to draw from.

    Within one sample it goes on where the last call left it; within `collate_fn` it is that of
    the batch. Raises `SeedingError` where no sample is being loaded by a seeded DataLoader.
    """
    if not _present:
        raise SeedingError(
            Problem(
                "no sample is being loaded by a seeded DataLoader",
                found="sample_rng()",
                todo="call it in the dataset of a DataLoader made with dataloader_kwargs, or "
                "under a profile with dataloader.seeding: auto",
            )
        )
    draw = _present[-1]
    if draw.generator is None:
        draw.generator = draw.stream.part("ready").numpy()
    return draw.generator


def draw_from(stream: Stream) -> None:
    """Start the host's generators and `sample_rng` from `stream`, until told otherwise."""
    _present[:] = [_Draw(stream)]
    seed_host(stream)


class Position:
    """A place in the host's generators that is not the program's: entered, moved, and left."""

    def __init__(self) -> None:
        self._inside, self._draws = host_state(), list(_present)
        self._outside: list[tuple[HostState, list[_Draw]]] = []

    def __enter__(self) -> None:
        self._outside.append((host_state(), list(_present)))
        self._inside.put_back()
        _present[:] = self._draws

    def __exit__(self, *_: object) -> None:
        self._inside, self._draws = host_state(), list(_present)
        leave(self._outside.pop())


def leave(outside: tuple[HostState, list[_Draw]]) -> None:
    """Go back to what `enter` returned."""
    outside[0].put_back()
    _present[:] = outside[1]


def enter() -> tuple[HostState, list[_Draw]]:
    """Return where the program stands in the host's generators, for `leave`."""
    return host_state(), list(_present)


def seed_samples(fetcher: Any) -> Any:
    """Have `fetcher`, torch's reader of a map-style dataset, start every sample from its stream."""
    fetcher.fetch = partial(_fetch_samples, fetcher, fetcher.fetch)
    return fetcher


def seed_samples_apart(fetcher: Any) -> Any:
    """Do what `seed_samples` does, and leave the program's own generators where they are."""
    seeded = seed_samples(fetcher).fetch

    def fetch(request: Any) -> Any:
        outside = enter()
        try:
            return seeded(request)
        finally:
            leave(outside)

    fetcher.fetch = fetch
    return fetcher


def seed_items(fetcher: Any, worker: int, begun: Stream | None) -> Any:
    """Have `fetcher`, torch's reader of an `IterableDataset`, draw from one stream per epoch.

    `begun` is the stream that the generators have just been started from, if they have.
    """
    fetcher.fetch = partial(_Items(fetcher, worker, begun), fetcher.fetch)
    return fetcher


def seed_items_apart(fetcher: Any, begun: Stream) -> Any:
    """Do what `seed_items` does in the main process, apart from the program's own generators."""
    seeded, position = seed_items(fetcher, 0, begun).fetch, Position()

    def fetch(request: Any) -> Any:
        with position:
            return seeded(request)

    fetcher.fetch = fetch
    return fetcher


def worker_stream(stream: Stream, worker: int) -> Stream:
    """Return what worker number `worker` of an epoch draws from outside of samples."""
    return stream.part(f"worker/{worker}")


class _Items:
    """The fetching of items from an `IterableDataset`."""

    def __init__(self, fetcher: Any, worker: int, begun: Stream | None) -> None:
        self.fetcher, self.worker, self.begun = fetcher, worker, begun

    def __call__(self, fetch: Callable[[Any], Any], request: Any) -> Any:
        if not isinstance(request, Request):
            return fetch(request)
        if self.begun != request.stream:
            # Workers that live on make the iterator before they hear which epoch it is for.
            self.begun = request.stream
            draw_from(worker_stream(request.stream, self.worker))
            self.fetcher.dataset_iter = iter(self.fetcher.dataset)
        return fetch(request.index)


def _fetch_samples(fetcher: Any, fetch: Callable[[Any], Any], request: Any) -> Any:
    if not isinstance(request, Request):
        return fetch(request)
    dataset, collate = fetcher.dataset, fetcher.collate_fn
    view = _SeededBatches if _reads_batches(dataset) else _SeededSamples
    fetcher.dataset = view(dataset, request.stream)
    fetcher.collate_fn = partial(_collate, collate, request)
    try:
        return fetch(request.index)
    finally:
        fetcher.dataset, fetcher.collate_fn = dataset, collate


def _collate(collate: Callable[[Any], Any], request: Request, samples: Any) -> Any:
    draw_from(request.stream.part(f"batch/{_label(request.index)}"))
    return collate(samples)


class _SeededSamples:
    """A dataset every sample of which starts from a stream of its own."""

    __slots__ = ("_dataset", "_stream")

    def __init__(self, dataset: Any, stream: Stream) -> None:
        self._dataset, self._stream = dataset, stream

    def __getitem__(self, index: Any) -> Any:
        draw_from(self._stream.part(f"sample/{_label(index)}"))
        return self._dataset[index]


class _SeededBatches(_SeededSamples):
    """A dataset that reads whole batches; each batch starts from a stream of its own."""

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        draw_from(self._stream.part(f"samples/{_label(indices)}"))
        return self._dataset.__getitems__(indices)


def _reads_batches(dataset: Any) -> bool:
    """Whether `dataset` reads batches in a way of its own rather than sample by sample."""
    from torch.utils.data import Subset

    while isinstance(dataset, Subset) and type(dataset).__getitems__ is Subset.__getitems__:
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))


def _label(index: Any) -> str:
    """Return a text for `index` that is the same in every process."""
    if type(index) is int:
        return str(index)
    if isinstance(index, list | tuple):
        return f"({','.join(_label(part) for part in index)})"
    try:
        return str(as_index(index))
    except TypeError:
        pass
    if (
        getattr(type(index), "__repr__", None) is object.__repr__
    ):  # it shows an address, another in every process
        raise SeedingError(
            Problem(
                "the sampler yields indices that have no text of their own",
                found=shown(index),
                todo=f"give {type(index).__name__} a __repr__ that says which sample it means",
            )
        )
    return repr(index)
