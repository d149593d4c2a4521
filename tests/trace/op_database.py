"""Records some of torch's own ops twice, with fresh memory filled differently, and compares.

`python op_database.py PART PARTS`, in an empty folder. It is a program of its own, because torch's
database of ops freezes the flags of cuDNN in the process that imports it.
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

import torchrepro

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLES = 1  # of each op
M_PERTURB = -6  # of glibc's mallopt: the byte that fresh memory is filled with
LEFT_OUT = ("empty", "new_empty", "empty_like", "empty_strided", "empty_permuted")
"""Ops that promise nothing of what they return: whoever reads it gets what lies there."""


def ops() -> list[Any]:
    """Return all that torch has samples of."""
    # torch's own tests are made with it; the samples of its ops are not.
    sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
    from torch.testing._internal.common_methods_invocations import op_db

    return sorted(op_db, key=lambda op: (op.name, op.variant_test_name))


def samples(op: Any) -> Iterator[Any]:
    """Yield the first arguments that torch tries an op with."""
    with suppress(Exception):  # some need what this machine lacks
        found = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
        for _, sample in zip(range(SAMPLES), found, strict=False):
            yield sample


def run(some: list[Any], filled_with: int) -> None:
    """Run ops forwards and backwards while fresh memory has this byte."""
    ctypes.CDLL(None).mallopt(M_PERTURB, filled_with)
    for op in some:
        if op.name.rpartition(".")[2] in LEFT_OUT or torch.float32 not in op.dtypes:
            continue
        torch.manual_seed(0)
        for sample in samples(op):
            torch.manual_seed(0)
            with suppress(Exception):
                result = op(sample.input, *sample.args, **sample.kwargs)
                if isinstance(result, torch.Tensor) and result.requires_grad:
                    result.abs().sum().backward()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    part, parts = map(int, sys.argv[1:])
    mine = ops()[part::parts]
    run(mine, 0)  # what is imported by the first call
    for name, filled_with in (("a", 0x55), ("b", 0xAB)):
        with torchrepro.record(name):
            run(mine, filled_with)
    print(torchrepro.compare("a", "b"))
