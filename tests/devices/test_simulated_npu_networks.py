"""Networks on the simulated accelerator compute what they compute on the CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

OnNpu = Callable[..., object]


class Attention(nn.Module):
    """Self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend to `x`."""
        return self.attend(x, x, x)[0]


class Words(nn.Module):
    """An embedding, and how badly it guesses the words."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 8)
        self.bag = nn.EmbeddingBag(5, 8)
        self.guess = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take the signs of `x` for words."""
        words = (x[..., 0] > 0).long()
        guess = self.guess(self.table(words) + self.bag(words)[:, None])
        return nn.functional.cross_entropy(guess.flatten(0, 1), words.flatten())


class Sorted(nn.Module):
    """Ops whose gradients scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sort, gather, accumulate."""
        x = (x * self.weight).sort(-1).values.cumsum(-1)
        index = torch.arange(8, device=x.device).flip(0).expand_as(x)
        x = torch.zeros_like(x).scatter_add(-1, index, x) + x.gather(-1, index) + x[..., [1] * 8]
        return checkpoint(torch.tanh, x, use_reentrant=False)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)),
    "cnn": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 5)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(4, 4, 3, groups=2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.AdaptiveAvgPool2d(2),
    ),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True),
    "attention": Attention,
    "words": Words,
    "sorted": Sorted,
}
RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(8, 4, 2, bidirectional=True, batch_first=True),
    "lstm without bias": lambda: nn.LSTM(8, 4, bias=False, proj_size=2),
    "gru": lambda: nn.GRU(8, 4, 2, batch_first=True),
    "gru without bias": lambda: nn.GRU(8, 4, bias=False),
    "rnn": lambda: nn.RNN(8, 4),
}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01, foreach=True),
}


def _trained(name: str, optimizer: str, device: str) -> list[torch.Tensor]:
    torch.manual_seed(1)
    network = (NETWORKS | RECURRENT)[name]().to(device)
    data = torch.randn(3, 5, 8).to(device)
    steps = OPTIMIZERS[optimizer](network.parameters())
    seen = []
    with sdpa_kernel(SDPBackend.MATH):  # the CPU's flash attention is fused, the device has none
        for _ in range(3):
            steps.zero_grad()
            out = network(data)
            out = out if isinstance(out, torch.Tensor) else out[0]
            out.flatten()[::2].pow(2).sum().backward()
            steps.step()
            seen += [out, *(parameter.grad.clone() for parameter in network.parameters())]
    return [tensor.detach().cpu() for tensor in (*seen, *network.state_dict().values())]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NETWORKS)
def test_without_randomness_a_network_trains_as_on_the_cpu(
    on_npu: OnNpu, name: str, optimizer: str
) -> None:
    """Outputs, gradients and weights are the CPU's, bit for bit."""
    there, here = (on_npu(_trained, name, optimizer, device) for device in ("npu", "cpu"))

    assert len(there) == len(here)
    assert all(map(torch.equal, there, here))


@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_network_trains_as_on_the_cpu(on_npu: OnNpu, name: str) -> None:
    """Outputs, gradients and weights are the CPU's up to rounding: the cells are the device's."""
    there, here = (on_npu(_trained, name, "sgd", device) for device in ("npu", "cpu"))

    for on_device, on_cpu in zip(there, here, strict=True):
        torch.testing.assert_close(on_device, on_cpu, atol=1e-4, rtol=1e-4)


def _twice_differentiated(device: str) -> list[float]:
    x = torch.arange(1.0, 5.0, device=device, requires_grad=True)
    (slope,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    slope.sum().backward(retain_graph=True)
    slope.sum().backward()
    return x.grad.tolist()


def test_gradients_have_gradients(on_npu: OnNpu) -> None:
    """A retained graph and a double backward give the CPU's gradients."""
    assert on_npu(_twice_differentiated, "npu") == on_npu(_twice_differentiated, "cpu")


def _checkpointed_with_dropout() -> list[list[float]]:
    torch.manual_seed(0)
    layer, grads = nn.Sequential(nn.Linear(8, 8), nn.Dropout()).to("npu"), []
    state = torch.npu.get_rng_state()
    for call in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        x = torch.ones(4, 8, device="npu", requires_grad=True)
        torch.npu.set_rng_state(state)
        call(x).sum().backward()
        grads.append(x.grad.tolist())
    return grads


def test_a_checkpoint_draws_the_same_numbers_again(on_npu: OnNpu) -> None:
    """Recomputing a forward pass in the backward pass drops out what was dropped out."""
    plain, recomputed = on_npu(_checkpointed_with_dropout)

    assert plain == recomputed
