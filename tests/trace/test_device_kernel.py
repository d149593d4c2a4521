"""The kernel for devices: its sums are those of torch's ops, and it compiles for GPUs."""

import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("triton", reason="no Triton in this environment")

CHECK = """
import os
os.environ["TRITON_INTERPRET"] = "1"

import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from torchrepro.trace import device_kernel
from torchrepro.trace.device_fingerprint import WIDE, _rows, sums, sums_by_kernel, sums_of_batch

ROW, MOST = 8 * device_kernel.ROW.value, 8 * device_kernel.WORDS
DTYPES = [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.complex128]
edges = some.sampled_from([1, 7, 8, 9, ROW - 1, ROW, ROW + 1, MOST - 8, MOST, MOST + 1, 3 * MOST])


@settings(max_examples=25, deadline=None)
@given(some.lists(
    some.tuples(edges | some.integers(1, 2000), some.sampled_from(DTYPES), some.integers(0, 9)),
    min_size=1, max_size=5,
))
def law(drawn):
    tensors = []
    for size, dtype, offset in drawn:
        count = -(-size // dtype.itemsize)
        memory = torch.randint(0, 2, (offset + count, dtype.itemsize), dtype=torch.uint8)
        tensors.append(memory.view(-1).view(dtype)[offset:])
    expected = [sums(iter([tensor]), WIDE).numpy().tobytes() for tensor in tensors]
    assert _rows(sums_by_kernel(device_kernel, tensors, WIDE).numpy()) == expected
    assert _rows(sums_of_batch(tensors, WIDE).numpy()) == expected


law()
print("equal")
"""


def test_the_kernel_has_the_sums_of_the_ops_of_torch() -> None:
    """For any dtypes, lengths and offsets, one launch has the sums of each tensor alone.

    Triton's interpreter runs the kernel on the host.
    """
    done = subprocess.run(
        [sys.executable, "-c", CHECK], capture_output=True, text=True, timeout=300, check=False
    )

    assert done.stdout.endswith("equal\n"), done.stderr


@pytest.mark.parametrize("capability", [75, 80, 90])
def test_the_kernel_compiles_without_a_gpu_or_a_compiler_of_c(capability: int) -> None:
    """Triton compiles the kernel to the instructions of a GPU, with two sums of 64 bits."""
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from torchrepro.trace.device_fingerprint import WIDE
    from torchrepro.trace.device_kernel import add_up

    numbers = (WIDE.step, *WIDE.multipliers, *WIDE.shifts)
    constants = dict(zip(add_up.arg_names[5:], numbers, strict=True))
    types = {"table": "*i64", "tensors": "i32", "programs": "i32", "keys": "*i64", "sums": "*i64"}
    types |= dict.fromkeys(constants, "constexpr")
    source: Any = ASTSource(add_up, types, constants)  # their name depends on the version of Triton

    kernel = compiled(source, target=GPUTarget("cuda", capability, 32))

    assert kernel.asm["ptx"].count("atom.global.gpu.relaxed.add.u64") == 2


def _launch_hooks() -> list[Any]:
    """Return the functions that Triton calls before a launch: at most one before Triton 3.4."""
    from triton.compiler import CompiledKernel

    if hasattr(CompiledKernel, "launch_enter_hook"):
        return [*filter(None, [CompiledKernel.launch_enter_hook])]
    from triton import knobs

    return [*knobs.runtime.launch_enter_hook.calls]


def _set_launch_hook(changed: pytest.MonkeyPatch, hook: Any) -> None:
    from triton.compiler import CompiledKernel

    if hasattr(CompiledKernel, "launch_enter_hook"):
        changed.setattr(CompiledKernel, "launch_enter_hook", hook)
    else:
        from triton import knobs

        changed.setattr(knobs.runtime.launch_enter_hook, "calls", [hook])


def _launch(kernel: Any) -> None:
    for hook in _launch_hooks():
        hook(kernel)


def test_a_kernel_of_the_program_is_seen_before_it_runs() -> None:
    """While ops are recorded, Triton calls the recording before each launch; afterwards not.

    A hook of the program is called as well, and stays.
    """
    from torchrepro.trace.hooks import before_unrecorded_writes

    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as changed:
        _set_launch_hook(changed, seen.append)
        before = _launch_hooks()
        with ExitStack() as undo:
            before_unrecorded_writes(undo, lambda: seen.append("recorded"))
            _launch("within")
        assert _launch_hooks() == before
        _launch("after")

    assert sorted(seen) == ["after", "recorded", "within"]
    with ExitStack() as undo:
        before_unrecorded_writes(undo, lambda: seen.append("recorded"))
        _launch("without one of the program")
    _launch("after")

    assert sorted(seen) == ["after", "recorded", "recorded", "within"]
