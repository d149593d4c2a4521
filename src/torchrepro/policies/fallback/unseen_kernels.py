"""Kernels that torch's deterministic flag cannot see: custom ops and Triton kernels.

The flag is a question that a kernel's author asks and answers
(https://docs.pytorch.org/docs/stable/notes/randomness.html): an op from another package may not
ask it, and a Triton kernel cannot.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from torchrepro.policies.interposed import op_names

if TYPE_CHECKING:
    from collections.abc import Iterator

FEW = 3  # ops of one package that are named one by one

TORCHS_OWN = frozenset(
    {
        *("_", "_c10d_functional", "_c10d_functional_autograd", "_caffe2", "_dtensor", "_native"),
        *("_inductor_debug", "_inductor_test", "_quantized", "_test", "_torch_testing", "ao"),
        *("aten", "bucketing", "c10d", "c10d_functional", "cplib", "debug_mode_ops"),
        *("debugprims", "device_mesh", "export", "flex_lib", "fsdp", "inductor"),
        *("inductor_prims", "mkl", "mkldnn", "mkldnn_prepacked", "onednn", "onnx"),
        *("onnx_symbolic", "pippy", "prepacked", "prim", "prims", "profiler", "quantization"),
        *("quantized", "quantized_decomposed", "rngprims", "rpc", "semi_structured", "sparse"),
        *("static_runtime", "streams", "symm_mem", "torch_attn", "xnnpack"),
    }
)
"""Namespaces of the ops that come with torch itself, in whichever of its modules."""

_KERNELS = (("triton.runtime.jit", "JITFunction"), ("triton.runtime.autotuner", "Autotuner"))


def unseen_kernels() -> tuple[str, ...]:
    """Return the custom ops and the Triton kernels in this process, packages of many as a count.

    Imports nothing: what is not loaded yet is not in the answer.
    """
    return (*sorted(_custom_ops()), *sorted(_triton_kernels()))


def _custom_ops() -> Iterator[str]:
    if "torch" not in sys.modules:
        return
    ops: dict[str, set[str]] = defaultdict(set)
    for name in op_names():
        namespace, _, rest = name.partition("::")
        if namespace not in TORCHS_OWN:
            ops[namespace].add(rest.partition(".")[0])
    for namespace, names in ops.items():
        if len(names) > FEW:
            yield f"{namespace}: {len(names)} custom ops"
        else:
            yield from (f"{namespace}::{name}" for name in names)


def _triton_kernels() -> Iterator[str]:
    kinds = tuple(filter(None, (_loaded(*kernel) for kernel in _KERNELS)))
    if not kinds:
        return
    named = set()
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in ("triton", "torch", "torchrepro"):
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if isinstance(value, kinds) and id(value) not in named:
                named.add(id(value))
                yield f"{module_name}.{name} (Triton)"


def _loaded(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)
