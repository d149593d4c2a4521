"""The perturbations that are used on a command, and what surrounds its runs then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrepro.errors import ProfileError
from torchrepro.messages import Problem, near
from torchrepro.verify.perturbation import PERTURBATIONS
from torchrepro.verify.surroundings import Surroundings, together
from torchrepro.verify.value import Stressed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torchrepro.profile.resolved import Resolved
    from torchrepro.verify.perturbation import Perturbation

EVERYTHING = tuple(row.name for row in PERTURBATIONS)
"""The names of all perturbations."""


@dataclass(frozen=True, slots=True)
class Storm:
    """Perturbations in force."""

    rows: tuple[Perturbation, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, names: Iterable[str], resolved: Resolved | None) -> Storm:
        """Return the perturbations of these names that can be used under a profile, if any.

        Raises `ProfileError` for a name that there is not.
        """
        rows = [_row(name) for name in dict.fromkeys(names)]
        settled = resolved.environment() if resolved is not None else {}
        reasons = [(row, row.skipped(settled)) for row in rows]
        return cls(
            tuple(row for row, reason in reasons if not reason),
            tuple((row.name, reason) for row, reason in reasons if reason),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the perturbations."""
        return tuple(row.name for row in self.rows)

    @property
    def used(self) -> Stressed | None:
        """What there is to say of it before any run; None where nobody asked for it."""
        return Stressed(self.names, self.skipped) if self.rows or self.skipped else None

    @property
    def calm(self) -> Surroundings:
        """What surrounds a run that is not perturbed."""
        return together(row.calm for row in self.rows)

    def around(self, number: int, names: Sequence[str]) -> Surroundings:
        """Return what surrounds run `number` if these perturbations alone act on it."""
        return together(row.around(number) if row.name in names else row.calm for row in self.rows)


def _row(name: str) -> Perturbation:
    found = next((row for row in PERTURBATIONS if row.name == name), None)
    if found is None:
        raise ProfileError(
            Problem(
                "no such perturbation",
                found=name,
                near=near(name, EVERYTHING),
                legal=", ".join(EVERYTHING),
            )
        )
    return found
