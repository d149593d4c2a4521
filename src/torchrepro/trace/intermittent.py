"""Records some steps in full and all others at level `step`, for runs of days."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torchrepro.trace.levels import LEVELS, Level, StepLevel
from torchrepro.trace.module_hook import on_modules_called

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torchrepro.trace.buffer import RecordingState
    from torchrepro.trace.fingerprint_cache import Digest
    from torchrepro.trace.frames import Place
    from torchrepro.trace.store import Store


def level_for(state: RecordingState) -> Level:
    """Return the level at which a process is to be recorded."""
    full = LEVELS[state.request.level](state)
    return full if state.request.every == 1 else IntermittentLevel(state, full)


class IntermittentLevel(Level):
    """Another level in the steps that are to be recorded in full, and `StepLevel` in all others.

    It changes from one to the other between two steps. Where it cannot take up the full level at
    once, because the steps of a program end on several threads or have begun to end within backward
    passes, it stays at `StepLevel`; each step says at which level it was recorded.
    """

    def __init__(self, state: RecordingState, full: Level) -> None:
        super().__init__(state)
        self._full = full
        self._sparse = StepLevel(state)
        self._naming = ExitStack()
        self._now = full  # step 0 is a multiple of every number

    @property
    def name(self) -> str:
        return self._full.name if self._now is self._full else "step"

    def __enter__(self) -> None:
        self._full.__enter__()

    def __exit__(self, *error: object) -> None:
        self._naming.close()
        self._full.__exit__(*error)

    @contextmanager
    def paused(self) -> Iterator[None]:
        with self._full.paused():
            yield

    def abandon(self) -> None:
        self._full.abandon()

    # A backward pass, and the loading of a batch, may begin in one step and end in another. The
    # full level hears of both ends; a batch is recorded alike at each level.

    def backward_begins(self) -> None:
        self._full.backward_begins()

    def backward_ends(self) -> None:
        self._full.backward_ends()

    def batch_begins(self, workers: int) -> None:
        self._full.batch_begins(workers)

    def batch_ends(self, batch: Any, place: Place) -> None:
        self._full.batch_ends(batch, place)

    def optimizer_begins(
        self, optimizer: Any, place: Place, *, with_closure: bool
    ) -> Sequence[Digest]:
        return self._now.optimizer_begins(optimizer, place, with_closure=with_closure)

    def optimizer_ends(self, optimizer: Any) -> Sequence[Digest]:
        return self._now.optimizer_ends(optimizer)

    def write(self, store: Store, first: int) -> None:
        self._now.write(store, first)

    def unmatched(self) -> Iterable[str]:
        return self._full.unmatched()

    def end_step(self) -> None:
        """Forget the step that has ended, and change to the level of the one that begins."""
        if self._now is self._full:
            self._full.end_step()
        wanted = self.state.request.level_of(self.state.step)
        if wanted == self.name:
            return
        if wanted == "step":
            self._full.rest()
            self._naming.enter_context(on_modules_called(self._learn_name))
            self._now = self._sparse
        elif self._full.resume():
            self._naming.close()
            self._now = self._full

    def _learn_name(self, module: Any, _returned: Any) -> None:
        """Name modules in the order of their first calls, in whichever steps these are."""
        if not self.state.names.knows(module):
            self.state.names.place_of(module)
