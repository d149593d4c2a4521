"""Changes each process of a run as it starts: applies perturbations, and starts observers.

A perturbation does not import modules that the program may never import, such as torch. It draws
no random numbers from generators of the program. All changes last until the process ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from itertools import count
from typing import Any

from torchrepro.ground.fork_safety import comes_from_fork_server, is_fork_server
from torchrepro.ground.imports import AfterImport, named

VARIABLE = "TORCHREPRO_AT_START"
"""The variable that passes the changes, as JSON, to every process of a run."""

_LONGEST = 0.02  # the longest delay of a batch by a loader worker, in seconds

_kept: list[Any] = []


def begin(environment: Mapping[str, str]) -> None:
    """Apply to this process the changes in the variable `VARIABLE` of `environment`.

    The name of a change is a key of `IN_PROCESS`, or the path of a function in this package.
    """
    for name, value in json.loads(environment.get(VARIABLE) or "{}").items():
        (IN_PROCESS.get(name) or named(name))(value)


def _litter_the_heap(number: int) -> None:
    """Allocate and free blocks, so that addresses and uninitialized bytes vary with `number`."""
    sizes = [16 + index * number * 7919 % 65536 for index in range(512)]
    blocks = [bytes([1 + number % 255]) * size for size in sizes]
    _kept.append(blocks[::2])
    _kept.append([object() for _ in range(number * 7919 % 977)])


def _leave_some_cpus_alone(cpus: Mapping[str, Sequence[int]]) -> None:
    # Torch must use as many threads as before, because another number changes the order of sums.
    # So torch counts all CPUs before the change, also CPUs that a child did not inherit.
    os.sched_setaffinity(0, cpus["all"])

    def keep_to_some(module: str) -> None:
        sys.modules[module].get_num_threads()  # the first call counts the CPUs
        os.sched_setaffinity(0, cpus["some"])

    AfterImport(["torch"], keep_to_some).watch_all()


def _delay_batches(number: int) -> None:
    calls = count()

    def delay(module: str) -> None:
        from torchrepro.seeding.streams import present_worker

        queue = sys.modules[module].Queue
        put = queue.put

        @wraps(put)
        def late(self: Any, *args: Any, **kwargs: Any) -> Any:
            if present_worker() is not None:
                # Drawing a random number for the delay would change the program's results.
                varying = os.getpid() * 40503 + next(calls) * 2654435761 + number * 97
                time.sleep(_LONGEST * (varying % 1000 / 1000))
            return put(self, *args, **kwargs)

        queue.put = late

    AfterImport(["multiprocessing.queues"], delay).watch_all()


def _move_the_clock(seconds: float) -> None:
    # Only the time of day moves. Clocks that measure intervals are unchanged.
    nanoseconds = int(seconds * 1e9)
    now, now_in_ns = time.time, time.time_ns
    time.time = lambda: now() + seconds
    time.time_ns = lambda: now_in_ns() + nanoseconds
    for name in ("gmtime", "localtime", "ctime"):
        setattr(time, name, _of_now(getattr(time, name), "time"))
    for name in ("asctime", "strftime"):
        setattr(time, name, _of_now(getattr(time, name), "localtime", name == "strftime"))


def _of_now(original: Callable[..., Any], present: str, required: int = 0) -> Callable[..., Any]:
    """Wrap a function of `time`, so that its optional time argument defaults to the moved time."""

    @wraps(original)
    def shifted(*arguments: Any) -> Any:
        if arguments[required:] in ((), (None,)):
            arguments = (*arguments[:required], getattr(time, present)())
        return original(*arguments)

    return shifted


def _list_files_otherwise(number: int) -> None:
    # `pathlib`, `glob` and `os.walk` use these functions. Imports are unchanged, because Python's
    # import system keeps its own reference to `listdir`.
    listdir, scandir = os.listdir, os.scandir

    def in_another_order(entries: list[Any]) -> list[Any]:
        turned = entries[::-1]
        first = number % len(turned) if len(turned) > 2 else 0  # noqa: PLR2004 - two have one other order
        return turned[first:] + turned[:first]

    @wraps(listdir)
    def listed(*args: Any, **kwargs: Any) -> Any:
        return in_another_order(listdir(*args, **kwargs))

    @wraps(scandir)
    def scanned(*args: Any, **kwargs: Any) -> Any:
        with scandir(*args, **kwargs) as entries:
            return Entries(in_another_order(list(entries)))

    for name, original, patched in (("listdir", listdir, listed), ("scandir", scandir, scanned)):
        patched.__module__ = "os"  # where pickle finds it
        setattr(os, name, patched)
        if original in os.supports_fd:
            os.supports_fd.add(patched)


class Entries(Iterator["os.DirEntry[Any]"], AbstractContextManager["Entries"]):
    """Entries of a folder, with the interface of the iterator that `os.scandir` returns."""

    def __init__(self, entries: list[os.DirEntry[Any]]) -> None:
        self._entries = iter(entries)

    def __next__(self) -> os.DirEntry[Any]:
        return next(self._entries)

    def close(self, *_: object) -> None:
        self._entries = iter(())

    __exit__ = close


def _load_with(workers: int) -> None:
    def set_workers(_module: str) -> None:
        from torchrepro.seeding.loader_hook import workers_policy

        workers_policy.write(workers)  # a profile, applied later, sets the same or nothing

    AfterImport(["torch.utils.data"], set_workers).watch_all()


def _observe(observers: Mapping[str, Any]) -> None:
    process = os.getpid()

    def begin() -> None:
        for path, arguments in observers.items():
            try:
                named(path)(arguments)
            except (ImportError, AttributeError) as missing:  # private names of torch's loader
                sys.exit(f"torchrepro: {missing}: the relation does not support this torch")

    def begin_in_child() -> None:
        if os.getppid() == process:
            begin()

    def begin_in_process(_module: str) -> None:
        # A forked child must not observe. A child of a fork server must, like a spawned process.
        if is_fork_server():
            os.register_at_fork(after_in_child=begin_in_child)
        elif comes_from_fork_server() or os.getpid() == process:
            begin()

    AfterImport(["torch"], begin_in_process).watch_all()


OBSERVED = "observed"
"""The observers that begin once torch is imported: paths of functions, and their arguments."""

WORKERS = "number of loader workers"  # how many worker processes every loader has

IN_PROCESS: Mapping[str, Callable[[Any], None]] = {
    "allocation": _litter_the_heap,
    "thread scheduling": sys.setswitchinterval,
    "affinity": _leave_some_cpus_alone,
    "loader timing": _delay_batches,
    "clock": _move_the_clock,
    "file order": _list_files_otherwise,
    WORKERS: _load_with,
    OBSERVED: _observe,
}
