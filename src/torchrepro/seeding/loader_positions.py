"""Record how far a program has read each loader, and resume interrupted epochs in another run.

An interrupted epoch is resumed in four steps: restore the generators' states from the start of the
epoch, start the iteration, skip the batches that are done, and restore the generators' states from
the interruption.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

from torchrepro.ground.callers import package
from torchrepro.ground.console import say, say_once
from torchrepro.seeding.generators import (
    Given,
    Slot,
    decoded,
    encoded,
    generator_kind,
    host_slots,
)
from torchrepro.seeding.loader import Loading, NamedLoading, loaders, unskipped
from torchrepro.seeding.observed_calls import listen, stop_listening
from torchrepro.seeding.streams import world

Restore = Callable[[], None]


@dataclass(slots=True, eq=False)
class _GeneratorOwner:
    """A loader that has its own generators, and copies of that loader that skip batches."""

    signature: str
    number: int
    epochs: int = 0  # number of epochs that have begun


@dataclass(slots=True)
class Resumption:
    """An interrupted epoch that the next iteration of a loader resumes.

    `restore` sets all generators to the states that they had at the interruption. torchrepro skips
    the first `skip` batches. The program may skip further batches itself.
    """

    progress: Mapping[str, Any]
    restore: Restore
    skip: int = 0
    resumed_epochs: list[int] = field(default_factory=list)  # epoch of each sampler
    iterations: int = 0  # begun in the resumed run

    def begin(self, loader: Any) -> None:
        write_states(loader, self.progress["start"])
        named, saved = named_loading_of(loader), self.progress["named"]
        if named is not None and saved is not None:
            named.resume(saved["epoch"], saved["program_seed"])
        report_changed_reading(loader, self.progress["reading"])

    def correct_epochs(self, loader: Any) -> None:
        """Set the epoch of each sampler of `loader` to the epoch in the uninterrupted run.

        Otherwise the epochs would count from the start of the resumed run, often from 0 again.
        """
        counting = _counting_parts(loader)
        if not self.iterations:
            self.resumed_epochs = [part.epoch for part in counting]
        rows = zip(counting, self.resumed_epochs, self.progress["samplers"], strict=False)
        for part, resumed, saved in rows:
            if part.epoch == resumed + self.iterations:
                part.set_epoch(saved + self.iterations)
        self.iterations += 1


_awaited: list[Resumption] = []  # interrupted epochs that no loader resumes yet
_ended: list[Resumption] = []  # epochs saved at their end, for programs that skip all batches
_resting: list[Mapping[str, Any]] = []  # saved by `resting`, for the next epochs
_resumptions: WeakKeyDictionary[Any, Resumption] = WeakKeyDictionary()  # loader -> next or latest
_owners: WeakKeyDictionary[Any, _GeneratorOwner] = WeakKeyDictionary()  # by loader
_single_epoch: Counter[str] = Counter()  # signature -> how many loaders died after one epoch
# Iterator whose epoch begins at the first batch -> epoch, start function; in order of creation.
_waiting: WeakKeyDictionary[Any, tuple[Delivery, Callable[[Any], Any]]] = WeakKeyDictionary()
_deliveries: WeakSet[Delivery] = WeakSet()
_followed: WeakKeyDictionary[Any, Delivery] = WeakKeyDictionary()  # torch's iterator -> last epoch
_beginning: list[Delivery] = []
_NOT_RESUMED: Mapping[str, Any] = {"batches": 0, "first": None, "last": None}
_numbers = iter(range(2**63))
_DEPTH, _FEW = 5, 100  # maximum depth and list length


@dataclass(slots=True)
class _RunState:
    first_number: int = -1  # loaders with lower numbers belong to an earlier run
    late_begin: tuple[Restore, int] | None = None  # see `begin_at_first_batch`
    restored_unread: bool = False  # whether the program set a state that it had not read


_run = _RunState()


class Delivery:
    """The program's progress in one epoch of a loader.

    An instance is created when the program requests an iterator. `begin` begins the epoch, and
    `advance` returns each batch. The instance refers weakly to a DataLoader and its iterator, and
    is freed with the iterator.

    It resumes an interrupted epoch if `resumption` is set, or if an epoch waits for this loader.
    `states` are the states of the generators when the epoch began. `batches` counts the batches
    that the program received or a sampler skipped. `skip` counts the batches still to be skipped.
    """

    def __init__(self, loader: Any, resumption: Resumption | None = None) -> None:
        self._loader: Callable[[], Any] = ref(loader) if is_kept(loader) else lambda: loader
        self._iterator: Callable[[], Any] = lambda: None
        self._is_read_ahead = resumption is None  # a framework may prefetch some batches
        self.resumption = resumption or _next_resumption(loader)
        self.skip = 0 if self.resumption is None else self.resumption.skip
        self.loading: Loading | None = None
        self.number = next(_numbers)
        self.is_over = self._is_reading = False
        self.samples_draw = False  # whether the first sample read in this process drew numbers
        self._first: Mapping[str, Any] | None = None
        self._last: Mapping[str, Any] | None = None

    @property
    def loader(self) -> Any:
        """The loader, or an object with its dataset and sampler if the loader itself is freed."""
        loader, iterator = self._loader(), self._iterator()
        if loader is not None or iterator is None:
            return loader
        kept = vars(iterator)
        return SimpleNamespace(dataset=kept["_dataset"], sampler=kept["_index_sampler"])

    def begin(self, start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin the epoch, and return the iterator that `start` creates."""
        loader, resumption = self._loader(), self.resumption
        self.owner = _owner(loader)
        if self.owner is not None:
            self.owner.epochs += 1
        if resumption is not None:
            resumption.begin(loader)
        elif _resting or _ended:
            _restore_resting(loader)
        latest = _resumptions.get(loader) if is_kept(loader) else None
        if latest is not None:
            latest.correct_epochs(loader)
        self.epochs = [part.epoch for part in _counting_parts(loader)]
        self.reading = reading_of(loader)
        self._has_state = hasattr(loader, "next_iter_state")  # a loader of torchdata
        self.batches = unskipped(_top_sampler(loader))[1]
        self.states = read_states(loader)
        _beginning.append(self)
        try:
            begun = start()
        finally:
            _beginning.pop()
        iterator = self._iterator()
        iterator = begun if iterator is None else iterator
        self.batches += getattr(iterator, "_num_yielded", 0)  # torchdata resumes by itself
        self._reads_here = not getattr(iterator, "_num_workers", 0)
        _deliveries.add(self)
        if resumption is not None and not resumption.progress["batches"]:
            self._restore_once()  # this rank gets its batches from another rank
        return begun

    def note_iterator(self, iterator: Any) -> None:
        """Remember torch's iterator over this epoch."""
        self._iterator = ref(iterator)
        if type(iterator).__hash__ is not None:
            _followed[iterator] = self

    @property
    def is_in_use(self) -> bool:
        """Return False if only a loader with persistent workers still refers to the iterator."""
        kept = getattr(self._loader(), "_iterator", None)
        if kept is None or kept is not self._iterator():
            return True
        del kept
        return _references(self._iterator) > _BY_ONE

    def note_seeding(self, loading: Loading) -> None:
        """Store the seeding of the samples; let the sampler skip done batches without loading them.

        An `IterableDataset`, and a dataset with its own generator, must load the skipped batches.
        """
        has_indices = self.skip and not reads_items(self.loader)
        if has_indices and not _has_generator(self.loader.dataset):
            loading.start = loading.start or self.skip
        self.loading = loading
        self.batches += loading.start
        self.skip = max(self.skip - loading.start, 0)
        saved = None if self.resumption is None else self.resumption.progress["given"]
        loading.given = loading.given if saved is None else Given(*map(bytes.fromhex, saved))

    def advance(self, read: Callable[[], Any]) -> Any:
        """Return the next batch from `read`, after skipping the batches that are already done."""
        if self._is_reading:
            return read()
        self._is_reading = True
        try:
            while self.skip:
                self.skip -= 1
                self._next(read)
            return self._next(read)
        finally:
            self._is_reading = False

    def _next(self, read: Callable[[], Any]) -> Any:
        if self._reads_here:
            self._before_reading()
        try:
            batch = read()
        except StopIteration:
            self.is_over = True
            self._restore_once()
            raise
        self.batches += 1
        if self.resumption is not None and self.batches >= self.resumption.progress["batches"]:
            self._restore_once()
        return batch

    def _before_reading(self) -> None:
        # A sampler may draw its order at the first batch, so the states just before it are saved.
        # Unseeded samples draw from the same generators as the training. A prefetched batch was
        # read before the latest draws of the training. So the states just before the last batch are
        # saved as well.
        is_unseeded = self.loading is None or reads_items(self.loader)
        needs_last_states = self._is_read_ahead and is_unseeded
        saved = _NOT_RESUMED if self.resumption is None else self.resumption.progress
        batches_left = saved["batches"] - self.batches
        if self._first is None:
            if saved["first"] is not None:
                write_states(self.loader, saved["first"])
            self._first = read_states(self.loader)
        elif needs_last_states and batches_left == 1 and saved["last"] is not None:
            write_states(self.loader, saved["last"])
        if batches_left <= 0 and reads_items(self.loader):  # no order to draw
            self._restore_once()
        if needs_last_states:
            self._last = read_states(self.loader)

    def _restore_once(self) -> None:
        if self.resumption is not None:
            resumption, self.resumption = self.resumption, None
            resumption.restore()

    def progress(self) -> dict[str, Any]:
        named = self.loading if isinstance(self.loading, NamedLoading) else None
        given = None if self.loading is None else self.loading.given
        return {
            "kind": kind_of(self.loader),
            "number": self.number,
            "batches": self.batches,
            "reading": {} if self._has_state else self.reading,  # torchdata's state has it
            "samplers": self.epochs,
            "named": named and {"epoch": named.epoch, "program_seed": named.program_seed},
            "given": given and [seed.hex() for seed in given],
            "keeps_place": self._has_state,
            "start": encoded_states(self.states),
            "first": encoded_states(self._first),
            "last": encoded_states(self._last),
            "over": self.is_over,
        }


def _references(weak: Callable[[], Any]) -> int:
    return sys.getrefcount(weak())


_referenced_once = [Counter[str]()]
_BY_ONE = _references(
    ref(_referenced_once[0])
)  # some interpreters also count references on their stack


def followed(iterator: Any) -> Delivery | None:
    """Return the epoch that `iterator` reads, or None. Begin the epoch if it has not begun."""
    if type(iterator).__hash__ is None:
        return None
    if len(_waiting) and iterator in _waiting:
        _begin_in_turn(iterator)
    return _followed.get(iterator)


def begins_late() -> bool:
    return _run.late_begin is not None


def wait(iterator: Any, delivery: Delivery, start: Callable[[Any], Any]) -> None:
    """Delay the epoch `delivery`: it begins by ``start(iterator)`` when a batch is read."""
    _waiting[iterator] = delivery, start


def _begin_in_turn(iterator: Any) -> None:
    # Iterators that were created earlier, and are still waiting, begin before `iterator`.
    iterators = list(_waiting)
    count = next(n for n, waiting in enumerate(iterators, 1) if waiting is iterator)
    if _run.late_begin is not None:
        restore, together = _run.late_begin
        restore()
        count = max(count, together)
    _run.late_begin = None
    for waiting in iterators[:count]:
        _begin_waiting(waiting)


def _begin_waiting(iterator: Any) -> None:
    delivery, start = _waiting.pop(iterator)
    delivery.begin(partial(start, iterator))


def named_loading_of(loader: Any) -> NamedLoading | None:
    loading = getattr(loader, "worker_init_fn", None)
    if not isinstance(loading, NamedLoading):
        loading = loaders.register.loadings.get(loader) if is_kept(loader) else None
    return loading if isinstance(loading, NamedLoading) else None


def is_kept(loader: Any) -> bool:
    """Return whether `loader` is a hashable DataLoader, which can be a key of a dict."""
    from torch.utils.data import DataLoader

    return isinstance(loader, DataLoader) and type(loader).__hash__ is not None


def kind_of_dataset(dataset: Any) -> str:
    """Return the type and length of `dataset` as text, such as ``Pictures[50000]``."""
    try:
        length = str(len(dataset))
    except Exception:  # noqa: BLE001 - a program's `__len__` may raise any error
        length = "?"
    return f"{type(dataset).__name__}[{length}]"


def samplers_within(sampler: Any) -> Iterator[Any]:
    """Yield `sampler`, then the sampler inside it, and so on to the innermost sampler."""
    seen: list[Any] = []
    while sampler is not None and all(sampler is not outer for outer in seen):
        seen.append(sampler)
        yield sampler
        inner = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner


def delivery_of(loader: Any) -> Delivery | None:
    return next((epoch for epoch in _beginning if epoch.loader is loader), None)


def _alive() -> list[Delivery]:
    in_use = [delivery for delivery in _deliveries if delivery.is_in_use]
    return sorted(in_use, key=lambda delivery: delivery.number)


def places(*, over: bool) -> list[dict[str, Any]]:
    """Return the progress of each epoch whose iterator the program still has, oldest first.

    `over` selects the epochs that have reached their end. Otherwise these epochs are omitted.
    """
    return [delivery.progress() for delivery in _alive() if delivery.is_over == over]


def latest_delivery(loader: Any) -> Delivery | None:
    return next((latest for latest in reversed(_alive()) if latest.loader is loader), None)


def place_of(loader: Any) -> dict[str, Any] | None:
    """Return the progress in the latest epoch of `loader` that is still in use, or None."""
    latest = latest_delivery(loader)
    return None if latest is None else latest.progress()


def _owner(loader: Any) -> _GeneratorOwner | None:
    if not is_kept(loader):
        return None
    if loader not in _owners and _loader_slots(loader):
        owner = _owners[loader] = _GeneratorOwner(kind_of(loader), next(_numbers))
        finalize(loader, _note_end, owner)
    return _owners.get(loader)


def _note_end(owner: _GeneratorOwner) -> None:
    if owner.number > _run.first_number:
        _single_epoch[owner.signature] += owner.epochs == 1


def resting() -> list[dict[str, Any]]:
    """Return the states of the loaders' own generators, except for loaders within an epoch.

    Omits a loader that the program creates for one epoch, as the next loader has new generators.
    """
    busy = [delivery.owner for delivery in _alive() if not delivery.is_over]
    lasting = {
        owner.number: (owner, loader)
        for loader, owner in _owners.items()
        if owner not in busy and (owner.epochs > 1 or not _single_epoch[owner.signature])
    }
    return [
        {
            "kind": owner.signature,
            "own": encoded_states(_read(_loader_slots(loader))),
            "reading": reading_of(loader),
        }
        for _, (owner, loader) in sorted(lasting.items())
    ]


def restore_idle_loaders(saved: Sequence[Mapping[str, Any]]) -> None:
    """Begin a run in which each loader in `saved` restores its generators at its next epoch.

    Also resets the count of loaders that were used for only one epoch.
    """
    _run.first_number = next(_numbers)
    _resting[:] = saved
    _single_epoch.clear()


def _restore_resting(loader: Any) -> None:
    signature = kind_of(loader)
    saved = next((state for state in _resting if state["kind"] == signature), None)
    ended = next((epoch for epoch in _ended if epoch.progress["kind"] == signature), None)
    if saved is not None:
        _resting.remove(saved)
        write_states(loader, saved["own"])
    if ended is not None:
        _ended.remove(ended)
    before = saved or (ended.progress if ended is not None else None)
    if before is not None:
        report_changed_reading(loader, before["reading"])


def begin_at_first_batch(restore: Restore, together: int) -> None:
    """Delay the next epochs: when a first batch is read, call `restore`, and then begin them.

    At that moment the first `together` epochs begin. This is for a framework that creates the
    iterators earlier in a resumed run than in a new run.
    """
    _run.late_begin = (restore, together)


def await_loaders(
    interrupted: Sequence[Mapping[str, Any]],
    restore: Restore,
    ended: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Resume each `interrupted` epoch in the next loader with the same signature (see `kind_of`).

    The program itself skips the batches that are done. `restore` sets every generator to its state
    at the interruption. `skip_batches` uses the `ended` epochs.
    """
    _awaited[:] = [Resumption(progress, restore) for progress in interrupted]
    _ended[:] = [Resumption(progress, restore) for progress in ended]


def skip_batches(loader: Any, skipping: Any, number: int) -> bool:
    """Treat `skipping` as a copy of `loader` that skips the first `number` batches of an epoch.

    Returns True if the epoch was saved after its last batch, and `skipping` skips all batches.
    """
    signature, owner = kind_of(loader), _owner(loader)
    if owner is not None:
        _owners[skipping] = owner
    for resumption in _ended:
        progress = resumption.progress
        if progress["kind"] == signature and number >= progress["batches"]:
            _ended.remove(resumption)
            _resumptions[skipping] = resumption
            return True
    return False


def batches_done(loader: Any) -> int | None:
    """Return how many batches are done in the epoch that `loader` will resume, or None."""
    resumption = _awaited_by(loader)
    return None if resumption is None else int(resumption.progress["batches"])


def loaders_behind() -> list[str]:
    """Return a text for each resumed loader that has not reached the interrupted batch again."""
    return [
        f"the position of the loader over {kind_of_dataset(epoch.loader.dataset)} in its epoch"
        for epoch in _alive()
        if epoch.resumption is not None
        and 0 < epoch.batches < epoch.resumption.progress["batches"] - epoch.skip
    ]


def signatures_in_use() -> set[str]:
    return {kind_of(delivery.loader) for delivery in _alive() if delivery.batches}


def take_up(loader: Any, progress: Mapping[str, Any], restore: Restore, skip: int = 0) -> None:
    """Make the next iteration of `loader` resume the epoch `progress`, and skip `skip` batches."""
    number = progress["number"]
    _awaited[:] = [awaited for awaited in _awaited if awaited.progress["number"] != number]
    _resumptions[loader] = Resumption(progress, restore, skip)


def forget_resumptions() -> None:
    """At the undo of a profile, forget all epochs to be resumed, and begin waiting iterators."""
    for waiting in (_awaited, _ended, _resting, _single_epoch, _resumptions):
        waiting.clear()
    _run.late_begin = None
    for iterator in list(_waiting):
        _begin_waiting(iterator)


def _awaited_by(loader: Any) -> Resumption | None:
    signature = kind_of(loader) if _awaited else ""
    return next((epoch for epoch in _awaited if epoch.progress["kind"] == signature), None)


def _next_resumption(loader: Any) -> Resumption | None:
    prepared = _resumptions.get(loader) if is_kept(loader) else None
    if prepared is not None and not prepared.iterations:
        return prepared
    resumption = _awaited_by(loader)
    if resumption is not None:
        _awaited.remove(resumption)
        _resumptions[loader] = resumption
    return resumption


def kind_of(loader: Any) -> str:
    """Return the signature by which a resumed run recognizes `loader`: dataset and sampler."""
    *_, sampler = None, *samplers_within(_top_sampler(loader))
    return f"{kind_of_dataset(getattr(loader, 'dataset', loader))} {type(sampler).__name__}"


def _attributes(part: Any) -> dict[str, Any]:
    """Return the instance attributes of `part`, without attributes that its class computes."""
    with suppress(AttributeError):
        attributes: dict[str, Any] = object.__getattribute__(part, "__dict__")
        return attributes
    return {}


def _top_sampler(loader: Any) -> Any:
    # Only instance attributes: a property that creates a sampler might draw an order.
    attributes = _attributes(loader)
    batches = attributes.get("batch_sampler")
    return attributes.get("sampler") if batches is None else batches


def report_changed_reading(loader: Any, saved: Mapping[str, int]) -> None:
    """Report if `reading_of(loader)` differs from `saved`, the result in the saved run."""
    now = reading_of(loader)
    changed = sorted(name for name in saved.keys() & now.keys() if saved[name] != now[name])
    if not changed or world().rank:
        return
    before = ", ".join(f"{name}={saved[name]}" for name in changed)
    after = ", ".join(f"{name}={now[name]}" for name in changed)
    say(
        f"the loader over {kind_of_dataset(loader.dataset)} was saved with {before} and resumes "
        f"with {after}, so its batches differ from the batches of the uninterrupted run; resume "
        f"with {before} to continue exactly"
    )


def reading_of(loader: Any) -> dict[str, int]:
    """Return the batch size of `loader` and the seeds of its samplers, by attribute name.

    Skips values that are not ints: the program's own samplers may use these names differently.
    """
    return {
        name: value
        for part in reversed([*samplers_within(_top_sampler(loader))])
        for name, value in _attributes(part).items()
        if type(value) is int and (name == "batch_size" or name.endswith("seed"))
    }


def set_epoch_of_parts(loader: Any, epoch: int) -> None:
    for part in parts_with_epochs(loader):
        part.set_epoch(epoch)


def parts_with_epochs(loader: Any) -> list[Any]:
    """Return the samplers and the dataset of `loader` that have a method `set_epoch`."""
    parts = (*_samplers(loader), getattr(loader, "dataset", None))
    settable = {id(part): part for part in parts if callable(getattr(part, "set_epoch", None))}
    return list(settable.values())


def _counting_parts(loader: Any) -> list[Any]:
    return [p for p in parts_with_epochs(loader) if isinstance(getattr(p, "epoch", None), int)]


def _samplers(loader: Any) -> list[Any]:
    tops = map(_attributes(loader).get, ("sampler", "batch_sampler"))
    return [part for top in tops for part in samplers_within(top)]


def reads_items(loader: Any) -> bool:
    """Return whether `loader` reads an `IterableDataset`, which has no sample indices."""
    from torch.utils.data import IterableDataset

    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def _has_generator(dataset: Any) -> bool:
    parts, seen = [dataset], set[int]()
    for _ in range(_DEPTH):
        if any(map(generator_kind, parts)):
            return True
        parts = list({id(part): part for part in parts if id(part) not in seen}.values())
        seen.update(map(id, parts))
        within: list[Any] = []
        for part in parts:
            if isinstance(part, list | tuple | dict):
                few = part if len(part) <= _FEW else ()
                within += few.values() if isinstance(few, dict) else few
            elif not isinstance(part, type | ModuleType):
                within += _attributes(part).values()
        parts = within
    return False


def _loader_slots(loader: Any) -> dict[str, Slot]:
    slots: dict[str, Slot] = {}
    known: list[Any] = []
    for part in (loader, *_samplers(loader)):
        for name, attribute in _attributes(part).items():
            generator_type = generator_kind(attribute)
            if generator_type is not None and all(attribute is not seen for seen in known):
                known.append(attribute)
                slots[f"{len(known)} {name}"] = generator_type.slot(attribute)
    return slots


def _read(slots: Mapping[str, Slot]) -> Mapping[str, Any]:
    return {name: slot.read() for name, slot in slots.items()}


def read_states(loader: Any) -> Mapping[str, Any]:
    """Return the states of the global CPU generators and of the generators of `loader`."""
    return _read({**host_slots(), **_loader_slots(loader)})


def write_states(loader: Any, states: Mapping[str, Any]) -> None:
    slots = {**host_slots(), **_loader_slots(loader)}
    for name in states.keys() & slots.keys():
        slots[name].write(decoded(states[name]))


def encoded_states(states: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if states is None else {name: encoded(state) for name, state in states.items()}


# A program's own checkpoint may have the state of torch's generator at the saved step, but not at
# the start of the epoch. Without a profile, samples loaded in the main process draw from that
# generator, so the resumed run is exact. Under `auto` they draw from the base seed of the epoch,
# which differs in the resumed run. A line on stderr reports this case.

_GET, _SET = "get_rng_state", "set_rng_state"
_states_read: deque[int] = deque(maxlen=1000)  # digests


def watch_own_resumes(*, begins: bool) -> None:
    """Start or stop observing the program's calls that get or set torch's generator state."""
    _states_read.clear()
    _run.restored_unread = False
    if not begins:
        stop_listening(_note_state)
        return
    for module in ("torch", "torch.random"):
        for name in (_GET, _SET):
            listen(module, name, _note_state)


def _note_state(
    function: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType
) -> None:
    if package(frame) in ("torch", "torchrepro"):
        return  # torch restores only states that it has read, as `fork_rng` does
    state = hash(sys.modules["torch"].default_generator.get_state().numpy().tobytes())
    if state in _states_read:
        return
    if function.endswith(_GET):
        _states_read.append(state)
    elif not _run.restored_unread:
        _run.restored_unread = True
        begun = [e for e in _alive() if e.batches and e.samples_draw and not e.is_over]
        if begun and type(begun[-1].loading) is Loading:
            say_once(
                f"the program restored torch's generator after {begun[-1].batches} batches of an "
                "epoch. Samples draw from a base seed that torch draws when an epoch begins, so "
                "they may differ from the uninterrupted run: also save torch.get_rng_state() "
                "before the epoch, and restore it there (or: dataloader.seeding=none)"
            )
