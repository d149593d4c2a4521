"""Seeding in the process that loads data: every sample, or every batch, from its own stream.

A request for a batch carries the stream of its loader and epoch, so a worker needs to know nothing
else, and what is loaded draws numbers by what it is: not by which process loads it, nor by what
was loaded before. An `IterableDataset` names no samples: there a worker draws from one stream per
epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrepro.seeding.drawing import Position, draw_from, enter, leave, worker_stream
from torchrepro.seeding.indices import label

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torchrepro.seeding.streams import Stream


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What a sampler asks for, all of it drawing from one part of a stream."""

    stream: Stream
    number: int
    """The batch's number in its epoch."""

    index: Any
    again: Mapping[bytes, int]
    """Samples of the batch that the epoch has had before, by label, and how often."""

    def fetch(self, reader: Any, fetch: Callable[[Any], Any]) -> Any:
        """Load the batch through `fetch`, the own way of torch's `reader`."""
        self.draw()
        return fetch(self.index)

    def draw(self) -> None:
        """Start the generators from the batch's part of the stream."""
        draw_from(self.stream.part(b"batch/%d" % self.number))


@dataclass(frozen=True, slots=True)
class SampleRequest(BatchRequest):
    """What a sampler asks for, every sample drawing from a part of its own.

    `collate_fn`, and a dataset that reads whole batches, draw from the batch's part.
    """

    def fetch(self, reader: Any, fetch: Callable[[Any], Any]) -> Any:
        """Load the batch through `fetch`, the own way of torch's `reader`, sample by sample."""
        dataset, collate = reader.dataset, reader.collate_fn
        view = _SeededBatches if _reads_batches(dataset) else _SeededSamples
        reader.dataset = view(dataset, self)
        reader.collate_fn = partial(self._collate, collate)
        try:
            return fetch(self.index)
        finally:
            reader.dataset, reader.collate_fn = dataset, collate

    def _collate(self, collate: Callable[[Any], Any], samples: Any) -> Any:
        self.draw()
        return collate(samples)


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


def seed_items(make: Callable[[], Any], worker: int, begun: Stream | None) -> Any:
    """Return a reader of an `IterableDataset`, by `make`, that draws from one stream per epoch.

    `begun` is the stream that the generators have just been started from. Where it is None the
    reader is made with the first request, which says what the epoch is.
    """
    return _ItemReader(make, worker, begun)


def seed_items_apart(make: Callable[[], Any], begun: Stream) -> Any:
    """Do what `seed_items` does in the main process, apart from the program's own generators."""
    draw_from(worker_stream(begun, 0))  # torch has drawn from it since the epoch began
    reader = _ItemReader(make, 0, begun)
    seeded, position = reader.fetch, Position()

    def fetch(request: Any) -> Any:
        with position:
            return seeded(request)

    reader.fetch = fetch  # type: ignore[method-assign]
    return reader


class _ItemReader:
    """Reads items, and is otherwise the reader of torch's that it stands for."""

    def __init__(self, make: Callable[[], Any], worker: int, begun: Stream | None) -> None:
        vars(self).update(_make=make, _worker=worker, _begun=begun, _reader=None)
        if begun is not None:
            self._made()

    def fetch(self, request: Any) -> Any:
        """Load what `request` asks for, as torch's reader does."""
        if not isinstance(request, BatchRequest):
            return self._made().fetch(request)
        if self._begun != request.stream:
            late = self._reader is not None
            vars(self)["_begun"] = request.stream
            draw_from(worker_stream(request.stream, self._worker))
            if late:  # somebody looked at it before the epoch was known
                self._reader.dataset_iter = iter(self._reader.dataset)
        return self._made().fetch(request.index)

    def _made(self) -> Any:
        if self._reader is None:
            vars(self)["_reader"] = self._make()
        return self._reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "fetch":
            vars(self)[name] = value
        else:
            setattr(self._made(), name, value)


def _fetch(reader: Any, fetch: Callable[[Any], Any], request: Any) -> Any:
    return request.fetch(reader, fetch) if isinstance(request, BatchRequest) else fetch(request)


class _SeededSamples:
    """A dataset every sample of which starts from a stream of its own."""

    __slots__ = ("_again", "_dataset", "_request")

    def __init__(self, dataset: Any, request: BatchRequest) -> None:
        self._dataset, self._request = dataset, request
        self._again = dict(request.again)

    def __getitem__(self, index: Any) -> Any:
        name = label(index)
        times = self._again.get(name, 0)
        if name in self._again:
            self._again[name] = times + 1
        draw_from(self._request.stream.part(b"sample/%d/" % times + name))
        return self._dataset[index]


class _SeededBatches(_SeededSamples):
    """A dataset that reads whole batches; each batch starts from a stream of its own."""

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        self._request.draw()
        return self._dataset.__getitems__(indices)


def _reads_batches(dataset: Any) -> bool:
    """Whether `dataset` reads batches in a way of its own rather than sample by sample."""
    from torch.utils.data import Subset

    while isinstance(dataset, Subset) and type(dataset).__getitems__ is Subset.__getitems__:
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))
