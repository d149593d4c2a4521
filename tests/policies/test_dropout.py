"""`dropout: zero` makes the dropout of torch the identity, for every caller.

Every row names one entry point of a dropout of torch, and the same computation without it.
test_dropout_captured.py tests captured code, test_dropout_masks.py the masks of libraries.
"""

import copy
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional
from torch.nn.functional import dropout as imported_before
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import torchrepro

ATEN = torch.ops.aten
CALLS = 4  # TorchScript gives a function its final form after two
Function = Callable[[torch.Tensor], torch.Tensor]

_numbers = torch.Generator().manual_seed(5)
X = torch.randn(4, 6, 8, generator=_numbers)  # as channels, a sequence, or heads
SLOPE = (1 / 8 + 1 / 3) / 2


def _copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def _leaky(x: torch.Tensor) -> torch.Tensor:
    return functional.leaky_relu(x, SLOPE)


def _attention(x: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(x, x, x)


def _plane(x: torch.Tensor) -> torch.Tensor:
    return x.view(4, 6, 4, 2)


def _cube(x: torch.Tensor) -> torch.Tensor:
    return x.view(4, 6, 2, 2, 2)


@cache
def _made(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return make()


def _undropped(module: nn.Module) -> nn.Module:
    twin = copy.deepcopy(module)
    for part in twin.modules():
        for name in ("p", "dropout"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    return twin


def _module(make: Callable[[], nn.Module], use: Callable[..., Any] = nn.Module.__call__) -> Any:
    """Return the row of a module, with a second module that never drops."""
    return lambda x: use(_made(make), x), lambda x: use(_undropped(_made(make)), x)


def _first(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)[0]


def _packed(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(pack_padded_sequence(x, [4, 4, 3, 2, 2, 1]))[0].data


def _self_attention(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x, x, x, need_weights=False)[0]


def _weights(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x, x, x, need_weights=True, average_attn_weights=False)[1]


def _recurrent(kind: str, **more: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(nn, kind)(8, 8, num_layers=3, dropout=0.5, **more)


LSTM, GRU = _recurrent("LSTM"), _recurrent("GRU")
TANH, RELU = _recurrent("RNN"), _recurrent("RNN", nonlinearity="relu")


def _in_place(function: Callable[..., Any], *args: Any) -> Function:
    def call(x: torch.Tensor) -> torch.Tensor:
        written = x.clone()
        function(written, *args)
        return written

    return call


MULTIHEAD = lambda: nn.MultiheadAttention(8, 2, dropout=0.5)  # noqa: E731 - a name for the rows
NOISE = torch.zeros_like

NAMES = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
OWNERS = {"torch": (torch, NAMES), "torch._VF": (torch._VF, NAMES[:1]), "aten": (ATEN, NAMES)}
BY_OP: dict[str, Function] = {
    f"{owner}.{name}{end}": make(getattr(functions, f"{name}{end}"))
    for owner, (functions, names) in OWNERS.items()
    for name in names
    for end, make in (
        ("", lambda function: lambda x: function(x, 0.5, True)),
        ("_", lambda function: _in_place(function, 0.5, True)),
    )
}

IDENTITY: dict[str, Function] = {
    "F.dropout": functional.dropout,
    "F.dropout in place": _in_place(functional.dropout, 0.5, True, True),
    "imported before": imported_before,
    "nn.Dropout": nn.Dropout(0.5),
    "nn.Dropout in place": _in_place(nn.Dropout(0.5, inplace=True)),
    "nn.Dropout1d": nn.Dropout1d(0.5),
    "nn.Dropout2d": lambda x: nn.Dropout2d(0.5)(_plane(x)),
    "nn.Dropout3d": lambda x: nn.Dropout3d(0.5)(_cube(x)),
    "nn.AlphaDropout": nn.AlphaDropout(0.5),
    "nn.FeatureAlphaDropout": nn.FeatureAlphaDropout(0.5),
    "torch.native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "torch.native_dropout without train": lambda x: torch.native_dropout(x, 0.5, None)[0],
    **BY_OP,
    "aten.native_dropout": lambda x: ATEN.native_dropout(x, 0.5, True)[0],
    "through a checkpoint": lambda x: checkpoint(functional.dropout, x, use_reentrant=False),
    "through a reentrant checkpoint": lambda x: checkpoint(
        functional.dropout, x, use_reentrant=True
    ),
    "vmap, another mask each": vmap(functional.dropout, randomness="different"),
    "vmap, one mask": vmap(functional.dropout, randomness="same"),
    "vmap of alpha_dropout": vmap(
        lambda row: functional.alpha_dropout(row, training=True), randomness="different"
    ),
    "vmap of native_dropout": vmap(
        lambda row: torch.native_dropout(row, 0.5, True)[0], randomness="different"
    ),
    "vmap of dropout in place": vmap(
        lambda row: functional.dropout(row.clone(), inplace=True), randomness="different"
    ),
    "torch.func.jvp": lambda x: jvp(functional.dropout, (x,), (torch.ones_like(x),))[0],
    "functional_call": lambda x: functional_call(nn.Dropout(0.5), {}, (x,)),
    "a nested tensor": lambda x: (
        functional.dropout(torch.nested.as_nested_tensor([*x.flatten(1)]))
        .to_padded_tensor(0.0)
        .view(4, 6, 8)
    ),
    "a channels-last tensor": lambda x: functional.dropout(
        _plane(x).contiguous(memory_format=torch.channels_last)
    ),
}
"""Rows that are the identity without dropout."""

OTHERS: dict[str, tuple[Function, Function]] = {
    "torch.func.grad": (
        grad(lambda y: functional.dropout(y).pow(2).sum()),
        lambda x: 2 * x,
    ),
    "bfloat16": (
        lambda x: functional.dropout(x.bfloat16()).float(),
        lambda x: x.bfloat16().float(),
    ),
    "autocast": (
        lambda x: _autocast(lambda y: functional.dropout(y @ y.mT), x),
        lambda x: _autocast(lambda y: y @ y.mT, x),
    ),
    "F.rrelu": (lambda x: functional.rrelu(x, training=True), _leaky),
    "nn.RReLU": (nn.RReLU(), _leaky),
    "nn.RReLU in place": (_in_place(nn.RReLU(inplace=True)), _leaky),
    "aten.rrelu_with_noise": (
        lambda x: ATEN.rrelu_with_noise(x, NOISE(x), 1 / 8, 1 / 3, True),
        _leaky,
    ),
    "aten.rrelu_with_noise_": (
        lambda x: ATEN.rrelu_with_noise_(x.clone(), NOISE(x), 1 / 8, 1 / 3, True),
        _leaky,
    ),
    "F.scaled_dot_product_attention": (
        lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        _attention,
    ),
    "F.scaled_dot_product_attention, causal": (
        lambda x: functional.scaled_dot_product_attention(x, x, x, None, 0.5, True),
        lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True),
    ),
    "F.scaled_dot_product_attention, 4 dimensions": (
        lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
        lambda x: _attention(x[None]),
    ),
    "aten._scaled_dot_product_attention_math": (
        lambda x: ATEN._scaled_dot_product_attention_math(x, x, x, dropout_p=0.5)[0],
        _attention,
    ),
    "nn.MultiheadAttention": _module(MULTIHEAD, _self_attention),
    "weights of nn.MultiheadAttention": _module(MULTIHEAD, _weights),
    "nn.LSTM": _module(LSTM, _first),
    "nn.LSTM with projections": _module(_recurrent("LSTM", proj_size=4), _first),
    "nn.LSTM, packed": _module(LSTM, _packed),
    "nn.GRU": _module(GRU, _first),
    "nn.RNN": _module(TANH, _first),
    "nn.RNN with relu": _module(RELU, _first),
    "nn.TransformerEncoderLayer": _module(lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.5)),
}

ROWS = {**{name: (call, _copy) for name, call in IDENTITY.items()}, **OTHERS}


def _autocast(function: Function, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return function(x).float()


def seeded(call: Function) -> list[torch.Tensor]:
    """Return the results of `call` for a few seeds."""
    results = []
    for seed in range(4):
        torch.manual_seed(seed)
        results.append(call(X.clone()).detach())
    return results


def drops(call: Function) -> bool:
    """Return whether the result of `call` depends on the seed."""
    first, *others = seeded(call)
    return not all(torch.equal(first, other) for other in others)


def value_and_gradient(call: Function) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of `call` for X, and the gradient of a weighted sum of it."""
    x = X.clone().requires_grad_()
    result = call(x)
    weights = torch.arange(result.numel()).reshape(result.shape) / math.sqrt(result.numel())
    (result * weights).sum().backward()
    return result.detach().reshape(-1), x.grad


def same(left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> bool:
    """Return whether values and gradients are equal, up to rounding of other attention kernels."""
    return all(
        torch.allclose(one, other, atol=1e-5) for one, other in zip(left, right, strict=True)
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ROWS)
def test_an_entry_point_drops_nothing_while_the_policy_is_active(name: str) -> None:
    """Under the policy, values and gradients equal those without dropout; before it, it drops.

    After it, a seed produces the same masks as before.
    """
    call, without = ROWS[name]
    expected, before = value_and_gradient(without), seeded(call)

    assert drops(call)
    with torchrepro.apply({"dropout": "zero"}):
        assert not drops(call)
        assert all(same(expected, value_and_gradient(call)) for _ in range(CALLS))
        with torch.inference_mode():
            assert not drops(call)
    assert all(map(torch.equal, before, seeded(call)))


def test_gradients_can_be_differentiated_again() -> None:
    """Double backward through zeroed dropout, rrelu and `native_dropout` is exact."""
    x = torch.linspace(-1, 1, 12, dtype=torch.float64, requires_grad=True)

    def through(values: torch.Tensor) -> torch.Tensor:
        kept = torch.native_dropout(functional.dropout(values.sin()), 0.5, True)[0]
        return functional.rrelu(kept, training=True) ** 3

    with torchrepro.apply({"dropout": "zero"}):
        assert torch.autograd.gradcheck(through, x)
        assert torch.autograd.gradgradcheck(through, x)


def test_a_probability_out_of_range_is_still_refused() -> None:
    """Under the policy, an illegal probability raises as without it."""
    with torchrepro.apply({"dropout": "zero"}), pytest.raises((ValueError, RuntimeError)):
        torch.dropout(X, 1.5, train=True)


def test_evaluation_costs_and_changes_nothing() -> None:
    """In evaluation the input object itself is returned, as by the dropout of torch."""
    x = X.clone()
    with torchrepro.apply({"dropout": "zero"}):
        assert functional.dropout(x, 0.5, training=False).data_ptr() == x.data_ptr()
        assert nn.Dropout().eval()(x).data_ptr() == x.data_ptr()


def test_the_result_is_not_an_alias_of_the_input() -> None:
    """Writing to the result of a zeroed dropout does not change its input."""
    x = X.clone()
    with torchrepro.apply({"dropout": "zero"}):
        functional.dropout(x).add_(1)

    assert torch.equal(X, x)


def test_modules_stay_in_training_mode() -> None:
    """Zeroed dropout does not switch a model to evaluation: batch norm keeps updating."""
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5))
    with torchrepro.apply({"dropout": "zero"}):
        model(torch.randn(64, 8))

    assert model.training
    assert model[0].num_batches_tracked == 1
