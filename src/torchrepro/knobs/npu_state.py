"""The state of torch_npu that can be read without a device, and settings that never reach one.

The latter functions return why a value would have no effect, or an empty string. `wanted` holds
the values of the profile, by the name of the knob.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrepro.knobs.knob import MissingState

if TYPE_CHECKING:
    from collections.abc import Mapping


def npu() -> Any:
    """Return ``torch.npu``; raises `MissingState` where torch_npu is not loaded."""
    module = getattr(import_module("torch"), "npu", None)
    if module is None:
        raise MissingState("no torch_npu in this process")
    return module


def npu_with_devices() -> Any:
    """Return ``torch.npu`` if this process has an NPU, otherwise None."""
    module = getattr(sys.modules.get("torch"), "npu", None)
    return module if module is not None and module.is_available() else None


def native(name: str) -> Any:
    """Return the function `name` of torch_npu's C module, or None.

    Private, because the public readers initialise the device, write back what they read, or do
    not exist. Where one is gone, the knob that reads it is unsupported or believes torch's flag.
    """
    return getattr(getattr(sys.modules.get("torch_npu"), "_C", None), name, None)


def option_text(name: str) -> str:
    """Return the text of an option, empty while nobody set it; raises `MissingState` if unknown."""
    if not hasattr(npu(), "set_option"):
        raise MissingState("this torch.npu has no set_option")
    getter = native("_npu_getOption")
    raw = getter(name) if getter else None
    if raw is None:
        raise MissingState(f"this torch_npu has no option {name}")
    return str(raw.decode())


def cann_runtime() -> tuple[int, int] | None:
    """Return major and minor version of CANN's runtime, or None where torch_npu does not tell."""
    ask = getattr(getattr(npu(), "utils", None), "get_cann_version", None)
    parts = str(ask("RUNTIME")).split(".") if ask else []
    if len(parts) > 1 and parts[0].isdigit() and parts[1].isdigit():
        return int(parts[0]), int(parts[1])
    return None


OLDEST_DETERMINISTIC_CANN = (8, 5)
CUBE_MATH_LOWERS = {  # by number: whether the matrix unit may drop mantissa bits of float32
    "KEEP_DTYPE": False,
    "ALLOW_FP32_DOWN_PRECISION": True,
    "USE_FP16": True,
    "USE_HF32": True,
    "USE_FP32_ADD": False,
}


def determinism_blocked(wanted: Mapping[str, Any]) -> str:
    """Return why determinism would not reach this process's NPUs, or an empty string."""
    if npu_with_devices() is None:
        return ""
    return cann_too_old() or compiled_ops_blocked(wanted)


def cann_too_old() -> str:
    """Return why determinism never reaches a device with this CANN, or an empty string.

    https://github.com/Ascend/pytorch, torch_npu/csrc/framework/OpParamMaker.cpp: below 8.5 a
    torch_npu that knows level 3 sends "off" with every op.
    """
    runtime = cann_runtime()
    # Private (``_sync_deterministic_level``): it came with level 3, which has no public name. Where
    # it is gone, determinism is taken to be forwarded, as before.
    knows_level_3 = hasattr(npu(), "_sync_deterministic_level")
    if runtime is None or runtime >= OLDEST_DETERMINISTIC_CANN or not knows_level_3:
        return ""
    return (
        f"CANN runtime {runtime[0]}.{runtime[1]}: below 8.5 this torch_npu tells the NPU that "
        "determinism is off, whatever torch says; upgrade CANN"
    )


def compiled_ops_blocked(wanted: Mapping[str, Any]) -> str:
    """Return why ops that are compiled when first called would not be deterministic."""
    # Before device init the readers themselves would be what reads a variable for good.
    used: Any = npu() if hasattr(npu(), "is_initialized") and npu().is_initialized() else None
    jit_compile, queue = (
        wanted.get(f"backends.npu.{name}") for name in ("jit_compile", "task_queue")
    )
    if jit_compile is None and hasattr(used, "is_jit_compile_false"):
        jit_compile = not used.is_jit_compile_false()
    if jit_compile is None:
        jit_compile = _option("jitCompile") == "enable"
    if queue is None and hasattr(used, "get_task_queue_enable"):
        queue = used.get_task_queue_enable()
    if queue is None:
        queue = _task_queue_of_variables(wanted)
    if not jit_compile or int(queue) == 0:
        return ""
    return (
        "with jit_compile on and the task queue on, ops do not forward determinism to the NPU; "
        "set backends.npu.jit_compile to false, or backends.npu.task_queue to 0"
    )


def _option(name: str) -> str:
    try:
        return option_text(name)
    except MissingState:
        return ""


def _task_queue_of_variables(wanted: Mapping[str, Any]) -> int:
    def value(name: str, default: str) -> str:
        return str(wanted.get(f"env.{name}", os.environ.get(name, default)))

    blocking = value("ASCEND_LAUNCH_BLOCKING", "0") not in ("", "0")
    return 0 if blocking or value("TASK_QUEUE_ENABLE", "1") == "0" else 1


def matmul_decided_elsewhere(allow_hf32: Any, wanted: Mapping[str, Any]) -> str:
    """Return why `allow_hf32` has no effect on matrix products: cube_math_type wins once set."""
    names = {str(number): name for number, name in enumerate(CUBE_MATH_LOWERS)}
    text = _option("CUBE_MATH_TYPE")
    cube = wanted.get("backends.npu.cube_math_type") or names.get(text, text)
    if not cube or CUBE_MATH_LOWERS.get(cube, allow_hf32) == allow_hf32:
        return ""
    return f"cube_math_type is {cube}, which wins; set backends.npu.cube_math_type as well"
