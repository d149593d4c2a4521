"""The perturbations of `verify --stress`: a table of what a result must not depend on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchrepro.ground.errors import ProfileError
from torchrepro.ground.messages import near
from torchrepro.seeding.nondeterministic_calls import ADDRESS, CLOCK, FILES, HASH, THREADS
from torchrepro.verification.at_start import VARIABLE

if TYPE_CHECKING:
    from pathlib import Path

    from torchrepro.profile.resolved import ResolvedProfile


@dataclass(frozen=True, slots=True)
class RunEnvironment:
    """What a command is started in, besides its profile."""

    variables: Mapping[str, str] = field(default_factory=dict)
    in_process: Mapping[str, Any] = field(default_factory=dict)
    """What each Python process does to itself as it starts (see `at_start`)."""

    def __or__(self, later: RunEnvironment) -> RunEnvironment:
        return RunEnvironment(
            {**self.variables, **later.variables}, {**self.in_process, **later.in_process}
        )

    def all_variables(self) -> dict[str, str]:
        """Return the variables, with the one that carries the rest to the command.

        What a run around this one has its processes do to themselves, those of the command do too.
        """
        if not self.in_process:
            return dict(self.variables)
        around = json.loads(os.environ.get(VARIABLE) or "{}")
        return {**self.variables, VARIABLE: json.dumps({**around, **self.in_process})}


def holding(held: Mapping[str, Sequence[str]]) -> RunEnvironment:
    """Return what holds sources the same in every run, each at some lines or, without any, at all.

    See `held_sources`.
    """
    fixed = {"PYTHONHASHSEED": "0"} if HASH in held else {}
    return RunEnvironment(fixed, {"verification.pinned_sources:hold": held})


def noting_files(
    root: Path, log: Path, tree: Path | None = None, ours: Path | None = None
) -> RunEnvironment:
    """Return what notes the uses of files below `root` in `log`.

    With `tree`, a copy of `root`, what is there is found in place of what is in `root`, where
    nothing can be written but what is below `ours`.
    """
    asked = {"root": str(root), "log": str(log), "tree": str(tree or ""), "ours": str(ours or "")}
    # Files of a copy may be links: nothing is to be written beside what they point to.
    fixed = {"PYTHONDONTWRITEBYTECODE": "1"} if tree else {}
    return RunEnvironment(fixed, {"lock.file_notes:begin": asked})


_DAYS = 9 + 0.143  # another date, another day of the week, another hour and minute
_SWITCH = 1e-5  # seconds that a thread may run; Python's own are 5e-3
_HASH_SEEDS = ("7919", "15838")


@dataclass(frozen=True, slots=True)
class Perturbation:
    name: str
    action: str  # what is done
    finding: str  # the likely cause, if this perturbation alone makes two runs diverge
    variables: Callable[[int], Mapping[str, str]] = lambda number: {}  # by the number of the run
    in_process: Callable[[int], Any] | None = None
    """What each process of a perturbed run does to itself, by the number of the run."""
    unperturbed: Mapping[str, str] = field(default_factory=dict)  # variables of any other run
    obstacle: Callable[[], str] = lambda: ""  # why it cannot be done here, or nothing
    reads_memory: bool = False  # whether what feels it reads memory that nothing has written
    source: str = (
        ""  # what a program reads that this perturbs, as `seeding.nondeterministic_calls` says it
    )


def _some_cpus(number: int) -> Mapping[str, Sequence[int]]:
    cpus = sorted(os.sched_getaffinity(0))
    turned = [*cpus[number % len(cpus) :], *cpus[: number % len(cpus)]]
    return {"all": cpus, "some": turned[: len(cpus) // 2]}


def _another_zone(number: int) -> Mapping[str, str]:
    # A time zone in which it is another day, as POSIX writes it: the sign is turned.
    return {"TZ": "<+14>-14" if time.gmtime().tm_hour >= 12 else "<-12>12"}  # noqa: PLR2004 - noon


HASH_SEED = "hash seed"

PERTURBATIONS: tuple[Perturbation, ...] = (
    Perturbation(
        "memory contents",
        "glibc fills fresh and freed memory with another byte",
        "the program reads memory that nothing has written",
        lambda number: {"MALLOC_PERTURB_": str(1 + number * 89 % 255)},
        reads_memory=True,
    ),
    Perturbation(
        HASH_SEED,
        "another PYTHONHASHSEED",
        "the result depends on the order of a set of strings, or on a hash of text",
        lambda number: {"PYTHONHASHSEED": str(number * 7919)},
        unperturbed={"PYTHONHASHSEED": "0"},
        source=HASH,
    ),
    Perturbation(
        "allocation",
        "other sizes of malloc's arenas, and a heap with other things in it",
        "the result depends on an address: the id of an object, the alignment of memory, or memory "
        "that is read beyond its end",
        lambda number: {
            "MALLOC_ARENA_MAX": "1",
            "MALLOC_MMAP_THRESHOLD_": str(1 << (14 + number % 8)),
            "MALLOC_TOP_PAD_": str(number * 7919 * 4096 % (1 << 24)),
        },
        lambda number: number,
        source=ADDRESS,
    ),
    Perturbation(
        "thread scheduling",
        f"Python's threads take turns every {_SWITCH * 1e6:.0f} microseconds",
        "threads race: the result depends on which of them comes first",
        in_process=lambda number: _SWITCH,
        source=THREADS,
    ),
    Perturbation(
        "affinity",
        "half of the CPUs, with as many threads as before",
        "threads race, or the result depends on the number of usable CPUs",
        in_process=_some_cpus,
        obstacle=lambda: "there is one CPU" if len(os.sched_getaffinity(0)) == 1 else "",
        source=THREADS,
    ),
    Perturbation(
        "loader timing",
        "workers of a DataLoader hand over their batches late, at random",
        "batches are taken in the order in which workers finish",
        in_process=lambda number: number,
    ),
    Perturbation(
        "clock",
        "Python's `time` tells another day",
        "the result depends on the time of day: a seed, a name, a limit",
        in_process=lambda number: number * _DAYS * 24 * 60 * 60,
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
        in_process=lambda number: number,
        source=FILES,
    ),
)
"""Every perturbation, the most telling first: where runs diverge, each is tried in this order.

A read of unwritten memory shows under most of them, so that row leads. The number of threads of an
op is not perturbed, because no guarantee covers it: another number adds up in another order. Load
from other processes is not perturbed either: on the planted faults that were tried, it caught
nothing of its own.
"""

EVERYTHING = tuple(row.name for row in PERTURBATIONS)


@dataclass(frozen=True, slots=True)
class StressPlan:
    rows: tuple[Perturbation, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    other_hash_seed: str = ""
    """Another one than the profile sets, where it is to be perturbed: that of a run of its own."""

    @classmethod
    def of(cls, names: Iterable[str], resolved: ResolvedProfile | None) -> StressPlan:
        """Return the perturbations of these names that can be used under a profile, if any.

        Raises `ProfileError` for an unknown name.
        """
        set_by_profile = resolved.environment() if resolved is not None else {}
        rows, skipped, other = [], [], ""
        for name in dict.fromkeys(names):
            row = next((row for row in PERTURBATIONS if row.name == name), None)
            if row is None:
                raise ProfileError.about(
                    "no such perturbation",
                    found=name,
                    near=near(name, EVERYTHING),
                    legal=", ".join(EVERYTHING),
                )
            settled = ", ".join(each for each in row.variables(1) if each in set_by_profile)
            if name == HASH_SEED and settled:
                present = set_by_profile[settled]
                other = next(seed for seed in _HASH_SEEDS if seed != present)
            elif reason := f"the profile sets {settled}" if settled else row.obstacle():
                skipped.append((name, reason))
            else:
                rows.append(row)
        return cls(tuple(rows), tuple(skipped), other)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(row.name for row in self.rows)

    def environment(self, number: int, names: Sequence[str]) -> RunEnvironment:
        """Return the environment of run `number` if only these perturbations act on it."""
        found = RunEnvironment()
        for row in self.rows:
            if row.name not in names:
                found |= RunEnvironment(row.unperturbed)
            else:
                inner = {row.name: row.in_process(number)} if row.in_process else {}
                found |= RunEnvironment(row.variables(number), inner)
        return found
