"""Observes how processes load batches, and applies the changes of a trial to the loading.

A process notes each batch that it loads, and the program lines that draw random numbers for this
batch. It notes the values that a dataset can reach when a loader begins, and when the process
loads its first batch.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch

from torchrepro.ground.callers import line, program_line
from torchrepro.ground.patching import patch, surround
from torchrepro.seeding.generators import Slot, States, plain_state
from torchrepro.seeding.streams import derive
from torchrepro.trace.fingerprint import unobserved
from torchrepro.trace.frames import is_of_program
from torchrepro.trace.hooks import wrap_loader_iteration
from torchrepro.verification.relations.notes import Notes
from torchrepro.verification.relations.reachable import (
    batch_digest,
    digest,
    generators,
    global_generators,
    is_own,
    reached,
    text_digest,
)

_NOTED, _FOLLOWED = 1000, 64  # the most batches noted per process, and the most with draws
_lasting = ExitStack()  # as long as the process


def observe_loading(arguments: Mapping[str, Any]) -> None:
    """Write notes on the loading of batches to `folder`, and apply the changes of a trial.

    In `arguments`, `loader` has attributes that every loader gets, and `reset` names generators.
    Such a generator is set to a fixed state before each batch is loaded, and restored after the
    batch.
    """
    loading = _Loading(arguments)
    wrap_loader_iteration(_lasting, loading.loader_begins)
    # Private, because torch has no public hook between a loader and its dataset.
    for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
        surround(_lasting, getattr(fetch, name), "fetch", loading.around_fetch)


class _Loading:
    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._folder, self._reset = arguments["folder"], frozenset(arguments.get("reset", ()))
        self._attributes = dict(arguments.get("loader", {}))
        if "start_method" in self._attributes:
            context = multiprocessing.get_context(self._attributes.pop("start_method"))
            self._attributes["_DataLoader__multiprocessing_context"] = context
        self._set: dict[str, str] = {}  # attribute -> the line that last set it
        self._watched: set[type] = set()
        self._begin_process()

    def _begin_process(self) -> None:
        self._process, self._notes, self._fetched = os.getpid(), Notes(self._folder), 0

    def _note(self, dataset: Any, **values: Any) -> None:
        context = {"at": time.monotonic_ns(), "in_worker": get_worker_info() is not None}
        self._notes.add(dataset=type(dataset).__name__, **context, **values)

    @contextmanager
    def loader_begins(self, loader: Any) -> Iterator[None]:
        attributes = vars(loader)  # `setattr` would reject some of them
        context = loader.multiprocessing_context or multiprocessing
        options = {
            "start_method": context.get_start_method(),
            "in_order": attributes.get("in_order"),
            "persistent_workers": loader.persistent_workers,
        }
        read = _read_by(loader.dataset, loader.collate_fn)
        self._note(loader.dataset, loader=options, read=read, set=self._set)
        self._watch_attributes(type(loader.dataset))
        before = {name: attributes[name] for name in self._attributes if name in attributes}
        attributes |= {name: self._attributes[name] for name in before}
        try:
            yield
        finally:
            attributes |= before

    def _watch_attributes(self, cls: type) -> None:
        original: Any = cls.__setattr__
        if cls in self._watched or not is_own(sys.modules.get(cls.__module__)):
            return
        self._watched.add(cls)

        def assign(dataset: Any, name: str, value: Any) -> None:
            original(dataset, name, value)
            line = program_line(sys._getframe(1))  # noqa: SLF001 - as `callers` does
            self._set[f"{name} of {type(dataset).__name__}"] = line

        patch(_lasting, cls, "__setattr__", assign, original)

    def around_fetch(self, original: Callable[..., Any], fetcher: Any, index: Any) -> Any:
        if self._process != os.getpid():
            self._begin_process()
        # Under a profile, the dataset may be inside a wrapper of torchrepro, which seeds samples.
        dataset = getattr(fetcher.dataset, "_dataset", fetcher.dataset)
        if not self._fetched:
            self._note(dataset, read=_read_by(dataset, fetcher.collate_fn))
        self._fetched += 1
        roots = [*global_generators().items(), ("", dataset), ("", fetcher.collate_fn)]
        reachable = [*generators(roots)]
        to_reset = [
            (generator, generator.slot(value))
            for name, value, generator in reachable
            if name in self._reset
        ]
        before = States(slot for _, slot in to_reset)
        for generator, slot in to_reset:
            fixed = getattr(derive("trial", 0), generator.name)()
            with suppress(ValueError):  # for a bit generator other than numpy's default
                slot.write(generator.slot(fixed).read())
        is_noted = self._fetched <= _NOTED
        reads = is_noted and not self._reset
        observed = reachable if reads else []
        draws = _Draws([(name, generator.slot(value)) for name, value, generator in observed])
        present = sys.gettrace()
        follows = reads and self._fetched <= _FOLLOWED and present is None
        sys.settrace(draws.called if follows else present)
        try:
            batch = original(fetcher, index)
        finally:
            sys.settrace(present)
            drawn = draws.drawn()
            before.put_back()
        if is_noted:
            worker = get_worker_info()
            seed, mark = worker and worker.seed - worker.id, batch_digest(batch)
            how = {"fetched": repr(index), "drew": draws.lines, "drawn": drawn}
            self._note(dataset, **how, batch=mark, seed=seed)
        return batch


class _Draws:
    """Finds the program lines that draw from generators while a batch is loaded."""

    def __init__(self, slots: Sequence[tuple[str, Slot]]) -> None:
        self.lines: dict[str, str] = {}
        self._slots, self._line = slots, ""
        self._states = self._first = self._read()

    def drawn(self) -> dict[str, str]:
        """Return the generators that were drawn from, each with a digest of its first state."""
        states = zip(self._slots, self._first, self._read(), strict=True)
        return {name: text_digest(first) for (name, _), first, last in states if first != last}

    def _read(self) -> Sequence[Any]:
        with unobserved():
            return [plain_state(slot.read()) for _, slot in self._slots]

    def called(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if not is_of_program(frame.f_code):
            return None
        before, self._states = self._states, self._read()
        for (name, _), old, new in zip(self._slots, before, self._states, strict=True):
            if old != new:
                self.lines.setdefault(name, self._line)
        self._line = line(frame.f_back or frame if event == "return" else frame)
        return self.called


def _read_by(*roots: Any) -> dict[str, str]:
    """Return the digests of the values that can be reached from `roots`, by their names."""
    digests = [(name, digest(value)) for name, value in reached([("", root) for root in roots])]
    return {name: text for name, text in reversed(digests) if text}
