"""Rows for torch as a whole and for computing on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrepro.knobs.knob import Attribute, Calls, Knob, Missing, Phase, Scope
from torchrepro.knobs.legal_values import OneOf, Switch, Whole
from torchrepro.knobs.linked_state import Fp32Precision, InductorSwitch
from torchrepro.knobs.npu_state import determinism_unheard, native

if TYPE_CHECKING:
    from collections.abc import Mapping


ALGORITHMS = (
    "https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html"
)
_MODES = ("none", "warn", "error")


@dataclass(frozen=True, slots=True)
class DeterministicAlgorithms(Calls):
    """torch's flag, which an NPU hears of only where torch_npu forwards it."""

    def save(self) -> Any:
        warns_only = import_module("torch").is_deterministic_algorithms_warn_only_enabled()
        return Calls.save(self), warns_only

    def restore(self, saved: Any) -> None:
        mode, warns_only = saved
        Calls.restore(self, mode)
        if not mode and warns_only:
            _warn_only_while_off()

    def inert(self, value: Any, asked: Mapping[str, Any]) -> str:
        return determinism_unheard(asked) if value != "none" else ""


def _warn_only_while_off() -> None:
    """Keep in mind for a flag that is off that it would only warn.

    Private, because the public setter imports inductor, 0.7 s, and moves its flag along. Where it
    is gone the flag stays off, and is only said to be one that would raise.
    """
    setter = getattr(import_module("torch")._C, "_set_deterministic_algorithms", None)  # noqa: SLF001
    if setter:
        setter(False, warn_only=True)  # noqa: FBT003 - torch's own signature


@dataclass(frozen=True, slots=True)
class FillUninitializedMemory(Attribute):
    """torch's switch, and the copy of it by which torch_npu goes.

    The copy is off at the start and follows only when the switch is written, so on an NPU the
    switch does nothing until then, although it reads true
    (https://github.com/Ascend/pytorch, torch_npu/utils/_deterministic.py).
    """

    def holds(self, value: bool) -> bool:  # noqa: FBT001 - the value of a boolean knob
        return bool(self.read() == value and self._copy() in (value, None))

    def save(self) -> Any:
        return self.read(), self._copy()

    def restore(self, saved: Any) -> None:
        flag, copy = saved
        Attribute.restore(self, flag)
        setter = native("_npu_set_fill_uninitialized_memory")
        if setter and copy is not None:
            setter(copy)

    def _copy(self) -> bool | None:
        getter = native("_npu_get_fill_uninitialized_memory")
        return bool(getter()) if getter else None


@dataclass(frozen=True, slots=True)
class OptEinsum(Attribute):
    """A setting of opt_einsum, which torch refuses to write where that package is absent."""

    def read(self) -> Any:
        if not import_module("torch.backends.opt_einsum").is_available():
            raise Missing("the package opt_einsum is not installed: einsum goes left to right")
        return Attribute.read(self)

    save = read


DETERMINISTIC_ALGORITHMS = DeterministicAlgorithms(
    "torch",
    "get_deterministic_debug_mode",
    "set_deterministic_debug_mode",
    to_profile=_MODES.__getitem__,
    to_library=_MODES.index,
)

TORCH = (
    Knob(
        name="backends.torch.deterministic_algorithms",
        target="torch",
        legal=OneOf(_MODES),
        access=DETERMINISTIC_ALGORITHMS,
        library="torch",
        summary="Every op takes a deterministic kernel; an op without one raises (error), warns "
        "and goes on (warn), or nothing is asked (none).",
        cost="some kernels are slower: a few per cent on most models, several times on some ops",
        source=ALGORITHMS,
        since="1.8",
        aliases=("torch.use_deterministic_algorithms", "torch.set_deterministic_debug_mode"),
    ),
    Knob(
        name="backends.torch.fill_uninitialized_memory",
        target="torch",
        legal=Switch(),
        access=FillUninitializedMemory("torch.utils.deterministic", "fill_uninitialized_memory"),
        library="torch",
        summary="Under deterministic algorithms torch.empty and its like are filled with NaN or "
        "the largest integer, so that a read of uninitialised memory shows.",
        cost="about 15 % of a step on large models "
        "(https://github.com/NVIDIA/Megatron-LM/pull/7093)",
        source="https://docs.pytorch.org/docs/stable/deterministic.html",
        since="2.2",
        aliases=("torch.utils.deterministic.fill_uninitialized_memory",),
    ),
    Knob(
        name="backends.torch.inductor_deterministic",
        target="torch",
        legal=Switch(),
        access=InductorSwitch("TORCHINDUCTOR_DETERMINISTIC", "deterministic"),
        library="torch",
        scope=Scope.PROCESS_AND_CHILDREN,
        summary="Compiled code makes no choice by timing: no autotuning, no benchmarked fusion.",
        cost="compiled code can be much slower (https://github.com/pytorch/pytorch/issues/174711)",
        source="https://github.com/pytorch/pytorch/pull/165950",
        since="2.10",
        aliases=("env.TORCHINDUCTOR_DETERMINISTIC", "torch._inductor.config.deterministic"),
    ),
    Knob(
        name="backends.torch.opt_einsum_enabled",
        target="torch",
        legal=Switch(),
        access=OptEinsum("torch.backends.opt_einsum", "enabled"),
        library="torch",
        summary="torch.einsum lets opt_einsum choose the order of contraction.",
        cost="none to speak of; another order rounds differently",
        source="https://docs.pytorch.org/docs/stable/backends.html#torch-backends-opt-einsum",
        since="1.13",
        aliases=("torch.backends.opt_einsum.enabled",),
    ),
    Knob(
        name="backends.torch.opt_einsum_strategy",
        target="torch",
        legal=OneOf(("auto", "greedy", "optimal")),
        access=OptEinsum("torch.backends.opt_einsum", "strategy"),
        library="torch",
        summary="How opt_einsum searches for the order of contraction.",
        cost="optimal takes long for many operands",
        source="https://docs.pytorch.org/docs/stable/backends.html#torch-backends-opt-einsum",
        since="1.13",
        aliases=("torch.backends.opt_einsum.strategy",),
    ),
    Knob(
        name="backends.torch.default_dtype",
        target="torch",
        legal=OneOf(("float32", "float64", "float16", "bfloat16")),
        access=Calls(
            "torch",
            "get_default_dtype",
            "set_default_dtype",
            to_profile=lambda dtype: str(dtype).removeprefix("torch."),
            to_library=lambda name: getattr(import_module("torch"), name),
        ),
        library="torch",
        phase=Phase.ANY_TIME,
        summary="The type of floating-point tensors made without naming one.",
        cost="float64 doubles memory and is slow on GPUs",
        source="https://docs.pytorch.org/docs/stable/generated/torch.set_default_dtype.html",
        since="1.0",
        aliases=("torch.set_default_dtype",),
    ),
)


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
