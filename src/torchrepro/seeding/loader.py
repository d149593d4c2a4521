"""What a DataLoader's samples draw from, and how its sampler asks for them.

Under `dataloader.seeding: auto` a loader follows torch's own protocol. Its sampler draws the order
as ever, from the loader's generator or the global one. torch draws one base seed per iteration from
the same place (https://docs.pytorch.org/docs/stable/data.html#randomness-in-multi-process-data-loading).
A sample draws from that base seed, its index, and the seeds that the program gave to `random` and
numpy. A loader made with `dataloader_kwargs` has a name instead: its order and samples depend on
(seed, name, epoch), and on nothing that anybody draws.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from torchrepro.seeding import streams
from torchrepro.seeding.generators import Given, generator_kind, given_seeds, host_slots
from torchrepro.seeding.loader_worker import (
    Position,
    Request,
    epoch_stream,
    in_loader,
    isolated_draws,
    label,
    seed_readers_of_worker,
    start_from,
    worker_stream,
)
from torchrepro.seeding.streams import Stream, derive, given_seed, nonnegative_int, world

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

_NOTHING: Mapping[bytes, int] = {}
_AGAIN = "torchrepro_again"  # key in a sampler's state: how often it has yielded each index


class WorkerSeeder(NamedTuple):
    """A framework's `worker_init_fn`, which does nothing but seed workers."""

    framework: str
    module: str
    function: str

    def __str__(self) -> str:
        return f"{self.function} of {self.framework}"


WORKER_SEEDERS = (
    WorkerSeeder("Lightning", "lightning.fabric.utilities.seed", "pl_worker_init_function"),
    WorkerSeeder("Lightning", "lightning_fabric.utilities.seed", "pl_worker_init_function"),
    WorkerSeeder("transformers", "transformers.trainer_utils", "seed_worker"),
    WorkerSeeder("timm", "timm.data.loader", "_worker_init"),
    WorkerSeeder("detectron2", "detectron2.data.build", "worker_init_reset_seed"),
)
"""Under `dataloader.seeding: auto` a loader that has one of these is seeded as if it had none.

A function is known by its identity: one of the same name, or one that the program has put in its
place, is the program's own. A framework is never imported for it.
"""


def worker_seeder(init: Any) -> WorkerSeeder | None:
    """Return the row of a loader's `worker_init_fn`; None for one of the program's own.

    A framework's function that calls one of the program's (timm's `worker_seeding`) is its own.
    """
    while isinstance(init, partial):
        if any(map(callable, (*init.args, *init.keywords.values()))):
            return None
        init = init.func
    for row in WORKER_SEEDERS:
        module = sys.modules.get(row.module)
        if module is not None and vars(module).get(row.function) is init:
            return row
    return None


class Loading:
    """What the samples of one iteration draw from by torch's protocol; its `worker_init_fn`.

    They are parts of `stream`, which is None until torch has drawn its base seed: a worker knows it
    by the seed with which torch started it. They depend on the seeds that were `given` by the
    program as well. The first `start` batches of the epoch are left out.
    """

    stream: Stream | None = None
    given: Given | None = None
    start = 0
    author_init: Callable[[int], Any] | None = None
    active = True
    draws_base_seed = False

    def __init__(self) -> None:
        plan = streams.current_plan()
        self.plan = replace(plan, rank=plan.coordinate(), program_seed=plan.own_seed())
        self.given = given_seeds()

    def __call__(self, worker: int) -> None:
        """Seed worker number `worker`: torch calls this in the worker when it starts."""
        from torch.utils.data import get_worker_info

        if get_worker_info() is not None:
            streams.put_plan(self.plan)
            seed_readers_of_worker(worker, self.stream, self.given)
        elif self.stream is not None:
            start_from(worker_stream(self.stream, worker))
        if self.author_init is not None:
            self.author_init(worker)

    def indices(self, sampler: Any, generator: torch.Generator | None) -> Iterator[Any]:
        """Return what `sampler` yields, and draw the base seed where torch does not."""
        indices: Iterator[Any] = iter(sampler)
        if self.draws_base_seed:
            import torch

            self.draws_base_seed = False
            drawn = torch.empty((), dtype=torch.int64).random_(generator=generator)
            self.stream = epoch_stream(int(drawn.item()))
        return indices


class NamedLoading(Loading):
    """The seeding of a loader that has a name, whose epochs can be named as well.

    Every iteration is the next epoch, unless `set_epoch` names one. The order of an epoch depends
    on (seed, name, epoch), a sample's numbers on (seed, name, rank, epoch, index). What the program
    itself had seeded torch with when the epoch began is part of the seed.
    """

    def __init__(
        self, name: str, epoch: int = 0, author_init: Callable[[int], Any] | None = None
    ) -> None:
        Loading.__init__(self)
        self.name, self.author_init, self.given = name, author_init, None
        self.root = streams.current_plan().root(name)
        streams.drawn.add(name)
        self.next_epoch, self.next_start = nonnegative_int("epoch", epoch), 0
        self.program_seed = self._program_seed_now()  # as the present epoch began
        self._resumed_seed: list[int | None] = []
        self._enter(self.next_epoch)

    def __repr__(self) -> str:
        return f"<torchrepro loading {self.name} seed={self.root} next epoch={self.next_epoch}>"

    def begin(self) -> None:
        """Start the next epoch, as the rank that this process has by now."""
        now = streams.current_plan()
        if (now.seed, now.streams) == (self.plan.seed, self.plan.streams):
            own = self.plan.program_seed if now.seed is None else now.own_seed()
            self.plan = replace(now, rank=now.coordinate(), program_seed=own)
            self.program_seed = self._program_seed_now()
        if self._resumed_seed:
            self.program_seed = self._resumed_seed.pop()
        self._enter(self.next_epoch)
        self.next_epoch += 1
        self.start, self.next_start = self.next_start, 0

    def go_to(self, epoch: int, start: int = 0) -> None:
        """Have the next iteration be the epoch `epoch`, without its first `start` batches."""
        self.next_epoch, self.next_start = epoch, start

    def resume(self, epoch: int, program_seed: int | None) -> None:
        """Have the next iteration be an epoch that began with this seed and was interrupted."""
        self.go_to(epoch)
        self._resumed_seed = [program_seed]

    def start_order(self, generator: torch.Generator) -> None:
        """Start the generator of the loader, from which torch draws the workers' own seeds."""
        generator.set_state(self.order.torch().get_state())

    def indices(self, sampler: Any, generator: torch.Generator | None) -> Iterator[Any]:
        """Return what `sampler` yields, which draws from a place of its own in the generators."""
        return self._from_own_place(sampler, generator, self.order)  # of the epoch that begins here

    @staticmethod
    def _from_own_place(
        sampler: Any, generator: torch.Generator | None, order: Stream
    ) -> Iterator[Any]:
        from torch.utils import data

        kind = generator_kind(generator)
        own = [] if kind is None else [kind.slot(generator)]
        end = object()
        with isolated_draws(own):
            start_from(order)
            if generator is not None:
                generator.set_state(order.torch().get_state())
            indices = iter(sampler)
            index = next(indices, end)
            # These of torch's use the global generators before their first index alone. Any other
            # sampler may draw whenever it likes, which costs a change of all of them per batch.
            draws_at_first = type(_sampler_of_indices(sampler)) in (
                data.SequentialSampler,
                data.RandomSampler,
                data.SubsetRandomSampler,
                data.WeightedRandomSampler,
                data.DistributedSampler,
            )
            position = Position(own if draws_at_first else [*host_slots().values(), *own])
        while index is not end:
            yield index
            with position.resumed():
                index = next(indices, end)

    def _program_seed_now(self) -> int | None:
        # The seed that a program gives to torch itself, as in ``torch.manual_seed(args.seed)``,
        # joins that of a profile: otherwise a sweep over ``--seed`` would load the same samples in
        # the same order in every run. Ranks that share one order must not draw it from different
        # seeds, or some samples are loaded twice and others never: with several ranks, a seed joins
        # only if every rank had given the same one when the process group was made.
        if self.name in self.plan.streams:
            return None  # it has a seed of its own, to be varied alone
        seed, agreed, ranks = given_seed(), streams.current_plan().agreed_seed, world().size
        if ranks == 1:
            return seed
        if seed not in (None, agreed):
            loaders.register.notes["seed of ranks"] = (
                f"named loaders do not depend on the program's own seed {seed}: with {ranks} ranks "
                "only one that all of them give before init_process_group counts; vary the "
                "profile's seed instead"
            )
        return agreed

    def _enter(self, epoch: int) -> None:
        self.epoch = epoch
        order = derive(self.name, self.root, epoch=epoch, kind="order")  # same on every rank
        stream = derive(self.name, self.root, self.plan.rank or 0, epoch=epoch, kind="loader")
        if self.program_seed is not None:
            own = b"program/%d" % self.program_seed
            order, stream = order.part(own), stream.part(own)
        self.order, self.stream = order, stream


class SeededSampler:
    """Replaces the sampler of a loader: yields what it yields, as requests for seeded samples."""

    def __init__(
        self, sampler: Any, loading: Loading, generator: torch.Generator | None, yields: str
    ) -> None:
        self.sampler, self.loading, self.generator = sampler, loading, generator
        self.yields = yields  # indices of `samples` or of `batches`
        if _has_state(sampler) and not isinstance(loading, NamedLoading):
            # One of torchdata's keeps its place itself.
            self.state_dict, self.load_state_dict = sampler.state_dict, sampler.load_state_dict

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        if not self.loading.active:  # undone, while workers that live on still use this sampler
            return iter(self.sampler)
        inner, skipped = unskipped(self.sampler)
        indices = self.loading.indices(inner, self.generator)
        return (_StatefulRequests if _has_state(indices) else _Requests)(
            indices, self.loading, skipped, self.yields if _may_repeat(inner) else ""
        )


def seeded_sampler(loader: Any, loading: Loading, generator: Any) -> dict[str, SeededSampler]:
    """Return what replaces the sampler of `loader`, by the name of the attribute that holds it."""
    holder, yields = "batch_sampler", "batches"
    if loader.batch_sampler is None:
        holder, yields = "sampler", "samples"
    return {holder: SeededSampler(getattr(loader, holder), loading, generator, yields)}


class _Requests:
    """The requests of one epoch.

    They count how often each sample comes, where it may come again: it then draws other numbers.
    """

    def __init__(
        self, indices: Iterator[Any], loading: Loading, skipped: int, repeats: str
    ) -> None:
        self._indices, self._loading, self._repeats = indices, loading, repeats
        self._stream = loading.stream  # of this epoch, whichever a named loader goes to later
        self._left_out = skipped + loading.start
        self._so_far: Counter[bytes] = Counter()

    def __iter__(self) -> _Requests:
        return self

    def __next__(self) -> Request:
        while self._left_out:
            self._left_out -= 1
            self._next()
        index, again = self._next()
        loading = self._loading
        return Request(self._stream or loading.stream, index, again, loading.given)

    def _next(self) -> tuple[Any, Mapping[bytes, int]]:
        # With each index, how often the epoch has had those of its samples that come again.
        index = next(self._indices)
        if not self._repeats:
            return index, _NOTHING
        within = Counter(map(label, index) if self._repeats == "batches" else [label(index)])
        again = {
            name: self._so_far[name]
            for name, times in within.items()
            if times > 1 or name in self._so_far
        }
        self._so_far.update(within)
        return index, again


class _StatefulRequests(_Requests):
    """The same over an iterator that keeps its place itself, as torchdata's do."""

    def state_dict(self) -> Any:
        state = self._indices.state_dict()  # type: ignore[attr-defined]
        if not self._repeats:
            return state
        return {**state, _AGAIN: {name.decode(): n for name, n in self._so_far.items()}}

    def load_state_dict(self, state: Any) -> None:
        own = dict(state)
        again = own.pop(_AGAIN, {})
        self._indices.load_state_dict(own)  # type: ignore[attr-defined]
        self._so_far = Counter({name.encode(): n for name, n in again.items()})


def _has_state(part: Any) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def unskipped(sampler: Any) -> tuple[Any, int]:
    """Return the sampler of which accelerate's leaves out the first batches, and how many.

    A sample that an epoch has had in a batch left out comes again, and has to draw as such.
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
    if type(sampler).__name__ == "_InfiniteConstantSampler":  # an IterableDataset names no samples
        return False
    return type(sampler) not in (data.SequentialSampler, data.DistributedSampler)


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

    # Those that were not made with `dataloader_kwargs`, each with what seeds it.
    loadings: WeakKeyDictionary[Any, Loading] = field(default_factory=WeakKeyDictionary)
    # Names of loaders in a snapshot that are still to be made, each with its next epoch.
    named: dict[str, int] = field(default_factory=dict)
    # What a reader has to know of the loading of data, by what it is about.
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Loaders:
    """The loaders of this process that torchrepro seeds."""

    automatic: bool = False  # whether those that were not made with `dataloader_kwargs` are seeded
    register: Register = field(default_factory=Register)  # those of the seed in force
    # The seeding of those made with `dataloader_kwargs`, while they are alive.
    explicit: WeakSet[NamedLoading] = field(default_factory=WeakSet)


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


def named_loading_of(loader: Any) -> NamedLoading | None:
    found = getattr(loader, "worker_init_fn", None)
    if not isinstance(found, NamedLoading):
        found = loaders.register.loadings.get(loader) if is_kept(loader) else None
    return found if isinstance(found, NamedLoading) else None


def loading_of_iteration(loader: Any) -> Loading | None:
    """Return what seeds the iteration of `loader` that begins now; None where nothing does."""
    named = named_loading_of(loader)
    seeded = loaders.automatic and is_kept(loader) and not author_seeds_workers(loader)
    # A dataset's own loader draws from what its sample draws from. A class that makes its samplers
    # up has no place where seeding could step in.
    if named is not None or not seeded or in_loader():
        return named
    if not {"sampler", "batch_sampler"} <= vars(loader).keys():
        return None
    loadings = loaders.register.loadings
    if getattr(loader, "_iterator", None) is None or not loader.persistent_workers:
        loadings[loader] = Loading()
    elif (again := loadings.get(loader)) is not None:
        # Another epoch with the same workers, for which torch draws no base seed.
        again.given, again.stream, again.start = given_seeds(), None, 0
        again.draws_base_seed = True
    return loadings.get(loader)  # None where its workers started before the profile was in force


def author_seeds_workers(loader: Any) -> bool:
    """Whether `loader` has a `worker_init_fn` that is not a framework's."""
    init = getattr(loader, "worker_init_fn", None)
    return init is not None and worker_seeder(init) is None


def is_kept(loader: Any) -> bool:
    """Whether `loader` is one of torch that can be told apart from others: a list is not."""
    from torch.utils.data import DataLoader

    return isinstance(loader, DataLoader) and type(loader).__hash__ is not None


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
