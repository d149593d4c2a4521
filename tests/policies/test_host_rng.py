"""`device.rng: host`: the same seed draws the same numbers on an accelerator as on the CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import torchrepro

ACCELERATOR = torch.accelerator.is_available()
DEVICE = torch.accelerator.current_accelerator().type if ACCELERATOR else "cpu"
needs_accelerator = [
    pytest.mark.gpu,
    pytest.mark.npu,
    pytest.mark.skipif(not ACCELERATOR, reason="no accelerator in this machine"),
]

DRAWS: dict[str, Callable[[str], torch.Tensor]] = {
    "rand": lambda device: torch.rand(20, device=device),
    "randn": lambda device: torch.randn(5, device=device),
    "randint": lambda device: torch.randint(0, 100, (7,), device=device),
    "randperm": lambda device: torch.randperm(10, device=device),
    "normal_": lambda device: torch.empty(3, 4, device=device).normal_(1, 2),
    "uniform_ on a view": lambda device: torch.zeros(4, 4, device=device)[1].uniform_(),
    "bernoulli": lambda device: torch.bernoulli(torch.full((8,), 0.5, device=device)),
    "multinomial": lambda device: torch.multinomial(torch.ones(10, device=device), 4),
    "exponential_": lambda device: torch.empty(5, device=device).exponential_(),
    "weights of a layer": lambda device: nn.Linear(4, 3, device=device).weight.detach(),
    "dropout": lambda device: nn.functional.dropout(torch.ones(16, device=device)),
    "a generator of one's own": lambda device: torch.randn(
        4, device=device, generator=torch.Generator(device).manual_seed(9)
    ),
}


def _drawn(name: str, device: str) -> torch.Tensor:
    torch.manual_seed(3)
    return DRAWS[name](device).cpu()


ON_DEVICE = pytest.mark.parametrize("device", [pytest.param(DEVICE, marks=needs_accelerator)])


@ON_DEVICE
@pytest.mark.parametrize("name", DRAWS)
def test_a_device_draws_what_the_cpu_draws(name: str, device: str) -> None:
    """Under the policy every way to draw on an accelerator gives the CPU's numbers."""
    with torchrepro.apply({"device": {"rng": "host"}}):
        drawn = _drawn(name, device)

    assert torch.equal(_drawn(name, "cpu"), drawn)


@ON_DEVICE
def test_without_the_policy_a_device_draws_its_own_numbers(device: str) -> None:
    """Before the policy and after its undo, an accelerator draws from its own generator."""
    expected, before = _drawn("rand", "cpu"), _drawn("rand", device)
    with torchrepro.apply({"device": {"rng": "host"}}):
        pass

    assert not torch.equal(expected, before)
    assert torch.equal(before, _drawn("rand", device))


@pytest.mark.skipif(ACCELERATOR, reason="there is an accelerator in this machine")
@pytest.mark.parametrize("value", ["host", "native"])
def test_without_an_accelerator_nothing_is_installed(value: str) -> None:
    """Where all numbers come from the host in any case, the policy is `unchanged`."""
    with torchrepro.apply({"device": {"rng": value}}) as applied:
        assert applied.report["device.rng"].outcome == "unchanged"
        numbers = _drawn("rand", "cpu")

    assert torch.equal(numbers, _drawn("rand", "cpu"))
