"""Why two runs part, one row per cause, the surest first: the first row that fits is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrepro.verdict.cause import (
    ANY_VALUE,
    COARSE,
    COMPUTED,
    DETERMINISTIC,
    FILLED,
    HASHES,
    HOST,
    LOADER,
    NO_DROPOUT,
    NO_WORKERS,
    PATHS,
    PROGRAM,
    RANDOM_NUMBERS,
    SEED,
    Cause,
    Fix,
)
from torchrepro.verdict.kernel_cause_rows import KERNEL_CAUSES
from torchrepro.verdict.op_families import (
    DRAWING,
    DROPPING,
    DROPPING_INSIDE,
    MASKING,
)
from torchrepro.verdict.value import Kind

if TYPE_CHECKING:
    from torchrepro.verdict.case import Case


def _is_collective(case: Case) -> bool:
    return case.first.phase == "collective" or "c10d" in case.namespace


CAUSES: tuple[Cause, ...] = (
    Cause(
        "One run is shorter than the other; as far as both go they are the same.",
        (Kind.ENDED,),
        closer=False,
    ),
    Cause(
        "What can be compared agrees; of the rest nobody can tell.",
        (Kind.INCOMPARABLE,),
        closer=False,
    ),
    Cause(
        "The runs were not seeded alike ({settings}).",
        (Kind.RANDOM,),
        alike=RANDOM_NUMBERS,
    ),
    Cause(
        "A random generator was not in the same state: nothing seeded it, or one run drew more "
        "numbers from it than the other.",
        (Kind.RANDOM,),
        fixes=(SEED, LOADER, NO_WORKERS),
    ),
    Cause(
        "What the recordings hold of a step says that {op} differ, not which op computed them; "
        "recorded op by op, the runs name it.",
        fits=lambda case: case.first.op in COARSE,
    ),
    Cause(
        "{op} draws random numbers, and the runs were not seeded alike ({settings}).",
        COMPUTED,
        fits=lambda case: case.op in DRAWING | DROPPING,
        alike=RANDOM_NUMBERS,
    ),
    Cause(
        "{op} draws a mask from a generator that was not in the same state: nothing seeded it, or "
        "one run drew more numbers before.",
        COMPUTED,
        lambda case: (
            case.op in DROPPING | MASKING
            or (case.op in DROPPING_INSIDE and case.drops_with_a_probability)
        ),
        (SEED, NO_DROPOUT),
    ),
    Cause(
        "{op} draws random numbers from a generator that was not in the same state; devices also "
        "draw other numbers from one seed.",
        COMPUTED,
        lambda case: case.op in DRAWING and bool(case.accelerator),
        (SEED, HOST),
    ),
    Cause(
        "{op} draws random numbers from a generator that was not in the same state: nothing "
        "seeded it, it is one of the program's own, or one run drew more numbers before.",
        COMPUTED,
        lambda case: case.op in DRAWING,
        (SEED, LOADER),
    ),
    Cause(
        "{op} reads memory that nothing has written: it holds whatever was there before.",
        COMPUTED,
        lambda case: case.reads_memory_that_nothing_wrote,
        (DETERMINISTIC, FILLED),
    ),
    Cause(
        "The DataLoader gave another batch: another order of samples, random numbers of its "
        "workers or of the dataset, or other files.",
        (Kind.DATA,),
        lambda case: case.first.op == "DataLoader",
        (SEED, LOADER, NO_WORKERS),
    ),
    Cause(
        "The ranks were given other data by another rank, or took part in another order.",
        (Kind.DATA,),
        _is_collective,
    ),
    Cause(
        "The program made this tensor from other data: a generator of its own, the clock, files "
        "in another order, or the order of a set.",
        (Kind.DATA,),
        fixes=(SEED, HASHES),
    ),
    Cause(
        "A race: {op} writes in place on thread {thread}, and several threads reach one tensor in "
        "whatever order they come. Guard it with a lock, or give each thread its own.",
        (Kind.OUTPUTS, Kind.INPUT),
        lambda case: case.writes_in_place and case.on_another_thread,
    ),
    Cause(
        "Something outside of torch wrote into a tensor after torch had: a numpy view of it, "
        "another thread, a C extension, or memory shared with another process.",
        (Kind.INPUT,),
        lambda case: not _is_collective(case),
    ),
    Cause(
        "Another rank contributed something else, or Ascend's collectives added up in another "
        "order.",
        (Kind.OUTPUTS, Kind.INPUT),
        lambda case: _is_collective(case) and case.accelerator == "npu",
        (Fix("env.HCCL_DETERMINISTIC", '"true"', ("true", "strict")),),
    ),
    Cause(
        "Another rank contributed something else, or NCCL added up in another order.",
        (Kind.OUTPUTS, Kind.INPUT),
        lambda case: _is_collective(case) and bool(case.accelerator),
        (Fix("env.NCCL_ALGO", "Ring", ANY_VALUE), Fix("env.NCCL_PROTO", "Simple", ANY_VALUE)),
    ),
    Cause(
        "Another rank contributed something else: this rank gave the same and got another result.",
        (Kind.OUTPUTS, Kind.INPUT),
        _is_collective,
    ),
    Cause("The runs were under other settings ({settings}).", PROGRAM, alike=PATHS),
    Cause(
        "The runs had other software or hardware ({settings}), which may take another path.",
        PROGRAM,
        lambda case: bool(case.differing_surroundings),
    ),
    Cause(
        "The program itself passed something else: the clock, the order of a set, Python's or "
        "numpy's random numbers, a path, or state left by an earlier run.",
        (Kind.ARGUMENT,),
        fixes=(HASHES, SEED),
    ),
    Cause(
        "The program took another path: a branch on a random number, on a value that had not "
        "been compared yet, on the clock, or the order of a set.",
        (Kind.ONLY_ONE,),
        fixes=(HASHES, SEED),
    ),
    *KERNEL_CAUSES,
)
