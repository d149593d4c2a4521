"""Which devices a profile may name in this process."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torchrepro.messages import near, some


def devices_here() -> tuple[str, ...]:
    """Return the devices of this process that can compute: ``cpu``, ``cuda:0``, ``cuda:1``.

    Initialises none (https://docs.pytorch.org/docs/stable/accelerator.html).
    """
    accelerator = import_module("torch").accelerator
    if not accelerator.is_available():
        return ("cpu",)
    kind = accelerator.current_accelerator().type
    return ("cpu", *(f"{kind}:{index}" for index in range(accelerator.device_count())))


def absence(word: str) -> str:
    """Return why nothing can run on the device `word` here, or an empty string."""
    here = devices_here()
    kinds = {device.partition(":")[0]: device for device in here}
    if word in (*here, *kinds, "cpu:0"):
        return ""
    close = near(word, [*here, *kinds])
    hint = f"; did you mean {close}?" if close else ""
    return f"no device `{word}` here{hint} (here: {some(here)})"


def device_named(word: str) -> Any:
    """Return the `torch.device` that `word` means now: ``cuda`` is the current one of its kind."""
    torch = import_module("torch")
    if word.startswith("cpu"):
        return torch.device("cpu")  # tensors of the host carry no index
    return torch.empty(0, device=word).device
