"""All rows, in the order in which they are set: environment, then flags, then seeds."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from torchrepro.knobs.ascend_rows import ASCEND, NPU
from torchrepro.knobs.cuda_rows import CUDA, CUDNN
from torchrepro.knobs.env_rows import COLLECTIVES, ENV
from torchrepro.knobs.policy_rows import POLICIES
from torchrepro.knobs.seed_rows import SEEDS
from torchrepro.knobs.torch_rows import CPU, TORCH

if TYPE_CHECKING:
    from torchrepro.knobs.knob import Knob

# Inside torch, the NPU's level comes after the flag that its setter also moves. The seeds are
# last: whatever an earlier write draws from a generator must not show in the numbers of the run.
CATALOGUE: tuple[Knob, ...] = (
    *(*ENV, *COLLECTIVES, *ASCEND),
    *(*TORCH, *CUDA, *CUDNN, *CPU, *NPU),
    *POLICIES,
    *SEEDS,
)


@cache
def knobs_by_name() -> dict[str, Knob]:
    """Return every row under its name."""
    return {knob.name: knob for knob in CATALOGUE}


@cache
def other_names() -> dict[str, tuple[Knob, ...]]:
    """Return, for every alias that is not itself a row, the rows it means."""
    names: dict[str, tuple[Knob, ...]] = {}
    for knob in CATALOGUE:
        for alias in knob.aliases:
            if alias not in knobs_by_name():
                names[alias] = (*names.get(alias, ()), knob)
    return names
