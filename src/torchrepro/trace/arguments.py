"""What an op was called with, besides tensors, written the same way in every run."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torchrepro.hidden import HIDDEN, sounds_secret

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor)})
"""The classes of tensors that have no part of their own in what an op does."""

CPU = torch.device("cpu")
_WRITTEN_OUT = (
    *(bool, int, float, complex, str),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def call_text(args: Any, kwargs: Any) -> str:
    """Return the arguments of a call as Python writes them, with `_` for a tensor.

    A string is hidden if the name of its argument sounds secret.
    """
    words = [value_text(value) for value in args]
    words += [
        f"{name}={HIDDEN if isinstance(value, str) and sounds_secret(name) else value_text(value)}"
        for name, value in (kwargs or {}).items()
    ]
    return f"({', '.join(words)})"


def value_text(value: Any) -> str:
    """Return one value as Python writes it; of what has no such form, only its type."""
    if isinstance(value, torch.Tensor):
        return "_"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_text, value))}]"
    return repr(value) if value is None or isinstance(value, _WRITTEN_OUT) else type(value).__name__


def tensors_in(value: Any) -> list[Any]:
    """Return the tensors in a nested value, in their order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def shape_of(tensor: Any) -> tuple[Any, ...]:
    """Return shape and dtype of a tensor, and its device if that is not the CPU."""
    try:
        shape = tensor.shape
    except RuntimeError:  # a nested one of strided parts has no one shape
        shape = ("nested", tensor.numel())
    described = shape, tensor.dtype
    return described if tensor.device == CPU else (*described, tensor.device)


def shapes_text(shapes: Any) -> str:
    """Return dtypes and shapes, and devices but the CPU, as in ``float32[32, 64] cuda:0``."""
    return ", ".join(
        " ".join(
            [
                f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]",
                *map(str, device),
            ]
        )
        for shape, dtype, *device in shapes
    )
