"""The hardware that numbers depend on: one row each, and how it is read."""

from __future__ import annotations

import os
import platform
import re
import sys
from functools import cache
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrepro.manifest.rows import NotKnownYetError, loaded, read_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_CPUINFO = Path("/proc/cpuinfo")
_NVIDIA = "/proc/driver/nvidia/gpus/*/information"
_OTHER_GPUS = "/dev/[dk][xf][gd]"  # dxg is Windows' GPU in WSL, kfd is AMD's driver
_ASCEND = "/dev/davinci[0-9]*"
_ENOUGH = 8192  # characters of cpuinfo that hold the first CPU whole
_OF_ARM = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision")
_FEATURE = re.compile(r"avx\w*|amx\w*|fma\w*|sve\w*|asimd\w*|bf16|i8mm|f16c")


def hardware() -> dict[str, Any]:
    """Return everything in `ROWS` by its name, null where it is not here.

    Initialises no device: GPUs are those that the driver shows, and what only torch can tell is
    left out until the program has loaded it. Reading goes as `read_rows` says.
    """
    return read_rows(ROWS)


@cache
def _first_cpu() -> Mapping[str, str]:
    """Return what Linux says of its first CPU: https://man7.org/linux/man-pages/man5/proc.5.html."""
    try:
        with _CPUINFO.open(encoding="utf-8", errors="replace") as file:
            text = file.read(_ENOUGH)
    except OSError:
        return {}
    lines = text.partition("\n\n")[0].splitlines()
    return {name.strip(): its.strip() for name, _, its in (line.partition(":") for line in lines)}


def cpu_model() -> str | None:
    """Return what the CPU calls itself, or None where the system does not tell."""
    its = _first_cpu()
    numbers = " ".join(its[name] for name in _OF_ARM if name in its)
    return its.get("model name") or numbers or platform.processor() or None


def _family() -> str | None:
    its = _first_cpu()
    numbers = [its.get(name, "") for name in ("vendor_id", "cpu family", "model", "stepping")]
    return " ".join(numbers).strip() or None


def _features() -> str | None:
    its = _first_cpu()
    flags = its.get("flags") or its.get("Features") or ""
    return " ".join(sorted(filter(_FEATURE.fullmatch, flags.split()))) or None


def _instruction_set() -> Any:
    return loaded("torch").backends.cpu.get_cpu_capability()


def _gpus() -> list[str]:
    """Return the models of the GPUs: as the NVIDIA driver shows them, or torch that uses them."""
    files = [Path(file) for file in sorted(glob(_NVIDIA))]  # noqa: PTH207 - of a pattern
    named = [re.search(r"Model:\s*(.+)", file.read_text(encoding="utf-8")) for file in files]
    return [match[1].strip() for match in named if match] or _in_use("cuda", _OTHER_GPUS)


def _npus() -> list[str]:
    return _in_use("npu", _ASCEND)


def _in_use(kind: str, signs: str) -> list[str]:
    """Return the models of the devices that torch uses.

    Raises `NotKnownYetError` if it uses none although there are `signs` of some.
    """
    module = getattr(sys.modules.get("torch"), kind, None)
    if module is not None and module.is_initialized():
        return [module.get_device_name(index) for index in range(module.device_count())]
    if glob(signs):  # noqa: PTH207 - of a pattern
        raise NotKnownYetError(kind)
    return []


def _together(names: list[str]) -> str | None:
    return ", ".join(sorted(set(names))) or None


ROWS: Mapping[str, Callable[[], Any]] = {
    "system": platform.system,
    "machine": platform.machine,
    "cpu": cpu_model,
    "cpu family": _family,
    "cpu features": _features,
    "instruction set": _instruction_set,
    "cpus": os.cpu_count,
    "threads": lambda: loaded("torch").get_num_threads(),
    "interop threads": lambda: loaded("torch").get_num_interop_threads(),
    "gpu": lambda: _together(_gpus()),
    "gpus": lambda: len(_gpus()),
    "npu": lambda: _together(_npus()),
    "npus": lambda: len(glob(_ASCEND)) or len(_npus()),  # noqa: PTH207 - of a pattern
}
"""Name -> how it is read; a further piece of hardware is a further row."""
