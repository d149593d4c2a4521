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
from torchrepro.seeding.state import is_resumed
from torchrepro.seeding.uncontrolled import EVERY_SOURCE, WITHOUT_COST, watch_for_recording
from torchrepro.trace.buffer import RecordingState, joined
from torchrepro.trace.fingerprint_cache import fingerprint_of
from torchrepro.trace.format import INPUT, OUTPUT, StepRow
from torchrepro.trace.frames import place_of_user, source_of
from torchrepro.trace.generator_states import GeneratorStates
from torchrepro.trace.hooks import watch_training
from torchrepro.trace.intermittent import level_for
from torchrepro.trace.loaders import IteratedLoaders, workers_of
from torchrepro.trace.op_facts import PLAIN
from torchrepro.trace.samples import SampleRecorder
from torchrepro.trace.size_limit import limit_of
from torchrepro.trace.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torchrepro.trace.fingerprint_cache import Digest
    from torchrepro.trace.request import Request
    from torchrepro.trace.size_limit import SizeLimit
    from torchrepro.trace.store import Store


class Recording:
    """One process being recorded, from `start` to `stop`."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.state = RecordingState(request, self.spill)
        self.level = level_for(self.state)
        self._store: Store | None = None
        self._limit: SizeLimit | None = None
        self._open = ExitStack()
        self._sources = watch_for_recording(EVERY_SOURCE if request.detail else WITHOUT_COST)
        self._losses: list[tuple[Any, Any, str]] = []  # tensor, fingerprint, source
        self._gradients: list[Any] = []
        self._generators = GeneratorStates()
        self._loaders = IteratedLoaders()
        self._samples = SampleRecorder(self.level.take_returned)
        self._lock = threading.RLock()
        self._failed = False
        self._left_out = False
        self.ended = False
        self.refuse: Callable[[TraceError], None] = _raise
        """Called where the trace cannot be written and the program is not to go on."""

    def start(self) -> None:
        """Begin to take records on this thread and on those that it starts."""
        self._sources.position = self._position
        self._open.callback(self._sources.stop)
        self._open.enter_context(watch_training(self))
        self._open.enter_context(self.level)
        self._open.callback(_recordings.remove, self)
        _recordings.append(self)

    def stop(self) -> None:
        """Take no more records, and write what is left of a step that has not ended."""
        self._open.close()
        self.finish()

    def finish(self) -> None:
        """Write what is left, and that the trace is complete; for a process that ends.

        Writes nothing the second time, nor in a child that was forked.
        """
        if self.ended:
            return
        self.level.abandon()
        self.ended = True
        if self._failed:
            return
        if self.state.buffer.rows or self.state.buffer.moved or self._losses:
            self._write_step((), finished=False)
        self._warn_of_unmatched_requests()
        if self._store is not None:
            with self._unwritable_handled():
                self._store.write_knobs_in_effect()
                self._store.finish(self._facts())
                self._store.must_exist()
                self._say_what_was_dropped(self._store)

    def abandon(self) -> None:
        """Take no more records and leave the store alone: it is another process's."""
        self._failed, self._store = True, None
        self.level.abandon()

    def spill(self) -> None:
        """Hand the records of a long step to the store before it ends."""
        with self._lock, self.level.paused():
            if self._drops_step():
                return
            with self._unwritable_handled():
                self.state.buffer.move(self._store or self._open_store())
            self.state.cache.forget_dead()

    def end_step(self, parameters: Sequence[Digest] = ()) -> None:
        """End a step: all that belongs to it is written in one transaction.

        `parameters` are digests of what an optimizer has updated.
        """
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

    # Called by the hooks of the training loop (see `watch_training`).

    def backward_begins(self, losses: Any) -> None:
        source = source_of(place_of_user())
        with self.level.paused():
            for loss in (losses,) if isinstance(losses, torch.Tensor) else losses:
                if isinstance(loss, torch.Tensor):
                    self._losses.append((*_value_and_fingerprint(loss), source))
        self.level.backward_begins()

    def backward_ends(self) -> None:
        self.level.backward_ends()

    def optimizer_begins(self, optimizer: Any, *, with_closure: bool) -> None:
        self._gradients += self.level.optimizer_begins(
            optimizer, place_of_user(), with_closure=with_closure
        )

    def optimizer_ends(self, optimizer: Any) -> None:
        self.end_step(self.level.optimizer_ends(optimizer))

    def batch_begins(self, iterator: Any) -> None:
        self.level.batch_begins(workers_of(iterator))
        if self._records_samples_of(iterator):
            self._samples.begin()

    def batch_ends(self, iterator: Any, batch: Any) -> None:
        if self._records_samples_of(iterator):
            self._samples.end()
        place = place_of_user()
        self._loaders.see(iterator, place)
        self.level.batch_ends(batch, place)

    def _records_samples_of(self, iterator: Any) -> bool:
        """Whether what the program returns while this loader prepares a batch is recorded."""
        return self.request.samples and not workers_of(iterator) and self.state.wants_step

    # Writing.

    def _facts(self) -> dict[str, Any]:
        """Return what was learnt of the program while it ran."""
        sources = [read.to_json() for read in self._sources.reads()]
        models = self.state.names.held()
        return {
            **({"dropped": self._limit.count} if self._limit is not None else {}),
            **self._loaders.meta(),
            **({"sources": sources} if sources else {}),
            **({"models": models} if models else {}),
            "resumed": "yes" if is_resumed() else "no",
        }

    def _position(self) -> tuple[int, int]:
        """Return the running step and the number of records taken up to now."""
        written = self._store.records if self._store is not None else 0
        return self.state.step, written + len(self.state.buffer.rows)

    def _drops_step(self) -> bool:
        """Whether the running step is not to be written; its records are dropped."""
        if self._failed or not self.state.wants_step:
            self.state.buffer.rows.clear()
            self._left_out = True
            return True
        return False

    def _write_step(self, parameters: Sequence[Digest], *, finished: bool) -> None:
        if self._drops_step():
            return
        cache = self.state.cache
        with self._unwritable_handled():
            store = self._store or self._open_store()
            first, count = self.state.buffer.end_step(store)
            self._write_losses(store)
            self.level.write(store, first)
            row = StepRow(
                step=self.state.step,
                first=first,
                records=count,
                bytes=cache.pop_bytes_read(),
                parameters=_combined(parameters),
                gradients=_combined(self._gradients),
                random=self._generators.read(),
                finished=finished,
                level=self.level.name,
            )
            store.end_step(row)
            if self._limit is not None:
                self._limit.hold(row)

    def _write_losses(self, store: Store) -> None:
        marks = joined([mark for _, mark, _ in self._losses], OUTPUT)
        store.add_losses(
            (_real(value), marks[n * OUTPUT : (n + 1) * OUTPUT], source)
            for n, (value, _, source) in enumerate(self._losses)
        )

    def _open_store(self) -> Store:
        self._store = open_store(self.request)
        self._limit = limit_of(self._store, self.request)
        return self._store

    @contextmanager
    def _unwritable_handled(self) -> Iterator[None]:
        """Where the trace cannot be written, end the program, or go on without, as requested."""
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

    def _say_what_was_dropped(self, store: Store) -> None:
        if self._limit is not None and self._limit.count:
            say(f"{store.path}: {self._limit.in_words()}")

    def _warn_of_unmatched_requests(self) -> None:
        """Name a module to keep that is misspelt, and steps to record that were never reached."""
        request, sentences = self.request, []
        if request.steps is not None and self._store is None and self._left_out:
            sentences.append(_not_reached(request.steps, self.state.step))
        if self._store is not None:
            sentences += [f"no module matches `{pattern}`" for pattern in self.level.unmatched()]
        say(*(f"{request.folder}: {sentence}" for sentence in sentences))


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


def _not_reached(asked: tuple[int, int], ended: int) -> str:
    """Return a sentence on steps that were to be recorded, of which the run had none."""
    first, last = asked
    wanted = f"step {first} was" if first == last else f"steps {first} to {last} were"
    if ended > 1:
        had = f"{ended:,} steps, 0 to {ended - 1}"
    else:
        had = "1 step, 0" if ended else "no steps"
    return f"the run had {had}; {wanted} not reached: nothing was recorded"


def _combined(digests: Sequence[Digest]) -> bytes:
    """Return one fingerprint of many digests in their order; empty for none."""
    whole = joined(digests, INPUT)
    return xxhash.xxh3_128_digest(whole) if whole else b""


def _value_and_fingerprint(loss: Any) -> tuple[Any, Any]:
    """Return the value of a loss, None unless it is one number, and its fingerprint.

    A number on the CPU is read now. Asking a device now would wait for it: a copy of the value
    stays there until the step ends.
    """
    if loss.__class__ in PLAIN and loss.is_cpu:
        return loss.item() if loss.numel() == 1 else None, fingerprint_of(loss)
    loss = loss.detach()
    return loss.clone() if loss.numel() == 1 else None, fingerprint_of(loss)


def _real(value: Any) -> float | None:
    """Return a loss as a number; None for one that is not a single real number."""
    if isinstance(value, torch.Tensor):
        value = value.item()
    return None if value is None or isinstance(value, complex) else float(value)
