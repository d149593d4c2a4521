"""Rows for the variables that torch_npu and the libraries below it read."""

from __future__ import annotations

from torchrepro.knobs.legal import Text
from torchrepro.knobs.variable import row
from torchrepro.knobs.variable_effects import of_npu

NPU_ENV = "https://github.com/Ascend/pytorch"

TASK_QUEUE = Text("[012]", '"0", "1", "2"', "torch_npu parses a word as 0 and raises on others")
LAUNCH_BLOCKING = Text(
    "[01]", '"0", "1"', "torch_npu parses a word such as true as 0, which is off"
)
EXACTLY_ONE = Text("[01]", '"0", "1"', 'only the exact text "1" counts; a word such as true is off')

ASCEND = (
    row(
        "CLOSE_MATMUL_K_SHIFT",
        "npu",
        EXACTLY_ONE,
        "Matrix products do not shift their inner dimension between cores.",
        "https://www.hiascend.com/document",
        cost="1: slower products",
    ),
    row(
        "ATB_MATMUL_SHUFFLE_K_ENABLE",
        "npu",
        EXACTLY_ONE,
        "ATB's matrix products shuffle their inner dimension; 0 fixes the order.",
        "https://www.hiascend.com/document",
        cost="0: slower products",
    ),
    row(
        "ATB_LLM_LCOC_ENABLE",
        "npu",
        EXACTLY_ONE,
        "ATB's language models overlap computing and communication.",
        "https://www.hiascend.com/document",
        cost="0: slower steps",
    ),
    row(
        "ASCEND_LAUNCH_BLOCKING",
        "npu",
        LAUNCH_BLOCKING,
        "Every op waits for its end; forces the task queue off.",
        NPU_ENV,
        cost="on: everything is slow; for debugging only",
    ),
    row(
        "TASK_QUEUE_ENABLE",
        "npu",
        TASK_QUEUE,
        "How torch_npu hands ops to the device.",
        NPU_ENV,
        cost="0: slower launches",
        aliases=("backends.npu.task_queue",),
        effect=of_npu(
            "get_task_queue_enable",
            lambda text: int(text) if text.isdecimal() else 0,
            "torch_npu's task queue is {}",
        ),
    ),
    row(
        "PER_STREAM_QUEUE",
        "npu",
        EXACTLY_ONE,
        "One task queue per stream.",
        NPU_ENV,
    ),
    row(
        "INF_NAN_MODE_ENABLE",
        "npu",
        EXACTLY_ONE,
        "Overflow gives Inf and NaN as on a GPU; 0 saturates.",
        NPU_ENV,
    ),
    row(
        "TORCH_NPU_USE_COMPATIBLE_IMPL",
        "torch_npu",
        EXACTLY_ONE,
        "gelu, matmul and max_pool follow the numerics of torch's own kernels.",
        NPU_ENV,
        aliases=("backends.npu.compatible_impl",),
        effect=of_npu(
            "are_compatible_impl_enabled",
            lambda text: text == "1",
            "torch_npu's compatible_impl is {}",
        ),
    ),
    row(
        "TORCH_NPU_LEGACY_IMPL_LIST",
        "npu",
        Text("randomness", "randomness", "unknown keys raise"),
        "On the newest chips, draws random numbers as A2 and A3 do.",
        NPU_ENV,
    ),
    row(
        "ACL_OP_COMPILER_CACHE_MODE",
        "npu",
        Text("enable|disable|force", "enable, disable, force"),
        "Whether operators compiled earlier are used again.",
        NPU_ENV,
    ),
)
