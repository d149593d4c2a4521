"""`dropout: zero` on a CUDA device, whose kernels drop inside larger computations."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import torchrepro

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU in this machine"),
]
Function = Callable[[torch.Tensor], torch.Tensor]
CALLS = 4  # TorchScript gives a function its final form after two
SHAPE = (2, 4, 32, 16)  # batch, heads, positions, channels of a head


def _attention(backend: SDPBackend) -> Function:
    def attend(x: torch.Tensor) -> torch.Tensor:
        half = x.half()
        # The CPU has no other that drops: on it the reference says what is dropped.
        with sdpa_kernel(backend if x.is_cuda else SDPBackend.MATH):
            out = functional.scaled_dot_product_attention(half, half, half, dropout_p=0.5)
        return out.float()

    return attend


def _recurrent(kind: str) -> Function:
    torch.manual_seed(1)
    layer = getattr(nn, kind)(16, 16, num_layers=3, dropout=0.5, batch_first=True)
    return lambda x: layer.to(x.device)(x.flatten(0, 1))[0]


def _dropped(x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(x, 0.5, True) * 2


CALLED: dict[str, Callable[[], Function]] = {
    "F.dropout": lambda: lambda x: functional.dropout(x, 0.3),
    "F.dropout2d": lambda: functional.dropout2d,
    "torch.native_dropout": lambda: lambda x: torch.native_dropout(x, 0.5, True)[0],
    "torch._fused_dropout": lambda: lambda x: torch._fused_dropout(x, 0.5)[0],
    "rrelu": lambda: lambda x: functional.rrelu(x, training=True),
    "math attention": lambda: _attention(SDPBackend.MATH),
    "flash attention": lambda: _attention(SDPBackend.FLASH_ATTENTION),
    "efficient attention": lambda: _attention(SDPBackend.EFFICIENT_ATTENTION),
    "cuDNN attention": lambda: _attention(SDPBackend.CUDNN_ATTENTION),
    "cuDNN LSTM": lambda: _recurrent("LSTM"),
    "cuDNN GRU": lambda: _recurrent("GRU"),
    "scripted": lambda: torch.jit.script(_dropped),
    "compiled": lambda: torch.compile(_dropped),
}


def _result(call: Function, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(9)
    x = torch.randn(SHAPE, device="cuda", requires_grad=True)
    torch.manual_seed(seed)
    result = call(x)
    result.square().sum().backward()
    return result.detach(), x.grad


def _drops(call: Function) -> bool:
    results = [_result(call, seed)[0] for seed in range(3)]
    return not all(torch.equal(results[0], other) for other in results)


FACTORS = {"F.dropout": 1, "torch.native_dropout": 1, "scripted": 2, "compiled": 2}
"""By what these multiply their argument besides."""


@pytest.mark.parametrize("name", CALLED)
def test_a_kernel_drops_nothing_while_the_policy_is_active(name: str) -> None:
    """Under the policy, values and gradients do not depend on the seed; otherwise they do.

    Backward passes gradients as without dropout.
    """
    call = CALLED[name]()

    assert _drops(call)
    with torchrepro.apply({"dropout": "zero"}):
        results = [_result(call, seed) for seed in range(CALLS)]
        for value, gradient in results:
            assert torch.allclose(value, results[0][0], atol=1e-3)
            assert torch.allclose(gradient, results[0][1], atol=1e-3)
            if name in FACTORS:
                assert torch.allclose(gradient, 2 * FACTORS[name] * value)
        assert not _drops(call)
    assert _drops(call)


@pytest.mark.parametrize("name", ["math attention", "flash attention", "cuDNN LSTM", "F.dropout"])
def test_masks_drawn_on_the_host_equal_those_of_the_cpu(name: str) -> None:
    """With active dropout and random numbers from the host, a GPU drops the same as a CPU."""
    call = CALLED[name]()

    def dropped(device: str) -> torch.Tensor:
        torch.manual_seed(3)
        x = torch.ones(SHAPE, device=device)
        return call(x).cpu()

    with torchrepro.apply({"device": {"rng": "host"}}):
        assert torch.allclose(dropped("cuda"), dropped("cpu"), atol=1e-2)
