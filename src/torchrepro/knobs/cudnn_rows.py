"""Rows for cuDNN: which convolution and RNN algorithms it takes, and how it chooses them."""

from __future__ import annotations

from functools import partial

from torchrepro.knobs.fp32_precision import Fp32Precision
from torchrepro.knobs.knob import Attribute, Knob, OptionalAttribute
from torchrepro.knobs.legal import OneOf, Switch, Whole

BACKENDS = "https://docs.pytorch.org/docs/stable/backends.html#torch-backends-cudnn"
RANDOMNESS = "https://docs.pytorch.org/docs/stable/notes/randomness.html"
_OWNER = "torch.backends.cudnn"

_knob = partial(Knob, target="cudnn", library="torch", cuda_only=True)


def _precision(operation: str) -> Knob:
    return _knob(
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
    _knob(
        name="backends.cudnn.enabled",
        legal=Switch(),
        access=Attribute(_OWNER, "enabled"),
        summary="cuDNN is used at all. (The often copied `cudnn.enable` does nothing.)",
        cost="off: convolutions and RNNs are much slower; the last resort of a hunt",
        source=BACKENDS,
        since="0.3",
        aliases=(f"{_OWNER}.enabled", "cudnn.enable"),
    ),
    _knob(
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
    _knob(
        name="backends.cudnn.benchmark_limit",
        legal=Whole(0),
        access=OptionalAttribute(_OWNER, "benchmark_limit"),
        summary="How many algorithms cuDNN's benchmark tries; 0 tries all.",
        cost="more candidates take longer at the first call of a shape",
        source=BACKENDS,
        since="1.13",
        aliases=(f"{_OWNER}.benchmark_limit",),
    ),
    _knob(
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
