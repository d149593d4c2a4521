"""Ops without a deterministic kernel, and deterministic implementations of some of them.

Under `torch.use_deterministic_algorithms(True)` such a kernel raises. The ops are those of torch's
own list (https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html,
of 2.6 and of 2.13) and those whose kernels for the CPU, CUDA or XPU call `alertNotDeterministic`
(https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/Context.h,
https://github.com/intel/torch-xpu-ops) although the list leaves them out. Which of them raise
depends on the device, the arguments and the version; nothing here decides that.

Where several writes meet at one place, the last of them wins, as in a loop over the elements
(https://docs.pytorch.org/docs/stable/generated/torch.Tensor.put_.html leaves it open). The places
are sorted, which keeps the order of equal ones, so that each is written once: the result is the
same on every device and in every run.

`use_deterministic_algorithms` is a question that the author of a kernel asks and answers: an op
from another package may not ask it, and a Triton kernel cannot. `unseen_kernels` lists these.
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
    """An op, all of its overloads included."""

    name: str
    instead: str  # what a program can use in its place, on the device and without this policy
    documented: tuple[str, ...] = ()
    """What of torch's list ends in it; empty where only the kernels say so."""

    on_cpu: bool = True  # false where the CPU's kernel raises as well, and torchrepro has no other


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
_MEDIAN = "sort and take the middle, or take median() without a dimension, which gives no indices"

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
    NondeterministicOp(
        "nll_loss2d_forward",
        "take log_softmax, gather the targets' entries, and average them",
        ("torch.nn.NLLLoss",),
    ),
    NondeterministicOp(
        "_ctc_loss_backward",
        "use cuDNN's implementation: blank=0, int32 targets on the CPU, lengths of at most 256",
        ("torch.nn.CTCLoss",),
    ),
    NondeterministicOp(
        "_embedding_bag_dense_backward",
        "use mode='sum' or 'mean', or embedding followed by amax",
        ("torch.nn.EmbeddingBag",),
    ),
    NondeterministicOp("put_", _WRITE, ("torch.Tensor.put_",)),
    NondeterministicOp("histc", _COUNT, ("torch.histc",)),
    NondeterministicOp("histogram", _COUNT),
    NondeterministicOp("_histogramdd_from_bin_cts", _COUNT),
    NondeterministicOp("_histogramdd_from_bin_tensors", _COUNT),
    NondeterministicOp(
        "bincount",
        "count without weights, or index_add the weights to a tensor of zeros",
        ("torch.bincount",),
    ),
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
    NondeterministicOp(
        "resize_",
        "dequantize, resize and quantize again",
        ("torch.Tensor.resize_",),
        on_cpu=False,
    ),
)
"""Rows of one op each; the names are those of `torch.ops.aten`."""


def is_alert(error: RuntimeError) -> bool:
    """Whether `error` is torch's, about a kernel without a deterministic implementation.

    Told by its text, as it has no type of its own. Should torch word it another way, then nothing
    falls back: each op raises as it does without this policy, and none varies unseen.
    """
    return "does not have a deterministic implementation" in str(error)


def row_of(packet: str) -> NondeterministicOp | None:
    """Return the row of the op `packet`, as in ``cumsum``, if it has one."""
    return next((row for row in OPS if row.name == packet), None)


def put_(self: Tensor, index: Tensor, source: Tensor, accumulate: Any = None) -> Tensor:
    """Write `source` to the places `index` of `self`, counted as if `self` were flat.

    It does not add up: for `accumulate` the CPU's kernel is deterministic (see `implementation`).
    Raises `IndexError` for a place that `self` does not have, and `RuntimeError` for arguments
    that do not fit each other, as torch does.
    """
    torch = import_module("torch")
    if index.dtype != torch.int64:
        raise RuntimeError(f"put_(): index has to be int64, and is {index.dtype}")
    if source.dtype != self.dtype:
        raise RuntimeError(f"put_(): self is {self.dtype} and source is {source.dtype}")
    if index.numel() != source.numel():
        raise IndexError(
            f"put_(): as many indices as elements are needed, not {index.numel()} for "
            f"{source.numel()}"
        )
    if not index.numel():
        return self
    count = self.numel()
    places = index.reshape(-1)
    if bool(((places < -count) | (places >= count)).any()):
        raise IndexError(f"put_(): an index is out of range for a tensor of {count} elements")
    places = torch.where(places < 0, places + count, places)
    _write_last(self, places, source.reshape(-1))
    return self


def max_unpool2d(self: Tensor, indices: Tensor, output_size: Sequence[int]) -> Tensor:
    """Write the elements of `self` to the places `indices` of planes of `output_size`, else zero.

    Raises `RuntimeError` for arguments that do not fit each other, as torch does.
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
    """Write the elements of `self` to the places `indices` of volumes of `output_size`, else zero.

    Raises `RuntimeError` for arguments that do not fit each other, as torch does; `stride` and
    `padding` decide nothing else.
    """
    if len(stride) != 3 or len(padding) != 3 or any(step <= 0 for step in stride):  # noqa: PLR2004
        raise RuntimeError("max_unpool3d: stride and padding take three numbers, strides above 0")
    return _unpooled(self, indices, output_size, 3)


def _unpooled(self: Tensor, indices: Tensor, output_size: Sequence[int], dims: int) -> Tensor:
    torch, name = import_module("torch"), f"max_unpool{dims}d"
    if indices.dtype != torch.int64:
        raise RuntimeError(f"{name}: indices have to be int64, and are {indices.dtype}")
    if len(output_size) != dims:
        raise RuntimeError(f"{name}: output_size has {len(output_size)} numbers, not {dims}")
    if self.dim() not in (dims + 1, dims + 2) or self.shape != indices.shape:
        raise RuntimeError(
            f"{name}: input and indices have to be of one shape, of {dims + 1} or {dims + 2} "
            f"dimensions, not {tuple(self.shape)} and {tuple(indices.shape)}"
        )
    result = self.new_zeros((*self.shape[:-dims], *output_size))
    area = result.shape[-dims:].numel()
    places = indices.reshape(-1)
    if not places.numel():
        return result
    if bool(((places < 0) | (places >= area)).any()):
        raise RuntimeError(f"{name}: an index lies outside of {tuple(output_size)}")
    planes = self.shape[:-dims].numel()
    first = torch.arange(planes, device=places.device).unsqueeze(1) * area
    places = (places.view(planes, -1) + first).view(-1)
    _write_last(result.view(-1), places, self.reshape(-1))
    return result


def _write_last(target: Tensor, places: Tensor, values: Tensor) -> None:
    torch = import_module("torch")
    ordered, order = torch.sort(places, stable=True)
    is_last = torch.ones_like(ordered, dtype=torch.bool)
    is_last[:-1] = ordered[1:] != ordered[:-1]
    at, value = ordered[is_last], values[order[is_last]]
    where = torch.unravel_index(at, target.shape) if target.dim() else ()
    if where:
        target.index_put_(where, value)
    else:
        target.copy_(value[-1])


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "max_unpool2d": max_unpool2d,
    "max_unpool3d": max_unpool3d,
    "put_": put_,
}


def implementation(packet: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the implementation of the op `packet` for a call with these arguments, or None."""
    adds_up = packet == "put_" and bool(kwargs.get("accumulate", args[3:] and args[3]))
    return None if adds_up else IMPLEMENTATIONS.get(packet)


TORCHS_OWN = frozenset(
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
"""Namespaces of ops that come with torch, for a torch that does not record where it defines them.

Torch 2.6 does not, for what it defines in Python.
"""

_REGISTERED_AT = re.compile(r"^[\w\[\]]+: registered at (.+?):\d+", re.MULTILINE)

_TRITON_KINDS = (("triton.runtime.jit", "JITFunction"), ("triton.runtime.autotuner", "Autotuner"))
_FEW = 3  # ops of one package that are named one by one


def unseen_kernels() -> tuple[str, ...]:
    """Return the custom ops and the Triton kernels in this process, packages of many as a count.

    Imports nothing: what is not loaded yet is not in the answer.
    """
    return (*sorted(_custom_ops()), *sorted(_triton_kernels()))


def _custom_ops() -> Iterator[str]:
    if "torch" not in sys.modules:
        return
    try:
        present = op_names()
    except AttributeError:
        yield "custom ops, which this torch does not list"
        return
    ops: dict[str, set[str]] = defaultdict(set)
    for name in present:
        namespace, _, rest = name.partition("::")
        if namespace not in TORCHS_OWN and not _comes_with_torch(name):
            ops[namespace].add(rest.partition(".")[0])
    for namespace, names in ops.items():
        if len(names) > _FEW:
            yield f"{namespace}: {len(names)} custom ops"
        else:
            yield from (f"{namespace}::{name}" for name in names)


def _comes_with_torch(op: str) -> bool:
    """Whether a module of torch registers an op, or the C++ source that torch is built from.

    Private (`_dispatch_dump`, and the definitions of `torch._library.custom_ops`): torch offers no
    public record of who registers an op. Where it is gone, the op counts as one of another package.
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
    """Return the folder of the C++ source that torch was built from; empty where unknown."""
    return _registered_at("aten::add.Tensor").partition("/aten/")[0].removesuffix("/build")


def _registered_at(op: str) -> str:
    """Return the file that registers an op; empty where torch does not record it."""
    dump = getattr(sys.modules["torch"]._C, "_dispatch_dump", lambda _: "")  # noqa: SLF001 - see above
    found = _REGISTERED_AT.search(dump(op))
    return found[1] if found else ""


def _triton_kernels() -> Iterator[str]:
    found = (getattr(sys.modules.get(module), name, None) for module, name in _TRITON_KINDS)
    kinds = tuple(filter(None, found))
    if not kinds:
        return
    listed = set()
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in ("triton", "torch", "torchrepro"):
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if isinstance(value, kinds) and id(value) not in listed:
                listed.add(id(value))
                yield f"{module_name}.{name} (Triton)"
