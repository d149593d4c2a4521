"""Ops without a deterministic kernel, and deterministic implementations of some of them.

Under `torch.use_deterministic_algorithms(True)` these ops raise an error, depending on the device,
the arguments and the version of torch. The documentation of torch 2.6 and 2.13 lists most of them
(https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html). Each
remaining op has a kernel for the CPU, CUDA or XPU that calls `alertNotDeterministic`
(https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/Context.h,
https://github.com/intel/torch-xpu-ops).

Our implementations write values to indices. If several values have the same index, the last value
wins, as in a loop. torch does not specify this order
(https://docs.pytorch.org/docs/stable/generated/torch.Tensor.put_.html). A stable sort of the
indices finds the last value, so that every element is written once. The result is the same on
every device.

A kernel only raises if it checks `use_deterministic_algorithms` itself. Custom ops may not check
it, and Triton kernels cannot. `unseen_kernels` lists the custom ops and Triton kernels.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.policies.interpose import op_names

if TYPE_CHECKING:
    from torch import Tensor


class NondeterministicOp(NamedTuple):
    """One op, including all of its overloads, that has no deterministic kernel on some device."""

    name: str
    instead: str  # advice: other code that runs on the device without this policy
    documented: tuple[str, ...] = ()
    """Functions that run this op, as torch's documentation lists them. Empty if it lists none."""

    on_cpu: bool = True  # False if the CPU kernel raises too, and torchrepro has no other one


_NLL = "take log_softmax, gather the targets' entries, and average them"
_CTC = "use cuDNN's implementation: blank=0, int32 targets on the CPU, lengths of at most 256"
_BAG = "use mode='sum' or 'mean', or embedding followed by amax"
_WEIGHTS = "count without weights, or index_add the weights to a tensor of zeros"
_RESIZE = "dequantize, resize and quantize again"
_POOL = "pool with strides and sizes that divide the input (reshape and mean), or use max_pool2d"
_ADAPTIVE = "pool with a fixed kernel size (avg_pool2d, or a mean over the whole plane)"
_MAX = "use max_pool2d with a fixed kernel size"
_INTERPOLATE = "interpolate with mode='nearest', or by a matrix product with fixed weights"
_PAD = "pad with mode='constant', or gather the padded border with index_select"
_SCATTER = "use index_put with accumulate=True, or one-hot rows and a matrix product"
_COUNT = "count one dimension at a time with bincount(bucketize(x, edges))"
_WRITE = "use index_put, which writes in order"
_REDUCE = "use scatter_reduce with reduce='sum', or sort by index and reduce segment by segment"
_GRID = "interpolate by gathering neighbours with index_select and weighting them"
_UNPOOL = "use index_put on a flat plane, with indices that have no duplicates"
_SUM = "multiply by a triangular matrix of ones, or sum integers"
_MEDIAN = "sort and take the middle, or use median() without a dimension, which returns no indices"

_F = "torch.nn.functional."

OPS: tuple[NondeterministicOp, ...] = (
    NondeterministicOp("avg_pool3d_backward", _POOL, ("torch.nn.AvgPool3d",)),
    NondeterministicOp("_adaptive_avg_pool2d_backward", _ADAPTIVE, ("torch.nn.AdaptiveAvgPool2d",)),
    NondeterministicOp("_adaptive_avg_pool3d_backward", _ADAPTIVE, ("torch.nn.AdaptiveAvgPool3d",)),
    NondeterministicOp("adaptive_avg_pool3d_backward", _ADAPTIVE, ("torch.nn.AdaptiveAvgPool3d",)),
    NondeterministicOp("adaptive_max_pool2d_backward", _MAX, ("torch.nn.AdaptiveMaxPool2d",)),
    NondeterministicOp("adaptive_max_pool3d_backward", _MAX),
    NondeterministicOp("fractional_max_pool2d_backward", _MAX, ("torch.nn.FractionalMaxPool2d",)),
    NondeterministicOp("fractional_max_pool3d_backward", _MAX, ("torch.nn.FractionalMaxPool3d",)),
    NondeterministicOp("max_pool3d_with_indices_backward", _MAX, ("torch.nn.MaxPool3d",)),
    NondeterministicOp("max_unpool2d", _UNPOOL, ("torch.nn.MaxUnpool1d", "torch.nn.MaxUnpool2d")),
    NondeterministicOp("max_unpool3d", _UNPOOL, ("torch.nn.MaxUnpool3d",)),
    NondeterministicOp("upsample_linear1d_backward", _INTERPOLATE, (f"{_F}interpolate",)),
    NondeterministicOp("upsample_bilinear2d_backward", _INTERPOLATE, (f"{_F}interpolate",)),
    NondeterministicOp("upsample_bicubic2d_backward", _INTERPOLATE, (f"{_F}interpolate",)),
    NondeterministicOp("upsample_trilinear3d_backward", _INTERPOLATE, (f"{_F}interpolate",)),
    NondeterministicOp("_upsample_bilinear2d_aa_backward", _INTERPOLATE, (f"{_F}interpolate",)),
    NondeterministicOp("_upsample_bicubic2d_aa_backward", _INTERPOLATE, (f"{_F}interpolate",)),
    NondeterministicOp("reflection_pad1d_backward", _PAD, ("torch.nn.ReflectionPad1d",)),
    NondeterministicOp("reflection_pad2d_backward", _PAD, ("torch.nn.ReflectionPad2d",)),
    NondeterministicOp("reflection_pad3d_backward", _PAD, ("torch.nn.ReflectionPad3d",)),
    NondeterministicOp("replication_pad1d_backward", _PAD, ("torch.nn.ReplicationPad1d",)),
    NondeterministicOp("replication_pad2d_backward", _PAD),
    NondeterministicOp("replication_pad3d_backward", _PAD, ("torch.nn.ReplicationPad3d",)),
    NondeterministicOp("nll_loss2d_forward", _NLL, ("torch.nn.NLLLoss",)),
    NondeterministicOp("_ctc_loss_backward", _CTC, ("torch.nn.CTCLoss",)),
    NondeterministicOp("_embedding_bag_dense_backward", _BAG, ("torch.nn.EmbeddingBag",)),
    NondeterministicOp("put_", _WRITE, ("torch.Tensor.put_",)),
    NondeterministicOp("histc", _COUNT, ("torch.histc",)),
    NondeterministicOp("histogram", _COUNT),
    NondeterministicOp("_histogramdd_from_bin_cts", _COUNT),
    NondeterministicOp("_histogramdd_from_bin_tensors", _COUNT),
    NondeterministicOp("bincount", _WEIGHTS, ("torch.bincount",)),
    NondeterministicOp("kthvalue", "sort and take the k-th entry", ("torch.kthvalue",)),
    NondeterministicOp("median", _MEDIAN, ("torch.median",)),
    NondeterministicOp("nanmedian", _MEDIAN),
    NondeterministicOp("grid_sampler_2d_backward", _GRID, (f"{_F}grid_sample",)),
    NondeterministicOp("grid_sampler_3d_backward", _GRID, (f"{_F}grid_sample",)),
    NondeterministicOp("cumsum", _SUM, ("torch.cumsum",)),
    NondeterministicOp("cumsum_", _SUM),
    NondeterministicOp("scatter", _WRITE),
    NondeterministicOp("scatter_", _WRITE),
    NondeterministicOp("scatter_add", _SCATTER),
    NondeterministicOp("scatter_add_", _SCATTER),
    NondeterministicOp("scatter_reduce", _REDUCE, ("torch.Tensor.scatter_reduce",)),
    NondeterministicOp("scatter_reduce_", _REDUCE, ("torch.Tensor.scatter_reduce",)),
    NondeterministicOp("index_reduce", _REDUCE),
    NondeterministicOp("index_reduce_", _REDUCE),
    NondeterministicOp("resize_", _RESIZE, ("torch.Tensor.resize_",), on_cpu=False),
)
"""One row per op, with its name in `torch.ops.aten`."""


def is_alert(error: RuntimeError) -> bool:
    """Return whether torch raised `error` because an op has no deterministic kernel.

    torch raises a plain `RuntimeError`, so the text of the error decides. If a later torch changes
    this text, the op raises instead of running on the CPU.
    """
    return "does not have a deterministic implementation" in str(error)


def row_of(packet: str) -> NondeterministicOp | None:
    """Return the row of `OPS` for the op `packet`, such as ``cumsum``, or None."""
    return next((row for row in OPS if row.name == packet), None)


def put_(self: Tensor, index: Tensor, source: Tensor, accumulate: Any = None) -> Tensor:
    """Write the elements of `source` to the positions `index` of the flattened `self`, in place.

    Ignores `accumulate`: `implementation` returns None for a call that accumulates, because the
    CPU kernel is deterministic for such a call. Like torch, raises `RuntimeError` for a wrong
    dtype, and `IndexError` for an index out of range or a wrong number of indices.
    """
    torch = import_module("torch")
    if index.dtype != torch.int64:
        raise RuntimeError(f"put_(): index must be int64, but is {index.dtype}")
    if source.dtype != self.dtype:
        raise RuntimeError(f"put_(): self is {self.dtype} and source is {source.dtype}")
    if index.numel() != source.numel():
        raise IndexError(
            f"put_(): index has {index.numel()} elements, but source has {source.numel()}"
        )
    if not index.numel():
        return self
    count = self.numel()
    positions = index.reshape(-1)
    if bool(((positions < -count) | (positions >= count)).any()):
        raise IndexError(f"put_(): an index is out of range for a tensor of {count} elements")
    positions = torch.where(positions < 0, positions + count, positions)
    _write_last(self, positions, source.reshape(-1))
    return self


def max_unpool2d(self: Tensor, indices: Tensor, output_size: Sequence[int]) -> Tensor:
    """Return zeros in planes of `output_size`, with the elements of `self` written at `indices`.

    Raises `RuntimeError` for arguments that do not match, as torch does.
    """
    torch = import_module("torch")
    result = _unpooled(self, indices, output_size, 2)
    last = torch.channels_last
    in_channels_last = self.dim() == 4 and self.is_contiguous(memory_format=last)  # noqa: PLR2004
    if in_channels_last and not self.is_contiguous():
        return result.contiguous(memory_format=last)
    return result


def max_unpool3d(
    self: Tensor,
    indices: Tensor,
    output_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    """Return zeros in volumes of `output_size`, with the elements of `self` written at `indices`.

    `stride` and `padding` are checked, but do not affect the result. Raises `RuntimeError` for
    arguments that do not match, as torch does.
    """
    if len(stride) != 3 or len(padding) != 3 or any(step <= 0 for step in stride):  # noqa: PLR2004
        raise RuntimeError("max_unpool3d: stride and padding must have 3 numbers, strides above 0")
    return _unpooled(self, indices, output_size, 3)


def _unpooled(self: Tensor, indices: Tensor, output_size: Sequence[int], dims: int) -> Tensor:
    torch, name = import_module("torch"), f"max_unpool{dims}d"
    if indices.dtype != torch.int64:
        raise RuntimeError(f"{name}: indices must be int64, but are {indices.dtype}")
    if len(output_size) != dims:
        raise RuntimeError(f"{name}: output_size has {len(output_size)} numbers, not {dims}")
    if self.dim() not in (dims + 1, dims + 2) or self.shape != indices.shape:
        raise RuntimeError(
            f"{name}: input and indices must have the same shape, with {dims + 1} or {dims + 2} "
            f"dimensions, not {tuple(self.shape)} and {tuple(indices.shape)}"
        )
    result = self.new_zeros((*self.shape[:-dims], *output_size))
    area = result.shape[-dims:].numel()
    positions = indices.reshape(-1)
    if not positions.numel():
        return result
    if bool(((positions < 0) | (positions >= area)).any()):
        raise RuntimeError(f"{name}: an index lies outside of {tuple(output_size)}")
    planes = self.shape[:-dims].numel()
    starts = torch.arange(planes, device=positions.device).unsqueeze(1) * area
    positions = (positions.view(planes, -1) + starts).view(-1)
    _write_last(result.view(-1), positions, self.reshape(-1))
    return result


def _write_last(target: Tensor, positions: Tensor, values: Tensor) -> None:
    """Write `values` to `positions` of `target`. If a position repeats, the last value wins."""
    torch = import_module("torch")
    ordered, order = torch.sort(positions, stable=True)
    is_last = torch.ones_like(ordered, dtype=torch.bool)
    is_last[:-1] = ordered[1:] != ordered[:-1]
    unique, last_values = ordered[is_last], values[order[is_last]]
    if target.dim():
        target.index_put_(torch.unravel_index(unique, target.shape), last_values)
    else:
        target.copy_(last_values[-1])


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "max_unpool2d": max_unpool2d,
    "max_unpool3d": max_unpool3d,
    "put_": put_,
}


def implementation(packet: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return our implementation of the op `packet` for a call with these arguments, or None."""
    accumulates = packet == "put_" and bool(kwargs.get("accumulate", args[3:] and args[3]))
    return None if accumulates else IMPLEMENTATIONS.get(packet)


TORCH_NAMESPACES = frozenset(
    {
        *("_", "_c10d_functional", "_c10d_functional_autograd", "_caffe2", "_dtensor", "_native"),
        *("_inductor_debug", "_inductor_test", "_quantized", "_test", "_torch_testing", "ao"),
        *("aten", "bucketing", "c10d", "c10d_functional", "coor", "cplib", "debug_mode_ops"),
        *("debugprims", "device_mesh", "export", "flex_lib", "fsdp", "inductor"),
        *("inductor_prims", "mempool", "mkl", "mkldnn", "mkldnn_prepacked", "onednn", "onnx"),
        *("onnx_symbolic", "pippy", "prepacked", "prim", "prims", "profiler", "quantization"),
        *("quantized", "quantized_decomposed", "rngprims", "rpc", "semi_structured", "sparse"),
        *("static_runtime", "streams", "symm_mem", "torch_attn", "triton", "xnnpack"),
    }
)
"""Namespaces of the ops of torch, for versions that do not record where an op is defined.

Torch 2.6 does not record the place for ops defined in Python.
"""

_REGISTERED_AT = re.compile(r"^[\w\[\]]+: registered at (.+?):\d+", re.MULTILINE)

_TRITON_TYPES = (("triton.runtime.jit", "JITFunction"), ("triton.runtime.autotuner", "Autotuner"))
_FEW = 3  # the most ops of one namespace that are listed by name


def unseen_kernels() -> tuple[str, ...]:
    """Return the names of the custom ops and Triton kernels in this process.

    If a namespace has many ops, one text with the number of ops replaces the names. This function
    imports nothing, so it finds ops and kernels only in modules that are already loaded.
    """
    return (*sorted(_custom_ops()), *sorted(_triton_kernels()))


def _custom_ops() -> Iterator[str]:
    if "torch" not in sys.modules:
        return
    try:
        all_names = op_names()
    except AttributeError:
        yield "custom ops, which this torch does not list"
        return
    ops: dict[str, set[str]] = defaultdict(set)
    for name in all_names:
        namespace, _, rest = name.partition("::")
        if namespace not in TORCH_NAMESPACES and not _comes_with_torch(name):
            ops[namespace].add(rest.partition(".")[0])
    for namespace, names in ops.items():
        if len(names) > _FEW:
            yield f"{namespace}: {len(names)} custom ops"
        else:
            yield from (f"{namespace}::{name}" for name in names)


def _comes_with_torch(op: str) -> bool:
    """Return whether torch itself registers `op`, in a module or in C++ source of torch.

    Uses private API (`_dispatch_dump`, and the definitions of `torch._library.custom_ops`),
    because no public API shows where an op is registered. Without this API, `op` counts as custom.
    """
    torch = sys.modules["torch"]
    definitions = getattr(sys.modules.get("torch._library.custom_ops"), "OPDEFS", {})
    function = getattr(definitions.get(op.partition(".")[0]), "_init_fn", None)
    if function is not None:
        return str(function.__module__).partition(".")[0] == "torch"
    folders = filter(None, (_sources(), *torch.__path__))
    return _registered_at(op).startswith(tuple(f"{folder}/" for folder in folders))


@cache
def _sources() -> str:
    """Return the folder of the C++ source of this build of torch, or an empty string."""
    return _registered_at("aten::add.Tensor").partition("/aten/")[0].removesuffix("/build")


def _registered_at(op: str) -> str:
    """Return the source file that registers `op`, or an empty string if torch records none."""
    dump = getattr(sys.modules["torch"]._C, "_dispatch_dump", lambda _: "")  # noqa: SLF001 - see above
    line = _REGISTERED_AT.search(dump(op))
    return line[1] if line else ""


def _triton_kernels() -> Iterator[str]:
    loaded = (getattr(sys.modules.get(module), name, None) for module, name in _TRITON_TYPES)
    kernel_types = tuple(filter(None, loaded))
    if not kernel_types:
        return
    listed = set()
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in ("triton", "torch", "torchrepro"):
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if isinstance(value, kernel_types) and id(value) not in listed:
                listed.add(id(value))
                yield f"{module_name}.{name} (Triton)"
