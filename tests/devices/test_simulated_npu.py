"""Properties of the simulated accelerator that the other tests in this folder rely on.

The other tests show that it computes, draws and stores memory like an accelerator: under
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


def test_a_snapshot_includes_every_device(on_npu: OnNpu) -> None:
    """torchrepro finds the generators of the devices, and torch.manual_seed seeds them."""
    drawn, again, facts = on_npu(_after_snapshot)

    assert drawn == again
    assert facts == [5, 2]


def _alert_of(device: str) -> str:
    """Return the error of `put_`, which has no deterministic kernel on the CPU either."""
    alert_on("aten::put_")
    profile = {"backends": {"torch": {"deterministic_algorithms": "error"}}}
    with torchrepro.apply(profile), pytest.raises(RuntimeError) as raised:
        torch.zeros(2, device=device).put_(
            torch.tensor([0], device=device), torch.ones(1, device=device)
        )
    return str(raised.value).replace("put__npu", "put_")


def test_an_alert_has_the_words_of_torch(on_npu: OnNpu) -> None:
    """The message equals that of the installed torch, except for the name of the kernel."""
    assert on_npu(_alert_of, "npu") == on_npu(_alert_of, "cpu")
