"""Records torch's own ops twice, with fresh memory filled differently, and compares.

`python op_database.py`, in an empty folder. It is a separate program, because torch's database of
ops freezes the flags of cuDNN in the process that imports it.
"""

from __future__ import annotations

import ctypes
import sys
import unittest
import warnings
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

import torchrepro

if TYPE_CHECKING:
    from collections.abc import Iterator

M_PERTURB = -6  # of glibc's mallopt: the byte that fresh memory is filled with
SKIPPED_FOLDERS = ("empty", "new_empty", "empty_like", "empty_strided", "empty_permuted")
"""Ops whose results are uninitialized memory by definition."""


def ops() -> list[Any]:
    """Return the ops that torch has samples of and whose results are deterministic."""
    # torch's own tests are made with it; the samples of its ops are not.
    sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
    from torch.testing._internal.common_methods_invocations import op_db

    promising = (op for op in op_db if op.name.rpartition(".")[2] not in SKIPPED_FOLDERS)
    return sorted(
        (op for op in promising if torch.float32 in op.dtypes),
        key=lambda op: (op.name, op.variant_test_name),
    )


def samples() -> Iterator[tuple[Any, Any]]:
    """Yield each op with torch's first sample of arguments, which takes long to create."""
    for op in ops():
        torch.manual_seed(0)
        with suppress(Exception):  # some need what this machine lacks
            found = op.sample_inputs("cpu", torch.float32, op.supports_autograd)
            yield op, next(iter(found))


def own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, because some ops write to their arguments."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def run(sampled: list[tuple[Any, Any]], filled_with: int) -> None:
    """Run ops forwards and backwards while fresh memory is filled with a byte."""
    ctypes.CDLL(None).mallopt(M_PERTURB, filled_with)
    for op, sample in sampled:
        torch.manual_seed(0)
        with suppress(Exception):
            first, args, kwargs = tree_map_only(
                torch.Tensor, own, (sample.input, sample.args, sample.kwargs)
            )
            result = op(first, *args, **kwargs)
            if isinstance(result, torch.Tensor) and result.requires_grad:
                result.abs().sum().backward()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sampled = [*samples()]
    run(sampled, 0)  # the first calls import modules
    for name, filled_with in (("a", 0x55), ("b", 0xAB)):
        with torchrepro.record(name):
            run(sampled, filled_with)
    print(torchrepro.compare("a", "b"))
