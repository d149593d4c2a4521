"""The perturbations of `verify --stress`: a table of what a result must not depend on."""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from torchrepro.errors import ProfileError, TraceError
from torchrepro.messages import Problem, near
from torchrepro.seeding.uncontrolled import ADDRESS, CLOCK, FILES, HASH, THREADS
from torchrepro.verification.process_perturbations import VARIABLE
from torchrepro.verification.result import StressResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torchrepro.profile.resolved import ResolvedProfile


@dataclass(frozen=True, slots=True)
class RunEnvironment:
    """What a command is started in, besides its profile."""

    variables: Mapping[str, str] = field(default_factory=dict)
    in_process: Mapping[str, Any] = field(default_factory=dict)
    """What each Python process does to itself, by name (see `process_perturbations`)."""
    mirror: bool = False
    """Whether the working directory is reached by another path."""

    def all_variables(self) -> dict[str, str]:
        """Return the variables, with the one that carries `in_process` to the command."""
        carried = {VARIABLE: json.dumps(self.in_process)} if self.in_process else {}
        return {**self.variables, **carried}


def combined(parts: Iterable[RunEnvironment]) -> RunEnvironment:
    """Return several environments as one; of two values the later one counts."""
    variables: dict[str, str] = {}
    in_process: dict[str, Any] = {}
    mirror = False
    for part in parts:
        variables |= part.variables
        in_process |= part.in_process
        mirror = mirror or part.mirror
    return RunEnvironment(variables, in_process, mirror)


MOST = 20_000
"""The most entries of the working directory and the folders above it that are linked."""


@contextmanager
def mirrored(folder: Path) -> Iterator[Path]:
    """Make a folder at another path that holds links to all that is in `folder`.

    The folders above it are mirrored too, up to the root: relative paths such as ``../data`` lead
    to the same files. Files that a program creates in the mirror vanish with it. A symbolic link to
    the folder as a whole has no effect, because the system resolves it
    (https://man7.org/linux/man-pages/man2/getcwd.2.html). Raises `TraceError` if a folder cannot be
    read or a link cannot be made.
    """
    with TemporaryDirectory(prefix="torchrepro-other-folder-", ignore_cleanup_errors=True) as top:
        mirror, original = Path(top), Path(folder.anchor)
        for part in folder.parts[1:]:
            _link(original, mirror, besides=(part, Path(top).name))
            mirror, original = mirror / part, original / part
            mirror.mkdir()
        _link(original, mirror, besides=(Path(top).name,))
        yield mirror


def too_large(folder: Path) -> str:
    """Return why `folder` cannot be mirrored, or an empty string."""
    try:
        entries = sum(1 for each in (folder, *folder.parents) for _ in each.iterdir())
    except OSError as error:
        return f"{error.filename} cannot be listed"
    return f"there are {entries:,} files to link" if entries > MOST else ""


def _link(original: Path, mirror: Path, besides: tuple[str, ...]) -> None:
    try:
        for entry in original.iterdir():
            if entry.name not in besides:
                (mirror / entry.name).symlink_to(entry)
    except OSError as error:
        raise TraceError(
            Problem(f"cannot be had at another path: {error.strerror}", found=str(original))
        ) from None


_DAYS = 9 + 0.143  # another date, another day of the week, another hour and minute
_NOON = 12
_SWITCH = 1e-5  # seconds that a thread may run; Python's own are 5e-3
_BYTES = 255
_HASH_SEEDS = ("7919", "15838")


@dataclass(frozen=True, slots=True)
class OverridingRun:
    """A run of its own, for a perturbation of what the profile sets: it overrides the profile."""

    overrides: Callable[[Mapping[str, str]], tuple[str, ...]]
    """Returns the overrides, given the variables that the profile sets."""
    what: str
    """What it means if this run differs, in one sentence."""
    cause: str
    """The likely cause, if it does."""
    edit: str
    """The change of the program that helps then."""


@dataclass(frozen=True, slots=True)
class Perturbation:
    """A way to perturb a run."""

    name: str
    action: str
    """What is done."""
    finding: str
    """The likely cause, if this perturbation alone makes two runs diverge."""
    environment: Callable[[int], RunEnvironment]
    """Returns the environment of a perturbed run by its number."""
    unperturbed: RunEnvironment = field(default_factory=RunEnvironment)
    """The environment of a run that is not perturbed."""
    obstacle: Callable[[], str] = lambda: ""
    """Returns why it cannot be done here, or nothing."""
    fixes: tuple[str, ...] = ()
    """The overrides that help together, the one that the others need first."""
    source: str = ""
    """What a program reads that this perturbs, in the words of `seeding.uncontrolled`."""
    overriding: OverridingRun | None = None
    """What is done where the profile sets what this row changes; None if it is skipped then."""

    def settled_by(self, profile: Mapping[str, str]) -> str:
        """Return the variables of this row that are among those that a profile sets."""
        return ", ".join(name for name in self.environment(1).variables if name in profile)

    def reason_to_skip(self, set_by_profile: Mapping[str, str]) -> str:
        """Return why it is skipped, or an empty string."""
        settled = self.settled_by(set_by_profile)
        return f"the profile sets {settled}" if settled else self.obstacle()


def _not_of_glibc() -> str:
    found = platform.libc_ver()[0]
    return "" if found == "glibc" else "the C library takes no such settings"


def _other_memory(number: int) -> RunEnvironment:
    return RunEnvironment({"MALLOC_PERTURB_": str(1 + number * 89 % _BYTES)})


def _other_allocation(number: int) -> RunEnvironment:
    settings = {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": str(1 << (14 + number % 8)),
        "MALLOC_TOP_PAD_": str(number * 7919 * 4096 % (1 << 24)),
    }
    return RunEnvironment(settings, {"allocation": number})


def _another_hash_seed(set_by_profile: Mapping[str, str]) -> tuple[str, ...]:
    other = next(seed for seed in _HASH_SEEDS if seed != set_by_profile["PYTHONHASHSEED"])
    return (f'env.PYTHONHASHSEED="{other}"',)


def _some_cpus(number: int) -> RunEnvironment:
    cpus = sorted(os.sched_getaffinity(0))
    turned = [*cpus[number % len(cpus) :], *cpus[: number % len(cpus)]]
    return RunEnvironment(in_process={"affinity": {"all": cpus, "some": turned[: len(cpus) // 2]}})


def _no_choice_of_cpus() -> str:
    return "" if len(os.sched_getaffinity(0)) > 1 else "there is one CPU"


def _another_day(number: int) -> RunEnvironment:
    return RunEnvironment(in_process={"clock": number * _DAYS * 24 * 60 * 60})


def _another_zone(number: int) -> RunEnvironment:
    """Return a time zone in which it is another day, as POSIX writes it: the sign is turned."""
    return RunEnvironment({"TZ": "<+14>-14" if time.gmtime().tm_hour >= _NOON else "<-12>12"})


PERTURBATIONS: tuple[Perturbation, ...] = (
    Perturbation(
        "memory contents",
        "glibc fills fresh and freed memory with another byte",
        "the program reads memory that nothing has written",
        _other_memory,
        obstacle=_not_of_glibc,
        fixes=(
            "backends.torch.deterministic_algorithms=error",
            "backends.torch.fill_uninitialized_memory=true",
        ),
    ),
    Perturbation(
        "hash seed",
        "another PYTHONHASHSEED",
        "the result depends on the order of a set of strings, or on a hash of text",
        lambda number: RunEnvironment({"PYTHONHASHSEED": str(number * 7919)}),
        unperturbed=RunEnvironment({"PYTHONHASHSEED": "0"}),
        fixes=('env.PYTHONHASHSEED="0"',),
        overriding=OverridingRun(
            _another_hash_seed,
            "it differs when Python's hash seed does: `torchrepro run` and `verify` fix it, "
            "`+repro=` alone does not",
            "The order of a set of strings, or a hash of text, decides the result. It differs when "
            "Python's hash seed does: `torchrepro run` fixes it, `+repro=` alone does not.",
            "sort it before it is used: sorted(...)",
        ),
        source=HASH,
    ),
    Perturbation(
        "allocation",
        "other sizes of malloc's arenas, and a heap with other things in it",
        "the result depends on an address: the id of an object, the alignment of memory, or memory "
        "that is read beyond its end",
        _other_allocation,
        source=ADDRESS,
    ),
    Perturbation(
        "thread scheduling",
        f"Python's threads take turns every {_SWITCH * 1e6:.0f} microseconds",
        "threads race: the result depends on which of them comes first",
        lambda number: RunEnvironment(in_process={"thread scheduling": _SWITCH}),
        source=THREADS,
    ),
    Perturbation(
        "affinity",
        "half of the CPUs, with as many threads as before",
        "threads race, or the result depends on the number of usable CPUs",
        _some_cpus,
        obstacle=_no_choice_of_cpus,
        source=THREADS,
    ),
    Perturbation(
        "loader timing",
        "workers of a DataLoader hand over their batches late, at random",
        "batches are taken in the order in which workers finish",
        lambda number: RunEnvironment(in_process={"loader timing": number}),
        fixes=("dataloader.num_workers=0",),
    ),
    Perturbation(
        "clock",
        "Python's `time` tells another day",
        "the result depends on the time of day: a seed, a name, a limit",
        _another_day,
        source=CLOCK,
    ),
    Perturbation(
        "time zone",
        "local time is that of another day",
        "the result depends on the local date or hour, as `datetime.now` tells it",
        _another_zone,
    ),
    Perturbation(
        "file order",
        "every folder lists its files in another order",
        "the result depends on the order in which files are listed",
        lambda number: RunEnvironment(in_process={"file order": number}),
        source=FILES,
    ),
    Perturbation(
        "working directory",
        "the same files, at another path",
        "the result depends on the path of the working directory",
        lambda number: RunEnvironment(mirror=True),
        obstacle=lambda: too_large(Path.cwd()),
    ),
)
"""Every perturbation, the most telling first: bisection tries the first ones first.

A read of unwritten memory shows under most of them, so that row leads. The number of threads of an
op is not perturbed, because no guarantee covers it: another number adds up in another order. Load
from other processes is not perturbed either: on the planted faults that were tried, it caught
nothing of its own.

What each row alone has caught:
memory contents: a large tensor that is read before anything is written.
hash seed: the hash of a text, and the order of a set of texts.
allocation: the address of an object, and the order of a set of objects.
thread scheduling: threads of Python that change the same value.
affinity: the number of usable CPUs.
loader timing: batches that are taken as workers finish.
clock: the day by `time.time`.
time zone: the day and the hour by `datetime.now`.
file order: the order of `os.listdir`.
working directory: the path of it.
"""


EVERYTHING = tuple(row.name for row in PERTURBATIONS)
"""The names of all perturbations."""


@dataclass(frozen=True, slots=True)
class StressPlan:
    """The perturbations of a verification."""

    rows: tuple[Perturbation, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    overriding: tuple[Perturbation, ...] = ()
    """Those that change what the profile sets, each in a run of its own."""

    @classmethod
    def of(cls, names: Iterable[str], resolved: ResolvedProfile | None) -> StressPlan:
        """Return the perturbations of these names that can be used under a profile, if any.

        Raises `ProfileError` for an unknown name.
        """
        rows = [_row(name) for name in dict.fromkeys(names)]
        set_by_profile = resolved.environment() if resolved is not None else {}
        overriding = [row for row in rows if row.overriding and row.settled_by(set_by_profile)]
        others = [row for row in rows if row not in overriding]
        reasons = [(row, row.reason_to_skip(set_by_profile)) for row in others]
        return cls(
            tuple(row for row, reason in reasons if not reason),
            tuple((row.name, reason) for row, reason in reasons if reason),
            tuple(overriding),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the perturbations."""
        return tuple(row.name for row in self.rows)

    @property
    def summary(self) -> StressResult | None:
        """Initial stress summary; None if no perturbation was requested."""
        asked = self.rows or self.skipped or self.overriding
        return StressResult(self.names, self.skipped) if asked else None

    def environment(self, number: int, names: Sequence[str]) -> RunEnvironment:
        """Return the environment of run `number` if only these perturbations act on it."""
        return combined(
            row.environment(number) if row.name in names else row.unperturbed for row in self.rows
        )

    def environments(self, count: int) -> list[RunEnvironment]:
        """Return the environment of each run. All but the first are perturbed, each differently."""
        return [self.environment(number, self.names if number else ()) for number in range(count)]


def _row(name: str) -> Perturbation:
    found = next((row for row in PERTURBATIONS if row.name == name), None)
    if found is None:
        raise ProfileError(
            Problem(
                "no such perturbation",
                found=name,
                near=near(name, EVERYTHING),
                legal=", ".join(EVERYTHING),
            )
        )
    return found
