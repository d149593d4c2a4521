"""Hooks into torch's DataLoader that seed every loader, or only loaders with a name.

An iteration starts with ``DataLoader.__iter__``, which returns torch's own iterator. Methods of the
loader and of the iterator are wrapped while a profile or a named loader needs it. Data about an
iterator is stored in weak dictionaries, not in the iterator.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, finalize, ref

from torchrepro.ground.callers import program_line
from torchrepro.ground.console import say_once
from torchrepro.ground.errors import SeedingError, shown
from torchrepro.ground.fork_safety import fork_safe_lock
from torchrepro.ground.imports import AfterImport, named
from torchrepro.ground.patching import MissingHookError, surround
from torchrepro.seeding import loader_positions, streams
from torchrepro.seeding.call_records import printed_notes
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
from torchrepro.seeding.loader_positions import Delivery, epochs, is_kept, named_loading_of
from torchrepro.seeding.resumed_run import ResumedRun, own_resumes
from torchrepro.seeding.state import forget
from torchrepro.seeding.streams import Stream, checked_name, nonnegative_int

KEY = "torchrepro_data"
"""Key in the state of a StatefulDataLoader: the stream and seeds that its samples draw from."""

_passed_on: dict[str, Any] = {}  # policy -> value, applied first in a spawned worker
_PRINTED_NOTES = "seeding.call_records:printed_notes"  # makes workers print each note only once
_starting = fork_safe_lock()  # all threads share torch's function that creates readers
_being_started: list[_Start] = []
_saved_streams: WeakKeyDictionary[Any, Mapping[str, Any]] = WeakKeyDictionary()
"""Loader of torchdata that resumes within an epoch -> the state under `KEY`."""


@dataclass(slots=True, eq=False)
class _Start:
    loader: Any
    iterator: Any = None  # torch's own, even if the loader returns a wrapper


class WorkerSeeder(NamedTuple):
    """A framework's `worker_init_fn` whose only effect is to seed workers."""

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

A function is compared by identity: another function of the same name, or a replacement of it,
belongs to the program. torchrepro imports no framework to compare.
"""


def worker_seeder(init: Any) -> WorkerSeeder | None:
    """Return the row of `WORKER_SEEDERS` for `init`, a `worker_init_fn`, or None.

    Also returns None if `init` is a partial function with a callable argument, because that may be
    a function of the program (timm's `worker_seeding`), with other effects.
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
    """Policy: `auto` seeds each loader that the program does not seed; `none` seeds no loader."""

    def read(self) -> str:
        return "auto" if loaders.automatic else "none"

    def write(self, value: str) -> None:
        loaders.automatic = value == "auto"
        if loaders.automatic:
            own_resumes.watch()
        else:
            own_resumes.stop()
            ResumedRun.active.end()
            forget()
        _hooks.settle()

    save = read
    restore = write


class WorkersPolicy:
    """Policy for the number of workers of every loader. None keeps the program's number."""

    def read(self) -> int | None:
        return loaders.forced_workers

    def write(self, value: int | None) -> None:
        loaders.forced_workers = value
        _hooks.settle()

    save = read
    restore = write


seeding_policy = SeedingPolicy()
workers_policy = WorkersPolicy()


def author_worker_init(init: Any) -> Any:
    """Return the program's own `worker_init_fn`, if any: `init`, or the function inside `init`."""
    if isinstance(init, _PreparedWorker):
        init = init.after
    return init.author_init if isinstance(init, Loading) else init


def pass_to_workers(policy: str, value: Any) -> None:
    """Make spawned workers set `policy` to `value` before they do anything else.

    `policy` is a path for `ground.imports.named`. With the value None, workers no longer set
    the policy. Forked workers inherit the active policies of this process.
    """
    if value is None:
        _passed_on.pop(policy, None)
    else:
        _passed_on[policy] = value
    _hooks.settle()


def dataloader_kwargs(
    name: str, epoch: int | None = None, worker_init_fn: Callable[[int], Any] | None = None
) -> dict[str, Any]:
    """Return the arguments `generator` and `worker_init_fn` for a DataLoader called `name`.

    The order of the loader then depends on (seed, name, epoch). The random numbers of a sample,
    from Python's `random`, numpy's legacy generator, torch and `sample_rng`, depend on (seed, name,
    rank, epoch, index), but not on the number of workers or on other draws. If the program had
    called `torch.manual_seed` before the epoch, its argument is part of the seed. Iterating the
    loader changes no global generator. The first iteration is `epoch` (default: 0, or the epoch of
    a restored snapshot). Each later iteration is the next epoch, unless `set_epoch` chooses one.
    `worker_init_fn` runs in each worker as well. If no profile with a seed is active, the seed is
    the program's own at the time of this call (see `stream`).

    Wraps `DataLoader.__iter__` for as long as a loader made this way is alive.
    """
    checked_name(name)
    first = loaders.register.named.pop(name, 0) if epoch is None else epoch
    loading = NamedLoading(name, first, worker_init_fn)
    loaders.explicit.add(ref(loading, loaders.explicit.discard))
    finalize(loading, _hooks.settle)
    _hooks.settle()
    return {"generator": loading.order.torch(), "worker_init_fn": loading}


def set_epoch(loader: Any, epoch: int, start: int = 0) -> None:
    """Make the next iteration of `loader` the epoch `epoch`, and skip its first `start` batches.

    The skipped batches are not loaded. Also calls `set_epoch` of each sampler and of the dataset if
    it has this method, as `DistributedSampler` does. Works with persistent workers. Raises
    `SeedingError` if neither torchrepro nor a part of `loader` counts epochs, or if `start` is not
    0 and the loader reads an `IterableDataset` or is not seeded by torchrepro.
    Without a profile, a loader that torchrepro does not seed raises no error: the loader starts
    from its first batch, and a line on stderr reports that `start` was ignored.
    """
    number, skipped = nonnegative_int("epoch", epoch), nonnegative_int("start", start)
    loading = named_loading_of(loader)
    has_own = getattr(loader, "generator", None) is not None or author_seeds_workers(loader)
    advice = (
        "it has its own generator or worker_init_fn: give it "
        "torchrepro.dataloader_kwargs(name) instead"
        if has_own
        else "make it with torchrepro.dataloader_kwargs(name), or apply a profile with "
        "dataloader.seeding: auto"
    )
    named_now = loading is None and loaders.automatic and is_kept(loader) and not has_own
    if named_now and _borrowed(loader, "_iterator") is None:
        # A loader without a name is named after its dataset.
        loading = NamedLoading(loader_positions.kind_of_dataset(loader.dataset))
        loaders.register.loadings[loader] = loading
    is_unseeded = loading is None and not loaders.automatic and streams.current_plan().seed is None
    if skipped and is_unseeded:
        say_once(
            "set_epoch: this loader is not seeded, so it starts from its first batch: " + advice
        )
    elif skipped and (loading is None or loader_positions.reads_items(loader)):
        unseeded = "a loader that torchrepro does not seed"
        source = "an IterableDataset" if loading is not None else unseeded
        raise SeedingError.about(
            f"batches of {source} cannot be skipped", key="start", found=shown(start)
        )
    if loading is not None:
        loading.go_to(number, skipped)
    elif not is_unseeded and not loader_positions.parts_with_epochs(loader):
        raise SeedingError.about(
            "no part of this loader counts epochs", found=shown(loader), todo=advice
        )
    loader_positions.set_epoch_of_parts(loader, number)


class _Hooks:
    """The wrappers of `LOADERS`, in place while a policy or a named loader needs them.

    Each change of what needs them is followed by `settle`. Threads settle one after another. The
    garbage collector may end a named loader within `settle`, which then begins again.
    """

    def __init__(self) -> None:
        self._undo: dict[str, ExitStack] = {}  # by module
        self._finder = AfterImport((module for module, *_ in LOADERS), self._imported)
        self._lock = fork_safe_lock()
        self._settling = 0  # the thread
        self._begin = False

    def settle(self) -> None:
        """Install the hooks if they are needed now, else remove them."""
        if self._settling == threading.get_ident():
            self._begin = True
            return
        with self._lock:
            self._settling, self._begin = threading.get_ident(), True
            try:
                while self._begin:
                    self._begin = False
                    if self._are_needed():
                        self._finder.watch_all()
                    else:
                        self._finder.unwatch()
                        while self._undo:
                            self._undo.popitem()[1].close()
            finally:
                self._settling = 0

    def _are_needed(self) -> bool:
        is_forced = loaders.forced_workers is not None
        return bool(loaders.automatic or is_forced or loaders.named() or _passed_on)

    def _imported(self, module: str) -> None:
        with self._lock, ExitStack() as undo:
            rows = [row for row in LOADERS if row[0] == module and module not in self._undo]
            for _, name, method, wrapper in rows:
                try:
                    surround(undo, getattr(sys.modules[module], name), method, wrapper)
                except (AttributeError, MissingHookError) as missing:
                    raise _unknown_torch(f"{module}.{name}.{method}") from missing
            if rows:
                self._undo[module] = undo.pop_all()
        if not self._are_needed():
            self.settle()


def _unknown_torch(missing: str) -> SeedingError:
    return SeedingError.about(
        "this torch iterates loaders in a way that torchrepro does not know", found=f"no {missing}"
    )


def _borrowed(owner: Any, name: str) -> Any:
    """Return the private attribute `name` of a loader or iterator: no public function returns it.

    Raises `SeedingError` if this version of torch or torchdata does not have the attribute.
    """
    if not hasattr(owner, name):
        raise _unknown_torch(f"{type(owner).__name__}.{name}")
    return getattr(owner, name)


def _wrapped_iter(original: Any, loader: Any) -> Any:
    if any(start.loader is loader for start in _being_started):
        return original(loader)  # called by our wrapper of an earlier profile
    # A checkpoint may need the progress of the program in this epoch.
    is_automatic = loaders.automatic and threading.current_thread() is threading.main_thread()
    is_followed = is_automatic or named_loading_of(loader) is not None
    is_within_another = in_loader() or epochs.beginning(loader) is not None
    if is_within_another or not is_followed or not is_kept(loader):
        return _iterate(original, loader)
    delivery = ResumedRun.active.epoch_begins(loader)
    unbegun = _unbegun_iterator(loader) if epochs.late else None
    if unbegun is not None:
        delivery.wait(unbegun, partial(_begin, original, loader))
        return unbegun
    return delivery.begin(partial(_iterate, original, loader))


def _unbegun_iterator(loader: Any) -> Any:
    """Create the iterator that torch would return for `loader`, without starting the epoch.

    Returns None if the class of `loader` creates iterators itself.
    """
    from torch.utils.data import DataLoader, dataloader

    if type(loader)._get_iterator is not DataLoader._get_iterator:  # noqa: SLF001 - see LOADERS
        return None
    forced = loaders.forced_workers
    workers = loader.num_workers if forced is None else forced
    is_persistent = bool(loader.persistent_workers and workers)
    if is_persistent and _borrowed(loader, "_iterator") is not None:
        return _borrowed(loader, "_iterator")
    name = "_MultiProcessingDataLoaderIter" if workers else "_SingleProcessDataLoaderIter"
    iterator_class: Any = getattr(dataloader, name)
    unbegun = iterator_class.__new__(iterator_class)
    unbegun._shutdown = True  # noqa: SLF001 - it has no workers to shut down yet
    if is_persistent:
        loader._iterator = unbegun  # noqa: SLF001 - see `_borrowed`
    return unbegun


def _begin(original: Callable[[Any], Any], loader: Any, iterator: Any) -> Any:
    """Begin the epoch of `iterator`, which `_unbegun_iterator` has created."""

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
    delivery = epochs.followed(iterator)
    if delivery is None:
        return original(iterator)
    return delivery.advance(partial(original, iterator))


def _iterate(original: Callable[[Any], Any], loader: Any) -> Any:
    """Return the iterator of `loader`, and start the iteration if torchdata has not started it."""
    delivery = epochs.beginning(loader)
    # torchdata has already begun the iteration if the program has called `state_dict` before the
    # first batch. It begins another one if the loaded state was saved at the end of an epoch.
    is_begun = getattr(loader, "_initial_iter_for_state_dict", False)
    if not is_begun or _borrowed(_borrowed(loader, "_iterator"), "_finished"):
        return _start(original, loader, delivery)
    if delivery is not None:
        delivery.loading = loaders.register.loadings.get(loader)
        delivery.note_iterator(_borrowed(loader, "_iterator"))
    return original(loader)


def _wrapped_state_dict(original: Any, loader: Any) -> Any:
    started = _borrowed(loader, "_iterator") is not None  # if not, `state_dict` starts one
    state = original(loader) if started else _start(original, loader, None)
    loading = loaders.register.loadings.get(loader) or named_loading_of(loader)
    if loading is None:
        return state
    finished = _borrowed(_borrowed(loader, "_iterator"), "_finished")
    seeding: dict[str, Any] = {}
    if isinstance(loading, NamedLoading):
        seeding = {
            "epoch": loading.next_epoch - (not finished),
            "program_seed": None if finished else loading.program_seed,
            "within": not finished,
        }
    elif not finished and loading.stream is not None and loading.given is not None:
        seeding = {
            "stream": loading.stream.key.hex(),
            "given": [seed.hex() for seed in loading.given],
            "reading": loader_positions.reading_of(loader),
        }
    return {**state, KEY: seeding}


def _wrapped_load_state_dict(original: Any, loader: Any, state_dict: Mapping[str, Any]) -> Any:
    torchdata_state = {key: value for key, value in state_dict.items() if key != KEY}
    saved = state_dict.get(KEY) or {}
    loaded = original(loader, torchdata_state)
    if torchdata_state.get("_iterator_finished"):
        # torchdata recreates the finished iterator first, and draws a base seed for it.
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


_OF_TORCHDATA = ("torchdata.stateful_dataloader", "StatefulDataLoader")
LOADERS: Sequence[tuple[str, str, str, Callable[..., Any]]] = (
    ("torch.utils.data", "DataLoader", "__iter__", _wrapped_iter),
    # Private, because torch has no public hook at the reading of a batch. If torch no longer has
    # it, a profile that seeds loaders is refused.
    ("torch.utils.data.dataloader", "_BaseDataLoaderIter", "__init__", _wrapped_init),
    ("torch.utils.data.dataloader", "_BaseDataLoaderIter", "__next__", _wrapped_next),
    (*_OF_TORCHDATA, "__iter__", _wrapped_iter),
    (*_OF_TORCHDATA, "state_dict", _wrapped_state_dict),
    (*_OF_TORCHDATA, "load_state_dict", _wrapped_load_state_dict),
)
"""Module, class, method and wrapper. None of these methods calls another of them."""

_hooks = _Hooks()


def _start(original: Callable[[Any], Any], loader: Any, delivery: Delivery | None) -> Any:
    """Start an iteration of `loader`, seeded if the policy is `auto` or the loader has a name."""
    start = _Start(loader)
    with _starting, ExitStack() as until_begun:
        _being_started.append(start)
        until_begun.callback(_being_started.pop)
        workers = loaders.forced_workers
        if workers is not None:
            # A loader that was made without workers has no `prefetch_factor`.
            prefetch = {"prefetch_factor": loader.prefetch_factor or 2} if workers else {}
            forced = _with(loader, num_workers=workers, timeout=0, **prefetch)
            until_begun.enter_context(forced)
        loading = _loading_of_iteration(loader)
        if loaders.automatic and loader.num_workers:
            _note_seeding_of_workers(loader, loading)
        if loading is not None:
            _seed_iteration(until_begun, loader, loading, delivery)
        if (_passed_on or loaders.automatic) and loader.num_workers:
            context = loader.multiprocessing_context or import_module("multiprocessing")
            if context.get_start_method() != "fork":
                policies = {**_passed_on, _PRINTED_NOTES: printed_notes.of_spawned}
                first = _PreparedWorker(policies, loader.worker_init_fn)
                until_begun.enter_context(_with(loader, worker_init_fn=first))
        begun = original(loader)
    # A further epoch with the same workers makes no new iterator.
    iterator: Any = begun if start.iterator is None else start.iterator
    if not _is_of_torch(iterator):
        return begun  # the class of the loader reads its dataset itself
    if loading is not None and loading.stream is None:
        # torch passes the base seed to workers only: this process has no public access to it.
        loading.stream = epoch_stream(int(_borrowed(iterator, "_base_seed")))
    # The program may read the attributes of the iterator, and expects its own objects in them.
    attributes = vars(iterator)
    if isinstance(attributes.get("_index_sampler"), SeededSampler):
        attributes["_index_sampler"] = attributes["_index_sampler"].sampler
    if isinstance(attributes.get("_worker_init_fn"), Loading | _PreparedWorker):
        attributes["_worker_init_fn"] = loader.worker_init_fn
    if delivery is not None:
        delivery.note_iterator(iterator)
    return begun


def _is_of_torch(iterator: Any) -> bool:
    from torch.utils.data import dataloader

    return isinstance(iterator, dataloader._BaseDataLoaderIter)  # noqa: SLF001 - see LOADERS


def _loading_of_iteration(loader: Any) -> Loading | None:
    named = named_loading_of(loader)
    seeded = loaders.automatic and is_kept(loader) and not author_seeds_workers(loader)
    # A loader within a dataset draws from the stream of the present sample. A class that computes
    # its samplers on each access cannot get a seeded sampler.
    if named is not None or not seeded or in_loader():
        return named
    if not {"sampler", "batch_sampler"} <= vars(loader).keys():
        return None
    loadings = loaders.register.loadings
    if getattr(loader, "_iterator", None) is None or not loader.persistent_workers:
        loadings[loader] = Loading()
    elif (again := loadings.get(loader)) is not None:
        # Torch draws no base seed for a further epoch with the same workers.
        again.given, again.stream, again.start = given_seeds(), None, 0
        again.draws_base_seed = True
    return loadings.get(loader)  # None if its workers started before the profile was applied


def author_seeds_workers(loader: Any) -> bool:
    """Return whether `loader` has a `worker_init_fn` that is not in `WORKER_SEEDERS`."""
    init = getattr(loader, "worker_init_fn", None)
    return init is not None and worker_seeder(init) is None


def _note_seeding_of_workers(loader: Any, loading: Loading | None) -> None:
    if in_loader():
        return
    seeder = worker_seeder(loader.worker_init_fn)
    line = program_line(sys._getframe())  # noqa: SLF001 - documented; `inspect` takes 100 times as long
    if loading is not None and seeder is not None:
        is_iterable = loader_positions.reads_items(loader)
        loaders.register.notes[f"{seeder} at {line}"] = (
            f"random numbers in data loading {'depend' if is_iterable else 'do not depend'} on "
            f"num_workers: the loader at {line} is seeded by torchrepro instead of by {seeder}"
            f"{', but reads an IterableDataset' if is_iterable else ''}"
        )
    elif loading is None and author_seeds_workers(loader):
        loaders.register.notes[f"worker_init_fn at {line}"] = (
            f"random numbers in data loading depend on num_workers: the loader at {line} has its "
            "own worker_init_fn"
        )


@dataclass(frozen=True, slots=True)
class _PreparedWorker:
    policies: Mapping[str, Any]
    after: Callable[[int], None] | None  # the program's `worker_init_fn`

    def __call__(self, worker: int) -> None:
        for policy, value in self.policies.items():
            named(policy).write(value)
        if self.after is not None:
            self.after(worker)


def _seed_iteration(
    undo: ExitStack, loader: Any, loading: Loading, delivery: Delivery | None
) -> None:
    # Without a name, torch draws the order and the base seed from the program's generators, as it
    # does without torchrepro. A named loader draws its order and samples from the streams of its
    # epoch, and moves no generator of the program.
    named = loading if isinstance(loading, NamedLoading) else None
    if named is not None:
        named.begin()
    if delivery is not None:
        delivery.note_seeding(loading)
    generator, of_batches = loader.generator, loader.batch_sampler is not None
    holder, yields = ("batch_sampler", "batches") if of_batches else ("sampler", "samples")
    if named is not None:
        undo.enter_context(isolated_draws())
        # The main process reads an IterableDataset with the stream of worker 0.
        start_from(worker_stream(named.stream, 0))
        # A loader that was made from a named one may have the generator only in a sampler, as
        # accelerate's dispatcher does.
        parts = (loader, *loader_positions.samplers_within(getattr(loader, holder)))
        generators = (getattr(part, "generator", None) for part in parts)
        generator = next((present for present in generators if present is not None), None)
        if generator is not None:  # torch draws the workers' seeds from it
            generator.set_state(named.order.torch().get_state())
    elif saved := _saved_streams.pop(loader, None):
        loading.stream = Stream("data", bytes.fromhex(saved["stream"]))
        loading.given = Given(*map(bytes.fromhex, saved["given"]))
        loader_positions.report_changed_reading(loader, saved["reading"])
    sampler = SeededSampler(getattr(loader, holder), loading, generator, yields)
    loading.in_workers = bool(loader.num_workers)
    undo.enter_context(_with(loader, worker_init_fn=loading, **{holder: sampler}))
    persistent = _borrowed(loader, "_iterator") if loader.persistent_workers else None
    if _is_of_torch(persistent) and "_index_sampler" in vars(persistent):
        undo.enter_context(_with(persistent, _index_sampler=sampler))
    reader_maker()  # raises now: a worker would raise in the middle of the epoch
    if not loader.num_workers:  # a forked worker must find torch's own readers
        is_noted = named is None and delivery is not None
        note = partial(setattr, delivery, "samples_draw") if is_noted else None
        undo.callback(seed_readers(loading, note))


@contextmanager
def _with(loader: Any, **attributes: Any) -> Iterator[None]:
    # A DataLoader forbids assignments to some attributes, so its dict is changed.
    before = {name: vars(loader)[name] for name in attributes}
    vars(loader).update(attributes)
    try:
        yield
    finally:
        vars(loader).update(before)
