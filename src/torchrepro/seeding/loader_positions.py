"""How far a program has come with a loader, and how another run goes on there.

An epoch is taken up as its program would: the generators are put where they stood as the epoch
began, the iteration starts, the batches that are done are passed over, and the generators are put
where they stood when the epoch was interrupted.
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

PutBack = Callable[[], None]


@dataclass(slots=True, eq=False)
class _Known:
    """A loader with generators of its own, and those that are made from it."""

    kind: str
    number: int
    epochs: int = 0  # how many it has begun


@dataclass(slots=True)
class Resumption:
    """An interrupted epoch that the next iteration of a loader takes up.

    `put_back` puts every generator where it stood at the interruption. A program may pass over the
    batches that are done itself; `skip` of them are passed over here.
    """

    place: Mapping[str, Any]
    put_back: PutBack
    skip: int = 0
    found_epochs: list[int] = field(default_factory=list)  # of samplers, as it was taken up
    iterations: int = 0  # how many have begun since

    def begin(self, loader: Any) -> None:
        put_states(loader, self.place["start"])
        named, saved = named_loading_of(loader), self.place["named"]
        if named is not None and saved is not None:
            named.resume(saved["epoch"], saved["program_seed"])
        say_other_reading(loader, self.place["reading"])

    def count_on(self, loader: Any) -> None:
        """Have the samplers of `loader` count the epochs of the uninterrupted run.

        Whoever sets them has begun at 0 again, or they count by themselves from where they were.
        """
        counting = _counting_parts(loader)
        if not self.iterations:
            self.found_epochs = [part.epoch for part in counting]
        rows = zip(counting, self.found_epochs, self.place["samplers"], strict=False)
        for part, found, saved in rows:
            if part.epoch == found + self.iterations:
                part.set_epoch(saved + self.iterations)
        self.iterations += 1


_awaited: list[Resumption] = []  # interrupted epochs that wait for a loader of their kind
_ended: list[Resumption] = []  # saved at their last batch: who skips all of one takes it up
_resting: list[Mapping[str, Any]] = []  # what `resting` found, for the next epoch of each kind
_taken_up: WeakKeyDictionary[Any, Resumption] = WeakKeyDictionary()  # by loader, next or last
_known: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()  # loaders with own generators
_lived_for_one: Counter[str] = Counter()  # those of each kind that were gone after one epoch
_late: list[tuple[PutBack, int]] = []
# Iterators that begin with the first batch, in order of their making, each with what begins it.
_waiting: WeakKeyDictionary[Any, tuple[Delivery, Callable[[Any], Any]]] = WeakKeyDictionary()
_deliveries: WeakSet[Delivery] = WeakSet()
_followed: WeakKeyDictionary[Any, Delivery] = WeakKeyDictionary()  # by torch's iterator, the last
_beginning: list[Delivery] = []
_NO_PLACE: Mapping[str, Any] = {"batches": 0, "first": None, "last": None}
_begun = iter(range(2**63))
_DEPTH, _FEW = 5, 100  # how deep, and in how long lists, a dataset's own generators are looked for
_first_of_run = -1


class Delivery:
    """How far the program has come in one epoch of a loader.

    Made as the program asks for an iterator, it begins the epoch (`begin`) and is then passed each
    batch (`advance`). It keeps alive neither loader nor iterator, and lives as long as the latter.

    It takes up a resumption: by default the one that waits for the loader, if any. `states` are
    those of the generators as the epoch began, `batches` those that the program has got, with those
    that a sampler left out, and `skip` those that it is not to get.
    """

    def __init__(self, loader: Any, resumption: Resumption | None = None) -> None:
        self._loader: Callable[[], Any] = ref(loader) if is_kept(loader) else lambda: loader
        self._iterator: Callable[[], Any] = lambda: None
        self._is_read_ahead = resumption is None  # by a framework, of which nobody knows how far
        self.resumption = resumption or _next_resumption(loader)
        self.skip = 0 if self.resumption is None else self.resumption.skip
        self.loading: Loading | None = None
        self.number = next(_begun)
        self.is_over = self._is_reading = False
        self.samples_draw = False  # whether the first sample read in this process drew numbers
        self._first: Mapping[str, Any] | None = None
        self._last: Mapping[str, Any] | None = None

    @property
    def loader(self) -> Any:
        """The loader, or what its iterator has of it once it is gone."""
        loader, iterator = self._loader(), self._iterator()
        if loader is not None or iterator is None:
            return loader
        kept = vars(iterator)
        return SimpleNamespace(dataset=kept["_dataset"], sampler=kept["_index_sampler"])

    def begin(self, start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin the epoch; return the iterator that `start` makes."""
        loader, resumption = self._loader(), self.resumption
        self.known = _know(loader)
        if self.known is not None:
            self.known.epochs += 1
        if resumption is not None:
            resumption.begin(loader)
        elif _resting or _ended:
            kind, before = kind_of(loader), []
            for saved in [each for each in _resting if each["kind"] == kind][:1]:
                _resting.remove(saved)
                put_states(loader, saved["own"])
                before.append(saved["reading"])
            for ended in [each for each in _ended if each.place["kind"] == kind][:1]:
                _ended.remove(ended)
                before.append(ended.place["reading"])
            if before:
                say_other_reading(loader, before[0])
        taken = _taken_up.get(loader) if is_kept(loader) else None
        if taken is not None:
            taken.count_on(loader)
        self.epochs = [part.epoch for part in _counting_parts(loader)]
        self.reading = reading_of(loader)
        self._keeps_place = hasattr(loader, "next_iter_state")  # it is one of torchdata's
        self.batches = unskipped(_top_sampler(loader))[1]
        self.states = read_states(loader)
        _beginning.append(self)
        try:
            begun = start()
        finally:
            _beginning.pop()
        iterator = self._iterator()
        iterator = begun if iterator is None else iterator
        self.batches += getattr(iterator, "_num_yielded", 0)  # torchdata's go on themselves
        self._reads_here = not getattr(iterator, "_num_workers", 0)
        _deliveries.add(self)
        if resumption is not None and not resumption.place["batches"]:
            self._go_on()  # a rank to which another one sends its batches gets none here
        return begun

    def of_iterator(self, iterator: Any) -> None:
        """Note the iterator of torch that the epoch has begun with."""
        self._iterator = ref(iterator)
        if type(iterator).__hash__ is not None:
            _followed[iterator] = self

    @property
    def is_in_use(self) -> bool:
        """Whether the program has the iterator: a loader itself keeps one whose workers live on."""
        kept = getattr(self._loader(), "_iterator", None)
        if kept is None or kept is not self._iterator():
            return True
        del kept
        return _references(self._iterator) > _BY_ONE

    def seeded_by(self, loading: Loading) -> None:
        """Note what seeds the samples: its requests may leave out the batches to pass over."""
        names_samples = self.skip and not reads_items(self.loader)
        if names_samples and not _holds_generator(self.loader.dataset):
            loading.start = loading.start or self.skip
        self.loading = loading
        self.batches += loading.start
        self.skip = max(self.skip - loading.start, 0)
        saved = None if self.resumption is None else self.resumption.place["given"]
        loading.given = loading.given if saved is None else Given(*map(bytes.fromhex, saved))

    def advance(self, read: Callable[[], Any]) -> Any:
        """Return the batch that the program is to get next, of those that `read` returns."""
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
            self._go_on()
            raise
        self.batches += 1
        if self.resumption is not None and self.batches >= self.resumption.place["batches"]:
            self._go_on()
        return batch

    def _before_reading(self) -> None:
        # A sampler first draws as the first batch is asked for. What no stream seeds draws from the
        # program's generators, whose numbers a training draws as well: in a resumed run a batch
        # that was read ahead draws the numbers of the interrupted one.
        draws_on = self._is_read_ahead and (self.loading is None or reads_items(self.loader))
        place = _NO_PLACE if self.resumption is None else self.resumption.place
        left = place["batches"] - self.batches
        if self._first is None:
            if place["first"] is not None:
                put_states(self.loader, place["first"])
            self._first = read_states(self.loader)
        elif draws_on and left == 1 and place["last"] is not None:
            put_states(self.loader, place["last"])
        if left <= 0 and reads_items(self.loader):  # no order is still to be drawn
            self._go_on()
        if draws_on:
            self._last = read_states(self.loader)

    def _go_on(self) -> None:
        if self.resumption is not None:
            resumption, self.resumption = self.resumption, None
            resumption.put_back()

    def place(self) -> dict[str, Any]:
        named = self.loading if isinstance(self.loading, NamedLoading) else None
        given = None if self.loading is None else self.loading.given
        return {
            "kind": kind_of(self.loader),
            "number": self.number,
            "batches": self.batches,
            "reading": {} if self._keeps_place else self.reading,  # its own state says it
            "samplers": self.epochs,
            "named": named and {"epoch": named.epoch, "program_seed": named.program_seed},
            "given": given and [seed.hex() for seed in given],
            "keeps_place": self._keeps_place,
            "start": encoded_states(self.states),
            "first": encoded_states(self._first),
            "last": encoded_states(self._last),
            "over": self.is_over,
        }


def _references(weak: Callable[[], Any]) -> int:
    return sys.getrefcount(weak())


_held_once = [Counter[str]()]
_BY_ONE = _references(ref(_held_once[0]))  # interpreters count references on their stack or not


def followed(iterator: Any) -> Delivery | None:
    """Return the epoch that `iterator` is in, which begins now if it waits for its first batch."""
    if type(iterator).__hash__ is None:
        return None
    if len(_waiting) and iterator in _waiting:
        _begin_in_turn(iterator)
    return _followed.get(iterator)


def begins_late() -> bool:
    return bool(_late)


def wait(iterator: Any, delivery: Delivery, start: Callable[[Any], Any]) -> None:
    """Have `delivery` begin by ``start(iterator)`` as the first batch of a loader is asked for."""
    _waiting[iterator] = delivery, start


def _begin_in_turn(iterator: Any) -> None:
    # After those that were made before and wait for their first batch as well.
    iterators = list(_waiting)
    turn = next(n for n, each in enumerate(iterators, 1) if each is iterator)
    for put_back, together in _late:
        put_back()
        turn = max(turn, together)
    _late.clear()
    for each in iterators[:turn]:
        _begin_waiting(each)


def _begin_waiting(iterator: Any) -> None:
    delivery, start = _waiting.pop(iterator)
    delivery.begin(partial(start, iterator))


def named_loading_of(loader: Any) -> NamedLoading | None:
    found = getattr(loader, "worker_init_fn", None)
    if not isinstance(found, NamedLoading):
        found = loaders.register.loadings.get(loader) if is_kept(loader) else None
    return found if isinstance(found, NamedLoading) else None


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


def samplers_within(sampler: Any) -> Iterator[Any]:
    # And the one that it makes batches of or shares out, and so on.
    seen: list[Any] = []
    while sampler is not None and all(sampler is not other for other in seen):
        seen.append(sampler)
        yield sampler
        inner = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner


def delivery_of(loader: Any) -> Delivery | None:
    return next((each for each in _beginning if each.loader is loader), None)


def _alive() -> list[Delivery]:
    in_use = [each for each in _deliveries if each.is_in_use]
    return sorted(in_use, key=lambda each: each.number)


def places(*, over: bool) -> list[dict[str, Any]]:
    """Return the places of the loaders that the program is in the middle of, first begun first.

    Where `over`, of those at their end that somebody has batches left of.
    """
    return [each.place() for each in _alive() if each.is_over == over]


def latest_delivery(loader: Any) -> Delivery | None:
    return next((each for each in reversed(_alive()) if each.loader is loader), None)


def place_of(loader: Any) -> dict[str, Any] | None:
    """Return how far the program has come in the latest iteration of `loader` that is alive."""
    latest = latest_delivery(loader)
    return None if latest is None else latest.place()


def _know(loader: Any) -> _Known | None:
    if not is_kept(loader):
        return None
    if loader not in _known and _own_slots(loader):
        known = _known[loader] = _Known(kind_of(loader), next(_begun))
        finalize(loader, _note_end, known)
    return _known.get(loader)


def _note_end(known: _Known) -> None:
    if known.number > _first_of_run:
        _lived_for_one[known.kind] += known.epochs == 1


def resting() -> list[dict[str, Any]]:
    """Return the own generators of the loaders that the program is not in the middle of.

    A program that makes a loader for each epoch begins each with generators of its own.
    """
    busy = [each.known for each in _alive() if not each.is_over]
    lasting = {
        known.number: (known, loader)
        for loader, known in _known.items()
        if known not in busy and (known.epochs > 1 or not _lived_for_one[known.kind])
    }
    return [
        {
            "kind": known.kind,
            "own": encoded_states(_read(_own_slots(loader))),
            "reading": reading_of(loader),
        }
        for _, (known, loader) in sorted(lasting.items())
    ]


def await_resting(saved: Sequence[Mapping[str, Any]]) -> None:
    """Put the generators of each loader in `saved` where they stood, once it begins an epoch.

    A run begins: what loaders did before it does not count.
    """
    global _first_of_run  # noqa: PLW0603 - a fact about the process
    _first_of_run = next(_begun)
    _resting[:] = saved
    _lived_for_one.clear()


def begin_late(put_back: PutBack, together: int) -> None:
    """Have the loaders that are iterated next begin as the first batch is asked for.

    `put_back` is called before, and as many as are read `together` begin at once. For a framework
    that begins an epoch earlier as a run is resumed.
    """
    _late[:] = [(put_back, together)]


def await_loaders(
    interrupted: Sequence[Mapping[str, Any]],
    put_back: PutBack,
    ended: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Have the next loader of the kind of each place of an `interrupted` epoch take it up.

    The program passes over the batches that are done. `put_back` puts every generator where it
    stood when the run was interrupted. Places of `ended` epochs are for `skip_batches`.
    """
    _awaited[:] = [Resumption(place, put_back) for place in interrupted]
    _ended[:] = [Resumption(place, put_back) for place in ended]


def skip_batches(loader: Any, other: Any, number: int) -> bool:
    """Have `other` count as `loader` without the first `number` batches of its epoch.

    Returns whether that leaves nothing of an epoch that had come to its end.
    """
    kind, known = kind_of(loader), _know(loader)
    if known is not None:
        _known[other] = known
    for resumption in _ended:
        if resumption.place["kind"] == kind and number >= resumption.place["batches"]:
            _ended.remove(resumption)
            _taken_up[other] = resumption
            return True
    return False


def batches_done(loader: Any) -> int | None:
    """Return how many batches of the epoch that waits for `loader` are done; None without one."""
    resumption = _awaited_by(loader)
    return None if resumption is None else int(resumption.place["batches"])


def behind() -> list[str]:
    """Return in words which loaders have begun an interrupted epoch and are not where it was."""
    return [
        f"the place of the loader over {kind_of_dataset(each.loader.dataset)} in its epoch"
        for each in _alive()
        if each.resumption is not None
        and 0 < each.batches < each.resumption.place["batches"] - each.skip
    ]


def kinds_in_use() -> set[str]:
    return {kind_of(each.loader) for each in _alive() if each.batches}


def take_up(loader: Any, place: Mapping[str, Any], put_back: PutBack, skip: int = 0) -> None:
    """Have the next iteration of `loader` take up `place`, and pass over `skip` batches."""
    _awaited[:] = [each for each in _awaited if each.place["number"] != place["number"]]
    _taken_up[loader] = Resumption(place, put_back, skip)


def forget_places() -> None:
    """Have no loader go on anywhere: the profile under which a run went on is taken back."""
    for waiting in (_awaited, _ended, _resting, _lived_for_one, _late, _taken_up):
        waiting.clear()
    for iterator in list(_waiting):
        _begin_waiting(iterator)  # they are as torch's own after this


def _awaited_by(loader: Any) -> Resumption | None:
    kind = kind_of(loader) if _awaited else ""
    return next((each for each in _awaited if each.place["kind"] == kind), None)


def _next_resumption(loader: Any) -> Resumption | None:
    own = _taken_up.get(loader) if is_kept(loader) else None
    if own is not None and not own.iterations:
        return own
    resumption = _awaited_by(loader)
    if resumption is not None:
        _awaited.remove(resumption)
        _taken_up[loader] = resumption
    return resumption


def kind_of(loader: Any) -> str:
    """Return what a loader and its counterpart in a resumed run have in common."""
    *_, sampler = None, *samplers_within(_top_sampler(loader))
    return f"{kind_of_dataset(getattr(loader, 'dataset', loader))} {type(sampler).__name__}"


def _attributes(part: Any) -> dict[str, Any]:
    """Return what `part` holds, without asking its class, which may make up any attribute."""
    with suppress(AttributeError):
        held: dict[str, Any] = object.__getattribute__(part, "__dict__")
        return held
    return {}


def _top_sampler(loader: Any) -> Any:
    # Not what a class makes up each time it is asked: that would draw an order.
    held = _attributes(loader)
    batches = held.get("batch_sampler")
    return held.get("sampler") if batches is None else batches


def say_other_reading(loader: Any, saved: Mapping[str, int]) -> None:
    """Say if what `reading_of` gives for `loader` is not what it was as its run was saved."""
    now = reading_of(loader)
    others = [name for name in saved.keys() & now.keys() if saved[name] != now[name]]
    if not others or world().rank:
        return
    before, after = (
        ", ".join(f"{name}={its[name]}" for name in sorted(others)) for its in (saved, now)
    )
    say(
        f"the loader over {kind_of_dataset(loader.dataset)}: it was saved with {before} and goes "
        f"on with {after}, so its batches hold other samples than those of the uninterrupted run; "
        f"resume with {before} to go on exactly"
    )


def reading_of(loader: Any) -> dict[str, int]:
    """Return the size of a batch of `loader`, and the seeds of its samplers, where they say them.

    A sampler of the program's own may have anything under these names.
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
    """Return the samplers and the dataset of `loader` that have a `set_epoch` of their own."""
    parts = (*_samplers(loader), getattr(loader, "dataset", None))
    own = {id(part): part for part in parts if callable(getattr(part, "set_epoch", None))}
    return list(own.values())


def _counting_parts(loader: Any) -> list[Any]:
    return [p for p in parts_with_epochs(loader) if isinstance(getattr(p, "epoch", None), int)]


def _samplers(loader: Any) -> list[Any]:
    tops = map(_attributes(loader).get, ("sampler", "batch_sampler"))
    return [part for top in tops for part in samplers_within(top)]


def reads_items(loader: Any) -> bool:
    """Whether `loader` reads an `IterableDataset`, which names no samples."""
    from torch.utils.data import IterableDataset

    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def _holds_generator(dataset: Any) -> bool:
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


def _own_slots(loader: Any) -> dict[str, Slot]:
    slots: dict[str, Slot] = {}
    known: list[Any] = []
    for part in (loader, *_samplers(loader)):
        for name, own in _attributes(part).items():
            kind = generator_kind(own)
            if kind is not None and all(own is not other for other in known):
                known.append(own)
                slots[f"{len(known)} {name}"] = kind.slot(own)
    return slots


def _read(slots: Mapping[str, Slot]) -> Mapping[str, Any]:
    return {name: slot.read() for name, slot in slots.items()}


def read_states(loader: Any) -> Mapping[str, Any]:
    """Return where the generators stand that the order of `loader` may come from."""
    return _read({**host_slots(), **_own_slots(loader)})


def put_states(loader: Any, states: Mapping[str, Any]) -> None:
    slots = {**host_slots(), **_own_slots(loader)}
    for name in states.keys() & slots.keys():
        slots[name].write(decoded(states[name]))


def encoded_states(states: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if states is None else {name: encoded(state) for name, state in states.items()}


# A program may put torch's generator where it was at a step, and not where it was as the epoch
# began. That is exact in plain Python as long as it loads in the main process, where its samples
# draw from that generator. Under `auto` they draw from the base seed with which the epoch began,
# which is then another than in the uninterrupted run: this is said.

_READ, _PUT = "get_rng_state", "set_rng_state"
_states_read: deque[int] = deque(maxlen=1000)  # digests of those that the program read here
_states_put: list[bool] = []  # an entry once it has put one back that it had not read here


def watch_own_resumes(*, begins: bool) -> None:
    """Listen to the program's reading and putting of torch's generator from now on, or stop it."""
    _states_read.clear()
    _states_put.clear()
    if not begins:
        stop_listening(_note_state)
        return
    for module in ("torch", "torch.random"):
        for name in (_READ, _PUT):
            listen(module, name, _note_state)


def _note_state(
    function: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType
) -> None:
    if package(frame) in ("torch", "torchrepro"):
        return  # `fork_rng` and checkpointed layers put back what they have read
    state = hash(sys.modules["torch"].default_generator.get_state().numpy().tobytes())
    if state in _states_read:
        return
    if function.endswith(_READ):
        _states_read.append(state)
    elif not _states_put:
        _states_put.append(True)
        late = [e for e in _alive() if e.batches and e.samples_draw and not e.is_over]
        if late and type(late[-1].loading) is Loading:
            say_once(
                f"the program put torch's generator back after {late[-1].batches} batches of an "
                "epoch. Samples draw from a base seed that torch draws as an epoch begins, so they "
                "may not be those of the uninterrupted run: save torch.get_rng_state() before the "
                "epoch as well, and put it back there (or: dataloader.seeding=none)"
            )
