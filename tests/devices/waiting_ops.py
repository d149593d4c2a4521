"""Records torch's own ops on the simulated device twice: outputs wait, or are read at once.

`PYTHONPATH=tests/trace python waiting_ops.py`, in an empty folder. It is a separate program,
because torch's database of ops freezes the flags of cuDNN in the process that imports it.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import op_database
import torch
from simulated_npu import install
from torch.utils._pytree import tree_map_only

import torchrepro
from torchrepro.trace import waiting_outputs
from torchrepro.trace.reader import read_run


def moved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("npu")


def run(sampled: list[tuple[Any, Any]]) -> None:
    """Run ops forwards, and in place where that exists."""
    for op, sample in sampled:
        torch.manual_seed(0)
        with suppress(Exception):
            first, args, kwargs = tree_map_only(
                torch.Tensor, moved, (sample.input, sample.args, sample.kwargs)
            )
            op(first, *args, **kwargs)
            if op.inplace_variant is not None:
                op.inplace_variant(first, *args, **kwargs)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    install()
    sampled = [*op_database.samples()]
    run(sampled)  # the first calls import modules
    with torchrepro.record("waiting"):
        run(sampled)
    waiting_outputs._HAS_GUARDS = False
    with torchrepro.record("at once"):
        run(sampled)
    (trace,) = read_run(Path("waiting"))
    print("unread:", trace.meta.get("unread") or 0)
    print(torchrepro.compare("waiting", "at once"))
