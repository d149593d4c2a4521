"""The random numbers of a DataLoader: its name, its order, its workers, and how far it has come."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

from torchrepro.seeding import streams
from torchrepro.seeding.loader_worker import (
    BatchRequest,
    Position,
    SampleRequest,
    draw_from,
    is_loading,
    isolated_draws,
    label,
    seed_readers_of_worker,
    worker_stream,
)
from torchrepro.seeding.program_seed import seed_left_out, seed_of_loaders, with_given
from torchrepro.seeding.streams import Stream, derive, whole
from torchrepro.seeding.worker_seeders import worker_seeder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

_NOTHING: Mapping[bytes, int] = {}
_END = object()


class Place(NamedTuple):
    """How far a program has come with a loader."""

    epoch: int
    batches: int
    """Batches of the epoch that the program has got."""


class LateStart(NamedTuple):
    """What a loader stands for that leaves out the first batches of another one."""

    start: int
    sampler: Any
    """The sampler of the other one, which yields the first batches as well."""


class Loading:
    """Where the random numbers of one DataLoader come from; also its `worker_init_fn`.

    Every iteration is the next epoch, unless `set_epoch` names one. The order of an epoch depends
    on (seed, name, epoch), a batch's numbers on (seed, name, rank, epoch, the batch's number). What
    the program itself had seeded torch with when the epoch began is part of the seed.
    """

    request: type[BatchRequest] = BatchRequest
    """What is asked of the process that loads a batch."""

    def __init__(
        self, name: str, epoch: int = 0, author_init: Callable[[int], Any] | None = None
    ) -> None:
        plan = streams.current_plan()
        self.name = name
        self.author_init = author_init
        self.root = plan.root(name)
        streams.note_drawn(name)
        self.plan = replace(plan, rank=plan.coordinate(), program_seed=plan.own_seed())
        self.next_epoch = whole("epoch", epoch)
        self.next_start = 0
        self.start = 0
        self.active = True
        self.before_first_batch: list[Callable[[], None]] = []
        """What is done once, before the next batch that is the first of an iteration."""

        self.sampler_epochs: tuple[int, ...] = ()
        """The epochs of samplers that keep a count of their own, as the present epoch began."""

        self.told_epochs: Callable[[Loading], tuple[int, ...]] | None = None
        """Which epochs they are told as an epoch begins, where the run is a resumed one."""

        self._delivery: ReferenceType[Delivery] | None = None
        self.given_seed = self.given_now()
        """What the program had seeded torch with when the present epoch began, if that is part of
        the seed; see `program_seed.py`."""

        self.batch_size: int | None = None
        """Samples in a batch of the present epoch; None where its sampler does not say."""

        self.interrupted_batch_size: int | None = None
        """The same of an interrupted epoch, until it goes on."""

        self._given_then: list[int | None] = []
        self._enter(self.next_epoch)
        awaited = loaders.register.awaited.pop(name, None)
        if awaited is not None:
            awaited(self)

    def __repr__(self) -> str:
        return f"<torchrepro loading {self.name} seed={self.root} next epoch={self.next_epoch}>"

    def begin(self, start: int = 0) -> None:
        """Start the next epoch at batch `start`, as the rank that this process has by now.

        A start that was set for this epoch goes before.
        """
        now = streams.current_plan()
        if (now.seed, now.streams) == (self.plan.seed, self.plan.streams):
            own = self.plan.program_seed if now.seed is None else now.own_seed()
            self.plan = replace(now, rank=now.coordinate(), program_seed=own)
            self.given_seed = self.given_now()
        if self._given_then:
            self.given_seed = self._given_then.pop()
        self._enter(self.next_epoch)
        self.next_epoch += 1
        self.start, self.next_start = self.next_start or start, 0

    def deliver(self, iterator: Iterator[Any], dropped: int) -> Delivery:
        """Return `iterator`, which has just begun an epoch, as one that counts its batches.

        The first `dropped` batches are loaded, and left out.
        """
        delivery = Delivery(iterator, self.before_first_batch, dropped)
        self._delivery = ref(delivery)
        return delivery

    @property
    def place(self) -> Place:
        """How far the program has come: within an epoch while it holds its iterator."""
        delivery = self._iterated()
        if delivery is None:
            return Place(self.next_epoch, self.next_start)
        return Place(self.epoch, self.start + delivery.batches)

    @property
    def is_iterated(self) -> bool:
        """Whether the program is in the middle of an epoch."""
        return self._iterated() is not None

    @property
    def is_at_last_batch(self) -> bool:
        """Whether its iterator is at its end, and somebody holds it who has batches of it left."""
        delivery = self._held()
        return delivery is not None and delivery.is_over

    def _iterated(self) -> Delivery | None:
        delivery = self._held()
        return None if delivery is None or delivery.is_over else delivery

    def _held(self) -> Delivery | None:
        """Return the iterator that was handed out last, if anybody still holds it."""
        return None if self._delivery is None else self._delivery()

    def go_to(self, place: Place) -> None:
        """Have the next iteration begin at `place`."""
        self.next_epoch, self.next_start = place

    def go_on_with(self, given_seed: int | None, batch_size: int | None) -> None:
        """Have the next iteration be an epoch that began with these and was interrupted."""
        self._given_then = [given_seed]
        self.interrupted_batch_size = batch_size

    def given_now(self) -> int | None:
        """Return what an epoch that begins now has as its `given_seed`."""
        if self.name in self.plan.streams:
            return None  # it has a seed of its own, to be varied alone
        left_out = seed_left_out()
        if left_out:
            loaders.register.notes["seed of ranks"] = left_out
        return seed_of_loaders()

    def __call__(self, worker: int) -> None:
        """Seed worker number `worker`: torch calls this in the worker when it starts."""
        from torch.utils.data import get_worker_info

        draw_from(worker_stream(self.stream, worker))
        if get_worker_info() is not None:
            streams.put_plan(self.plan)
            seed_readers_of_worker(worker, self.stream)
        if self.author_init is not None:
            self.author_init(worker)

    def _enter(self, epoch: int) -> None:
        self.epoch = epoch
        rank = self.plan.rank or 0
        order = derive(self.name, self.root, epoch=epoch, kind="order")  # same on every rank
        stream = derive(self.name, self.root, rank, epoch=epoch, kind="loader")
        self.order, self.stream = (with_given(each, self.given_seed) for each in (order, stream))


class ExplicitLoading(Loading):
    """The seeding of a loader that was made with `dataloader_kwargs`: sample by sample."""

    request = SampleRequest

    def start_order(self, generator: torch.Generator) -> None:
        """Start the generator of the loader, from which torch draws the workers' own seeds."""
        generator.set_state(self.order.torch().get_state())


class Delivery:
    """The iterator of one epoch of a seeded loader, which counts the batches that it delivers."""

    def __init__(
        self, iterator: Iterator[Any], before_first: list[Callable[[], None]], dropped: int
    ) -> None:
        self._iterator = iterator
        self._before_first = before_first
        self._dropped = dropped
        self._has_begun = False
        self.batches = 0
        self.is_over = False

    def __iter__(self) -> Delivery:
        return self

    def __next__(self) -> Any:
        if not self._has_begun:
            self._begin()
        try:
            batch = next(self._iterator)
        except StopIteration:
            self.is_over = True
            raise
        self.batches += 1
        return batch

    def _begin(self) -> None:
        self._has_begun = True
        while self._before_first:
            self._before_first.pop(0)()
        for _ in range(self._dropped):
            next(self._iterator, None)

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]  # torch's iterators have one

    def __getattr__(self, name: str) -> Any:
        if name == "_iterator" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)  # asked for before there is an iterator, by `copy` for one
        return getattr(self._iterator, name)

    def __getstate__(self) -> object:
        self._iterator.__getstate__()  # torch's raises: it is neither copied nor pickled
        return super().__getstate__()


class SeededSampler:
    """A sampler that draws from its own place in the generators and asks for seeded samples."""

    def __init__(
        self,
        sampler: Any,
        loading: Loading,
        generator: torch.Generator | None,
        late: LateStart | None = None,
    ) -> None:
        self.sampler, self.loading = sampler, loading
        self.whole = sampler if late is None else late.sampler
        self.generators = _generators_of_others(self.whole) if generator is None else [generator]

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        if not self.loading.active:  # undone, while workers that live on still use this sampler
            return iter(self.sampler)
        loading = self.loading
        return self._requests(loading.stream, loading.order, loading.start)

    def _requests(self, stream: Stream, order: Stream, start: int) -> Iterator[BatchRequest]:
        own = OrderPlace(self.generators, order)
        with isolated_draws():
            draw_from(order)
            with own:
                indices = iter(self.whole)
                index = next(indices, _END)
            place = nullcontext() if _draws_at_first_only(self.whole) else Position()
        counted = self.loading.request is SampleRequest and _may_repeat(self.whole)
        repeats = Repeats() if counted else None
        for number in count():
            if index is _END:
                return
            again = _NOTHING if repeats is None else repeats.of(index)
            if number >= start:
                yield self.loading.request(stream, number, index, again)
            with place, own:
                index = next(indices, _END)


class OrderPlace:
    """A place in the generators that only the order of an epoch is drawn from."""

    def __init__(self, generators: list[torch.Generator], order: Stream) -> None:
        self._inside = [(generator, order.torch().get_state()) for generator in generators]

    def __enter__(self) -> None:
        self._outside = [(generator, generator.get_state()) for generator, _ in self._inside]
        self._go(self._inside)

    def __exit__(self, *_: object) -> None:
        self._inside = [(generator, generator.get_state()) for generator, _ in self._inside]
        self._go(self._outside)

    def _go(self, states: list[tuple[torch.Generator, torch.Tensor]]) -> None:
        for generator, state in states:
            generator.set_state(state)


class Repeats:
    """Counts the samples of an epoch, so that one which comes again draws other numbers."""

    def __init__(self) -> None:
        self._so_far: Counter[bytes] = Counter()

    def of(self, index: Any) -> Mapping[bytes, int]:
        """Return how often the epoch has had each sample of the batch `index` before.

        Samples that come for the first time, and once, are left out.
        """
        names = [label(part) for part in index] if isinstance(index, list) else [label(index)]
        within = Counter(names)
        again = {
            name: self._so_far[name]
            for name, times in within.items()
            if times > 1 or name in self._so_far
        }
        self._so_far.update(within)
        return again


def _sampler_of_indices(sampler: Any) -> Any:
    """Return what yields single indices: `sampler`, or the one that torch's makes batches of."""
    from torch.utils.data import BatchSampler

    return sampler.sampler if type(sampler) is BatchSampler else sampler


def _may_repeat(sampler: Any) -> bool:
    """Whether an epoch of `sampler` may yield an index twice."""
    from torch.utils import data

    sampler = _sampler_of_indices(sampler)
    if type(sampler) is data.RandomSampler:
        return bool(sampler.replacement or sampler.num_samples > len(sampler.data_source))
    return type(sampler) not in (data.SequentialSampler, data.DistributedSampler)


def _draws_at_first_only(sampler: Any) -> bool:
    """Whether `sampler` is one of torch's that use the global generators before their first index.

    It saves a change of all generators per batch. Any other sampler may draw whenever it likes.
    """
    from torch.utils import data

    return type(_sampler_of_indices(sampler)) in (
        data.SequentialSampler,
        data.RandomSampler,
        data.SubsetRandomSampler,
        data.WeightedRandomSampler,
        data.DistributedSampler,
    )


def samplers_within(sampler: Any) -> Iterator[Any]:
    """Yield `sampler`, the one that it makes batches of or shares out, and so on."""
    seen: list[Any] = []
    while sampler is not None and all(sampler is not other for other in seen):
        seen.append(sampler)
        yield sampler
        inner = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner


def _generators_of_others(sampler: Any) -> list[torch.Generator]:
    """Return the generators that a library gave to samplers whose author gave them none.

    torchdata's samplers make one for themselves; accelerate gives one to torch's.
    """
    given = [
        part
        for part in samplers_within(sampler)
        if type(part).__module__.partition(".")[0] == "torchdata" or part in loaders.adopted
    ]
    found = (getattr(part, "generator", None) for part in given)
    return [generator for generator in found if generator is not None]


class Alive:
    """Objects told apart by identity, for as long as they are alive: a sampler may have no hash."""

    def __init__(self) -> None:
        self._by_id: dict[int, Callable[[], Any]] = {}

    def __contains__(self, thing: Any) -> bool:
        found = self._by_id.get(id(thing))
        return found is not None and found() is thing

    def add(self, thing: Any) -> None:
        """Add `thing`; one that cannot be referenced weakly lives on from now."""
        number = id(thing)
        try:
            self._by_id[number] = ref(thing, lambda _: self._by_id.pop(number, None))
        except TypeError:  # a class with slots
            self._by_id[number] = lambda: thing

    def discard(self, thing: Any) -> None:
        """Take `thing` out, if it is in."""
        if thing in self:
            del self._by_id[id(thing)]


@dataclass(slots=True)
class Register:
    """The loaders that appeared since a seed came in force, and how far they have come."""

    loadings: WeakKeyDictionary[Any, Loading] = field(default_factory=WeakKeyDictionary)
    """The loaders whose author seeded nothing, each with what seeds it."""

    begun: Counter[str] = field(default_factory=Counter)
    """How many such loaders there were of each kind of dataset."""

    resumed: dict[str, int] = field(default_factory=dict)
    """Such loaders of a snapshot that have not appeared yet, each with its next epoch."""

    named: dict[str, int] = field(default_factory=dict)
    """Names of other loaders in a snapshot, not made again yet, each with its next epoch."""

    awaited: dict[str, Callable[[Loading], None]] = field(default_factory=dict)
    """What is done to the seeding of a loader that has not appeared yet, by its name."""

    notes: dict[str, str] = field(default_factory=dict)
    """What a reader has to know of the loading of data, by what it is about."""


@dataclass(slots=True)
class Loaders:
    """The loaders of this process that torchrepro seeds."""

    automatic: bool = False
    """Whether loaders whose author seeded nothing are seeded."""

    register: Register = field(default_factory=Register)
    """Those of the seed in force."""

    explicit: WeakSet[ExplicitLoading] = field(default_factory=WeakSet)
    """The seeding of the loaders made with `dataloader_kwargs`, while they are alive."""

    late: WeakKeyDictionary[Any, LateStart] = field(default_factory=WeakKeyDictionary)
    """Loaders that stand for another one without its first batches."""

    adopted: Alive = field(default_factory=Alive)
    """Samplers of torch to which a framework gave a generator, where their author gave none."""


loaders = Loaders()


def set_automatic(seeded: bool) -> None:  # noqa: FBT001 - the state itself
    """Seed loaders whose author seeded nothing, or leave them alone."""
    loaders.automatic = seeded
    for loading in loaders.register.loadings.values():
        loading.active = seeded


def put_register(register: Register) -> None:
    """Make `register` the one in use: an empty one with a new seed, the old one with its undo.

    Workers that live on find in their sampler whether their loader is seeded at present.
    """
    for loading in loaders.register.loadings.values():
        loading.active = False
    loaders.register = register
    set_automatic(loaders.automatic)


def first_epoch(name: str) -> int:
    """Return the epoch with which a new loader called `name` goes on: 0 unless it is resumed."""
    return loaders.register.named.pop(name, 0)


def loading_of(loader: Any) -> Loading | None:
    """Return what seeds `loader`: its own, or the profile's where its author seeded nothing."""
    own = getattr(loader, "worker_init_fn", None)
    if isinstance(own, Loading):
        return own
    if not loaders.automatic or not _can_be_seeded(loader):
        return None
    loadings = loaders.register.loadings
    if loader not in loadings:
        if getattr(loader, "_iterator", None) is not None:
            return None  # its workers started before the profile was in force
        loadings[loader] = _next_loading(_kind(loader.dataset))
    return loadings[loader]


def author_seeds(loader: Any) -> bool:
    """Whether the author of `loader` gave it a generator or a `worker_init_fn` of its own."""
    return getattr(loader, "generator", None) is not None or has_own_worker_init(loader)


def has_own_worker_init(loader: Any) -> bool:
    """Whether `loader` has a `worker_init_fn` that is not a framework's."""
    init = getattr(loader, "worker_init_fn", None)
    return init is not None and worker_seeder(init) is None


def bind_loader(loader: Any, name: str) -> None:
    """Have `loader`, seeded by the profile, go on as the loader called `name`."""
    register = loaders.register
    if loaders.automatic and name in register.resumed and _can_be_seeded(loader):
        register.loadings[loader] = Loading(name, register.resumed.pop(name))
        return
    present = loading_of(loader)
    if present is not None and not isinstance(present, ExplicitLoading) and present.name != name:
        register.loadings[loader] = Loading(name, present.next_epoch)


def is_kept(loader: Any) -> bool:
    """Whether `loader` is one of torch that can be told apart from others: a list is not."""
    from torch.utils.data import DataLoader

    return isinstance(loader, DataLoader) and type(loader).__hash__ is not None


def _can_be_seeded(loader: Any) -> bool:
    if not is_kept(loader) or author_seeds(loader):
        return False
    if is_loading():
        return False  # a dataset's own loader draws from what its sample draws from
    if not {"sampler", "batch_sampler"} <= vars(loader).keys():
        return False  # a class that makes them up has no place where seeding could step in
    if threading.current_thread() is not threading.main_thread():
        # Seeding goes through the global generators, from which other threads draw meanwhile.
        warnings.warn(
            "a DataLoader is iterated outside of the main thread: dataloader.seeding leaves it "
            "as its author made it; give it torchrepro.dataloader_kwargs(name)",
            stacklevel=5,
        )
        return False
    return True


def _kind(dataset: Any) -> str:
    """Return what loaders over alike datasets have in common, whatever order they are used in."""
    try:
        length = str(len(dataset))
    except Exception:  # noqa: BLE001 - a dataset without a length raises what its author likes
        length = "?"
    return f"{type(dataset).__name__}[{length}]"


def _next_loading(kind: str) -> Loading:
    """Return the seeding of a loader that is new here: a resumed one, else a new one."""
    register = loaders.register
    for name in register.resumed:
        if name.rpartition("#")[0] == kind:
            return Loading(name, register.resumed.pop(name))
    register.begun[kind] += 1
    return Loading(f"{kind}#{register.begun[kind]}")


def epochs() -> dict[str, Any]:
    """Return how far every seeded loader has come, as plain JSON values."""
    register = loaders.register
    own = {loading.name: loading.next_epoch for loading in register.loadings.values()}
    named = {loading.name: loading.next_epoch for loading in loaders.explicit}
    return {
        "begun": dict(register.begun),
        "next_epoch": {**register.resumed, **own},
        "named": {**register.named, **named},
    }


def set_epochs(saved: dict[str, Any]) -> None:
    """Have every seeded loader go on where `epochs` found it.

    A loader that does not exist yet gets its place when its turn comes, and so does one that
    `epochs` did not know.
    """
    register = loaders.register
    register.begun, register.resumed = Counter(saved["begun"]), dict(saved["next_epoch"])
    for loader, loading in list(register.loadings.items()):
        if loading.name in register.resumed:
            loading.next_epoch = register.resumed.pop(loading.name)
        else:
            del register.loadings[loader]
    register.named = dict(saved["named"])
    for explicit in loaders.explicit:
        explicit.next_epoch = saved["named"].get(explicit.name, explicit.next_epoch)
        register.named.pop(explicit.name, None)
