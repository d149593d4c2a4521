"""A program computes the same with and without torch.compile, or the region is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torchrepro.knobs.torch_state import inductor_reads
from torchrepro.verification.relations.relation import relate
from torchrepro.verification.runner import RunRequest

pytestmark = pytest.mark.usefixtures("own_temporary")

PROGRAM = """
import torch
torch._inductor.config.compile_threads = 1
torch._inductor.config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = False
{before}
import numpy; numpy.random.seed(0); torch.manual_seed(0)
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
TORCH = "torch._inductor.config.fallback_random"
NUMPY = "torch._dynamo.config.use_numpy_random_stream"
NUMPY_DRAW = "torch.from_numpy(numpy.random.randn(1))"
NOISY = """
import numpy
@torch.compile
def noisy(x{given}):
    return x + {noise}
"""
GIVEN = NOISY.format(given=", noise", noise="noise")
DRAWING = NOISY.format(given="", noise=NUMPY_DRAW)
RANDOM = NOISY.format(given="", noise="torch.rand_like(x)")
BOTH = NOISY.format(given="", noise=f"torch.rand_like(x) + {NUMPY_DRAW}")
ASKING = NOISY.format(given="", noise="float(torch.compiler.is_compiling())")
FUSED = """@torch.compile
def fused(x):
    return (x + x * x) * x
"""
STRICT_ALONE = """
options = torch._inductor.config
options.emulate_precision_casts = options.numerics == "strict"
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
    ("dtype", "middle", "compiled", "before", "said"),
    [
        ("float64", "ReLU()", PARTS, FUNCTION, "bit for bit"),
        ("bfloat16", "Tanh(), torch.nn.Linear(8, 1)", WHOLE, "", "the default for bfloat16"),
        ("float64", "Dropout(0.5)", WHOLE, f"{TORCH} = True", "the default for float64"),
        ("float64", "Dropout(0.5)", "lambda x: net[1](doubled(net[0](x)))", FUNCTION, "bit for"),
        ("float64", "Tanh()", f"lambda x: noisy(net(x), {NUMPY_DRAW})", GIVEN, "bit for bit"),
        ("float64", "Tanh()", "lambda x: noisy(net(x))", f"{NUMPY} = True{DRAWING}", "bit for bit"),
    ],
    ids=["parts", "bfloat16", "option", "dropout outside", "numpy outside", "numpy option"],
)
def test_a_program_that_compiles_well_agrees(
    dtype: str, middle: str, compiled: str, before: str, said: str
) -> None:
    """Bit for bit or within the default tolerance of the dtype, which is named."""
    command, _ = _program(dtype, compiled, before, middle)

    related = relate("compile", RunRequest(command))

    assert related.status == 0
    (variant,) = related.variants
    assert variant.name == "as it is"
    assert said in variant.note


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("middle", "compiled", "before", "options"),
    [
        ("Dropout(0.5)", WHOLE, "", [TORCH]),
        ("Tanh()", "lambda x: noisy(net(x))  # here", RANDOM, [TORCH]),
        ("Tanh()", "lambda x: noisy(net(x))", DRAWING, [NUMPY]),
        ("Tanh()", "lambda x: noisy(net(x))", BOTH, [TORCH, NUMPY]),
    ],
    ids=["dropout", "rand", "numpy", "both"],
)
def test_random_numbers_that_differ_from_eager_are_named(
    middle: str, compiled: str, before: str, options: list[str]
) -> None:
    """The program differs as it is, and agrees with eager's random numbers; the lines are named."""
    command, _ = _program("float32", compiled, before, middle)

    related = relate("compile", RunRequest(command))

    assert related.status == 1
    assert [(variant.name, variant.status) for variant in related.variants] == [
        ("with eager's random numbers", 0),
        ("as it is", 1),
    ]
    lines = "; ".join(f"{each} = True" for each in options)
    assert related.verdict.advice.cause.endswith(f"To compute as eager code does: {lines}")
    assert [variant["same"] for variant in related.to_json()["sides"]] == [True, False]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("forced", [False, True], ids=["by one", "by another"])
def test_the_option_that_rounds_as_eager_code_is_found(*, forced: bool) -> None:
    """With it a bfloat16 program agrees bit for bit; without it the program differs."""
    before = FUSED
    if forced:
        if not inductor_reads("TORCHINDUCTOR_NUMERICS"):
            pytest.skip("this torch has no strict numerics")
        before += STRICT_ALONE
    command, _ = _program("bfloat16", "lambda x: fused(net(x))", before)

    related = relate("compile", RunRequest(command, rtol=0.0, atol=0.0))

    assert [(variant.name, variant.status) for variant in related.variants] == [
        ("with eager's rounding", 0),
        ("as it is", 1),
    ]
    option = "numerics = 'strict'" if forced else "emulate_precision_casts = True"
    assert related.verdict.advice.cause.endswith(f"does: torch._inductor.config.{option}")


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_the_proposed_line_gives_the_random_numbers_of_eager_code() -> None:
    """The program with the proposed edit agrees."""
    command, here = _program("float32", middle="Dropout(0.5)")
    edit = relate("compile", RunRequest(command)).verdict.advice.edit
    lines = Path("train.py").read_text().splitlines()
    assert edit.before == lines[here - 1]

    Path("train.py").write_text("\n".join([*lines[: here - 1], edit.after, *lines[here:]]))

    assert relate("compile", RunRequest(command)).status == 0


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_code_that_checks_is_compiling_is_not_blamed_on_random_numbers() -> None:
    """No option is blamed for a difference that remains with eager's random numbers."""
    command, _ = _program("float32", "lambda x: noisy(net(x))", ASKING)

    related = relate("compile", RunRequest(command))

    assert [variant.status for variant in related.variants] == [1, 1]
    assert related.deciding.name == "with eager's random numbers"
    assert related.verdict.first.module == "noisy"
    assert related.verdict.advice is None


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_miscompiled_module_is_named_within_its_region() -> None:
    """The region that differs is named with its line, then the one of its modules that does."""
    command, here = _program("float32", before=MISCOMPILED)

    related = relate("compile", RunRequest(command))

    first = related.verdict.first
    assert related.status == 1
    assert (first.module, first.step, first.phase) == ("Sequential.1", 0, "forward")
    assert first.source.endswith(f"train.py:{here}")
