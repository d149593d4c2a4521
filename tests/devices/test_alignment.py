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


class _Convolutional(nn.Module):
    """A small network with batch norm and dropout of pixels and channels."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.3),
            nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Dropout(0.5), nn.Linear(8, 4),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(x)
        return self.body(x + 0.1 * noise)


class _Transformer(nn.Module):
    """A small transformer with an embedding, dropout everywhere and a random mask of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.4, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.bernoulli(torch.full(x.shape, 0.9, device=x.device)).long()
        return self.head(self.encoder(self.embedding(x * kept)).mean(1))


def _pictures(device: str) -> torch.Tensor:
    return torch.randn(8, 3, 10, 10, device=device)


def _tokens(device: str) -> torch.Tensor:
    return torch.randint(0, 50, (8, 6), device=device)


NETWORKS: dict[str, tuple[type[nn.Module], Callable[[str], torch.Tensor]]] = {
    "convolutional": (_Convolutional, _pictures),
    "transformer": (_Transformer, _tokens),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "convolutional": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "transformer": lambda weights: torch.optim.AdamW(weights, lr=0.01),
}


def _weights(network: str, device: str, overrides: list[str]) -> tuple[str, list[str]]:
    """Train under `npu-align` on `device`; return the hash of the weights, and what was not set."""
    make, batch = NETWORKS[network]
    with torchrepro.apply("npu-align", ["seed=3", *overrides]) as applied:
        model = make().to(device)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
        optimizer = OPTIMIZERS[network](model.parameters())
        for _ in range(STEPS):
            targets = torch.randint(0, 4, (8,), device=device)
            optimizer.zero_grad()
            functional.cross_entropy(model(batch(device)), targets).backward()
            optimizer.step()
        policies = ("dropout", "device.rng")
        outcomes = [f"{name}: {applied.report[name].outcome}" for name in policies]
    state = model.state_dict().values()
    content = b"".join(bytes(tensor.cpu().view(-1).view(torch.uint8).numpy()) for tensor in state)
    return hashlib.sha256(content).hexdigest(), outcomes


@pytest.mark.parametrize("dropout", ["dropout=zero", "dropout=keep"])
@pytest.mark.parametrize("network", NETWORKS)
def test_both_devices_train_to_the_same_weights(network: str, dropout: str, on_npu: OnNpu) -> None:
    """Weights, inputs, noise and masks drawn on the device: bit for bit those of the CPU."""
    weights, outcomes = on_npu(_weights, network, "npu", [dropout])

    assert weights == on_npu(_weights, network, "cpu", [dropout])[0]
    assert "device.rng: applied" in outcomes


@pytest.mark.parametrize("network", NETWORKS)
def test_without_host_random_numbers_they_do_not(network: str, on_npu: OnNpu) -> None:
    """The test above sees a difference if there is one."""
    native = ["device.rng=native"]

    assert on_npu(_weights, network, "npu", native) != on_npu(_weights, network, "cpu", native)
