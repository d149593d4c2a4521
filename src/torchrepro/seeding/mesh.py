"""Telling torchrepro of a device mesh: which ranks draw the same numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchrepro.seeding import generators, libraries, streams
from torchrepro.seeding.ranks import Mesh, mesh_place
from torchrepro.seeding.streams import seed_of_rank

if TYPE_CHECKING:
    from torchrepro.seeding.streams import SeedPlan


def use_mesh(mesh: Any) -> Mesh:
    """Tell the streams of this process where it stands in `mesh`, a torch `DeviceMesh`.

    From then on ranks differ along the dimensions that the profile's `ranks` calls distinct;
    dimensions it does not name differ unless they share one sample (`tp`, `sp`, `cp`). Where the
    profile makes ranks distinct, the global generators start anew from this rank's seed. Undone
    with the profile. Raises `SeedingError` for a mesh without names, one that leaves this rank
    out, or one that lacks a dimension which the profile names.
    """
    plan = streams.current_plan()
    place = mesh_place(mesh, plan.ranks)
    plan = replace(plan, mesh=place)
    streams.put_plan(plan)
    if plan.seed is not None and plan.ranks_differ:
        _start(plan, plan.coordinate())
    return place


def seed_as_this_rank() -> None:
    """Start the global generators from this rank's seed, if they started from another rank's.

    A process that only learns its rank when the process group is made started as rank 0.
    """
    plan = streams.current_plan()
    if plan.seed is None or not plan.ranks_differ:
        return
    if plan.coordinate() != plan.started_as:
        _start(plan, plan.coordinate())


def _start(plan: SeedPlan, rank: int) -> None:
    streams.put_plan(replace(plan, started_as=rank))
    if plan.seed is not None:
        _seed_everything(seed_of_rank(plan.seed, rank))


def _seed_everything(seed: int) -> None:
    import random

    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    for module in generators.devices_in_use().values():
        generators.seed_device(module, seed)
    libraries.seed_again(seed)
