"""The answer of a verification, in a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torchrepro.ground.console import Displayed, Verbosity, listing, parts, verbosity
from torchrepro.ground.messages import printable, shortened, some
from torchrepro.seeding.nondeterministic_calls import IF_THERE, SUSPECTS
from torchrepro.verdict.page import Answer, PageSection, RunRow, facts_of, page_of
from torchrepro.verdict.render import LINE, counted, headline, short, verdict_parts

if TYPE_CHECKING:
    from torchrepro.ground.console import Part
    from torchrepro.verdict.value import Verdict


COMPARISONS = 8
"""Runs that differ and that a page shows with all details."""


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
    """Steps of its first process that were recorded; 0 for a program that has none."""
    recorded: bool
    """Whether anything was recorded of it."""
    perturbed: tuple[str, ...] = ()
    """The perturbations that acted on it."""


@dataclass(frozen=True, slots=True)
class StressResult:
    """The perturbations, and which of them made the runs diverge."""

    perturbed: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    """Perturbations that could not be used, each with the reason."""
    culprits: tuple[str, ...] = ()
    """The perturbation that makes the runs diverge; several if it takes all of them together."""
    what: str = ""
    """One sentence on that, if the runs diverge."""


UNCHANGED = "the command as it is"
"""What a trial is called that changes nothing."""


@dataclass(frozen=True, slots=True)
class ControlledRun:
    """A change with which a command was run again, and whether its runs then agreed."""

    what: str
    command: str
    """The command line that makes the change; empty for a source that was held."""
    same: bool
    runs: int
    answer: str
    """The answer in one line."""


@dataclass(frozen=True, slots=True)
class Verification(Displayed):
    """The answer: whether all runs of a command were the same."""

    asked: str
    """``bits`` or ``tolerance``."""
    command: str
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
    stressed: StressResult | None = None
    """None where nothing was perturbed."""
    tried: tuple[ControlledRun, ...] = ()
    """What was tried after the runs diverged, in its order."""

    @property
    def same(self) -> bool:
        """Whether all runs were the same."""
        return all(verdict.same for verdict in self.verdicts)

    @property
    def verdict(self) -> Verdict:
        """The first verdict that says no, or the first one if none does."""
        return next((each for each in self.verdicts if not each.same), self.verdicts[0])


@parts.register(Verification)
def verification_parts(found: Verification) -> tuple[Part, ...]:
    """Return the lines and tables that show a verification."""
    rows = [(f"  {label:<10}", printable(text)) for label, text in _rows(found)]
    return (*verdict_parts(found.verdict), listing(rows, style="bold"))


def verification_page(found: Verification) -> str:
    """Return the page of a verification: all of its runs, and the comparisons that say no."""
    first, *others = found.runs
    pairs = list(zip(others, found.verdicts, strict=True))
    differing = [(run, verdict) for run, verdict in pairs if not verdict.same]
    shown = differing[:COMPARISONS] or pairs[:1]
    alone = len(shown) == 1
    # The one comparison calls its runs A and B. Of several each has a link to its own.
    sides = {first.name: "a", shown[0][0].name: "b"} if alone else {}
    linked = () if alone else [run.name for run, _ in shown]
    answers = {run.name: _short_answer(verdict) for run, verdict in differing}
    about_first = next((each.about[0] for each in found.verdicts if each.about), None)
    abouts = [about_first, *(each.about[1] if each.about else None for each in found.verdicts)]
    rows = []
    for run, about in zip(found.runs, abouts, strict=True):
        as_first = f"as {first.name}" if run is not first else "the reference"
        facts = {
            "Answer": answers.get(run.name, as_first),
            **facts_of(about),
            "Steps": f"{run.steps:,}" if run.steps else "",
            "Seconds": f"{run.seconds:.1f}",
            "Exit status": str(run.status) if run.status else "",
            "Perturbed": ", ".join(run.perturbed),
        }
        side, link = sides.get(run.name, ""), run.name if run.name in linked else ""
        name = f"{side.upper()} = {run.name}" if side else run.name
        rows.append(RunRow(name, facts, kind=side, link=link))
    comparisons = [
        PageSection(
            verdict,
            "" if alone else f"A = {first.name}, B = {run.name}: {_short_answer(verdict)}",
            run.name,
        )
        for run, verdict in shown
    ]
    rest = len(differing) - len(shown)
    more = (
        f"{counted(rest, 'more run')} in the table above, without details: `torchrepro compare` two"
        " folders"
    )
    lines = [f"{label}: {text}" if label else text for label, text in _rows(found)]
    return page_of(
        Answer(
            found.same, headline(found.verdict), lines, rows, comparisons, more if rest > 0 else ""
        )
    )


def _short_answer(verdict: Verdict) -> str:
    return headline(verdict).removeprefix("not the same: ")


def _rows(found: Verification) -> Iterator[tuple[str, str]]:
    runs = counted(len(found.runs), "run")
    pairs = zip(found.runs[1:], found.verdicts, strict=True)
    other = [run.name for run, verdict in pairs if not verdict.same]
    differ = f"{some(other)} differ{'' if other[1:] else 's'} from {found.runs[0].name}"
    more = sum(trial.runs for trial in found.tried)
    after = f"; {counted(more, 'more run')} to find out why" if more else ""
    yield "runs", f"{runs}, {differ}{after}" if other else f"{runs}, all the same"
    if found.same:
        profile = found.profile or (found.own_profile and f"its own, {found.own_profile}")
        yield "command", found.command
        yield "profile", profile or "none"
    if found.stressed is not None:
        names = ", ".join(found.stressed.perturbed) or "nothing"
        yield "perturbed", names if found.same else shortened(names, LINE)
        skipped = [f"{name} ({why})" for name, why in found.stressed.skipped]
        if skipped and found.same:  # what was not tried limits a yes, and no no
            yield "not perturbed", "; ".join(skipped)
    elif found.same:
        yield from _may_differ(found.verdict)
    if verbosity() is Verbosity.VERBOSE:
        for trial in found.tried:
            yield "tried", f"{trial.what}: {trial.answer}"
    elif any(trial.what == UNCHANGED and trial.same for trial in found.tried):
        yield "tried", "most runs of it are the same: it differs too seldom to show what helps"
    elif any(trial.command for trial in found.tried) and not found.verdict.repeats:
        settings = [trial.what for trial in found.tried if trial.command]
        number = counted(len(settings), "setting")
        yield "tried", f"{number}, and none makes it repeatable: {some(settings)}"
    if found.folder:
        yield "recordings", found.folder


def _may_differ(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """Yield what the program reads that could be another next time, although the runs agree."""
    reads = {each.what: each for each in verdict.program.reads}
    found = [f"{what} at {short(reads[what].where)}" for what in SUSPECTS if what in reads]
    if found:
        yield "reads", f"{', '.join(found[:2])}: `--stress` changes what must not matter"
    if IF_THERE in reads:
        file = reads[IF_THERE]
        yield "reads", f"{file.name} if it is there ({short(file.where)})"


def verification_json(found: Verification) -> dict[str, Any]:
    """Return a verification as plain JSON values: those of its verdict, and more."""
    stressed = found.stressed
    return {
        **found.verdict.to_json(),
        "asked": found.asked,
        "command": found.command,
        "profile": found.profile,
        "own_profile": found.own_profile,
        "runs": [
            {**asdict(run), "same": position == 0 or found.verdicts[position - 1].same}
            for position, run in enumerate(found.runs)
        ],
        "folder": found.folder or None,
        "stress": stressed
        and {
            "perturbed": list(stressed.perturbed),
            "skipped": dict(stressed.skipped),
            "culprits": list(stressed.culprits),
            "what": stressed.what,
        },
        "tried": [asdict(trial) for trial in found.tried],
    }
