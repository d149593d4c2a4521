"""What processes note as they load batches, and change for a trial, to see what workers change.

A process that loads notes each batch, and the lines of the program that draw for it. What code of
the program can read then is noted as a loader begins and as a process begins to load.
"""

from __future__ import annotations

import dis
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import xxhash
from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch

from torchrepro.callers import address, is_library, line, program_place
from torchrepro.patching import patch, surround
from torchrepro.relations.observers import Notes
from torchrepro.seeding.generators import Slot, States, generator_kind, plain_state
from torchrepro.seeding.streams import derive
from torchrepro.trace.fingerprint import unobserved
from torchrepro.trace.frames import is_of_program
from torchrepro.trace.hooks import parts_of, within_loaders_begun

_MOST, _ITEMS = 2000, 100  # objects that are looked at in all, and of one
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
        read = _digests(loader.dataset, loader.collate_fn)
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
        if kind in self._watched or not _is_own(sys.modules.get(kind.__module__)):
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
            self._note(dataset, read=_digests(dataset, fetcher.collate_fn))
        self._fetched += 1
        generators = [*_generators(dataset, fetcher.collate_fn)]
        held = [(slot, fixed) for name, slot, fixed in generators if name in self._reset]
        before = States(slot for slot, _ in held)
        for slot, fixed in held:
            with suppress(ValueError):  # another bit generator than numpy's default
                slot.write(fixed)
        follows = self._fetched <= _FOLLOWED and not self._reset
        draws = _Draws([(name, slot) for name, slot, _ in generators if follows])
        present = sys.gettrace()
        sys.settrace(draws.called if follows else present)
        try:
            batch = original(fetcher, index)
        finally:
            sys.settrace(present)
            before.put_back()
        if self._fetched <= _NOTED:
            self._note(dataset, fetched=repr(index), drew=draws.lines, value=_digest(batch))
        return batch


class _Draws:
    """By which lines of the program generators come into other states."""

    def __init__(self, slots: Sequence[tuple[str, Slot]]) -> None:
        self.lines: dict[str, str] = {}
        self._slots, self._where = slots, ""
        self._states = self._read()

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


def _generators(*roots: Any) -> Iterator[tuple[str, Slot, Any]]:
    """Yield the generators that code can reach, each with a state that is the same everywhere."""
    of_all = {
        "random": getattr(random.getstate, "__self__", None),
        "numpy.random": getattr(sys.modules.get("numpy.random.mtrand"), "_rand", None),
        "torch": torch.default_generator,
    }
    seen = set[int]()
    for name, value in [*of_all.items(), *_reached(*roots)]:
        kind = None if isinstance(value, random.SystemRandom) else generator_kind(value)
        if kind is not None and address(value) not in seen:
            seen.add(address(value))
            fixed = getattr(derive("trial", 0), kind.name)()
            yield name, kind.slot(value), kind.slot(fixed).read()


def _digests(*roots: Any) -> dict[str, str]:
    found = [(name, _digest(value)) for name, value in _reached(*roots)]
    return {name: digest for name, digest in reversed(found) if digest}


def _digest(value: Any) -> str:
    with unobserved():
        parts = [(its, kind, mark.hex()) for its, kind, mark in parts_of(value)]
    is_empty = isinstance(value, list | tuple | dict | None) and not value
    return xxhash.xxh3_64_hexdigest(repr(parts).encode()) if parts or is_empty else ""


def _reached(*roots: Any) -> Iterator[tuple[str, Any]]:
    """Yield what code can read that some objects have: attributes, and globals that it names."""
    seen: set[int] = set()
    todo = [("", root) for root in roots]
    for name, value in todo:
        if name:
            yield name, value
        if address(value) not in seen and len(todo) < _MOST:
            seen.add(address(value))
            todo += islice(_within(name, value), _ITEMS)


def _within(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, staticmethod | classmethod | MethodType):
        value = value.__func__
    if isinstance(value, FunctionType):
        codes = [value.__code__] if is_of_program(value.__code__) else []
        for code in codes:
            codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        read = [each for code in codes for each in dis.get_instructions(code)]
        for each in {its.argval: None for its in read if its.opname == "LOAD_GLOBAL"}:
            found = value.__globals__.get(each)
            yield each, found
            if isinstance(found, ModuleType) and _is_own(found):
                names = [name for code in codes for name in code.co_names]
                yield from ((name, vars(found)[name]) for name in names if name in vars(found))
    elif isinstance(value, list | tuple):
        yield from ((f"{name}[{at}]", each) for at, each in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", each) for key, each in value.items())
    elif not isinstance(value, ModuleType | torch.Tensor):
        kind = value if isinstance(value, type) else type(value)
        own = {} if value is kind else getattr(value, "__dict__", {})
        classes = [vars(each) for each in kind.__mro__ if _is_own(sys.modules.get(each.__module__))]
        for members in (own, *classes):
            for its, each in members.items():
                is_code = isinstance(each, FunctionType | staticmethod | classmethod)
                if is_code or not its.startswith("__"):
                    yield f"{its} of {kind.__name__}", each


def _is_own(module: ModuleType | None) -> bool:
    return not is_library(getattr(module, "__file__", None) or "")
