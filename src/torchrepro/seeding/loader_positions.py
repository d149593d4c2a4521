"""Record how far a program has read each loader, and what identifies a loader in another run.

`LoaderEpochs` has every epoch that the program reads. `ResumedRun` decides which epochs resume an
interrupted epoch. An interrupted epoch is resumed in four steps: restore the generators' states
from the start of the epoch, start the iteration, skip the batches that are done, and restore the
generators' states from the interruption.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

from torchrepro.ground.console import say
from torchrepro.seeding import generators
from torchrepro.seeding.generators import Given, Slot, generator_kind, host_slots
from torchrepro.seeding.loader import Loading, NamedLoading, loaders, unskipped
from torchrepro.seeding.streams import world

Restore = Callable[[], None]
_NOT_RESUMED: Mapping[str, Any] = {"batches": 0, "given": None, "first": None, "last": None}
_DEPTH, _FEW = 5, 100  # maximum depth and list length


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


class Delivery:
    """The program's progress in one epoch of a loader.

    An instance is created when the program requests an iterator. `begin` begins the epoch, and
    `advance` returns each batch. The instance refers weakly to a DataLoader and its iterator, and
    is freed with the iterator.

    It resumes an interrupted epoch if `resumption` is set. `prepare` is called with the loader and
    `resumption` when the epoch begins, and restores the generators of a resumed run.
    `states` are the states of the generators when the epoch began. `batches` counts the batches
    that the program received or a sampler skipped. `skip` counts the batches still to be skipped.
    """

    def __init__(
        self,
        loader: Any,
        resumption: Resumption | None,
        prepare: Callable[[Any, Resumption | None], None],
    ) -> None:
        self._loader: Callable[[], Any] = ref(loader) if is_kept(loader) else lambda: loader
        self._iterator: Callable[[], Any] = lambda: None
        self._prepare = prepare
        self.late_start: Callable[[Any], Any] | None = None  # see `wait`
        self.resumption = resumption
        self._saved = _NOT_RESUMED if resumption is None else resumption.progress
        self.skip = 0 if resumption is None else resumption.skip
        self.loading: Loading | None = None
        self.number = next(epochs.numbers)
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
        loader = self._loader()
        self.owner = epochs.owner(loader)
        if self.owner is not None:
            self.owner.epochs += 1
        self._prepare(loader, self.resumption)
        self.epochs = [part.epoch for part in _counting_parts(loader)]
        self.reading = reading_of(loader)
        self._has_state = hasattr(loader, "next_iter_state")  # a loader of torchdata
        self.batches = unskipped(_top_sampler(loader))[1]
        self.states = read_states(loader)
        begun = epochs.begin(self, start)
        iterator = self._iterator()
        iterator = begun if iterator is None else iterator
        self.batches += getattr(iterator, "_num_yielded", 0)  # torchdata resumes by itself
        self._reads_here = not getattr(iterator, "_num_workers", 0)
        if not self._saved["batches"]:
            self._restore_once()  # this rank gets its batches from another rank
        return begun

    def wait(self, iterator: Any, start: Callable[[Any], Any]) -> None:
        """Delay the epoch: it begins by ``start(iterator)`` when a batch is read."""
        self.late_start = start
        self.note_iterator(iterator)

    def begin_late(self) -> None:
        """Begin an epoch that waits for its first batch."""
        start, self.late_start = self.late_start, None
        if start is not None:
            self.begin(partial(start, self._iterator()))

    def note_iterator(self, iterator: Any) -> None:
        """Remember torch's iterator over this epoch."""
        self._iterator = ref(iterator)
        epochs.follow(iterator, self)

    @property
    def is_behind(self) -> bool:
        """Return whether the program has read some batches, but not all that are done."""
        return 0 < self.batches < int(self._saved["batches"]) - self.skip

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
        if self._saved["given"] is not None:
            loading.given = Given(*map(bytes.fromhex, self._saved["given"]))

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
        if self.batches >= self._saved["batches"]:
            self._restore_once()
        return batch

    def _before_reading(self) -> None:
        # A sampler may draw its order at the first batch, so the states just before it are saved.
        # Unseeded samples draw from the same generators as the training. A prefetched batch was
        # read before the latest draws of the training. So the states just before the last batch are
        # saved as well.
        needs_last_states = self.loading is None or reads_items(self.loader)
        saved = self._saved
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
            resumption, self.resumption, self._saved = self.resumption, None, _NOT_RESUMED
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


_REFERENCED_ONCE = Counter[str]()
_BY_ONE = _references(ref(_REFERENCED_ONCE))  # some interpreters also count their stack


@dataclass(slots=True, eq=False)
class _GeneratorOwner:
    """A loader that has its own generators, and copies of that loader that skip batches."""

    signature: str
    number: int
    epochs: int = 0  # number of epochs that have begun


class LoaderEpochs:
    """The epochs that the program reads, and the loaders that have their own generators.

    `epochs` is the only instance. It lives as long as the process, because a loader may be used in
    several runs. It keeps no loader and no iterator alive. Epochs and loaders have numbers in the
    order in which the program first used them.
    """

    def __init__(self) -> None:
        self.numbers = count()
        self._deliveries: set[ref[Delivery]] = set()  # threads add while others read
        self._beginning: list[Delivery] = []
        # torch's iterator -> its latest epoch
        self._followed: WeakKeyDictionary[Any, Delivery] = WeakKeyDictionary()
        self._owners: WeakKeyDictionary[Any, _GeneratorOwner] = WeakKeyDictionary()  # by loader
        # Signature of loaders that died after one epoch -> number of the last such loader.
        self._single_epoch: dict[str, int] = {}
        self.late: tuple[Restore, int] | None = None  # see `begin_at_first_batch`

    def begin(self, delivery: Delivery, start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return the iterator that `start` creates. Until then, `beginning` returns `delivery`."""
        self._beginning.append(delivery)
        try:
            begun = start()
        finally:
            self._beginning.remove(delivery)
        self._deliveries.add(ref(delivery, self._deliveries.discard))
        return begun

    def beginning(self, loader: Any) -> Delivery | None:
        return next((epoch for epoch in self._beginning if epoch.loader is loader), None)

    def follow(self, iterator: Any, delivery: Delivery) -> None:
        if type(iterator).__hash__ is not None:
            self._followed[iterator] = delivery

    def followed(self, iterator: Any) -> Delivery | None:
        """Return the epoch that `iterator` reads, or None. Begin the epoch if it has not begun."""
        if type(iterator).__hash__ is None:
            return None
        delivery = self._followed.get(iterator)
        if delivery is not None and delivery.late_start is not None:
            self._begin_in_turn(delivery)
        return delivery

    def begin_at_first_batch(self, restore: Restore, together: int) -> None:
        """Delay the next epochs: when a first batch is read, call `restore`, and then begin them.

        At that moment the first `together` epochs begin. This is for a framework that creates the
        iterators earlier in a resumed run than in a new run.
        """
        self.late = (restore, together)

    def _waiting(self) -> list[Delivery]:
        waiting = [epoch for epoch in self._followed.values() if epoch.late_start is not None]
        return sorted(waiting, key=lambda epoch: epoch.number)

    def _begin_in_turn(self, delivery: Delivery) -> None:
        # Iterators that were created earlier, and are still waiting, begin before this one.
        number = self._waiting().index(delivery) + 1
        if self.late is not None:
            restore, together = self.late
            restore()
            number = max(number, together)
        self.begin_waiting(number)

    def begin_waiting(self, number: int | None = None) -> None:
        """Begin the first `number` epochs that wait for a batch, or all of them.

        Later epochs begin without delay.
        """
        self.late = None
        for delivery in self._waiting()[:number]:
            delivery.begin_late()

    def in_use(self) -> list[Delivery]:
        """Return each epoch whose iterator the program still has, oldest first."""
        living = filter(None, [reference() for reference in tuple(self._deliveries)])
        return sorted((e for e in living if e.is_in_use), key=lambda e: e.number)

    def latest(self, loader: Any) -> Delivery | None:
        """Return the latest epoch of `loader` that is still in use, or None."""
        return next((epoch for epoch in reversed(self.in_use()) if epoch.loader is loader), None)

    def behind(self) -> list[str]:
        """Return a text for each resumed loader that has not reached its interrupted batch."""
        return [
            f"the position of the loader over {kind_of_dataset(epoch.loader.dataset)} in its epoch"
            for epoch in self.in_use()
            if epoch.is_behind
        ]

    def owner(self, loader: Any) -> _GeneratorOwner | None:
        """Return the entry of `loader`, or None if it has no generators."""
        if not is_kept(loader):
            return None
        if loader not in self._owners and _loader_slots(loader):
            owner = self._owners[loader] = _GeneratorOwner(kind_of(loader), next(self.numbers))
            finalize(loader, self._note_end, owner)
        return self._owners.get(loader)

    def copied(self, loader: Any, copy: Any) -> None:
        """Note that `copy` has the generators of `loader`."""
        owner = self.owner(loader)
        if owner is not None:
            self._owners[copy] = owner

    def _note_end(self, owner: _GeneratorOwner) -> None:
        if owner.epochs == 1:
            latest = self._single_epoch.get(owner.signature, -1)
            self._single_epoch[owner.signature] = max(latest, owner.number)

    def resting(self, first_number: int) -> list[dict[str, Any]]:
        """Return the states of the loaders' own generators, except for loaders within an epoch.

        Omits a loader that the program creates for one epoch, as the next loader has new
        generators. Earlier loaders show this, if their number is `first_number` or higher.
        """
        busy = [delivery.owner for delivery in self.in_use() if not delivery.is_over]
        lasting = {
            owner.number: (owner, loader)
            for loader, owner in self._owners.items()
            if owner not in busy
            and (owner.epochs > 1 or self._single_epoch.get(owner.signature, -1) < first_number)
        }
        return [
            {
                "kind": owner.signature,
                "own": encoded_states(_read(_loader_slots(loader))),
                "reading": reading_of(loader),
            }
            for _, (owner, loader) in sorted(lasting.items())
        ]


epochs = LoaderEpochs()


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
    parts, seen = {id(dataset): dataset}, set[int]()
    for _ in range(_DEPTH):
        if any(map(generator_kind, parts.values())):
            return True
        seen |= parts.keys()
        within = [inner for part in parts.values() for inner in _parts_of(part)]
        parts = {id(part): part for part in within if id(part) not in seen}
    return False


def _parts_of(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple | dict):
        few = value if len(value) <= _FEW else ()
        return few.values() if isinstance(few, dict) else few
    return () if isinstance(value, type | ModuleType) else _attributes(value).values()


def _loader_slots(loader: Any) -> dict[str, Slot]:
    slots: dict[int, tuple[str, Slot]] = {}  # by address of the generator
    for part in (loader, *_samplers(loader)):
        for name, attribute in _attributes(part).items():
            generator_type = generator_kind(attribute)
            if generator_type is not None:
                slots.setdefault(id(attribute), (name, generator_type.slot(attribute)))
    return {f"{number} {name}": slot for number, (name, slot) in enumerate(slots.values(), 1)}


def _read(slots: Mapping[str, Slot]) -> Mapping[str, Any]:
    return {name: slot.read() for name, slot in slots.items()}


def read_states(loader: Any) -> Mapping[str, Any]:
    """Return the states of the global CPU generators and of the generators of `loader`."""
    return _read({**host_slots(), **_loader_slots(loader)})


def write_states(loader: Any, states: Mapping[str, Any]) -> None:
    slots = {**host_slots(), **_loader_slots(loader)}
    for name in states.keys() & slots.keys():
        slots[name].write(generators.decoded(states[name]))


def encoded_states(states: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if states is None:
        return None
    return {name: generators.encoded(state) for name, state in states.items()}
