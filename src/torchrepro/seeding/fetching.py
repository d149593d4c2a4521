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
from torchrepro.seeding.drawing import Position, draw_from, enter, leave, worker_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    if hasattr(index, "tolist"):  # an array or a tensor, whose text leaves out its middle
        return _label(index.tolist())
    try:
        return b"%d" % as_index(index)
    except TypeError:
        text = repr(index)
    if " at 0x" in text:  # an address, which is another in every process
        raise SeedingError(
            Problem(
                "the sampler yields indices that have no text of their own",
                found=shown(index),
                todo="give their class a __repr__ that says which sample is meant",
            )
        )
    return text.encode()
