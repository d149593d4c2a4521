"""How likely it is that a difference changes numbers: one row per kind of difference."""

from __future__ import annotations

from enum import StrEnum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Rank(StrEnum):
    """How likely a difference changes numbers, the likeliest first."""

    CHANGES = "changes numbers"
    MAY = "may change numbers"
    SHOULD_NOT = "should not change numbers"
    PROGRAM = "another program"
    """The source has changed, which a lock does not hold: a run is locked, and code goes on."""
    STARTED = "how it was started"


ORDER: Mapping[Rank, int] = {rank: position for position, rank in enumerate(Rank)}

HELD = (Rank.CHANGES, Rank.MAY)
"""What a lock is held to."""

HELD_STRICTLY = (*HELD, Rank.SHOULD_NOT)

ROWS: tuple[tuple[str, Rank], ...] = (
    ("profile/name", Rank.SHOULD_NOT),
    ("profile/description", Rank.SHOULD_NOT),
    ("profile/schema", Rank.SHOULD_NOT),
    ("profile/requires*", Rank.SHOULD_NOT),
    ("profile/on_late", Rank.SHOULD_NOT),
    ("profile/guard*", Rank.SHOULD_NOT),
    ("profile/*", Rank.CHANGES),
    ("asked/*", Rank.CHANGES),
    ("guarantee/*", Rank.MAY),
    ("knobs/*", Rank.CHANGES),
    ("seeding calls/*", Rank.CHANGES),
    ("environment/*_VISIBLE_DEVICES", Rank.MAY),
    ("environment/*_AFFINITY", Rank.MAY),
    ("environment/OMP_P*", Rank.MAY),
    ("environment/*", Rank.CHANGES),
    ("versions/torch", Rank.CHANGES),
    ("versions/torch_npu", Rank.CHANGES),
    ("versions/torch commit", Rank.CHANGES),
    ("versions/cuda", Rank.CHANGES),
    ("versions/hip", Rank.CHANGES),
    ("versions/cudnn", Rank.CHANGES),
    ("versions/cann", Rank.CHANGES),
    ("versions/blas", Rank.CHANGES),
    ("versions/blas of torch", Rank.CHANGES),
    ("versions/onednn", Rank.CHANGES),
    ("versions/python patch", Rank.SHOULD_NOT),
    ("versions/kernel", Rank.SHOULD_NOT),
    ("versions/hydra-core", Rank.SHOULD_NOT),
    ("versions/omegaconf", Rank.SHOULD_NOT),
    ("versions/pydantic", Rank.SHOULD_NOT),
    ("versions/torchrepro", Rank.SHOULD_NOT),
    ("versions/*", Rank.MAY),
    ("hardware/system", Rank.CHANGES),
    ("hardware/machine", Rank.CHANGES),
    ("hardware/cpus", Rank.MAY),
    ("hardware/cpu*", Rank.CHANGES),
    ("hardware/instruction set", Rank.CHANGES),
    ("hardware/threads", Rank.CHANGES),
    ("hardware/gpu", Rank.CHANGES),
    ("hardware/npu", Rank.CHANGES),
    ("hardware/accelerator", Rank.CHANGES),
    ("hardware/*", Rank.MAY),
    ("packs/*", Rank.SHOULD_NOT),
    ("processes/*", Rank.CHANGES),
    ("source/*", Rank.PROGRAM),
    ("started/*", Rank.STARTED),
)
"""Section and key, as a pattern, and the rank; the first row that fits counts."""


def rank_of(section: str, key: str) -> Rank:
    """Return how likely a difference in `key` of `section` changes numbers."""
    name = f"{section}/{key}"
    return next((rank for pattern, rank in ROWS if fnmatchcase(name, pattern)), Rank.MAY)
