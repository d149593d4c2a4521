"""The ops of which some kernel has no deterministic implementation, and what to use instead.

Under `torch.use_deterministic_algorithms(True)` such a kernel raises. The ops are those of torch's
own list (https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html,
of 2.6 and of 2.13) and those whose kernels for the CPU, CUDA or XPU call `alertNotDeterministic`
(https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/Context.h,
https://github.com/intel/torch-xpu-ops) although the list leaves them out. Which of them raise
depends on the device, the arguments and the version; nothing here decides that.
"""

from __future__ import annotations

from typing import NamedTuple

SENTENCE = "does not have a deterministic implementation"
"""What torch's message says of a kernel; see `is_alert`."""


class NondeterministicOp(NamedTuple):
    """An op, all of its overloads included."""

    name: str
    instead: str
    """What a program can use in its place, on the device and without this policy."""

    documented: tuple[str, ...] = ()
    """What of torch's list ends in it; empty where only the kernels say so."""

    on_cpu: bool = True
    """False where the CPU's kernel raises as well, and torchrepro has no other."""


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
    NondeterministicOp("put_", "use index_put, which writes in order", ("torch.Tensor.put_",)),
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
    NondeterministicOp(
        "cumsum", "multiply by a triangular matrix of ones, or sum integers", ("torch.cumsum",)
    ),
    NondeterministicOp("cumsum_", "multiply by a triangular matrix of ones, or sum integers"),
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
    return SENTENCE in str(error)


def row_of(packet: str) -> NondeterministicOp | None:
    """Return the row of the op `packet`, as in ``cumsum``, if it has one."""
    return next((row for row in OPS if row.name == packet), None)
