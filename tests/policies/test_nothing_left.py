"""Policies leave nothing behind, and nothing is there before the first of them."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.compiler.config

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
    """Return what comes before torch's dispatcher, and which ops policies stand in front of."""
    kernels = torch.ops.aten.dropout.default.py_kernels
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    return {
        "decompositions": str({str(key): kernel.__name__ for key, kernel in kernels.items()}),
        "hooks": str(len(hooks)),
        "finders": str([type(finder).__name__ for finder in sys.meta_path]),
        "cache tag": torch.compiler.config.cache_key_tag,
        "interposed": str(tuple(interposed)),
    }


COMPUTE = """
import hashlib, json, torch, torchrepro
from torch.nn import functional as f

def results():
    x, h = torch.linspace(-2, 2, 24).reshape(2, 3, 4), torch.linspace(-1, 1, 6)
    layer = torch.nn.LSTM(4, 4, num_layers=2, dropout=0.5)
    calls = {
        "uniform_": lambda: torch.empty(7).uniform_(),
        "rand out": lambda: torch.rand(5, out=torch.empty(5)),
        "bernoulli_": lambda: torch.empty(9).bernoulli_(0.3),
        "dropout": lambda: f.dropout(x, 0.4),
        "dropout in place": lambda: f.dropout(x.clone(), 0.4, inplace=True),
        "inference": lambda: torch.inference_mode()(lambda: f.dropout(x, 0.4))(),
        "feature dropout": lambda: f.dropout2d(x, 0.4),
        "alpha dropout": lambda: f.alpha_dropout(x, 0.4),
        "feature alpha dropout": lambda: f.feature_alpha_dropout(x, 0.4),
        "native_dropout": lambda: torch.native_dropout(x, 0.4, True)[0],
        "rrelu": lambda: f.rrelu(x, training=True),
        "vmap": lambda: torch.vmap(lambda y: f.dropout(y, 0.4), randomness="different")(x),
        "func grad": lambda: torch.func.grad(lambda y: (f.dropout(y, 0.4) * y).sum())(h),
        "recurrent": lambda: layer(x)[0],
        "attention": lambda: f.scaled_dot_product_attention(x, x, x, dropout_p=0.4),
        "put_": lambda: torch.zeros(4).put_(torch.tensor([1, 1]), torch.ones(2), accumulate=True),
        "backward": lambda: backward(f.dropout, x, 0.4),
        "backward of rrelu": lambda: backward(f.rrelu, x, 0.1, 0.3, True),
        "scripted": lambda: torch.jit.script(scripted)(x),
    }
    found = {}
    for name, call in calls.items():
        torch.manual_seed(5)
        layer.load_state_dict({k: v * 0 + 0.1 for k, v in layer.state_dict().items()})
        found[name] = hashlib.sha256(call().detach().numpy().tobytes()).hexdigest()
    return found

def scripted(x: torch.Tensor):
    return torch.dropout(x, 0.4, True)

def backward(fn, x, *args):
    x = x.clone().requires_grad_()
    fn(x, *args).square().sum().backward()
    return x.grad
"""


def test_after_the_undo_every_op_computes_what_it_did(
    tmp_path: Path, fork_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """Ops that a policy stood in front of give the bits that they gave before it."""
    code = (
        f"{COMPUTE}\nbefore = results()\n"
        f"for profile in {list(POLICIES.values())!r}:\n"
        "    with torchrepro.apply(profile):\n"
        "        inside = results()\n"
        "    after = results()\n"
        "    print(json.dumps({name: after[name] == before[name] for name in before}))\n"
        "    print(json.dumps(inside != before))"
    )
    program = tmp_path / "compute.py"  # TorchScript reads the source of what it compiles
    program.write_text(code)
    done = fork_python(program)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]

    assert answers[1] is True  # dropout: zero did something, and left nothing of it
    assert len(answers) == 2 * len(POLICIES)
    assert [name for after in answers[::2] for name, same in after.items() if not same] == []


@pytest.mark.parametrize("order", list(itertools.permutations(POLICIES, 2)), ids="-".join)
def test_policies_nest_in_any_order(order: tuple[str, str]) -> None:
    """Each is taken back to what was before it: decompositions, hooks, finders, tags and ops."""
    outer, inner = (POLICIES[name] for name in order)
    before = _dispatcher()
    with torchrepro.apply(outer):
        between = _dispatcher()
        with torchrepro.apply(inner):
            assert _dispatcher() != between != before
        assert _dispatcher() == between

    assert _dispatcher() == before


@pytest.mark.parametrize("inner", ["zero", "keep"])
def test_an_inner_value_of_dropout_holds_until_it_ends(inner: str) -> None:
    """Zeroed twice is zeroed once; kept inside of zero drops, and the undo zeroes it again."""
    x = torch.ones(200)
    with torchrepro.apply(POLICIES["dropout"]):
        with torchrepro.apply({"dropout": inner}):
            assert (torch.nn.functional.dropout(x) == 1).all() == (inner == "zero")
        assert (torch.nn.functional.dropout(x) == 1).all()

    assert (torch.nn.functional.dropout(x) == 0).any()


def test_a_profile_without_policies_loads_none() -> None:
    """What policies consist of is imported only for a profile that asks for one."""
    code = (
        "import json, sys, torchrepro\n"
        "torchrepro.apply({'dropout': 'keep', 'device': {'rng': 'native'}, 'seed': 1})\n"
        "print(json.dumps([name for name in sys.modules if name.startswith('torchrepro.poli')]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    loaded = {name.split(".")[2] for name in json.loads(done.stdout) if name.count(".") > 1}

    assert loaded <= {"policy"}
    assert "torchrepro.policies.fallback" not in done.stdout


def test_a_report_says_what_its_policies_did_then_and_afterwards() -> None:
    """Calls are counted while in force, as text and as JSON, and stay in the report."""
    with torchrepro.apply({"dropout": "zero"}) as applied:
        for _ in range(3):
            torch.rand(2)
    torch.rand(2)
    (effect,) = applied.report.effects
    again = json.loads(json.dumps(applied.report.to_json()))["effects"]

    assert (effect.policy, effect.subject, effect.calls) == ("dropout", "aten::uniform_", 3)
    assert effect.where.startswith(__name__)
    assert again == [effect.to_json()]
    assert "drew random numbers" in str(applied.report)


def test_a_scope_reports_what_happened_in_it() -> None:
    """An inner profile reports its own part, an outer one everything, whatever nests in it."""
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


def test_what_draws_nothing_is_not_said_to_draw() -> None:
    """Attention and recurrent layers without dropout, and zeroed dropout, are no random ops."""
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
def test_a_draw_from_code_of_any_kind_is_counted(name: str | None) -> None:
    """Code that belongs to no module draws as ever, and is counted under whoever called it."""
    with torchrepro.apply({"dropout": "zero"}) as applied:
        exec("import torch\ntorch.rand(2)", {"__name__": name})
    (effect,) = applied.report.effects

    assert effect.where.startswith(f"{name}." if name else __name__)
