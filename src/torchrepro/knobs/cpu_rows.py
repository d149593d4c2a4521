"""Rows for computing on the CPU: oneDNN (called mkldnn in torch) and threads."""

from __future__ import annotations

from torchrepro.knobs.fp32_precision import Fp32Precision
from torchrepro.knobs.knob import Attribute, Calls, Knob
from torchrepro.knobs.legal import OneOf, Switch, Whole

BACKENDS = "https://docs.pytorch.org/docs/stable/backends.html#torch-backends-mkldnn"
_OWNER = "torch.backends.mkldnn"


def _precision(operation: str) -> Knob:
    return Knob(
        name=f"backends.cpu.mkldnn_{operation}_fp32_precision",
        target="cpu",
        legal=OneOf(("ieee", "tf32", "bf16")),
        access=Fp32Precision(f"mkldnn.{operation}"),
        library="torch",
        summary=f"float32 {operation} in oneDNN: in full, or through tf32 or bf16 products.",
        cost="ieee gives up the speed of the CPU's bf16 units, where it has them",
        source="https://docs.pytorch.org/docs/stable/notes/mkldnn.html",
        since="2.9",
        aliases=(f"{_OWNER}.{operation}.fp32_precision",),
    )


CPU = (
    Knob(
        name="backends.cpu.mkldnn_enabled",
        target="cpu",
        legal=Switch(),
        access=Attribute(_OWNER, "enabled"),
        library="torch",
        summary="oneDNN is used at all.",
        cost="off: convolutions on the CPU are much slower; the last resort of a hunt",
        source=BACKENDS,
        since="2.6",
        aliases=(f"{_OWNER}.enabled",),
    ),
    Knob(
        name="backends.cpu.mkldnn_deterministic",
        target="cpu",
        legal=Switch(),
        access=Attribute(_OWNER, "deterministic"),
        library="torch",
        summary="oneDNN takes only deterministic primitives; no switch of torch does it for you.",
        cost="some primitives are slower",
        source=BACKENDS,
        since="2.6",
        aliases=(f"{_OWNER}.deterministic",),
    ),
    _precision("matmul"),
    _precision("conv"),
    _precision("rnn"),
    Knob(
        name="backends.cpu.num_threads",
        target="cpu",
        legal=Whole(1, 4096),
        access=Calls("torch", "get_num_threads", "set_num_threads"),
        library="torch",
        summary="Threads inside one CPU op. Another number adds up in another order.",
        cost="fewer threads, less speed",
        source="https://docs.pytorch.org/docs/stable/generated/torch.set_num_threads.html",
        since="1.0",
        aliases=("torch.set_num_threads",),
    ),
)
