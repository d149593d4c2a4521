"""What surrounds a run: variables, its folder; all that a result must not depend on."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchrepro.verify.perturbed import VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a command is started in, besides its profile."""

    variables: Mapping[str, str] = field(default_factory=dict)
    inside: Mapping[str, Any] = field(default_factory=dict)
    """What each Python process below does to itself, by name (see `perturbed`)."""
    elsewhere: bool = False
    """Whether the working directory is reached by another path."""

    def environment(self) -> dict[str, str]:
        """Return the variables that carry to a command what is done by them, or within it."""
        carried = {VARIABLE: json.dumps(self.inside)} if self.inside else {}
        return {**self.variables, **carried}


def together(parts: Iterable[Surroundings]) -> Surroundings:
    """Return several surroundings as one; of two values the later holds."""
    variables: dict[str, str] = {}
    inside: dict[str, Any] = {}
    elsewhere = False
    for part in parts:
        variables |= part.variables
        inside |= part.inside
        elsewhere = elsewhere or part.elsewhere
    return Surroundings(variables, inside, elsewhere)
