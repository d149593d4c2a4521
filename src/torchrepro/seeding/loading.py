"""The random numbers of a DataLoader: its order, its workers, its samples."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from torchrepro.seeding import seed_plan
from torchrepro.seeding.drawing import Position, draw_from, enter, leave, worker_stream
from torchrepro.seeding.fetching import BatchRequest, SampleRequest
from torchrepro.seeding.indices import NoRepeats, Repeats, repeats_of, single
from torchrepro.seeding.reader_hook import seed_readers_of_worker
from torchrepro.seeding.streams import Stream, derive
from torchrepro.seeding.whole import whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


class Loading:
    """Where the random numbers of one DataLoader come from; also its `worker_init_fn`.

    Every iteration is the next epoch, unless `set_epoch` names one. The order of an epoch depends
    on (seed, name, epoch), a batch's numbers on (seed, name, rank, epoch, the batch's number).
    """

    request: type[BatchRequest] = BatchRequest
    """What is asked of the process that loads a batch."""

    def __init__(
        self, name: str, epoch: int = 0, theirs: Callable[[int], Any] | None = None
    ) -> None:
        plan = seed_plan.current()
        self.name = name
        self.theirs = theirs
        self.root = plan.root(name)
        seed_plan.note(name)
        self.plan = replace(plan, rank=plan.coordinate())
        self.next_epoch = whole("epoch", epoch)
        self.next_start = 0
        self.start = 0
        self.active = True
        self._enter(self.next_epoch)

    def __repr__(self) -> str:
        return f"<torchrepro loading {self.name} seed={self.root} next epoch={self.next_epoch}>"

    def begin(self) -> None:
        """Start the next epoch, as the rank that this process has by now."""
        now = seed_plan.current()
        if (now.seed, now.streams) == (self.plan.seed, self.plan.streams):
            self.plan = replace(now, rank=now.coordinate())
        self._enter(self.next_epoch)
        self.next_epoch += 1
        self.start, self.next_start = self.next_start, 0

    def __call__(self, worker: int) -> None:
        """Seed worker number `worker`: torch calls this in the worker when it starts."""
        from torch.utils.data import get_worker_info

        draw_from(worker_stream(self.stream, worker))
        if get_worker_info() is not None:
            seed_plan.put(self.plan)
            seed_readers_of_worker(worker, self.stream)
        if self.theirs is not None:
            self.theirs(worker)

    def _enter(self, epoch: int) -> None:
        rank = self.plan.rank or 0
        self.order = derive(self.name, self.root, epoch=epoch, kind="order")  # same on every rank
        self.stream = derive(self.name, self.root, rank, epoch=epoch, kind="loader")


class ExplicitLoading(Loading):
    """The seeding of a loader that was made with `dataloader_kwargs`: sample by sample."""

    request = SampleRequest

    def start_order(self, generator: torch.Generator) -> None:
        """Start the generator of the loader, from which torch draws the workers' own seeds."""
        generator.set_state(self.order.torch().get_state())


class SeededSampler:
    """A sampler that draws from its own place in the generators and asks for seeded samples."""

    def __init__(self, sampler: Any, loading: Loading, generator: torch.Generator | None) -> None:
        self.sampler, self.loading = sampler, loading
        self.generators = _generators_of(sampler) if generator is None else [generator]

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        if not self.loading.active:  # undone, while workers that live on still use this sampler
            return iter(self.sampler)
        loading = self.loading
        return self._requests(loading.stream, loading.order, loading.start)

    def _counts(self) -> Repeats:
        return repeats_of(self.sampler) if self.loading.request is SampleRequest else NoRepeats()

    def _requests(self, stream: Stream, order: Stream, start: int) -> Iterator[BatchRequest]:
        own = OrderPlace(self.generators, order)
        outside = enter()
        try:
            draw_from(order)
            with own:
                indices = iter(self.sampler)
                index = next(indices, _END)
            place = nullcontext() if _draws_at_first_only(self.sampler) else Position()
        finally:
            leave(outside)
        repeats = self._counts()
        for number in count():
            if index is _END:
                return
            again = repeats.of(index)
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


_END = object()


def _generators_of(sampler: Any) -> list[torch.Generator]:
    """Return the generators that torchdata's samplers make where the author gave none."""
    parts = (sampler, getattr(sampler, "sampler", None))
    own = [part for part in parts if type(part).__module__.partition(".")[0] == "torchdata"]
    found = (getattr(part, "generator", None) for part in own)
    return [generator for generator in found if generator is not None]


def _draws_at_first_only(sampler: Any) -> bool:
    """Whether `sampler` is one of torch's that use the global generators before their first index.

    It saves a change of all generators per batch; any other sampler may draw whenever it likes.
    """
    from torch.utils import data

    return type(single(sampler)) in (
        data.SequentialSampler,
        data.RandomSampler,
        data.SubsetRandomSampler,
        data.WeightedRandomSampler,
        data.DistributedSampler,
    )
