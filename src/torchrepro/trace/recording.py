"""A recording that is running: it takes records, and hands every finished step to the store."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch.utils.data import IterableDataset

from torchrepro.console import say
from torchrepro.errors import TraceError
from torchrepro.seeding.loader_hook import author_worker_init
from torchrepro.seeding.state import is_resumed
from torchrepro.seeding.uncontrolled import EVERY_SOURCE, WITHOUT_COST, watch_for_recording
from torchrepro.trace.buffer import RecordingState, joined
from torchrepro.trace.fingerprint_cache import GeneratorStates, fingerprint_of
from torchrepro.trace.format import INPUT, OUTPUT, StepRow
from torchrepro.trace.frames import place_of_user, source_of
from torchrepro.trace.hooks import SampleRecorder, watch_training
from torchrepro.trace.levels import LEVELS, StepLevel
from torchrepro.trace.module_hook import on_modules_called
from torchrepro.trace.op_facts import PLAIN
from torchrepro.trace.store import SizeLimit, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from torchrepro.trace.fingerprint_cache import Digest
    from torchrepro.trace.levels import Level
    from torchrepro.trace.request import Request
    from torchrepro.trace.store import Store

_OF_DATAPIPES = "_sharding_worker_init_fn"  # torch's own, around that of the author


class Recording:
    """One process being recorded, from `start` to `stop`.

    With `every`, the level changes between two steps: to `StepLevel` for those that are not to be
    recorded in full. Where the full level cannot be taken up at once, because the steps of a
    program end on several threads or have begun to end within backward passes, it stays there;
    each step says at which level it was recorded.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.state = RecordingState(request, self.spill)
        self._full: Level = LEVELS[request.level](self.state)
        self._level = self._full  # of the running step; step 0 is a multiple of every number
        self._coarse = StepLevel(self.state)
        self._naming = ExitStack()  # of modules that are first called while the full level rests
        self._store: Store | None = None
        self._limit: SizeLimit | None = None
        self._open = ExitStack()
        self._sources = watch_for_recording(EVERY_SOURCE if request.detail else WITHOUT_COST)
        self._losses: list[tuple[Any, Any, str]] = []  # tensor, fingerprint, source
        self._gradients: list[Any] = []
        self._generators = GeneratorStates()
        self._loaders: dict[Hashable, Mapping[str, Any]] = {}
        self._samples = SampleRecorder(self._full.take_returned)
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
        self._open.enter_context(self._full)
        self._open.enter_context(self._naming)
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
        self._full.abandon()
        self.ended = True
        if self._failed:
            return
        if self.state.buffer.rows or self.state.buffer.moved or self._losses:
            self._write_step((), finished=False)
        folder, asked = self.request.folder, self.request.steps
        if self._store is None:
            if asked is not None and self._left_out:
                say(f"{folder}: {_not_reached(asked, self.state.step)}")
            return
        say(*(f"{folder}: no module matches `{pattern}`" for pattern in self._full.unmatched()))
        with self._unwritable_handled():
            self._store.write_knobs_in_effect()
            self._store.finish(self._facts())
            self._store.must_exist()
            if self._limit is not None and self._limit.count:
                say(f"{self._store.path}: {self._limit.in_words()}")

    def abandon(self) -> None:
        """Take no more records and leave the store alone: it is another process's."""
        self._failed, self._store = True, None
        self._full.abandon()

    def spill(self) -> None:
        """Hand the records of a long step to the store before it ends."""
        with self.state.lock, self._full.paused():
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
            raise TraceError.about(
                "has ended: no step of it can end any more",
                found=self.request.folder,
                todo="call end_step inside of the `with` block",
            )
        with self.state.lock, self._full.paused():
            self._write_step(parameters, finished=True)
            self.state.step += 1
            self._losses.clear()
            self._gradients = []
            self.state.cache.end_step()
            if self._level is self._full:
                self._full.end_step()
            self._change_level()

    def _change_level(self) -> None:
        wanted = self.request.level_of(self.state.step)
        if wanted == self._level.name:
            return
        if wanted == self._coarse.name:
            self._full.rest()
            self._naming.enter_context(on_modules_called(self._learn_name))
            self._level = self._coarse
        elif self._full.resume():
            self._naming.close()
            self._level = self._full

    def _learn_name(self, module: Any, _returned: Any) -> None:
        # Modules are named in the order of their first calls, in whichever steps these are.
        if not self.state.names.knows(module):
            self.state.names.place_of(module)

    # Called by the hooks of the training loop (see `watch_training`). A backward pass, and the
    # loading of a batch, may begin in one step and end in another: the full level hears of both
    # ends, also while it rests. A batch is recorded alike at each level.

    def backward_begins(self, losses: Any) -> None:
        source = source_of(place_of_user())
        with self._full.paused():
            for loss in (losses,) if isinstance(losses, torch.Tensor) else losses:
                if isinstance(loss, torch.Tensor):
                    self._losses.append((*_value_and_fingerprint(loss), source))
        self._full.backward_begins()

    def backward_ends(self) -> None:
        self._full.backward_ends()

    def optimizer_begins(self, optimizer: Any, *, with_closure: bool) -> None:
        self._gradients += self._level.optimizer_begins(
            optimizer, place_of_user(), with_closure=with_closure
        )

    def optimizer_ends(self, optimizer: Any) -> None:
        self.end_step(self._level.optimizer_ends(optimizer))

    def batch_begins(self, iterator: Any) -> None:
        self._full.batch_begins(_workers_of(iterator))
        if self._records_samples_of(iterator):
            self._samples.begin()

    def batch_ends(self, iterator: Any, batch: Any) -> None:
        if self._records_samples_of(iterator):
            self._samples.end()
        place = place_of_user()
        with suppress(Exception):  # a class of the program's may raise what it likes
            dataset = getattr(iterator, "_dataset", None)
            its = {
                "where": source_of(place),
                "workers": _workers_of(iterator),
                "dataset": type(dataset).__name__,
                "iterable": isinstance(dataset, IterableDataset),
                "worker_init_fn": _own_init(getattr(iterator, "_worker_init_fn", None)),
            }
            self._loaders[tuple(its.values())] = its
        self._full.batch_ends(batch, place)

    def _records_samples_of(self, iterator: Any) -> bool:
        return self.request.samples and not _workers_of(iterator) and self.state.wants_step

    def _facts(self) -> dict[str, Any]:
        sources = [read.to_json() for read in self._sources.reads()]
        models = self.state.names.held()
        return {
            **({"dropped": self._limit.count} if self._limit is not None else {}),
            "loaders": list(self._loaders.values()),
            **({"sources": sources} if sources else {}),
            **({"models": models} if models else {}),
            "resumed": "yes" if is_resumed() else "no",
        }

    def _position(self) -> tuple[int, int]:
        written = self._store.records if self._store is not None else 0
        return self.state.step, written + len(self.state.buffer.rows)

    def _drops_step(self) -> bool:
        if self._failed or not self.state.wants_step:
            self.state.buffer.rows.clear()
            self._left_out = True
            return True
        return False

    def _write_step(self, parameters: Sequence[Digest], *, finished: bool) -> None:
        if self._drops_step():
            return
        with self._unwritable_handled():
            store = self._store or self._open_store()
            first, count = self.state.buffer.end_step(store)
            marks = joined([mark for _, mark, _ in self._losses], OUTPUT)
            store.add_losses(
                (_real(value), marks[n * OUTPUT : (n + 1) * OUTPUT], source)
                for n, (value, _, source) in enumerate(self._losses)
            )
            self._level.write(store, first)
            cache = self.state.cache
            row = StepRow(
                step=self.state.step,
                first=first,
                records=count,
                bytes=cache.bytes_read,
                parameters=_combined(parameters),
                gradients=_combined(self._gradients),
                random=self._generators.read(),
                finished=finished,
                level=self._level.name,
            )
            cache.bytes_read = 0
            store.end_step(row)
            if self._limit is not None:
                self._limit.hold(row)

    def _open_store(self) -> Store:
        self._store = open_store(self.request)
        if self.request.max_size is not None:
            self._limit = SizeLimit(self._store, self.request.max_size)
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
    first, last = asked
    wanted = f"step {first} was" if first == last else f"steps {first} to {last} were"
    if ended > 1:
        had = f"{ended:,} steps, 0 to {ended - 1}"
    else:
        had = "1 step, 0" if ended else "no steps"
    return f"the run had {had}; {wanted} not reached: nothing was recorded"


def _combined(digests: Sequence[Digest]) -> bytes:
    together = joined(digests, INPUT)
    return xxhash.xxh3_128_digest(together) if together else b""


def _value_and_fingerprint(loss: Any) -> tuple[Any, Any]:
    if loss.__class__ in PLAIN and loss.is_cpu:
        return loss.item() if loss.numel() == 1 else None, fingerprint_of(loss)
    # To ask a device now would wait for it: a copy of the value stays there until the step ends.
    loss = loss.detach()
    return loss.clone() if loss.numel() == 1 else None, fingerprint_of(loss)


def _real(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        value = value.item()
    return None if value is None or isinstance(value, complex) else float(value)


# What is read of an iterator of torch's loader is private. A fact that a newer torch no longer has
# there is left out, and so is a loader whose objects raise where they are read.


def _workers_of(iterator: Any) -> int:
    return int(getattr(iterator, "_num_workers", 0))


def _own_init(init: Any) -> str | None:
    if isinstance(init, partial) and getattr(init.func, "__name__", "") == _OF_DATAPIPES:
        init = init.args[0]
    init = author_worker_init(init)
    if init is None:
        return None
    while isinstance(init, partial):
        init = init.func
    function = getattr(init, "__func__", init)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    name = getattr(function, "__name__", type(function).__name__)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"
