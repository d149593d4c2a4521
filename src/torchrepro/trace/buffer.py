"""The record buffer: the records of the step that is running, until the store takes them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchrepro.trace.device_fingerprint import Pending, fetch
from torchrepro.trace.fingerprint_cache import FingerprintCache, InFlight
from torchrepro.trace.frames import ModuleNames, source_of
from torchrepro.trace.op_facts import shapes_text
from torchrepro.trace.reader import INPUT, OUTPUT

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from torchrepro.trace.frames import Place
    from torchrepro.trace.request import Request
    from torchrepro.trace.store import Row, Store

Taken = tuple[int, int, int, Any, Any]
"""A record as it is taken: thread, site, argument, inputs, outputs; some not there yet."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a step's records came to."""

    first: int
    """The id of the first of them."""
    count: int


class RecordBuffer:
    """Records in the order in which they were taken, and the names that they refer to."""

    def __init__(self) -> None:
        self.taken: list[Taken] = []
        self.sites: dict[Hashable, int] = {}
        self.arguments: dict[Hashable, int] = {}
        self.moved = 0
        """Records of the step that is running which the store has already."""
        self.later = False
        """Whether some fingerprints among the records are not there yet."""
        self._texts: dict[str, int] = {"": 0}
        self._described: dict[tuple[str, ...], int] = {}
        self._threads = 0
        self._new_sites: list[tuple[int, tuple[str, ...]]] = []
        self._new_arguments: list[tuple[int, str]] = []
        self._new_threads: list[tuple[int, str]] = []
        self._lock = threading.RLock()

    def new_site(self, key: Hashable, phase: str, place: Place, op: str, shapes: Any) -> int:
        """Give the records of one kind a number, known by `key` from now on."""
        site = (phase, place.module, op, source_of(place), shapes_text(shapes))
        with self._lock:
            number = self._described.get(site)
            if number is None:
                number = self._described[site] = len(self._described) + 1
                self._new_sites.append((number, site))
            self.sites[key] = number
            return number

    def new_argument(self, key: Hashable, text: str) -> int:
        """Give a text of arguments a number, known by `key` from now on."""
        with self._lock:
            number = self._texts.get(text)
            if number is None:
                number = self._texts[text] = len(self._texts)
                self._new_arguments.append((number, text))
            self.arguments[key] = number
            return number

    def new_thread(self) -> int:
        """Give the running thread a number."""
        with self._lock:
            number, self._threads = self._threads, self._threads + 1
            self._new_threads.append((number, threading.current_thread().name))
            return number

    def take(self, thread: int, site: int, argument: int, inputs: Any, outputs: Any) -> int:
        """Take a record; returns how many there are. What is not there yet is completed later."""
        taken = self.taken
        try:
            taken.append((thread, site, argument, b"".join(inputs), b"".join(outputs)))
        except TypeError:
            self.later = True
            taken.append((thread, site, argument, inputs, outputs))
        return len(taken)

    def move(self, store: Store, step: int) -> None:
        """Hand the records taken so far to `store`; the step goes on."""
        with self._lock:
            count = len(self.taken)
            taken = self.taken[:count]  # other threads may add to the list meanwhile
            del self.taken[:count]
            store.add_sites(self._new_sites)
            store.add_arguments(self._new_arguments)
            store.add_threads(self._new_threads)
            self._new_sites, self._new_arguments, self._new_threads = [], [], []
            later, self.later = self.later, False
            self.moved += count
        store.add_records(step, _completed(taken) if later else taken)

    def end_step(self, store: Store, step: int) -> Written:
        """Hand what is left of a step to `store`, and say what the step came to."""
        self.move(store, step)
        count, self.moved = self.moved, 0
        return Written(store.records - count + 1, count)


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

    @property
    def wants_step(self) -> bool:
        """Whether the running step is one of those to record."""
        return self.request.wants(self.step)


def _completed(taken: list[Taken]) -> list[Row]:
    """Return records with all that was not there yet when they were taken."""
    open_ones = (digests for one in taken for digests in one[3:] if not isinstance(digests, bytes))
    complete(digest for digests in open_ones for digest in digests)
    return [
        (thread, site, argument, joined(inputs, INPUT), joined(outputs, OUTPUT))
        for thread, site, argument, inputs, outputs in taken
    ]


def joined(digests: Any, length: int) -> bytes:
    """Return digests one after the other, those that come later cut to `length` bytes."""
    if isinstance(digests, bytes):
        return digests
    try:
        return b"".join(digests)
    except TypeError:
        complete(digests)
        return b"".join(
            digest if isinstance(digest, bytes) else digest.bytes[:length] for digest in digests
        )


def complete(digests: Iterable[Any]) -> None:
    """Wait for digests that are not there yet, for those of one device together.

    What is no digest, the bytes of one that is there, is passed over.
    """
    landed = [digest.land() if isinstance(digest, InFlight) else digest for digest in digests]
    fetch([digest for digest in landed if isinstance(digest, Pending)])
