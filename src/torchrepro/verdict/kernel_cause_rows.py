"""Why a kernel gave two results for the same inputs, one row per cause, the surest first."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torchrepro.policies.fallback.nondeterministic_ops import row_of
from torchrepro.verdict.cause import (
    ANY_VALUE,
    COMPILED,
    COMPUTED,
    CPU_PATH,
    DETERMINISTIC,
    MKL_PATH,
    ON_CPU,
    ONE_THREAD,
    PRECISION,
    RANDOM_NUMBERS,
    Cause,
    Fix,
)
from torchrepro.verdict.op_families import (
    ATTENTION,
    CONVOLUTION,
    FIXED_BY_THE_FLAG,
    MATMUL,
    RECURRENT,
    SUMMING,
)

if TYPE_CHECKING:
    import re
    from collections.abc import Callable

    from torchrepro.verdict.case import Case


def _family(pattern: re.Pattern[str]) -> Callable[[Case], bool]:
    return lambda case: pattern.fullmatch(case.op) is not None


def _on(accelerator: str, *patterns: re.Pattern[str]) -> Callable[[Case], bool]:
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
