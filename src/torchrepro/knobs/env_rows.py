"""Rows for the variables that Python, torch, its compiler, CUDA, BLAS and collectives read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrepro.knobs.knob import Knob, Phase, Scope, Variable
from torchrepro.knobs.legal_values import Digits, Text
from torchrepro.knobs.linked_state import InductorVariable
from torchrepro.knobs.variable_effects import (
    CAPABILITY,
    HASHES,
    MKL_THREADS,
    OPENMP_DYNAMIC,
    OPENMP_THREADS,
    TF32,
    inductor_option,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrepro.knobs.knob import Effect
    from torchrepro.knobs.legal_values import Legal

TORCH_ENV = "https://docs.pytorch.org/docs/stable/torch_environment_variables.html"
MKL_CNR = "https://www.intel.com/content/www/us/en/docs/onemkl/developer-guide-linux/current/"
OPENMP = "https://www.openmp.org/spec-html/5.0/openmpse50.html"
INDUCTOR = "https://github.com/pytorch/pytorch/blob/main/torch/_inductor/config.py"
TE_ENV = "https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/envvars.html"
NCCL_ENV = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
ASCEND_ENV = "https://www.hiascend.com/document"

BIT = Text("[01]", '"0", "1"')
BOOLEAN = Text("true|false", '"true", "false"', ignore_case=True)
COUNT = Digits(1, 9999)
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

PHASES = {
    "": Phase.ANY_TIME,
    "interpreter": Phase.INTERPRETER_START,
    "openmp": Phase.LIBRARY_LOAD,
    "torch": Phase.LIBRARY_LOAD,
    "torch_npu": Phase.LIBRARY_LOAD,
    "cuda": Phase.DEVICE_INIT,
    "npu": Phase.DEVICE_INIT,
    "communicator": Phase.COMMUNICATOR,
    "transformer_engine": Phase.MODULE_CONSTRUCTION,
}

ONEDNN_ISA = Text(
    "DEFAULT|SSE41|AVX|AVX2(_VNNI(_2)?)?"
    "|AVX512_CORE(_VNNI|_BF16|_FP16|_AMX(_FP16)?)?|AVX10_1_512(_AMX(_FP16)?)?",
    "DEFAULT, SSE41, AVX, AVX2, AVX2_VNNI, AVX2_VNNI_2, AVX512_CORE, also with _VNNI, _BF16, "
    "_FP16, _AMX or _AMX_FP16, AVX10_1_512, also with _AMX or _AMX_FP16",
    ignore_case=True,
)


def row(  # noqa: PLR0913 - the columns of the tables below
    name: str,
    door: str,
    legal: Legal,
    summary: str,
    source: str,
    *,
    cost: str = "none",
    aliases: tuple[str, ...] = (),
    enough: Callable[[str], bool] | None = None,
    misspelt: tuple[str, ...] = (),
    effect: Effect | None = None,
    access: Variable | None = None,
    hardware: str = "",
) -> Knob:
    """Return the row of a variable that takes effect until `door` closes."""
    return Knob(
        name=f"env.{name}",
        target="env",
        legal=legal,
        access=access or Variable(name),
        variable=name,
        summary=summary,
        cost=cost,
        source=source,
        phase=PHASES[door],
        door=door,
        scope=Scope.PROCESS_AND_CHILDREN,
        aliases=aliases,
        enough=enough,
        misspelt=misspelt,
        effect=effect,
        hardware=hardware,
    )


def pinned(value: str) -> bool:
    """Whether a list of algorithms names some rather than excluding some."""
    return bool(value) and not value.startswith("^")


def of_fixed_size(value: str) -> bool:
    """Whether a configuration of cuBLAS's workspace is one under which its sums repeat."""
    return not CUBLAS.complaint(value)


def in_fixed_order(value: str) -> bool:
    """Whether HCCL's collectives then add up in a fixed order."""
    return value.lower() in ("true", "strict")


def switched_on(value: str) -> bool:
    """Whether a switch of the ATB library is on, which takes two texts for it."""
    return value in ("1", "true")


def _option(option: str, summary: str, **more: Any) -> Knob:
    access = InductorVariable(f"TORCHINDUCTOR_{option.upper()}", option)
    effect = inductor_option(access)
    return row(access.name, "", BIT, summary, INDUCTOR, effect=effect, access=access, **more)


def _nccl(name: str, legal: Legal, summary: str, **more: Any) -> Knob:
    anchor = name.lower().replace("_", "-")
    source = f"{NCCL_ENV}#{anchor}"
    return row(name, "communicator", legal, summary, source, hardware="NCCL", **more)


def _attention(name: str, summary: str, source: str = TE_ENV, **more: Any) -> Knob:
    return row(name, "transformer_engine", BIT, summary, source, hardware="CUDA", **more)


ENV = (
    # Python
    row(
        "PYTHONHASHSEED",
        "interpreter",
        Digits(0, 2**32 - 1, also=("random",)),
        "The order in which Python iterates sets of strings. Set later it reaches only children.",
        "https://docs.python.org/3/using/cmdline.html#envvar-PYTHONHASHSEED",
        enough=str.isdigit,
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
        enough=of_fixed_size,
        hardware="CUDA",
    ),
    row(
        "CUDA_LAUNCH_BLOCKING",
        "cuda",
        BIT,
        "Every kernel launch waits for its end: errors point at their line, and RNNs of some "
        "older CUDA versions become deterministic.",
        TORCH_ENV,
        cost="on: everything is slow; for debugging only",
        hardware="CUDA",
    ),
    row(
        "NVIDIA_TF32_OVERRIDE",
        "cuda",
        Text("0", '"0"', 'only "0", which forbids TF32, is defined'),
        "Forbids TF32 in every NVIDIA library, whatever the program sets.",
        "https://docs.nvidia.com/cuda/cublas/index.html",
        cost="slower float32 on tensor cores",
        hardware="CUDA",
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
        enough=str.isdigit,
        effect=OPENMP_THREADS,
    ),
    row(
        "OMP_DYNAMIC",
        "openmp",
        BOOLEAN,
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
        enough=str.isdigit,
        effect=MKL_THREADS,
    ),
    row(
        "MKL_DYNAMIC",
        "torch",
        BOOLEAN,
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
        "ONEDNN_MAX_CPU_ISA",
        "torch",
        ONEDNN_ISA,
        "oneDNN takes no kernels above this instruction set, so that convolutions are the same on "
        "CPU models that all have it. Whatever oneDNN does not know, it ignores.",
        "https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html",
        cost="AVX2: slower convolutions on a CPU with AVX-512 or AMX",
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
    _attention(
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        "Transformer Engine may take attention kernels that are not deterministic; read when a "
        "module is made.",
        cost="0: slower attention backward",
    ),
    _attention("NVTE_FLASH_ATTN", "Transformer Engine may take flash attention."),
    _attention("NVTE_FUSED_ATTN", "Transformer Engine may take cuDNN's fused attention."),
    _attention("NVTE_UNFUSED_ATTN", "Transformer Engine may take its unfused attention."),
    _attention(
        "FLASH_ATTENTION_DETERMINISTIC",
        "transformers passes deterministic=True to flash-attn; flash-attn itself does not read it.",
        "https://huggingface.co/docs/transformers/main_classes/trainer",
    ),
)


ORDER_OF_SUMS = {"nccl": ("NCCL_ALGO", "NCCL_PROTO"), "hccl": ("HCCL_DETERMINISTIC",)}
"""Back end of torch.distributed -> the variables that fix in which order it adds up; gloo's order
follows from sizes alone."""

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
    _nccl(
        "NCCL_ALGO",
        Text(
            _per_operation(_NCCL_ALGORITHM),
            "Ring, Tree, CollnetDirect, CollnetChain, NVLS, NVLSTree, PAT",
            ignore_case=True,
        ),
        "The algorithm of NCCL's collectives; left open, NCCL chooses by size and topology.",
        cost="one algorithm is not the fastest for every size",
        aliases=("backends.distributed.nccl_algo",),
        enough=pinned,
    ),
    _nccl(
        "NCCL_PROTO",
        Text(_per_operation(_NCCL_PROTOCOL), "Simple, LL, LL128", ignore_case=True),
        "The protocol of NCCL's collectives.",
        cost="Simple is slow for small messages",
        aliases=("backends.distributed.nccl_proto",),
        enough=pinned,
    ),
    _nccl("NCCL_NTHREADS", NTHREADS, "Threads of one NCCL block."),
    _nccl("NCCL_MIN_NCHANNELS", COUNT, "Fewest channels of NCCL; each channel sums a part."),
    _nccl("NCCL_MAX_NCHANNELS", COUNT, "Most channels of NCCL; each channel sums a part."),
    _nccl(
        "NCCL_NVLS_ENABLE", Text("[012]", '"0", "1", "2"'), "NCCL may reduce in the NVLink switch."
    ),
    _nccl("NCCL_COLLNET_ENABLE", BIT, "NCCL may reduce in the network."),
    row(
        "HCCL_DETERMINISTIC",
        "communicator",
        HCCL,
        "Ascend's collectives add up in a fixed order; strict also keeps the order of ranks.",
        ASCEND_ENV,
        cost="true: slower all-reduce; strict: slower still, A2 and A3 only",
        aliases=("backends.distributed.hccl_deterministic",),
        enough=in_fixed_order,
        misspelt=("1",),  # as transformers writes it; HCCL takes the words alone
        hardware="Ascend",
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
        hardware="Ascend",
    ),
    row(
        "LCCL_DETERMINISTIC",
        "communicator",
        Text("[01]|true|false", '"0", "1"'),
        "The collectives of the ATB library add up in a fixed order.",
        ASCEND_ENV,
        cost="slower all-reduce",
        aliases=("backends.distributed.lccl_deterministic",),
        enough=switched_on,
        hardware="Ascend",
    ),
)
