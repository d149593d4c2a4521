"""Where seeding meets torch's DataLoader: every loader by itself, or one that asks for it.

An iteration starts with ``DataLoader.__iter__``, which is wrapped while anything asks for it.
"""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, finalize

from torchrepro.callers import program_place
from torchrepro.console import say_once
from torchrepro.errors import SeedingError
from torchrepro.fork_safety import fork_safe_lock
from torchrepro.imports import AfterImport, named
from torchrepro.messages import Problem, shown
from torchrepro.seeding import own_resumes, streams
from torchrepro.seeding.loader import (
    FollowingLoading,
    Loading,
    NamedLoading,
    author_seeds_workers,
    first_epoch,
    is_kept,
    loaders,
    loading_of_iteration,
    name_loader,
    named_loading_of,
    samplers_within,
    set_automatic,
    standing_for,
)
from torchrepro.seeding.loader_places import (
    Delivery,
    batch_size,
    delivery_of,
    forget_places,
    given_from,
    parts_with_epochs,
    reads_items,
    say_other_batch_size,
)
from torchrepro.seeding.loader_worker import (
    draw_from,
    is_loading,
    isolated_draws,
    isolated_reader,
    reader_in_main_thread,
    reader_in_program,
    reader_of_epoch,
    readers_made_by,
    stream_of,
    worker_stream,
)
from torchrepro.seeding.streams import Stream, checked_name, whole
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

KEY = "torchrepro_data"
"""Key of a StatefulDataLoader's state under which is kept what its samples draw from."""

_forced: list[int] = []  # the number of workers of every loader, where a profile says so
_handed_on: dict[str, Any] = {}  # what a worker that is started afresh puts in force first
_wrapped: dict[tuple[type, str], tuple[Callable[..., Any], Callable[..., Any]]] = {}
_unsettled: list[bool] = []  # one entry for every time that the state has changed
_starting = fork_safe_lock()  # torch's maker of readers is one for all threads
_being_started: list[Any] = []
_saved_streams: WeakKeyDictionary[Any, Mapping[str, Any]] = WeakKeyDictionary()
"""Loaders of torchdata that go on within an epoch, each with what its samples draw from."""


class SeedingPolicy:
    """Whether loaders whose author seeded nothing are seeded: `auto` or `none`."""

    __slots__ = ()

    def read(self) -> str:
        return "auto" if loaders.automatic else "none"

    def write(self, value: str) -> None:
        set_automatic(value == "auto")
        own_resumes.watch(begins=value == "auto")
        if value != "auto":
            forget_places()
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
    loading = NamedLoading(name, first, worker_init_fn)
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
    loading = named_loading_of(loader)
    if loading is None and loaders.automatic and _can_be_named(loader):
        loading = name_loader(loader)
    if loading is None and not seeds_loaders():
        if left_out:
            say_once(f"set_epoch: nothing seeds this loader, so it begins anew: {advice(loader)}")
        tell_epoch(loader, number)
        return
    if left_out and (loading is None or reads_items(loader)):
        why = "an IterableDataset" if loading is not None else "a loader that is not seeded here"
        raise SeedingError(
            Problem(f"batches of {why} cannot be skipped", key="start", found=shown(start))
        )
    if loading is None and not parts_with_epochs(loader):
        raise SeedingError(
            Problem("nothing in this loader knows epochs", found=shown(loader), todo=advice(loader))
        )
    if loading is not None:
        loading.go_to(number, left_out)
    tell_epoch(loader, number)


def tell_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of the samplers and of the dataset of `loader`, where they have one."""
    for part in parts_with_epochs(loader):
        part.set_epoch(epoch)


def _can_be_named(loader: Any) -> bool:
    """Whether epochs of `loader` can be named: its author has decided neither order nor workers."""
    return (
        is_kept(loader)
        and loader.generator is None
        and not author_seeds_workers(loader)
        and getattr(loader, "_iterator", None) is None
    )


def advice(loader: Any) -> str:
    """Return what makes torchrepro seed `loader`."""
    if getattr(loader, "generator", None) is not None or author_seeds_workers(loader):
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
        if delivery_of(loader) is None and _is_followed(loader):
            return Delivery(loader, partial(_iterate, original, loader))
        return _iterate(original, loader)

    return __iter__


def _iterate(original: Callable[[Any], Any], loader: Any) -> Any:
    delivery = delivery_of(loader)
    if not _is_begun(loader):
        return _start(original, loader, delivery)
    if delivery is not None:
        delivery.loading = loaders.register.loadings.get(loader)
    return original(loader)


def _is_begun(loader: Any) -> bool:
    """Whether torchdata has begun the iteration, as a state was asked for before the first batch.

    It does not go on with one that was loaded at its end.
    """
    is_begun = getattr(loader, "_initial_iter_for_state_dict", False)
    return is_begun and not loader._iterator._finished  # noqa: SLF001 - it is kept nowhere else


def _is_followed(loader: Any) -> bool:
    """Whether somebody may ask how far the program has come with `loader`."""
    if not is_kept(loader) or is_loading():
        return False
    in_main = threading.current_thread() is threading.main_thread()
    return (loaders.automatic and in_main) or named_loading_of(loader) is not None


def _note_seeding_of_workers(loader: Any, loading: Loading | None) -> None:
    """Note what a `worker_init_fn` means for what `loader` loads, once for each line."""
    if is_loading():
        return
    seeder = worker_seeder(loader.worker_init_fn)
    where = program_place(sys._getframe())  # noqa: SLF001 - documented; `inspect` takes 100 times as long
    if loading is not None and seeder is not None:
        names_none = reads_items(loader)
        loaders.register.notes[f"{seeder} at {where}"] = (
            f"numbers in data loading {'depend on' if names_none else 'are the same for any'} "
            f"num_workers: loader at {where} is seeded by torchrepro instead of by {seeder}"
            f"{', but reads an IterableDataset' if names_none else ''}"
        )
    elif loading is None and author_seeds_workers(loader):
        loaders.register.notes[f"worker_init_fn at {where}"] = (
            f"numbers in data loading depend on num_workers: loader at {where} has a "
            "worker_init_fn of its own"
        )


def _wrapped_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def state_dict(loader: Any) -> Any:
        started = loader._iterator is not None  # noqa: SLF001 - it starts an iteration otherwise
        state = original(loader) if started else _start(original, loader, None)
        loading = loaders.register.loadings.get(loader) or named_loading_of(loader)
        if loading is None:
            return state
        finished = loader._iterator._finished  # noqa: SLF001 - torchdata keeps it nowhere else
        return {**state, KEY: _state_of(loading, loader, finished=finished)}

    return state_dict


def _state_of(loading: Loading, loader: Any, *, finished: bool) -> dict[str, Any]:
    if isinstance(loading, NamedLoading):
        epoch = loading.next_epoch - (not finished)
        given_seed = None if finished else loading.given_seed
        return {"epoch": epoch, "given_seed": given_seed, "within": not finished}
    if finished or loading.stream is None or loading.given is None:
        return {}
    given = [seed.hex() for seed in loading.given]
    return {"stream": loading.stream.key.hex(), "given": given, "batch_size": batch_size(loader)}


def _wrapped_load_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load_state_dict(loader: Any, state_dict: Mapping[str, Any]) -> Any:
        own = {key: value for key, value in state_dict.items() if key != KEY}
        saved = state_dict.get(KEY) or {}
        loaded = original(loader, own)
        if own.get("_iterator_finished"):
            # torchdata first makes the finished iterator again, and draws a base seed for it.
            with isolated_draws():
                loader.state_dict()
        named = named_loading_of(loader)
        if named is not None and "epoch" in saved:
            named.go_to(saved["epoch"], 0)
            if saved["within"]:
                named.go_on_with(saved["given_seed"])
        if "stream" in saved:
            _saved_streams[loader] = saved
        return loaded

    return load_state_dict


_WRAPPERS: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "__iter__": _wrapped_iter,
    "state_dict": _wrapped_state_dict,
    "load_state_dict": _wrapped_load_state_dict,
}


def _start(original: Callable[[Any], Any], loader: Any, delivery: Delivery | None) -> Any:
    """Call `original`, which starts an iteration of `loader`, as the profile says."""
    prepared = bool(_handed_on) and _starts_workers_afresh(loader)
    with _starting, ExitStack() as until_begun:
        _being_started.append(loader)
        until_begun.callback(_being_started.pop)
        if _forced:
            until_begun.enter_context(_with(loader, num_workers=_forced[-1], timeout=0))
        loading = loading_of_iteration(loader)
        if loaders.automatic and loader.num_workers:
            _note_seeding_of_workers(loader, loading)
        if loading is not None:
            until_begun.enter_context(_begun(loader, loading, delivery))
        if prepared:
            first = _PreparedWorker(dict(_handed_on), loader.worker_init_fn)
            until_begun.enter_context(_with(loader, worker_init_fn=first))
        begun = original(loader)
    if isinstance(loading, FollowingLoading) and loading.stream is None:
        loading.stream = stream_of(_base_seed_of(begun, loader))
    return begun


def _base_seed_of(begun: Any, loader: Any) -> int:
    """Return the number that torch has drawn for the iteration of `loader` that has just begun.

    Private (``_base_seed``), because torch shows it to workers alone. Where it is gone, seeding a
    loader raises.
    """
    iterator = begun if hasattr(begun, "_base_seed") else getattr(loader, "_iterator", None)
    seed = getattr(iterator, "_base_seed", None)
    if seed is None:
        raise SeedingError(
            Problem("this torch draws the base seed of a loader in a way torchrepro does not know")
        )
    return int(seed)


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
def _begun(loader: Any, loading: Loading, delivery: Delivery | None) -> Iterator[None]:
    """Begin an epoch of `loader`: what it builds within the block is seeded."""
    skip = 0 if delivery is None or reads_items(loader) else delivery.skip
    if isinstance(loading, NamedLoading):
        loading.begin()
    loading.start = loading.start or skip
    if delivery is not None:
        delivery.seeded_by(loading)
        loading.given = delivery.saved_given or loading.given
    by_name = isinstance(loading, NamedLoading)
    noting = None if delivery is None else partial(setattr, delivery, "samples_draw")
    with _begun_by_name(loader, loading) if by_name else _begun_by_torch(loader, loading, noting):
        yield


@contextmanager
def _begun_by_torch(
    loader: Any, loading: Any, noting: Callable[[bool], None] | None
) -> Iterator[None]:
    """Have torch draw the order and the base seed as ever, and samples draw from these."""
    saved = _saved_streams.pop(loader, None)
    if saved is not None:
        loading.stream = Stream("data", bytes.fromhex(saved["stream"]))
        loading.given = given_from(saved["given"])
        say_other_batch_size(loader, saved["batch_size"])
    standing = standing_for(loader, loading, loader.generator)

    def make_reader(by_index: bool, make: Callable[[], Any]) -> Any:  # noqa: FBT001 - torch's kind
        if by_index:
            return reader_in_main_thread(make(), noting)
        return reader_in_program(lambda: loading.stream, make)

    with (
        _with(loader, worker_init_fn=loading, **standing),
        # A worker that is forked here must find torch's own readers.
        nullcontext() if loader.num_workers else readers_made_by(make_reader),
    ):
        yield


@contextmanager
def _begun_by_name(loader: Any, loading: Any) -> Iterator[None]:
    """Have order and samples draw from the streams of the epoch, and nothing else move."""
    epoch: Any = loading.stream

    def make_reader(by_index: bool, make: Callable[[], Any]) -> Any:  # noqa: FBT001 - torch's kind
        return isolated_reader(make()) if by_index else reader_of_epoch(epoch, make)

    with isolated_draws():
        # In the main process an IterableDataset is read as by the only worker of a loader.
        draw_from(worker_stream(epoch, 0))
        within = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        generator = _generator_in(loader, within)
        if generator is not None:
            loading.start_order(generator)
        with (
            _with(loader, worker_init_fn=loading, **standing_for(loader, loading, generator)),
            nullcontext() if loader.num_workers else readers_made_by(make_reader),
        ):
            yield


def _generator_in(loader: Any, sampler: Any) -> Any:
    """Return the generator that `loader` was made with.

    A loader that was made of it may keep it in a sampler alone: accelerate's dispatcher does.
    """
    parts = (getattr(part, "generator", None) for part in (loader, *samplers_within(sampler)))
    return next((own for own in parts if own is not None), None)


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
