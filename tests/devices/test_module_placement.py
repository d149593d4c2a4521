"""`device.modules` on the simulated accelerator: a part on the CPU, the rest on the device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchrepro
from torchrepro.policies import policy

OnNpu = Callable[..., Any]
State = dict[str, torch.Tensor]


class Suspect(nn.Module):
    """A part with ops that no other part of its model has, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, Any]:
        """Return its result in a mapping, and the device that it saw."""
        hidden = self.norm(self.dense(x)).erf().cumsum(1)
        self.latest = hidden.detach()
        return {"hidden": hidden * scale, "device": str(hidden.device)}


ITS_OPS = (
    "aten::erf",
    "aten::cumsum",
    "aten::native_batch_norm",
    "aten::native_batch_norm_backward",
)


class Model(nn.Module):
    """A model with a suspect in it."""

    seen: str = ""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.suspect, self.last = nn.Linear(8, 8), Suspect(), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the suspect in the middle."""
        found = self.suspect(self.first(x), scale=self.scale)
        self.seen = found["device"]
        return self.last(found["hidden"])


class ByHand(Model):
    """The same model with the suspect on the CPU, by explicit moves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Move what goes into the suspect and what comes out."""
        found = self.suspect(self.first(x).cpu(), scale=self.scale.cpu())
        return self.last(found["hidden"].to(x.device))


def _train(model: nn.Module, device: str) -> tuple[State, State]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    numbers = torch.Generator().manual_seed(1)
    for _ in range(3):
        batch = torch.randn(16, 8, generator=numbers).to(device)
        targets = torch.randint(0, 3, (16,), generator=numbers).to(device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), targets).backward()
        optimizer.step()
    grads = {name: weight.grad.cpu() for name, weight in model.named_parameters()}
    return grads, {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def _made(kind: type[Model], device: str) -> Model:
    torch.manual_seed(0)
    return kind().to(device)


def _placed_and_by_hand(pattern: str, device: str) -> bool:
    with torchrepro.apply({"device": {"modules": {pattern: "cpu"}}}):
        placed = _train(_made(Model, device), device)
    by_hand = _made(ByHand, device)
    by_hand.suspect.cpu()
    return all(
        one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
        for one, two in zip(placed, _train(by_hand, device), strict=True)
    )


@pytest.mark.parametrize("pattern", ["suspect", "suspect*"])
def test_a_placed_part_trains_as_one_moved_by_hand(run: OnNpu, device: str, pattern: str) -> None:
    """Gradients, weights and running statistics equal those of a model with explicit moves."""
    assert run(_placed_and_by_hand, pattern, device)


def _ops_on_the_device(placed: dict[str, str]) -> dict[str, int]:
    from simulated_npu import log

    with torchrepro.apply({"device": {"modules": placed}}):
        model = _made(Model, "npu")
        log.clear()
        _train(model, "npu")
    return {op: log.counts[op] for op in ITS_OPS}


def test_no_op_of_the_part_reaches_the_device(on_npu: OnNpu) -> None:
    """Forward and backward ops of the part run on the CPU; without the policy on the device."""
    assert all(on_npu(_ops_on_the_device, {}).values())
    assert not any(on_npu(_ops_on_the_device, {"suspect": "cpu"}).values())


def _devices() -> list[str]:
    model = _made(Model, "npu")
    with torchrepro.apply({"device": {"modules": {"suspect": "cpu"}}}):
        _train(model, "npu")
        seen = [model.seen, str(model.suspect.latest.device)]
    model(torch.randn(4, 8).to("npu"))
    everything = [*model.state_dict().values(), *(weight.grad for weight in model.parameters())]
    return [*seen, model.seen, *{tensor.device.type for tensor in everything}]


def test_parameters_stay_on_their_device(on_npu: OnNpu) -> None:
    """The part runs on the CPU; its state, parameters and gradients stay; the undo restores all."""
    assert on_npu(_devices) == ["cpu", "npu:0", "npu:0", "npu"]


def _seen_and_returned(home: str, there: str) -> tuple[str, str]:
    model = _made(Model, home)
    with torchrepro.apply({"device": {"modules": {"suspect": there}}}):
        result = model(torch.randn(4, 8).to(home))
    return model.seen, str(result.device)


@pytest.mark.parametrize(
    ("home", "there", "expected"),
    [("npu", "npu:1", ("npu:1", "npu:0")), ("cpu", "npu", ("npu:0", "cpu"))],
)
def test_a_part_can_run_on_any_device(
    on_npu: OnNpu, home: str, there: str, expected: tuple[str, str]
) -> None:
    """A part runs on a second device, or alone on the accelerator, and its results come back."""
    assert on_npu(_seen_and_returned, home, there) == expected


class Making(nn.Module):
    """Makes a tensor on the default device, and draws random numbers on the device of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return noise."""
        self.made_on = torch.ones(1).device
        return torch.rand_like(x)


def _drawn(placed: bool, rng: str) -> torch.Tensor:
    modules = {"0": "cpu"} if placed else {}
    with torchrepro.apply({"seed": 3, "device": {"modules": modules, "rng": rng}}):
        return nn.Sequential(Making())(torch.zeros(5).to("npu")).cpu()


def test_a_placed_part_draws_from_the_generator_of_its_device(on_npu: OnNpu) -> None:
    """A part on the CPU draws from its generator; with `rng: host`, placing changes nothing."""
    torch.manual_seed(3)
    expected = torch.rand(5)

    assert torch.equal(on_npu(_drawn, True, "native"), expected)
    assert not torch.equal(on_npu(_drawn, False, "native"), expected)
    assert torch.equal(on_npu(_drawn, True, "host"), on_npu(_drawn, False, "host"))


def _counted() -> list[tuple[str, str, int, int]]:
    policy.reset_counts()
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU()).to("npu")
    with torchrepro.apply({"device": {"modules": {"?": "cpu"}}}):
        model(torch.randn(2, 8).to("npu"))
    found = [e for e in policy.effects() if e.policy == "device.modules"]
    policy.reset_counts()
    return [(e.subject, e.what, e.calls, e.moved) for e in found]


def test_calls_and_bytes_are_counted(on_npu: OnNpu) -> None:
    """Inputs, weights and results of every call are counted in bytes, each once."""
    linear = 4 * (2 * 8 + 4 * 8 + 4 + 2 * 4)

    assert on_npu(_counted) == [
        ("0", "ran on cpu", 1, linear),
        ("1", "ran on cpu", 1, 4 * (8 + 8)),
    ]


def _refused(word: str) -> str:
    with torchrepro.apply({"device": {"modules": {"x": word}}}) as applied:
        return str(applied.report["device.modules"].why)


def test_a_missing_device_is_refused_with_the_legal_ones(on_npu: OnNpu) -> None:
    """For a device index out of range, the message has the nearest and all legal devices."""
    why = on_npu(_refused, "npu:7")

    assert "no device `npu:7`; did you mean npu:" in why
    assert "it has cpu, npu:0, npu:1" in why


def _with_default_device() -> str:
    model = nn.Sequential(Making()).to("npu")
    with torch.device("npu"), torchrepro.apply({"device": {"modules": {"0": "cpu"}}}):
        return str(model(torch.ones(3)).device) + str(model[0].made_on)


def test_new_tensors_are_created_on_the_device_of_the_part(on_npu: OnNpu) -> None:
    """If the default device of the program is the accelerator, that of a placed part is the CPU."""
    assert on_npu(_with_default_device) == "npu:0cpu"


def _dtypes() -> list[str]:
    model, x = nn.Sequential(nn.Linear(3, 3)).to("npu"), torch.ones(2, 3).to("npu")
    with torchrepro.apply({"device": {"modules": {"0": "cpu"}}}):
        with torch.autocast("npu", dtype=torch.bfloat16):
            inside = str(model(x).dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return [inside, str(model(x).dtype)]


def test_autocast_of_the_device_applies_to_a_placed_part(on_npu: OnNpu) -> None:
    """Autocast of the device applies in a placed part, autocast of the CPU does not."""
    assert on_npu(_dtypes) == ["torch.bfloat16", "torch.float32"]
