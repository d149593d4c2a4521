"""A compiled program computes what it computes without torch.compile, or the region is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torchrepro.relations.relation import relate

pytestmark = pytest.mark.usefixtures("own_temporary")

PROGRAM = """
import torch
torch._inductor.config.compile_threads = 1
torch._inductor.config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = False
{before}
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.{middle})
net.to(torch.{dtype})
model = {compiled}
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(2):
    loss = model(torch.randn(16, 4, dtype=torch.{dtype})).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
WHOLE = "torch.compile(net)  # here"
MISCOMPILED = """import torch._inductor.lowering as of
of.lowerings[torch.ops.aten.tanh.default] = of.lowerings[torch.ops.aten.sigmoid.default]"""
FUNCTION = """@torch.compile
def doubled(x):
    return x + x
"""
PARTS = "lambda x: doubled(net[1](net[0](x))); net[1].compile()"


def _program(
    dtype: str, compiled: str = WHOLE, before: str = "", middle: str = "Tanh()"
) -> tuple[list[str], int]:
    text = PROGRAM.format(dtype=dtype, compiled=compiled, before=before, middle=middle)
    Path("train.py").write_text(text)
    lines = text.splitlines()
    here = next((number for number, line in enumerate(lines, 1) if "# here" in line), 0)
    return [sys.executable, "train.py"], here


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("dtype", "middle", "compiled", "said"),
    [
        ("float64", "Dropout(0.5)", PARTS, "bit for bit"),
        ("bfloat16", "Tanh(), torch.nn.Linear(8, 1)", WHOLE, "which bfloat16 earns"),
    ],
)
def test_a_program_that_compiles_well_agrees(
    dtype: str, middle: str, compiled: str, said: str
) -> None:
    """In bits, dropout included, or within the tolerance that the dtype earns, which is said."""
    command, _ = _program(dtype, compiled, FUNCTION, middle)

    found = relate("compile", None, command)

    assert found.status == 0
    assert said in found.sides[0].said


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_miscompiled_module_is_named_within_its_region() -> None:
    """The region that differs is named with its line, then the one of its modules that does."""
    command, here = _program("float32", before=MISCOMPILED)

    found = relate("compile", None, command)

    first = found.verdict.first
    assert found.status == 1
    assert (first.module, first.step, first.phase) == ("Sequential.1", 0, "forward")
    assert first.source.endswith(f"train.py:{here}")
