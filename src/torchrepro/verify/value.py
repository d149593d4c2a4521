"""What verifying a command says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrepro.console import Displayed

if TYPE_CHECKING:
    from torchrepro.verdict.ladder import Rung
    from torchrepro.verdict.value import Verdict


@dataclass(frozen=True, slots=True)
class Run:
    """A command that was run once and recorded."""

    name: str
    folder: str
    """Where its traces are."""
    log: str
    """The file that has what it printed."""
    status: int
    """Its exit status; negative where a signal ended it."""
    seconds: float
    steps: int
    """Steps that were recorded of its first process; 0 if nothing was recorded."""
    perturbed: tuple[str, ...] = ()
    """What was perturbed in it."""


@dataclass(frozen=True, slots=True)
class Stressed:
    """What was perturbed, and which of it made the runs part."""

    perturbed: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    """What could not be perturbed, each with the reason."""
    culprits: tuple[str, ...] = ()
    """What makes the runs part by itself; several where it takes all of them together."""
    what: str = ""
    """One sentence on that, where the runs part."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A rung of the ladder on which the command was verified."""

    rung: Rung
    same: bool
    what: str
    """The answer in one line."""


@dataclass(frozen=True, slots=True)
class Verification(Displayed):
    """The answer: whether all runs of a command were the same."""

    asked: str
    """``bits`` or ``tolerance``."""
    certifies: str
    """The command line that was verified, as a shell takes it; what could be a secret is hidden."""
    profile: str | None
    """The name of the profile that the command was started under; None for one run as it is."""
    own_profile: str | None
    """The name of the one that the command put in force itself, where it was run as it is."""
    runs: tuple[Run, ...]
    verdicts: tuple[Verdict, ...]
    """The first run against each of the others, in their order."""
    folder: str
    """Where recordings and logs are; empty if they were removed because all runs were the same."""
    stressed: Stressed | None = None
    """None where nothing was perturbed."""
    climbed: tuple[Tried, ...] | None = None
    """The rungs that were tried, from the lowest; None where nobody asked, or had to."""
    next_rung: Rung | None = None
    """What to try next."""

    @property
    def same(self) -> bool:
        """Whether all runs were the same."""
        return all(verdict.same for verdict in self.verdicts)

    @property
    def verdict(self) -> Verdict:
        """The verdict that tells most: the first one that says no, if one does."""
        parted = (verdict for verdict in self.verdicts if not verdict.same)
        return next(parted, self.verdicts[0])

    @property
    def equal_on(self) -> Rung | None:
        """The rung of the ladder on which the runs became the same."""
        return next((tried.rung for tried in self.climbed or () if tried.same), None)
