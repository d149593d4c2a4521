"""Presents the answer of a verification in a terminal, as a page and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torchrepro.ground.console import Displayed, Verbosity, listing, parts, verbosity
from torchrepro.ground.errors import printable, shortened, some
from torchrepro.seeding.nondeterministic_calls import EXISTING_FILE, SUSPECTS
from torchrepro.verdict.page import Answer, PageSection, RunRow, facts_of, page_of
from torchrepro.verdict.render import LINE, counted, headline, short, verdict_parts

if TYPE_CHECKING:
    from torchrepro.ground.console import Part
    from torchrepro.verdict.value import Verdict


COMPARISONS = 8
"""The most differing runs that a page shows with all details."""


@dataclass(frozen=True, slots=True)
class Run:
    """One recorded run of a command."""

    name: str
    folder: str
    """The folder of its traces."""
    log: str
    """The file with its output."""
    status: int
    """Its exit status; negative if a signal ended it."""
    seconds: float
    steps: int
    """The recorded steps of its first process; 0 for a program without steps."""
    recorded: bool
    """Whether anything was recorded."""
    perturbed: tuple[str, ...] = ()
    """The perturbations that acted on it."""


@dataclass(frozen=True, slots=True)
class StressResult:
    """The perturbations of a verification, and which of them make the runs diverge."""

    perturbed: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    """Perturbations that were not possible, each with the reason."""
    culprits: tuple[str, ...] = ()
    """The perturbation that makes the runs diverge, or several that do so only together."""
    what: str = ""
    """One sentence about the culprits; empty if the runs do not diverge."""


UNCHANGED = "the command as it is"
"""The name of a trial without a change."""


@dataclass(frozen=True, slots=True)
class ControlledRun:
    """A trial: runs of a command with one change, and whether these runs agreed."""

    what: str
    command: str
    """The command line that makes the change; empty for a pinned source."""
    same: bool
    runs: int
    answer: str
    """The answer in one line."""


@dataclass(frozen=True, slots=True)
class Verification(Displayed):
    """The answer of `verify`: whether all runs of a command were the same."""

    asked: str
    """``bits`` or ``tolerance``."""
    command: str
    """The command line that was verified, as shell input; possible secrets are hidden."""
    profile: str | None
    """The name of the profile under which the command was started; None without a profile."""
    own_profile: str | None
    """The name of the profile that the command applied itself; None if `profile` is set."""
    runs: tuple[Run, ...]
    verdicts: tuple[Verdict, ...]
    """The comparisons of the first run with each later run, in order."""
    folder: str
    """The folder of recordings and logs; empty if they were removed as all runs were the same."""
    stressed: StressResult | None = None
    """None without perturbations."""
    tried: tuple[ControlledRun, ...] = ()
    """The trials after a divergence, in order."""

    @property
    def same(self) -> bool:
        """Whether all runs were the same."""
        return all(verdict.same for verdict in self.verdicts)

    @property
    def verdict(self) -> Verdict:
        """The first verdict that reports a difference, or the first verdict if all runs agree."""
        return next((verdict for verdict in self.verdicts if not verdict.same), self.verdicts[0])


@parts.register(Verification)
def verification_parts(verification: Verification) -> tuple[Part, ...]:
    """Return the lines and tables that show a verification in a terminal."""
    rows = [(f"  {label:<10}", printable(text)) for label, text in _rows(verification)]
    return (*verdict_parts(verification.verdict), listing(rows, style="bold"))


def verification_page(verification: Verification) -> str:
    """Return the page of a verification, with all runs and each comparison that differs."""
    first, *later = verification.runs
    pairs = list(zip(later, verification.verdicts, strict=True))
    differing = [(run, verdict) for run, verdict in pairs if not verdict.same]
    shown = differing[:COMPARISONS] or pairs[:1]
    alone = len(shown) == 1
    # A single comparison calls its runs A and B. With several, each run links to its comparison.
    letters = {first.name: "a", shown[0][0].name: "b"} if alone else {}
    linked = () if alone else [run.name for run, _ in shown]
    answers = {run.name: _short_answer(verdict) for run, verdict in differing}
    pairs_of_facts = [verdict.about for verdict in verification.verdicts]
    about_first = next((facts[0] for facts in pairs_of_facts if facts), None)
    abouts = [about_first, *(facts[1] if facts else None for facts in pairs_of_facts)]
    rows = []
    for run, about in zip(verification.runs, abouts, strict=True):
        as_first = f"as {first.name}" if run is not first else "the reference"
        facts = {
            "Answer": answers.get(run.name, as_first),
            **facts_of(about),
            "Steps": f"{run.steps:,}" if run.steps else "",
            "Seconds": f"{run.seconds:.1f}",
            "Exit status": str(run.status) if run.status else "",
            "Perturbed": ", ".join(run.perturbed),
        }
        letter, link = letters.get(run.name, ""), run.name if run.name in linked else ""
        name = f"{letter.upper()} = {run.name}" if letter else run.name
        rows.append(RunRow(name, facts, kind=letter, link=link))
    comparisons = [
        PageSection(
            verdict,
            "" if alone else f"A = {first.name}, B = {run.name}: {_short_answer(verdict)}",
            run.name,
        )
        for run, verdict in shown
    ]
    omitted = len(differing) - len(shown)
    note = ""
    if omitted > 0:
        runs = counted(omitted, "more run")
        note = f"{runs} in the table above, without details: `torchrepro compare` two folders"
    lines = [f"{label}: {text}" if label else text for label, text in _rows(verification)]
    answer = headline(verification.verdict)
    return page_of(Answer(verification.same, answer, lines, rows, comparisons, note))


def _short_answer(verdict: Verdict) -> str:
    return headline(verdict).removeprefix("not the same: ")


def _rows(verification: Verification) -> Iterator[tuple[str, str]]:
    runs = counted(len(verification.runs), "run")
    pairs = zip(verification.runs[1:], verification.verdicts, strict=True)
    differing = [run.name for run, verdict in pairs if not verdict.same]
    if differing:
        verb = "differ" if differing[1:] else "differs"
        runs += f", {some(differing)} {verb} from {verification.runs[0].name}"
        in_trials = sum(trial.runs for trial in verification.tried)
        after = f"; {counted(in_trials, 'more run')} to find out why" if in_trials else ""
        yield "runs", f"{runs}{after}"
    else:
        yield "runs", f"{runs}, all the same"
    if verification.same:
        profile = verification.profile
        if not profile and verification.own_profile:
            profile = f"its own, {verification.own_profile}"
        yield "command", verification.command
        yield "profile", profile or "none"
    if verification.stressed is not None:
        names = ", ".join(verification.stressed.perturbed) or "nothing"
        yield "perturbed", names if verification.same else shortened(names, LINE)
        skipped = [f"{name} ({reason})" for name, reason in verification.stressed.skipped]
        if skipped and verification.same:  # skipped perturbations only weaken a positive answer
            yield "not perturbed", "; ".join(skipped)
    elif verification.same:
        yield from _may_differ(verification.verdict)
    if verbosity() is Verbosity.VERBOSE:
        for trial in verification.tried:
            yield "tried", f"{trial.what}: {trial.answer}"
    elif any(trial.what == UNCHANGED and trial.same for trial in verification.tried):
        yield "tried", "most runs of it are the same: it differs too seldom to show what helps"
    elif any(trial.command for trial in verification.tried) and not verification.verdict.repeats:
        settings = [trial.what for trial in verification.tried if trial.command]
        number = counted(len(settings), "setting")
        yield "tried", f"{number}, and none makes it repeatable: {some(settings)}"
    if verification.folder:
        yield "recordings", verification.folder


def _may_differ(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """Yield rows about reads that may differ in a later run, although these runs agree."""
    reads = {read.what: read for read in verdict.program.reads}
    suspects = [
        f"{source} at {short(reads[source].where)}" for source in SUSPECTS if source in reads
    ]
    if suspects:
        yield "reads", f"{', '.join(suspects[:2])}: `--stress` changes what must not matter"
    if EXISTING_FILE in reads:
        file = reads[EXISTING_FILE]
        yield "reads", f"{file.name} if it is there ({short(file.where)})"


def verification_json(verification: Verification) -> dict[str, Any]:
    """Return a verification as JSON values, including the fields of its verdict."""
    stressed = verification.stressed
    return {
        **verification.verdict.to_json(),
        "asked": verification.asked,
        "command": verification.command,
        "profile": verification.profile,
        "own_profile": verification.own_profile,
        "runs": [
            {**asdict(run), "same": position == 0 or verification.verdicts[position - 1].same}
            for position, run in enumerate(verification.runs)
        ],
        "folder": verification.folder or None,
        "stress": stressed
        and {
            "perturbed": list(stressed.perturbed),
            "skipped": dict(stressed.skipped),
            "culprits": list(stressed.culprits),
            "what": stressed.what,
        },
        "tried": [asdict(trial) for trial in verification.tried],
    }
