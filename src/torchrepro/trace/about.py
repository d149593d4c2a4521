"""What a trace says of the process it was taken in."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrepro.applier import in_force
from torchrepro.errors import shown
from torchrepro.hidden import without_secrets
from torchrepro.manifest.contents import secrets_here
from torchrepro.manifest.hardware import hardware
from torchrepro.manifest.versions import software

if TYPE_CHECKING:
    from collections.abc import Mapping


def about_this_process() -> Mapping[str, Any]:
    """Return the profile in force with its knobs, and what a manifest says of the machine.

    Nothing in it is a secret of this process.
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
    secrets = secrets_here(*(applied.resolved for applied in profiles))
    cleaned: Mapping[str, Any] = without_secrets(its, secrets)
    return cleaned


def _accelerator() -> dict[str, str]:
    """Return the type and the number of the devices that torch can compute on besides the CPU."""
    torch: Any = import_module("torch")
    if not torch.accelerator.is_available():
        return {}
    device = torch.accelerator.current_accelerator()
    return {"accelerator": f"{device.type} x{torch.accelerator.device_count()}"}
