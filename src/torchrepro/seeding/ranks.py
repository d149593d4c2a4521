"""Which of the processes of a run this one is, and which of them draw the same numbers."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torchrepro.errors import SeedingError
from torchrepro.messages import near, shown

POLICIES = ("distinct", "same")
RankPolicy = str | Mapping[str, str] | None

VARIABLES = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))
"""Variables that name a process and count them: torchrun's, then Slurm's."""

_LONGEST = 18  # digits: no run has as many processes

AGREEING = frozenset({"tp", "sp", "cp", "tensor", "tensor_parallel", "sequence", "context"})
"""Mesh dimensions along which ranks work on one sample and so draw the same numbers."""


class Mesh(NamedTuple):
    """Where this process stands in a device mesh: names, sizes and position per dimension."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    position: tuple[int, ...]


class World(NamedTuple):
    """How many processes a run has, and which of them this one is."""

    size: int = 1
    rank: int = 0


def process_group() -> World | None:
    """Return the place of this process in the group of torch.distributed; None without one."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return None
    return World(distributed.get_world_size(), distributed.get_rank())


def world() -> World:
    """Return the place of this process, from torch.distributed or the variables of a launcher.

    A process that nobody numbered is rank 0 of 1. Raises `SeedingError` for a variable that holds
    no number.
    """
    group = process_group()
    if group is not None:
        return group
    for rank, size in VARIABLES:
        if rank in os.environ:
            mine = _number(rank)
            return World(max(_number(size), mine + 1), mine)
    return World()


def coordinate(policy: RankPolicy, mesh: Mesh | None) -> int:
    """Return the number by which ranks differ under `policy`; ranks that share it draw the same.

    Along a mesh, dimensions that `policy` does not name differ, save those in `AGREEING`.
    Raises `SeedingError` if `policy` names mesh dimensions and no mesh, or another, is known.
    """
    if policy == "same":
        return 0
    if mesh is None:
        here = world()
        if isinstance(policy, Mapping) and here.size > 1:
            raise SeedingError.about(
                "names dimensions of a device mesh, and this process knows none",
                key="ranks",
                found=shown(dict(policy)),
                todo="call torchrepro.use_mesh(mesh) once the mesh is made",
            )
        return here.rank
    _check_dimensions(policy, mesh.names)
    number = 0
    for name, size, place in zip(mesh.names, mesh.sizes, mesh.position, strict=True):
        default = "same" if name in AGREEING else "distinct"
        if (policy.get(name, default) if isinstance(policy, Mapping) else default) == "distinct":
            number = number * size + place
    return number


def checked_policy(policy: Any) -> RankPolicy:
    """Return `policy` if it is one; raises `SeedingError` otherwise."""
    for choice in policy.values() if isinstance(policy, Mapping) else [policy]:
        if choice is not None and choice not in POLICIES:
            raise SeedingError.about(
                "not a policy for ranks",
                key="ranks",
                found=shown(choice),
                legal=", ".join(POLICIES),
                near=near(str(choice), POLICIES),
            )
    return policy  # type: ignore[no-any-return]


def mesh_place(mesh: Any, policy: RankPolicy) -> Mesh:
    """Return where this process stands in the torch `DeviceMesh` called `mesh`.

    Raises `SeedingError` if its dimensions have no names, if it leaves this process out, or if
    `policy` names a dimension that it does not have.
    """
    if not hasattr(mesh, "mesh_dim_names"):
        raise SeedingError.about("not a device mesh", found=shown(mesh), legal="a torch DeviceMesh")
    names, position = mesh.mesh_dim_names, mesh.get_coordinate()
    if not names or position is None:
        problem = "leaves this rank out" if names else "has no names for its dimensions"
        raise SeedingError.about(
            f"the mesh {problem}",
            found=shown(mesh),
            todo="init_device_mesh(..., mesh_dim_names=('dp', 'tp'))",
        )
    _check_dimensions(policy, names)
    return Mesh(tuple(names), tuple(mesh.size(d) for d in range(mesh.ndim)), tuple(position))


def _check_dimensions(policy: RankPolicy, names: Sequence[str]) -> None:
    for name in policy if isinstance(policy, Mapping) else ():
        if name not in names:
            raise SeedingError.about(
                "the mesh has no such dimension",
                key=f"ranks.{name}",
                legal=", ".join(names),
                near=near(name, names),
            )


def _number(variable: str) -> int:
    text = os.environ.get(variable, "1")
    if not (text.isascii() and text.isdigit() and len(text) < _LONGEST):
        raise SeedingError.about("not the number of a process", f"${variable}", found=shown(text))
    return int(text)
