"""The knobs of torch_npu, which controls Huawei's Ascend NPUs, and how their state is accessed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from torchrepro.knobs.knob import Calls, Integer, Knob, MissingState, OneOf, Switch
from torchrepro.knobs.torch_state import (
    DETERMINISTIC_ALGORITHMS,
    determinism_blocked,
    native,
    npu,
    option_text,
    text_if_known,
)

CUBE_MATH_LOWERS = {  # mode -> whether the matrix unit may drop mantissa bits of float32
    "KEEP_DTYPE": False,
    "ALLOW_FP32_DOWN_PRECISION": True,
    "USE_FP16": True,
    "USE_HF32": True,
    "USE_FP32_ADD": False,
}


@dataclass(frozen=True, slots=True)
class NpuOption:
    """A setting that torch_npu stores as the text of an option. The text is empty until it is set.

    Before device init torch_npu queues all writes. Reading an option does not initialise a device.
    """

    name: str
    texts: Mapping[Any, str]  # value in a profile -> the option's text
    unset: Any = None  # the value of an empty option; None if that depends on the chip

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
    """The option behind `set_compile_mode`. It cannot be cleared after device init.

    After device init torch_npu reads an empty text as `enable`, although the default of the chip is
    in effect. `save` therefore asks `is_jit_compile_false` for the value in effect, and `restore`
    sets this value explicitly. A profile that found the option empty, and is undone after device
    init, leaves its own value.
    """

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
    """The older switch for matrix products. A value of `cube_math_type` overrides the switch."""

    def inert(self, value: Any, wanted: Mapping[str, Any]) -> str:
        names = {str(number): name for number, name in enumerate(CUBE_MATH_LOWERS)}
        text = text_if_known("CUBE_MATH_TYPE")
        cube = wanted.get("backends.npu.cube_math_type") or names.get(text, text)
        if not cube or CUBE_MATH_LOWERS.get(cube, value) == value:
            return ""
        return f"cube_math_type is {cube} and overrides it: set backends.npu.cube_math_type too"


class DeterministicLevel:
    """The determinism level of torch_npu. The setter of the level also changes torch's flag."""

    def read(self) -> Any:
        getter = native("_npu_get_deterministic_level")
        if getter is None or not hasattr(npu(), "set_deterministic_level"):
            raise MissingState("this torch_npu has no set_deterministic_level")
        return int(getter())

    def write(self, value: int) -> None:
        torch = import_module("torch")
        if torch.are_deterministic_algorithms_enabled() != (value > 0):
            # If torch_npu had to change the flag, it would import inductor.
            torch.set_deterministic_debug_mode("error" if value > 0 else "default")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch_npu always warns against using torch's flag too
            npu().set_deterministic_level(value)

    def save(self) -> Any:
        return self.read(), DETERMINISTIC_ALGORITHMS.save()

    def restore(self, saved: Any) -> None:
        level, algorithms = saved
        self.write(level)
        DETERMINISTIC_ALGORITHMS.restore(algorithms)

    def inert(self, value: Any, wanted: Mapping[str, Any]) -> str:
        return determinism_blocked(wanted) if value else ""


_npu = partial(
    Knob, library="torch", hardware="Ascend", source="https://pypi.org/project/torch-npu/"
)


def _option(field: str, access: NpuOption, summary: str, cost: str, *aliases: str) -> Knob:
    texts = tuple(access.texts)
    return _npu(
        name=f"backends.npu.{field}",
        legal=Switch() if isinstance(texts[0], bool) else OneOf(texts),
        access=access,
        summary=summary,
        cost=cost,
        since="torch_npu 2.1; torchrepro checks whether it exists",
        aliases=aliases,
        decides_results=field.endswith("hf32"),
    )


_ENABLE = {True: "enable", False: "disable"}

ROWS = (
    _npu(
        name="backends.npu.deterministic_level",
        legal=Integer(0, 3),
        access=DeterministicLevel(),
        reread=True,
        summary="How strictly kernels are deterministic: 1 deterministic, 2 also a fixed order of "
        "sums in torch.mm, 3 also across batch sizes. Setting it also changes the flag of torch.",
        cost="each level is slower; 3 needs CANN 9.2",
        since="torch_npu 2.6",
        aliases=("torch.npu.set_deterministic_level",),
    ),
    _option(
        "jit_compile",
        JitCompile("jitCompile", _ENABLE),
        "Ops are compiled at their first call. If this and the task queue are both on, torch_npu "
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
        "How the matrix unit computes; once set, it overrides matmul_allow_hf32.",
        "KEEP_DTYPE: slowest and most exact",
        "torch.npu.matmul.cube_math_type",
    ),
    _option(
        "allow_internal_format",
        NpuOption("ALLOW_INTERNAL_FORMAT", _ENABLE),
        "Tensors may be stored in private layouts, which changes the order of sums.",
        "off: some ops convert layouts more often",
        "torch.npu.config.allow_internal_format",
    ),
    _npu(
        name="backends.npu.task_queue",
        legal=Integer(0, 2),
        access=Calls("torch:npu", "get_task_queue_enable", "set_task_queue_enable"),
        summary="Ops are sent to the device through a queue on another thread (1, 2) or "
        "directly (0).",
        cost="0: slower launches",
        since="torch_npu 2.13",
        aliases=("env.TASK_QUEUE_ENABLE", "torch.npu.set_task_queue_enable"),
    ),
    _npu(
        name="backends.npu.compatible_impl",
        legal=Switch(),
        access=Calls("torch:npu", "are_compatible_impl_enabled", "use_compatible_impl"),
        summary="gelu, matmul and max_pool compute with the numerics of the kernels of torch.",
        cost="on: slower kernels for those ops",
        since="torch_npu 2.6",
        aliases=("env.TORCH_NPU_USE_COMPATIBLE_IMPL", "torch.npu.use_compatible_impl"),
    ),
)
