"""What verifying a command says, in a terminal and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from shlex import quote
from typing import TYPE_CHECKING, Any

from torchrepro.console import Displayed
from torchrepro.messages import printable, some
from torchrepro.verdict.render import verdict_json, verdict_parts
from torchrepro.verdict.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchrepro.console import Part
    from torchrepro.verdict.diagnosis import EscalationLevel
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
class StressResult:
    """What was perturbed, and which of it made the runs part."""

    perturbed: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    """What could not be perturbed, each with the reason."""
    culprits: tuple[str, ...] = ()
    """What makes the runs part by itself; several where it takes all of them together."""
    what: str = ""
    """One sentence on that, where the runs part."""


@dataclass(frozen=True, slots=True)
class EscalationTrial:
    """A rung of the ladder on which the command was verified."""

    rung: EscalationLevel
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
    climbed: tuple[EscalationTrial, ...] | None = None
    """The rungs that were tried, from the lowest; None where nobody asked, or had to."""
    next_rung: EscalationLevel | None = None
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
    def equal_on(self) -> EscalationLevel | None:
        """The rung of the ladder on which the runs became the same."""
        return next((tried.rung for tried in self.climbed or () if tried.same), None)


def verification_parts(found: Verification) -> tuple[Part, ...]:
    """Return the lines and tables that tell a verification."""
    return (*verdict_parts(found.verdict, found.next_rung), *_more(found))


def _more(found: Verification) -> Iterator[str]:
    yield "\n".join(["", f"  {_counts(found)}", *(f"  {line}" for line in _lines(found))])


def _lines(found: Verification) -> Iterator[str]:
    yield f"{'certifies' if found.same else 'not certified'}: {printable(found.certifies)}"
    if found.own_profile:
        yield f"(run as it is; it was under {printable(found.own_profile)})"
    elif not found.profile:
        yield "(run as it is, under no profile)"
    if found.stressed is not None:
        yield from _perturbed(found.stressed)
    if found.climbed is not None:
        yield from _climbed(found)
    elif found.own_profile and not found.same:
        yield "a climb adds settings to a profile that `torchrepro verify PROFILE` puts in force"
    if found.folder:
        yield f"recordings and logs are in {found.folder}"


def _counts(found: Verification) -> str:
    runs = counted(len(found.runs), "run")
    pairs = zip(found.runs[1:], found.verdicts, strict=True)
    other = [run.name for run, verdict in pairs if not verdict.same]
    if not other:
        return f"{runs}, all the same"
    return f"{runs}: unlike {found.runs[0].name} {'are' if other[1:] else 'is'} {some(other)}"


def _perturbed(stressed: StressResult) -> Iterator[str]:
    yield f"perturbed: {', '.join(stressed.perturbed) or 'nothing'}"
    yield from (f"not perturbed: {name} ({reason})" for name, reason in stressed.skipped)


def _climbed(found: Verification) -> Iterator[str]:
    rung = found.equal_on
    if rung is None:
        yield "no rung of the ladder makes the runs the same:"
    else:
        overrides = " ".join(map(quote, rung.overrides))
        yield f"with {rung.name} the runs are the same: {rung.why}"
        yield f"    {overrides}"
    yield from (f"    {tried.rung.name}: {tried.what}" for tried in found.climbed or ())


def verification_json(found: Verification) -> dict[str, Any]:
    """Return a verification as plain JSON values: those of its verdict, and more."""
    rung = found.equal_on
    return {
        **verdict_json(found.verdict, found.next_rung),
        "asked": found.asked,
        "certifies": found.certifies,
        "profile": found.profile,
        "own_profile": found.own_profile,
        "runs": [
            {**asdict(run), "same": position == 0 or found.verdicts[position - 1].same}
            for position, run in enumerate(found.runs)
        ],
        "folder": found.folder or None,
        "stress": None if found.stressed is None else _stress_json(found.stressed),
        "climb": None
        if found.climbed is None
        else {
            "equal_on": rung.name if rung else None,
            "tried": [_tried_json(tried) for tried in found.climbed],
        },
    }


def _stress_json(stressed: StressResult) -> dict[str, Any]:
    return {
        "perturbed": list(stressed.perturbed),
        "skipped": dict(stressed.skipped),
        "culprits": list(stressed.culprits),
        "what": stressed.what,
    }


def _tried_json(tried: EscalationTrial) -> dict[str, Any]:
    return {
        "name": tried.rung.name,
        "overrides": list(tried.rung.overrides),
        "why": tried.rung.why,
        "same": tried.same,
        "what": tried.what,
    }
