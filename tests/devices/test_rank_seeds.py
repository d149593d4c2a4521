"""If a rank learns its number late, the seeds that the program has set on a device stay."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchrepro
from torchrepro.seeding.global_seeds import seed_as_this_rank
from torchrepro.seeding.streams import seed_of_rank

OnNpu = Callable[..., Any]
OF_RANK = seed_of_rank(1, 5)
SEEDING: dict[str, tuple[Callable[[], Any], tuple[int, int]]] = {
    "nothing": (lambda: None, (OF_RANK, OF_RANK)),
    "both": (lambda: torch.manual_seed(3), (3, 3)),
    "the device": (lambda: torch.npu.manual_seed_all(3), (OF_RANK, 3)),
    "the CPU": (lambda: torch.default_generator.manual_seed(3), (3, OF_RANK)),
    "both, as the profile does": (lambda: torch.manual_seed(1), (OF_RANK, OF_RANK)),
    "both, for a while": (torchrepro.isolated_rng()(lambda: torch.manual_seed(3)), (OF_RANK,) * 2),
}
"""What a program seeds, and the seeds of the CPU and of the device once it knows its rank."""


def seeds_of_rank(name: str) -> tuple[int, int]:
    """Return the seeds of the CPU and the device, after the program called these functions."""
    seeding, _ = SEEDING[name]
    with torchrepro.apply({"seed": 1, "ranks": "distinct"}):
        seeding()
        os.environ |= {"RANK": "5", "WORLD_SIZE": "8"}
        try:
            seed_as_this_rank()
        finally:
            del os.environ["RANK"], os.environ["WORLD_SIZE"]
        return torch.initial_seed(), torch.npu.initial_seed()


@pytest.mark.parametrize("name", SEEDING)
def test_a_device_starts_from_the_seed_of_its_rank_unless_the_program_seeded_it(
    name: str, on_npu: OnNpu
) -> None:
    """Of the CPU and the device, exactly the one that the program has seeded keeps its seed."""
    assert on_npu(seeds_of_rank, name) == SEEDING[name][1]
