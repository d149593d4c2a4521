"""Seeding in the process that loads data: every sample, or every batch, from its own stream.

A request for a batch carries the stream of its loader and epoch, so a worker needs to know nothing
else, and what is loaded draws numbers by what it is: not by which process loads it, nor by what
was loaded before. An `IterableDataset` names no samples: there a worker draws from one stream per
epoch.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import index as as_index
from typing import TYPE_CHECKING, Any

from torchrepro.errors import SeedingError
from torchrepro.messages import Problem, shown
from torchrepro.seeding.generators import HostState, host_state, seed_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy as np

    from torchrepro.seeding.streams import Stream


_NOTHING: Mapping[bytes, int] = {}


class Repeats:
    """Counts the samples of an epoch, so that one which comes again draws other numbers."""

    def __init__(self) -> None:
        self._seen: Counter[bytes] = Counter()

    def of(self, index: Any) -> Mapping[bytes, int]:
        """Return how often the epoch has had each sample of the batch `index` before.

        Samples that come for the first time, and once, are left out.
        """
        names = [label(part) for part in index] if isinstance(index, list) else [label(index)]
        within = Counter(names)
        again = {
            name: self._seen[name]
            for name, times in within.items()
            if times > 1 or name in self._seen
        }
        self._seen.update(within)
        return again


class NoRepeats(Repeats):
    """Stands for the count of a sampler that yields no index twice."""

    def of(self, index: Any) -> Mapping[bytes, int]:
        """Return that no sample of the batch `index` has been there before."""
        return _NOTHING


def single(sampler: Any) -> Any:
    """Return what yields single indices: `sampler`, or the one that torch's makes batches of."""
    from torch.utils.data import BatchSampler

    return sampler.sampler if type(sampler) is BatchSampler else sampler


def repeats_of(sampler: Any) -> Repeats:
    """Return the count for an epoch of `sampler`, a free one if it yields no index twice."""
    from torch.utils import data

    sampler = single(sampler)
    once = type(sampler) in (data.SequentialSampler, data.DistributedSampler)
    if type(sampler) is data.RandomSampler:
        once = not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    return NoRepeats() if once else Repeats()


def label(index: Any) -> bytes:
    """Return bytes for `index` that are the same in every process."""
    if type(index) is int:
        return b"%d" % index
    if isinstance(index, list | tuple):
        return b"(" + b",".join(map(label, index)) + b")"
    if hasattr(index, "tolist"):  # an array or a tensor, whose text leaves out its middle
        return label(index.tolist())
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


class _Draw:
    """What the host's generators are drawn for now."""

    __slots__ = ("generator", "stream")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.generator: np.random.Generator | None = None


class _Present(threading.local):
    """What this thread draws for; empty outside of loading."""

    def __init__(self) -> None:
        self.draws: list[_Draw] = []


_here = _Present()


def sample_rng() -> np.random.Generator:
    """Return the numpy `Generator` of the sample that is being loaded, ready to draw from.

    Within one sample it goes on where the last call left it; within `collate_fn` it is that of
    the batch. Raises `SeedingError` where no sample is being loaded by a seeded DataLoader.
    """
    if not _here.draws:
        raise SeedingError(
            Problem(
                "no sample is being loaded by a seeded DataLoader",
                found="sample_rng()",
                todo="call it in the dataset of a DataLoader made with dataloader_kwargs, or "
                "under a profile with dataloader.seeding: auto",
            )
        )
    draw = _here.draws[-1]
    if draw.generator is None:
        draw.generator = draw.stream.part(b"ready").numpy()
    return draw.generator


def is_loading() -> bool:
    """Whether a sample or a batch is being loaded in this process now."""
    return bool(_here.draws)


def draw_from(stream: Stream) -> None:
    """Start the host's generators and `sample_rng` from `stream`, until told otherwise."""
    _here.draws[:] = [_Draw(stream)]
    seed_host(stream)


class Position:
    """A place in the host's generators that is not the program's: entered, moved, and left."""

    def __init__(self) -> None:
        self._inside, self._draws = host_state(), list(_here.draws)
        self._outside: list[tuple[HostState, list[_Draw]]] = []

    def __enter__(self) -> None:
        self._outside.append((host_state(), list(_here.draws)))
        self._inside.put_back()
        _here.draws[:] = self._draws

    def __exit__(self, *_: object) -> None:
        self._inside, self._draws = host_state(), list(_here.draws)
        leave_draw(self._outside.pop())


def leave_draw(outside: tuple[HostState, list[_Draw]]) -> None:
    """Go back to what `enter` returned."""
    outside[0].put_back()
    _here.draws[:] = outside[1]


def enter_draw() -> tuple[HostState, list[_Draw]]:
    """Return where the program stands in the host's generators, for `leave`."""
    return host_state(), list(_here.draws)


def worker_stream(stream: Stream, worker: int) -> Stream:
    """Return what worker number `worker` of an epoch draws from outside of samples."""
    return stream.part(b"worker/%d" % worker)


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
        outside = enter_draw()
        try:
            return seeded(request)
        finally:
            leave_draw(outside)

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
        return seed_map_apart(original(kind, *rest))
    return seed_items_apart(partial(original, kind, *rest), begun)


@dataclass(slots=True)
class _InWorker:
    """The maker of readers in a worker."""

    original: Callable[..., Any]
    map_style: int
    worker: int
    begun: Stream | None

    def __call__(self, kind: int, *rest: Any) -> Any:
        if kind == self.map_style:
            return seed_map(self.original(kind, *rest))
        # Only the first reader is made right after the worker was seeded; a worker that lives on
        # makes another for every epoch.
        begun, self.begun = self.begun, None
        return seed_items(partial(self.original, kind, *rest), self.worker, begun)
