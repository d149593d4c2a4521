"""The report on an applied or planned profile: the outcome of each knob, and the guarantee.

A report has one row per knob. Users see one summary line, and the rows that need attention or a
table of all knobs. JSON has every row.
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
from torchrepro.ground.errors import by_write, near, shown, size, some
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
    from torchrepro.seeding.call_records import ObservedCall


_WIDE = 98  # columns of the longest summary line


@dataclass(frozen=True, slots=True)
class Report(Displayed):
    """The outcome of every knob of a profile, in the order in which the knobs are set."""

    profile: str
    guarantee: Guarantee
    """The guarantee that the profile requests, and the strongest satisfied one."""

    digest: str
    rows: tuple[KnobRow, ...]
    planned: bool = False
    """True for the report on a plan: nothing has been applied yet."""

    effects: tuple[PolicyEffect, ...] = ()
    """Effects of the policies so far, by op and module."""

    unseen: tuple[str, ...] = ()
    """Custom ops and Triton kernels: torch's deterministic flag does not cover them."""

    drift: tuple[KnobChange, ...] = ()
    """Knobs that later code has changed, with their last values: see `guard`."""

    unseeded: tuple[ObservedCall, ...] = ()
    """Nondeterministic reads of the program: random numbers from an unseeded source."""

    loading: tuple[str, ...] = ()
    """Remarks on the data loading of the program, one line each."""

    as_good: tuple[KnobChange, ...] = ()
    """Knobs that later code has changed to an equivalent value."""

    switches: tuple[Writer, ...] = ()
    """Determinism switches of frameworks that agree with the profile.

    Empty unless writes are observed, by a `guard` that warns or stops.
    """

    def __iter__(self) -> Iterator[KnobRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, knob: str) -> KnobRow:
        by_name = {row.knob: row for row in self.rows}
        if knob in by_name:
            return by_name[knob]
        close = near(knob, by_name)
        hint = f"; did you mean {close!r}?" if close else ""
        raise KeyError(f"no knob {knob!r} in this report{hint}")

    def having(self, *outcomes: Outcome) -> tuple[KnobRow, ...]:
        """Return the rows with one of `outcomes`."""
        return tuple(row for row in self.rows if row.outcome in outcomes)

    @property
    def counts(self) -> Mapping[str, int]:
        """The number of knobs with each outcome. The most frequent outcome comes first."""
        return dict(Counter(str(row.outcome) for row in self.rows).most_common())

    @property
    def summary(self) -> str:
        """One line with the profile, the guarantee, and the number of knobs with each outcome.

        Knobs for absent hardware are not counted. If the guarantee is lowered and the line would
        be long, the counts are omitted.
        """
        present = Counter(str(row.outcome) for row in self.rows if not row.absent).most_common()
        counts = ", ".join(f"{number} {outcome}" for outcome, number in present) or "nothing to set"
        if self.drift:
            state = "has drifted"
            counts += f"; drifted: {some([drift.knob for drift in self.drift])}"
        else:
            state = "would be active" if self.planned else "is active"
        if self.guarantee.lowered:
            line = f"{self.profile} {state}: {self.guarantee}"
            return f"{line}; {counts}" if len(line) + len(counts) < _WIDE else line
        return f"{self.profile} ({self.guarantee}) {state}: {counts}"

    def table(self) -> str:
        """Return the whole report as text, with a table of all knobs, as ``--verbose`` shows it."""
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
    **further: Any,
) -> Report:
    """Return the report on the profile `resolved`. `further` are other fields of `Report`.

    The row of a knob in `as_good` gets the equivalent value that is in effect.
    """
    in_effect = {change.knob: change for change in as_good}
    rows = tuple(_with_equivalent(row, in_effect.get(row.knob)) for row in rows)
    guarantee = judge(resolved.guarantee, rows, drift, facts)
    reported = tuple(_mark_absent_hardware(row, facts.absent) for row in rows)
    further |= {"drift": drift, "as_good": as_good}
    return Report(resolved.name, guarantee, resolved.digest, reported, **further)


def _with_equivalent(row: KnobRow, change: KnobChange | None) -> KnobRow:
    if change is None:
        return row
    return replace(row, after=change.now, why="; ".join(filter(None, (row.why, change.words))))


def _mark_absent_hardware(row: KnobRow, absent: Mapping[str, str]) -> KnobRow:
    """Return the row, marked as `UNSUPPORTED` if the hardware of the knob is absent.

    An outcome that stops a strict profile is not replaced: a conflict also affects child processes.
    """
    knob = knobs_by_name().get(row.knob)
    reason = absent.get(knob.hardware) if knob is not None else None
    if knob is None or not reason or row.outcome in STOPPING:
        return row
    remark = row.why if row.outcome is not Outcome.UNSUPPORTED else ""
    if row.is_written:
        reaches_children = knob.scope is Scope.PROCESS_AND_CHILDREN
        remark = "set for child processes" if reaches_children else "set and nothing reads it"
    why = "; ".join(filter(None, (f"{knob.hardware}: {reason}", remark)))
    return replace(row, outcome=Outcome.UNSUPPORTED, why=why, unverified=False, absent=reason)


@parts.register(Report)
def _report_parts(report: Report) -> tuple[Part, ...]:
    return *start_up_parts(report), *absent_lines(report), *_later_parts(report)


def verbose_parts(report: Report) -> tuple[Part, ...]:
    """Return the whole report: summary, knobs, drift, and the effects of policies."""
    return *headline_parts(report), report.digest, *knob_parts(report), *_later_parts(report)


def start_up_parts(report: Report) -> tuple[Part, ...]:
    """Return the headline, and a line for each knob that needs attention and is not named in it."""
    in_summary = {lowered.knob for lowered in report.guarantee.lowered}
    rows = []
    for row in report:
        style, needs_attention = STANDINGS[row.standing]
        if needs_attention and row.knob not in in_summary:
            moved = "" if row.before == row.after else f" {_change(row.before, row.after)}"
            rows.append((Styled(f"  {row.standing}", style), f"{row.knob}{moved}: {row.why}"))
    if untested := untested_torch():
        rows.append((Styled("  untested", STANDINGS["lowered"][0]), untested))
    return headline_parts(report, *rows)


def headline_parts(report: Report, *rows: tuple[Styled, str]) -> tuple[Part, ...]:
    """Return the summary, a line for each reason that lowers the guarantee, and `rows`."""
    lowered = Styled("  lowered", STANDINGS["lowered"][0])
    lines = (*((lowered, reason) for reason in report.guarantee.reasons), *rows)
    return (report.summary, Table((), lines, fold=1)) if lines else (report.summary,)


def knob_parts(report: Report) -> tuple[Part, ...]:
    """Return the table of knobs in a report or a plan, and the lines about absent hardware."""
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
    """Return lines about the knobs with absent hardware, one line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for row in report:
        if row.absent:
            by_reason.setdefault(row.absent, []).append(knobs_by_name()[row.knob].hardware)
    return [f"{for_hardware(names)}: {reason}" for reason, names in by_reason.items()]


def for_hardware(names: Sequence[str]) -> str:
    """Return, for example, ``3 settings for CUDA``; `names` has the hardware of each setting."""
    *leading, last = (name for name in HARDWARE if name in names)
    listed = f"{', '.join(leading)} and {last}" if leading else last
    return f"{len(names)} setting{'s' * (len(names) > 1)} for {listed}"


def agreement_lines(report: Report) -> list[str]:
    """Return a line for each equivalent value, and each switch that agrees with the profile."""
    agreeing: list[tuple[str, KnobChange | Writer]] = [
        (f"{change.knob} is {shown(change.now)}: {change.words}", change)
        for change in report.as_good
    ]
    named = {change.by for change in report.as_good}
    switches = (switch for switch in report.switches if switch.by not in named)
    agreeing += [(f"{switch.by} agrees with the profile", switch) for switch in switches]
    return [
        f"unchanged: {words}" + (f" ({line})" if (line := write.called or write.where) else "")
        for words, write in agreeing
    ]


def random_number_lines(report: Report) -> list[str]:
    """Return lines about the random numbers and the data loading of a run.

    A function that drew without a seed gets one line, with the first such call and the remedy.
    """
    first: dict[str, ObservedCall] = {}
    for read in report.unseeded:
        first.setdefault(read.name, read)
    drew = (f"drew without a seed: {read} ({read.instead})" for read in first.values())
    return [*drew, *report.loading]


def _later_parts(report: Report) -> tuple[Part, ...]:
    drift = []
    for written in by_write(report.drift):
        for change in written:
            caller = f", called from {change.called}" if change.called else ""
            line = f"{change.where}{caller}" if change.where else "not observed"
            line = line if change is written[0] else "the same line"
            label = Styled("drifted", STANDINGS["drifted"][0])
            values = _change(change.was, change.now)
            drift.append((label, change.knob, values, change.when, line))
    columns = ("", "knob", "was -> is", "seen", "written at")
    return (
        *((table(columns, drift),) if drift else ()),
        *agreement_lines(report),
        *_effects_parts(report),
        *random_number_lines(report),
    )


def _effects_parts(report: Report) -> tuple[Part, ...]:
    not_covered = f"torch's deterministic flag does not cover: {some(report.unseen)}"
    unseen = (not_covered,) if report.unseen else ()
    if not report.effects:
        return unseen
    rows = [
        (
            str(effect.calls),
            effect.policy,
            effect.subject,
            effect.what,
            effect.where,
            size(effect.moved) if effect.moved else "",
        )
        for effect in sorted(report.effects, key=lambda effect: -effect.calls)
    ]
    columns = ("calls", "policy", "op or module", "what", "where", "moved")
    return table(columns, rows, fold=4), *unseen


def _change(before: Any, after: Any) -> str:
    old, new = ("-" if value is None else shown(value) for value in (before, after))
    return new if before == after else f"{old} -> {new}"


_announced: set[tuple[str, Guarantee]] = set()  # digests and guarantees already announced


def announce(report: Report) -> None:
    """Print on standard error which profile is active, as briefly or verbosely as the user chose.

    A process announces a profile once, and again if the guarantee has changed since. Only the first
    rank prints.
    """
    announced = (report.digest, report.guarantee)
    if not _is_first_rank() or announced in _announced:
        return
    _announced.add(announced)
    headline, *details = announcement(report) or ("",)
    if headline:
        show_aside(f"torchrepro: {headline}", *details)


def announcement(report: Report) -> tuple[Part, ...]:
    """Return the announcement of an applied profile, as briefly or verbosely as the user chose."""
    if verbosity() is Verbosity.VERBOSE:
        return (*headline_parts(report), report.digest, *knob_parts(report))
    if verbosity() is Verbosity.QUIET and not report.guarantee.lowered:
        return ()
    return start_up_parts(report)


def announce_end(report: Report, announced: Report) -> None:
    """Print on standard error, at the end of a run, the changes since the announcement.

    With ``--verbose``, changes to equivalent values are printed as well.
    """
    if not _is_first_rank():
        return
    if verbosity() is Verbosity.VERBOSE:
        note(*agreement_lines(report))
    if (report.guarantee, report.drift) != (announced.guarantee, announced.drift):
        if report.guarantee == announced.guarantee:
            note(f"at the end, {report.summary}")
        else:
            headline, *details = headline_parts(report)
            show_aside(f"torchrepro: at the end, {headline}", *details)


def announce_effects(report: Report) -> None:
    """Print on standard error the effects of policies and the remarks on random numbers."""
    if not _is_first_rank() or verbosity() is Verbosity.QUIET:
        return
    if report.effects:
        title = f"torchrepro: effects of the policies of {report.profile}:"
        show_aside(title, *_effects_parts(report))
    else:
        note(*_effects_parts(report))
    note(*random_number_lines(report))


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"
