"""Rows for environment variables: who reads each, when for the last time, and what it accepts.

Each is written to `os.environ`, which reaches C code that has not read it yet and every child.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrepro.knobs.knob import Knob, Phase, Scope
from torchrepro.knobs.legal import ANY_TEXT, Legal, Text

if TYPE_CHECKING:
    from collections.abc import Callable

TORCH_ENV = "https://docs.pytorch.org/docs/stable/torch_environment_variables.html"
NCCL_ENV = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
ASCEND_ENV = "https://www.hiascend.com/document"
NPU_ENV = "https://github.com/Ascend/pytorch"
MKL_CNR = "https://www.intel.com/content/www/us/en/docs/onemkl/developer-guide-linux/current/"
OPENMP = "https://www.openmp.org/spec-html/5.0/openmpse50.html"
INDUCTOR = "https://github.com/pytorch/pytorch/blob/main/torch/_inductor/config.py"
TE_ENV = "https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/envvars.html"

BIT = Text("[01]", '"0", "1"')
COUNT = Text("[1-9][0-9]{0,3}", "a whole number, 1 to 9999")
HASH_SEED = Text("random|[0-9]{1,10}", 'random, or a whole number of 0 to 4294967295 such as "0"')


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable; None is a variable that is not set."""

    name: str

    def read(self) -> Any:
        return os.environ.get(self.name)

    def write(self, value: str) -> None:
        os.environ[self.name] = value

    save = read

    def restore(self, saved: Any) -> None:
        if saved is None:
            os.environ.pop(self.name, None)
        else:
            os.environ[self.name] = saved


def variable(name: str) -> Knob:
    """Return a row for a variable that the catalogue does not know, as `env_extra` names it."""
    return Knob(
        name=f"env_extra.{name}",
        target="env",
        legal=ANY_TEXT,
        access=Variable(name),
        variable=name,
        summary="A variable of the profile's own, which the catalogue does not know.",
        cost="unknown",
        source="",
        scope=Scope.PROCESS_AND_CHILDREN,
    )


def _digits(value: str) -> bool:
    return value.isdigit()


def _pinned(value: str) -> bool:
    """Whether a list of algorithms names some rather than excluding some."""
    return bool(value) and not value.startswith("^")


_DOORS = {
    "interpreter": Phase.INTERPRETER_START,
    "torch": Phase.LIBRARY_LOAD,
    "torch_npu": Phase.LIBRARY_LOAD,
    "inductor": Phase.LIBRARY_LOAD,
    "cuda": Phase.DEVICE_INIT,
    "npu": Phase.DEVICE_INIT,
    "communicator": Phase.COMMUNICATOR,
    "transformer_engine": Phase.MODULE_CONSTRUCTION,
}


def _row(  # noqa: PLR0913 - the columns of the table below
    name: str,
    door: str,
    legal: Legal,
    summary: str,
    source: str,
    *,
    cost: str = "none",
    aliases: tuple[str, ...] = (),
    enough: Callable[[str], bool] | None = None,
) -> Knob:
    return Knob(
        name=f"env.{name}",
        target="env",
        legal=legal,
        access=Variable(name),
        variable=name,
        summary=summary,
        cost=cost,
        source=source,
        phase=_DOORS[door],
        door=door,
        scope=Scope.PROCESS_AND_CHILDREN,
        aliases=aliases,
        enough=enough,
    )


def _cublas_is_deterministic(value: str) -> bool:
    return CUBLAS.complaint(value) == ""


CUBLAS = Text(
    ":4096:8|:16:8",
    ":4096:8, :16:8",
    "cuBLAS is deterministic with these two only, and torch raises with any other",
)
HCCL = Text(
    "false|true|strict",
    '"false", "true", "strict"',
    "HCCL refuses it with HCCL_E_PARA",
    ignore_case=True,
)
NTHREADS = Text(
    "64|128|256|512", '"64", "128", "256", "512"', "NCCL takes another number for the maximum"
)
TASK_QUEUE = Text("[012]", '"0", "1", "2"', "torch_npu parses a word as 0 and raises on others")
LAUNCH_BLOCKING = Text(
    "[01]", '"0", "1"', "torch_npu parses a word such as true as 0, which is off"
)
EXACTLY_ONE = Text("[01]", '"0", "1"', 'only the exact text "1" counts; a word such as true is off')

ENV = (
    # Python
    _row(
        "PYTHONHASHSEED",
        "interpreter",
        HASH_SEED,
        "The order in which Python iterates sets of strings. Set later it reaches only children.",
        "https://docs.python.org/3/using/cmdline.html#envvar-PYTHONHASHSEED",
        enough=_digits,
    ),
    # CUDA
    _row(
        "CUBLAS_WORKSPACE_CONFIG",
        "cuda",
        CUBLAS,
        "cuBLAS computes with a workspace of fixed size, without which its sums vary; torch "
        "raises at the first cuBLAS call under deterministic algorithms if it is not set.",
        "https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility",
        cost=":4096:8 takes 24 MiB of GPU memory, :16:8 less memory and some speed",
        enough=_cublas_is_deterministic,
    ),
    _row(
        "CUDA_LAUNCH_BLOCKING",
        "cuda",
        BIT,
        "Every kernel launch waits for its end: errors point at their line, and RNNs of some "
        "older CUDA versions become deterministic.",
        f"{TORCH_ENV}",
        cost="on: everything is slow; for debugging only",
    ),
    _row(
        "NVIDIA_TF32_OVERRIDE",
        "cuda",
        Text("0", '"0"', 'only "0", which forbids TF32, is defined'),
        "Forbids TF32 in every NVIDIA library, whatever the program sets.",
        "https://docs.nvidia.com/cuda/cublas/index.html",
        cost="slower float32 on tensor cores",
    ),
    _row(
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "torch",
        BIT,
        "Sets torch's starting value of the float32 precision of matrix products.",
        TORCH_ENV,
    ),
    # CPU
    _row(
        "OMP_NUM_THREADS",
        "torch",
        COUNT,
        "Threads of OpenMP, and so of torch's CPU ops; another number adds in another order.",
        OPENMP,
        cost="fewer threads, less speed",
        enough=_digits,
    ),
    _row(
        "OMP_DYNAMIC",
        "torch",
        Text("true|false", '"true", "false"', ignore_case=True),
        "OpenMP may choose the number of threads at each parallel region.",
        OPENMP,
    ),
    _row(
        "MKL_NUM_THREADS",
        "torch",
        COUNT,
        "Threads of MKL's matrix products.",
        MKL_CNR,
        cost="fewer threads, less speed",
        enough=_digits,
    ),
    _row(
        "MKL_DYNAMIC",
        "torch",
        Text("true|false", '"true", "false"', ignore_case=True),
        "MKL may choose the number of threads at each call.",
        MKL_CNR,
    ),
    _row(
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
    _row(
        "ATEN_CPU_CAPABILITY",
        "torch",
        Text("default|avx2|avx512", "default, avx2, avx512"),
        "Fixes the vector instructions of torch's own CPU kernels.",
        TORCH_ENV,
        cost="default uses no wide vectors and is slow",
    ),
    _row(
        "ONEDNN_DEFAULT_FPMATH_MODE",
        "torch",
        Text("STRICT|BF16|F16|TF32|ANY", "STRICT, BF16, F16, TF32, ANY", ignore_case=True),
        "How far oneDNN may lower the precision of float32 products.",
        "https://uxlfoundation.github.io/oneDNN/dev_guide_attributes_fpmath_mode.html",
    ),
    # compiler
    _row(
        "TORCHINDUCTOR_DETERMINISTIC",
        "inductor",
        BIT,
        "Starting value of inductor's deterministic mode.",
        INDUCTOR,
        cost="on: compiled code can be much slower",
        aliases=("backends.torch.inductor_deterministic",),
    ),
    _row(
        "TORCHINDUCTOR_MAX_AUTOTUNE",
        "inductor",
        BIT,
        "Inductor times several kernels and takes the fastest, so that timing noise decides.",
        INDUCTOR,
        cost="on: slow compilation, faster code",
    ),
    _row(
        "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING",
        "inductor",
        BIT,
        "Inductor tunes kernel parameters by timing.",
        INDUCTOR,
        cost="on: slow compilation, faster code",
    ),
    _row(
        "TORCHINDUCTOR_BATCH_INVARIANT",
        "inductor",
        BIT,
        "Compiled kernels give a row the same result in a batch of any size.",
        INDUCTOR,
        cost="on: slower code",
    ),
    _row(
        "TORCHINDUCTOR_USE_FAST_MATH",
        "inductor",
        BIT,
        "Compiled kernels use approximations of special functions.",
        INDUCTOR,
    ),
    _row(
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES",
        "inductor",
        BIT,
        "Nothing compiled earlier is used again.",
        INDUCTOR,
        cost="on: everything compiles anew",
    ),
    # Transformer Engine and flash attention
    _row(
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        "transformer_engine",
        BIT,
        "Transformer Engine may take attention kernels that are not deterministic; read when a "
        "module is made.",
        TE_ENV,
        cost="0: slower attention backward",
    ),
    _row(
        "NVTE_FLASH_ATTN",
        "transformer_engine",
        BIT,
        "Transformer Engine may take flash attention.",
        TE_ENV,
    ),
    _row(
        "NVTE_FUSED_ATTN",
        "transformer_engine",
        BIT,
        "Transformer Engine may take cuDNN's fused attention.",
        TE_ENV,
    ),
    _row(
        "NVTE_UNFUSED_ATTN",
        "transformer_engine",
        BIT,
        "Transformer Engine may take its unfused attention.",
        TE_ENV,
    ),
    _row(
        "FLASH_ATTENTION_DETERMINISTIC",
        "transformer_engine",
        BIT,
        "transformers passes deterministic=True to flash-attn; flash-attn itself does not read it.",
        "https://huggingface.co/docs/transformers/main_classes/trainer",
    ),
    # NCCL
    _row(
        "NCCL_ALGO",
        "communicator",
        Text(
            r"\^?[A-Za-z0-9]+([,;:][A-Za-z0-9:]+)*", "Ring, Tree, CollnetDirect, CollnetChain, NVLS"
        ),
        "The algorithm of NCCL's collectives; left open, NCCL chooses by size and topology.",
        f"{NCCL_ENV}#nccl-algo",
        cost="one algorithm is not the fastest for every size",
        aliases=("backends.distributed.nccl_algo",),
        enough=_pinned,
    ),
    _row(
        "NCCL_PROTO",
        "communicator",
        Text(r"\^?[A-Za-z0-9]+(,[A-Za-z0-9]+)*", "Simple, LL, LL128"),
        "The protocol of NCCL's collectives.",
        f"{NCCL_ENV}#nccl-proto",
        cost="Simple is slow for small messages",
        aliases=("backends.distributed.nccl_proto",),
        enough=_pinned,
    ),
    _row(
        "NCCL_NTHREADS",
        "communicator",
        NTHREADS,
        "Threads of one NCCL block.",
        f"{NCCL_ENV}#nccl-nthreads",
    ),
    _row(
        "NCCL_MIN_NCHANNELS",
        "communicator",
        COUNT,
        "Fewest channels of NCCL; each channel sums a part.",
        f"{NCCL_ENV}#nccl-min-nchannels",
    ),
    _row(
        "NCCL_MAX_NCHANNELS",
        "communicator",
        COUNT,
        "Most channels of NCCL; each channel sums a part.",
        f"{NCCL_ENV}#nccl-max-nchannels",
    ),
    _row(
        "NCCL_NVLS_ENABLE",
        "communicator",
        Text("[012]", '"0", "1", "2"'),
        "NCCL may reduce in the NVLink switch.",
        f"{NCCL_ENV}#nccl-nvls-enable",
    ),
    _row(
        "NCCL_COLLNET_ENABLE",
        "communicator",
        BIT,
        "NCCL may reduce in the network.",
        f"{NCCL_ENV}#nccl-collnet-enable",
    ),
    # Ascend
    _row(
        "HCCL_DETERMINISTIC",
        "communicator",
        HCCL,
        "Ascend's collectives add up in a fixed order; strict also keeps the order of ranks.",
        ASCEND_ENV,
        cost="true: slower all-reduce; strict: slower still, A2 and A3 only",
        aliases=("backends.distributed.hccl_deterministic",),
        enough=lambda value: value.lower() in ("true", "strict"),
    ),
    _row(
        "HCCL_ALGO",
        "communicator",
        Text(r"[\w:;,/=-]+", "a list such as level0:NA;level1:ring"),
        "The algorithm of Ascend's collectives.",
        ASCEND_ENV,
        aliases=("backends.distributed.hccl_algo",),
        enough=bool,
    ),
    _row(
        "LCCL_DETERMINISTIC",
        "communicator",
        Text("[01]|true|false", '"0", "1"'),
        "The collectives of the ATB library add up in a fixed order.",
        "https://www.hiascend.com/document",
        cost="slower all-reduce",
        aliases=("backends.distributed.lccl_deterministic",),
    ),
    _row(
        "CLOSE_MATMUL_K_SHIFT",
        "npu",
        EXACTLY_ONE,
        "Matrix products do not shift their inner dimension between cores.",
        "https://www.hiascend.com/document",
        cost="1: slower products",
    ),
    _row(
        "ATB_MATMUL_SHUFFLE_K_ENABLE",
        "npu",
        EXACTLY_ONE,
        "ATB's matrix products shuffle their inner dimension; 0 fixes the order.",
        "https://www.hiascend.com/document",
        cost="0: slower products",
    ),
    _row(
        "ATB_LLM_LCOC_ENABLE",
        "npu",
        EXACTLY_ONE,
        "ATB's language models overlap computing and communication.",
        "https://www.hiascend.com/document",
        cost="0: slower steps",
    ),
    _row(
        "ASCEND_LAUNCH_BLOCKING",
        "npu",
        LAUNCH_BLOCKING,
        "Every op waits for its end; forces the task queue off.",
        NPU_ENV,
        cost="on: everything is slow; for debugging only",
    ),
    _row(
        "TASK_QUEUE_ENABLE",
        "npu",
        TASK_QUEUE,
        "How torch_npu hands ops to the device.",
        NPU_ENV,
        cost="0: slower launches",
        aliases=("backends.npu.task_queue",),
    ),
    _row(
        "PER_STREAM_QUEUE",
        "npu",
        EXACTLY_ONE,
        "One task queue per stream.",
        NPU_ENV,
    ),
    _row(
        "INF_NAN_MODE_ENABLE",
        "npu",
        EXACTLY_ONE,
        "Overflow gives Inf and NaN as on a GPU; 0 saturates.",
        NPU_ENV,
    ),
    _row(
        "TORCH_NPU_USE_COMPATIBLE_IMPL",
        "torch_npu",
        EXACTLY_ONE,
        "gelu, matmul and max_pool follow the numerics of torch's own kernels.",
        NPU_ENV,
        aliases=("backends.npu.compatible_impl",),
    ),
    _row(
        "TORCH_NPU_LEGACY_IMPL_LIST",
        "npu",
        Text("randomness", "randomness", "unknown keys raise"),
        "On the newest chips, draws random numbers as A2 and A3 do.",
        NPU_ENV,
    ),
    _row(
        "ACL_OP_COMPILER_CACHE_MODE",
        "npu",
        Text("enable|disable|force", "enable, disable, force"),
        "Whether operators compiled earlier are used again.",
        NPU_ENV,
    ),
)
