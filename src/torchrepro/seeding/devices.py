"""The generators of the accelerators that torch is built for, behind ``torch.<device>``."""

from __future__ import annotations

import sys
from typing import Any

DEVICES = ("cuda", "npu", "xpu", "mps")


def built_for() -> set[str]:
    """Return the accelerators that the loaded torch is built for, without touching a device."""
    torch: Any = sys.modules["torch"]
    answers = {
        "cuda": torch.version.cuda is not None or torch.version.hip is not None,
        "mps": torch.backends.mps.is_built(),
        "xpu": bool(getattr(torch.version, "xpu", None)),
        "npu": hasattr(torch, "npu"),  # torch_npu, or another back end of that name, put it there
    }
    return {device for device, built in answers.items() if built}


def initialised(module: Any) -> bool:
    """Whether the devices behind ``torch.<device>`` have been used in this process."""
    check = getattr(module, "is_initialized", None)
    return bool(check() if check else module.is_available())


def in_use() -> dict[str, Any]:
    """Return the module of every accelerator in use in this process, by its name."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    built = built_for()
    modules = {name: getattr(torch, name, None) for name in DEVICES if name in built}
    return {name: module for name, module in modules.items() if module and initialised(module)}


def states(module: Any) -> list[Any]:
    """Return a copy of the state of every device's generator, as byte tensors on the CPU."""
    if hasattr(module, "get_rng_state_all"):
        return [state.clone() for state in module.get_rng_state_all()]
    return [module.get_rng_state().clone()]


def set_states(module: Any, saved: list[Any]) -> None:
    """Put back what `states` returned."""
    if hasattr(module, "set_rng_state_all"):
        module.set_rng_state_all(saved)
    else:
        module.set_rng_state(saved[0])


def seed_all(module: Any, seed: int) -> None:
    """Seed the generator of every device; one that is not in use yet is seeded at its first use."""
    getattr(module, "manual_seed_all", module.manual_seed)(seed)
