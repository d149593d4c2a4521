"""Sources that no seed controls, held the same in every run: whether they are why runs differ.

A process holds them from its start to its end, so nothing is undone. They give what a run may get:
a clock goes on, files are sorted, threads run one after another. Only calls that a line of the
program made are held, and generators that a library makes for it; a library that measures, waits or
names something does so as before.
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
    FILES,
    GIVEN_SEED,
    HASH,
    PROCESS,
    THREADS,
    UNWRITTEN,
    WORKER,
    Source,
)
from torchrepro.seeding.nondeterministic_reads import Watch
from torchrepro.verification.at_start import Entries

if TYPE_CHECKING:
    from torchrepro.seeding.nondeterministic_calls import Arguments
    from torchrepro.seeding.observed_calls import Change

_START, _TICK = 1_700_000_000, 0.05  # seconds
_PROCESS = 4242
_SEED = 1234
_PATIENCE = 2.0  # seconds that a thread is waited for: it may wait for the one that started it

_ticks = count()
_numbers: dict[int, tuple[int, Any]] = {}  # of objects by address; the object is kept alive
_entropy = random.Random(_SEED)  # noqa: S311 - no secret comes from it


def _number(value: Any) -> int:
    return _numbers.setdefault(address(value), (len(_numbers) + 1, value))[0]


def _clock(row: Source, _: Arguments, now: Any) -> Any:
    begun = _START if row.module == "time" else 0  # what a timer tells begins with nothing
    seconds = begun + next(_ticks) * _TICK
    return int(seconds * 1e9) if row.attribute.endswith("_ns") else type(now)(seconds)


def _from_a_seed(row: Source, arguments: Arguments, drawn: Any) -> Any:
    args, function = arguments[0], row.attribute.rpartition(".")[2]
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


def _given_seed(row: Source, arguments: Arguments, done: Any) -> Any:
    function = attrgetter(row.attribute)(sys.modules[row.module])
    own = arguments[0][:1] if "." in row.attribute else ()
    found = function.__wrapped__(*own, _SEED)
    return done if found is None else found


def _stable_hash(_: Source, arguments: Arguments, done: Any) -> int:
    from zlib import crc32

    value = arguments[0][0]
    own: Any = type(value).__hash__
    return _number(value) if own is object.__hash__ else crc32(repr(value).encode())


def _in_order(_: Source, __: Arguments, listed: Any) -> Any:
    if isinstance(listed, list):
        return sorted(listed)
    with listed as entries:
        return Entries(sorted(entries, key=lambda entry: entry.name))


def _one_after_another(row: Source, arguments: Arguments, done: Any) -> Any:
    if row.attribute == "Thread.start":
        arguments[0][0].join(_PATIENCE)
    else:
        with suppress(TimeoutError):
            done.exception(_PATIENCE)
    return done


def _zeros(_: Source, __: Arguments, memory: Any) -> Any:
    if hasattr(memory, "data_ptr"):
        memory.detach().zero_()
    else:
        memory.fill(0)
    return memory


_HOLD: Mapping[str, Callable[[Source, Arguments, Any], Any]] = {
    CLOCK: _clock,
    ENTROPY: _from_a_seed,
    CLOCK_AND_CARD: lambda row, arguments, done: type(done)(int=next(_ticks)),
    PROCESS: lambda row, arguments, done: _PROCESS,
    ADDRESS: lambda row, arguments, done: _number(arguments[0][0]),
    HASH: _stable_hash,
    FILES: _in_order,
    THREADS: _one_after_another,
    GIVEN_SEED: _given_seed,
    UNWRITTEN: _zeros,
    WORKER: lambda row, arguments, done: _SEED if row.attribute == "initial_seed" else None,
}

TELL_OF_WORKER = (("torch.utils.data", "get_worker_info"), ("torch", "initial_seed"))

_MORE = (
    Source(
        *("concurrent.futures.thread", "ThreadPoolExecutor.submit", THREADS, ""),
        through=("concurrent.futures._base",),  # as its `map` does
    ),
    *(
        Source(module, f"empty{like}", UNWRITTEN, "")
        for module in ("torch", "numpy")
        for like in ("", "_like")
    ),
    *(Source(*each, WORKER, "") for each in TELL_OF_WORKER),
)
"""What is heard only in order to hold it: listening to it all the time would cost something."""

HELD_AT_ONCE = tuple(what for what in _HOLD if what not in (GIVEN_SEED, WORKER))
"""What is held in a process that holds everything: all but the seeds of the program, and what tells
one worker of a loader from another."""


class _Holding(Watch):
    def __init__(self, held: Mapping[str, Sequence[str]]) -> None:
        self._held = held
        super().__init__([row for row in (*EVERY_SOURCE, *_MORE) if row.what in held])

    def heard(
        self, row: Source, arguments: Arguments, front: FrameType | None, where: str
    ) -> Change | None:
        lines = self._held[row.what]
        if lines and not any(where.endswith(each) for each in lines):
            return None
        if row.attribute == "Thread.start" and front is not None:
            return None  # a thread of a pool goes on; what it is given is waited for
        return lambda done: _HOLD[row.what](row, arguments, done)


_holding: list[_Holding] = []


def hold(held: Mapping[str, Sequence[str]]) -> None:
    """Hold sources in this process, each at some lines or, without any, in all of the program."""
    _holding.append(_Holding(held))
    if ADDRESS in held and not held[ADDRESS]:
        _number_objects()


def _number_objects() -> None:
    """Let objects be found by the order in which they are first asked for, and not by address.

    These are tensors, modules, futures, and objects of the program's classes that say nothing
    else of it: the order of a set of them is then the same in every run.
    """
    build = builtins.__build_class__

    def build_class(body: Any, name: str, *bases: Any, **more: Any) -> Any:
        made = build(body, name, *bases, **more)
        caller = sys._getframe(1)  # noqa: SLF001 - documented
        if not is_library(caller.f_code.co_filename) and made.__hash__ is object.__hash__:
            made.__hash__ = _number
        return made

    def number_those_of(module: str) -> None:
        for name in numbered[module]:
            attrgetter(name)(sys.modules[module]).__hash__ = _number

    builtins.__build_class__ = build_class  # type: ignore[assignment]
    numbered = {"torch": ("Tensor", "nn.Module"), "concurrent.futures._base": ("Future",)}
    AfterImport(numbered, number_those_of).watch_all()
