"""Seeding in the process that loads data: every sample, or every batch, from its own stream.

A request for a batch carries the stream of its loader and epoch, so a worker needs to know nothing
else, and what is loaded draws numbers by what it is: not by which process loads it, nor by what
was loaded before. An `IterableDataset` names no samples: there a worker draws from one stream per
epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import index as as_index
from struct import error, pack
from typing import TYPE_CHECKING, Any

from torchrepro.errors import Problem, SeedingError, shown
from torchrepro.seeding.generators import HostState, host_state, seed_host

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from torchrepro.seeding.streams import Stream


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What a sampler asks for, all of it drawing from one part of a stream."""

    stream: Stream
    index: Any

    def fetch(self, reader: Any, fetch: Callable[[Any], Any]) -> Any:
        """Load the batch through `fetch`, the own way of torch's `reader`."""
        draw_from(self.stream.part(b"batch/" + _label(self.index)))
        return fetch(self.index)


@dataclass(frozen=True, slots=True)
class SampleRequest(BatchRequest):
    """What a sampler asks for, every sample drawing from a part of its own.

    `collate_fn` draws from the batch's part.
    """

    def fetch(self, reader: Any, fetch: Callable[[Any], Any]) -> Any:
        """Load the batch through `fetch`, the own way of torch's `reader`, sample by sample."""
        dataset, collate = reader.dataset, reader.collate_fn
        view = _SeededBatches if _reads_batches(dataset) else _SeededSamples
        reader.dataset = view(dataset, self.stream)
        reader.collate_fn = partial(self._collate, collate)
        try:
            return fetch(self.index)
        finally:
            reader.dataset, reader.collate_fn = dataset, collate

    def _collate(self, collate: Callable[[Any], Any], samples: Any) -> Any:
        draw_from(self.stream.part(b"batch/" + _label(self.index)))
        return collate(samples)


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
        draw.generator = draw.stream.part(b"ready").numpy()
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


def seed_map(reader: Any) -> Any:
    """Have `reader`, torch's reader of a map-style dataset, draw as its requests say."""
    reader.fetch = partial(_fetch, reader, reader.fetch)
    return reader


def seed_map_apart(reader: Any) -> Any:
    """Do what `seed_map` does, and leave the program's own generators where they are."""
    seeded = seed_map(reader).fetch

    def fetch(request: Any) -> Any:
        outside = enter()
        try:
            return seeded(request)
        finally:
            leave(outside)

    reader.fetch = fetch
    return reader


def seed_items(reader: Any, worker: int, begun: Stream | None) -> Any:
    """Have `reader`, torch's reader of an `IterableDataset`, draw from one stream per epoch.

    `begun` is the stream that the generators have just been started from, if they have.
    """
    reader.fetch = partial(_Items(reader, worker, begun), reader.fetch)
    return reader


def seed_items_apart(reader: Any, begun: Stream) -> Any:
    """Do what `seed_items` does in the main process, apart from the program's own generators."""
    seeded, position = seed_items(reader, 0, begun).fetch, Position()

    def fetch(request: Any) -> Any:
        with position:
            return seeded(request)

    reader.fetch = fetch
    return reader


def worker_stream(stream: Stream, worker: int) -> Stream:
    """Return what worker number `worker` of an epoch draws from outside of samples."""
    return stream.part(b"worker/%d" % worker)


class _Items:
    """The fetching of items from an `IterableDataset`."""

    def __init__(self, reader: Any, worker: int, begun: Stream | None) -> None:
        self.reader, self.worker, self.begun = reader, worker, begun

    def __call__(self, fetch: Callable[[Any], Any], request: Any) -> Any:
        if not isinstance(request, BatchRequest):
            return fetch(request)
        if self.begun != request.stream:
            # Workers that live on make the iterator before they hear which epoch it is for.
            self.begun = request.stream
            draw_from(worker_stream(request.stream, self.worker))
            self.reader.dataset_iter = iter(self.reader.dataset)
        return fetch(request.index)


def _fetch(reader: Any, fetch: Callable[[Any], Any], request: Any) -> Any:
    return request.fetch(reader, fetch) if isinstance(request, BatchRequest) else fetch(request)


class _SeededSamples:
    """A dataset every sample of which starts from a stream of its own."""

    __slots__ = ("_dataset", "_stream")

    def __init__(self, dataset: Any, stream: Stream) -> None:
        self._dataset, self._stream = dataset, stream

    def __getitem__(self, index: Any) -> Any:
        draw_from(self._stream.part(b"sample/" + _label(index)))
        return self._dataset[index]


class _SeededBatches(_SeededSamples):
    """A dataset that reads whole batches; each batch starts from a stream of its own."""

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        draw_from(self._stream.part(b"samples/" + _label(indices)))
        return self._dataset.__getitems__(indices)


def _reads_batches(dataset: Any) -> bool:
    """Whether `dataset` reads batches in a way of its own rather than sample by sample."""
    from torch.utils.data import Subset

    while isinstance(dataset, Subset) and type(dataset).__getitems__ is Subset.__getitems__:
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))


def _label(index: Any) -> bytes:
    """Return bytes for `index` that are the same in every process."""
    if isinstance(index, list | tuple):
        try:
            return pack(f"<{len(index)}q", *index)  # a batch of sample numbers, the usual case
        except error:
            return b"(" + b",".join(map(_label, index)) + b")"
    try:
        return b"%d" % as_index(index)
    except TypeError:
        pass
    if getattr(type(index), "__repr__", None) is object.__repr__:
        # It would show an address, which is another in every process.
        raise SeedingError(
            Problem(
                "the sampler yields indices that have no text of their own",
                found=shown(index),
                todo=f"give {type(index).__name__} a __repr__ that says which sample it means",
            )
        )
    return repr(index).encode()
