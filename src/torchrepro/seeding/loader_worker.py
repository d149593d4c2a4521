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
from torchrepro.seeding.generators import States, host_slots, host_states, seed_host, seed_sample
from torchrepro.seeding.streams import (
    current_plan,
    derive,
    keep_program_seed,
    put_program_seed,
    stream,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import numpy as np

    from torchrepro.seeding.generators import Given, Slot
    from torchrepro.seeding.streams import Stream


@dataclass(slots=True)
class _Draw:
    """The stream from which the host's generators were started, and `sample_rng` on it."""

    stream: Stream
    generator: np.random.Generator | None = None


class _Present(threading.local):
    draw: _Draw | None = None  # None outside of loading
    note_first: Callable[[bool], None] | None = None  # called once: does the next sample draw?
    unseeded: tuple[Any, np.random.Generator] | None = None  # where nothing seeds what is loaded


_here = _Present()


def in_loader() -> bool:
    """Whether this thread is loading a sample or a batch of a seeded loader."""
    return _here.draw is not None


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
        source = stream("sample_rng")  # the program's own seed may have changed
        key = (os.getpid(), source.key)
        if _here.unseeded is None or _here.unseeded[0] != key:
            _here.unseeded = (key, source.numpy())
        return _here.unseeded[1]
    if draw is None:
        raise SeedingError.about(
            "no sample is being loaded by a seeded DataLoader",
            found="sample_rng()",
            todo="call it in the dataset of a DataLoader made with dataloader_kwargs, or under a "
            "profile with dataloader.seeding: auto",
        )
    if draw.generator is None:
        draw.generator = draw.stream.part(b"ready").numpy()
    return draw.generator


def start_from(stream: Stream, given: Given | None = None) -> None:
    """Start the host's generators and `sample_rng` from `stream`, and the `given` seeds if any."""
    _here.draw = _Draw(stream)
    keep_program_seed()
    if given is None:
        seed_host(stream)
    else:
        seed_sample(stream, *given)


def epoch_stream(base_seed: int) -> Stream:
    """Return what the samples of an epoch are parts of, for which torch has drawn `base_seed`."""
    return derive("data", base_seed, kind="data")


def _stream_of_worker() -> Stream:
    from torch.utils.data import get_worker_info

    # torch starts worker `id` of an epoch with the seed `base seed + id`:
    # https://docs.pytorch.org/docs/stable/data.html#randomness-in-multi-process-data-loading
    info: Any = get_worker_info()
    return epoch_stream(info.seed - info.id)


def worker_stream(stream: Stream, worker: int) -> Stream:
    """Return what worker number `worker` of an epoch draws from outside of samples."""
    return stream.part(b"worker/%d" % worker)


class _Place:
    """Where some generators and `sample_rng` stood when this was made."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._states, self._draw = States(slots), _here.draw
        self._program_seed = current_plan().program_seed

    def put_back(self) -> None:
        self._states.put_back()
        _here.draw = self._draw
        put_program_seed(self._program_seed)


@contextmanager
def isolated_draws(slots: Iterable[Slot] = ()) -> Iterator[None]:
    """Leave the host's generators, `sample_rng` and `slots` where they are, whatever is drawn."""
    outside = _Place((*host_slots().values(), *slots))
    try:
        yield
    finally:
        outside.put_back()


class Position:
    """A place in some generators that is not the program's, from where `resumed` blocks draw on."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots, self._inside = slots, _Place(slots)

    @contextmanager
    def resumed(self) -> Iterator[None]:
        outside = _Place(self._slots)
        self._inside.put_back()
        try:
            yield
        finally:
            self._inside = _Place(self._slots)
            outside.put_back()


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

    `collate_fn`, and a dataset that reads complete batches, draw from the batch's part.
    """

    stream: Stream | None  # none for that of the epoch with which the worker was started
    index: Any
    again: Mapping[bytes, int]  # how often the epoch has had a sample of the batch before, by label
    given: Given | None
    """The program's own seeds that samples depend on; None for those of a named loader."""

    def fetch(self, reader: Any, fetch: Callable[[Any], Any]) -> Any:
        """Load the batch through `fetch`, the own method of torch's `reader`, sample by sample."""
        from torch.utils.data import Subset

        stream = self.stream or _stream_of_worker()
        dataset, collate = reader.dataset, reader.collate_fn

        def seeded_collate(samples: Any) -> Any:
            self.start_batch(stream)
            return collate(samples)

        read = dataset
        while isinstance(read, Subset) and type(read).__getitems__ is Subset.__getitems__:
            read = read.dataset
        reads_batches = bool(getattr(read, "__getitems__", None))
        reader.dataset = (_SeededBatches if reads_batches else _SeededSamples)(
            dataset, self, stream
        )
        reader.collate_fn = seeded_collate
        try:
            return fetch(self.index)
        finally:
            reader.dataset, reader.collate_fn = dataset, collate

    def start_batch(self, stream: Stream) -> None:
        """Start the generators from the batch's part of `stream`."""
        times = b",".join(b"%d" % self.again[name] for name in sorted(self.again))
        start_from(stream.part(b"batch/" + times + b"/" + label(self.index)), self.given)


class _SeededSamples:
    __slots__ = ("_again", "_dataset", "_request", "_stream")

    def __init__(self, dataset: Any, request: Request, stream: Stream) -> None:
        self._dataset, self._request, self._stream = dataset, request, stream
        self._again = dict(request.again)

    def __getitem__(self, index: Any) -> Any:
        name = label(index)
        times = self._again.get(name, 0)
        if name in self._again:
            self._again[name] = times + 1
        start_from(self._stream.part(b"sample/%d/" % times + name), self._request.given)
        note, _here.note_first = _here.note_first, None
        if note is None:
            return self._dataset[index]
        before = host_states()
        sample = self._dataset[index]
        note(not before.are_present())
        return sample


class _SeededBatches(_SeededSamples):
    def __getitems__(self, indices: Sequence[Any]) -> Any:
        self._request.start_batch(self._stream)
        return self._dataset.__getitems__(indices)


def put_reader_maker(make: Callable[[bool, Callable[[], Any]], Any]) -> Callable[[], None]:
    """Have ``make(reads samples by index, original)`` make torch's readers; return the undo.

    Private (``torch.utils.data._DatasetKind.create_fetcher``), because torch has no public place
    between a sampler and a dataset. Where it is gone, seeding a loader raises.
    """
    from torch.utils import data

    maker: Any = getattr(data, "_DatasetKind", None)
    if not hasattr(maker, "create_fetcher"):
        raise SeedingError.about("this torch reads datasets in a way that torchrepro does not know")
    original = maker.create_fetcher
    maker.create_fetcher = staticmethod(
        lambda kind, *rest: make(kind == maker.Map, partial(original, kind, *rest))
    )
    return lambda: setattr(maker, "create_fetcher", staticmethod(original))


def seed_readers_of_worker(worker: int, begun: Stream | None, given: Given | None) -> None:
    """Have this process, data-loading worker number `worker`, seed whatever it reads.

    `begun` is the epoch's stream; None for that of the epoch with which the worker was started.
    """
    begun = begun or _stream_of_worker()
    # Only the first reader is made right after the worker was started. A worker that lives on makes
    # another for every epoch.
    streams_begun = [begun]

    def make(by_index: bool, original: Callable[[], Any]) -> Any:  # noqa: FBT001 - torch's kind
        if not by_index:
            return _ItemReader(original, worker, streams_begun.pop() if streams_begun else None)
        reader = original()
        reader.fetch = _seeded_fetch(reader)
        return reader

    put_reader_maker(make)  # for as long as the process lives
    start_from(worker_stream(begun, worker), given)


def _seeded_fetch(reader: Any) -> Callable[[Any], Any]:
    original = reader.fetch
    return lambda request: (
        request.fetch(reader, original) if isinstance(request, Request) else original(request)
    )


def _index_in(request: Any) -> Any:
    return request.index if isinstance(request, Request) else request


def reader_of_samples(
    reader: Any, note: Callable[[bool], None] | None, *, in_any_thread: bool
) -> Any:
    """Have `reader`, torch's of a map-style dataset in the main process, seed what it reads.

    The program's own generators stay where they are. `note` is called with whether the first
    sample draws. A thread beside the main one reads as without a profile, unless `in_any_thread`:
    samples are seeded through the global generators, from which the main thread draws meanwhile.
    """
    unseeded, seeded = reader.fetch, _seeded_fetch(reader)
    warned: list[bool] = []
    _here.note_first = note

    def fetch(request: Any) -> Any:
        if in_any_thread or threading.current_thread() is threading.main_thread():
            with isolated_draws():
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


def reader_of_items(make: Callable[[], Any], epoch: Callable[[], Stream | None]) -> Any:
    """Return a reader of an `IterableDataset` that draws from the program's own generators.

    `sample_rng` draws from the stream that `epoch` returns, once there is one.
    """
    reader = make()
    original = reader.fetch
    draws: list[_Draw] = []

    def fetch(request: Any) -> Any:
        stream = epoch()
        if not draws and stream is not None:
            draws.append(_Draw(worker_stream(stream, 0)))
        before, _here.draw = _here.draw, draws[0] if draws else None
        try:
            return original(_index_in(request))
        finally:
            _here.draw = before

    reader.fetch = fetch
    return reader


def reader_of_named_items(make: Callable[[], Any], epoch: Stream) -> Any:
    """Return a reader of an `IterableDataset` in the main process that draws from `epoch` alone.

    It reads as the only worker of a loader, and leaves the program's generators where they are.
    """
    start_from(worker_stream(epoch, 0))  # torch has drawn from it since the epoch began
    items = _ItemReader(make, 0, epoch)
    position, fetch = Position([*host_slots().values()]), items.fetch

    def fetch_items(request: Any) -> Any:
        with position.resumed():
            return fetch(request)

    vars(items)["fetch"] = fetch_items
    return items


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
        if not isinstance(request, Request):
            return self._made().fetch(request)
        stream = request.stream or _stream_of_worker()
        if self._begun != stream:
            late = self._reader is not None
            vars(self)["_begun"] = stream
            start_from(worker_stream(stream, self._worker), request.given)
            if late:  # somebody asked it for something before the epoch was known
                self._reader.dataset_iter = iter(self._reader.dataset)
        return self._made().fetch(request.index)

    def _made(self) -> Any:
        if self._reader is None:
            vars(self)["_reader"] = self._make()
        return self._reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._made(), name, value)
