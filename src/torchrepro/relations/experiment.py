"""A command that is run in several ways, and what a relation is for it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from torchrepro.relations.observations import VARIABLE
from torchrepro.verification.perturbations import RunEnvironment

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import ExitStack
    from pathlib import Path

    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.relations.related import Side
    from torchrepro.trace.request import Request
    from torchrepro.verification.result import Run
    from torchrepro.verification.runner import Runner


@dataclass(frozen=True, slots=True)
class Experiment:
    """A command that is run in several ways."""

    runner: Runner
    resolved: ResolvedProfile | None
    open: ExitStack
    """What has to be undone once all is over, also after a signal."""
    checkpoint: str = ""
    """The files that are a checkpoint, as a pattern; empty where their contents say so."""
    resume_command: str = ""
    """What goes on from a checkpoint; empty where the command itself does."""
    copies: dict[str, str] = field(default_factory=dict)
    """The folders in which runs are, each with that of the user which it is a copy of."""

    def run(
        self,
        name: str,
        observed: Mapping[str, Any] | None = None,
        environment: RunEnvironment | None = None,
        resolved: ResolvedProfile | None = None,
        runner: Runner | None = None,
    ) -> Run:
        """Run the command once, with what each of its processes is to observe of itself."""
        self.runner.say(f"{name.replace('-', ' ')} ...")
        environment = environment or RunEnvironment()
        if observed is not None:
            told = {"folder": str(self.observed(name)), **observed}
            self.observed(name).mkdir()
            environment |= RunEnvironment({VARIABLE: json.dumps(told)})
        return (runner or self.runner).run(resolved or self.resolved, name, environment)

    def in_own(self, value: Any) -> Any:
        """Return an answer with the paths of copies, which are gone then, as the user's own."""
        if type(value) is str:
            for copy, own in self.copies.items():
                value = value.replace(copy, own)
            return value
        if isinstance(value, tuple):
            return tuple(map(self.in_own, value))
        if is_dataclass(value) and not isinstance(value, type):
            names = [each.name for each in fields(value)]
            return replace(value, **{name: self.in_own(getattr(value, name)) for name in names})
        return value

    def observed(self, name: str) -> Path:
        """Return the folder of what the processes of a run observe."""
        return self.runner.folder / f"{name}.observed"


class Relation(Protocol):
    """How a program is run in another way, and compared."""

    agreement: str
    """What it is that holds where all agree, as a sentence."""

    takes: frozenset[str]
    """Options that it has a use for, which other relations refuse."""

    def recorded(self, request: Request) -> Request:
        """Return what is to be recorded of its runs."""

    def plain(self, experiment: Experiment, name: str) -> Run:
        """Run the plain program."""

    def sides(self, experiment: Experiment, plain: Run) -> Iterator[Side]:
        """Run the program in its other ways, each compared with a plain run."""
