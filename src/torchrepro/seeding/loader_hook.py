"""Where seeding meets torch's DataLoader: every loader by itself, or one that asks for it.

An iteration starts with ``DataLoader.__iter__``, which is wrapped while anything asks for it.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any
from weakref import finalize

from torchrepro.callers import program_place
from torchrepro.console import say, say_once
from torchrepro.errors import SeedingError
from torchrepro.fork_safety import fork_safe_lock
from torchrepro.imports import AfterImport, named
from torchrepro.messages import Problem, shown
from torchrepro.seeding import streams
from torchrepro.seeding.loader import (
    ExplicitLoading,
    Loading,
    SeededSampler,
    author_seeds,
    bind_loader,
    first_epoch,
    has_own_worker_init,
    loaders,
    loading_of,
    samplers_within,
    set_automatic,
)
from torchrepro.seeding.loader_worker import (
    draw_from,
    is_loading,
    isolated_draws,
    seeded_readers,
    worker_stream,
)
from torchrepro.seeding.ranks import world
from torchrepro.seeding.streams import checked_name, whole
from torchrepro.seeding.worker_seeders import worker_seeder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

LOADERS = {
    "torch.utils.data": ("DataLoader", ("__iter__",)),
    "torchdata.stateful_dataloader": (
        "StatefulDataLoader",
        ("__iter__", "state_dict", "load_state_dict"),
    ),
}
"""Module -> class and the methods of it that are wrapped, none of which calls another's."""

EPOCH, NAME = "torchrepro_epoch", "torchrepro_name"
"""Keys of a StatefulDataLoader's state under which its epoch and its name are kept."""

GIVEN_SEED, BATCH_SIZE = "torchrepro_given_seed", "torchrepro_batch_size"
"""Keys under which these of a `Loading` are kept, of an epoch in progress."""

_forced: list[int] = []  # the number of workers of every loader, where a profile says so
_handed_on: dict[str, Any] = {}  # what a worker that is started afresh puts in force first
_wrapped: dict[tuple[type, str], tuple[Callable[..., Any], Callable[..., Any]]] = {}
_unsettled: list[bool] = []  # one entry for every time that the state has changed
_starting = fork_safe_lock()  # torch's maker of readers is one for all threads
_being_started: list[Any] = []


class SeedingPolicy:
    """Whether loaders whose author seeded nothing are seeded: `auto` or `none`."""

    __slots__ = ()

    def read(self) -> str:
        return "auto" if loaders.automatic else "none"

    def write(self, value: str) -> None:
        set_automatic(value == "auto")
        _settle()

    save = read
    restore = write


class WorkersPolicy:
    """How many workers every loader uses, whatever its author said."""

    __slots__ = ()

    def read(self) -> int | None:
        return _forced[-1] if _forced else None

    def write(self, value: int | None) -> None:
        _forced[:] = [] if value is None else [value]
        _settle()

    save = read
    restore = write


seeding_policy = SeedingPolicy()
workers_policy = WorkersPolicy()


def author_worker_init(init: Any) -> Any:
    """Return the author's part of what a loader calls as its `worker_init_fn`, or None."""
    if isinstance(init, _PreparedWorker):
        init = init.then
    return init.author_init if isinstance(init, Loading) else init


def hand_on(policy: str, value: Any) -> None:
    """Have workers that are started afresh put `value` of `policy` in force before all else.

    `policy` is a path as `named` takes it; a value of None stops that. Workers that are forked
    have what is in force in this process.
    """
    if value is None:
        _handed_on.pop(policy, None)
    else:
        _handed_on[policy] = value
    _settle()


def dataloader_kwargs(
    name: str, epoch: int | None = None, worker_init_fn: Callable[[int], Any] | None = None
) -> dict[str, Any]:
    """Return `generator` and `worker_init_fn` for the DataLoader called `name`.

    Its order then depends on (seed, name, epoch). The numbers that a sample draws from Python's
    `random`, numpy's legacy generator, torch and `sample_rng` depend on (seed, name, rank, epoch,
    index): not on workers, not on what else drew numbers. What the program had seeded torch with
    when the epoch began is part of the seed. Iterating the loader moves no global generator.
    The first iteration is `epoch` (0, or where a restored snapshot was), each further one the
    next; `set_epoch` names another. `worker_init_fn` runs in each worker as well. Where no profile
    with a seed is in force, the seed is the program's own at this moment, as `stream` says.

    Wraps `DataLoader.__iter__` for as long as a loader made this way is alive.
    """
    import torch

    checked_name(name)
    first = first_epoch(name) if epoch is None else epoch
    loading = ExplicitLoading(name, first, worker_init_fn)
    loaders.explicit.add(loading)
    finalize(loading, _settle)
    _settle()
    generator = torch.Generator()
    loading.start_order(generator)
    return {"generator": generator, "worker_init_fn": loading}


def set_epoch(loader: Any, epoch: int, start: int = 0) -> None:
    """Make the next iteration of `loader` the epoch `epoch`, leaving out its first `start` batches.

    The batches left out are not loaded. Calls `set_epoch` of the loader's samplers and dataset
    where they have one, as `DistributedSampler` does; works with workers that live on. Raises
    `SeedingError` if nothing in `loader` knows epochs, and for batches to be left out of an
    `IterableDataset` or of a loader that torchrepro does not seed. Without a profile a loader that
    knows no epochs is left as it is, and one that torchrepro does not seed begins at its first
    batch, which a note says once.
    """
    number, left_out = whole("epoch", epoch), whole("start", start)
    loading = loading_of(loader)
    if loading is None and not seeds_loaders():
        if left_out:
            say_once(f"set_epoch: nothing seeds this loader, so it begins anew: {advice(loader)}")
        for part in _parts_with_epochs(loader):
            part.set_epoch(number)
        return
    if left_out and (loading is None or yields_items(loader)):
        why = "an IterableDataset" if loading is not None else "a loader that is not seeded here"
        raise SeedingError(
            Problem(f"batches of {why} cannot be skipped", key="start", found=shown(start))
        )
    if not knows_epochs(loader):
        raise SeedingError(
            Problem("nothing in this loader knows epochs", found=shown(loader), todo=advice(loader))
        )
    if loading is not None:
        loading.next_epoch, loading.next_start = number, left_out
    for part in _parts_with_epochs(loader):
        part.set_epoch(number)


def advice(loader: Any) -> str:
    """Return what makes torchrepro seed `loader`."""
    if author_seeds(loader):
        return (
            "it has a generator or worker_init_fn of its own: give it "
            "torchrepro.dataloader_kwargs(name) instead"
        )
    return (
        "make it with torchrepro.dataloader_kwargs(name), or apply a profile with "
        "dataloader.seeding: auto"
    )


def seeds_loaders() -> bool:
    """Whether a profile is in force under which a loader could have been seeded."""
    return loaders.automatic or streams.current_plan().seed is not None


def knows_epochs(loader: Any) -> bool:
    """Whether `set_epoch` changes anything in `loader`."""
    return loading_of(loader) is not None or bool(_parts_with_epochs(loader))


def yields_items(loader: Any) -> bool:
    """Whether `loader` reads an `IterableDataset`, which names no samples."""
    from torch.utils.data import IterableDataset

    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def _parts_with_epochs(loader: Any) -> list[Any]:
    """Return the samplers and the dataset of `loader` that have a `set_epoch` of their own."""
    parts = (
        *samplers_within(getattr(loader, "sampler", None)),
        *samplers_within(getattr(loader, "batch_sampler", None)),
        getattr(loader, "dataset", None),
    )
    own = {id(part): part for part in parts if callable(getattr(part, "set_epoch", None))}
    return list(own.values())


def _settle() -> None:
    """Wrap the methods of every loader class that is loaded, or of none, as the state asks."""
    _unsettled.append(True)
    if len(_unsettled) > 1:
        return  # the garbage collector calls in the middle of it: the call under way sees to that
    while _unsettled:
        changes = len(_unsettled)
        try:
            # Iterating, because the length of a WeakSet counts what is just going away.
            explicit = any(True for _ in loaders.explicit)
            if loaders.automatic or explicit or _forced or _handed_on:
                _finder.watch()
                for module in filter(sys.modules.__contains__, LOADERS):
                    _wrap(module)
            else:
                _unwrap_all()
        finally:
            del _unsettled[:changes]


def _wrap(module: str) -> None:
    name, methods = LOADERS[module]
    kind = getattr(sys.modules[module], name)
    for method in methods:
        if (kind, method) not in _wrapped:
            original = getattr(kind, method)
            wrapper = _WRAPPERS[method](original)
            _wrapped[kind, method] = wrapper, original
            setattr(kind, method, wrapper)


def _unwrap_all() -> None:
    _finder.unwatch()
    while _wrapped:
        (kind, method), (wrapper, original) = _wrapped.popitem()
        if getattr(kind, method) is wrapper:  # else somebody has wrapped it since: it stays inside
            setattr(kind, method, original)


_finder = AfterImport(LOADERS, _wrap)


def _wrapped_iter(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def __iter__(loader: Any) -> Any:  # noqa: N807 - it stands for that method
        if any(other is loader for other in _being_started):
            return original(loader)  # a wrapper of an earlier profile, inside somebody's own
        loading = loading_of(loader)
        # torchdata has started one where a state was asked for before the first batch.
        started = getattr(loader, "_initial_iter_for_state_dict", False)
        iterator = original(loader) if started else _start(original, loader, loading)
        if loaders.automatic and loader.num_workers:
            _note_seeding_of_workers(loader, loading)
        if loading is None:
            return iterator
        return loading.deliver(iterator, dropped=loading.start if yields_items(loader) else 0)

    return __iter__


def _note_seeding_of_workers(loader: Any, loading: Loading | None) -> None:
    """Note what a `worker_init_fn` means for what `loader` loads, once for each line."""
    if is_loading():
        return
    seeder = worker_seeder(loader.worker_init_fn)
    where = program_place(sys._getframe())  # noqa: SLF001 - documented; `inspect` takes 100 times as long
    if loading is not None and seeder is not None:
        names_none = yields_items(loader)
        loaders.register.notes[f"{seeder} at {where}"] = (
            f"numbers in data loading {'depend on' if names_none else 'are the same for any'} "
            f"num_workers: loader at {where} is seeded by torchrepro instead of by {seeder}"
            f"{', but reads an IterableDataset' if names_none else ''}"
        )
    elif loading is None and has_own_worker_init(loader):
        loaders.register.notes[f"worker_init_fn at {where}"] = (
            f"numbers in data loading depend on num_workers: loader at {where} has a "
            "worker_init_fn of its own"
        )


def _wrapped_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def state_dict(loader: Any) -> Any:
        started = loader._iterator is not None  # noqa: SLF001 - it starts an iteration otherwise
        loading = loading_of(loader)
        state = original(loader) if started else _start(original, loader, loading)
        if loading is None:
            return state
        finished = loader._iterator._finished  # noqa: SLF001 - torchdata keeps it nowhere else
        state = {**state, NAME: loading.name}
        if finished:
            return {**state, EPOCH: loading.next_epoch}
        within = {GIVEN_SEED: loading.given_seed, BATCH_SIZE: loading.batch_size}
        return {**state, EPOCH: loading.next_epoch - 1, **within}

    return state_dict


def _wrapped_load_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load_state_dict(loader: Any, state_dict: Mapping[str, Any]) -> Any:
        ours = (EPOCH, NAME, GIVEN_SEED, BATCH_SIZE)
        own = {key: value for key, value in state_dict.items() if key not in ours}
        if NAME in state_dict:  # what 0.2.0 saved has none
            bind_loader(loader, state_dict[NAME])
        loading = loading_of(loader)
        if loading is not None and EPOCH in state_dict:
            loading.next_epoch = state_dict[EPOCH]
            if GIVEN_SEED in state_dict:
                loading.go_on_with(state_dict[GIVEN_SEED], state_dict.get(BATCH_SIZE))
        return original(loader, own)

    return load_state_dict


_WRAPPERS: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "__iter__": _wrapped_iter,
    "state_dict": _wrapped_state_dict,
    "load_state_dict": _wrapped_load_state_dict,
}


def _start(original: Callable[[Any], Any], loader: Any, loading: Loading | None) -> Any:
    """Call `original`, which starts an iteration of `loader`, as the profile and `loading` say."""
    prepared = bool(_handed_on) and _starts_workers_afresh(loader)
    if loading is None and not _forced and not prepared:
        return original(loader)
    with _starting, ExitStack() as until_begun:
        _being_started.append(loader)
        until_begun.callback(_being_started.pop)
        if _forced:
            until_begun.enter_context(_with(loader, num_workers=_forced[-1], timeout=0))
        if loading is not None:
            until_begun.enter_context(_begun(loader, loading))
        if prepared:
            first = _PreparedWorker(dict(_handed_on), loader.worker_init_fn)
            until_begun.enter_context(_with(loader, worker_init_fn=first))
        return original(loader)


def _starts_workers_afresh(loader: Any) -> bool:
    context = loader.multiprocessing_context or import_module("multiprocessing")
    method = context.get_start_method()
    return bool(loader.num_workers) and method != "fork"


@dataclass(frozen=True, slots=True)
class _PreparedWorker:
    """The ``worker_init_fn`` of a worker that puts policies in force before its author's."""

    policies: Mapping[str, Any]
    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        for policy, value in self.policies.items():
            named(policy).write(value)
        if self.then is not None:
            self.then(worker)


@contextmanager
def _begun(loader: Any, loading: Loading) -> Iterator[None]:
    """Begin an epoch of `loader`: what it builds within the block is seeded."""
    late = loaders.late.get(loader)
    loading.begin(0 if late is None else late.start)
    _note_batch_size(loader, loading)
    _tell_samplers(loader, loading)
    sampler = "sampler" if loader.batch_sampler is None else "batch_sampler"
    with isolated_draws():
        # In the main process an IterableDataset is read as by the only worker of a loader.
        draw_from(worker_stream(loading.stream, 0))
        generator = loader.generator
        if isinstance(loading, ExplicitLoading):
            generator = _generator_in(loader, getattr(loader, sampler))
            loading.start_order(generator)
        seeded = SeededSampler(getattr(loader, sampler), loading, generator, late)
        with (
            _with(loader, worker_init_fn=loading, **{sampler: seeded}),
            # A worker that is forked here must find torch's own readers.
            nullcontext() if loader.num_workers else seeded_readers(loading.stream),
        ):
            yield


def _note_batch_size(loader: Any, loading: Loading) -> None:
    """Note how large the batches of an epoch are, and say where they were others before it went on.

    A run that was interrupted counts its batches: others hold other samples.
    """
    then, loading.interrupted_batch_size = loading.interrupted_batch_size, None
    sizes = (getattr(part, "batch_size", None) for part in samplers_within(loader.batch_sampler))
    # A sampler of the program's own may have anything under that name.
    now = loading.batch_size = next((size for size in sizes if type(size) is int), None)
    if then is not None and now is not None and then != now and world().rank == 0:
        say(
            f"loader {loading.name}: epoch {loading.epoch} was interrupted with batch_size={then} "
            f"and goes on with batch_size={now}, so its batches hold other samples than those of "
            f"the uninterrupted run; resume with batch_size={then} to go on exactly"
        )


def _tell_samplers(loader: Any, loading: Loading) -> None:
    """Note which epoch the samplers of `loader` count, after telling them where it is resumed."""
    counting = [
        part for part in _parts_with_epochs(loader) if isinstance(getattr(part, "epoch", None), int)
    ]
    if loading.told_epochs is not None:
        for part, epoch in zip(counting, loading.told_epochs(loading), strict=False):
            part.set_epoch(epoch)
    loading.sampler_epochs = tuple(part.epoch for part in counting)


def _generator_in(loader: Any, sampler: Any) -> Any:
    """Return the generator that `loader` was made with.

    A loader that was made of it may keep it in a sampler alone: accelerate's dispatcher does.
    """
    parts = (loader, *samplers_within(sampler))
    return next(part.generator for part in parts if getattr(part, "generator", None) is not None)


@contextmanager
def _with(loader: Any, **attributes: Any) -> Iterator[None]:
    """Give `loader` other attributes for the length of the block.

    Through its dict, because a DataLoader forbids to assign some of them.
    """
    before = {name: vars(loader)[name] for name in attributes}
    vars(loader).update(attributes)
    try:
        yield
    finally:
        vars(loader).update(before)
