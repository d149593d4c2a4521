"""`device.rng: host` on the simulated accelerator: the CPU's numbers, through the dispatcher."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import torchrepro

OnNpu = Callable[..., Any]
HOST = {"device": {"rng": "host"}}


def _into(device: str, name: str, *args: float) -> torch.Tensor:
    return getattr(torch.empty(3, 4, device=device), name)(*args)


DRAWS: dict[str, Callable[[str], torch.Tensor]] = {
    "rand": lambda device: torch.rand(20, device=device),
    "rand into a tensor": lambda device: torch.rand(6, out=torch.empty(6, device=device)),
    "rand_like": lambda device: torch.rand_like(torch.ones(3, 4, device=device)),
    "randn": lambda device: torch.randn(5, device=device),
    "randn_like": lambda device: torch.randn_like(torch.ones(3, 4, device=device)),
    "randint": lambda device: torch.randint(0, 100, (7,), device=device),
    "randint_like": lambda device: torch.randint_like(torch.ones(7, device=device), 50),
    "randperm": lambda device: torch.randperm(10, device=device),
    "normal of tensors": lambda device: torch.normal(
        torch.zeros(5, device=device), torch.ones(5, device=device)
    ),
    "normal_": lambda device: _into(device, "normal_", 1, 2),
    "uniform_": lambda device: _into(device, "uniform_"),
    "uniform_ on a view": lambda device: torch.zeros(4, 4, device=device)[1].uniform_(),
    "random_": lambda device: _into(device, "random_", 99),
    "cauchy_": lambda device: _into(device, "cauchy_"),
    "geometric_": lambda device: _into(device, "geometric_", 0.3),
    "log_normal_": lambda device: _into(device, "log_normal_"),
    "exponential_": lambda device: _into(device, "exponential_"),
    "bernoulli_": lambda device: _into(device, "bernoulli_", 0.5),
    "bernoulli": lambda device: torch.bernoulli(torch.full((8,), 0.5, device=device)),
    "bernoulli_ of a tensor": lambda device: torch.zeros(8, device=device).bernoulli_(
        torch.full((8,), 0.5, device=device)
    ),
    "poisson": lambda device: torch.poisson(torch.full((8,), 3.0, device=device)),
    "multinomial": lambda device: torch.multinomial(torch.ones(10, device=device), 4),
    "gumbel_softmax": lambda device: functional.gumbel_softmax(torch.ones(4, 5, device=device)),
    "rrelu": lambda device: functional.rrelu(-torch.ones(9, device=device), training=True),
    "dropout": lambda device: functional.dropout(torch.ones(16, device=device)),
    "dropout of channels": lambda device: functional.dropout2d(torch.ones(4, 8, 2, 2).to(device)),
    "alpha_dropout": lambda device: functional.alpha_dropout(
        torch.ones(16, device=device), training=True
    ),
    "dropout within attention": lambda device: functional.scaled_dot_product_attention(
        *[torch.ones(2, 4, 8, device=device)] * 3, dropout_p=0.5
    ),
    "fractional_max_pool2d": lambda device: functional.fractional_max_pool2d(
        torch.arange(64.0).view(1, 1, 8, 8).to(device), 2, output_size=3
    ),
    "a layer": lambda device: nn.Linear(4, 3, device=device).weight.detach(),
    "xavier": lambda device: nn.init.xavier_normal_(torch.empty(4, 3, device=device)),
    "trunc_normal_": lambda device: nn.init.trunc_normal_(torch.empty(4, 3, device=device)),
    "orthogonal_": lambda device: nn.init.orthogonal_(torch.empty(4, 3, device=device)),
    "Normal": lambda device: torch.distributions.Normal(
        torch.zeros(5, device=device), torch.ones(5, device=device)
    ).sample(),
    "Gamma": lambda device: torch.distributions.Gamma(
        torch.ones(5, device=device), torch.ones(5, device=device)
    ).sample(),
    "Dirichlet": lambda device: torch.distributions.Dirichlet(
        torch.ones(2, 5, device=device)
    ).sample(),
    "Categorical": lambda device: torch.distributions.Categorical(
        torch.ones(5, device=device)
    ).sample((6,)),
}


def _drawn(name: str, device: str) -> tuple[list[float], float]:
    """Return what a row draws, and the number that the CPU's generator gives next."""
    torch.manual_seed(3)
    drawn = DRAWS[name](device).cpu()
    return drawn.tolist(), torch.rand(()).item()


def _drawn_on_npu(name: str) -> tuple[Any, Any, Any]:
    native = _drawn(name, "npu")
    with torchrepro.apply(HOST) as applied:
        host = _drawn(name, "npu")
        counted = sum(effect.calls for effect in applied.report.effects)
    assert counted
    return native, host, _drawn(name, "npu")


@pytest.mark.parametrize("name", DRAWS)
def test_a_device_draws_what_the_cpu_draws_in_program_order(name: str, on_npu: OnNpu) -> None:
    """In force, each way to draw gives the CPU's numbers and moves its generator as the CPU does.

    Before and after, the device draws its own.
    """
    native, host, after = on_npu(_drawn_on_npu, name)

    assert host == _drawn(name, "cpu")
    assert native != host
    assert after == native


def _where_it_ends() -> tuple[str, str, list[str]]:
    with torchrepro.apply(HOST) as applied:
        on_second = torch.rand(3, device="npu:1").device
        like_second = torch.rand_like(torch.ones(3, device="npu:1")).device
        torch.rand(1000, device="npu")
    report = applied.report
    return str(on_second), str(like_second), [effect.subject for effect in report.effects]


def test_numbers_are_moved_to_the_device_that_asked(on_npu: OnNpu) -> None:
    """Drawn numbers are on the device and index they were asked for, and counted by op."""
    assert on_npu(_where_it_ends) == ("npu:1", "npu:1", ["aten::rand_like", "aten::uniform_"])


def _cpu_draws_stay() -> tuple[list[float], int]:
    torch.manual_seed(3)
    with torchrepro.apply(HOST) as applied:
        return torch.rand(4).tolist(), len(applied.report.effects)


def test_draws_on_the_cpu_are_left_alone(on_npu: OnNpu) -> None:
    """What draws on the CPU in any case draws the same and is not counted."""
    torch.manual_seed(3)

    assert on_npu(_cpu_draws_stay) == (torch.rand(4).tolist(), 0)


def _device_seeding() -> tuple[bool, list[tuple[str, str]]]:
    with torchrepro.apply({"seed": 1, **HOST}) as applied:
        torch.manual_seed(3)
        first = torch.rand(4, device="npu")
        torch.manual_seed(3)
        torch.npu.manual_seed_all(99)
        again = torch.rand(4, device="npu")
        effects = [(e.subject, e.what) for e in applied.report.effects if "seed" in e.subject]
    return torch.equal(first.cpu(), again.cpu()), effects


def test_seeding_only_the_device_is_reported_as_without_effect(on_npu: OnNpu) -> None:
    """A seeding call that reaches no generator that is drawn from is named, with its line."""
    same, effects = on_npu(_device_seeding)

    assert same
    assert effects == [("torch.npu.manual_seed_all(99)", "without effect: the host draws")]
