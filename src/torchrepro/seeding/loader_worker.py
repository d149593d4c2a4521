"""Seeding in the process that loads data: every sample from a stream of its own.

A request for a batch says which stream its samples are parts of, so a worker needs to know nothing
else. What is loaded draws numbers by what it is: not by which process loads it, nor by what was
loaded before. An `IterableDataset` names no samples: a worker draws on from one stream per epoch.
"""

from __future__ import annotations

import os
import threading
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import index as as_index
from typing import TYPE_CHECKING, Any

from torchrepro.errors import SeedingError
from torchrepro.messages import Problem
from torchrepro.seeding.generators import host_states, seed_host, seed_sample
from torchrepro.seeding.streams import (
    current_plan,
    derive,
    keep_program_seed,
    present_worker,
    put_program_seed,
    stream,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    import numpy as np

    from torchrepro.seeding.generators import Given
    from torchrepro.seeding.streams import Stream


class _Draw:
    """The stream from which the host's generators were started, and `sample_rng` on it."""

    __slots__ = ("generator", "stream")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.generator: np.random.Generator | None = None


class _Present(threading.local):
    first_sample: Callable[[bool], None] | None = None  # is told whether the next one draws
    draw: _Draw | None = None  # None outside of loading
    unseeded: tuple[Any, np.random.Generator] | None = None  # where nothing seeds what is loaded


_here = _Present()


def loads_sample() -> bool:
    """Whether this thread loads a sample for a loader that is seeded, or is a loader's worker."""
    return _here.draw is not None or present_worker() is not None


def sample_rng() -> np.random.Generator:
    """Return the numpy `Generator` of the sample that is being loaded, ready to draw from.

    Within one sample it goes on where the last call left it. Within `collate_fn` it is that of
    the batch. Where no profile with a seed is in force and no seeded DataLoader loads the sample,
    it is one generator for this process and thread, which goes on from sample to sample and derives
    from the program's own seed, as `stream` says. Raises `SeedingError` under a profile where no
    sample is being loaded by a seeded DataLoader.
    """
    draw = _here.draw
    if draw is None and current_plan().seed is None:
        return _of_program()
    if draw is None:
        raise SeedingError(
            Problem(
                "no sample is being loaded by a seeded DataLoader",
                found="sample_rng()",
                todo="call it in the dataset of a DataLoader made with dataloader_kwargs, or "
                "under a profile with dataloader.seeding: auto",
            )
        )
    if draw.generator is None:
        draw.generator = draw.stream.part(b"ready").numpy()
    return draw.generator


def _of_program() -> np.random.Generator:
    """Return the generator of this thread for the program's own seed, which may have changed."""
    source = stream("sample_rng")
    key = (os.getpid(), source.key)
    if _here.unseeded is None or _here.unseeded[0] != key:
        _here.unseeded = (key, source.numpy())
    return _here.unseeded[1]


def is_loading() -> bool:
    """Whether this thread is loading a sample or a batch now."""
    return _here.draw is not None


def draw_from(stream: Stream, given: Given | None = None) -> None:
    """Start the host's generators and `sample_rng` from `stream`, and the `given` seeds if any."""
    _here.draw = _Draw(stream)
    keep_program_seed()
    if given is None:
        seed_host(stream)
    else:
        seed_sample(stream, *given)


def stream_of(base_seed: int) -> Stream:
    """Return what the samples of an epoch are parts of, for which torch has drawn `base_seed`."""
    return derive("data", base_seed, kind="data")


def _stream_of_worker() -> Stream:
    """Return what the samples of the epoch are parts of with which this worker was started.

    torch starts worker `id` of an epoch with the seed `base seed + id`
    (https://docs.pytorch.org/docs/stable/data.html#randomness-in-multi-process-data-loading).
    """
    from torch.utils.data import get_worker_info

    info: Any = get_worker_info()
    return stream_of(info.seed - info.id)


def worker_stream(stream: Stream, worker: int) -> Stream:
    """Return what worker number `worker` of an epoch draws from outside of samples."""
    return stream.part(b"worker/%d" % worker)


class _Place:
    """Where the host's generators and `sample_rng` stood when this was made."""

    def __init__(self) -> None:
        self._states, self._draw = host_states(), _here.draw
        self._program_seed = current_plan().program_seed

    def put_back(self) -> None:
        """Go back to this place."""
        self._states.put_back()
        _here.draw = self._draw
        put_program_seed(self._program_seed)


@contextmanager
def isolated_draws() -> Iterator[None]:
    """Leave the host's generators and `sample_rng` where they are, whatever the block draws."""
    outside = _Place()
    try:
        yield
    finally:
        outside.put_back()


class Position:
    """A place in the host's generators that is not the program's: entered, moved, and left."""

    def __init__(self) -> None:
        self._inside = _Place()
        self._outside: list[_Place] = []

    def __enter__(self) -> None:
        self._outside.append(_Place())
        self._inside.put_back()

    def __exit__(self, *_: object) -> None:
        self._inside = _Place()
        self._outside.pop().put_back()


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
        return f"a {type(index).__qualname__}".encode()  # and each counts as one that comes again
    return text.encode()


@dataclass(frozen=True, slots=True)
class Request:
    """What a sampler asks for; every sample of it draws from a part of a stream of its own.

    `collate_fn`, and a dataset that reads whole batches, draw from the batch's part.
    """

    stream: Stream | None
    """None for that of the epoch with which the worker was started."""

    index: Any
    again: Mapping[bytes, int]
    """How often the epoch has had a sample of the batch before, by label."""

    given: Given | None
    """The program's own seeds that samples depend on; None for those of a named loader."""

    def fetch(self, reader: Any, fetch: Callable[[Any], Any]) -> Any:
        """Load the batch through `fetch`, the own method of torch's `reader`, sample by sample."""
        stream = self.stream or _stream_of_worker()
        dataset, collate = reader.dataset, reader.collate_fn
        view = _SeededBatches if _reads_batches(dataset) else _SeededSamples
        reader.dataset = view(dataset, self, stream)
        reader.collate_fn = partial(self._collate, stream, collate)
        try:
            return fetch(self.index)
        finally:
            reader.dataset, reader.collate_fn = dataset, collate

    def draw(self, stream: Stream) -> None:
        """Start the generators from the batch's part of `stream`."""
        times = b",".join(b"%d" % self.again[name] for name in sorted(self.again))
        draw_from(stream.part(b"batch/" + times + b"/" + label(self.index)), self.given)

    def _collate(self, stream: Stream, collate: Callable[[Any], Any], samples: Any) -> Any:
        self.draw(stream)
        return collate(samples)


def _index_in(request: Any) -> Any:
    """Return what a sampler has yielded, of which a `Request` may have been made."""
    return request.index if isinstance(request, Request) else request


class _SeededSamples:
    """A dataset every sample of which starts from a stream of its own."""

    __slots__ = ("_again", "_dataset", "_request", "_stream")

    def __init__(self, dataset: Any, request: Request, stream: Stream) -> None:
        self._dataset, self._request, self._stream = dataset, request, stream
        self._again = dict(request.again)

    def __getitem__(self, index: Any) -> Any:
        name = label(index)
        times = self._again.get(name, 0)
        if name in self._again:
            self._again[name] = times + 1
        draw_from(self._stream.part(b"sample/%d/" % times + name), self._request.given)
        tell, _here.first_sample = _here.first_sample, None
        if tell is None:
            return self._dataset[index]
        before = host_states()
        sample = self._dataset[index]
        tell(not before.are_present())
        return sample


class _SeededBatches(_SeededSamples):
    """A dataset that reads whole batches; each batch starts from a stream of its own."""

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        self._request.draw(self._stream)
        return self._dataset.__getitems__(indices)


def _reads_batches(dataset: Any) -> bool:
    """Whether `dataset` itself reads batches, rather than sample by sample."""
    from torch.utils.data import Subset

    while isinstance(dataset, Subset) and type(dataset).__getitems__ is Subset.__getitems__:
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))


def seed_readers_of_worker(worker: int, begun: Stream | None, given: Given | None) -> None:
    """Have this process, data-loading worker number `worker`, seed whatever it reads.

    `begun` is the epoch's stream; None for that of the epoch with which the worker was started.
    """
    kinds = _dataset_kinds()
    original = kinds.create_fetcher
    begun = begun or _stream_of_worker()
    # Only the first reader is made right after the worker was started. A worker that lives on makes
    # another for every epoch.
    streams_begun = [begun]

    def create_fetcher(kind: int, *rest: Any) -> Any:
        if kind == kinds.Map:
            return _seeded_map(original(kind, *rest))
        make = partial(original, kind, *rest)
        return _ItemReader(make, worker, streams_begun.pop() if streams_begun else None)

    kinds.create_fetcher = staticmethod(create_fetcher)
    draw_from(worker_stream(begun, worker), given)


@contextmanager
def readers_made_by(make: Callable[[bool, Callable[[], Any]], Any]) -> Iterator[None]:
    """Have ``make(reads samples by index, original)`` make the readers of torch in the block."""
    kinds = _dataset_kinds()
    original = kinds.create_fetcher

    def create_fetcher(kind: int, *rest: Any) -> Any:
        return make(kind == kinds.Map, partial(original, kind, *rest))

    kinds.create_fetcher = staticmethod(create_fetcher)
    try:
        yield
    finally:
        kinds.create_fetcher = staticmethod(original)


def isolated_reader(reader: Any) -> Any:
    """Have `reader`, torch's of a map-style dataset, draw as its requests say, and move nothing.

    For the main process, where the program's own generators stay where they are.
    """
    return _fetching_within(isolated_draws, _seeded_map(reader))


def reader_in_main_thread(reader: Any, tell: Callable[[bool], None] | None) -> Any:
    """Do as `isolated_reader`, and tell `tell` whether the first sample draws.

    A thread beside the main one reads as without a profile: samples are seeded through the global
    generators, from which the main thread draws meanwhile.
    """
    unseeded = reader.fetch
    seeded = isolated_reader(reader).fetch
    warned: list[bool] = []
    _here.first_sample = tell

    def fetch(request: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return seeded(request)
        if not warned:
            warned.append(True)
            warnings.warn(
                "a DataLoader without workers is read outside of the main thread: "
                "dataloader.seeding leaves its samples as their author made them; give it "
                "num_workers=1",
                stacklevel=2,
            )
        return unseeded(_index_in(request))

    reader.fetch = fetch
    return reader


def reader_of_epoch(stream: Stream, make: Callable[[], Any]) -> Any:
    """Return a reader of an `IterableDataset` that draws from `stream` in the main process.

    It leaves the program's own generators where they are.
    """
    draw_from(worker_stream(stream, 0))  # torch has drawn from it since the epoch began
    reader = _ItemReader(make, 0, stream)
    position = Position()
    return _fetching_within(lambda: position, reader)


def reader_in_program(rng: Callable[[], Stream | None], make: Callable[[], Any]) -> Any:
    """Return a reader of an `IterableDataset` that draws from the program's own generators.

    `sample_rng` draws from the stream that `rng` returns, once there is one.
    """
    draws: list[_Draw] = []

    @contextmanager
    def reading() -> Iterator[None]:
        stream = rng()
        if not draws and stream is not None:
            draws.append(_Draw(worker_stream(stream, 0)))
        before, _here.draw = _here.draw, draws[0] if draws else None
        try:
            yield
        finally:
            _here.draw = before

    reader = make()
    original = reader.fetch
    reader.fetch = lambda request: original(_index_in(request))
    return _fetching_within(reading, reader)


def _dataset_kinds() -> Any:
    """Return the class that makes torch's readers.

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


def _seeded_map(reader: Any) -> Any:
    """Have `reader`, torch's reader of a map-style dataset, draw as its requests say."""
    original = reader.fetch

    def fetch(request: Any) -> Any:
        if isinstance(request, Request):
            return request.fetch(reader, original)
        return original(request)

    reader.fetch = fetch
    return reader


def _fetching_within(place: Callable[[], AbstractContextManager[None]], reader: Any) -> Any:
    """Have every fetch of `reader` run within `place`."""
    original = reader.fetch

    def fetch(request: Any) -> Any:
        with place():
            return original(request)

    reader.fetch = fetch
    return reader


class _ItemReader:
    """A reader of an `IterableDataset` that draws from one stream per epoch.

    It is otherwise the reader of torch's that `make` returns. `begun` is the stream that the
    generators have just been started from. Where it is None, the reader is made with the first
    request, which says what the epoch is.
    """

    def __init__(self, make: Callable[[], Any], worker: int, begun: Stream | None) -> None:
        vars(self).update(_make=make, _worker=worker, _begun=begun, _reader=None)
        if begun is not None:
            self._made()

    def fetch(self, request: Any) -> Any:
        """Load what `request` asks for, as torch's reader does."""
        if not isinstance(request, Request):
            return self._made().fetch(request)
        stream = request.stream or _stream_of_worker()
        if self._begun != stream:
            late = self._reader is not None
            vars(self)["_begun"] = stream
            draw_from(worker_stream(stream, self._worker), request.given)
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
