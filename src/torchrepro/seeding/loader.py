"""What a DataLoader's samples draw from, and how its sampler asks for them.

Under `dataloader.seeding: auto` a loader follows torch's own protocol. Its sampler draws the order
as ever, from the loader's generator or the global one. torch draws one base seed per iteration from
the same place (https://docs.pytorch.org/docs/stable/data.html#randomness-in-multi-process-data-loading).
A sample draws from that base seed, its index, and the seeds that the program gave to `random` and
numpy. A loader made with `dataloader_kwargs` has a name instead: its order and samples depend on
(seed, name, epoch), and on nothing that anybody draws.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from torchrepro.seeding import streams
from torchrepro.seeding.generators import Given, given_to_host
from torchrepro.seeding.loader_worker import (
    Position,
    Request,
    draw_from,
    is_loading,
    isolated_draws,
    label,
    seed_readers_of_worker,
    stream_of,
    worker_stream,
)
from torchrepro.seeding.program_seed import seed_left_out, seed_of_loaders, with_given
from torchrepro.seeding.streams import Stream, derive, whole
from torchrepro.seeding.worker_seeders import worker_seeder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

_NOTHING: Mapping[bytes, int] = {}
_AGAIN = "torchrepro_again"
"""Under this key the state of a sampler's iterator holds how often it has yielded each index."""


class Loading:
    """What the samples of a loader draw from; also its `worker_init_fn`."""

    stream: Stream | None = None
    """What the samples of the present epoch are parts of; None until torch has drawn its base seed.

    Until then a worker knows it by the seed with which torch started it.
    """

    given: Given | None = None
    """The program's own seeds that the samples of the present epoch depend on, if they do."""

    start = 0
    """How many batches of the present epoch are left out."""

    def __init__(self, author_init: Callable[[int], Any] | None = None) -> None:
        self.author_init = author_init
        self.active = True
        plan = streams.current_plan()
        self.plan = replace(plan, rank=plan.coordinate(), program_seed=plan.own_seed())

    def __call__(self, worker: int) -> None:
        """Seed worker number `worker`: torch calls this in the worker when it starts."""
        from torch.utils.data import get_worker_info

        if get_worker_info() is not None:
            streams.put_plan(self.plan)
            seed_readers_of_worker(worker, self.stream, self.given)
        elif self.stream is not None:
            draw_from(worker_stream(self.stream, worker))
        if self.author_init is not None:
            self.author_init(worker)


class FollowingLoading(Loading):
    """The seeding of a loader by torch's own protocol, for one iterator of it."""

    def __init__(self) -> None:
        Loading.__init__(self)
        self.given = given_to_host()
        self._draws_base_seed = False

    def begin_again(self) -> None:
        """Begin another epoch with the same workers, for which torch draws no base seed."""
        self.given = given_to_host()
        self.stream, self.start = None, 0
        self._draws_base_seed = True

    def order_begins(self, generator: torch.Generator | None) -> None:
        """Draw the base seed where torch does not, as it would: the sampler has just been asked."""
        if self._draws_base_seed:
            import torch

            self._draws_base_seed = False
            drawn = torch.empty((), dtype=torch.int64).random_(generator=generator)
            self.stream = stream_of(int(drawn.item()))


class NamedLoading(Loading):
    """The seeding of a loader that has a name, whose epochs can be named as well.

    Every iteration is the next epoch, unless `set_epoch` names one. The order of an epoch depends
    on (seed, name, epoch), a sample's numbers on (seed, name, rank, epoch, index). What the program
    itself had seeded torch with when the epoch began is part of the seed.
    """

    def __init__(
        self, name: str, epoch: int = 0, author_init: Callable[[int], Any] | None = None
    ) -> None:
        Loading.__init__(self, author_init)
        self.name = name
        self.root = streams.current_plan().root(name)
        streams.note_drawn(name)
        self.next_epoch = whole("epoch", epoch)
        self.next_start = 0
        self.given_seed = self._given_now()
        """What the program had seeded torch with when the present epoch began, if that is part of
        the seed; see `program_seed.py`."""

        self._given_then: list[int | None] = []
        self._enter(self.next_epoch)

    def __repr__(self) -> str:
        return f"<torchrepro loading {self.name} seed={self.root} next epoch={self.next_epoch}>"

    def begin(self) -> None:
        """Start the next epoch, as the rank that this process has by now."""
        now = streams.current_plan()
        if (now.seed, now.streams) == (self.plan.seed, self.plan.streams):
            own = self.plan.program_seed if now.seed is None else now.own_seed()
            self.plan = replace(now, rank=now.coordinate(), program_seed=own)
            self.given_seed = self._given_now()
        if self._given_then:
            self.given_seed = self._given_then.pop()
        self._enter(self.next_epoch)
        self.next_epoch += 1
        self.start, self.next_start = self.next_start, 0

    def go_to(self, epoch: int, start: int) -> None:
        """Have the next iteration be the epoch `epoch`, without its first `start` batches."""
        self.next_epoch, self.next_start = epoch, start

    def go_on_with(self, given_seed: int | None) -> None:
        """Have the next iteration be an epoch that began with this and was interrupted."""
        self._given_then = [given_seed]

    def start_order(self, generator: torch.Generator) -> None:
        """Start the generator of the loader, from which torch draws the workers' own seeds."""
        generator.set_state(self.order.torch().get_state())

    def _given_now(self) -> int | None:
        """Return what an epoch that begins now has as its `given_seed`."""
        if self.name in self.plan.streams:
            return None  # it has a seed of its own, to be varied alone
        left_out = seed_left_out()
        if left_out:
            loaders.register.notes["seed of ranks"] = left_out
        return seed_of_loaders()

    def _enter(self, epoch: int) -> None:
        self.epoch = epoch
        rank = self.plan.rank or 0
        order = derive(self.name, self.root, epoch=epoch, kind="order")  # same on every rank
        stream = derive(self.name, self.root, rank, epoch=epoch, kind="loader")
        self.order, self.stream = (with_given(each, self.given_seed) for each in (order, stream))


class StandingSampler:
    """Stands for a loader's sampler: yields what it yields, as requests for seeded samples."""

    def __init__(
        self, sampler: Any, loading: Any, generator: torch.Generator | None, yields: str
    ) -> None:
        self.sampler, self.loading, self.generator = sampler, loading, generator
        self.yields = yields
        """What the indices are that it yields: of `samples` or of `batches`."""

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        if not self.loading.active:  # undone, while workers that live on still use this sampler
            return iter(self.sampler)
        inner, skipped = unskipped(self.sampler)
        repeats = Repeats(self.yields) if _may_repeat(inner) else None
        return self._requests(inner, skipped, repeats)

    def _requests(self, inner: Any, skipped: int, repeats: Repeats | None) -> Iterator[Any]:
        raise NotImplementedError


class FollowingSampler(StandingSampler):
    """The same where the order is the sampler's own."""

    def _requests(self, inner: Any, skipped: int, repeats: Repeats | None) -> Iterator[Any]:
        indices = iter(inner)
        self.loading.order_begins(self.generator)
        kind = _StatefulRequests if _has_state(indices) else _Requests
        return kind(indices, self.loading, skipped, repeats)


class StatefulFollowingSampler(FollowingSampler):
    """The same for a sampler of torchdata, which keeps its place itself."""

    def state_dict(self) -> Any:
        return self.sampler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.sampler.load_state_dict(state)


def standing_for(loader: Any, loading: Loading, generator: Any) -> dict[str, StandingSampler]:
    """Return what stands for the sampler of `loader` in an iteration that `loading` seeds.

    By the name of the attribute that holds it.
    """
    holder, yields = "batch_sampler", "batches"
    if loader.batch_sampler is None:
        holder, yields = "sampler", "samples"
    sampler = getattr(loader, holder)
    kind: type[StandingSampler] = NamedSampler
    if not isinstance(loading, NamedLoading):
        kind = StatefulFollowingSampler if _has_state(sampler) else FollowingSampler
    return {holder: kind(sampler, loading, generator, yields)}


class _Requests:
    """The requests of one epoch."""

    def __init__(
        self, indices: Iterator[Any], loading: Loading, skipped: int, repeats: Repeats | None
    ) -> None:
        self._indices, self._loading, self._repeats = indices, loading, repeats
        self._left_out = skipped + loading.start

    def __iter__(self) -> _Requests:
        return self

    def __next__(self) -> Request:
        while self._left_out:
            self._left_out -= 1
            self._next()
        index, again = self._next()
        return Request(self._loading.stream, index, again, self._loading.given)

    def _next(self) -> tuple[Any, Mapping[bytes, int]]:
        index = next(self._indices)
        return index, _NOTHING if self._repeats is None else self._repeats.of(index)


class _StatefulRequests(_Requests):
    """The same over an iterator that keeps its place itself, as torchdata's do."""

    def state_dict(self) -> Any:
        state = self._indices.state_dict()  # type: ignore[attr-defined]
        if self._repeats is None:
            return state
        return {**state, _AGAIN: {name.decode(): n for name, n in self._repeats.so_far.items()}}

    def load_state_dict(self, state: Any) -> None:
        own = dict(state)
        again = own.pop(_AGAIN, {})
        self._indices.load_state_dict(own)  # type: ignore[attr-defined]
        if self._repeats is not None:
            self._repeats.so_far = Counter({name.encode(): n for name, n in again.items()})


def _has_state(part: Any) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def unskipped(sampler: Any) -> tuple[Any, int]:
    """Return the sampler of which accelerate's leaves out the first batches, and how many.

    A sample that an epoch has had in a batch left out comes again, and has to draw as such.
    """
    if type(sampler).__name__ == "SkipBatchSampler":
        return sampler.batch_sampler, sampler.skip_batches
    return sampler, 0


class NamedSampler(StandingSampler):
    """The same where the order is drawn from its own place in the generators."""

    def _requests(self, inner: Any, skipped: int, repeats: Repeats | None) -> Iterator[Any]:
        indices = self._indices(inner, self.loading.order)
        return _Requests(indices, _Begun(self.loading), skipped, repeats)

    def _indices(self, sampler: Any, order: Stream) -> Iterator[Any]:
        own = OrderPlace([] if self.generator is None else [self.generator], order)
        with isolated_draws():
            draw_from(order)
            with own:
                indices = iter(sampler)
                index = next(indices, _END)
            place = nullcontext() if _draws_at_first_only(sampler) else Position()
        while index is not _END:
            yield index
            with place, own:
                index = next(indices, _END)


_END = object()


class _Begun(Loading):
    """What a named loader's epoch draws from, whichever epoch it goes to later."""

    def __init__(self, loading: NamedLoading) -> None:
        self.stream, self.start = loading.stream, loading.start


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

    def __init__(self, yields: str) -> None:
        self.so_far: Counter[bytes] = Counter()
        self._yields = yields

    def of(self, index: Any) -> Mapping[bytes, int]:
        """Return how often the epoch has had each sample of the batch `index` before.

        Samples that come for the first time, and once, are left out.
        """
        names = [label(part) for part in index] if self._yields == "batches" else [label(index)]
        within = Counter(names)
        again = {
            name: self.so_far[name]
            for name, times in within.items()
            if times > 1 or name in self.so_far
        }
        self.so_far.update(within)
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
    if type(sampler).__name__ == "_InfiniteConstantSampler":  # an IterableDataset names no samples
        return False
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


@dataclass(slots=True)
class Register:
    """The loaders that are seeded since a seed came in force."""

    loadings: WeakKeyDictionary[Any, Loading] = field(default_factory=WeakKeyDictionary)
    """Those that were not made with `dataloader_kwargs`, each with what seeds it."""

    named: dict[str, int] = field(default_factory=dict)
    """Names of loaders in a snapshot, not made again yet, each with its next epoch."""

    notes: dict[str, str] = field(default_factory=dict)
    """What a reader has to know of the loading of data, by what it is about."""


@dataclass(slots=True)
class Loaders:
    """The loaders of this process that torchrepro seeds."""

    automatic: bool = False
    """Whether loaders that were not made with `dataloader_kwargs` are seeded."""

    register: Register = field(default_factory=Register)
    """Those of the seed in force."""

    explicit: WeakSet[NamedLoading] = field(default_factory=WeakSet)
    """The seeding of the loaders made with `dataloader_kwargs`, while they are alive."""


loaders = Loaders()


def set_automatic(seeded: bool) -> None:  # noqa: FBT001 - the state itself
    """Seed loaders that were not made with `dataloader_kwargs`, or leave them alone."""
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


def named_loading_of(loader: Any) -> NamedLoading | None:
    """Return what seeds `loader` by its name, or None."""
    own = getattr(loader, "worker_init_fn", None)
    if isinstance(own, NamedLoading):
        return own
    found = loaders.register.loadings.get(loader) if is_kept(loader) else None
    return found if isinstance(found, NamedLoading) else None


def loading_of_iteration(loader: Any) -> Loading | None:
    """Return what seeds the iteration of `loader` that begins now; None where nothing does."""
    named = named_loading_of(loader)
    if named is not None:
        return named
    if not can_be_seeded(loader):
        return None
    loadings = loaders.register.loadings
    lives_on = getattr(loader, "_iterator", None) is not None
    if lives_on and loader.persistent_workers:
        present = loadings.get(loader)
        if isinstance(present, FollowingLoading):
            present.begin_again()
        return present  # None where its workers started before the profile was in force
    loadings[loader] = FollowingLoading()
    return loadings[loader]


def name_loader(loader: Any) -> NamedLoading:
    """Return the seeding by which epochs of `loader`, which nobody named, can be named.

    It is called after its dataset.
    """
    loading = NamedLoading(kind_of_dataset(loader.dataset))
    loaders.register.loadings[loader] = loading
    return loading


def author_seeds_workers(loader: Any) -> bool:
    """Whether `loader` has a `worker_init_fn` that is not a framework's."""
    init = getattr(loader, "worker_init_fn", None)
    return init is not None and worker_seeder(init) is None


def is_kept(loader: Any) -> bool:
    """Whether `loader` is one of torch that can be told apart from others: a list is not."""
    from torch.utils.data import DataLoader

    return isinstance(loader, DataLoader) and type(loader).__hash__ is not None


def can_be_seeded(loader: Any) -> bool:
    """Whether `dataloader.seeding: auto` seeds the samples of `loader`, were it iterated now."""
    if not loaders.automatic or not is_kept(loader) or author_seeds_workers(loader):
        return False
    if is_loading():
        return False  # a dataset's own loader draws from what its sample draws from
    # A class that makes them up has no place where seeding could step in.
    return bool({"sampler", "batch_sampler"} <= vars(loader).keys())


def kind_of_dataset(dataset: Any) -> str:
    """Return what alike datasets have in common, such as ``Pictures[50000]``."""
    try:
        length = str(len(dataset))
    except Exception:  # noqa: BLE001 - a dataset without a length raises what its author likes
        length = "?"
    return f"{type(dataset).__name__}[{length}]"


def epochs() -> dict[str, Any]:
    """Return how far every named loader has come, as plain JSON values."""
    named = {loading.name: loading.next_epoch for loading in loaders.explicit}
    return {"named": {**loaders.register.named, **named}}


def set_epochs(saved: Mapping[str, Any]) -> None:
    """Have every named loader go on where `epochs` found it.

    A loader that does not exist yet gets its place when it is made.
    """
    register = loaders.register
    register.named = dict(saved["named"])
    for explicit in loaders.explicit:
        explicit.next_epoch = saved["named"].get(explicit.name, explicit.next_epoch)
        register.named.pop(explicit.name, None)
