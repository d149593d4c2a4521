"""Keeps a trace within so many bytes on disk while it is written: drops its oldest records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrepro.console import say
from torchrepro.messages import size
from torchrepro.seeding.ranks import world
from torchrepro.trace.request import LEVELS

if TYPE_CHECKING:
    from torchrepro.trace.request import Request
    from torchrepro.trace.store import Store

OVERHEAD = 1 << 16
"""Bytes that a step takes besides its own: pages that are written again, and the log's index."""

COARSEST = LEVELS[0]
SORTS = ("<>", "=")
"""How the level of steps whose records are dropped first, and then of others, is to `COARSEST`."""


def limit_of(store: Store, request: Request) -> SizeLimit | None:
    """Return what holds a store to its share of the size that a run may have; None for any size.

    Ranks have equal shares. A process that one of them starts has as much again.
    """
    if request.max_size is None:
        return None
    return SizeLimit(store, request.max_size // world().size)


@dataclass(slots=True)
class _Oldest:
    """The oldest step of a sort whose records are still there."""

    comparison: str
    after: int = -1


class SizeLimit:
    """Holds a store to a size, on the assumption that no step is larger than those before it.

    SQLite writes a step to a log, and later from there into its file, in which it uses the place
    of what was deleted. So there has to be room for the largest step up to now in the log, in the
    file, and once more for the step that is written before the next look.
    """

    def __init__(self, store: Store, most: int) -> None:
        self._store = store
        self._most = most
        self._largest = 0
        self._used = store.bytes_used
        self._oldest = [_Oldest(sort) for sort in SORTS]
        self._is_over = False
        self.dropped: list[int] = []
        """The first, the last and the number of the steps without records."""

    def hold(self) -> None:
        """Make room for the next step; called where one has been written."""
        store = self._store
        used = store.bytes_used
        self._largest = max(self._largest, used - self._used + OVERHEAD)
        room = self._most - 3 * self._largest
        if used > room:
            self._drop_to(room)
            store.commit()
            used = store.bytes_used
        self._used = used
        if store.bytes_on_disk + self._largest > self._most:
            store.shrink(file=store.bytes_of_file + 2 * self._largest > self._most)
            self._warn()

    def _drop_to(self, room: int) -> None:
        """Drop records of the oldest steps until no more than so many bytes are used."""
        for oldest in self._oldest:
            while self._store.bytes_used > room:
                found = self._store.next_step(oldest.after, oldest.comparison, COARSEST)
                if found is None:
                    break
                self._store.drop(*found)
                oldest.after = found[0]
                self._note(found[0])

    def _note(self, step: int) -> None:
        first, last, count = self.dropped or (step, step, 0)
        self.dropped = [min(first, step), max(last, step), count + 1]

    def _warn(self) -> None:
        """Say once that nothing is left to be dropped."""
        taken = self._store.bytes_on_disk
        if taken <= self._most or self._is_over:
            return
        self._is_over = True
        say(
            f"{self._store.path}: takes {size(taken)}, more than the {size(self._most)} that it "
            "may: no records are left that could be dropped\n    the run goes on, and the digests "
            "of each step are still written"
        )

    @property
    def count(self) -> int:
        """How many steps have no records any longer."""
        return self.dropped[2] if self.dropped else 0

    def in_words(self) -> str:
        """Return a sentence on the steps whose records were dropped."""
        first, last, count = self.dropped
        steps = f"step {first}" if count == 1 else f"{count:,} steps, {first} to {last},"
        return (
            f"to stay within {size(self._most)}, the records of {steps} were dropped; their losses "
            "and the digests of their parameters and gradients are there"
        )
