"""How it is said what happened to every knob that a profile names, and what is held.

A report is one row per knob. People see one line and what needs attention, or the table of all
knobs; JSON has every row.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torchrepro.ground.console import (
    Displayed,
    Styled,
    Table,
    Verbosity,
    as_text,
    note,
    parts,
    show_aside,
    table,
    verbosity,
)
from torchrepro.ground.errors import by_write
from torchrepro.ground.messages import near, shown, size, some
from torchrepro.knobs.catalogue import knobs_by_name
from torchrepro.knobs.knob import Scope
from torchrepro.reporting.outcomes import (
    STANDINGS,
    STOPPING,
    Guarantee,
    KnobChange,
    KnobRow,
    Outcome,
    ProcessFacts,
    Writer,
    judge,
)
from torchrepro.reporting.process_state import HARDWARE, untested_torch

if TYPE_CHECKING:
    from torchrepro.ground.console import Part
    from torchrepro.policies.policy import PolicyEffect
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.seeding.nondeterministic_reads import SourceRead


_WIDE = 98  # columns of a line that is easily read


@dataclass(frozen=True, slots=True)
class Report(Displayed):
    """The outcome of every knob that a profile names, in the order in which they were set."""

    profile: str
    guarantee: Guarantee
    """What the profile asks for, and what of it is held."""

    digest: str
    rows: tuple[KnobRow, ...]
    planned: bool = False
    """Whether this is what would happen rather than what happened."""

    effects: tuple[PolicyEffect, ...] = ()
    """What the policies among the knobs have done so far, op by op and module by module."""

    unseen: tuple[str, ...] = ()
    """Custom ops and Triton kernels, which torch's deterministic flag cannot see."""

    drift: tuple[KnobChange, ...] = ()
    """Knobs that later code has changed, as they were last read: see `guard`."""

    unseeded: tuple[SourceRead, ...] = ()
    """Where the program has drawn numbers that no seed decides."""

    loading: tuple[str, ...] = ()
    """What a reader has to know of how the program's data was loaded, in a line for each."""

    as_good: tuple[KnobChange, ...] = ()
    """Knobs to which later code has given another value, equivalent to the profile's."""

    switches: tuple[Writer, ...] = ()
    """Determinism switches of frameworks that agree with the profile, as far as writes are watched:
    by a `guard` that warns or stops."""

    def __iter__(self) -> Iterator[KnobRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, knob: str) -> KnobRow:
        by_name = {row.knob: row for row in self.rows}
        if knob in by_name:
            return by_name[knob]
        close = near(knob, by_name)
        raise KeyError(
            f"no knob {knob!r} in this report" + f"; did you mean {close!r}?" * bool(close)
        )

    def having(self, *outcomes: Outcome) -> tuple[KnobRow, ...]:
        """Return the rows with one of `outcomes`."""
        return tuple(row for row in self.rows if row.outcome in outcomes)

    @property
    def counts(self) -> Mapping[str, int]:
        """How many knobs had each outcome, most frequent first."""
        return dict(Counter(str(row.outcome) for row in self.rows).most_common())

    @property
    def summary(self) -> str:
        """One line: the profile, what of its guarantee is held, the number of knobs per outcome.

        Knobs for hardware that is not here are not among those numbers. Of a guarantee that is
        lowered, they are left out where the line would be long.
        """
        here = Counter(str(row.outcome) for row in self.rows if not row.absent).most_common()
        counts = ", ".join(f"{number} {outcome}" for outcome, number in here) or "nothing to set"
        if self.drift:
            state = "has drifted"
            counts += f"; drifted: {some([drift.knob for drift in self.drift])}"
        else:
            state = "would be in force" if self.planned else "is in force"
        if self.guarantee.lowered:
            line = f"{self.profile} {state}: {self.guarantee}"
            return f"{line}; {counts}" if len(line) + len(counts) < _WIDE else line
        return f"{self.profile} ({self.guarantee}) {state}: {counts}"

    def table(self) -> str:
        """Return the report with every knob as a table, as ``--verbose`` shows it."""
        return as_text(*verbose_parts(self))

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return {
            "profile": self.profile,
            "guarantee": self.guarantee.to_json(),
            "digest": self.digest,
            "counts": dict(self.counts),
            "knobs": [row.to_json() for row in self.rows],
            "effects": [effect.to_json() for effect in self.effects],
            "unseen": list(self.unseen),
            "drift": [drift.to_json() for drift in self.drift],
            "unseeded": [read.to_json() for read in self.unseeded],
            "loading": list(self.loading),
            "as_good": [rewrite.to_json() for rewrite in self.as_good],
            "switches": [agreement.to_json() for agreement in self.switches],
        }


def make_report(
    resolved: ResolvedProfile,
    rows: tuple[KnobRow, ...],
    facts: ProcessFacts,
    drift: tuple[KnobChange, ...] = (),
    as_good: tuple[KnobChange, ...] = (),
    **more: Any,
) -> Report:
    """Return the report on `resolved` with these rows; `more` are further fields of it.

    The rows of knobs in `as_good` get the value in effect.
    """
    in_effect = {change.knob: change for change in as_good}
    rows = tuple(
        replace(row, after=change.now, why="; ".join(filter(None, (row.why, change.words))))
        if (change := in_effect.get(row.knob))
        else row
        for row in rows
    )
    guarantee = judge(resolved.guarantee, rows, drift, facts)
    here = tuple(_row_here(row, facts.absent) for row in rows)
    more |= {"drift": drift, "as_good": as_good}
    return Report(resolved.name, guarantee, resolved.digest, here, **more)


def _row_here(row: KnobRow, absent: Mapping[str, str]) -> KnobRow:
    """Return `row` as it is to be reported in a process without the hardware in `absent`.

    An outcome that stops a strict profile stays: a conflict is one for every process below, too.
    """
    knob = knobs_by_name().get(row.knob)
    words = absent.get(knob.hardware) if knob is not None else None
    if knob is None or not words or row.outcome in STOPPING:
        return row
    further = row.why if row.outcome is not Outcome.UNSUPPORTED else ""
    if row.is_written:
        reaches_children = knob.scope is Scope.PROCESS_AND_CHILDREN
        further = "set for the processes that this one starts" * reaches_children
        further = further or "set and nothing reads it"
    why = "; ".join(filter(None, (f"{knob.hardware}: {words}", further)))
    return replace(row, outcome=Outcome.UNSUPPORTED, why=why, unverified=False, absent=words)


@parts.register(Report)
def _report_parts(report: Report) -> tuple[Part, ...]:
    return *start_up_parts(report), *absent_lines(report), *_later_parts(report)


def verbose_parts(report: Report) -> tuple[Part, ...]:
    """Return all that a report says: its knobs, its summary, drift, what its policies have done."""
    return *headline_parts(report), report.digest, *knob_parts(report), *_later_parts(report)


def start_up_parts(report: Report) -> tuple[Part, ...]:
    """Return the summary, and in a line each what else needs a reader's attention."""
    in_summary = {each.knob for each in report.guarantee.lowered}
    rows = []
    for row in report:
        style, needs_attention = STANDINGS[row.standing]
        if needs_attention and row.knob not in in_summary:
            moved = "" if row.before == row.after else f" {_change(row.before, row.after)}"
            rows.append((Styled(f"  {row.standing}", style), f"{row.knob}{moved}: {row.why}"))
    if untested := untested_torch():
        rows.append((Styled("  untested", STANDINGS["lowered"][0]), untested))
    return headline_parts(report, *rows)


def headline_parts(report: Report, *more: tuple[Styled, str]) -> tuple[Part, ...]:
    """Return the summary, and in a line each why less is held than asked for, and `more`."""
    lowered = Styled("  lowered", STANDINGS["lowered"][0])
    rows = [*((lowered, reason) for reason in report.guarantee.reasons), *more]
    return (report.summary, Table((), tuple(rows), fold=1)) if rows else (report.summary,)


def knob_parts(report: Report) -> tuple[Part, ...]:
    """Return the table of a report or of a plan, and what is for hardware that is not here."""
    rows = [
        (
            Styled(row.standing, STANDINGS[row.standing][0]),
            row.knob,
            _change(row.before, row.after),
            row.why,
        )
        for row in report
        if not row.absent
    ]
    change = "now -> then" if report.planned else "before -> after"
    return table(("outcome", "knob", change, "why"), rows), *absent_lines(report)


def absent_lines(report: Report) -> list[str]:
    """Return a line for all the knobs that are for hardware which is not here."""
    by_reason: dict[str, list[str]] = {}
    for row in report:
        if row.absent:
            by_reason.setdefault(row.absent, []).append(knobs_by_name()[row.knob].hardware)
    return [f"{for_hardware(names)}: {reason}" for reason, names in by_reason.items()]


def for_hardware(names: Sequence[str]) -> str:
    """Return how many settings are for which hardware; there is a name for each setting."""
    *others, last = (name for name in HARDWARE if name in names)
    listed = f"{', '.join(others)} and {last}" if others else last
    return f"{len(names)} setting{'s' * (len(names) > 1)} for {listed}"


def agreement_lines(report: Report) -> list[str]:
    """Return a line for each change and each switch that agrees with the profile."""
    named = {change.by for change in report.as_good}
    agreeing: list[tuple[str, KnobChange | Writer]] = [
        *((f"{it.knob} is {shown(it.now)}: {it.words}", it) for it in report.as_good),
        *((f"{it.by} agrees with the profile", it) for it in report.switches if it.by not in named),
    ]
    return [
        f"unchanged: {words}" + (f" ({place})" if (place := it.called or it.where) else "")
        for words, it in agreeing
    ]


def random_number_lines(report: Report) -> list[str]:
    """Return what a reader has to know of the random numbers of a run, in a line for each.

    A function that drew without a seed has one line: where it did first, and what to do.
    """
    first: dict[str, SourceRead] = {}
    for read in report.unseeded:
        first.setdefault(read.name, read)
    drew = (f"drew without a seed: {read} ({read.instead})" for read in first.values())
    return [*drew, *report.loading]


def _later_parts(report: Report) -> tuple[Part, ...]:
    drift = []
    for written in by_write(report.drift):
        for each in written:
            called = f", called from {each.called}" if each.called else ""
            place = f"{each.where}{called}" if each.where else "not seen"
            place = place if each is written[0] else "the same line"
            style = Styled("drifted", STANDINGS["drifted"][0])
            drift.append((style, each.knob, _change(each.was, each.now), each.when, place))
    columns = ("", "knob", "was -> is", "seen", "written at")
    return (
        *((table(columns, drift),) if drift else ()),
        *agreement_lines(report),
        *_effects_parts(report),
        *random_number_lines(report),
    )


def _effects_parts(report: Report) -> tuple[Part, ...]:
    cannot_see = f"torch's deterministic flag cannot see: {some(report.unseen)}"
    unseen = (cannot_see,) if report.unseen else ()
    if not report.effects:
        return unseen
    rows = [
        (str(each.calls), each.policy, each.subject, each.what, each.where, moved)
        for each in sorted(report.effects, key=lambda effect: -effect.calls)
        for moved in [size(each.moved) if each.moved else ""]
    ]
    columns = ("calls", "policy", "op or module", "what", "where", "moved")
    return table(columns, rows, fold=4), *unseen


def _change(before: Any, after: Any) -> str:
    old, new = ("-" if value is None else shown(value) for value in (before, after))
    return new if before == after else f"{old} -> {new}"


_announced: set[tuple[str, Guarantee]] = set()  # what this process has said, by digest


def announce(report: Report) -> None:
    """Say on standard error what was put in force: as much of it as the reader wants.

    A profile is announced once in a process, unless less of its guarantee is held than before;
    ranks but the first stay silent.
    """
    known = (report.digest, report.guarantee)
    if not _is_first_rank() or known in _announced:
        return
    _announced.add(known)
    first, *others = announcement(report) or ("",)
    if first:
        show_aside(f"torchrepro: {first}", *others)


def announcement(report: Report) -> tuple[Part, ...]:
    """Return what is said of a profile that is put in force: as much as the reader wants."""
    if verbosity() is Verbosity.VERBOSE:
        return (*headline_parts(report), report.digest, *knob_parts(report))
    if verbosity() is Verbosity.QUIET and not report.guarantee.lowered:
        return ()
    return start_up_parts(report)


def announce_end(report: Report, announced: Report) -> None:
    """Say on standard error what did not stay at the end of a run as it was announced, in one line.

    Whoever wants all of it also reads what has changed to something equivalent.
    """
    if not _is_first_rank():
        return
    if verbosity() is Verbosity.VERBOSE:
        note(*agreement_lines(report))
    if (report.guarantee, report.drift) != (announced.guarantee, announced.drift):
        if report.guarantee == announced.guarantee:
            note(f"at the end, {report.summary}")
        else:
            first, *others = headline_parts(report)
            show_aside(f"torchrepro: at the end, {first}", *others)


def announce_effects(report: Report) -> None:
    """Say on standard error what the policies of a run have done, and of its random numbers."""
    if not _is_first_rank() or verbosity() is Verbosity.QUIET:
        return
    if report.effects:
        title = f"torchrepro: {report.profile}, what its policies did:"
        show_aside(title, *_effects_parts(report))
    else:
        note(*_effects_parts(report))
    note(*random_number_lines(report))


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"
