"""Keeps a trace within so many bytes on disk while it is written: drops its oldest records."""

from __future__ import annotations

from array import array
from collections import deque
from typing import TYPE_CHECKING

from torchrepro.console import say
from torchrepro.errors import TraceError
from torchrepro.messages import size
from torchrepro.seeding.ranks import world
from torchrepro.trace.request import LEVELS, SMALLEST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrepro.trace.format import StepRow
    from torchrepro.trace.request import Request
    from torchrepro.trace.store import Store

OVERHEAD = 1 << 16
"""Bytes that a step takes besides its own: pages that are written again, and the log's index."""

COARSEST = LEVELS[0]

NEWEST = 2
"""Steps in full that outlive the records of older steps at `COARSEST`: where a run diverges, its
last step and the one before it say from what."""


def check_share(request: Request) -> None:
    """Raise `TraceError` where the share of this rank has no room for a trace without an op."""
    ranks = world().size
    if request.max_size is not None and request.max_size // ranks < SMALLEST:
        raise TraceError.about(
            f"each of {ranks} ranks has {size(request.max_size // ranks)} of it, and an empty "
            f"trace takes up to {size(SMALLEST)}",
            key="max_size",
            found=size(request.max_size),
            legal=f"{size(ranks * SMALLEST)} or more",
        )


class SizeLimit:
    """Holds a store to its rank's share of the size of a run; a process that a rank starts has as
    much again.

    No step is taken to be larger than those before it. SQLite writes a step to a log, and later
    from there into its file, in which it uses the place of what was deleted. So there has to be
    room for the largest step up to now in the log, in the file, and once more for the step that is
    written before the next call.
    """

    def __init__(self, store: Store, size_of_run: int) -> None:
        ranks = world().size
        self._store = store
        self._most = size_of_run // ranks
        share = f" (its share of {size(size_of_run)} for {ranks:,} ranks)" if ranks > 1 else ""
        self._most_in_words = f"{size(self._most)}{share}"
        self._largest = 0
        self._used = store.bytes_of_file()[1]
        self._in_full: deque[int] = deque()  # the steps that have records
        self._coarse: deque[int] = deque()  # those at `COARSEST` that have records
        self._after_last: int | None = None  # the number of what came after the last step
        self._dropped = array("q")
        self._said: set[str] = set()

    def hold(self, row: StepRow) -> None:
        """Make room for the next step; called where `row` has been written."""
        if not row.finished:
            self._after_last = row.step
        if row.records:
            (self._coarse if row.level == COARSEST else self._in_full).append(row.step)
        store = self._store
        file, used = store.bytes_of_file()
        self._largest = max(self._largest, used - self._used + OVERHEAD)
        room = self._most - 3 * self._largest
        if used > room:
            newest = NEWEST + (self._after_last is not None)
            while store.bytes_of_file()[1] > room and (self._coarse or self._in_full):
                kind = self._in_full
                if self._coarse and len(kind) <= newest:
                    kind = self._coarse
                self._dropped.append(kind.popleft())
                store.drop(self._dropped[-1])
            store.commit()
            file, used = store.bytes_of_file()
        self._used = used
        if row.level != COARSEST and row.records and not self._in_full:
            self._say_once("full", self._room_for_none())
        # The log is still there while it is moved: the file grows beside it.
        if file + store.bytes_of_log + 2 * self._largest > self._most:
            store.shrink(file=file + 2 * self._largest > self._most)
            if store.bytes_on_disk > self._most:
                self._say_once(
                    "over",
                    f"takes {size(store.bytes_on_disk)}, more than {self._most_in_words}: no "
                    "records are left that could be dropped\n    the run goes on, and the digests "
                    "of each step are still written",
                )

    @property
    def count(self) -> int:
        """How many steps have no records any longer, what came after the last one included."""
        return len(self._dropped)

    def in_words(self) -> str:
        """Return what the trace takes, which steps have their records and which have not."""
        in_full = [step for step in self._in_full if step != self._after_last]
        dropped = [step for step in self._dropped if step != self._after_last]
        taken = self._store.bytes_on_disk
        of = "of" if taken <= self._most else "and not"
        parts = [f"takes {size(taken)} {of} {self._most_in_words}"]
        if in_full or not self._coarse:
            parts.append(f"kept in full: {_in_words(in_full)}")
        if self._coarse:
            parts.append(f"kept at level {COARSEST}: {len(self._coarse):,} others")
        what = [f"the records of {_in_words(dropped)}"] if dropped else []
        what += ["what came after the last step"] if len(dropped) < self.count else []
        parts.append(
            f"dropped: {' and '.join(what)}; losses and the digests of parameters and gradients "
            "are there of every step"
        )
        none = f"\n    {self._room_for_none()}" * ("full" in self._said and not self._in_full)
        return "; ".join(parts) + none

    def _say_once(self, what: str, sentence: str) -> None:
        if what not in self._said:
            self._said.add(what)
            say(f"{self._store.path}: {sentence}")

    def _room_for_none(self) -> str:
        step = size(self._largest - OVERHEAD)
        return f"a step takes up to {step}: {self._most_in_words} has room for none in full"


def _in_words(steps: Sequence[int]) -> str:
    if len(steps) <= 1:
        return f"step {steps[0]}" if steps else "none"
    first, last = min(steps), max(steps)
    if len(steps) == 2:  # noqa: PLR2004 - the first and the last
        return f"steps {first} and {last}"
    ends = f"steps {first} to {last}"
    return ends if len(steps) == last - first + 1 else f"{len(steps):,} of the {ends}"
