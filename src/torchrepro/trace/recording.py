"""A recording that is running: it takes records, and hands every finished step to the store."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from torchrepro.console import say
from torchrepro.errors import TraceError
from torchrepro.messages import Problem
from torchrepro.trace import hooks
from torchrepro.trace.buffer import RecordingState, joined
from torchrepro.trace.fingerprint_cache import fingerprint_of
from torchrepro.trace.frames import place_of_user, source_of
from torchrepro.trace.levels import LEVELS, gradients_of, parameters_of, random_states
from torchrepro.trace.opening import about_this_process, open_store
from torchrepro.trace.reader import INPUT, OUTPUT
from torchrepro.trace.store import StepRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torchrepro.trace.request import Request
    from torchrepro.trace.store import Store


class Recording:
    """One process being recorded, from `start` to `stop`."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.state = RecordingState(request, self.spill)
        self.level = LEVELS[request.level](self.state)
        self._store: Store | None = None
        self._open = ExitStack()
        self._losses: list[tuple[Any, Any, str]] = []  # tensor, fingerprint, source
        self._gradients: list[Any] = []
        self._lock = threading.RLock()
        self._failed = False
        self.ended = False
        self.refuse: Callable[[TraceError], None] = _raise
        """What is done where the trace cannot be written and the program is not to go on."""

    def start(self) -> None:
        """Begin to take records on this thread and on those that it starts."""
        self._open.enter_context(hooks.watch_training(self))
        self._open.enter_context(self.level)
        self._open.callback(_recordings.remove, self)
        _recordings.append(self)

    def stop(self) -> None:
        """Take no more records, and write what is left of a step that has not ended."""
        self._open.close()
        self.finish()

    def finish(self) -> None:
        """Write what is left, and that the trace is whole; for a process that ends.

        Writes nothing the second time, nor in a child that was forked.
        """
        if self.ended:
            return
        self.level.abandon()
        self.ended = True
        if self._failed:
            return
        if self.state.buffer.taken or self.state.buffer.moved or self._losses:
            self._write_step((), finished=False)
        self._say_what_was_in_vain()
        if self._store is not None:
            with self._told():
                self._store.write_meta({"finished": True})
                self._store.close()
                self._store.must_exist()

    def _say_what_was_in_vain(self) -> None:
        """Say which requests met nothing: a misspelt module, a step that was never reached."""
        request, said = self.request, []
        if request.steps is not None and self._store is None and self.state.step:
            said.append(f"none of the steps {request.steps[0]} to {request.steps[1]} was reached")
        if self._store is not None:
            said += [f"no module fits `{pattern}`" for pattern in self.level.unmet()]
        say(*(f"{request.folder}: {sentence}" for sentence in said))

    def abandon(self) -> None:
        """Take no more records and leave the store alone: it is another process's."""
        self._failed, self._store = True, None
        self.level.abandon()

    def spill(self) -> None:
        """Hand the records of a long step to the store before it ends."""
        with self._lock, self.level.paused():
            if self._failed or not self.state.wants_step:
                self.state.buffer.taken.clear()
                return
            with self._told():
                self.state.buffer.move(self._store or self._opened(), self.state.step)
            self.state.cache.forget_what_is_gone()

    def end_step(self, parameters: Iterable[Any] = ()) -> None:
        """End a step: what belongs to it is written as a whole."""
        if self.ended:
            raise TraceError(
                Problem(
                    "has ended: no step of it can end any more",
                    found=self.request.folder,
                    todo="call end_step inside of the `with` block",
                )
            )
        with self._lock, self.level.paused():
            self._write_step(parameters, finished=True)
            self.state.step += 1
            self._losses.clear()
            self._gradients = []
            self.state.cache.end_step()
            self.level.end_step()

    # What the doors tell (see passes.Listener).

    def backward_begins(self, losses: Any) -> None:
        source = source_of(place_of_user())
        with self.level.paused():
            for loss in (losses,) if isinstance(losses, torch.Tensor) else losses:
                if isinstance(loss, torch.Tensor):
                    # Its value is read when the step ends: asking a device now would wait for it.
                    value = loss.detach().clone() if loss.numel() == 1 else None
                    self._losses.append((value, fingerprint_of(loss.detach()), source))
        self.level.backward_begins()

    def backward_ends(self) -> None:
        self.level.backward_ends()

    def optimizer_begins(self, optimizer: Any, with_closure: bool) -> None:  # noqa: FBT001 - a fact
        self.level.optimizer_begins(optimizer, place_of_user(), with_closure=with_closure)
        with self.level.paused():
            gradients = gradients_of(parameters_of(optimizer))
            self._gradients += map(self.state.cache.digest, gradients)

    def optimizer_ends(self, optimizer: Any) -> None:
        self.level.optimizer_ends(optimizer)
        self.end_step(parameters_of(optimizer))

    def batch_begins(self, workers: int) -> None:
        self.level.batch_begins(workers)

    def batch_ends(self, batch: Any) -> None:
        self.level.batch_ends(batch, place_of_user())

    # Writing.

    def _write_step(self, parameters: Iterable[Any], *, finished: bool) -> None:
        if self._failed or not self.state.wants_step:
            self.state.buffer.taken.clear()
            return
        with self._told():
            store = self._store or self._opened()
            written = self.state.buffer.end_step(store, self.state.step)
            self._write_losses(store)
            self.level.write(store, written.first)
            store.end_step(
                StepRow(
                    step=self.state.step,
                    first=written.first,
                    records=written.count,
                    bytes=self.state.cache.taken_bytes(),
                    parameters=_combined(map(self.state.cache.digest, parameters)),
                    gradients=_combined(self._gradients),
                    random=random_states(),
                    finished=finished,
                )
            )

    def _write_losses(self, store: Store) -> None:
        marks = joined([mark for _, mark, _ in self._losses], OUTPUT)
        store.add_losses(
            (self.state.step, n, _number(value), marks[n * OUTPUT : (n + 1) * OUTPUT], source)
            for n, (value, _, source) in enumerate(self._losses)
        )

    def _opened(self) -> Store:
        self._store = open_store(self.request, about_this_process())
        return self._store

    @contextmanager
    def _told(self) -> Iterator[None]:
        """End the program with what is wrong, or go on without a trace, as asked."""
        try:
            yield
        except TraceError as error:
            self._failed = True
            if self._store is not None:
                self._store.discard()
                self._store = None
            if self.request.on_unwritable == "stop":
                self.refuse(error)
                return
            say(f"{error}\n    the run goes on, unrecorded from here")


_recordings: list[Recording] = []


def running() -> tuple[Recording, ...]:
    """Return the recordings that are running, outermost first."""
    return tuple(_recordings)


def _raise(error: TraceError) -> None:
    raise error


def _abandon_in_forked_child() -> None:
    for recording in _recordings:
        recording.abandon()


os.register_at_fork(after_in_child=_abandon_in_forked_child)


def _combined(digests: Iterable[Any]) -> bytes:
    """Return one fingerprint of many digests in their order; empty for none."""
    whole = joined(list(digests), INPUT)
    return xxhash.xxh3_128_digest(whole) if whole else b""


def _number(value: Any) -> float | None:
    """Return a loss as a number; None for one that is not a single real number."""
    return None if value is None or value.is_complex() else float(value)
