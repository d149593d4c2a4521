"""The answer of a verification, in a terminal and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from shlex import quote
from typing import TYPE_CHECKING, Any

from torchrepro.console import Displayed, parts
from torchrepro.messages import printable, some
from torchrepro.verdict.page import Answer, Comparison, RunRow, facts_of, page_of
from torchrepro.verdict.render import counted, headline, level_json, verdict_json, verdict_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchrepro.console import Part
    from torchrepro.verdict.diagnosis import EscalationLevel
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


@dataclass(frozen=True, slots=True)
class EscalationTrial:
    """A level of escalation at which the command was verified."""

    level: EscalationLevel
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
    stressed: StressResult | None = None
    """None where nothing was perturbed."""
    escalation: tuple[EscalationTrial, ...] | None = None
    """The levels that were tried, from the lowest; None if nothing was to be tried."""
    next_level: EscalationLevel | None = None
    """What to try next."""

    @property
    def same(self) -> bool:
        """Whether all runs were the same."""
        return all(verdict.same for verdict in self.verdicts)

    @property
    def verdict(self) -> Verdict:
        """The first verdict that says no, or the first one if none does."""
        return next((each for each in self.verdicts if not each.same), self.verdicts[0])

    @property
    def equal_on(self) -> EscalationLevel | None:
        """The level of escalation at which the runs became the same."""
        return next((trial.level for trial in self.escalation or () if trial.same), None)


@parts.register(Verification)
def verification_parts(found: Verification) -> tuple[Part, ...]:
    """Return the lines and tables that show a verification."""
    more = "\n".join(["", f"  {_counts(found)}", *(f"  {line}" for line in _lines(found))])
    return (*verdict_parts(found.verdict, found.next_level, below=more), more)


def verification_page(found: Verification) -> str:
    """Return the page of a verification: all of its runs, and the comparisons that say no."""
    first, *others = found.runs
    pairs = list(zip(others, found.verdicts, strict=True))
    differing = [(run, verdict) for run, verdict in pairs if not verdict.same]
    shown = differing[:COMPARISONS] or pairs[:1]
    alone = len(shown) == 1
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
        row = RunRow(run.name, facts)
        # The one comparison calls its runs A and B. Of several each has a link to its own.
        side = {first.name: "a", shown[0][0].name: "b"}.get(run.name, "") if alone else ""
        if side:
            row = replace(row, name=f"{side.upper()} = {run.name}", kind=side)
        elif not alone and any(run is each for each, _ in shown):
            row = replace(row, link=run.name)
        rows.append(row)
    comparisons = [
        Comparison(
            verdict,
            found.next_level if verdict is found.verdict else None,
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
    lines = (_counts(found), *_lines(found))
    return page_of(
        Answer(
            found.same, headline(found.verdict), lines, rows, comparisons, more if rest > 0 else ""
        )
    )


def _short_answer(verdict: Verdict) -> str:
    return headline(verdict).removeprefix("not the same: ")


def _counts(found: Verification) -> str:
    runs = counted(len(found.runs), "run")
    pairs = zip(found.runs[1:], found.verdicts, strict=True)
    other = [run.name for run, verdict in pairs if not verdict.same]
    if not other:
        return f"{runs}, all the same"
    return f"{runs}: {some(other)} differ{'' if other[1:] else 's'} from {found.runs[0].name}"


def _lines(found: Verification) -> Iterator[str]:
    yield f"{'certifies' if found.same else 'not certified'}: {printable(found.certifies)}"
    if found.own_profile:
        yield f"(run as it is; it was under {printable(found.own_profile)})"
    elif not found.profile:
        yield "(run as it is, under no profile)"
    if found.stressed is not None:
        yield f"perturbed: {', '.join(found.stressed.perturbed) or 'nothing'}"
        skipped = [f"{name} ({why})" for name, why in found.stressed.skipped]
        if skipped and found.same:  # what was not tried limits a yes, and no no
            yield f"not perturbed: {'; '.join(skipped)}"
    trials, equal_on = found.escalation, found.equal_on
    if equal_on is not None:
        yield f"with {equal_on.name} the runs are the same: {equal_on.why}"
        yield f"    {' '.join(map(quote, equal_on.overrides))}"
    elif trials:
        yield "no level of escalation makes the runs the same:"
        levels: dict[str, list[str]] = {}  # by the answer: the same one is said once
        for trial in trials:
            answer = trial.what.removeprefix("not the same: ")
            levels.setdefault(answer, []).append(trial.level.name)
        yield from (f"    {', '.join(names)}: {what}" for what, names in levels.items())
    elif trials is not None:
        yield "nothing to escalate: no setting can make up for what the program itself brings in"
    elif found.own_profile and not found.same:
        yield "escalation adds settings to a profile that `torchrepro verify PROFILE` puts in force"
    if found.folder:
        yield f"recordings and logs are in {found.folder}"


def verification_json(found: Verification) -> dict[str, Any]:
    """Return a verification as plain JSON values: those of its verdict, and more."""
    stressed, trials, equal_on = found.stressed, found.escalation, found.equal_on
    return {
        **verdict_json(found.verdict, found.next_level),
        "asked": found.asked,
        "certifies": found.certifies,
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
        "escalation": None
        if trials is None
        else {
            "equal_on": equal_on and equal_on.name,
            "tried": [
                {**level_json(trial.level), "same": trial.same, "what": trial.what}
                for trial in trials
            ],
        },
    }
