"""What torch_npu can be asked about itself without using a device."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from torchrepro.knobs.knob import Missing


def npu() -> Any:
    """Return ``torch.npu``; raises `Missing` where torch_npu is not loaded."""
    module = getattr(import_module("torch"), "npu", None)
    if module is None:
        raise Missing("no torch_npu in this process")
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
    """Return the text of an option, empty while nobody set it; raises `Missing` if unknown."""
    if not hasattr(npu(), "set_option"):
        raise Missing("this torch.npu has no set_option")
    getter = native("_npu_getOption")
    raw = getter(name) if getter else None
    if raw is None:
        raise Missing(f"this torch_npu has no option {name}")
    return str(raw.decode())


def cann_runtime() -> tuple[int, int] | None:
    """Return major and minor version of CANN's runtime, or None where torch_npu does not tell."""
    ask = getattr(getattr(npu(), "utils", None), "get_cann_version", None)
    parts = str(ask("RUNTIME")).split(".") if ask else []
    if len(parts) > 1 and parts[0].isdigit() and parts[1].isdigit():
        return int(parts[0]), int(parts[1])
    return None
