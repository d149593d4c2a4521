"""`device.rng: host`: the same seed draws the same numbers on an accelerator as on the CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import torchrepro
from torchrepro.policies.interpose import interposed_ops

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


@ON_DEVICE
def test_a_generator_of_a_device_stands_for_one_of_the_cpu(device: str) -> None:
    """A program's own generator goes on where it left, and starts again when it is seeded again."""
    on_cpu = torch.Generator().manual_seed(9)
    expected = [torch.randn(3, generator=on_cpu) for _ in range(2)]
    with torchrepro.apply({"device": {"rng": "host"}}):
        own = torch.Generator(device).manual_seed(9)
        drawn = [torch.randn(3, device=device, generator=own).cpu() for _ in range(2)]
        own.manual_seed(9)
        again = [torch.randn(3, device=device, generator=own).cpu() for _ in range(2)]
        state = own.get_state()
        third = torch.randn(3, device=device, generator=own).cpu()
        own.set_state(state)
        repeated = torch.randn(3, device=device, generator=own).cpu()

    assert torch.equal(third, repeated)
    assert not torch.equal(third, drawn[0])
    assert all(map(torch.equal, drawn, expected))
    assert all(map(torch.equal, again, expected))


@pytest.mark.skipif(ACCELERATOR, reason="there is an accelerator in this machine")
def test_without_an_accelerator_ops_are_left_alone() -> None:
    """Where all numbers come from the host in any case, no op is interposed, none is counted."""
    plain = {name: _drawn(name, "cpu") for name in DRAWS}
    with torchrepro.apply({"device": {"rng": "host"}}) as applied:
        assert interposed_ops() == ()
        numbers = {name: _drawn(name, "cpu") for name in DRAWS}

    assert all(torch.equal(plain[name], numbers[name]) for name in DRAWS)
    assert applied.report.effects == ()


def test_native_leaves_everything_alone() -> None:
    """`device.rng: native` changes nothing."""
    with torchrepro.apply({"device": {"rng": "native"}}) as applied:
        assert applied.report["device.rng"].outcome == "unchanged"


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
    """Compiled before the policy or under it, a function draws the numbers of an eager run."""
    function = COMPILED[name]
    before = torch.compile(function, backend=backend)

    def drawn(call: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
        torch.manual_seed(4)
        return call(torch.ones(5, requires_grad=True)).tolist()

    before(torch.ones(5, requires_grad=True))
    expected = drawn(function)
    with torchrepro.apply({"device": {"rng": "host"}}):
        assert drawn(before) == expected
        assert drawn(torch.compile(function, backend=backend)) == expected


@pytest.mark.slow
def test_inductor_draws_its_own_numbers_again_after_the_undo() -> None:
    """The option of inductor that draws by torch's ops is as it was, loaded before or after."""
    import torch._inductor.config as inductor

    before = inductor.fallback_random
    with torchrepro.apply({"device": {"rng": "host"}}):
        assert inductor.fallback_random is True

    assert inductor.fallback_random is before
