"""Rows for CUDA's matrix products, attention kernels and libraries, and for cuDNN."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from torchrepro.knobs.knob import Attribute, Calls, Knob, OptionalAttribute
from torchrepro.knobs.legal_values import OneOf, Switch, Whole
from torchrepro.knobs.linked_state import Fp32Precision

BACKENDS = "https://docs.pytorch.org/docs/stable/backends.html#torch-backends-cuda"
NUMERICS = "https://docs.pytorch.org/docs/stable/notes/cuda.html"

_knob = partial(Knob, target="cuda", library="torch", cuda_only=True)


@dataclass(frozen=True, slots=True)
class ReducedPrecision(Attribute):
    """A reduction switch that newer torch keeps together with a second one for split-k."""

    def save(self) -> Any:
        matmul = import_module("torch").backends.cuda.matmul
        split_k = getattr(matmul, f"{self.name}_split_k", None)
        value = self.read()
        return value if split_k is None else (value, split_k)


def _library(which: str, choices: tuple[str, ...], since: str) -> Knob:
    return _knob(
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
        source=BACKENDS,
        since=since,
        aliases=(f"torch.backends.cuda.preferred_{which}_library",),
    )


def _attention(kernel: str, since: str, cost: str) -> Knob:
    return _knob(
        name=f"backends.cuda.{kernel}_sdp",
        legal=Switch(),
        access=Calls("torch.backends.cuda", f"{kernel}_sdp_enabled", f"enable_{kernel}_sdp"),
        summary=f"scaled_dot_product_attention may take its {kernel} kernel.",
        cost=cost,
        source=BACKENDS,
        since=since,
        aliases=(f"torch.backends.cuda.enable_{kernel}_sdp",),
    )


def _reduction(dtype: str, since: str) -> Knob:
    name = f"allow_{dtype}_reduced_precision_reduction"
    return _knob(
        name=f"backends.cuda.{name}",
        legal=Switch(),
        access=ReducedPrecision("torch.backends.cuda:matmul", name),
        summary=f"{dtype} matrix products may add up partial sums in {dtype}.",
        cost="off: slower products with a long inner dimension on some GPUs",
        source=f"{NUMERICS}#reduced-precision-reduction-in-{dtype}-gemms",
        since=since,
        aliases=(f"torch.backends.cuda.matmul.{name}",),
    )


CUDA = (
    _knob(
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
    _knob(
        name="backends.cuda.allow_fp16_accumulation",
        legal=Switch(),
        access=Attribute("torch.backends.cuda:matmul", "allow_fp16_accumulation"),
        summary="fp16 matrix products may accumulate in fp16.",
        cost="on: faster on some GPUs, with larger errors",
        source=f"{NUMERICS}#full-fp16-accmumulation-in-fp16-gemms",
        since="2.7",
        aliases=("torch.backends.cuda.matmul.allow_fp16_accumulation",),
    ),
    _attention("flash", "2.0", "its backward is not deterministic unless algorithms are `error`"),
    _attention("mem_efficient", "2.0", "its backward is deterministic only under `error`"),
    _attention("math", "2.0", "the reference: slow, and the whole attention matrix in memory"),
    _attention("cudnn", "2.5", "fast on recent GPUs; cuDNN chooses the kernel"),
    _library("linalg", ("default", "cusolver", "magma"), "1.11"),
    _library("blas", ("default", "cublas", "cublaslt", "ck"), "2.4"),
)


CUDNN_BACKENDS = "https://docs.pytorch.org/docs/stable/backends.html#torch-backends-cudnn"
RANDOMNESS = "https://docs.pytorch.org/docs/stable/notes/randomness.html"
_OWNER = "torch.backends.cudnn"

_cudnn_knob = partial(Knob, target="cudnn", library="torch", cuda_only=True)


def _precision(operation: str) -> Knob:
    return _cudnn_knob(
        name=f"backends.cudnn.{operation}_fp32_precision",
        legal=OneOf(("ieee", "tf32")),
        access=Fp32Precision(f"cudnn.{operation}"),
        summary=f"float32 {operation} in cuDNN: all 23 mantissa bits (ieee) or 10 (tf32, "
        "torch's default).",
        cost="ieee is up to several times slower than tf32 on tensor cores",
        source="https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32-on-ampere",
        since="2.9; before that one switch for both, allow_tf32",
        aliases=(f"{_OWNER}.{operation}.fp32_precision", f"{_OWNER}.allow_tf32", "allow_tf32"),
    )


CUDNN = (
    _cudnn_knob(
        name="backends.cudnn.enabled",
        legal=Switch(),
        access=Attribute(_OWNER, "enabled"),
        summary="cuDNN is used at all. (The often copied `cudnn.enable` does nothing.)",
        cost="off: convolutions and RNNs are much slower; the last resort of a hunt",
        source=CUDNN_BACKENDS,
        since="0.3",
        aliases=(f"{_OWNER}.enabled", "cudnn.enable"),
    ),
    _cudnn_knob(
        name="backends.cudnn.benchmark",
        legal=Switch(),
        access=Attribute(_OWNER, "benchmark"),
        summary="cuDNN times its algorithms at every new shape and takes the fastest, so that "
        "timing noise decides which one computes.",
        cost="on: faster with constant shapes; with changing ones it tunes again at every shape "
        "(measured 23.75 s against 0.74 s for 50 forward passes)",
        source=RANDOMNESS,
        since="0.3",
        aliases=(f"{_OWNER}.benchmark",),
    ),
    _cudnn_knob(
        name="backends.cudnn.benchmark_limit",
        legal=Whole(0),
        access=OptionalAttribute(_OWNER, "benchmark_limit"),
        summary="How many algorithms cuDNN's benchmark tries; 0 tries all.",
        cost="more candidates take longer at the first call of a shape",
        source=CUDNN_BACKENDS,
        since="1.13",
        aliases=(f"{_OWNER}.benchmark_limit",),
    ),
    _cudnn_knob(
        name="backends.cudnn.deterministic",
        legal=Switch(),
        access=Attribute(_OWNER, "deterministic"),
        summary="cuDNN takes only deterministic algorithms.",
        cost="some convolutions are several times slower "
        "(https://github.com/pytorch/pytorch/issues/28777)",
        source=RANDOMNESS,
        since="0.4",
        aliases=(f"{_OWNER}.deterministic",),
    ),
    _precision("conv"),
    _precision("rnn"),
)
