"""Rules of diagnosis: why two runs diverge, one row per cause, the surest first."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torchrepro.policies.deterministic_ops import row_of
from torchrepro.verdict.evidence import (
    ANY_VALUE,
    ATTENTION,
    COARSE,
    COMPILED,
    COMPUTED,
    CONVOLUTION,
    CPU_PATH,
    DETERMINISTIC,
    DRAWING,
    DROPPING,
    DROPPING_INSIDE,
    FILLED,
    FIXED_BY_THE_FLAG,
    HASHES,
    HOST,
    LOADER,
    MASKING,
    MATMUL,
    MKL_PATH,
    NO_DROPOUT,
    NO_WORKERS,
    ON_CPU,
    ONE_THREAD,
    PATHS,
    PRECISION,
    PROGRAM,
    RANDOM_NUMBERS,
    RECURRENT,
    SEED,
    SUMMING,
    Cause,
    Fix,
)
from torchrepro.verdict.value import Kind

if TYPE_CHECKING:
    import re
    from collections.abc import Callable

    from torchrepro.verdict.evidence import Evidence


def _family(pattern: re.Pattern[str]) -> Callable[[Evidence], bool]:
    return lambda case: pattern.fullmatch(case.op) is not None


def _on(accelerator: str, *patterns: re.Pattern[str]) -> Callable[[Evidence], bool]:
    """Return whether a case is of one of `patterns` on that type of device; empty is the CPU."""
    families = [_family(pattern) for pattern in patterns]
    return lambda case: case.accelerator == accelerator and any(fits(case) for fits in families)


def _one_of(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


PROCESSOR = ("hardware: instruction set",)
"""Settings that say which kernels a CPU takes; another model of the same may take the same."""

KERNEL_CAUSES: tuple[Cause, ...] = (
    Cause(
        "The runs computed in other types: autocast or the default type differs.",
        fits=lambda case: case.has_other_dtypes and not case.tolerance,
        kinds=COMPUTED,
        fixes=(Fix("backends.torch.default_dtype", "float32", ANY_VALUE),),
    ),
    Cause(
        "{op} adds up in an order that depends on threads and processor ({settings}).",
        COMPUTED,
        _family(SUMMING),
        alike=CPU_PATH,
    ),
    Cause(
        "{op} was computed in another precision ({settings}).",
        COMPUTED,
        _family(SUMMING),
        alike=PRECISION,
    ),
    Cause(
        "The runs were under other settings ({settings}).",
        COMPUTED,
        lambda case: any(not _one_of(each.name, RANDOM_NUMBERS) for each in case.differing_knobs),
        alike=("backends.*", "device.*", "env.*", "dropout"),
    ),
    Cause(
        "{op} lies further apart than the tolerance: a faster, less exact precision on one "
        "device, or a wrong kernel.",
        COMPUTED,
        lambda case: case.tolerance and case.accelerator == "cuda",
        (
            Fix("backends.cuda.matmul_fp32_precision", "ieee"),
            Fix("backends.cudnn.conv_fp32_precision", "ieee"),
        ),
    ),
    Cause(
        "{op} lies further apart than the tolerance: a faster, less exact precision on one "
        "device, or a wrong kernel.",
        COMPUTED,
        lambda case: case.tolerance and case.accelerator == "npu",
        (
            Fix("backends.npu.cube_math_type", "KEEP_DTYPE"),
            Fix("backends.npu.conv_allow_hf32", "false"),
        ),
    ),
    Cause(
        "{op} adds up in an order that depends on the processor ({settings}).",
        COMPUTED,
        lambda case: _family(SUMMING)(case) and case.differs_in(*PROCESSOR),
        (Fix("env.ATEN_CPU_CAPABILITY", "default"), MKL_PATH),
    ),
    Cause(
        "Other software or hardware ({settings}): its kernels may add up in another order.",
        COMPUTED,
        lambda case: bool(case.differing_surroundings),
    ),
    Cause(
        "{op} is on torch's list of ops without a deterministic kernel. Instead: {instead}.",
        COMPUTED,
        lambda case: row_of(case.op) is not None,
        (DETERMINISTIC, ON_CPU),
    ),
    Cause(
        "{op} adds with atomics, in whatever order its threads come, unless torch is asked for "
        "deterministic kernels.",
        COMPUTED,
        lambda case: case.op in FIXED_BY_THE_FLAG,
        (DETERMINISTIC,),
    ),
    Cause(
        "Compiled code took another kernel: inductor chooses some by timing.",
        COMPUTED,
        lambda case: case.op == "compiled region" or case.namespace == "inductor",
        (COMPILED,),
    ),
    Cause(
        "cuDNN chose another algorithm, by timing or one that adds with atomics.",
        COMPUTED,
        _on("cuda", CONVOLUTION, RECURRENT),
        (
            Fix("backends.cudnn.benchmark", "false"),
            Fix("backends.cudnn.deterministic", "true"),
            DETERMINISTIC,
        ),
    ),
    Cause(
        "Fused attention adds up in varying order, above all backward.",
        COMPUTED,
        lambda case: bool(case.accelerator) and _family(ATTENTION)(case),
        (DETERMINISTIC, Fix("backends.cuda.mem_efficient_sdp", "false")),
    ),
    Cause(
        "cuBLAS adds up in varying order unless its workspace is fixed.",
        COMPUTED,
        _on("cuda", MATMUL),
        (Fix("env.CUBLAS_WORKSPACE_CONFIG", ":4096:8", (":16:8",)), DETERMINISTIC),
    ),
    Cause(
        "Ascend's matrix products shift their inner dimension between cores.",
        COMPUTED,
        _on("npu", MATMUL),
        (
            DETERMINISTIC,
            Fix("env.CLOSE_MATMUL_K_SHIFT", "1"),
            Fix("backends.npu.deterministic_level", "2", ("3",)),
        ),
    ),
    Cause(
        "oneDNN took another primitive, or other threads added up in another order.",
        COMPUTED,
        _on("", CONVOLUTION, RECURRENT),
        (Fix("backends.cpu.mkldnn_deterministic", "true"), ONE_THREAD),
    ),
    Cause(
        "MKL rounds by the alignment of memory and the number of threads that it finds.",
        COMPUTED,
        _on("", MATMUL),
        (MKL_PATH, ONE_THREAD),
    ),
    Cause(
        "{op} adds up in an order that depends on the number of threads.",
        COMPUTED,
        _on("", SUMMING),
        (ONE_THREAD, Fix("env.OMP_DYNAMIC", '"false"', ("false",))),
    ),
    Cause(
        "{op} is a custom kernel, which torch's deterministic flag cannot see: look into it.",
        COMPUTED,
        lambda case: case.namespace not in ("", "aten", "prims"),
    ),
    Cause(
        "{op} has no known cause; on {accelerator} many kernels add with atomics unless torch is "
        "asked for deterministic ones.",
        COMPUTED,
        lambda case: bool(case.accelerator),
        (DETERMINISTIC,),
    ),
    Cause(
        "No known cause fits: {op} gave two results for the same inputs. Left are a race in the "
        "program, memory written from outside, and faulty hardware.",
        COMPUTED,
    ),
)


def _is_collective(case: Evidence) -> bool:
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
