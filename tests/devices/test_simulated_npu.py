"""What the laws beside this file take for granted of the simulated accelerator and its process.

That it computes, draws and keeps memory as an accelerator does they show themselves: under
`npu-align` both devices train to the same weights (test_alignment.py).
"""

from collections.abc import Callable

import pytest
import torch
from simulated_npu import alert_on

import torchrepro

OnNpu = Callable[..., object]


def _after_snapshot() -> tuple[list[float], ...]:
    state = torchrepro.rng_state()
    drawn = [torch.rand(2, device=f"npu:{index}").tolist() for index in range(2)]
    torchrepro.set_rng_state(state)
    again = [torch.rand(2, device=f"npu:{index}").tolist() for index in range(2)]
    torch.manual_seed(5)
    return drawn, again, [torch.npu.initial_seed(), len(state["devices"]["npu"])]


def test_a_snapshot_holds_every_device(on_npu: OnNpu) -> None:
    """torchrepro finds the devices' generators, and torch.manual_seed reaches them."""
    drawn, again, facts = on_npu(_after_snapshot)

    assert drawn == again
    assert facts == [5, 2]


def _alert_of(device: str) -> str:
    """Return how `put_`, for which the CPU has no deterministic kernel either, says so."""
    alert_on("aten::put_")
    profile = {"backends": {"torch": {"deterministic_algorithms": "error"}}}
    with torchrepro.apply(profile), pytest.raises(RuntimeError) as raised:
        torch.zeros(2, device=device).put_(
            torch.tensor([0], device=device), torch.ones(1, device=device)
        )
    return str(raised.value).replace("put__npu", "put_")


def test_an_alert_has_torchs_own_words(on_npu: OnNpu) -> None:
    """The sentence is that of the installed torch, but for the name of the kernel."""
    assert on_npu(_alert_of, "npu") == on_npu(_alert_of, "cpu")
