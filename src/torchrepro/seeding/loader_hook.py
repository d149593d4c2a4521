"""Where seeding enters torch's DataLoader: every loader by itself, or one that asks for it.

An iteration starts with ``DataLoader.__iter__``, which returns torch's own iterator. Both classes
are wrapped while anything asks for it. What is known of an iterator is kept beside it, not in it,
and goes when it goes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, finalize

from torchrepro.ground.callers import program_place
from torchrepro.ground.console import say_once
from torchrepro.ground.errors import SeedingError
from torchrepro.ground.fork_safety import fork_safe_lock
from torchrepro.ground.imports import AfterImport, named
from torchrepro.ground.messages import shown
from torchrepro.ground.patching import MissingHookError, surround
from torchrepro.seeding import loader_positions, streams
from torchrepro.seeding.generators import Given, given_seeds
from torchrepro.seeding.loader import (
    Loading,
    NamedLoading,
    SeededSampler,
    epoch_stream,
    in_loader,
    isolated_draws,
    loaders,
    reader_maker,
    seed_readers,
    start_from,
    worker_stream,
)
from torchrepro.seeding.loader_positions import (
    Delivery,
    is_kept,
    kind_of_dataset,
    named_loading_of,
    samplers_within,
    set_epoch_of_parts,
)
from torchrepro.seeding.seeding_calls import said_by_spawned
from torchrepro.seeding.state import forget
from torchrepro.seeding.streams import Stream, checked_name, nonnegative_int

KEY = "torchrepro_data"
"""Key of a StatefulDataLoader's state under which is kept what its samples draw from."""

_forced: list[int] = []  # the number of workers of every loader, where a profile says so
_passed_on: dict[str, Any] = {}  # what a worker that is started afresh puts in force first
_SAID = "seeding.seeding_calls:said"  # what notes of workers are said once by
_wrapped: dict[str, ExitStack] = {}  # module -> the undo
_unsettled: list[bool] = []  # one entry for every time that the state has changed
_starting = fork_safe_lock()  # torch's maker of readers is one for all threads
_being_started: list[_Start] = []
_saved_streams: WeakKeyDictionary[Any, Mapping[str, Any]] = WeakKeyDictionary()
"""Loaders of torchdata that go on within an epoch, each with what its samples draw from."""


@dataclass(slots=True, eq=False)
class _Start:
    loader: Any
    iterator: Any = None  # torch's, also where the class of the loader returns another around it


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


class SeedingPolicy:
    """Whether loaders whose author seeded nothing are seeded: `auto` or `none`."""

    def read(self) -> str:
        return "auto" if loaders.automatic else "none"

    def write(self, value: str) -> None:
        loaders.automatic = value == "auto"
        loader_positions.watch_own_resumes(begins=value == "auto")
        if value != "auto":
            loader_positions.forget_places()
            forget()
        _settle()

    save = read
    restore = write


class WorkersPolicy:
    """How many workers every loader uses, whatever its author said."""

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
        init = init.after
    return init.author_init if isinstance(init, Loading) else init


def pass_to_workers(policy: str, value: Any) -> None:
    """Have workers that are started afresh put `value` of `policy` in force before all else.

    `policy` is a path as `named` takes it; a value of None stops that. Workers that are forked
    have what is in force in this process.
    """
    if value is None:
        _passed_on.pop(policy, None)
    else:
        _passed_on[policy] = value
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
    checked_name(name)
    first = loaders.register.named.pop(name, 0) if epoch is None else epoch
    loading = NamedLoading(name, first, worker_init_fn)
    loaders.explicit.add(loading)
    finalize(loading, _settle)
    _settle()
    return {"generator": loading.order.torch(), "worker_init_fn": loading}


def set_epoch(loader: Any, epoch: int, start: int = 0) -> None:
    """Make the next iteration of `loader` the epoch `epoch`, leaving out its first `start` batches.

    The batches left out are not loaded. Calls `set_epoch` of the loader's samplers and dataset
    where they have one, as `DistributedSampler` does; works with workers that live on. Raises
    `SeedingError` if nothing in `loader` knows epochs, and for batches to be left out of an
    `IterableDataset` or of a loader that torchrepro does not seed. Without a profile a loader that
    knows no epochs is left as it is, and one that torchrepro does not seed begins at its first
    batch, which a note says once.
    """
    number, left_out = nonnegative_int("epoch", epoch), nonnegative_int("start", start)
    loading = named_loading_of(loader)
    has_own = getattr(loader, "generator", None) is not None or author_seeds_workers(loader)
    advice = (
        "it has a generator or worker_init_fn of its own: give it "
        "torchrepro.dataloader_kwargs(name) instead"
        if has_own
        else "make it with torchrepro.dataloader_kwargs(name), or apply a profile with "
        "dataloader.seeding: auto"
    )
    named_now = loading is None and loaders.automatic and is_kept(loader) and not has_own
    if named_now and _borrowed(loader, "_iterator") is None:
        # One that nobody named is called after its dataset.
        loading = NamedLoading(kind_of_dataset(loader.dataset))
        loaders.register.loadings[loader] = loading
    if loading is None and not loaders.automatic and streams.current_plan().seed is None:
        if left_out:
            say_once(f"set_epoch: nothing seeds this loader, so it begins anew: {advice}")
        set_epoch_of_parts(loader, number)
        return
    if left_out and (loading is None or loader_positions.reads_items(loader)):
        why = "an IterableDataset" if loading is not None else "a loader that is not seeded here"
        raise SeedingError.about(
            f"batches of {why} cannot be skipped", key="start", found=shown(start)
        )
    if loading is not None:
        loading.go_to(number, left_out)
    elif not loader_positions.parts_with_epochs(loader):
        raise SeedingError.about(
            "nothing in this loader knows epochs", found=shown(loader), todo=advice
        )
    set_epoch_of_parts(loader, number)


def _settle() -> None:
    _unsettled.append(True)
    if len(_unsettled) > 1:
        return  # the garbage collector calls in the middle of it: the call under way sees to that
    while _unsettled:
        changes = len(_unsettled)
        try:
            # Iterating, because the length of a WeakSet counts what is just going away.
            explicit = any(True for _ in loaders.explicit)
            if loaders.automatic or explicit or _forced or _passed_on:
                _finder.watch_all()
            else:
                _finder.unwatch()
                while _wrapped:
                    _wrapped.popitem()[1].close()
        finally:
            del _unsettled[:changes]


def _wrap(module: str) -> None:
    if module not in _wrapped:
        undo = _wrapped[module] = ExitStack()
        name, methods = LOADERS[module]
        for method, wrapper in methods.items():
            try:
                surround(undo, getattr(sys.modules[module], name), method, wrapper)
            except (AttributeError, MissingHookError) as missing:
                raise SeedingError.about(
                    "this torch iterates loaders in a way that torchrepro does not know",
                    found=f"no {module}.{name}.{method}",
                ) from missing


def _borrowed(owner: Any, name: str) -> Any:
    """Return what a loader or its iterator keeps in a private attribute, and nowhere else.

    Raises `SeedingError` where torch, or torchdata, has it no longer.
    """
    if not hasattr(owner, name):
        raise SeedingError.about(
            "this torch iterates loaders in a way that torchrepro does not know",
            found=f"no {type(owner).__name__}.{name}",
        )
    return getattr(owner, name)


def _wrapped_iter(original: Any, loader: Any) -> Any:
    if any(start.loader is loader for start in _being_started):
        return original(loader)  # a wrapper of an earlier profile, inside somebody's own
    # Somebody may ask how far the program has come with the loader.
    in_main = threading.current_thread() is threading.main_thread()
    is_followed = (loaders.automatic and in_main) or named_loading_of(loader) is not None
    if (
        not is_followed
        or not is_kept(loader)
        or in_loader()
        or loader_positions.delivery_of(loader) is not None
    ):
        return _iterate(original, loader)
    delivery = Delivery(loader)
    unbegun = _unbegun_iterator(loader) if loader_positions.begins_late() else None
    if unbegun is not None:
        loader_positions.wait(unbegun, delivery, partial(_begin, original, loader))
        return unbegun
    return delivery.begin(partial(_iterate, original, loader))


def _unbegun_iterator(loader: Any) -> Any:
    """Return the iterator that torch would for `loader`, of which the epoch has not begun.

    None where the class of `loader` makes its iterators itself.
    """
    from torch.utils.data import DataLoader, dataloader

    if type(loader)._get_iterator is not DataLoader._get_iterator:  # noqa: SLF001 - see LOADERS
        return None
    workers = _forced[-1] if _forced else loader.num_workers
    lives_on = bool(loader.persistent_workers and workers)
    if lives_on and _borrowed(loader, "_iterator") is not None:
        return _borrowed(loader, "_iterator")
    name = "_MultiProcessingDataLoaderIter" if workers else "_SingleProcessDataLoaderIter"
    kind: Any = getattr(dataloader, name)
    unbegun = kind.__new__(kind)
    unbegun._shutdown = True  # noqa: SLF001 - it has no workers to end until it begins
    if lives_on:
        loader._iterator = unbegun  # noqa: SLF001 - see `_borrowed`
    return unbegun


def _begin(original: Callable[[Any], Any], loader: Any, iterator: Any) -> Any:
    def begin(loader: Any) -> Any:
        if "_dataset" in vars(iterator):
            return original(loader)  # another epoch with the same workers
        iterator.__init__(loader)
        return iterator

    return _iterate(begin, loader)


def _wrapped_init(original: Any, iterator: Any, loader: Any) -> None:
    for start in _being_started:
        if start.loader is loader:
            start.iterator = iterator
    original(iterator, loader)


def _wrapped_next(original: Any, iterator: Any) -> Any:
    delivery = loader_positions.followed(iterator)
    if delivery is None:
        return original(iterator)
    return delivery.advance(partial(original, iterator))


def _iterate(original: Callable[[Any], Any], loader: Any) -> Any:
    delivery = loader_positions.delivery_of(loader)
    # torchdata has begun the iteration where a state was asked for before the first batch. It does
    # not go on with one that was loaded at its end.
    is_begun = getattr(loader, "_initial_iter_for_state_dict", False)
    if not is_begun or _borrowed(_borrowed(loader, "_iterator"), "_finished"):
        return _start(original, loader, delivery)
    if delivery is not None:
        delivery.loading = loaders.register.loadings.get(loader)
        delivery.of_iterator(_borrowed(loader, "_iterator"))
    return original(loader)


def _wrapped_state_dict(original: Any, loader: Any) -> Any:
    started = _borrowed(loader, "_iterator") is not None  # it starts an iteration otherwise
    state = original(loader) if started else _start(original, loader, None)
    loading = loaders.register.loadings.get(loader) or named_loading_of(loader)
    if loading is None:
        return state
    finished = _borrowed(_borrowed(loader, "_iterator"), "_finished")
    own: dict[str, Any] = {}
    if isinstance(loading, NamedLoading):
        own = {
            "epoch": loading.next_epoch - (not finished),
            "program_seed": None if finished else loading.program_seed,
            "within": not finished,
        }
    elif not finished and loading.stream is not None and loading.given is not None:
        own = {
            "stream": loading.stream.key.hex(),
            "given": [seed.hex() for seed in loading.given],
            "reading": loader_positions.reading_of(loader),
        }
    return {**state, KEY: own}


def _wrapped_load_state_dict(original: Any, loader: Any, state_dict: Mapping[str, Any]) -> Any:
    own = {key: value for key, value in state_dict.items() if key != KEY}
    saved = state_dict.get(KEY) or {}
    loaded = original(loader, own)
    if own.get("_iterator_finished"):
        # torchdata first makes the finished iterator again, and draws a base seed for it.
        with isolated_draws():
            loader.state_dict()
    named = named_loading_of(loader)
    if named is not None and "epoch" in saved:
        if saved["within"]:
            named.resume(saved["epoch"], saved["program_seed"])
        else:
            named.go_to(saved["epoch"])
    if "stream" in saved:
        _saved_streams[loader] = saved
    return loaded


LOADERS: Mapping[str, tuple[str, Mapping[str, Callable[..., Any]]]] = {
    "torch.utils.data": ("DataLoader", {"__iter__": _wrapped_iter}),
    # Private, because torch has no public place where a program gets a batch. Where it is gone, a
    # profile that seeds loaders is refused.
    "torch.utils.data.dataloader": (
        "_BaseDataLoaderIter",
        {"__init__": _wrapped_init, "__next__": _wrapped_next},
    ),
    "torchdata.stateful_dataloader": (
        "StatefulDataLoader",
        {
            "__iter__": _wrapped_iter,
            "state_dict": _wrapped_state_dict,
            "load_state_dict": _wrapped_load_state_dict,
        },
    ),
}
"""Module -> class, and its methods that are wrapped, none of which calls another's."""

_finder = AfterImport(LOADERS, _wrap)


def _start(original: Callable[[Any], Any], loader: Any, delivery: Delivery | None) -> Any:
    start = _Start(loader)
    with _starting, ExitStack() as until_begun:
        _being_started.append(start)
        until_begun.callback(_being_started.pop)
        if _forced:
            # One that was made without workers has not said how many batches each is to prefetch.
            ahead = {"prefetch_factor": loader.prefetch_factor or 2} if _forced[-1] else {}
            forced = _with(loader, num_workers=_forced[-1], timeout=0, **ahead)
            until_begun.enter_context(forced)
        loading = _loading_of_iteration(loader)
        if loaders.automatic and loader.num_workers:
            _note_seeding_of_workers(loader, loading)
        if loading is not None:
            _seed_iteration(until_begun, loader, loading, delivery)
        if (_passed_on or loaders.automatic) and loader.num_workers:
            context = loader.multiprocessing_context or import_module("multiprocessing")
            if context.get_start_method() != "fork":
                policies = {**_passed_on, _SAID: said_by_spawned()}
                first = _PreparedWorker(policies, loader.worker_init_fn)
                until_begun.enter_context(_with(loader, worker_init_fn=first))
        begun = original(loader)
    # None is made for another epoch with the same workers.
    iterator: Any = begun if start.iterator is None else start.iterator
    if not _is_of_torch(iterator):
        return begun  # the class of the loader reads its dataset itself
    if loading is not None and loading.stream is None:
        # Torch shows the number that it has drawn to workers alone.
        loading.stream = epoch_stream(int(_borrowed(iterator, "_base_seed")))
    attributes = vars(iterator)  # of which the program sees its own sampler and function
    if isinstance(attributes.get("_index_sampler"), SeededSampler):
        attributes["_index_sampler"] = attributes["_index_sampler"].sampler
    if isinstance(attributes.get("_worker_init_fn"), Loading | _PreparedWorker):
        attributes["_worker_init_fn"] = loader.worker_init_fn
    if delivery is not None:
        delivery.of_iterator(iterator)
    return begun


def _is_of_torch(iterator: Any) -> bool:
    from torch.utils.data import dataloader

    return isinstance(iterator, dataloader._BaseDataLoaderIter)  # noqa: SLF001 - see LOADERS


def _loading_of_iteration(loader: Any) -> Loading | None:
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


def _note_seeding_of_workers(loader: Any, loading: Loading | None) -> None:
    if in_loader():
        return
    seeder = worker_seeder(loader.worker_init_fn)
    where = program_place(sys._getframe())  # noqa: SLF001 - documented; `inspect` takes 100 times as long
    if loading is not None and seeder is not None:
        names_none = loader_positions.reads_items(loader)
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


@dataclass(frozen=True, slots=True)
class _PreparedWorker:
    policies: Mapping[str, Any]
    after: Callable[[int], None] | None  # the author's `worker_init_fn`

    def __call__(self, worker: int) -> None:
        for policy, value in self.policies.items():
            named(policy).write(value)
        if self.after is not None:
            self.after(worker)


def _seed_iteration(
    undo: ExitStack, loader: Any, loading: Loading, delivery: Delivery | None
) -> None:
    # By torch's protocol, torch draws the order and the base seed as ever. A named loader draws its
    # order and samples from the streams of its epoch, and moves no generator of the program.
    named = loading if isinstance(loading, NamedLoading) else None
    if named is not None:
        named.begin()
    if delivery is not None:
        delivery.seeded_by(loading)
    generator = loader.generator
    if named is not None:
        undo.enter_context(isolated_draws())
        # In the main process an IterableDataset is read as by the only worker of a loader.
        start_from(worker_stream(named.stream, 0))
        # A loader that was made of a named one may keep the generator in a sampler alone:
        # accelerate's dispatcher does.
        within = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        parts = (getattr(part, "generator", None) for part in (loader, *samplers_within(within)))
        generator = next((own for own in parts if own is not None), None)
        if generator is not None:  # from which torch draws the workers' own seeds
            generator.set_state(named.order.torch().get_state())
    elif saved := _saved_streams.pop(loader, None):
        loading.stream = Stream("data", bytes.fromhex(saved["stream"]))
        loading.given = Given(*map(bytes.fromhex, saved["given"]))
        loader_positions.say_other_reading(loader, saved["reading"])
    of_batches = loader.batch_sampler is not None
    holder, yields = ("batch_sampler", "batches") if of_batches else ("sampler", "samples")
    sampler = SeededSampler(getattr(loader, holder), loading, generator, yields)
    loading.in_workers = bool(loader.num_workers)
    undo.enter_context(_with(loader, worker_init_fn=loading, **{holder: sampler}))
    living_on = _borrowed(loader, "_iterator") if loader.persistent_workers else None
    if _is_of_torch(living_on) and "_index_sampler" in vars(living_on):
        undo.enter_context(_with(living_on, _index_sampler=sampler))
    reader_maker()  # a worker that found none would raise in the middle of the epoch
    if not loader.num_workers:  # a worker that is forked here must find torch's own readers
        is_noted = named is None and delivery is not None
        note = partial(setattr, delivery, "samples_draw") if is_noted else None
        undo.callback(seed_readers(loading, note))


@contextmanager
def _with(loader: Any, **attributes: Any) -> Iterator[None]:
    # Through its dict, because a DataLoader forbids to assign some of them.
    before = {name: vars(loader)[name] for name in attributes}
    vars(loader).update(attributes)
    try:
        yield
    finally:
        vars(loader).update(before)
