"""What a trace says of the process it was taken in."""

from __future__ import annotations

import os
import platform
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrepro.applier import in_force
from torchrepro.errors import shown
from torchrepro.hidden import knob_value
from torchrepro.manifest.hardware import cpu_model
from torchrepro.manifest.versions import versions

if TYPE_CHECKING:
    from collections.abc import Mapping


def about_this_process() -> Mapping[str, Any]:
    """Return the profile in force with its knobs, the versions, and the hardware."""
    its: dict[str, Any] = {"versions": versions(), "hardware": _hardware(), "knobs": {}}
    profiles = in_force()
    if profiles:
        resolved = profiles[-1].resolved
        its["profile"] = resolved.name
        its["digest"] = resolved.digest
        its["guarantee"] = resolved.guarantee
        rows = [row for applied in profiles for row in applied.report]
        its["knobs"] = {row.knob: shown(knob_value(row.knob, row.after)) for row in rows}
        its["outcomes"] = {row.knob: str(row.outcome) for row in rows}
    return its


def _hardware() -> Mapping[str, str]:
    torch: Any = import_module("torch")
    found = {
        "machine": platform.machine(),
        "cpu model": cpu_model() or "unknown",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cpus": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
    }
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        found["accelerator"] = f"{device.type} x{torch.accelerator.device_count()}"
    if torch.cuda.is_initialized():
        found["gpu"] = torch.cuda.get_device_name()
    return found
