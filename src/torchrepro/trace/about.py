"""What a trace says of the process it was taken in, and what it leaves out."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrepro.applier import in_force
from torchrepro.hidden import cleaner
from torchrepro.manifest.contents import secrets_here
from torchrepro.manifest.hardware import hardware
from torchrepro.manifest.versions import software
from torchrepro.messages import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Redaction:
    """Takes the secrets of this process out of a text, those that it learnt meanwhile too."""

    def __init__(self) -> None:
        self._environment: Mapping[str, str] | None = None
        self._clean: Callable[[Any], Any]

    def __call__(self, value: Any) -> Any:
        """Return plain JSON values with no secret in any text."""
        environment = os.environ.copy()
        if environment != self._environment:
            profiles = (applied.resolved for applied in in_force())
            self._environment, self._clean = environment, cleaner(secrets_here(*profiles))
        return self._clean(value)


def about_this_process() -> Mapping[str, Any]:
    """Return the profile in force with its knobs, and what a manifest says of the machine.

    Secrets may be in it: whoever writes it takes them out (`Redaction`).
    """
    its: dict[str, Any] = {
        "versions": software(),
        "hardware": hardware() | _accelerator(),
        "knobs": {},
    }
    profiles = in_force()
    if profiles:
        resolved = profiles[-1].resolved
        its["profile"] = resolved.name
        its["digest"] = resolved.digest
        its["guarantee"] = resolved.guarantee
        rows = [row for applied in profiles for row in applied.report]
        its["knobs"] = {row.knob: shown(row.after) for row in rows}
        its["outcomes"] = {row.knob: str(row.outcome) for row in rows}
    return its


def _accelerator() -> dict[str, str]:
    """Return the type and the number of the devices that torch can compute on besides the CPU."""
    torch: Any = import_module("torch")
    if not torch.accelerator.is_available():
        return {}
    device = torch.accelerator.current_accelerator()
    return {"accelerator": f"{device.type} x{torch.accelerator.device_count()}"}
