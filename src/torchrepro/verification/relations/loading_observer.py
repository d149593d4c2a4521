"""What processes note as they load batches, and change for a trial, to see what workers change.

A process that loads notes each batch, and the lines of the program that draw for it. What code of
the program can read then is noted as a loader begins and as a process begins to load.
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

from torchrepro.ground.callers import line, program_place
from torchrepro.ground.patching import patch, surround
from torchrepro.seeding.generators import Slot, States, plain_state
from torchrepro.seeding.streams import derive
from torchrepro.trace.fingerprint import unobserved
from torchrepro.trace.frames import is_of_program
from torchrepro.trace.hooks import within_loaders_begun
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

_NOTED, _FOLLOWED = 1000, 64  # batches that a process notes, and those of which it notes draws
_lasting = ExitStack()  # as long as the process


def observe_loading(told: Mapping[str, Any]) -> None:
    """Note how batches are loaded, by loaders with the attributes of `loader`, if it is told.

    The generators that `reset` names are in one state as each batch begins to be loaded, and
    are put back after it.
    """
    loading = _Loading(told)
    within_loaders_begun(_lasting, loading.loader_begins)
    # Private, because torch has no public place between a loader and what it reads.
    for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
        surround(_lasting, getattr(fetch, name), "fetch", loading.around_fetch)


class _Loading:
    def __init__(self, told: Mapping[str, Any]) -> None:
        self._folder, self._reset = told["folder"], frozenset(told.get("reset", ()))
        self._attributes = dict(told.get("loader", {}))
        if "start_method" in self._attributes:
            context = multiprocessing.get_context(self._attributes.pop("start_method"))
            self._attributes["_DataLoader__multiprocessing_context"] = context
        self._set: dict[str, str] = {}  # attributes, and the lines that have set them last
        self._watched: set[type] = set()
        self._begin_process()

    def _begin_process(self) -> None:
        self._process, self._notes, self._fetched = os.getpid(), Notes(self._folder), 0

    def _note(self, dataset: Any, **values: Any) -> None:
        its = {"at": time.monotonic_ns(), "in_worker": get_worker_info() is not None}
        self._notes.add(dataset=type(dataset).__name__, **its, **values)

    @contextmanager
    def loader_begins(self, loader: Any) -> Iterator[None]:
        attributes = vars(loader)  # it forbids to assign some of them
        context = loader.multiprocessing_context or multiprocessing
        its = {"start_method": context.get_start_method(), "in_order": attributes.get("in_order")}
        its["persistent_workers"] = loader.persistent_workers
        read = _read_by(loader.dataset, loader.collate_fn)
        self._note(loader.dataset, loader=its, read=read, set=self._set)
        self._watch_attributes(type(loader.dataset))
        before = {name: attributes[name] for name in self._attributes if name in attributes}
        attributes |= {name: self._attributes[name] for name in before}
        try:
            yield
        finally:
            attributes |= before

    def _watch_attributes(self, kind: type) -> None:
        original: Any = kind.__setattr__
        if kind in self._watched or not is_own(sys.modules.get(kind.__module__)):
            return
        self._watched.add(kind)

        def assign(own: Any, name: str, value: Any) -> None:
            original(own, name, value)
            self._set[f"{name} of {type(own).__name__}"] = program_place(sys._getframe(1))  # noqa: SLF001 - as `callers` does

        patch(_lasting, kind, "__setattr__", assign, original)

    def around_fetch(self, original: Callable[..., Any], fetcher: Any, index: Any) -> Any:
        if self._process != os.getpid():
            self._begin_process()
        # Under a profile the dataset may be within one of ours, which seeds its samples.
        dataset = getattr(fetcher.dataset, "_dataset", fetcher.dataset)
        if not self._fetched:
            self._note(dataset, read=_read_by(dataset, fetcher.collate_fn))
        self._fetched += 1
        roots = [*global_generators().items(), ("", dataset), ("", fetcher.collate_fn)]
        found = [*generators(roots)]
        held = [(kind, kind.slot(value)) for name, value, kind in found if name in self._reset]
        before = States(slot for _, slot in held)
        for kind, slot in held:
            fixed = getattr(derive("trial", 0), kind.name)()
            with suppress(ValueError):  # another bit generator than numpy's default
                slot.write(kind.slot(fixed).read())
        is_noted = self._fetched <= _NOTED
        reads = is_noted and not self._reset
        draws = _Draws([(name, kind.slot(value)) for name, value, kind in found if reads])
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
            its: dict[str, Any] = {"fetched": repr(index), "drew": draws.lines, "drawn": drawn}
            its |= {"batch": batch_digest(batch), "seed": worker and worker.seed - worker.id}
            self._note(dataset, **its)
        return batch


class _Draws:
    """By which lines of the program generators come into other states."""

    def __init__(self, slots: Sequence[tuple[str, Slot]]) -> None:
        self.lines: dict[str, str] = {}
        self._slots, self._where = slots, ""
        self._states = self._first = self._read()

    def drawn(self) -> dict[str, str]:
        """Return the generators that were drawn from, each with its state before."""
        states = zip(self._slots, self._first, self._read(), strict=True)
        return {name: text_digest(one) for (name, _), one, other in states if one != other}

    def _read(self) -> Sequence[Any]:
        with unobserved():
            return [plain_state(slot.read()) for _, slot in self._slots]

    def called(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if not is_of_program(frame.f_code):
            return None
        before, self._states = self._states, self._read()
        for (name, _), one, other in zip(self._slots, before, self._states, strict=True):
            if one != other:
                self.lines.setdefault(name, self._where)
        self._where = line(frame.f_back or frame if event == "return" else frame)
        return self.called


def _read_by(*roots: Any) -> dict[str, str]:
    """Return a digest of each value that code of a loader can reach."""
    found = [(name, digest(value)) for name, value in reached([("", root) for root in roots])]
    return {name: value for name, value in reversed(found) if value}
