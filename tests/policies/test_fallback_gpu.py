"""`device.fallback` on a real CUDA GPU: ops that torch refuses there run on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import torchrepro
from torchrepro.policies.policy import effects

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU in this machine"),
]


def _gradient(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_()
    function(x).square().sum().backward()
    return x.grad


def _image(device: str) -> torch.Tensor:
    return torch.arange(256.0, device=device).sin().view(1, 1, 16, 16)


def _volume(device: str) -> torch.Tensor:
    return torch.arange(512.0, device=device).sin().view(1, 1, 8, 8, 8)


def _grid(device: str) -> torch.Tensor:
    return torch.linspace(-1, 1, 200, device=device).view(1, 10, 10, 2)


CALLS: dict[str, Callable[[str], torch.Tensor]] = {
    "adaptive_avg_pool2d": lambda d: _gradient(
        lambda x: functional.adaptive_avg_pool2d(x, 3), _image(d)
    ),
    "avg_pool3d": lambda d: _gradient(lambda x: functional.avg_pool3d(x, 3, 2), _volume(d)),
    "bicubic": lambda d: _gradient(
        lambda x: functional.interpolate(x, scale_factor=2, mode="bicubic"), _image(d)
    ),
    "reflection_pad2d": lambda d: _gradient(nn.ReflectionPad2d(2), _image(d)),
    "grid_sample": lambda d: _gradient(
        lambda x: functional.grid_sample(x, _grid(d), align_corners=False), _image(d)
    ),
    "nll_loss2d": lambda d: functional.nll_loss(
        _image(d).expand(1, 3, 16, 16), torch.ones(1, 16, 16, dtype=torch.int64, device=d)
    ),
    "histc": lambda d: torch.histc(_image(d), 10),
    "bincount": lambda d: torch.bincount(
        torch.arange(60, device=d) % 7, torch.arange(60.0, device=d)
    ),
    "median": lambda d: torch.median(_image(d).view(16, 16), 1).values,
    "put_ adding up": lambda d: torch.zeros(4, device=d).put_(
        torch.tensor([0, 0, 3], device=d), torch.ones(3, device=d), accumulate=True
    ),
    "max_unpool2d": lambda d: _gradient(
        lambda x: functional.max_unpool2d(*functional.max_pool2d(x, 2, return_indices=True), 2),
        _image(d),
    ),
}


def _deciding(value: Any) -> torchrepro.Applied:
    flags = {"torch": {"deterministic_algorithms": "error"}}
    return torchrepro.apply({"backends": flags, "device": {"fallback": value}})


def _refused(name: str) -> bool:
    """Whether this torch refuses the op on a GPU: which it does, changes with the version."""
    with torchrepro.apply({"backends": {"torch": {"deterministic_algorithms": "error"}}}):
        try:
            CALLS[name]("cuda")
        except RuntimeError as error:
            return "does not have a deterministic implementation" in str(error)
    return False


@pytest.mark.parametrize("name", CALLS)
def test_what_a_gpu_refuses_goes_on_and_gives_the_cpus_result(name: str) -> None:
    """An op that raises on the GPU runs, repeats, stays on the GPU, and is counted."""
    refused = _refused(name)
    with _deciding("cpu"):
        first, second = CALLS[name]("cuda"), CALLS[name]("cuda")
        counted = [effect for effect in effects() if effect.policy == "device.fallback"]
        expected = CALLS[name]("cpu")

    assert first.device.type == "cuda"
    assert torch.equal(first, second)
    torch.testing.assert_close(first.cpu(), expected)
    assert bool(counted) == refused


def test_the_table_is_used_on_a_gpu() -> None:
    """Some op of these is refused: else the law above says nothing."""
    assert any(map(_refused, CALLS))


def test_error_advises_on_a_gpu() -> None:
    """The text of a GPU's kernel is recognised, and advice follows it."""
    name = next(filter(_refused, CALLS))
    with _deciding("error"), pytest.raises(RuntimeError, match="torchrepro: aten::"):
        CALLS[name]("cuda")
