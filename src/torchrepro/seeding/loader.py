"""Seed the DataLoaders of a program, so that each sample draws from its own random stream.

Under `dataloader.seeding: auto` a loader follows torch's own protocol. The sampler draws the order
from the loader's generator, or from the global one, as it does without torchrepro. torch draws one
base seed per iteration from the same generator
(https://docs.pytorch.org/docs/stable/data.html#randomness-in-multi-process-data-loading).
A sample's random numbers depend on that base seed, on the sample's index, and on the seeds that the
program gave to `random` and numpy. A loader made with `dataloader_kwargs` has a name instead. Its
order and samples depend only on (seed, name, epoch), and not on earlier draws of the program.

So a sample draws equal numbers in any worker process and after any other samples. An
`IterableDataset` has no sample indices: each worker draws from one stream per epoch.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from operator import index as as_index
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from torchrepro.ground.errors import SeedingError
from torchrepro.seeding import streams
from torchrepro.seeding.generators import (
    Given,
    Slot,
    States,
    generator_kind,
    given_seeds,
    host_slots,
    seed_host,
    seed_sample,
)
from torchrepro.seeding.streams import Stream, derive, nonnegative_int

if TYPE_CHECKING:
    import numpy as np
    import torch

_NOTHING: Mapping[bytes, int] = {}
_LOADS = "torchrepro_again"  # key in a sampler's state: how often it has yielded each index


@dataclass(slots=True)
class _Draw:
    stream: Stream  # the global generators were started from it
    generator: np.random.Generator | None = None  # returned by `sample_rng`


class _ThreadState(threading.local):
    draw: _Draw | None = None  # None outside of loading
    note_first: Callable[[bool], None] | None = None  # called once: whether the next sample draws
    unseeded: tuple[Any, np.random.Generator] | None = None  # without a seeded loader


_thread = _ThreadState()


def in_loader() -> bool:
    return _thread.draw is not None


def sample_rng() -> np.random.Generator:
    """Return the numpy `Generator` of the sample that is being loaded.

    All calls within one sample return the same generator. Within `collate_fn`, the generator
    belongs to the batch.

    Outside of a seeded DataLoader, raises `SeedingError` if a profile with a seed is active.
    Without such a profile, all samples of this process and thread share one generator, derived
    from the program's own seed (see `stream`).
    """
    draw = _thread.draw
    if draw is None and streams.current_plan().seed is None:
        source = streams.stream("sample_rng")  # the program's own seed may have changed
        key = (os.getpid(), source.key)
        if _thread.unseeded is None or _thread.unseeded[0] != key:
            _thread.unseeded = (key, source.numpy())
        return _thread.unseeded[1]
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
    """Seed the global CPU generators and `sample_rng` from `stream`, and from `given` if set."""
    _thread.draw = _Draw(stream)
    streams.remember_program_seed()
    if given is None:
        seed_host(stream)
    else:
        seed_sample(stream, *given)


def epoch_stream(base_seed: int) -> Stream:
    return derive("data", base_seed, kind="data")


def _stream_of_worker() -> Stream:
    from torch.utils.data import get_worker_info

    # torch starts worker `id` of an epoch with the seed `base seed + id`:
    # https://docs.pytorch.org/docs/stable/data.html#randomness-in-multi-process-data-loading
    info: Any = get_worker_info()
    return epoch_stream(info.seed - info.id)


def worker_stream(stream: Stream, worker: int) -> Stream:
    return stream.part(b"worker/%d" % worker)


class Position:
    """Saved states of generators and `sample_rng`. A `resumed` block continues from them."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._note()

    def _note(self) -> None:
        self._states, self._draw = States(self._slots), _thread.draw
        self._program_seed = streams.current_plan().program_seed

    def restore(self) -> None:
        self._states.put_back()
        _thread.draw = self._draw
        if self._slots:
            streams.set_program_seed(self._program_seed)

    def draw_from(self, stream: Stream) -> None:
        """Make `sample_rng` draw from `stream`, unless it draws from another one already."""
        self._draw = self._draw or _Draw(stream)

    @contextmanager
    def resumed(self) -> Iterator[None]:
        outside = Position(self._slots)
        self.restore()
        try:
            yield
        finally:
            self._note()
            outside.restore()


@contextmanager
def isolated_draws(slots: Iterable[Slot] = ()) -> Iterator[None]:
    """After the block, restore the global CPU generators, `sample_rng` and all `slots`."""
    outside = Position([*host_slots().values(), *slots])
    try:
        yield
    finally:
        outside.restore()


def label(index: Any) -> bytes:
    """Return `index` as bytes that are the same in every process."""
    if type(index) is int:
        return b"%d" % index
    if isinstance(index, list | tuple):
        return b"(" + b",".join(map(label, index)) + b")"
    if hasattr(index, "tolist"):  # `repr` abbreviates a long array or tensor
        return label(index.tolist())
    try:
        return b"%d" % as_index(index)
    except TypeError:
        text = repr(index)
    if " at 0x" in text:  # an address differs between processes
        # All indices of the type get one label, and count as repetitions of one index.
        return f"a {type(index).__qualname__}".encode()
    return text.encode()


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """The index of a sample, or the indices of a batch, and the stream to seed them from.

    Each sample draws from its own part of the stream. `collate_fn` draws from the batch's part. So
    does a dataset with `__getitems__`, which reads complete batches.
    """

    stream: Stream | None  # None in the epoch that started the worker
    index: Any
    loads: Mapping[bytes, int]  # label of a repeated sample -> how often this epoch has loaded it
    given: Given | None  # the program's own seeds; None for a named loader

    # Like a sequence, because the program's own iterator may read the indices for the workers.
    def __len__(self) -> int:
        return len(self.index)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.index)

    def __getitem__(self, position: Any) -> Any:
        return self.index[position]

    def fetch(self, reader: Any, fetch: Callable[[Any], Any]) -> Any:
        from torch.utils.data import Subset

        stream = self.stream or _stream_of_worker()
        dataset, collate = reader.dataset, reader.collate_fn

        def seeded_collate(samples: Any) -> Any:
            self.start_batch(stream)
            return collate(samples)

        base = dataset
        while isinstance(base, Subset) and type(base).__getitems__ is Subset.__getitems__:
            base = base.dataset
        reads_batches = bool(getattr(base, "__getitems__", None))
        seeded_dataset = _SeededBatches if reads_batches else _SeededSamples
        reader.dataset = seeded_dataset(dataset, self, stream)
        reader.collate_fn = seeded_collate
        try:
            return fetch(self.index)
        finally:
            reader.dataset, reader.collate_fn = dataset, collate

    def start_batch(self, stream: Stream) -> None:
        times = b",".join(b"%d" % self.loads[name] for name in sorted(self.loads))
        start_from(stream.part(b"batch/" + times + b"/" + label(self.index)), self.given)


class _SeededSamples:
    __slots__ = ("_dataset", "_loads", "_request", "_stream")

    def __init__(self, dataset: Any, request: SampleRequest, stream: Stream) -> None:
        self._dataset, self._request, self._stream = dataset, request, stream
        self._loads = dict(request.loads)

    def __getitem__(self, index: Any) -> Any:
        name = label(index)
        times = self._loads.get(name, 0)
        if name in self._loads:
            self._loads[name] = times + 1
        start_from(self._stream.part(b"sample/%d/" % times + name), self._request.given)
        note, _thread.note_first = _thread.note_first, None
        if note is None:
            return self._dataset[index]
        before = States(host_slots().values())
        sample = self._dataset[index]
        note(not before.are_present())
        return sample


class _SeededBatches(_SeededSamples):
    def __getitems__(self, indices: Sequence[Any]) -> Any:
        self._request.start_batch(self._stream)
        return self._dataset.__getitems__(indices)


def reader_maker() -> Any:
    """Return torch's class whose function `create_fetcher` creates the readers of datasets.

    The class ``torch.utils.data._DatasetKind`` is private: torch has no public hook between sampler
    and dataset. Raises `SeedingError` if this torch does not have the class.
    """
    from torch.utils import data

    maker: Any = getattr(data, "_DatasetKind", None)
    if not hasattr(maker, "create_fetcher"):
        raise SeedingError.about(
            "this torch reads datasets in a way that torchrepro does not know",
            found="no torch.utils.data._DatasetKind.create_fetcher",
        )
    return maker


def replace_reader_maker(make: Callable[[bool, Callable[[], Any]], Any]) -> Callable[[], None]:
    """Replace the creation of torch's readers by ``make(by_index, original)``; return the undo."""
    maker = reader_maker()
    original = maker.create_fetcher
    maker.create_fetcher = staticmethod(
        lambda dataset_kind, *rest: make(
            dataset_kind == maker.Map, partial(original, dataset_kind, *rest)
        )
    )
    return lambda: setattr(maker, "create_fetcher", staticmethod(original))


def seed_readers_of_worker(worker: int, begun: Stream | None, given: Given | None) -> None:
    """Make this process, the data-loading worker number `worker`, seed all samples that it reads.

    `begun` is the stream of the epoch, or None to derive the stream from the worker's seed.
    """
    begun = begun or _stream_of_worker()
    # Only the first reader is created right after the generators were started. A persistent worker
    # creates another reader for every epoch.
    first = iter([begun])

    def make(by_index: bool, original: Callable[[], Any]) -> Any:  # noqa: FBT001 - torch's kind
        if not by_index:
            return _ItemReader(original, worker, next(first, None))
        reader = original()
        _fetch_by(reader, _fetch_requested)
        return reader

    replace_reader_maker(make)  # until the process ends
    start_from(worker_stream(begun, worker), given)


def _fetch_by(reader: Any, fetch: Callable[[Any, Any], Any]) -> None:
    """Make `reader` call ``fetch(reader, index)``, with a weak reference to avoid a cycle."""
    reader_of = ref(reader)
    reader.fetch = lambda index: fetch(reader_of(), index)


def _fetch_as_torch(reader: Any, index: Any) -> Any:
    return type(reader).fetch(reader, index)


def _fetch_requested(reader: Any, request: Any) -> Any:
    fetch = partial(_fetch_as_torch, reader)
    return request.fetch(reader, fetch) if isinstance(request, SampleRequest) else fetch(request)


def seed_readers(loading: Loading, note: Callable[[bool], None] | None) -> Callable[[], None]:
    """Make this process seed the samples that it reads without workers; return the undo.

    `note`, if set, is called once, with True if the first sample drew from a generator.
    """
    named = loading if isinstance(loading, NamedLoading) else None

    def make(by_index: bool, original: Callable[[], Any]) -> Any:  # noqa: FBT001 - torch's kind
        if named is not None and not by_index:
            start_from(worker_stream(named.stream, 0))  # torch has drawn since the epoch began
        reader = original()
        _fetch_by(
            reader, _fetch_of_samples(loading, note) if by_index else _fetch_of_items(loading)
        )
        return reader

    return replace_reader_maker(make)


def _fetch_of_samples(
    loading: Loading, note: Callable[[bool], None] | None
) -> Callable[[Any, Any], Any]:
    # Seeding a sample sets the global generators, and the main thread may be drawing from them. So
    # a loader without a name seeds samples only in the main thread.
    in_any_thread = isinstance(loading, NamedLoading)
    notes, is_warned = iter([note]), False

    def fetch(reader: Any, index: Any) -> Any:
        nonlocal is_warned
        if in_any_thread or threading.current_thread() is threading.main_thread():
            _thread.note_first = next(notes, None)
            with isolated_draws():
                return _fetch_requested(reader, loading.request_of(index))
        if not is_warned:
            is_warned = True
            warnings.warn(
                "a DataLoader without workers is read outside of the main thread: "
                "dataloader.seeding does not seed its samples; give it num_workers=1",
                stacklevel=3,
            )
        return _fetch_as_torch(reader, index)

    return fetch


def _fetch_of_items(loading: Loading) -> Callable[[Any, Any], Any]:
    # An `IterableDataset` draws from the program's own generators. `sample_rng` derives from the
    # base seed, once torch has drawn it. The dataset of a named loader continues from the present
    # states of the generators, as in a loader with one worker, and the program's own states are
    # restored after each batch.
    is_named = isinstance(loading, NamedLoading)
    position = Position([*host_slots().values()] if is_named else [])

    def fetch(reader: Any, index: Any) -> Any:
        if loading.stream is not None:
            position.draw_from(worker_stream(loading.stream, 0))
        with position.resumed():
            return _fetch_as_torch(reader, index)

    return fetch


class _ItemReader:
    """Wraps the reader of an `IterableDataset`, which draws from one stream per epoch.

    `make` creates the reader. The generators have just been started from the stream `begun`. With
    ``begun=None``, the reader is created at the first request, which contains the stream.
    """

    def __init__(self, make: Callable[[], Any], worker: int, begun: Stream | None) -> None:
        vars(self).update(_make=make, _worker=worker, _begun=begun, _reader=None)
        if begun is not None:
            self._made()

    def fetch(self, request: Any) -> Any:
        if not isinstance(request, SampleRequest):
            return self._made().fetch(request)
        stream = request.stream or _stream_of_worker()
        if self._begun != stream:
            is_made_early = self._reader is not None  # an attribute was read before the epoch
            vars(self)["_begun"] = stream
            start_from(worker_stream(stream, self._worker), request.given)
            if is_made_early:
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


class Loading:
    """The seeding of one iteration of a loader. Also the loader's `worker_init_fn`.

    Each sample is seeded from `stream`, and from `given`, the program's own seeds. `stream` stays
    None until torch draws the base seed. A worker derives the stream from the worker's seed. The
    first `start` batches of the epoch are skipped.
    """

    stream: Stream | None = None
    given: Given | None = None
    start = 0
    author_init: Callable[[int], Any] | None = None
    draws_base_seed = False
    in_workers = False
    latest: SampleRequest | None = None  # for the next read in this process

    def __init__(self) -> None:
        plan = streams.current_plan()
        self.plan = replace(plan, rank=plan.coordinate(), program_seed=plan.own_seed())
        self.given = given_seeds()

    def __call__(self, worker: int) -> None:
        from torch.utils.data import get_worker_info

        if get_worker_info() is not None:
            streams.set_plan(self.plan)
            seed_readers_of_worker(worker, self.stream, self.given)
        elif self.stream is not None:
            start_from(worker_stream(self.stream, worker))
        if self.author_init is not None:
            self.author_init(worker)

    def passed_to_torch(self, request: SampleRequest) -> Any:
        """Return `request` if a worker reads it. Without workers, store it and return the index."""
        if self.in_workers:
            return request
        self.latest = request
        return request.index

    def request_of(self, index: Any) -> SampleRequest:
        """Return the sampler's latest request if it has this `index`, else a new request."""
        latest = self.latest
        if latest is not None and latest.index is index:
            return latest
        return SampleRequest(self.stream, index, _NOTHING, self.given)

    def indices(self, sampler: Any, generator: torch.Generator | None) -> Iterator[Any]:
        """Return the iterator of `sampler`, and draw the base seed if torch does not draw it."""
        indices: Iterator[Any] = iter(sampler)
        if self.draws_base_seed:
            import torch

            self.draws_base_seed = False
            drawn = torch.empty((), dtype=torch.int64).random_(generator=generator)
            self.stream = epoch_stream(int(drawn.item()))
        return indices


class NamedLoading(Loading):
    """The seeding of a loader that has a name.

    Every iteration is the next epoch, unless `set_epoch` chooses one. The order of an epoch depends
    on (seed, name, epoch), the random numbers of a sample on (seed, name, rank, epoch, index). If
    the program called `torch.manual_seed` before the epoch, the argument is part of the seed.
    """

    stream: Stream  # never None: it does not depend on a base seed

    def __init__(
        self, name: str, epoch: int = 0, author_init: Callable[[int], Any] | None = None
    ) -> None:
        Loading.__init__(self)
        self.name, self.author_init, self.given = name, author_init, None
        self.root = streams.current_plan().root(name)
        streams.drawn.add(name)
        self.next_epoch, self.next_start = nonnegative_int("epoch", epoch), 0
        self.program_seed = self._program_seed_now()  # at the start of the present epoch
        self._is_resumed = False
        self._resumed_seed: int | None = None
        self._enter(self.next_epoch)

    def __repr__(self) -> str:
        return f"<torchrepro loading {self.name} seed={self.root} next epoch={self.next_epoch}>"

    def begin(self) -> None:
        """Start the next epoch, and update the rank: the process group may be new."""
        now = streams.current_plan()
        if (now.seed, now.streams) == (self.plan.seed, self.plan.streams):
            program_seed = self.plan.program_seed if now.seed is None else now.own_seed()
            self.plan = replace(now, rank=now.coordinate(), program_seed=program_seed)
            self.program_seed = self._program_seed_now()
        if self._is_resumed:
            self.program_seed, self._is_resumed = self._resumed_seed, False
        self._enter(self.next_epoch)
        self.next_epoch += 1
        self.start, self.next_start = self.next_start, 0

    def go_to(self, epoch: int, start: int = 0) -> None:
        self.next_epoch, self.next_start = epoch, start

    def resume(self, epoch: int, program_seed: int | None) -> None:
        """Make the next iteration resume `epoch`, which began under the seed `program_seed`."""
        self.go_to(epoch)
        self._is_resumed, self._resumed_seed = True, program_seed

    def indices(self, sampler: Any, generator: torch.Generator | None) -> Iterator[Any]:
        # `self.order` may belong to a later epoch when the first index is drawn.
        return self._isolated_indices(sampler, generator, self.order)

    @staticmethod
    def _isolated_indices(
        sampler: Any, generator: torch.Generator | None, order: Stream
    ) -> Iterator[Any]:
        """Yield the indices of `sampler`, which draws only from the stream `order`."""
        from torch.utils import data

        generator_type = generator_kind(generator)
        loader_slots = [] if generator_type is None else [generator_type.slot(generator)]
        end = object()
        with isolated_draws(loader_slots):
            start_from(order)
            if generator is not None:
                generator.set_state(order.torch().get_state())
            indices = iter(sampler)
            index = next(indices, end)
            # These samplers of torch use the global generators only before their first index. Any
            # other sampler may draw at any index, so all states are exchanged for every batch.
            draws_only_first = type(_sampler_of_indices(sampler)) in (
                data.SequentialSampler,
                data.RandomSampler,
                data.SubsetRandomSampler,
                data.WeightedRandomSampler,
                data.DistributedSampler,
            )
            later_slots = [] if draws_only_first else [*host_slots().values()]
            position = Position([*later_slots, *loader_slots])
        while index is not end:
            yield index
            with position.resumed():
                index = next(indices, end)

    def _program_seed_now(self) -> int | None:
        # The program's own seed, as in ``torch.manual_seed(args.seed)``, is combined with the
        # profile's seed. Otherwise a sweep over ``--seed`` would load the same order in every run.
        # All ranks share one order. If they drew it from different seeds, some samples would be
        # loaded twice and others never. So with several ranks, a seed counts only if every rank
        # had set the same seed when the process group was created.
        if self.name in self.plan.streams:
            return None  # the profile gives this stream its own seed, to be varied independently
        seed, agreed = streams.given_seed(), streams.current_plan().agreed_seed
        ranks = streams.world().size
        if ranks == 1:
            return seed
        if seed not in (None, agreed):
            loaders.register.notes["seed of ranks"] = (
                f"named loaders do not depend on the program's own seed {seed}: with {ranks} ranks "
                "a seed counts only if all of them give it before init_process_group; vary the "
                "profile's seed instead"
            )
        return agreed

    def _enter(self, epoch: int) -> None:
        self.epoch = epoch
        order = derive(self.name, self.root, epoch=epoch, kind="order")  # same on every rank
        stream = derive(self.name, self.root, self.plan.rank or 0, epoch=epoch, kind="loader")
        if self.program_seed is not None:
            program = b"program/%d" % self.program_seed
            order, stream = order.part(program), stream.part(program)
        self.order, self.stream = order, stream


class SeededSampler:
    """Wraps the sampler of a loader while an epoch begins, and turns indices into requests."""

    def __init__(
        self, sampler: Any, loading: Loading, generator: torch.Generator | None, yields: str
    ) -> None:
        self.sampler, self.loading, self.generator = sampler, loading, generator
        self.yields = yields  # indices of `samples` or of `batches`
        if _has_state(sampler) and not isinstance(loading, NamedLoading):
            # A sampler of torchdata saves its own position.
            self.state_dict, self.load_state_dict = sampler.state_dict, sampler.load_state_dict

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        inner, skipped = unskipped(self.sampler)
        indices = self.loading.indices(inner, self.generator)
        requests = _StatefulRequests if _has_state(indices) else _Requests
        repeats = self.yields if _may_repeat(inner) else ""
        return requests(indices, self.loading, skipped, repeats)


class _Requests:
    """Iterator over the requests of one epoch.

    It numbers the loads of a repeated sample, so that each load draws different numbers.
    """

    def __init__(
        self, indices: Iterator[Any], loading: Loading, skipped: int, repeats: str
    ) -> None:
        self._indices, self._loading, self._repeats = indices, loading, repeats
        self._stream = loading.stream  # of this epoch: a named loader may begin another epoch
        self._to_skip = skipped + loading.start
        self._loads: Counter[bytes] = Counter()  # label -> how often this epoch has loaded it

    def __iter__(self) -> _Requests:
        return self

    def __next__(self) -> Any:
        while self._to_skip:
            self._to_skip -= 1
            self._next()
        index, loads = self._next()
        loading = self._loading
        stream = self._stream or loading.stream
        return loading.passed_to_torch(SampleRequest(stream, index, loads, loading.given))

    def _next(self) -> tuple[Any, Mapping[bytes, int]]:
        """Return the next index, and the number of earlier loads of each repeated sample."""
        index = next(self._indices)
        if not self._repeats:
            return index, _NOTHING
        now = Counter(map(label, index) if self._repeats == "batches" else [label(index)])
        repeated = [name for name, times in now.items() if times > 1 or name in self._loads]
        loads_before = {name: self._loads[name] for name in repeated}
        self._loads.update(now)
        return index, loads_before


class _StatefulRequests(_Requests):
    """Requests from an iterator that has `state_dict`, as iterators of torchdata's samplers do."""

    def state_dict(self) -> Any:
        state = self._indices.state_dict()  # type: ignore[attr-defined]
        if not self._repeats:
            return state
        return {**state, _LOADS: {name.decode(): n for name, n in self._loads.items()}}

    def load_state_dict(self, state: Any) -> None:
        sampler_state = dict(state)
        loads = sampler_state.pop(_LOADS, {})
        self._indices.load_state_dict(sampler_state)  # type: ignore[attr-defined]
        self._loads = Counter({name.encode(): n for name, n in loads.items()})


def _has_state(part: Any) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def unskipped(sampler: Any) -> tuple[Any, int]:
    """Return the sampler inside accelerate's `SkipBatchSampler`, and the number of skipped batches.

    torchrepro skips these batches itself, to count how often each sample was loaded. Any other
    `sampler` is returned with 0.
    """
    if type(sampler).__name__ == "SkipBatchSampler":
        return sampler.batch_sampler, sampler.skip_batches
    return sampler, 0


def _sampler_of_indices(sampler: Any) -> Any:
    from torch.utils.data import BatchSampler

    return sampler.sampler if type(sampler) is BatchSampler else sampler


def _may_repeat(sampler: Any) -> bool:
    from torch.utils import data

    sampler = _sampler_of_indices(sampler)
    if type(sampler) is data.RandomSampler:
        return bool(sampler.replacement or sampler.num_samples > len(sampler.data_source))
    if type(sampler).__name__ == "_InfiniteConstantSampler":  # of an IterableDataset
        return False
    return type(sampler) not in (data.SequentialSampler, data.DistributedSampler)


@dataclass(slots=True, eq=False)
class Register:
    # Loader -> its seeding, for loaders made without `dataloader_kwargs`.
    loadings: WeakKeyDictionary[Any, Loading] = field(default_factory=WeakKeyDictionary)
    # Name -> next epoch, for loaders of a snapshot that the program has not created yet.
    named: dict[str, int] = field(default_factory=dict)
    # Subject -> a note on the loading of data, for the report.
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Loaders:
    automatic: bool = False  # whether loaders made without `dataloader_kwargs` are seeded
    forced_workers: int | None = None  # of every loader, if a profile sets it
    # A new seed starts with an empty register, and the undo restores the old register.
    register: Register = field(default_factory=Register)
    # Of loaders made with `dataloader_kwargs`. One thread may add while another reads: no WeakSet.
    explicit: set[ref[NamedLoading]] = field(default_factory=set)

    def named(self) -> list[NamedLoading]:
        """Return the seeding of the living loaders made with `dataloader_kwargs`."""
        return [*filter(None, [reference() for reference in tuple(self.explicit)])]


loaders = Loaders()


def epochs() -> dict[str, Any]:
    named = {loading.name: loading.next_epoch for loading in loaders.named()}
    return {"named": {**loaders.register.named, **named}}


def set_epochs(saved: Mapping[str, Any]) -> None:
    """Set the next epoch of every named loader from `saved`, the result of `epochs`.

    A loader that does not exist yet gets its epoch when it is created.
    """
    register = loaders.register
    register.named = dict(saved["named"])
    for explicit in loaders.named():
        explicit.next_epoch = saved["named"].get(explicit.name, explicit.next_epoch)
        register.named.pop(explicit.name, None)
