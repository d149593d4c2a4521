"""Policies leave nothing behind, and load nothing before their first use."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.compiler.config
from torch.nn.modules import module
from torch.optim import optimizer

import torchrepro
from torchrepro.policies.interpose import interposed

POLICIES: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": "zero"},
    "rng": {"device": {"rng": "host"}},
    "fallback": {
        "device": {"fallback": "cpu"},
        "backends": {"torch": {"deterministic_algorithms": "error"}},
    },
    "modules": {"device": {"modules": {"0": "cpu"}}},
}


def _dispatcher() -> dict[str, str]:
    """Return the hooks in front of the dispatcher of torch, and the interposed ops."""
    kernels = torch.ops.aten.dropout.default.py_kernels
    hooks = module._global_forward_pre_hooks, optimizer._global_optimizer_pre_hooks
    return {
        "decompositions": str({str(key): kernel.__name__ for key, kernel in kernels.items()}),
        "hooks": str([*map(len, hooks)]),
        "finders": str([type(finder).__name__ for finder in sys.meta_path]),
        "cache tag": torch.compiler.config.cache_key_tag,
        "interposed": str(tuple(interposed)),
    }


@pytest.mark.parametrize("order", list(itertools.permutations(POLICIES, 2)), ids="-".join)
def test_policies_nest_in_any_order(order: tuple[str, str]) -> None:
    """Each undo restores the state before: decompositions, hooks, finders, tags and ops."""
    outer, inner = (POLICIES[name] for name in order)
    before = _dispatcher()
    with torchrepro.apply(outer):
        between = _dispatcher()
        with torchrepro.apply(inner):
            assert _dispatcher() != between != before
        assert _dispatcher() == between

    assert _dispatcher() == before


@pytest.mark.parametrize("inner", ["zero", "keep"])
def test_an_inner_value_of_dropout_applies_until_its_end(inner: str) -> None:
    """A second `zero` changes nothing; `keep` inside of `zero` drops, and its undo zeroes again."""
    x = torch.ones(200)
    with torchrepro.apply(POLICIES["dropout"]):
        with torchrepro.apply({"dropout": inner}):
            assert (torch.nn.functional.dropout(x) == 1).all() == (inner == "zero")
        assert (torch.nn.functional.dropout(x) == 1).all()

    assert (torch.nn.functional.dropout(x) == 0).any()


def test_a_profile_without_policies_loads_none(
    fork_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """Modules of policies are imported only for a profile that uses one."""
    code = (
        "import json, sys, torchrepro\n"
        "torchrepro.apply({'dropout': 'keep', 'device': {'rng': 'native'}, 'seed': 1})\n"
        "print(json.dumps([name for name in sys.modules if name.startswith('torchrepro.poli')]))"
    )
    loaded = json.loads(fork_python("-c", code).stdout)

    assert "torchrepro.policies.policy" in loaded
    assert set(loaded) <= {"torchrepro.policies", "torchrepro.policies.policy"}


def test_a_report_counts_the_effects_of_its_policies() -> None:
    """Calls are counted while the profile is active, and stay in the report, also as JSON.

    The random numbers are the same as without the policy.
    """

    def drawn() -> list[torch.Tensor]:
        torch.manual_seed(5)
        return [torch.rand(2) for _ in range(3)]

    before = drawn()
    with torchrepro.apply({"dropout": "zero"}) as applied:
        inside = drawn()
    after = drawn()
    (effect,) = applied.report.effects
    again = json.loads(json.dumps(applied.report.to_json()))["effects"]

    assert all(map(torch.equal, before, inside))
    assert all(map(torch.equal, before, after))
    assert (effect.policy, effect.subject, effect.calls) == ("dropout", "aten::uniform_", 3)
    assert effect.where.startswith(__name__)
    assert again == [effect.to_json()]
    assert "drew random numbers" in str(applied.report)


def test_a_scope_reports_its_own_effects() -> None:
    """An inner profile reports the effects in its scope, an outer one all effects."""
    with torchrepro.apply({"dropout": "zero"}) as outer:
        torch.rand(1)
        with torchrepro.apply({"dropout": "keep"}) as kept:
            torch.rand(1)
        with torchrepro.apply({"dropout": "zero"}) as zeroed:
            torch.rand(1)
        torch.rand(1)
    with torchrepro.apply({"dropout": "keep"}) as later:
        pass

    drawn = [sum(e.calls for e in one.report.effects) for one in (outer, kept, zeroed, later)]
    assert drawn == [3, 0, 1, 0]


def test_ops_that_draw_nothing_are_not_counted() -> None:
    """Attention and recurrent layers without dropout, and zeroed dropout, are not random ops."""
    x = torch.ones(1, 2, 3, 4)
    layer = torch.nn.LSTM(4, 4, num_layers=2, dropout=0.5)
    with torchrepro.apply({"dropout": "zero"}) as applied:
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
        torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        torch.native_dropout(x, 0.5, True)
        torch.nn.functional.rrelu(x, training=True)
        with torch.inference_mode():
            torch.nn.functional.dropout(x)
        layer(x[0])

    assert applied.report.effects == ()


@pytest.mark.parametrize("name", [None, "", "of.a.library"])
def test_a_draw_from_generated_code_is_counted(name: str | None) -> None:
    """Code without a module draws as before, and its draws count for its caller."""
    with torchrepro.apply({"dropout": "zero"}) as applied:
        exec("import torch\ntorch.rand(2)", {"__name__": name})
    (effect,) = applied.report.effects

    assert effect.where.startswith(f"{name}." if name else __name__)
