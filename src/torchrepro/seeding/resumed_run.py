"""The training run of this process: what its checkpoints store, and how it resumes from them.

Also observes whether the program itself resumes in the middle of an epoch (`OwnResumes`).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from torchrepro.ground.callers import package
from torchrepro.ground.console import say_once
from torchrepro.seeding import loader_positions
from torchrepro.seeding.loader import Loading
from torchrepro.seeding.loader_positions import Delivery, Resumption, epochs, is_kept, kind_of
from torchrepro.seeding.observed_calls import Call, listen, stop_listening

Saved = Mapping[str, Any]
"""Progress in an epoch (see `Delivery.progress`), or the state of a loader between two epochs."""


class ResumedRun:
    """A training run, and what it resumes: a saved run, or nothing if it is a new run.

    `Checkpoint`, or the hook of a framework that loads a checkpoint, creates the object, and so
    makes it the `active` run. It stays active until the next run begins, because a loader may wait
    for its saved state longer than the training lasts. The undo of a profile ends it earlier. These
    calls follow each other:

    ::

        new run                     resumed run
        ------------------------    --------------------------------------------------------------
        run = ResumedRun()          run = ResumedRun(state, restore): epochs wait for their loaders
                                    run.await_only(interrupted): if not all of them may resume
                                    run.resume(loader, progress): where a framework passes the
                                        saved progress to a loader, which then skips batches
                                    run.delay_epochs(together): where a framework creates iterators
                                        earlier than in a new run
                                    run.restore_once(): when the training begins
                                    run.skipped(loader, copy, number): where a framework makes a
                                        copy of the loader that skips batches
        run.epoch_begins(loader)    run.epoch_begins(loader): the epoch resumes
        run.saved()                 run.saved()
        run.end()                   run.end()

    `state` is the state of this rank, which `saved` returned. An interrupted epoch resumes in the
    next loader with the same signature (`kind_of`), and the program skips the finished batches. An
    ended epoch resumes if the program skips all of its batches. A loader at rest restores its own
    generators at its next epoch. `restore` sets every generator to its state at the interruption.
    """

    active: ClassVar[ResumedRun]

    def __init__(
        self, state: Saved | None = None, restore: Callable[[], None] = lambda: None
    ) -> None:
        self.state: Saved = {} if state is None else state
        self.restore = restore
        self.is_resumed = self.awaits_restore = state is not None
        self._first_number = next(epochs.numbers)  # loaders with lower numbers: an earlier run
        self._awaited: list[Saved] = [*self.state.get("interrupted", ())]
        self._ended: list[Saved] = [*self.state.get("ended", ())]
        self._resting: list[Saved] = [*self.state.get("resting", ())]
        # Loader -> its next or latest resumption.
        self._resumptions: WeakKeyDictionary[Any, Resumption] = WeakKeyDictionary()
        ResumedRun.active = self

    def saved(self) -> dict[str, list[dict[str, Any]]]:
        """Return the progress of each epoch that the program reads, and of loaders at rest."""
        progress = [epoch.progress() for epoch in epochs.in_use()]
        return {
            "interrupted": [saved for saved in progress if not saved["over"]],
            "ended": [saved for saved in progress if saved["over"]],
            "resting": self.resting(),
        }

    def resting(self) -> list[dict[str, Any]]:
        return epochs.resting(self._first_number)

    def await_only(self, interrupted: Sequence[Saved]) -> None:
        """Resume no other epochs than these, except by `resume`."""
        self._awaited, self._ended = [*interrupted], []

    def resume(self, loader: Any, progress: Saved) -> None:
        """Make the next iteration of `loader` resume `progress`, and skip the finished batches.

        These are ``progress["done"]``, if a framework has read batches that are not trained on.
        """
        number, skip = progress["number"], progress.get("done", progress["batches"])
        self._awaited = [awaited for awaited in self._awaited if awaited["number"] != number]
        self._resumptions[loader] = Resumption(progress, self.restore, skip)

    def delay_epochs(self, together: int) -> None:
        """Begin the next epochs when a first batch is read (`LoaderEpochs.begin_at_first_batch`).

        The generators are restored before that, unless `restore_once` has restored them.
        """
        epochs.begin_at_first_batch(self.restore_once, together)

    def restore_once(self) -> None:
        """Restore the generators at the first call, since the start of a training draws numbers."""
        if self.awaits_restore:
            self.restore()
            self.awaits_restore = False

    def batches_done(self, loader: Any) -> int | None:
        """Return how many batches are done in the epoch that `loader` will resume, or None."""
        progress = _of_kind(loader, self._awaited)
        return None if progress is None else int(progress["batches"])

    def skipped(self, loader: Any, copy: Any, number: int) -> bool:
        """Treat `copy` as `loader`, whose first `number` batches of an epoch it skips.

        Returns True if the epoch was saved after its last batch, and `copy` skips all batches.
        """
        epochs.copied(loader, copy)
        progress = _of_kind(loader, [end for end in self._ended if number >= end["batches"]])
        if progress is None:
            return False
        self._ended.remove(progress)
        self._resumptions[copy] = Resumption(progress, self.restore)
        return True

    def epoch_begins(self, loader: Any, resumption: Resumption | None = None) -> Delivery:
        """Return the epoch of `loader` for which the program now requests an iterator.

        It is `resumption`, if set. Else it is an interrupted epoch that waits for this loader.
        """
        if resumption is None:
            resumption = self._next_resumption(loader)
        return Delivery(loader, resumption, self._prepare)

    def _next_resumption(self, loader: Any) -> Resumption | None:
        prepared = self._resumptions.get(loader) if is_kept(loader) else None
        if prepared is not None and not prepared.iterations:
            return prepared
        progress = _of_kind(loader, self._awaited)
        if progress is None:
            return None
        self._awaited.remove(progress)
        resumption = self._resumptions[loader] = Resumption(progress, self.restore)
        return resumption

    def _prepare(self, loader: Any, resumption: Resumption | None) -> None:
        if resumption is not None:
            resumption.begin(loader)
        else:
            self._restore_resting(loader)
        latest = self._resumptions.get(loader) if is_kept(loader) else None
        if latest is not None:
            latest.correct_epochs(loader)

    def _restore_resting(self, loader: Any) -> None:
        rested, ended = _of_kind(loader, self._resting), _of_kind(loader, self._ended)
        if rested is not None:
            self._resting.remove(rested)
            loader_positions.write_states(loader, rested["own"])
        if ended is not None:
            self._ended.remove(ended)
        before = rested or ended
        if before is not None:
            loader_positions.report_changed_reading(loader, before["reading"])

    def end(self) -> None:
        """Forget all epochs to be resumed, and begin the epochs that wait for their first batch."""
        self.await_only(())
        self._resting.clear()
        self._resumptions.clear()
        epochs.begin_waiting()


ResumedRun()


def _of_kind(loader: Any, saved: Sequence[Saved]) -> Saved | None:
    signature = kind_of(loader) if saved else ""
    return next((state for state in saved if state["kind"] == signature), None)


_GET, _SET = "get_rng_state", "set_rng_state"


class OwnResumes:
    """Reports if the program restores torch's generator by itself in the middle of an epoch.

    A program's own checkpoint may have the state of torch's generator at the saved step, but not at
    the start of the epoch. Without a profile, samples loaded in the main process draw from that
    generator, so the resumed run is exact. Under `auto` they draw from the base seed of the epoch,
    which differs in the resumed run.

    `own_resumes` is the only instance. It observes calls from `watch` until `stop`.
    """

    def __init__(self) -> None:
        self._read: deque[int] = deque(maxlen=1000)  # digests of the states that were read
        self._restored_unread = False  # whether the program set a state that it had not read

    def watch(self) -> None:
        """Observe the program's calls that get or set the state of torch's generator."""
        self._read.clear()
        self._restored_unread = False
        for module in ("torch", "torch.random"):
            for name in (_GET, _SET):
                listen(module, name, self._note)

    def stop(self) -> None:
        stop_listening(self._note)

    def _note(self, call: Call) -> None:
        if package(call.frame) in ("torch", "torchrepro"):
            return  # torch restores only states that it has read, as `fork_rng` does
        state = hash(sys.modules["torch"].default_generator.get_state().numpy().tobytes())
        if state in self._read:
            return
        if call.function.endswith(_GET):
            self._read.append(state)
        elif not self._restored_unread:
            self._restored_unread = True
            begun = [e for e in epochs.in_use() if e.batches and e.samples_draw and not e.is_over]
            if begun and type(begun[-1].loading) is Loading:
                say_once(
                    f"the program restored torch's generator after {begun[-1].batches} batches of "
                    "an epoch. Samples draw from a base seed that torch draws when an epoch "
                    "begins, so they may differ from the uninterrupted run: also save "
                    "torch.get_rng_state() before the epoch, and restore it there (or: "
                    "dataloader.seeding=none)"
                )


own_resumes = OwnResumes()
