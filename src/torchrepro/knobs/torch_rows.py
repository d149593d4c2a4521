"""Rows for the flags of torch and torch_npu: determinism, CUDA, cuDNN, the CPU, Ascend NPUs."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from torchrepro.knobs.knob import (
    Attribute,
    Calls,
    Integer,
    Knob,
    OneOf,
    Scope,
    Switch,
)
from torchrepro.knobs.torch_state import (
    CUBE_MATH_LOWERS,
    DETERMINISTIC_ALGORITHMS,
    MODES,
    DeterministicLevel,
    FillUninitializedMemory,
    Fp32Precision,
    InductorSwitch,
    JitCompile,
    MatmulHf32,
    NpuOption,
    OptEinsum,
    ReducedPrecision,
)

DOCS = "https://docs.pytorch.org/docs/stable"
BACKENDS = f"{DOCS}/backends.html#torch-backends"
GENERATED = f"{DOCS}/generated/torch"
NUMERICS = f"{DOCS}/notes/cuda.html"
RANDOMNESS = f"{DOCS}/notes/randomness.html"
TORCH_NPU = "https://pypi.org/project/torch-npu/"


_torch = partial(Knob, library="torch")
_cuda = partial(Knob, library="torch", hardware="CUDA")
_cudnn = partial(Knob, library="torch", hardware="CUDA")
_cpu = partial(Knob, library="torch")


def _flag(section: partial[Knob], name: str, access: Attribute, **columns: Any) -> Knob:
    alias = f"{access.owner.replace(':', '.')}.{access.name}"
    columns = {"legal": Switch(), "aliases": (alias,), **columns}
    return section(name=f"backends.{name}", access=access, **columns)


def _cpu_precision(operation: str) -> Knob:
    return _cpu(
        name=f"backends.cpu.mkldnn_{operation}_fp32_precision",
        legal=OneOf(("ieee", "tf32", "bf16")),
        access=Fp32Precision(f"mkldnn.{operation}"),
        summary=f"float32 {operation} in oneDNN: in full, or through tf32 or bf16 products.",
        cost="ieee gives up the speed of the CPU's bf16 units, where it has them",
        source=f"{DOCS}/notes/mkldnn.html",
        since="2.9",
        aliases=(f"torch.backends.mkldnn.{operation}.fp32_precision",),
    )


def _library(which: str, choices: tuple[str, ...], since: str) -> Knob:
    return _cuda(
        name=f"backends.cuda.preferred_{which}_library",
        legal=OneOf(choices),
        access=Calls(
            "torch.backends.cuda",
            f"preferred_{which}_library",
            f"preferred_{which}_library",
            to_profile=lambda backend: backend.name.lower(),
        ),
        summary=f"The library that computes {which} operations on CUDA tensors.",
        cost="each library is fastest for other shapes",
        source=f"{BACKENDS}-cuda",
        since=since,
        aliases=(f"torch.backends.cuda.preferred_{which}_library",),
    )


def _attention(kernel: str, since: str, cost: str) -> Knob:
    return _cuda(
        name=f"backends.cuda.{kernel}_sdp",
        legal=Switch(),
        access=Calls("torch.backends.cuda", f"{kernel}_sdp_enabled", f"enable_{kernel}_sdp"),
        summary=f"scaled_dot_product_attention may take its {kernel} kernel.",
        cost=cost,
        source=f"{BACKENDS}-cuda",
        since=since,
        aliases=(f"torch.backends.cuda.enable_{kernel}_sdp",),
    )


def _reduction(dtype: str, since: str) -> Knob:
    name = f"allow_{dtype}_reduced_precision_reduction"
    return _flag(
        _cuda,
        f"cuda.{name}",
        ReducedPrecision("torch.backends.cuda:matmul", name),
        summary=f"{dtype} matrix products may add up partial sums in {dtype}.",
        cost="off: slower products with a long inner dimension on some GPUs",
        source=f"{NUMERICS}#reduced-precision-reduction-in-{dtype}-gemms",
        since=since,
    )


def _cudnn_precision(operation: str) -> Knob:
    return _cudnn(
        name=f"backends.cudnn.{operation}_fp32_precision",
        legal=OneOf(("ieee", "tf32")),
        access=Fp32Precision(f"cudnn.{operation}"),
        reread=True,  # before torch 2.9 both have one switch
        summary=f"float32 {operation} in cuDNN: all 23 mantissa bits (ieee) or 10 (tf32, "
        "torch's default).",
        cost="ieee is up to several times slower than tf32 on tensor cores",
        source=f"{NUMERICS}#tf32-on-ampere",
        since="2.9; before that one switch for both, allow_tf32",
        aliases=(
            f"torch.backends.cudnn.{operation}.fp32_precision",
            "torch.backends.cudnn.allow_tf32",
            "allow_tf32",
        ),
    )


TORCH = (
    _torch(
        name="backends.torch.deterministic_algorithms",
        legal=OneOf(MODES),
        access=DETERMINISTIC_ALGORITHMS,
        summary="Every op takes a deterministic kernel; an op without one raises (error), warns "
        "and goes on (warn), or nothing is asked (none).",
        cost="some kernels are slower: a few per cent on most models, several times on some ops",
        source=f"{GENERATED}.use_deterministic_algorithms.html",
        since="1.8",
        aliases=("torch.use_deterministic_algorithms", "torch.set_deterministic_debug_mode"),
    ),
    _flag(
        _torch,
        "torch.fill_uninitialized_memory",
        FillUninitializedMemory("torch.utils.deterministic", "fill_uninitialized_memory"),
        summary="Under deterministic algorithms torch.empty and its like are filled with NaN or "
        "the largest integer, so that a read of uninitialised memory shows.",
        cost="about 15 % of a step on large models "
        "(https://github.com/NVIDIA/Megatron-LM/pull/7093)",
        source=f"{DOCS}/deterministic.html",
        since="2.2",
    ),
    _torch(
        name="backends.torch.inductor_deterministic",
        legal=Switch(),
        access=InductorSwitch("TORCHINDUCTOR_DETERMINISTIC", "deterministic"),
        scope=Scope.PROCESS_AND_CHILDREN,
        summary="Compiled code makes no choice by timing: no autotuning, no benchmarked fusion.",
        cost="compiled code can be much slower (https://github.com/pytorch/pytorch/issues/174711)",
        source="https://github.com/pytorch/pytorch/pull/165950",
        since="2.10",
        aliases=("env.TORCHINDUCTOR_DETERMINISTIC", "torch._inductor.config.deterministic"),
    ),
    _flag(
        _torch,
        "torch.opt_einsum_enabled",
        OptEinsum("torch.backends.opt_einsum", "enabled"),
        summary="torch.einsum lets opt_einsum choose the order of contraction.",
        cost="none to speak of; another order rounds differently",
        source=f"{BACKENDS}-opt-einsum",
        since="1.13",
    ),
    _flag(
        _torch,
        "torch.opt_einsum_strategy",
        OptEinsum("torch.backends.opt_einsum", "strategy"),
        legal=OneOf(("auto", "greedy", "optimal")),
        summary="How opt_einsum searches for the order of contraction.",
        cost="optimal takes long for many operands",
        source=f"{BACKENDS}-opt-einsum",
        since="1.13",
    ),
    _torch(
        name="backends.torch.default_dtype",
        legal=OneOf(("float32", "float64", "float16", "bfloat16")),
        access=Calls(
            "torch",
            "get_default_dtype",
            "set_default_dtype",
            to_profile=lambda dtype: str(dtype).removeprefix("torch."),
            to_library=lambda name: getattr(import_module("torch"), name),
        ),
        summary="The type of floating-point tensors made without naming one.",
        cost="float64 doubles memory and is slow on GPUs",
        source=f"{GENERATED}.set_default_dtype.html",
        since="1.0",
        aliases=("torch.set_default_dtype",),
    ),
)

CUDA = (
    _cuda(
        name="backends.cuda.matmul_fp32_precision",
        legal=OneOf(("ieee", "tf32")),
        access=Fp32Precision("cuda.matmul"),
        summary="float32 matrix products on CUDA: all 23 mantissa bits (ieee) or 10 (tf32).",
        cost="ieee is up to several times slower than tf32 on tensor cores",
        source=f"{NUMERICS}#tf32-on-ampere",
        since="2.9; before that through allow_tf32",
        aliases=(
            "torch.backends.cuda.matmul.fp32_precision",
            "torch.backends.cuda.matmul.allow_tf32",
            "torch.set_float32_matmul_precision",
            "env.TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
            "allow_tf32",
        ),
    ),
    _reduction("fp16", "1.10"),
    _reduction("bf16", "1.12"),
    _flag(
        _cuda,
        "cuda.allow_fp16_accumulation",
        Attribute("torch.backends.cuda:matmul", "allow_fp16_accumulation"),
        summary="fp16 matrix products may accumulate in fp16.",
        cost="on: faster on some GPUs, with larger errors",
        source=f"{NUMERICS}#full-fp16-accmumulation-in-fp16-gemms",
        since="2.7",
    ),
    _attention("flash", "2.0", "its backward is not deterministic unless algorithms are `error`"),
    _attention("mem_efficient", "2.0", "its backward is deterministic only under `error`"),
    _attention("math", "2.0", "the reference: slow, and the whole attention matrix in memory"),
    _attention("cudnn", "2.5", "fast on recent GPUs; cuDNN chooses the kernel"),
    _library("linalg", ("default", "cusolver", "magma"), "1.11"),
    _library("blas", ("default", "cublas", "cublaslt", "ck"), "2.4"),
)

CUDNN = (
    _flag(
        _cudnn,
        "cudnn.enabled",
        Attribute("torch.backends.cudnn", "enabled"),
        summary="cuDNN is used at all. (The often copied `cudnn.enable` does nothing.)",
        cost="off: convolutions and RNNs are much slower; the last resort of a hunt",
        source=f"{BACKENDS}-cudnn",
        since="0.3",
        aliases=("torch.backends.cudnn.enabled", "cudnn.enable"),
    ),
    _flag(
        _cudnn,
        "cudnn.benchmark",
        Attribute("torch.backends.cudnn", "benchmark"),
        summary="cuDNN times its algorithms at every new shape and takes the fastest, so that "
        "timing noise decides which one computes.",
        cost="on: faster with constant shapes; with changing ones it tunes again at every shape "
        "(measured 23.75 s against 0.74 s for 50 forward passes)",
        source=RANDOMNESS,
        since="0.3",
    ),
    _flag(
        _cudnn,
        "cudnn.benchmark_limit",
        Attribute("torch.backends.cudnn", "benchmark_limit"),
        legal=Integer(0),
        summary="How many algorithms cuDNN's benchmark tries; 0 tries all.",
        cost="more candidates take longer at the first call of a shape",
        source=f"{BACKENDS}-cudnn",
        since="1.13",
    ),
    _flag(
        _cudnn,
        "cudnn.deterministic",
        Attribute("torch.backends.cudnn", "deterministic"),
        summary="cuDNN takes only deterministic algorithms.",
        cost="some convolutions are several times slower "
        "(https://github.com/pytorch/pytorch/issues/28777)",
        source=RANDOMNESS,
        since="0.4",
    ),
    _cudnn_precision("conv"),
    _cudnn_precision("rnn"),
)

CPU = (
    _flag(
        _cpu,
        "cpu.mkldnn_enabled",
        Attribute("torch.backends.mkldnn", "enabled"),
        summary="oneDNN is used at all.",
        cost="off: convolutions on the CPU are much slower; the last resort of a hunt",
        source=f"{BACKENDS}-mkldnn",
        since="2.6",
    ),
    _flag(
        _cpu,
        "cpu.mkldnn_deterministic",
        Attribute("torch.backends.mkldnn", "deterministic"),
        summary="oneDNN takes only deterministic primitives; no switch of torch does it for you.",
        cost="some primitives are slower",
        source=f"{BACKENDS}-mkldnn",
        since="2.6",
    ),
    _cpu_precision("matmul"),
    _cpu_precision("conv"),
    _cpu_precision("rnn"),
    _cpu(
        name="backends.cpu.num_threads",
        legal=Integer(1, 4096),
        access=Calls("torch", "get_num_threads", "set_num_threads"),
        summary="Threads inside one CPU op. Another number adds up in another order.",
        cost="fewer threads, less speed",
        source=f"{GENERATED}.set_num_threads.html",
        since="1.0",
        aliases=("torch.set_num_threads",),
    ),
)

_npu = partial(Knob, library="torch", source=TORCH_NPU, hardware="Ascend")


def _option(field: str, access: NpuOption, summary: str, cost: str, *aliases: str) -> Knob:
    texts = tuple(access.texts)
    return _npu(
        name=f"backends.npu.{field}",
        legal=Switch() if isinstance(texts[0], bool) else OneOf(texts),
        access=access,
        summary=summary,
        cost=cost,
        since="torch_npu 2.1; looked for, not assumed",
        aliases=aliases,
    )


_ENABLE = {True: "enable", False: "disable"}

NPU = (
    _npu(
        name="backends.npu.deterministic_level",
        legal=Integer(0, 3),
        access=DeterministicLevel(),
        reread=True,
        summary="How far kernels are fixed: 1 deterministic, 2 also the order of torch.mm's "
        "sums, 3 also over batch sizes. It moves torch's own flag along.",
        cost="each level is slower; 3 needs CANN 9.2",
        since="torch_npu 2.6",
        aliases=("torch.npu.set_deterministic_level",),
    ),
    _option(
        "jit_compile",
        JitCompile("jitCompile", _ENABLE),
        "Ops are compiled when first called. With it on and the task queue on, torch_npu "
        "never forwards determinism.",
        "on: slow first steps",
        "torch.npu.set_compile_mode",
    ),
    _option(
        "conv_allow_hf32",
        NpuOption("ALLOW_CONV_HF32", _ENABLE, unset=True),
        "float32 convolutions may drop mantissa bits (HF32); torch_npu's default is on.",
        "off: slower convolutions",
        "torch.npu.conv.allow_hf32",
        "torch.npu.aclnn.allow_hf32",
    ),
    _option(
        "matmul_allow_hf32",
        MatmulHf32("ALLOW_MATMUL_HF32", _ENABLE, unset=False),
        "float32 matrix products may drop mantissa bits (HF32).",
        "off: slower products",
        "torch.npu.matmul.allow_hf32",
    ),
    _option(
        "cube_math_type",
        NpuOption("CUBE_MATH_TYPE", {name: str(n) for n, name in enumerate(CUBE_MATH_LOWERS)}),
        "How the matrix unit computes; once set it wins over matmul_allow_hf32.",
        "KEEP_DTYPE: slowest and most exact",
        "torch.npu.matmul.cube_math_type",
    ),
    _option(
        "allow_internal_format",
        NpuOption("ALLOW_INTERNAL_FORMAT", _ENABLE),
        "Tensors may be kept in private layouts, which changes the order of sums.",
        "off: some ops convert layouts more often",
        "torch.npu.config.allow_internal_format",
    ),
    _npu(
        name="backends.npu.task_queue",
        legal=Integer(0, 2),
        access=Calls("torch:npu", "get_task_queue_enable", "set_task_queue_enable"),
        summary="Ops are handed to the device through a queue on another thread (1, 2) or "
        "directly (0).",
        cost="0: slower launches",
        since="torch_npu 2.13",
        aliases=("env.TASK_QUEUE_ENABLE", "torch.npu.set_task_queue_enable"),
    ),
    _npu(
        name="backends.npu.compatible_impl",
        legal=Switch(),
        access=Calls("torch:npu", "are_compatible_impl_enabled", "use_compatible_impl"),
        summary="gelu, matmul and max_pool follow the numerics of torch's own kernels.",
        cost="on: slower kernels for those ops",
        since="torch_npu 2.6",
        aliases=("env.TORCH_NPU_USE_COMPATIBLE_IMPL", "torch.npu.use_compatible_impl"),
    ),
)
