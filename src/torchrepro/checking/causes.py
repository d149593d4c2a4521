"""What changed the results of a command since its lock, decided from a table of results.

A cell of the table is a combination of code and environment. Two cells are known from the start:
the results in the lock, and the results of the run that differs from it. `attribution` runs the
other cells, one at a time. No function of this module runs a program or reads a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.ground.errors import printable, some
from torchrepro.lock.diff import Impact, change
from torchrepro.lock.locked_results import Numbers, first_difference
from torchrepro.verdict.render import moment, relative_location

if TYPE_CHECKING:
    from torchrepro.lock.diff import Difference
    from torchrepro.verdict.value import Divergence

CODE, ENVIRONMENT, BOTH, UNKNOWN = "code", "environment", "both", "unknown"
WORDS: Mapping[str, str] = {
    CODE: "your change: the locked code gives the locked results here",
    ENVIRONMENT: "the environment: the locked code gives different results here too",
    BOTH: "both: the locked code gives different results here, and your code differs from both",
    UNKNOWN: "cannot tell",
}
_NOT_LOCKED = (
    "the lock does not record all files outside of git, and variable values only for numerical "
    "libraries"
)


@dataclass(frozen=True, slots=True)
class Who:
    """The reason why the results of a run differ from the results in a lock."""

    who: str  # ``code``, ``environment``, ``both`` or ``unknown``
    why: str = ""  # why the cause is unknown
    suspects: tuple[Difference, ...] = ()  # differences of the environment, the likeliest first
    where: Divergence | None = None
    """The first op whose results differ between old and new code, both recorded today."""

    @property
    def rows(self) -> Iterator[tuple[str, str]]:
        yield "cause", f"{WORDS[self.who]}: {self.why}" if self.why else WORDS[self.who]
        if self.suspects:
            likeliest, *further = map(change, self.suspects)
            then = f" (then: {some(further)})" if further else ""
            verb = "differs" if self.who == UNKNOWN else "is the likeliest"
            yield "", f"{likeliest} {verb}{then}"
        if self.where is not None:
            divergence = self.where
            source = relative_location(divergence.source)
            text = "  ".join(filter(None, (source, divergence.module, divergence.op)))
            if when := moment(divergence.step, after_last=divergence.after_last):
                phase = f"{divergence.phase} of " if divergence.phase else ""
                text = f"{text}, {phase}{when.removeprefix('at ')}"
            yield "where", printable(text)

    def to_json(self) -> dict[str, Any]:
        divergence = self.where
        names = ("rank", "step", "phase", "module", "op", "source")
        return {
            "who": self.who,
            "why": self.why,
            "suspects": [suspect.to_json("locked", "here") for suspect in self.suspects],
            "where": divergence and {name: getattr(divergence, name) for name in names},
        }


class Cell(NamedTuple):
    """A combination of code and environment under which the command has results."""

    name: str  # the name of the run
    code: str  # as messages call it
    with_untracked: bool = False  # today's untracked files are added to the locked code


LOCKED_CODE, YOUR_CODE = "the locked code", "your code"

LOCK = Cell("lock", LOCKED_CODE)  # in the locked environment, as the lock stores it
HERE = Cell("here", YOUR_CODE)
OLD = Cell("old", LOCKED_CODE)
OLD_UNTRACKED = Cell("old-untracked", LOCKED_CODE, with_untracked=True)
OLD_VARIABLES = Cell("old-variables", LOCKED_CODE, with_untracked=True)
"""Variables that differ from the lock have their locked values in this cell."""


@dataclass(slots=True)
class Table:
    """The known results of each cell, and the differences that no cell can show.

    `attribution` makes one for a check whose results differ, and adds results until `next_cell`
    asks for no more. `cause` then reads it.
    """

    results: dict[Cell, Numbers]  # at first of `LOCK` and `HERE`
    has_untracked: bool = False  # whether the locked run may have used files that are untracked
    settings: tuple[Difference, ...] = ()
    """Differences of the environment that may change results, the likeliest first."""
    read: Mapping[str, str] = field(default_factory=dict)
    """Variables that the locked run read, each ``set`` or ``not set``."""
    dependencies: tuple[Difference, ...] = ()
    """Differences of other dependencies of the run, known once the locked code has run."""

    def agree(self, left: Cell, right: Cell) -> bool:
        return first_difference(self.results[left], self.results[right]) is None

    @property
    def old(self) -> Cell:
        """The most complete cell of the locked code in today's environment."""
        return OLD_UNTRACKED if OLD_UNTRACKED in self.results else OLD

    @property
    def old_variables(self) -> dict[str, str | None]:
        """The locked values of the variables that differ; None for a variable that was not set.

        Empty if another setting differs too, or if the lock has only the digest of a value.
        """
        variables = {}
        for difference in self.settings:
            is_digest = difference.section == "other variables" and difference.left is not None
            if is_digest or difference.section not in ("environment", "other variables"):
                return {}
            variables[difference.key] = difference.left
        return variables


def next_cell(table: Table) -> Cell | None:
    """Return the cell on whose results the cause depends and that has none yet, or None."""
    if OLD not in table.results:
        return OLD
    if table.agree(LOCK, table.old):
        return None
    if table.has_untracked and OLD_UNTRACKED not in table.results:
        return OLD_UNTRACKED
    can_revert = table.old_variables and not table.dependencies
    return OLD_VARIABLES if can_revert and OLD_VARIABLES not in table.results else None


def cause(table: Table) -> Who:
    """Return what changed the results, from a table for which `next_cell` returns None.

    If the locked code gives the locked results today, the code is the cause. The environment is
    the cause if its differences explain the results of the locked code, and if no other known
    dependency differs. In all other cases the cause is unknown.
    """
    if table.agree(LOCK, table.old):
        return Who(CODE)
    settings, differs_too = table.settings, not table.agree(HERE, table.old)
    if settings and not table.dependencies and _settings_explain(table):
        return Who(BOTH if differs_too else ENVIRONMENT, suspects=settings)
    why = "the locked code gives different results here too"
    if differs_too:
        why = f"{why}, and your code differs from both"
    if not table.dependencies:
        known = "nothing that the lock records differs"
        if settings:
            known = "the differences of the environment may not be the cause"
        reads = f"; the program reads {some(table.read)}" if table.read else ""
        why = f"{why}, and {known}; {_NOT_LOCKED}{reads}"
    return Who(UNKNOWN, why, (*table.dependencies, *settings))


def _settings_explain(table: Table) -> bool:
    """Return whether the differences of settings explain the results of the locked code.

    With the old values of variables, the locked code has to give the locked results. Differences
    that cannot be reverted explain the results if one of them is known to change results, or if
    the locked run read no variable that was set.
    """
    if OLD_VARIABLES in table.results:
        return table.agree(LOCK, OLD_VARIABLES)
    changes = any(difference.impact is Impact.CHANGES for difference in table.settings)
    return changes or "set" not in table.read.values()
