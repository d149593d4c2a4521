"""`device.rng: host`: one seed draws the same random numbers on an accelerator and on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import torchrepro
from torchrepro.policies.interpose import interposed

OnNpu = Callable[..., Any]
HOST = {"device": {"rng": "host"}}
ACCELERATOR = torch.accelerator.is_available()
REAL = str(torch.accelerator.current_accelerator().type) if ACCELERATOR else "cpu"
needs_accelerator = [
    pytest.mark.gpu,
    pytest.mark.npu,
    pytest.mark.skipif(not ACCELERATOR, reason="no accelerator in this machine"),
]


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
    "Gamma": lambda device: torch.distributions.Gamma(
        torch.ones(5, device=device), torch.ones(5, device=device)
    ).sample(),
    "Dirichlet": lambda device: torch.distributions.Dirichlet(
        torch.ones(2, 5, device=device)
    ).sample(),
}


def _drawn(name: str, device: str) -> tuple[list[float], float]:
    torch.manual_seed(3)
    drawn = DRAWS[name](device).cpu()
    return drawn.tolist(), torch.rand(()).item()


def _drawn_thrice(name: str, device: str) -> tuple[Any, Any, Any]:
    native = _drawn(name, device)
    with torchrepro.apply(HOST) as applied:
        host = _drawn(name, device)
        counted = sum(effect.calls for effect in applied.report.effects)
    assert counted
    return native, host, _drawn(name, device)


DRAWN_ALONE = (
    *("rand", "randn", "randint", "randperm", "normal_", "uniform_ on a view", "exponential_"),
    *("bernoulli", "multinomial", "a layer", "dropout"),
)
"""What computes nothing from its draws, which a real device does in bits of its own."""


@pytest.mark.parametrize(
    ("name", "device"),
    [
        *((name, "simulated") for name in DRAWS),
        *(pytest.param(name, REAL, marks=needs_accelerator) for name in DRAWN_ALONE),
    ],
)
def test_a_device_draws_what_the_cpu_draws_in_program_order(
    name: str, device: str, request: pytest.FixtureRequest
) -> None:
    """Under the policy, every way to draw returns the numbers of the CPU, in program order.

    Its generator advances as on the CPU. Before and after, the device draws its own numbers.
    """
    if device == "simulated":
        native, host, after = request.getfixturevalue("on_npu")(_drawn_thrice, name, "npu")
    else:
        native, host, after = _drawn_thrice(name, device)

    assert host == _drawn(name, "cpu")
    assert native != host
    assert after == native


@pytest.mark.parametrize("device", [pytest.param(REAL, marks=needs_accelerator)])
def test_a_generator_of_a_device_is_replaced_by_one_of_the_cpu(device: str) -> None:
    """The generator of a program continues from its last draw, and restarts if seeded again."""
    on_cpu = torch.Generator().manual_seed(9)
    expected = [torch.randn(3, generator=on_cpu).tolist() for _ in range(2)]
    with torchrepro.apply(HOST):
        own = torch.Generator(device).manual_seed(9)

        def draw() -> list[float]:
            drawn: list[float] = torch.randn(3, device=device, generator=own).tolist()
            return drawn

        first = [draw(), draw()]
        own.manual_seed(9)
        again = [draw(), draw()]
        state = own.get_state()
        third = draw()
        own.set_state(state)
        repeated = draw()

    assert first == again == expected
    assert third == repeated != first[0]


def _where_it_ends() -> tuple[str, str, list[str]]:
    with torchrepro.apply(HOST) as applied:
        on_second = torch.rand(3, device="npu:1").device
        like_second = torch.rand_like(torch.ones(3, device="npu:1")).device
        torch.rand(1000, device="npu")
    report = applied.report
    return str(on_second), str(like_second), [effect.subject for effect in report.effects]


def test_numbers_are_moved_to_the_requested_device(on_npu: OnNpu) -> None:
    """Drawn numbers are on the requested device and index, and counted by op."""
    assert on_npu(_where_it_ends) == ("npu:1", "npu:1", ["aten::rand_like", "aten::uniform_"])


def _cpu_draws_stay() -> tuple[list[float], int]:
    torch.manual_seed(3)
    with torchrepro.apply(HOST) as applied:
        return torch.rand(4).tolist(), len(applied.report.effects)


def test_draws_on_the_cpu_do_not_change(run: OnNpu) -> None:
    """Draws on the CPU are the same as without the policy, and are not counted."""
    torch.manual_seed(3)
    expected = torch.rand(4).tolist()

    assert run(_cpu_draws_stay) == (expected, 0)


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
    """A seeding call for a generator that is not used is reported with its line."""
    same, effects = on_npu(_device_seeding)

    assert same
    assert effects == [("torch.npu.manual_seed_all(99)", "without effect: the host draws")]


@pytest.mark.skipif(ACCELERATOR, reason="there is an accelerator in this machine")
def test_without_an_accelerator_no_op_is_interposed() -> None:
    """If all numbers come from the host anyway, no op is interposed."""
    with torchrepro.apply(HOST):
        assert tuple(interposed) == ()


COMPILED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand": lambda x: torch.rand(5) * x,
    "randn_like": lambda x: torch.randn_like(x) + x,
    "randint": lambda x: torch.randint(0, 9, (5,)) * x,
    "bernoulli": lambda x: torch.bernoulli(torch.full((5,), 0.5)) * x,
    "dropout": lambda x: nn.functional.dropout(x, 0.3),
    "normal_": lambda x: torch.empty(5).normal_() * x,
    "exponential_": lambda x: torch.empty(5).exponential_() * x,
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_code_draws_what_eager_code_draws(name: str, backend: str) -> None:
    """Compiled before or under the policy, a function draws the numbers of an eager run.

    After the undo inductor draws its own numbers again.
    """
    import torch._inductor.config as inductor

    function, own = COMPILED[name], inductor.fallback_random
    before = torch.compile(function, backend=backend)

    def drawn(call: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
        torch.manual_seed(4)
        return call(torch.ones(5, requires_grad=True)).tolist()

    before(torch.ones(5, requires_grad=True))
    expected = drawn(function)
    with torchrepro.apply(HOST):
        assert drawn(before) == expected
        assert drawn(torch.compile(function, backend=backend)) == expected
        assert inductor.fallback_random is True
    assert inductor.fallback_random is own
