"""Find generators that are made without a seed and draw before they are seeded.

The state of a `random.Random` is checked before it is seeded or set, and when it is freed. Numpy's
generators are written in C, so their states are compared from time to time: a draw goes unnoticed
if the program sets another state before the next comparison. Copies are not watched.
"""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import random
import weakref
from _random import Random as Words
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torchrepro.ground.callers import address
from torchrepro.seeding.observed_calls import Call, listen_before, stop_listening

_MANY = 200  # the most generators that are watched at a time
_BLOCK, _DOUBLINGS = 624, 14  # numbers in a block of a Mersenne Twister; 2 ** 14 are searched
_LISTENED_TO = (
    *(("random", "Random.seed"), ("random", "Random.setstate")),
    # The last calls of a child: when it sends its results, and when it ends.
    *(("multiprocessing.connection", "Connection._send_bytes"), ("os", "_exit")),
)


@dataclass(slots=True, eq=False)
class _Unseeded:
    find: Callable[[], Any]  # returns the generator; None if it was freed
    has_drawn: Callable[[], bool | None]  # None if it was seeded instead
    on_draw: Callable[[], object]
    process: int = field(default_factory=os.getpid)
    drawn_in_child: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 1))  # a shared byte


class UnseededGenerators:
    """Watches generators that were made without a seed, until each draws or is seeded."""

    def __init__(self) -> None:
        self._unseeded: list[_Unseeded] = []
        self._is_stopped = False
        atexit.register(self.stop)  # later, Python clears the modules that `settle` needs

    def add(self, generator: Any, on_draw: Callable[[], object]) -> Any:
        """Watch `generator` and return it; call `on_draw` if it draws before it is seeded.

        It is a `random.Random`, which is not kept alive, or a generator or bit generator of numpy.
        """
        if self._is_stopped:
            return generator  # a wrapper that another watch has wrapped still calls this
        import multiprocessing.connection  # noqa: F401 - `listen_before` ignores unloaded modules

        for module, name in _LISTENED_TO:
            listen_before(module, name, self._before)
        if len(self._unseeded) >= _MANY:
            self.settle()
            del self._unseeded[: -_MANY // 2]
        if isinstance(generator, random.Random):
            at = address(generator)
            first = _words(at)
            find = weakref.ref(generator, self.settle)
            self._unseeded.append(_Unseeded(find, lambda: _words(at) != first, on_draw))
        else:
            bits = getattr(generator, "bit_generator", generator)
            has_drawn = partial(_has_drawn, bits, bits.state)
            self._unseeded.append(_Unseeded(lambda: bits, has_drawn, on_draw))
        return generator

    def settle(self, last_of: Any = None) -> None:
        """Check which generators have drawn, and forget the generators that were seeded.

        If `last_of` is passed, check only this generator, for the last time: a generator that is
        about to be seeded, or the weak reference of a generator that is being freed.
        """
        for watched in [*self._unseeded]:
            generator = watched.find()
            is_last = last_of is not None and (last_of is generator or last_of is watched.find)
            if not is_last and (last_of is not None or generator is None):
                continue
            drew = bool(watched.drawn_in_child[0]) or watched.has_drawn()
            if is_last or drew is not False:
                with suppress(ValueError):  # another thread has removed it
                    self._unseeded.remove(watched)
            if drew:
                watched.drawn_in_child[0] = os.getpid() != watched.process
                watched.on_draw()

    def stop(self) -> None:
        """Check all generators for the last time, and stop watching."""
        self.settle()
        self._unseeded.clear()
        self._is_stopped = True
        stop_listening(self._before)
        atexit.unregister(self.stop)

    def _before(self, call: Call) -> None:
        self.settle(call.args[0] if call.function.startswith("random.") else None)


def _words(at: int) -> bytes:
    """Return the state of the `random.Random` at the address `at`.

    The state is part of the object, so it can be read even while the object is being freed.
    """
    head = object.__basicsize__
    return ctypes.string_at(at + head, Words.__basicsize__ - head)


def _has_drawn(generator: Any, first: Any) -> bool | None:
    """Return whether a bit generator has drawn since the state `first`; None if it was seeded."""
    if generator.seed_seq is None:
        return None  # `RandomState.seed` sets it to None
    before, present = first["state"], generator.state
    after = present["state"]
    if "inc" in before:
        spawned = generator.seed_seq.n_children_spawned > 0
        return spawned or before != after if before["inc"] == after["inc"] else None
    if (before["key"] == after["key"]).all():
        return bool(before["pos"] != after["pos"])
    # If it has drawn, its present block of numbers is one of the blocks that follow the first one.
    later, block = type(generator)(0), type(generator)(0)
    later.state, block.state = first, present | {"state": after | {"pos": 0}}
    later.random_raw(_BLOCK - before["pos"], output=False)
    start = block.random_raw()
    parts = (later.random_raw(_BLOCK << power)[::_BLOCK] for power in range(_DOUBLINGS))
    return any((starts == start).any() for starts in parts) or None
