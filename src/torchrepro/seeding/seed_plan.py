"""The one place that says which seed every stream of this process derives from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torchrepro.errors import SeedingError
from torchrepro.messages import Problem
from torchrepro.seeding.ranks import Mesh, RankPolicy, coordinate


@dataclass(frozen=True, slots=True)
class SeedPlan:
    """What the profiles in force say about random numbers, and what this process knows of ranks."""

    seed: int | None = None
    """The root; None where no profile with a seed is in force."""

    streams: Mapping[str, int] = field(default_factory=dict)
    """Streams that have a root of their own."""

    ranks: RankPolicy = None
    """`distinct`, `same`, one of the two per mesh dimension, or None for what is usual: named
    streams differ between ranks, the global generators start from one seed."""

    mesh: Mesh | None = None
    rank: int | None = None
    """The number by which this process differs, where it was told rather than finds it out."""

    started_as: int = 0
    """The rank from whose seed the global generators started."""

    @property
    def ranks_differ(self) -> bool:
        """Whether the global generators of ranks start from different seeds, as far as known."""
        if isinstance(self.ranks, Mapping):
            return self.mesh is not None  # which ranks differ is only known with the mesh
        return self.ranks == "distinct"

    def root(self, name: str) -> int:
        """Return the seed that the stream `name` derives from; raises `SeedingError` if none."""
        seed = self.streams.get(name, self.seed)
        if seed is None:
            raise SeedingError(
                Problem(
                    "no profile with a seed is in force, so the stream has nothing to derive from",
                    found=f"stream {name!r}",
                    todo="torchrepro.apply('seed-only') first, or give the profile a `seed`",
                )
            )
        return seed

    def coordinate(self, policy: RankPolicy = None) -> int:
        """Return the number by which ranks that draw differently differ; 0 under `same`."""
        chosen = self.ranks if policy is None else policy
        if self.rank is not None and chosen != "same":
            return self.rank
        return coordinate(chosen, self.mesh)

    def to_json(self) -> dict[str, Any]:
        """Return what has to be the same for two processes to draw the same numbers."""
        ranks = dict(self.ranks) if isinstance(self.ranks, Mapping) else self.ranks
        return {"seed": self.seed, "streams": dict(self.streams), "ranks": ranks}


_plan = SeedPlan()
_drawn: set[str] = set()


def current() -> SeedPlan:
    """Return the seed plan of this process."""
    return _plan


def put(plan: SeedPlan) -> None:
    """Make `plan` the seed plan of this process."""
    global _plan  # noqa: PLW0603 - the plan is one piece of process state, and this its only writer
    _plan = plan


def note(name: str) -> None:
    """Remember that the stream `name` was asked for."""
    _drawn.add(name)


def never_drawn() -> tuple[str, ...]:
    """Return the streams that have a seed of their own and that nobody has asked for."""
    return tuple(sorted(set(_plan.streams) - _drawn))


def drawn() -> tuple[str, ...]:
    """Return the names of the streams that were asked for in this process."""
    return tuple(sorted(_drawn))


@dataclass(frozen=True, slots=True)
class PlanField:
    """One field of the seed plan as a knob's state; undo brings the whole plan back."""

    name: str
    present: Any = None
    """What an unset field comes to."""

    def read(self) -> Any:
        value = getattr(_plan, self.name)
        return dict(value) if isinstance(value, Mapping) else value

    def holds(self, value: Any) -> bool:
        now = self.read()
        return bool((self.present if now is None else now) == value)

    def write(self, value: Any) -> None:
        _drawn.clear()
        change: dict[str, Any] = {self.name: dict(value) if isinstance(value, Mapping) else value}
        put(replace(_plan, **change))

    def save(self) -> SeedPlan:
        return _plan

    def restore(self, saved: SeedPlan) -> None:
        put(saved)
