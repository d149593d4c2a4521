"""Known functions that draw a dropout mask of their own, and what keeps each from dropping.

They draw with `rand` or `bernoulli`, which no op-level policy can tell from other randomness.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class WrittenMask:
    """A function that draws a mask, and what one name in it stands for so that nothing drops."""

    modules: str
    """A module's name, or with a `*` at the end the beginning of several."""
    functions: str
    """Pattern of qualified names within the module."""
    name: str
    """Pattern of the parameters, variables or attributes that are read as `value`."""
    value: str = "0.0"
    """A Python expression."""

    def draws_in(self, module: str, function: str) -> bool:
        """Whether the function of that qualified name in `module` is one of this row's."""
        return fnmatchcase(module, self.modules) and fnmatchcase(function, self.functions)


_NEVER_SKIP = "-1.0"  # below every draw: some layers are skipped at `draw <= layerdrop`

ROWS = (
    # https://github.com/pytorch/vision/tree/main/torchvision/ops
    WrittenMask("torchvision.ops.*", "stochastic_depth", "p"),
    WrittenMask("torchvision.ops.*", "drop_block[23]d", "p"),
    # https://github.com/huggingface/pytorch-image-models/tree/main/timm/layers
    WrittenMask("timm.*", "drop_path", "drop_prob"),
    WrittenMask("timm.*", "drop_block_*2d", "drop_prob"),
    WrittenMask("timm.*", "DropBlock2d.forward", "drop_prob"),
    WrittenMask("timm.*", "patch_dropout_forward", "prob"),
    WrittenMask("timm.*", "PatchDropout.forward", "prob"),
    WrittenMask("timm.*", "ResidualDrop.forward", "drop"),
    # https://github.com/huggingface/transformers/tree/main/src/transformers/models
    WrittenMask("transformers.models.*", "drop_path", "drop_prob"),
    WrittenMask("transformers.models.*", "*DropPath.forward", "drop_prob"),
    WrittenMask("transformers.models.*", "*.forward", "*layerdrop", _NEVER_SKIP),
    WrittenMask("transformers.models.*", "LayerDropModuleList.__iter__", "p", _NEVER_SKIP),
    WrittenMask("transformers.models.*", "*ResidualLayer.forward", "drop_rate"),
    WrittenMask("transformers.models.*", "StableDropout.forward", "drop_prob"),
    WrittenMask("transformers.models.*", "get_mask", "dropout"),
    WrittenMask("transformers.models.*", "*._consistent_dropout", "p"),
    WrittenMask(
        "transformers.models.*",
        "*._consistent_dropout",
        "all_masks",
        "torch.ones_like(inputs_embeds)",
    ),
    WrittenMask("transformers.models.*", "*ResidualVectorQuantize*.forward", "quantizer_dropout"),
    # https://gitcode.com/Ascend/pytorch/tree/master/torch_npu/contrib
    WrittenMask("torch_npu.contrib.*", "dropout_with_byte_mask", "training", "False"),
    WrittenMask("torch_npu.contrib.*", "dropout_with_byte_mask", "p"),
    WrittenMask("torch_npu.contrib.*", "Npu*Dropout.forward", "p"),
    WrittenMask("torch_npu.contrib.*", "NpuDropPath.forward", "drop_prob"),
    WrittenMask("torch_npu.contrib.*", "fuse_add_softmax_dropout", "p"),
)
