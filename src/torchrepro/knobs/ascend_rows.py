"""Rows for Ascend NPUs: torch_npu's setters."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrepro.knobs.knob import Calls, Knob, MissingState
from torchrepro.knobs.legal_values import Integer, OneOf, Switch
from torchrepro.knobs.npu_state import (
    CUBE_MATH_LOWERS,
    determinism_blocked,
    matmul_decided_elsewhere,
    native,
    npu,
    option_text,
)
from torchrepro.knobs.torch_rows import DETERMINISTIC_ALGORITHMS

if TYPE_CHECKING:
    from collections.abc import Mapping


DOCS = "https://pypi.org/project/torch-npu/"


@dataclass(frozen=True, slots=True)
class NpuOption:
    """A setting that torch_npu keeps as the text of an option, empty while nobody set it.

    Before device init torch_npu queues options in order; reading one initialises nothing.
    """

    name: str
    texts: Mapping[Any, str]
    """Value in a profile -> the option's text."""

    unset: Any = None
    """What holds while the option is empty; None where that depends on the chip."""

    def read(self) -> Any:
        text = option_text(self.name)
        values = {known: value for value, known in self.texts.items()}
        return values.get(text, text) if text else self.unset

    def write(self, value: Any) -> None:
        self._set(self.texts[value])

    def save(self) -> Any:
        return option_text(self.name)

    def restore(self, saved: Any) -> None:
        self._set(saved)

    def _set(self, text: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch_npu announces future removals of options
            npu().set_option({self.name: text})


class JitCompile(NpuOption):
    """The option behind set_compile_mode, which cannot be emptied again once a device is in use.

    torch_npu takes an empty text for `enable` then, while its own reader goes on saying the
    opposite: so what holds by the chip's default is read from that reader, and written back.
    An option that was empty before device init and is undone after it keeps the profile's value.
    """

    __slots__ = ()

    def read(self) -> Any:
        value = NpuOption.read(self)
        if value is None and npu().is_initialized():
            return not npu().is_jit_compile_false()
        return value

    def save(self) -> Any:
        value = self.read()
        return "" if value is None else self.texts[value]

    def restore(self, saved: Any) -> None:
        if saved or not npu().is_initialized():
            self._set(saved)


class MatmulHf32(NpuOption):
    """The older switch for matrix products, over which cube_math_type wins once it is set."""

    __slots__ = ()

    def inert(self, value: Any, wanted: Mapping[str, Any]) -> str:
        return matmul_decided_elsewhere(value, wanted)


class DeterministicLevel:
    """torch_npu's level, next to torch's flag, which the public setter moves along with it."""

    __slots__ = ()

    def read(self) -> Any:
        getter = native("_npu_get_deterministic_level")
        if getter is None or not hasattr(npu(), "set_deterministic_level"):
            raise MissingState("this torch_npu has no set_deterministic_level")
        return int(getter())

    def write(self, value: int) -> None:
        torch = import_module("torch")
        if torch.are_deterministic_algorithms_enabled() != (value > 0):
            # Moved here, where it costs nothing: torch_npu's own way imports inductor for it.
            torch.set_deterministic_debug_mode("error" if value > 0 else "default")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it always warns against mixing it with torch's flag
            npu().set_deterministic_level(value)

    def save(self) -> Any:
        return self.read(), DETERMINISTIC_ALGORITHMS.save()

    def restore(self, saved: Any) -> None:
        level, algorithms = saved
        self.write(level)
        DETERMINISTIC_ALGORITHMS.restore(algorithms)

    def inert(self, value: Any, wanted: Mapping[str, Any]) -> str:
        return determinism_blocked(wanted) if value else ""


_npu = partial(Knob, target="npu", library="torch", source=DOCS, hardware="Ascend")


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
