"""What a recording holds in memory: the records of the running step, and its other state."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any

from torchrepro.fork_safety import fork_safe_lock
from torchrepro.trace.fingerprint import Pending, fetch
from torchrepro.trace.fingerprint_cache import FingerprintCache, InFlight
from torchrepro.trace.format import INPUT, OUTPUT
from torchrepro.trace.frames import ModuleNames, source_of
from torchrepro.trace.op_facts import shapes_text

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from torchrepro.trace.format import Row
    from torchrepro.trace.frames import Place
    from torchrepro.trace.request import Request
    from torchrepro.trace.store import Store

IN_MEMORY = 1 << 16
"""Records of one step that are kept in memory; more go to the store at once."""


class RecordBuffer:
    """Records in the order in which they were taken, and the names that they refer to."""

    def __init__(self) -> None:
        self.rows: list[Row] = []  # whose inputs and outputs may be lists of missing digests
        self.sites: dict[Hashable, int] = {}
        self.arguments: dict[Hashable, int] = {}
        self.moved = 0
        """Records of the running step that the store has already."""
        self._incomplete = False  # whether digests of a row, of this step or before, came later
        self._texts: dict[str, int] = {"": 0}
        self._number_of_texts = 0
        self._passing: dict[int, tuple[str, int]] = {}
        self._site_numbers: dict[tuple[str, ...], int] = {}
        self._threads: dict[int, int] = {}  # by the identifier of the thread
        self._count = 0
        self._new_sites: list[tuple[str, ...]] = []  # in the order of their numbers
        self._new_arguments: list[str] = []
        self._new_threads: list[str] = []
        self._lock = threading.RLock()

    def new_site(self, key: Hashable, phase: str, place: Place, op: str, shapes: Any) -> int:
        """Give the records of one kind a number; `key` stands for it from now on."""
        site = (phase, place.module, op, source_of(place), shapes_text(shapes))
        with self._lock:
            number = self._site_numbers.get(site)
            if number is None:
                number = self._site_numbers[site] = len(self._site_numbers) + 1
                self._new_sites.append(site)
            self.sites[key] = number
            return number

    def new_argument(self, key: Hashable, text: str) -> int:
        """Give a text of arguments a number; `key` stands for it from now on."""
        with self._lock:
            number = self._texts.get(text)
            if number is None:
                number = self._texts[text] = self._number_of_texts = self._number_of_texts + 1
                self._new_arguments.append(text)
            self.arguments[key] = number
            return number

    def passing_argument(self, owner: int, text: str) -> int:
        """Give a text a number, which it keeps until its owner has another text.

        Texts that change with every step, as a learning rate does, are not held in memory.
        """
        with self._lock:
            known = self._passing.get(owner)
            if known is None or known[0] != text:
                self._number_of_texts += 1
                self._new_arguments.append(text)
                known = self._passing[owner] = text, self._number_of_texts
            return known[1]

    def new_thread(self) -> int:
        """Give the running thread a number."""
        with self._lock:
            number, self._count = self._count, self._count + 1
            self._threads[threading.get_ident()] = number
            self._new_threads.append(threading.current_thread().name)
            return number

    def thread(self, otherwise: int) -> int:
        """Return the number of the running thread; one of autograd's has none of its own."""
        return self._threads.get(threading.get_ident(), otherwise)

    def take(self, thread: int, site: int, argument: int, inputs: Any, outputs: Any) -> int:
        """Take a record; returns how many there are. Missing digests are completed later."""
        rows = self.rows
        try:
            joined = outputs if outputs.__class__ is bytes else b"".join(outputs)
            rows.append((thread, site, argument, b"".join(inputs), joined))
        except TypeError:
            self._incomplete = True
            rows.append((thread, site, argument, inputs, outputs))
        return len(rows)

    def take_each(self, sites: list[int], arguments: list[int], outputs: list[Any]) -> int:
        """Take a record without inputs of each output; returns how many records there are."""
        rows, thread = self.rows, self.thread(0)
        if {bytes}.issuperset(map(type, outputs)):
            rows.extend(zip(repeat(thread), sites, arguments, repeat(b""), outputs, strict=False))
        else:
            for site, argument, output in zip(sites, arguments, outputs, strict=True):
                self.take(thread, site, argument, (), (output,))
        return len(rows)

    def move(self, store: Store) -> None:
        """Hand the records taken so far to `store`; the step goes on."""
        with self._lock:
            count = len(self.rows)
            rows = self.rows[:count]  # other threads may add to the list meanwhile
            del self.rows[:count]
            store.add_sites(self._new_sites)
            store.add_arguments(self._new_arguments)
            store.add_threads(self._new_threads)
            self._new_sites, self._new_arguments, self._new_threads = [], [], []
            self.moved += count
        if self._incomplete:
            missing = (each for row in rows for each in row[3:] if not isinstance(each, bytes))
            _complete([digest for digests in missing for digest in digests])
            rows = [(*row[:3], joined(row[3], INPUT), joined(row[4], OUTPUT)) for row in rows]
        store.add_records(rows)

    def end_step(self, store: Store) -> tuple[int, int]:
        """Hand the rest of a step to `store`; returns the first id and the count of its records."""
        self.move(store)
        count, self.moved = self.moved, 0
        return store.records - count + 1, count


@dataclass(slots=True)
class RecordingState:
    """What the parts of one recording share."""

    request: Request
    spill: Callable[[], None]
    """Called where a step has more records than are kept in memory."""
    step: int = 0
    """The step that is running."""
    names: ModuleNames = field(default_factory=ModuleNames)
    cache: FingerprintCache = field(default_factory=FingerprintCache)
    buffer: RecordBuffer = field(default_factory=RecordBuffer)
    # Held from an op's record to its details, and while a step is handed to the store: another
    # thread may record, or end the step, in between.
    lock: Any = field(default_factory=fork_safe_lock)

    @property
    def wants_step(self) -> bool:
        """Whether the running step is one of those to record."""
        return self.request.wants(self.step)


def joined(digests: Any, length: int) -> bytes:
    """Return digests one after the other; waits for missing ones, and cuts those to `length`."""
    if isinstance(digests, bytes):
        return digests
    try:
        return b"".join(digests)  # all there, as they mostly are
    except TypeError:
        _complete(digests)
    return b"".join(
        digest if isinstance(digest, bytes) else digest.bytes[:length] for digest in digests
    )


def _complete(digests: list[Any]) -> None:
    """Wait for digests that are not there yet, for those of one device together."""
    landed = [digest.land() if isinstance(digest, InFlight) else digest for digest in digests]
    fetch([digest for digest in landed if isinstance(digest, Pending)])
