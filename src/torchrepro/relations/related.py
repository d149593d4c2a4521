"""The answer about a relation, in a terminal, as JSON and as a page."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torchrepro.console import Displayed, listing, parts
from torchrepro.messages import printable
from torchrepro.verdict.page import Answer, Comparison, RunRow, page_of
from torchrepro.verdict.render import counted, headline, verdict_json, verdict_parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torchrepro.console import Part
    from torchrepro.verdict.value import Verdict
    from torchrepro.verification.result import Run

AGREE, DIFFER, UNKNOWN = 0, 1, 4
"""The exit statuses of an answer."""


@dataclass(frozen=True, slots=True)
class NotRestored:
    """A part of the state of a run that a resumed run does not have again."""

    kind: str
    """``parameter``, ``buffer``, ``optimizer``, ``scheduler``, ``scaler``, ``generator``,
    ``loader`` or ``sampler``."""
    name: str
    what: str = ""
    """One more sentence, where there is more to say."""


@dataclass(frozen=True, slots=True)
class Side:
    """One other execution, and how it compares with the plain one."""

    name: str
    """As in ``2 workers``."""
    run: Run | None
    """None where it was not run."""
    verdict: Verdict | None = None
    """None where nothing can be said."""
    unknown: str = ""
    """Why nothing can be said, and what to do; empty where something can."""
    not_restored: tuple[NotRestored, ...] = ()
    said: str = ""
    """What a reader has to know of a yes, as the tolerance within which it holds."""

    @property
    def status(self) -> int:
        """The exit status that this side alone would have."""
        if self.verdict is None:
            return UNKNOWN
        return AGREE if self.verdict.same else DIFFER


@dataclass(frozen=True, slots=True)
class Related(Displayed):
    """The answer: whether executions of a program agree that ought to."""

    relation: str
    agreement: str
    """What it is that holds where all agree, as a sentence."""
    command: str
    plain: tuple[Run, ...]
    plain_verdict: Verdict
    """Of the plain program with itself."""
    sides: tuple[Side, ...]
    folder: str
    """Where recordings and logs are; empty if they were removed."""

    @property
    def status(self) -> int:
        """The exit status: 0 all agree, 1 one does not, 4 cannot tell."""
        if not self.plain_verdict.same:
            return UNKNOWN
        statuses = {side.status for side in self.sides}
        return next((each for each in (DIFFER, UNKNOWN) if each in statuses), AGREE)

    @property
    def unknown(self) -> str:
        """Why nothing can be said; empty where something can."""
        if self.status != UNKNOWN:
            return ""
        if not self.plain_verdict.same:
            return "the plain program, run twice, does not agree with itself"
        return next(side.unknown for side in self.sides if side.unknown)

    @property
    def deciding(self) -> Side | None:
        """The side that differs; None where none does."""
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
    if side is None:
        return f"agree: {found.agreement}"
    return f"{side.name}: {headline(found.verdict)}"


@parts.register(Related)
def related_parts(found: Related) -> tuple[Part, ...]:
    """Return the lines and tables that show the answer."""
    verdict = verdict_parts(found.verdict)[1:] if not found.verdict.same else ()
    rows = [(f"  {label:<10}", printable(text)) for label, text in _rows(found)]
    return (_headline(found), *verdict, listing(rows, style="bold"))


def related_page(found: Related) -> str:
    """Return the answer as one page."""
    named = [("plain program", found.plain[0]), *((s.name, s.run) for s in found.sides if s.run)]
    rows = [
        RunRow(name, {"Steps": f"{run.steps:,}", "Seconds": f"{run.seconds:.1f}"})
        for name, run in named
    ]
    lines = [f"{label}: {text}" if label else text for label, text in _rows(found)]
    compared = [Comparison(found.verdict)]
    return page_of(Answer(found.status == AGREE, _headline(found), lines, rows, compared))


def _rows(found: Related) -> Iterator[tuple[str, str]]:
    side = found.deciding
    for lost in side.not_restored if side else ():
        yield "not restored", words_of(lost)
    yield "relation", found.relation
    for each in found.sides:
        said = f"; {each.said}" if each.said else ""
        if each.verdict is not None:
            steps = counted(each.verdict.compared.steps, "step")
            agrees = f"agrees, {steps} compared" if each.verdict.same else headline(each.verdict)
            yield "compared", f"{each.name}: {agrees}{said}"
        elif not found.unknown:
            yield "cannot tell", f"{each.name}: {each.unknown}"
    yield "command", found.command
    if found.folder:
        yield "recordings", found.folder


def words_of(lost: NotRestored) -> str:
    """Return in words what was not restored."""
    return f"{lost.kind} {lost.name}{f': {lost.what}' if lost.what else ''}"


def related_json(found: Related) -> dict[str, Any]:
    """Return the answer as plain JSON values: those of the verdict that decides, and more."""
    side = found.deciding
    return {
        **verdict_json(found.verdict),
        "same": None if found.unknown else found.status == AGREE,
        "relation": found.relation,
        "unknown": found.unknown or None,
        "not_restored": [asdict(lost) for lost in side.not_restored] if side else [],
        "sides": [_side_json(each) for each in found.sides],
        "command": found.command,
        "runs": [asdict(run) for run in _runs(found)],
        "folder": found.folder or None,
    }


def _side_json(side: Side) -> dict[str, Any]:
    verdict = side.verdict and verdict_json(side.verdict)
    return {
        "name": side.name,
        "same": verdict and verdict["same"],
        "first": verdict and verdict["first"],
        "unknown": side.unknown or None,
        "said": side.said or None,
        "not_restored": [asdict(each) for each in side.not_restored],
    }


def _runs(found: Related) -> Sequence[Run]:
    return [*found.plain, *(side.run for side in found.sides if side.run)]
