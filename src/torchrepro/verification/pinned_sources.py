"""Pins sources of nondeterminism, to find out whether they make runs differ.

A pinned source returns the same values in each run: clocks advance evenly, files are sorted,
threads run one after another. An ordinary run could get such values too. Sources stay pinned until
the process ends. Only calls by program lines are pinned, and generators that a library creates for
the program. A library that measures time, waits or names a file still gets the real values.
"""

from __future__ import annotations

import builtins
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from operator import attrgetter
from types import FrameType
from typing import TYPE_CHECKING, Any

from torchrepro.ground.callers import address, is_library
from torchrepro.ground.imports import AfterImport
from torchrepro.seeding.nondeterministic_calls import (
    ADDRESS,
    CLOCK,
    CLOCK_AND_CARD,
    ENTROPY,
    EVERY_SOURCE,
    EXPLICIT_SEED,
    FILES,
    HASH,
    PROCESS,
    THREADS,
    UNINITIALIZED_MEMORY,
    WORKER,
    Source,
)
from torchrepro.seeding.nondeterministic_reads import Watch
from torchrepro.verification.at_start import Entries

if TYPE_CHECKING:
    from torchrepro.seeding.observed_calls import Call, Change

_START, _TICK = 1_700_000_000, 0.05  # seconds
_PROCESS = 4242
_SEED = 1234
_PATIENCE = 2.0  # seconds to wait for a thread, which may wait for the thread that started it

_ticks = count()
_numbers: dict[int, tuple[int, Any]] = {}  # by address; kept alive, so that addresses stay unique
_entropy = random.Random(_SEED)  # noqa: S311 - no secret comes from it


def _number(value: Any) -> int:
    return _numbers.setdefault(address(value), (len(_numbers) + 1, value))[0]


def _clock(row: Source, _: Call, now: Any) -> Any:
    begun = _START if row.module == "time" else 0  # a timer starts at 0
    seconds = begun + next(_ticks) * _TICK
    return int(seconds * 1e9) if row.attribute.endswith("_ns") else type(now)(seconds)


def _from_a_seed(row: Source, call: Call, drawn: Any) -> Any:
    args, function = call.args, row.attribute.rpartition(".")[2]
    if isinstance(drawn, bytes):
        return _entropy.randbytes(len(drawn))
    if function == "default_rng":
        return sys.modules["numpy"].random.default_rng(_SEED)
    if function in {"getrandbits", "randbits"}:
        return _entropy.getrandbits(args[-1])
    if function == "random":
        return _entropy.random()
    if row.attribute == "Random.seed":
        args[0].seed(_SEED)
    elif row.module == "torch":
        sys.modules["torch"].manual_seed(_SEED)
        return _SEED
    else:
        getattr(sys.modules[row.module], function)(_SEED)
    return drawn


def _given_seed(row: Source, call: Call, done: Any) -> Any:
    function = attrgetter(row.attribute)(sys.modules[row.module])
    receiver = call.args[:1] if "." in row.attribute else ()
    returned = function.__wrapped__(*receiver, _SEED)
    return done if returned is None else returned


def _stable_hash(_: Source, call: Call, done: Any) -> int:
    from zlib import crc32

    value = call.args[0]
    hash_method: Any = type(value).__hash__
    return _number(value) if hash_method is object.__hash__ else crc32(repr(value).encode())


def _in_order(_: Source, __: Call, listed: Any) -> Any:
    if isinstance(listed, list):
        return sorted(listed)
    with listed as entries:
        return Entries(sorted(entries, key=lambda entry: entry.name))


def _one_after_another(row: Source, call: Call, done: Any) -> Any:
    if row.attribute == "Thread.start":
        call.args[0].join(_PATIENCE)
    else:
        with suppress(TimeoutError):
            done.exception(_PATIENCE)
    return done


def _zeros(_: Source, __: Call, memory: Any) -> Any:
    if hasattr(memory, "data_ptr"):
        memory.detach().zero_()
    else:
        memory.fill(0)
    return memory


_PINNED_VALUE: Mapping[str, Callable[[Source, Call, Any], Any]] = {
    CLOCK: _clock,
    ENTROPY: _from_a_seed,
    CLOCK_AND_CARD: lambda row, call, done: type(done)(int=next(_ticks)),
    PROCESS: lambda row, call, done: _PROCESS,
    ADDRESS: lambda row, call, done: _number(call.args[0]),
    HASH: _stable_hash,
    FILES: _in_order,
    THREADS: _one_after_another,
    EXPLICIT_SEED: _given_seed,
    UNINITIALIZED_MEMORY: _zeros,
    WORKER: lambda row, call, done: _SEED if row.attribute == "initial_seed" else None,
}

IDENTIFY_WORKER = (("torch.utils.data", "get_worker_info"), ("torch", "initial_seed"))

_FURTHER_SOURCES = (
    Source(
        *("concurrent.futures.thread", "ThreadPoolExecutor.submit", THREADS, ""),
        through=("concurrent.futures._base",),  # its `map` calls `submit` from there
    ),
    *(
        Source(module, f"empty{like}", UNINITIALIZED_MEMORY, "")
        for module in ("torch", "numpy")
        for like in ("", "_like")
    ),
    *(Source(*function, WORKER, "") for function in IDENTIFY_WORKER),
)
"""Functions that are observed only to pin them: it costs too much to observe them in every run."""

PINNED_TOGETHER = tuple(source for source in _PINNED_VALUE if source not in (EXPLICIT_SEED, WORKER))
"""The sources that are pinned if all are: all but the seeds of the program, and the functions that
distinguish the workers of a loader."""


class _Pin(Watch):
    def __init__(self, pins: Mapping[str, Sequence[str]]) -> None:
        self._pins = pins
        super().__init__([row for row in (*EVERY_SOURCE, *_FURTHER_SOURCES) if row.what in pins])

    def heard(self, row: Source, call: Call, front: FrameType | None, where: str) -> Change | None:
        lines = self._pins[row.what]
        if lines and not any(where.endswith(line) for line in lines):
            return None
        if row.attribute == "Thread.start" and front is not None:
            return None  # the thread of a pool may not end: its tasks are waited for instead
        return lambda done: _PINNED_VALUE[row.what](row, call, done)


_pins: list[_Pin] = []


def pin(pins: Mapping[str, Sequence[str]]) -> None:
    """Pin each source in this process at the given program lines, or everywhere without lines."""
    _pins.append(_Pin(pins))
    if ADDRESS in pins and not pins[ADDRESS]:
        _number_objects()


def _number_objects() -> None:
    """Use serial numbers instead of addresses as the hashes of objects.

    This makes the order of a set of objects the same in every run. It applies to tensors, modules,
    futures, and objects of the program's classes that do not define `__hash__`.
    """
    build = builtins.__build_class__

    def build_class(body: Any, name: str, *bases: Any, **keywords: Any) -> Any:
        made = build(body, name, *bases, **keywords)
        caller = sys._getframe(1)  # noqa: SLF001 - documented
        if not is_library(caller.f_code.co_filename) and made.__hash__ is object.__hash__:
            made.__hash__ = _number
        return made

    def number_classes_of(module: str) -> None:
        for name in numbered[module]:
            attrgetter(name)(sys.modules[module]).__hash__ = _number

    builtins.__build_class__ = build_class  # type: ignore[assignment]
    numbered = {"torch": ("Tensor", "nn.Module"), "concurrent.futures._base": ("Future",)}
    AfterImport(numbered, number_classes_of).watch_all()
