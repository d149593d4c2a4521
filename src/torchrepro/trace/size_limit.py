"""Keeps a trace within so many bytes on disk while it is written: drops its oldest records."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrepro.console import say
from torchrepro.errors import TraceError
from torchrepro.messages import Problem, size
from torchrepro.seeding.ranks import world
from torchrepro.trace.request import LEVELS, SMALLEST

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrepro.trace.format import StepRow
    from torchrepro.trace.request import Request
    from torchrepro.trace.store import Store

OVERHEAD = 1 << 16
"""Bytes that a step takes besides its own: pages that are written again, and the log's index."""

COARSEST = LEVELS[0]

NEWEST = 2
"""Steps in full that outlive the records of older steps at `COARSEST`: where a run diverges, its
last step and the one before it say from what."""


def limit_of(store: Store, request: Request) -> SizeLimit | None:
    """Return what holds a store to its share of the size that a run may have; None for any size.

    Ranks have equal shares. A process that one of them starts has as much again.
    """
    if request.max_size is None:
        return None
    return SizeLimit(store, request.max_size, world().size)


def check_share(request: Request) -> None:
    """Raise `TraceError` where the share of this rank has no room for a trace without an op."""
    if request.max_size is None:
        return
    ranks = world().size
    if request.max_size // ranks < SMALLEST:
        raise TraceError(
            Problem(
                f"each of {ranks} ranks has {size(request.max_size // ranks)} of it, and an empty "
                f"trace takes up to {size(SMALLEST)}",
                key="max_size",
                found=size(request.max_size),
                legal=f"{size(ranks * SMALLEST)} or more",
            )
        )


@dataclass(slots=True)
class Steps:
    """Steps of one kind, of which others may lie between the first and the last."""

    first: int = -1
    last: int = -1
    count: int = 0

    def add(self, number: int) -> None:
        """Add a step that is not among them."""
        self.first = min(self.first, number) if self.count else number
        self.last = max(self.last, number)
        self.count += 1

    def __str__(self) -> str:
        if self.count <= 1:
            return f"step {self.first}" if self.count else "none"
        if self.count == 2:  # noqa: PLR2004 - the first and the last
            return f"steps {self.first} and {self.last}"
        if self.count == self.last - self.first + 1:
            return f"steps {self.first} to {self.last}"
        return f"{self.count:,} of the steps {self.first} to {self.last}"


class SizeLimit:
    """Holds a store to a size, on the assumption that no step is larger than those before it.

    SQLite writes a step to a log, and later from there into its file, in which it uses the place
    of what was deleted. So there has to be room for the largest step up to now in the log, in the
    file, and once more for the step that is written before the next look.
    """

    def __init__(self, store: Store, size_of_run: int, ranks: int) -> None:
        self._store = store
        self._most = size_of_run // ranks
        self._ranks = ranks
        share = f" (its share of {size(size_of_run)} for {ranks:,} ranks)" if ranks > 1 else ""
        self._most_in_words = f"{size(self._most)}{share}"
        self._largest = 0
        self._used = store.bytes_used
        self._in_full: deque[tuple[int, int, int]] = deque()  # step, first record, count
        self._others = 0  # steps at `COARSEST` that have records
        self._last_other = -1  # the last one without
        self._after_last: int | None = None  # the number of what came after the last step
        self._dropped = Steps()
        self._end_is_dropped = False
        self._said: set[str] = set()

    def hold(self, row: StepRow) -> None:
        """Make room for the next step; called where `row` has been written."""
        self._take(row)
        store = self._store
        used = store.bytes_used
        self._largest = max(self._largest, used - self._used + OVERHEAD)
        room = self._most - 3 * self._largest
        if used > room:
            self._drop_to(room)
            store.commit()
            used = store.bytes_used
        self._used = used
        if row.level != COARSEST and row.records and not self._in_full:
            self._say_once("full", self._room_for_none)
        file = store.bytes_of_file
        # The log is still there while it is moved: the file grows beside it.
        if file + store.bytes_of_log + 2 * self._largest > self._most:
            store.shrink(file=file + 2 * self._largest > self._most)
            if store.bytes_on_disk > self._most:
                self._say_once("over", self._too_large)

    def _take(self, row: StepRow) -> None:
        if not row.finished:
            self._after_last = row.step
        if not row.records:
            return
        if row.level == COARSEST:
            self._others += 1
        else:
            self._in_full.append((row.step, row.first, row.records))

    # What is dropped, in this order.

    def _drop_to(self, room: int) -> None:
        """Drop records of the oldest steps until no more than so many bytes are used."""
        for drop_one in (self._drop_older_in_full, self._drop_other, self._drop_in_full):
            while self._store.bytes_used > room and drop_one():
                pass

    def _drop_older_in_full(self) -> bool:
        kept = NEWEST + (self._after_last is not None)
        return len(self._in_full) > kept and self._drop_in_full()

    def _drop_other(self) -> bool:
        if not self._others:
            return False
        found = self._store.next_step(self._last_other, COARSEST)
        self._others -= 1
        self._last_other = found[0]
        self._drop(*found)
        return True

    def _drop_in_full(self) -> bool:
        if not self._in_full:
            return False
        self._drop(*self._in_full.popleft())
        return True

    def _drop(self, step: int, first: int, records: int) -> None:
        self._store.drop(step, first, records)
        if step == self._after_last:
            self._end_is_dropped = True
        else:
            self._dropped.add(step)

    # What is said.

    @property
    def count(self) -> int:
        """How many steps have no records any longer, what came after the last one included."""
        return self._dropped.count + self._end_is_dropped

    def in_words(self) -> str:
        """Return what the trace takes, which steps have their records and which have not."""
        in_full = Steps()
        for step, _, _ in self._in_full:
            if step != self._after_last:
                in_full.add(step)
        taken = self._store.bytes_on_disk
        of = "of" if taken <= self._most else "and not"
        parts = [f"takes {size(taken)} {of} {self._most_in_words}"]
        if in_full.count or not self._others:
            parts.append(f"kept in full: {in_full}")
        if self._others:
            parts.append(f"kept at level {COARSEST}: {self._others:,} others")
        dropped = [f"the records of {self._dropped}"] if self._dropped.count else []
        dropped += ["what came after the last step"] if self._end_is_dropped else []
        parts.append(
            f"dropped: {' and '.join(dropped)}; losses and the digests of parameters and gradients "
            "are there of every step"
        )
        lines = ["; ".join(parts)]
        if "full" in self._said and not self._in_full:
            lines.append(f"    {self._room_for_none()}")
        return "\n".join(lines)

    def _say_once(self, what: str, sentence: Callable[[], str]) -> None:
        if what not in self._said:
            self._said.add(what)
            say(f"{self._store.path}: {sentence()}")

    def _room_for_none(self) -> str:
        step = self._largest - OVERHEAD
        enough = self._used + NEWEST * step + 3 * self._largest
        return (
            f"a step takes up to {size(step)}: {self._most_in_words} has room for none in full; up "
            f"to here {size(_rounded_up(enough * self._ranks))} would hold the last {NEWEST}"
        )

    def _too_large(self) -> str:
        return (
            f"takes {size(self._store.bytes_on_disk)}, more than {self._most_in_words}: no records "
            "are left that could be dropped\n    the run goes on, and the digests of each step are "
            "still written"
        )


def _rounded_up(number: int) -> int:
    """Return a number no less than this one, with two digits that are not zero."""
    unit: int = 10 ** max(len(str(number)) - 2, 0)
    return -(-number // unit) * unit
