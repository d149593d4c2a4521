"""What can be perturbed in a run although its result must not depend on it: a table of rows."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torchrepro.verify.elsewhere import too_large
from torchrepro.verify.surroundings import Surroundings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_DAYS = 9 + 0.143  # another date, another day of the week, another hour and minute
_NOON = 12
_SWITCH = 1e-5  # seconds that a thread may run; Python's own are 5e-3
_BYTES = 255


@dataclass(frozen=True, slots=True)
class Perturbation:
    """A way to perturb a run."""

    name: str
    how: str
    """What is done."""
    why: str
    """What it brings to light: the likely cause, where it alone makes two runs part."""
    around: Callable[[int], Surroundings]
    """What surrounds run number so and so that is perturbed."""
    calm: Surroundings = field(default_factory=Surroundings)
    """What surrounds the run that is not."""
    obstacle: Callable[[], str] = lambda: ""
    """Why it cannot be done here, or nothing."""
    fix: str = ""
    """The override that helps, if there is one."""

    def skipped(self, set_by_profile: Mapping[str, str]) -> str:
        """Return why it is left out, or an empty string."""
        settled = [name for name in self.around(1).variables if name in set_by_profile]
        return f"the profile sets {', '.join(settled)}" if settled else self.obstacle()


def _not_of_glibc() -> str:
    found = platform.libc_ver()[0]
    return "" if found == "glibc" else "the C library takes no such settings"


def _other_memory(number: int) -> Surroundings:
    return Surroundings({"MALLOC_PERTURB_": str(1 + number * 89 % _BYTES)})


def _other_allocation(number: int) -> Surroundings:
    settings = {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": str(1 << (14 + number % 8)),
        "MALLOC_TOP_PAD_": str(number * 7919 * 4096 % (1 << 24)),
    }
    return Surroundings(settings, {"allocation": number})


def _some_cpus(number: int) -> Surroundings:
    cpus = sorted(os.sched_getaffinity(0))
    turned = [*cpus[number % len(cpus) :], *cpus[: number % len(cpus)]]
    return Surroundings(inside={"affinity": {"all": cpus, "some": turned[: len(cpus) // 2]}})


def _no_choice_of_cpus() -> str:
    if not hasattr(os, "sched_getaffinity"):
        return "this system does not tell a process on which CPUs to run"
    return "" if len(os.sched_getaffinity(0)) > 1 else "there is one CPU"


def _another_day(number: int) -> Surroundings:
    return Surroundings(inside={"clock": number * _DAYS * 24 * 60 * 60})


def _another_zone(number: int) -> Surroundings:
    """Return a time zone in which it is another day, as POSIX writes it: the sign is turned."""
    return Surroundings({"TZ": "<+14>-14" if time.gmtime().tm_hour >= _NOON else "<-12>12"})


PERTURBATIONS: tuple[Perturbation, ...] = (
    Perturbation(
        "memory contents",
        "glibc fills fresh and freed memory with another byte",
        "memory is read that nothing has written",
        _other_memory,
        obstacle=_not_of_glibc,
        fix="backends.torch.fill_uninitialized_memory=true",
    ),
    Perturbation(
        "hash seed",
        "another PYTHONHASHSEED",
        "the order of a set of strings, or a hash of text, decides something",
        lambda number: Surroundings({"PYTHONHASHSEED": str(number * 7919)}),
        calm=Surroundings({"PYTHONHASHSEED": "0"}),
        fix='env.PYTHONHASHSEED="0"',
    ),
    Perturbation(
        "allocation",
        "other sizes of malloc's arenas, and a heap with other things in it",
        "an address decides something: the id of an object, the alignment of memory, memory that "
        "is read beyond its end",
        _other_allocation,
    ),
    Perturbation(
        "thread scheduling",
        f"Python's threads take turns every {_SWITCH * 1e6:.0f} microseconds",
        "threads race: the result depends on which of them comes first",
        lambda number: Surroundings(inside={"thread scheduling": _SWITCH}),
    ),
    Perturbation(
        "affinity",
        "half of the CPUs, with as many threads as before",
        "threads race, or the number of usable CPUs decides something",
        _some_cpus,
        obstacle=_no_choice_of_cpus,
    ),
    Perturbation(
        "loader timing",
        "workers of a DataLoader hand over their batches late, at random",
        "batches are taken in the order in which workers finish",
        lambda number: Surroundings(inside={"loader timing": number}),
        fix="dataloader.num_workers=0",
    ),
    Perturbation(
        "clock",
        "Python's `time` tells another day",
        "the time of day decides something: a seed, a name, a limit",
        _another_day,
    ),
    Perturbation(
        "time zone",
        "local time is that of another day",
        "the local date or hour decides something, as `datetime.now` tells it",
        _another_zone,
    ),
    Perturbation(
        "working directory",
        "the same files, at another path",
        "the path of the working directory decides something, or the order in which files are "
        "listed",
        lambda number: Surroundings(elsewhere=True),
        obstacle=lambda: too_large(Path.cwd()),
    ),
)
"""Every perturbation, the most telling first: a search for the culprit tries the first ones first.

A read of memory that nothing has written shows under most of them, so that row leads. Not among
them is the number of threads of an op, which no guarantee covers: another number adds up in another
order. Nor are other processes that compute beside the run: races and timeouts that they would bring
to light show under thread scheduling and affinity.

What each alone brings to light:
memory contents: a large tensor that is read before anything is written.
hash seed: the hash of a text, and the order of a set of texts.
allocation: the address of an object, and the order of a set of objects.
thread scheduling: threads of Python that change the same value.
affinity: the number of usable CPUs.
loader timing: batches that are taken as workers finish.
clock: the day by `time.time`.
time zone: the day and the hour by `datetime.now`.
working directory: the path of it.
"""
