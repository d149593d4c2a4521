"""`unseen_kernels` lists custom ops and Triton kernels, which may ignore the flag of torch."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import torchrepro
from torchrepro.policies.deterministic_ops import unseen_kernels
from torchrepro.reporting.report import announce_effects

OF_TORCH = (  # modules of torch that register ops when they are imported
    "torch._inductor.compile_fx",
    "torch.ao.quantization.fx._decomposed",
    "torch.distributed._functional_collectives",
    "torch.distributed._symmetric_memory",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.experimental",
    "torch.export",
    "torch.nn.attention.flex_attention",
    "torch.nn.attention.varlen",
    "torch.onnx.ops",
    "torch.sparse",
)


def _answer(code: str) -> str:
    end = "from torchrepro.policies import deterministic_ops as u; print(u.unseen_kernels())"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{code}\n{end}"],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_no_op_of_torch_is_a_custom_op() -> None:
    """Whichever modules of torch are imported, none of its ops counts as custom.

    Without torch, the list is empty.
    """
    there = []
    for name in OF_TORCH:
        try:
            importlib.import_module(name)
        except ImportError:
            continue  # another torch has it
        there.append(name)

    assert _answer("") == "()"
    assert len(there) > len(OF_TORCH) // 2
    assert _answer(f"import {', '.join(there)}") == "()"


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    """Define the ops of a package during a test."""
    library = torch.library.Library("torchrepro_unseen", "DEF")
    yield library
    library._destroy()


def test_few_ops_are_named_and_many_are_counted(library: torch.library.Library) -> None:
    """Up to three ops of a package are listed by name; more are counted."""
    before = unseen_kernels()
    library.define("one(Tensor x) -> Tensor")
    library.define("one.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
    named = set(unseen_kernels()) - set(before)
    for name in ("two", "three", "four"):
        library.define(f"{name}(Tensor x) -> Tensor")
    counted = set(unseen_kernels()) - set(before)

    assert named == {"torchrepro_unseen::one"}
    assert counted == {"torchrepro_unseen: 4 custom ops"}


KERNELS = """
import triton

@triton.jit
def add(x):
    pass

same = add
"""


def test_triton_kernels_of_a_program_are_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Triton kernel is listed by module and function; kernels of Triton itself are not."""
    pytest.importorskip("triton", reason="no triton in this environment")
    (tmp_path / "kernels_of_a_test.py").write_text(KERNELS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    before = unseen_kernels()
    importlib.import_module("kernels_of_a_test")
    try:
        found = set(unseen_kernels()) - set(before)
    finally:
        del sys.modules["kernels_of_a_test"]

    assert found == {"kernels_of_a_test.add (Triton)"}


def test_custom_ops_alone_do_not_count_as_effects_of_policies(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Custom ops alone add one line to the report, and no effect of a policy."""
    announce_effects(replace(torchrepro.plan("seed-only").report, unseen=("mylab::foo",)))

    assert capsys.readouterr().err == (
        "torchrepro: torch's deterministic flag does not cover: mylab::foo\n"
    )
