"""What this machine is: the facts that a table of results is read with, and its devices."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrepro.manifest.environment import hardware, software
from torchrepro.process_state import HARDWARE, absent_hardware
from torchrepro.selftest.trials import CPU, DEVICES

if TYPE_CHECKING:
    from collections.abc import Mapping


def machine_facts() -> dict[str, Any]:
    """Return versions, hardware and devices as plain JSON values; imports torch.

    Holds no name of the machine or of a person. ``absent`` says of every other device why it is
    not here.
    """
    torch = import_module("torch")
    absent = {device: why for device in DEVICES if (why := _why_absent(torch, device))}
    here = [device for device in DEVICES if device not in absent]
    devices = {device: _names(torch, device) for device in here if device != CPU}
    return {
        "versions": _known(software()),
        "hardware": _known(hardware()),
        "devices": here,
        "names": devices,
        "absent": absent,
    }


def _known(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}


def _why_absent(torch: Any, device: str) -> str:
    """Return why torch has no such device here, or an empty string."""
    if device == CPU:
        return ""
    absent = {HARDWARE[name]: why for name, why in absent_hardware().items()}
    if device in absent:
        return absent[device]
    module = getattr(torch, device, None)
    here = module is not None and module.is_available()
    return "" if here else "its driver is here, and torch finds no device"


def _names(torch: Any, device: str) -> list[str]:
    module = getattr(torch, device)
    name = getattr(module, "get_device_name", None)
    return [name(index) if name else device for index in range(module.device_count())]
