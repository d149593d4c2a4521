"""`npu-align` on the simulated accelerator: both devices train to the same weights."""

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import torchrepro

OnNpu = Callable[..., Any]
STEPS = 5


class _Network(nn.Module):
    """A transformer with a random mask of tokens, noise, and convolutions with batch norm.

    It has dropout of values, of pixels and of channels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.4, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.3),
            nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Dropout(0.5), nn.Linear(8, 4),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.bernoulli(torch.full(x.shape, 0.9, device=x.device)).long()
        hidden = self.encoder(self.embedding(x * kept)).unsqueeze(1)
        return self.body(hidden + 0.1 * torch.randn_like(hidden))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.01),
}


def _weights(name: str, device: str, overrides: list[str]) -> tuple[str, list[str]]:
    """Train under `npu-align` on `device`; return a hash of the weights, and the unset knobs."""
    with torchrepro.apply("npu-align", ["seed=3", *overrides]) as applied:
        model = _Network().to(device)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
        optimizer = OPTIMIZERS[name](model.parameters())
        for _ in range(STEPS):
            tokens = torch.randint(0, 50, (8, 6), device=device)
            targets = torch.randint(0, 4, (8,), device=device)
            optimizer.zero_grad()
            functional.cross_entropy(model(tokens), targets).backward()
            optimizer.step()
        policies = ("dropout", "device.rng")
        outcomes = [f"{name}: {applied.report[name].outcome}" for name in policies]
    state = model.state_dict().values()
    content = b"".join(bytes(tensor.cpu().view(-1).view(torch.uint8).numpy()) for tensor in state)
    return hashlib.sha256(content).hexdigest(), outcomes


@pytest.mark.parametrize("dropout", ["dropout=zero", "dropout=keep"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_both_devices_train_to_the_same_weights(
    optimizer: str, dropout: str, on_npu: OnNpu
) -> None:
    """Weights, inputs, noise and masks are drawn on the device; training equals the CPU bitwise."""
    weights, outcomes = on_npu(_weights, optimizer, "npu", [dropout])

    assert weights == on_npu(_weights, optimizer, "cpu", [dropout])[0]
    assert "device.rng: applied" in outcomes


def test_without_host_random_numbers_the_weights_differ(on_npu: OnNpu) -> None:
    """The test above can detect a difference."""
    native = ["device.rng=native"]

    assert on_npu(_weights, "SGD", "npu", native)[0] != on_npu(_weights, "SGD", "cpu", native)[0]
