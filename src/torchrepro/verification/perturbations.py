"""Lists the conditions that `verify --stress` perturbs, as results must not depend on them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchrepro.ground.errors import ProfileError, near
from torchrepro.seeding.nondeterministic_calls import ADDRESS, CLOCK, FILES, HASH, THREADS
from torchrepro.verification.at_start import VARIABLE

if TYPE_CHECKING:
    from pathlib import Path

    from torchrepro.profile.resolved import ResolvedProfile


@dataclass(frozen=True, slots=True)
class RunEnvironment:
    """The variables and in-process changes that a run gets in addition to its profile."""

    variables: Mapping[str, str] = field(default_factory=dict)
    in_process: Mapping[str, Any] = field(default_factory=dict)
    """The changes that each Python process makes to itself as it starts (see `at_start`)."""

    def __or__(self, later: RunEnvironment) -> RunEnvironment:
        return RunEnvironment(
            {**self.variables, **later.variables}, {**self.in_process, **later.in_process}
        )

    def all_variables(self) -> dict[str, str]:
        """Return the variables, with `VARIABLE` added to pass `in_process` to the command.

        If an outer run has set `VARIABLE` in this process, the changes of that run are included.
        """
        if not self.in_process:
            return dict(self.variables)
        outer = json.loads(os.environ.get(VARIABLE) or "{}")
        return {**self.variables, VARIABLE: json.dumps({**outer, **self.in_process})}


NO_CHANGE = RunEnvironment()


def pinning(pins: Mapping[str, Sequence[str]]) -> RunEnvironment:
    """Return the environment that pins each source at the given program lines.

    A source without lines is pinned everywhere. See `pinned_sources`.
    """
    fixed = {"PYTHONHASHSEED": "0"} if HASH in pins else {}
    return RunEnvironment(fixed, {"verification.pinned_sources:pin": pins})


def logging_file_uses(
    root: Path, log: Path, tree: Path | None = None, ours: Path | None = None
) -> RunEnvironment:
    """Return the environment that logs the uses of files below `root` in `log`.

    With a copy `tree` of `root`, processes open the files of the copy in place of the originals,
    and can write below `root` only in the folder `ours`.
    """
    paths = {"root": str(root), "log": str(log), "tree": str(tree or ""), "ours": str(ours or "")}
    # A file may be a link to an original. Python must not write bytecode next to the original.
    fixed = {"PYTHONDONTWRITEBYTECODE": "1"} if tree else {}
    return RunEnvironment(fixed, {"lock.file_notes:begin": paths})


_DAYS = 9 + 0.143  # changes the date, the day of the week, the hour and the minute
_SWITCH = 1e-5  # seconds that a thread may run; Python's default is 5e-3
_HASH_SEEDS = ("7919", "15838")


@dataclass(frozen=True, slots=True)
class Perturbation:
    name: str
    action: str  # what it does, as users read it
    finding: str  # the likely cause, if this perturbation alone makes two runs diverge
    variables: Callable[[int], Mapping[str, str]] = lambda number: {}  # by the number of the run
    in_process: Callable[[int], Any] | None = None
    """The argument of its function in `at_start.IN_PROCESS`, by the number of the run."""
    unperturbed: Mapping[str, str] = field(default_factory=dict)  # variables of a run without it
    obstacle: Callable[[], str] = lambda: ""  # why this machine cannot do it; empty if it can
    reads_memory: bool = False  # whether only programs that read uninitialized memory are affected
    source: str = ""  # the source in `seeding.nondeterministic_calls` that it perturbs, if any


def _some_cpus(number: int) -> Mapping[str, Sequence[int]]:
    cpus = sorted(os.sched_getaffinity(0))
    turned = [*cpus[number % len(cpus) :], *cpus[: number % len(cpus)]]
    return {"all": cpus, "some": turned[: len(cpus) // 2]}


HASH_SEED = "hash seed"

PERTURBATIONS: tuple[Perturbation, ...] = (
    Perturbation(
        "memory contents",
        "glibc fills fresh and freed memory with another byte",
        "the program reads uninitialized memory",
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
        "malloc gets other arena sizes, and the heap other contents",
        "the result depends on an address: the id of an object, the alignment of memory, or a read "
        "beyond the end of a buffer",
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
        f"Python switches threads every {_SWITCH * 1e6:.0f} microseconds",
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
        "workers of a DataLoader return their batches with random delays",
        "batches are taken in the order in which workers finish",
        in_process=lambda number: number,
    ),
    Perturbation(
        "clock",
        "Python's `time` returns another day",
        "the result depends on the time of day: a seed, a name, a limit",
        in_process=lambda number: number * _DAYS * 24 * 60 * 60,
        source=CLOCK,
    ),
    Perturbation(
        "time zone",
        "the local time is on another day",
        "the result depends on the local date or hour, as from `datetime.now`",
        # In this zone it is another day. POSIX inverts the sign: <+14>-14 is UTC+14.
        lambda number: {"TZ": "<+14>-14" if time.gmtime().tm_hour >= 12 else "<-12>12"},  # noqa: PLR2004 - noon
    ),
    Perturbation(
        "file order",
        "every folder lists its files in another order",
        "the result depends on the order in which files are listed",
        in_process=lambda number: number,
        source=FILES,
    ),
)
"""Every perturbation, the most specific first: if runs diverge, each is tried in this order.

Most perturbations reveal a read of uninitialized memory, so its own row comes first. Two conditions
are not perturbed. The number of threads of an op: no guarantee covers it, because another number
sums in another order. Load from other processes: it caught no planted bug that the others missed.
"""

EVERYTHING = tuple(row.name for row in PERTURBATIONS)


@dataclass(frozen=True, slots=True)
class StressPlan:
    rows: tuple[Perturbation, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    other_hash_seed: str = ""
    """A seed that differs from the profile's, for one more run; empty if none is needed."""

    @classmethod
    def of(cls, names: Iterable[str], resolved: ResolvedProfile | None) -> StressPlan:
        """Return the plan for the perturbations in `names`. Impossible perturbations are skipped.

        Raises `ProfileError` for an unknown name.
        """
        set_by_profile = resolved.environment() if resolved is not None else {}
        rows, skipped, other_seed = [], [], ""
        for name in dict.fromkeys(names):
            row = next((row for row in PERTURBATIONS if row.name == name), None)
            if row is None:
                raise ProfileError.about(
                    "no such perturbation",
                    found=name,
                    near=near(name, EVERYTHING),
                    legal=", ".join(EVERYTHING),
                )
            settled = ", ".join(name for name in row.variables(1) if name in set_by_profile)
            if name == HASH_SEED and settled:
                present = set_by_profile[settled]
                other_seed = next(seed for seed in _HASH_SEEDS if seed != present)
            elif reason := f"the profile sets {settled}" if settled else row.obstacle():
                skipped.append((name, reason))
            else:
                rows.append(row)
        return cls(tuple(rows), tuple(skipped), other_seed)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(row.name for row in self.rows)

    def environment(self, number: int, names: Sequence[str]) -> RunEnvironment:
        """Return the environment of run `number` with only the perturbations in `names`."""
        environment = NO_CHANGE
        for row in self.rows:
            if row.name not in names:
                environment |= RunEnvironment(row.unperturbed)
            else:
                in_process = {row.name: row.in_process(number)} if row.in_process else {}
                environment |= RunEnvironment(row.variables(number), in_process)
        return environment
