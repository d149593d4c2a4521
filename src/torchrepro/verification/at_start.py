"""What each process of a run does to itself as it starts: perturbations, and what it notes.

Perturbations import neither torch nor anything else that the program might not import, and draw no
random number from a generator of the program. All lasts as long as the process: nothing is undone.
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
"""The variable that carries what is to be done, as JSON, to every process of a run."""

_LONGEST = 0.02  # the most seconds that a worker of a loader waits before it hands over a batch

_kept: list[Any] = []


def begin(environment: Mapping[str, str]) -> None:
    """Do to this process what `VARIABLE` in `environment` names.

    Each is called by its name in `IN_PROCESS`, or by its path in this package.
    """
    for name, value in json.loads(environment.get(VARIABLE) or "{}").items():
        (IN_PROCESS.get(name) or named(name))(value)


def _litter_the_heap(number: int) -> None:
    # Moves objects to other addresses, and fills free memory with other bytes.
    sizes = [16 + index * number * 7919 % 65536 for index in range(512)]
    blocks = [bytes([1 + number % 255]) * size for size in sizes]
    _kept.append(blocks[::2])
    _kept.append([object() for _ in range(number * 7919 % 977)])


def _leave_some_cpus_alone(cpus: Mapping[str, Sequence[int]]) -> None:
    # The number of threads must stay: another number adds up in another order, which is no fault
    # of the program. So torch counts all CPUs, those that a child did not inherit as well.
    os.sched_setaffinity(0, cpus["all"])

    def keep_to_some(module: str) -> None:
        sys.modules[module].get_num_threads()  # torch counts the CPUs when it is asked first
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
                # No random number is drawn: the program would see that.
                varying = os.getpid() * 40503 + next(calls) * 2654435761 + number * 97
                time.sleep(_LONGEST * (varying % 1000 / 1000))
            return put(self, *args, **kwargs)

        queue.put = late

    AfterImport(["multiprocessing.queues"], delay).watch_all()


def _move_the_clock(seconds: float) -> None:
    # The time of day alone: intervals are measured as before.
    moved = int(seconds * 1e9)
    now, now_in_ns = time.time, time.time_ns
    time.time = lambda: now() + seconds
    time.time_ns = lambda: now_in_ns() + moved
    for name in ("gmtime", "localtime", "ctime"):
        setattr(time, name, _of_now(getattr(time, name), "time"))
    for name in ("asctime", "strftime"):
        setattr(time, name, _of_now(getattr(time, name), "localtime", name == "strftime"))


def _of_now(original: Callable[..., Any], present: str, required: int = 0) -> Callable[..., Any]:
    # The last argument of `original`, the time, may be left out.
    @wraps(original)
    def shifted(*arguments: Any) -> Any:
        if arguments[required:] in ((), (None,)):
            arguments = (*arguments[:required], getattr(time, present)())
        return original(*arguments)

    return shifted


def _list_files_otherwise(number: int) -> None:
    # As `pathlib`, `glob` and `os.walk` list them. Python's import system has a reference of its
    # own to `listdir` and goes on as before.
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

    for name, original, other in (("listdir", listdir, listed), ("scandir", scandir, scanned)):
        other.__module__ = "os"  # where pickle finds it
        setattr(os, name, other)
        if original in os.supports_fd:
            os.supports_fd.add(other)


class Entries(Iterator["os.DirEntry[Any]"], AbstractContextManager["Entries"]):
    """What `os.scandir` returns: an iterator that can be closed, by itself or by a `with` block."""

    def __init__(self, entries: list[os.DirEntry[Any]]) -> None:
        self._entries = iter(entries)

    def __next__(self) -> os.DirEntry[Any]:
        return next(self._entries)

    def close(self, *_: object) -> None:
        self._entries = iter(())

    __exit__ = close


def _load_with(workers: int) -> None:
    def load_so(_module: str) -> None:
        from torchrepro.seeding.loader_hook import workers_policy

        workers_policy.write(workers)  # what a profile says later is the same, or nothing

    AfterImport(["torch.utils.data"], load_so).watch_all()


def _observe(kinds: Mapping[str, Any]) -> None:
    process = os.getpid()

    def begin() -> None:
        for path, value in kinds.items():
            try:
                named(path)(value)
            except (ImportError, AttributeError) as missing:  # private names of torch's loader
                sys.exit(f"torchrepro: {missing}: the relation needs what is not in this torch")

    def begin_in_child() -> None:
        if os.getppid() == process:
            begin()

    def begin_where_it_runs(_module: str) -> None:
        # A forked child notes nothing, but those of a fork server begin as spawned ones do.
        if is_fork_server():
            os.register_at_fork(after_in_child=begin_in_child)
        elif comes_from_fork_server() or os.getpid() == process:
            begin()

    AfterImport(["torch"], begin_where_it_runs).watch_all()


OBSERVED = "observed"
"""What a process notes of itself once torch has been imported, by the path of what begins it."""

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
