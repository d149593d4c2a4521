"""`dropout: zero` in captured code: scripted, traced, compiled, exported.

Every function is captured before the policy, called under it, and called again after the undo.
Another one is captured under the policy.
"""

import subprocess
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import torchrepro

from .test_dropout import CALLS, Function, X, drops, same, value_and_gradient

warnings.filterwarnings("ignore", message=".*torch.jit.*", category=DeprecationWarning)


def _functional(x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(x, 0.5, True) * 2


def _native(x: torch.Tensor) -> torch.Tensor:
    return torch.native_dropout(x, 0.5, True)[0] * 2


def _alpha(x: torch.Tensor) -> torch.Tensor:
    return functional.alpha_dropout(x, 0.5, True) * 2


def _in_place(x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(x * 2, 0.5, True, True)


def _rrelu(x: torch.Tensor) -> torch.Tensor:
    return functional.rrelu(x, training=True) * 2


def _attention(x: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


FUNCTIONS: dict[Function, Function] = {
    _functional: _double,
    _native: _double,
    _alpha: _double,
    _in_place: _double,
    _rrelu: lambda x: functional.leaky_relu(x, (1 / 8 + 1 / 3) / 2) * 2,
    _attention: lambda x: functional.scaled_dot_product_attention(x, x, x),
}
"""A function that drops, and what it computes without."""


@cache
def _net(p: float = 0.5) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Dropout(p), nn.LSTM(8, 8, num_layers=2, dropout=p))


def _traced(function: Function) -> Function:
    return torch.jit.trace(function, X, check_trace=False)


def _program(function: Function) -> torch.export.ExportedProgram:
    class Holder(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    return torch.export.export(Holder(), (X,))


def _compiled(backend: str) -> Callable[[Function], Function]:
    return lambda function: torch.compile(function, backend=backend)


CAPTURES: dict[str, Callable[[Function], Function]] = {
    "scripted": torch.jit.script,
    "traced": _traced,
    "exported": lambda function: _program(function).module(),
    "compiled, eager": _compiled("eager"),
    "compiled, aot_eager": _compiled("aot_eager"),
    "compiled, inductor": _compiled("inductor"),
}
SLOW = {"compiled, inductor", "exported"}
ROWS = [
    pytest.param(how, function, id=f"{how}: {function.__name__[1:]}", marks=marks)
    for how in CAPTURES
    for function in FUNCTIONS
    for marks in [[pytest.mark.slow] if how in SLOW else []]
]


def is_without(call: Function, without: Function) -> bool:
    """Return whether values and gradients equal those of `without` in four calls."""
    expected = value_and_gradient(without)
    return all(same(expected, value_and_gradient(call)) for _ in range(CALLS))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("how", "function"), ROWS)
def test_captured_code_drops_nothing_while_the_policy_is_active(
    how: str, function: Function
) -> None:
    """Code captured before the policy is zeroed under it, with exact gradients, and not after it.

    Code captured under the policy is zeroed too.
    """
    call, without = CAPTURES[how](function), FUNCTIONS[function]

    assert drops(call)
    with torchrepro.apply({"dropout": "zero"}):
        assert not drops(call)
        assert is_without(call, without)
        assert is_without(CAPTURES[how](function), without)
    assert drops(call)


@pytest.mark.filterwarnings("error:Dynamo does not know")
@pytest.mark.parametrize("how", ["scripted", "compiled, eager", "compiled, aot_eager"])
def test_a_captured_model_drops_nothing_while_the_policy_is_active(how: str) -> None:
    """A model with a dropout module and a recurrent one is zeroed, whenever it was captured."""
    torch.compiler.reset()  # torch 2.6 compares the backends of earlier tests, also freed ones
    captured, plain = CAPTURES[how](_net()), _net(0.0)

    def call(x: torch.Tensor) -> torch.Tensor:
        return captured(x)[0]

    assert drops(call)
    with torchrepro.apply({"dropout": "zero"}):
        assert not drops(call)
        assert is_without(call, lambda x: plain(x)[0])
    assert drops(call)


COUNTING = """
import torch, torchrepro
from torch._dynamo.utils import counters

def traced():
    torch._dynamo.reset()
    counters.clear()
    layers = torch.nn.Dropout(0.5), torch.nn.LSTM(8, 8, num_layers=2, dropout=0.5)
    torch.compile(torch.nn.Sequential(*layers), backend="eager")(torch.ones(3, 8))
    return counters["frames"]["total"]

print(traced())
with torchrepro.apply({"dropout": "zero"}):
    print(traced())
print(traced())
"""


def test_torch_compile_does_not_trace_the_policy(
    fork_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """The functions of the policy are not traced: torch 2.6 crashes after it traced them."""
    before, active_profiles, after = fork_python("-c", COUNTING).stdout.split()

    assert active_profiles == after == before


@pytest.mark.slow
def test_a_decomposed_export_is_zeroed_where_it_has_dropout_ops() -> None:
    """In core ops, `native_dropout` remains and is zeroed; a mask made of other ops is reported."""
    with_op, with_mask = (
        _program(function).run_decompositions().module() for function in (_functional, _alpha)
    )

    with torchrepro.apply({"dropout": "zero"}) as applied:
        assert not drops(with_op)
        assert not applied.report.effects
        assert drops(with_mask)
        assert {effect.subject for effect in applied.report.effects} == {"aten::bernoulli.p"}


def test_a_graph_of_ops_is_zeroed_when_it_runs() -> None:
    """A graph that make_fx recorded before the policy calls the ops of torch, which are zeroed."""
    call = make_fx(_native)(X)

    assert drops(call)
    with torchrepro.apply({"dropout": "zero"}):
        assert not drops(call)
    assert drops(call)


PROGRAM = """
import sys, torch, torchrepro
from torch._dynamo.utils import counters

@torch.compile
def f(x):
    return torch.nn.functional.dropout(x, 0.5, True) * 2

with torchrepro.apply({"dropout": sys.argv[1]}):
    x = torch.ones(64, requires_grad=True)
    f(x).sum().backward()
    hits = sum(n for name, n in counters["aot_autograd"].items() if name.endswith("cache_hit"))
    print(sorted(x.grad.unique().tolist()), hits)
"""


@pytest.mark.slow
def test_a_compile_cache_on_disk_separates_plain_and_zeroed_runs(
    tmp_path: Path, fork_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """In either order, plain and zeroed runs reuse only code compiled under the same policy."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def gradient_and_hits(dropout: str) -> tuple[str, int]:
        done = fork_python("-c", PROGRAM, dropout, env=cache)
        gradient, _, hits = done.stdout.strip().rpartition(" ")
        return gradient, int(hits)

    plain, zeroed = "[0.0, 4.0]", "[2.0]"
    ran = [gradient_and_hits(dropout) for dropout in ("keep", "zero", "keep", "zero")]

    assert [gradient for gradient, _ in ran] == [plain, zeroed, plain, zeroed]
    assert [hits > 0 for _, hits in ran] == [False, False, True, True]
