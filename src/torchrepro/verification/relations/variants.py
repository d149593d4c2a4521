"""What relations have in common: how a program is run in other ways, and the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from torchrepro.ground.console import Displayed, listing, parts
from torchrepro.ground.messages import printable
from torchrepro.verdict.page import Answer, PageSection, RunRow, page_of
from torchrepro.verdict.render import counted, headline, verdict_parts
from torchrepro.verification.at_start import OBSERVED
from torchrepro.verification.perturbations import RunEnvironment

if TYPE_CHECKING:
    from contextlib import ExitStack
    from pathlib import Path

    from torchrepro.ground.console import Part
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.verdict.value import Verdict
    from torchrepro.verification.result import Run
    from torchrepro.verification.runner import Runner

AGREE, DIFFER, UNKNOWN = 0, 1, 4


@dataclass
class Relation:
    """A program that is run in two ways which ought to agree."""

    agreement: ClassVar[str]  # what it is that holds where all agree, as a sentence
    takes: ClassVar[frozenset[str]]  # options that it has a use for, which other relations refuse
    loading: ClassVar[bool] = True
    """Whether it is recorded by which ops the main process loads a batch."""

    runner: Runner
    resolved: ResolvedProfile | None
    open: ExitStack  # what has to be undone once all is over, also after a signal
    checkpoint: str = ""
    """The files that are a checkpoint, as a pattern; empty where their contents say so."""
    resume_command: str = ""  # what goes on from a checkpoint; empty where the command itself does
    copies: dict[str, str] = field(default_factory=dict)
    """The folders in which runs are, each with that of the user which it is a copy of."""
    strayed: str = ""  # what a run would have written outside of its copy, so that it may fail

    def plain(self, name: str) -> Run:
        return self.run(name)

    def sides(self, plain: Run) -> Iterator[Variant]:
        """Run the program in its other ways, each compared with a plain run."""
        raise NotImplementedError

    def run(
        self,
        name: str,
        environment: RunEnvironment | None = None,
        observed: Mapping[str, Any] | None = None,
        resolved: ResolvedProfile | None = None,
        runner: Runner | None = None,
    ) -> Run:
        """Run the command once; `observed` is what its processes note (see `OBSERVED`)."""
        self.runner.say(f"{name.replace('-', ' ')} ...")
        environment = environment or RunEnvironment()
        if observed is not None:
            folder = self._notes(name)
            folder.mkdir()
            told = {path: {"folder": str(folder), **its} for path, its in observed.items()}
            environment |= RunEnvironment(in_process={OBSERVED: told})
        return (runner or self.runner).run(resolved or self.resolved, name, environment)

    def noted(self, run: Run) -> list[list[dict[str, Any]]]:
        """Return what each process of a run has noted, rank by rank."""
        places = sorted(self._notes(run.name).glob("*.jsonl"))
        texts = (place.read_text(encoding="utf-8").splitlines() for place in places)
        # The last line may be cut off.
        return [[json.loads(line) for line in lines if line.endswith("}")] for lines in texts]

    def _notes(self, name: str) -> Path:
        return self.runner.folder / f"{name}.observed"

    def in_own(self, value: Any) -> Any:
        """Return an answer with the paths of copies, which are gone then, as the user's own."""
        if type(value) is str:
            for copy, own in self.copies.items():
                value = value.replace(copy, own)
            return value
        if isinstance(value, tuple):
            kind = getattr(type(value), "_make", tuple)
            return kind(map(self.in_own, value))
        if is_dataclass(value) and not isinstance(value, type):
            names = [each.name for each in fields(value)]
            return replace(value, **{name: self.in_own(getattr(value, name)) for name in names})
        return value


@dataclass(frozen=True, slots=True)
class NotRestored:
    """A part of the state of a run that a resumed run does not have again."""

    kind: str
    """``parameter``, ``gradient``, ``buffer``, ``optimizer``, ``scheduler``, ``scaler``,
    ``generator``, ``loader`` or ``sampler``."""
    name: str
    what: str = ""  # one more sentence, where there is more to say
    restored: str = ""  # the line that restored it, where another one has changed it since

    def __str__(self) -> str:
        if self.restored:
            return f"{self.kind} {self.name} at {self.restored}, {self.what}"
        return f"{self.kind} {self.name}{f': {self.what}' if self.what else ''}"


@dataclass(frozen=True, slots=True)
class Variant:
    """One other execution, and how it compares with the plain one."""

    name: str  # as in ``2 workers``
    run: Run | None  # None where it was not run
    verdict: Verdict | None = None  # None where nothing can be said
    unknown: str = ""  # why nothing can be said, and what to do; empty where something can
    not_restored: tuple[NotRestored, ...] = ()
    said: str = ""  # what a reader has to know of a yes, as the tolerance within which it holds

    @property
    def status(self) -> int:
        if self.verdict is None:
            return UNKNOWN
        return AGREE if self.verdict.same else DIFFER


@dataclass(frozen=True, slots=True)
class Related(Displayed):
    """The answer: whether executions of a program agree that ought to."""

    relation: str
    agreement: str
    command: str
    plain: tuple[Run, ...]
    plain_verdict: Verdict  # of the plain program with itself
    sides: tuple[Variant, ...]
    folder: str  # where recordings and logs are; empty if they were removed

    @property
    def status(self) -> int:
        """The exit status: 0 all agree, 1 one does not, 4 cannot tell."""
        statuses = {side.status for side in self.sides} if self.plain_verdict.same else {UNKNOWN}
        return next((each for each in (DIFFER, UNKNOWN) if each in statuses), AGREE)

    @property
    def unknown(self) -> str:
        if self.status != UNKNOWN:
            return ""
        if not self.plain_verdict.same:
            return "the plain program, run twice, does not agree with itself"
        return next(side.unknown for side in self.sides if side.unknown)

    @property
    def deciding(self) -> Variant | None:
        return next((side for side in self.sides if side.status == DIFFER), None)

    @property
    def verdict(self) -> Verdict:
        """The verdict that decides: of the side that differs, or of the plain program."""
        side = self.deciding
        return side.verdict if side and side.verdict else self.plain_verdict


def _headline(found: Related) -> str:
    if found.unknown:
        return f"cannot tell: {found.unknown}"
    side = found.deciding
    return f"{side.name}: {headline(found.verdict)}" if side else f"agree: {found.agreement}"


@parts.register(Related)
def _related_parts(found: Related) -> tuple[Part, ...]:
    verdict = verdict_parts(found.verdict)[1:] if not found.verdict.same else ()
    rows = [(f"  {label:<10}", printable(text)) for label, text in _rows(found)]
    return (_headline(found), *verdict, listing(rows, style="bold"))


def related_page(found: Related) -> str:
    named = [("plain program", found.plain[0]), *((s.name, s.run) for s in found.sides if s.run)]
    rows = [
        RunRow(name, {"Steps": f"{run.steps:,}", "Seconds": f"{run.seconds:.1f}"})
        for name, run in named
    ]
    lines = [f"{label}: {text}" for label, text in _rows(found)]
    compared = [PageSection(found.verdict)]
    return page_of(Answer(found.status == AGREE, _headline(found), lines, rows, compared))


def _rows(found: Related) -> Iterator[tuple[str, str]]:
    for lost in found.deciding.not_restored if found.deciding else ():
        yield "restored" if lost.restored else "not restored", str(lost)
    yield "relation", found.relation
    for each in found.sides:
        if each.verdict is not None:
            steps = counted(each.verdict.compared.steps, "step")
            agrees = f"agrees, {steps} compared" if each.verdict.same else headline(each.verdict)
            yield "compared", "; ".join(filter(None, (f"{each.name}: {agrees}", each.said)))
        elif not found.unknown:
            yield "cannot tell", f"{each.name}: {each.unknown}"
    yield "command", found.command
    if found.folder:
        yield "recordings", found.folder


def related_json(found: Related) -> dict[str, Any]:
    """Return the answer as plain JSON values: those of the verdict that decides, and more."""
    side, sides = found.deciding, []
    for each in found.sides:
        verdict = each.verdict and each.verdict.to_json()
        sides.append(
            {
                "name": each.name,
                "same": verdict and verdict["same"],
                "first": verdict and verdict["first"],
                "unknown": each.unknown or None,
                "said": each.said or None,
                "not_restored": [asdict(lost) for lost in each.not_restored],
            }
        )
    return {
        **found.verdict.to_json(),
        "same": None if found.unknown else found.status == AGREE,
        "relation": found.relation,
        "unknown": found.unknown or None,
        "not_restored": [asdict(lost) for lost in side.not_restored] if side else [],
        "sides": sides,
        "command": found.command,
        "runs": [asdict(run) for run in (*found.plain, *(each.run for each in found.sides)) if run],
        "folder": found.folder or None,
    }
