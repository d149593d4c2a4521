"""How much torchrepro says on standard error: what needs attention, everything, or next to nothing.

`--verbose` and `--quiet` of a command set the variable for all that it starts. So under Hydra and
pytest, which have options of their own, the variables decide.
"""

from __future__ import annotations

import os
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Verbosity(StrEnum):
    """How much is said."""

    QUIET = "quiet"
    """Errors, and a guarantee that is lowered."""

    NORMAL = "normal"
    """One line, and what needs attention."""

    VERBOSE = "verbose"
    """Every knob."""


VARIABLES: Mapping[Verbosity, str] = {
    Verbosity.VERBOSE: "TORCHREPRO_VERBOSE",
    Verbosity.QUIET: "TORCHREPRO_QUIET",
}
"""The variable that asks for each, the one that wins first; empty and 0 ask for nothing."""

BOTH_SET = f"{' and '.join(VARIABLES.values())} are both set: {VARIABLES[Verbosity.VERBOSE]} wins"


def asked_for() -> tuple[Verbosity, ...]:
    """Return what the environment asks for, the one that counts first."""
    return tuple(
        each for each, name in VARIABLES.items() if os.environ.get(name, "") not in ("", "0")
    )


def verbosity() -> Verbosity:
    """Return how much is to be said in this process."""
    return next(iter(asked_for()), Verbosity.NORMAL)


def environment_for(wanted: Verbosity) -> dict[str, str]:
    """Return the variables by which a process and all that it starts say as much as is `wanted`."""
    return {name: str(int(each is wanted)) for each, name in VARIABLES.items()}
