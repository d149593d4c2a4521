"""Perturbations that a process applies to itself as it starts.

They import neither torch nor anything else that the program might not import, and draw no random
number from a generator of the program. They last as long as the process, so nothing is undone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import wraps
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

VARIABLE = "TORCHREPRO_STRESS"
"""The variable that carries the perturbations, as JSON, to every process of a run."""

_LONGEST = 0.02
"""The most seconds that a worker of a loader waits before it hands over a batch."""

_LOADERS = "torch.utils.data"
_kept: list[Any] = []
_calls = count()


def perturb(environment: Mapping[str, str]) -> None:
    """Apply the perturbations that `VARIABLE` in `environment` names to this process."""
    text = environment.get(VARIABLE)
    if text:
        for name, value in json.loads(text).items():
            IN_PROCESS[name](value)


def _litter_the_heap(number: int) -> None:
    """Move objects to other addresses and fill free memory with other bytes."""
    sizes = [16 + index * number * 7919 % 65536 for index in range(512)]
    blocks = [bytes([1 + number % 255]) * size for size in sizes]
    _kept.append(blocks[::2])
    _kept.append([object() for _ in range(number * 7919 % 977)])


def _leave_some_cpus_alone(cpus: Mapping[str, Sequence[int]]) -> None:
    """Use only some of the CPUs once torch has counted them all.

    The number of threads must stay: another number adds up in another order, which is no fault of
    a program. A process that inherits the few CPUs therefore gets all of them back until then.
    """
    from torchrepro.imports import AfterImport

    os.sched_setaffinity(0, cpus["all"])

    def keep_to_some(module: str) -> None:
        sys.modules[module].get_num_threads()  # torch counts the CPUs when it is asked first
        os.sched_setaffinity(0, cpus["some"])

    if "torch" in sys.modules:
        keep_to_some("torch")
    else:
        AfterImport(["torch"], keep_to_some).watch()


def _delay_batches(number: int) -> None:
    """Delay every batch of each worker of a DataLoader, by varying times."""
    from torchrepro.imports import AfterImport

    AfterImport(["multiprocessing.queues"], lambda module: _delay(module, number)).watch()


def _delay(module: str, number: int) -> None:
    from torchrepro.seeding.streams import present_worker

    queue = sys.modules[module].Queue
    put = queue.put

    @wraps(put)
    def late(self: Any, *args: Any, **kwargs: Any) -> Any:
        if present_worker() is not None:
            time.sleep(_LONGEST * _share(number))
        return put(self, *args, **kwargs)

    queue.put = late


def _share(number: int) -> float:
    """Return a number between 0 and 1, another one at every call and in every process."""
    return (os.getpid() * 40503 + next(_calls) * 2654435761 + number * 97) % 1000 / 1000


def _move_the_clock(seconds: float) -> None:
    """Shift the time of day of Python's `time`; intervals are measured as before."""
    moved = int(seconds * 1e9)
    now, now_in_ns = time.time, time.time_ns
    time.time = lambda: now() + seconds
    time.time_ns = lambda: now_in_ns() + moved
    for name in ("gmtime", "localtime", "ctime"):
        setattr(time, name, _of_now(getattr(time, name)))
    for name in ("asctime", "strftime"):
        setattr(time, name, _of_today(getattr(time, name), name == "strftime"))


def _of_now(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def shifted(seconds: float | None = None) -> Any:
        return original(time.time() if seconds is None else seconds)

    return shifted


def _of_today(original: Callable[..., Any], required: int) -> Callable[..., Any]:
    """Return a function whose last argument, the time, may be left out."""

    @wraps(original)
    def shifted(*arguments: Any) -> Any:
        left_out = len(arguments) == required
        return original(*arguments, *([time.localtime()] if left_out else []))

    return shifted


def _list_files_otherwise(number: int) -> None:
    """List the entries of every folder in another order, as `pathlib`, `glob` and `os.walk` do.

    Python's import system has a reference of its own to `listdir` and goes on as before.
    """
    listdir, scandir = os.listdir, os.scandir

    @wraps(listdir)
    def listed(*args: Any, **kwargs: Any) -> Any:
        return _in_another_order(listdir(*args, **kwargs), number)

    @wraps(scandir)
    def scanned(*args: Any, **kwargs: Any) -> Any:
        with scandir(*args, **kwargs) as entries:
            return _Entries(_in_another_order(list(entries), number))

    for name, original, other in (("listdir", listdir, listed), ("scandir", scandir, scanned)):
        other.__module__ = "os"  # where pickle finds it
        setattr(os, name, other)
        if original in os.supports_fd:
            os.supports_fd.add(other)


def _in_another_order(entries: list[Any], number: int) -> list[Any]:
    """Return the entries the other way round, beginning with another one for each `number`."""
    turned = entries[::-1]
    first = number % len(turned) if len(turned) > 2 else 0  # noqa: PLR2004 - two have one other order
    return turned[first:] + turned[:first]


class _Entries:
    """What `os.scandir` returns: an iterator that can be closed, by itself or by a `with` block."""

    def __init__(self, entries: list[os.DirEntry[Any]]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[os.DirEntry[Any]]:
        return self

    def __next__(self) -> os.DirEntry[Any]:
        return next(self._entries)

    def close(self) -> None:
        self._entries = iter(())

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _load_in_the_main_process(_: Any) -> None:
    """Have every DataLoader load without worker processes."""
    from torchrepro.imports import AfterImport

    def load_here(_module: str) -> None:
        from torchrepro.seeding.loader_hook import workers_policy

        workers_policy.write(0)  # what a profile says later is the same, or nothing

    if _LOADERS in sys.modules:
        load_here(_LOADERS)
    else:
        AfterImport([_LOADERS], load_here).watch()


LOADING = "loading in the main process"
"""What a run does in order to find out where a batch of worker processes differs."""

IN_PROCESS: Mapping[str, Callable[[Any], None]] = {
    "allocation": _litter_the_heap,
    "thread scheduling": sys.setswitchinterval,
    "affinity": _leave_some_cpus_alone,
    "loader timing": _delay_batches,
    "clock": _move_the_clock,
    "file order": _list_files_otherwise,
    LOADING: _load_in_the_main_process,
}
"""How a perturbation is applied within a process, by its name."""
