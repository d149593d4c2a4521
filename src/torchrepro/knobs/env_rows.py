"""Rows for the variables that Python, torch, its compiler, CUDA, BLAS and collectives read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrepro.knobs.knob import BIT, COUNT, digits, row
from torchrepro.knobs.legal_values import Digits, Text
from torchrepro.knobs.linked_state import (
    CAPABILITY,
    HASHES,
    MKL_THREADS,
    OPENMP_DYNAMIC,
    OPENMP_THREADS,
    TF32,
    InductorVariable,
    effect_of,
)

if TYPE_CHECKING:
    from torchrepro.knobs.knob import Knob


TORCH_ENV = "https://docs.pytorch.org/docs/stable/torch_environment_variables.html"
MKL_CNR = "https://www.intel.com/content/www/us/en/docs/onemkl/developer-guide-linux/current/"
OPENMP = "https://www.openmp.org/spec-html/5.0/openmpse50.html"
INDUCTOR = "https://github.com/pytorch/pytorch/blob/main/torch/_inductor/config.py"
TE_ENV = "https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/envvars.html"

HASH_SEED = Digits(0, 2**32 - 1, also=("random",))


CUBLAS = Text(
    ":4096:8|:16:8",
    ":4096:8, :16:8",
    "cuBLAS is deterministic with these two only, and torch raises with any other",
)


def _cublas_is_deterministic(value: str) -> bool:
    return CUBLAS.complaint(value) == ""


def _option(option: str, summary: str, cost: str = "none", aliases: tuple[str, ...] = ()) -> Knob:
    name = f"TORCHINDUCTOR_{option.upper()}"
    access = InductorVariable(name, option)
    return row(
        name,
        "",
        BIT,
        summary,
        INDUCTOR,
        cost=cost,
        aliases=aliases,
        effect=effect_of(access),
        access=access,
    )


ENV = (
    # Python
    row(
        "PYTHONHASHSEED",
        "interpreter",
        HASH_SEED,
        "The order in which Python iterates sets of strings. Set later it reaches only children.",
        "https://docs.python.org/3/using/cmdline.html#envvar-PYTHONHASHSEED",
        enough=digits,
        effect=HASHES,
    ),
    # CUDA
    row(
        "CUBLAS_WORKSPACE_CONFIG",
        "cuda",
        CUBLAS,
        "cuBLAS computes with a workspace of fixed size, without which its sums vary; torch "
        "raises at the first cuBLAS call under deterministic algorithms if it is not set.",
        "https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility",
        cost=":4096:8 takes 24 MiB of GPU memory, :16:8 less memory and some speed",
        enough=_cublas_is_deterministic,
    ),
    row(
        "CUDA_LAUNCH_BLOCKING",
        "cuda",
        BIT,
        "Every kernel launch waits for its end: errors point at their line, and RNNs of some "
        "older CUDA versions become deterministic.",
        f"{TORCH_ENV}",
        cost="on: everything is slow; for debugging only",
    ),
    row(
        "NVIDIA_TF32_OVERRIDE",
        "cuda",
        Text("0", '"0"', 'only "0", which forbids TF32, is defined'),
        "Forbids TF32 in every NVIDIA library, whatever the program sets.",
        "https://docs.nvidia.com/cuda/cublas/index.html",
        cost="slower float32 on tensor cores",
    ),
    row(
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "torch",
        BIT,
        "Sets torch's starting value of the float32 precision of matrix products.",
        TORCH_ENV,
        effect=TF32,
    ),
    # CPU
    row(
        "OMP_NUM_THREADS",
        "openmp",
        COUNT,
        "Threads of OpenMP, and so of torch's CPU ops; another number adds in another order.",
        OPENMP,
        cost="fewer threads, less speed",
        enough=digits,
        effect=OPENMP_THREADS,
    ),
    row(
        "OMP_DYNAMIC",
        "openmp",
        Text("true|false", '"true", "false"', ignore_case=True),
        "OpenMP may choose the number of threads at each parallel region.",
        OPENMP,
        effect=OPENMP_DYNAMIC,
    ),
    row(
        "MKL_NUM_THREADS",
        "torch",
        COUNT,
        "Threads of MKL's matrix products.",
        MKL_CNR,
        cost="fewer threads, less speed",
        enough=digits,
        effect=MKL_THREADS,
    ),
    row(
        "MKL_DYNAMIC",
        "torch",
        Text("true|false", '"true", "false"', ignore_case=True),
        "MKL may choose the number of threads at each call.",
        MKL_CNR,
    ),
    row(
        "MKL_CBWR",
        "torch",
        Text(
            r"(AUTO|COMPATIBLE|SSE4_2|AVX|AVX2|AVX512)(,STRICT)?",
            "AUTO, COMPATIBLE, SSE4_2, AVX, AVX2, AVX512, each also with ,STRICT",
        ),
        "Fixes MKL's code path, so that other CPU models compute the same.",
        MKL_CNR,
        cost="COMPATIBLE is several times slower than AVX512",
    ),
    row(
        "ATEN_CPU_CAPABILITY",
        "torch",
        Text("default|avx2|avx512", "default, avx2, avx512"),
        "Fixes the vector instructions of torch's own CPU kernels.",
        TORCH_ENV,
        cost="default uses no wide vectors and is slow",
        effect=CAPABILITY,
    ),
    row(
        "ONEDNN_DEFAULT_FPMATH_MODE",
        "torch",
        Text("STRICT|BF16|F16|TF32|ANY", "STRICT, BF16, F16, TF32, ANY", ignore_case=True),
        "How far oneDNN may lower the precision of float32 products.",
        "https://uxlfoundation.github.io/oneDNN/dev_guide_attributes_fpmath_mode.html",
    ),
    # compiler
    _option(
        "deterministic",
        "Starting value of inductor's deterministic mode.",
        cost="on: compiled code can be much slower",
        aliases=("backends.torch.inductor_deterministic",),
    ),
    _option(
        "max_autotune",
        "Inductor times several kernels and takes the fastest, so that timing noise decides.",
        cost="on: slow compilation, faster code",
    ),
    _option(
        "coordinate_descent_tuning",
        "Inductor tunes kernel parameters by timing.",
        cost="on: slow compilation, faster code",
    ),
    _option(
        "batch_invariant",
        "Compiled kernels give a row the same result in a batch of any size.",
        cost="on: slower code",
    ),
    _option("use_fast_math", "Compiled kernels use approximations of special functions."),
    _option(
        "force_disable_caches",
        "Nothing compiled earlier is used again.",
        cost="on: everything compiles anew",
    ),
    # Transformer Engine and flash attention
    row(
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        "transformer_engine",
        BIT,
        "Transformer Engine may take attention kernels that are not deterministic; read when a "
        "module is made.",
        TE_ENV,
        cost="0: slower attention backward",
    ),
    row(
        "NVTE_FLASH_ATTN",
        "transformer_engine",
        BIT,
        "Transformer Engine may take flash attention.",
        TE_ENV,
    ),
    row(
        "NVTE_FUSED_ATTN",
        "transformer_engine",
        BIT,
        "Transformer Engine may take cuDNN's fused attention.",
        TE_ENV,
    ),
    row(
        "NVTE_UNFUSED_ATTN",
        "transformer_engine",
        BIT,
        "Transformer Engine may take its unfused attention.",
        TE_ENV,
    ),
    row(
        "FLASH_ATTENTION_DETERMINISTIC",
        "transformer_engine",
        BIT,
        "transformers passes deterministic=True to flash-attn; flash-attn itself does not read it.",
        "https://huggingface.co/docs/transformers/main_classes/trainer",
    ),
)


NCCL_ENV = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
ASCEND_ENV = "https://www.hiascend.com/document"

HCCL = Text(
    "false|true|strict",
    '"false", "true", "strict"',
    "HCCL refuses it with HCCL_E_PARA",
    ignore_case=True,
)
NTHREADS = Text(
    "64|128|256|512", '"64", "128", "256", "512"', "NCCL takes another number for the maximum"
)

ORDER_OF_SUMS = {"nccl": ("NCCL_ALGO", "NCCL_PROTO"), "hccl": ("HCCL_DETERMINISTIC",)}
"""Back end of torch.distributed -> the variables that fix in which order it adds up; gloo's order
follows from sizes alone."""


def pinned(value: str) -> bool:
    """Whether a list of algorithms names some rather than excluding some."""
    return bool(value) and not value.startswith("^")


_NCCL_ALGORITHM = "(tree|ring|collnetdirect|collnetchain|collnet|nvls|nvlstree|pat)"
_NCCL_PROTOCOL = "(ll|ll128|simple)"
_HCCL_ALGORITHM = (
    "(level[0-2]:(NA|null|fullmesh|ring|doublering|pipeline|pairwise|star|H-D_R|NHR|NHR_V1|NB|"
    "AHC|AHC_BROKE|ARS))"
)
_HCCL_OP = (
    "(allreduce|allgather|allgatherv|reducescatter|reducescatterv|broadcast|reduce|scatter|"
    "alltoall|alltoallv|alltoallvc|sendrecv|batchsendrecv|others)"
)


def _per_operation(one: str) -> str:
    """Return the pattern of a list for all of NCCL's operations, or of one list for each."""
    named = rf"\^?{one}(,{one})*"
    operation = "(allreduce|allgather|reducescatter|broadcast|reduce)"
    each = f"{operation}:{named}"
    return f"({named};)?{each}(;{each})*|{named}"


COLLECTIVES = (
    row(
        "NCCL_ALGO",
        "communicator",
        Text(
            _per_operation(_NCCL_ALGORITHM),
            "Ring, Tree, CollnetDirect, CollnetChain, NVLS, NVLSTree, PAT",
            ignore_case=True,
        ),
        "The algorithm of NCCL's collectives; left open, NCCL chooses by size and topology.",
        f"{NCCL_ENV}#nccl-algo",
        cost="one algorithm is not the fastest for every size",
        aliases=("backends.distributed.nccl_algo",),
        enough=pinned,
    ),
    row(
        "NCCL_PROTO",
        "communicator",
        Text(_per_operation(_NCCL_PROTOCOL), "Simple, LL, LL128", ignore_case=True),
        "The protocol of NCCL's collectives.",
        f"{NCCL_ENV}#nccl-proto",
        cost="Simple is slow for small messages",
        aliases=("backends.distributed.nccl_proto",),
        enough=pinned,
    ),
    row(
        "NCCL_NTHREADS",
        "communicator",
        NTHREADS,
        "Threads of one NCCL block.",
        f"{NCCL_ENV}#nccl-nthreads",
    ),
    row(
        "NCCL_MIN_NCHANNELS",
        "communicator",
        COUNT,
        "Fewest channels of NCCL; each channel sums a part.",
        f"{NCCL_ENV}#nccl-min-nchannels",
    ),
    row(
        "NCCL_MAX_NCHANNELS",
        "communicator",
        COUNT,
        "Most channels of NCCL; each channel sums a part.",
        f"{NCCL_ENV}#nccl-max-nchannels",
    ),
    row(
        "NCCL_NVLS_ENABLE",
        "communicator",
        Text("[012]", '"0", "1", "2"'),
        "NCCL may reduce in the NVLink switch.",
        f"{NCCL_ENV}#nccl-nvls-enable",
    ),
    row(
        "NCCL_COLLNET_ENABLE",
        "communicator",
        BIT,
        "NCCL may reduce in the network.",
        f"{NCCL_ENV}#nccl-collnet-enable",
    ),
    row(
        "HCCL_DETERMINISTIC",
        "communicator",
        HCCL,
        "Ascend's collectives add up in a fixed order; strict also keeps the order of ranks.",
        ASCEND_ENV,
        cost="true: slower all-reduce; strict: slower still, A2 and A3 only",
        aliases=("backends.distributed.hccl_deterministic",),
        enough=lambda value: value.lower() in ("true", "strict"),
    ),
    row(
        "HCCL_ALGO",
        "communicator",
        Text(
            f"{_HCCL_ALGORITHM}(;{_HCCL_ALGORITHM})*|"
            f"{_HCCL_OP}={_HCCL_ALGORITHM}(;{_HCCL_ALGORITHM})*"
            f"(/{_HCCL_OP}={_HCCL_ALGORITHM}(;{_HCCL_ALGORITHM})*)*",
            "a list such as level0:NA;level1:ring, or one per operation as in "
            "allreduce=level0:NA;level1:ring/alltoall=level0:NA;level1:pairwise",
        ),
        "The algorithm of Ascend's collectives.",
        ASCEND_ENV,
        aliases=("backends.distributed.hccl_algo",),
        enough=bool,
    ),
    row(
        "LCCL_DETERMINISTIC",
        "communicator",
        Text("[01]|true|false", '"0", "1"'),
        "The collectives of the ATB library add up in a fixed order.",
        "https://www.hiascend.com/document",
        cost="slower all-reduce",
        aliases=("backends.distributed.lccl_deterministic",),
    ),
)
