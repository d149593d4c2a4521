"""The random numbers of a DataLoader: its order, its workers, its samples."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from torchrepro.seeding import seed_plan
from torchrepro.seeding.fetching import (
    BatchRequest,
    Position,
    SampleRequest,
    draw_from,
    enter,
    leave,
    worker_stream,
)
from torchrepro.seeding.reader_hook import seed_readers_of_worker
from torchrepro.seeding.streams import Stream, derive
from torchrepro.seeding.whole import whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Loading:
    """Where the random numbers of one DataLoader come from; also its `worker_init_fn`.

    Every iteration is the next epoch, unless `set_epoch` names one. The order of an epoch depends
    on (seed, name, epoch), a batch's numbers on (seed, name, rank, epoch, the batch's indices).
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
        self.plan = replace(plan, rank=plan.coordinate())
        self.next_epoch = whole("epoch", epoch)
        self.next_start = 0
        self.start = 0
        self.active = True
        self.stream = self._stream(self.next_epoch)

    def __repr__(self) -> str:
        return f"<torchrepro loading {self.name} seed={self.root} next epoch={self.next_epoch}>"

    def begin(self) -> None:
        """Start the next epoch."""
        self.stream = self._stream(self.next_epoch)
        self.next_epoch += 1
        self.start, self.next_start = self.next_start, 0

    @property
    def order(self) -> Stream:
        """What the samplers of the present epoch draw from: the same on every rank."""
        return self._order

    def start_order(self, order: Stream) -> None:
        """Start a generator of the loader's own from `order`; by default it has none."""

    def __call__(self, worker: int) -> None:
        """Seed worker number `worker`: torch calls this in the worker when it starts."""
        from torch.utils.data import get_worker_info

        draw_from(worker_stream(self.stream, worker))
        if get_worker_info() is not None:
            seed_plan.put(self.plan)
            seed_readers_of_worker(worker, self.stream)
        if self.theirs is not None:
            self.theirs(worker)

    def _stream(self, epoch: int) -> Stream:
        self._order = derive(self.name, self.root, epoch=epoch, kind="order")
        return derive(self.name, self.root, self.plan.rank or 0, epoch=epoch, kind="loader")


class ExplicitLoading(Loading):
    """The seeding of a loader that was made with `dataloader_kwargs`: sample by sample."""

    request = SampleRequest

    def __init__(self, name: str, epoch: int, theirs: Callable[[int], Any] | None) -> None:
        import torch

        super().__init__(name, epoch, theirs)
        self.generator = torch.Generator()
        self.start_order(self.order)

    def start_order(self, order: Stream) -> None:
        """Start the generator that the samplers of the loader were given."""
        self.generator.set_state(order.torch().get_state())

    def __getstate__(self) -> dict[str, Any]:
        # A worker started by spawn gets a copy; the order is none of its business.
        return {name: value for name, value in vars(self).items() if name != "generator"}


class SeededSampler:
    """A sampler that draws from its own place in the generators and asks for seeded samples."""

    def __init__(self, sampler: Any, loading: Loading) -> None:
        self.sampler, self.loading = sampler, loading

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        if not self.loading.active:  # undone, while workers that live on still use this sampler
            return iter(self.sampler)
        loading = self.loading
        return self._requests(loading.stream, loading.order, loading.start)

    def _requests(self, stream: Stream, order: Stream, start: int) -> Iterator[BatchRequest]:
        outside = enter()
        try:
            draw_from(order)
            self.loading.start_order(order)
            indices = iter(self.sampler)
            index = next(indices, _END)
            place = nullcontext() if _draws_at_first_only(self.sampler) else Position()
        finally:
            leave(outside)
        for number in count():
            if index is _END:
                return
            if number >= start:
                yield self.loading.request(stream, index)
            with place:
                index = next(indices, _END)


_END = object()


def _draws_at_first_only(sampler: Any) -> bool:
    """Whether `sampler` is one of torch's that use the global generators before their first index.

    It saves a change of all generators per batch; any other sampler may draw whenever it likes.
    """
    from torch.utils import data

    if type(sampler) is data.BatchSampler:
        sampler = sampler.sampler
    return type(sampler) in (
        data.SequentialSampler,
        data.RandomSampler,
        data.SubsetRandomSampler,
        data.WeightedRandomSampler,
        data.DistributedSampler,
    )
