"""What happened to every knob that a profile names, and what that leaves of its guarantee.

A report is one row per knob. The guarantee is held to its substance: what was asked for, what is
held, and what lowers it. People see one line and what needs attention, or the table of all knobs;
JSON has every row.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.console import (
    Displayed,
    Styled,
    Table,
    as_text,
    note,
    parts,
    say,
    say_once,
    show_aside,
    table,
)
from torchrepro.errors import by_write
from torchrepro.knobs.catalogue import knobs_by_name
from torchrepro.knobs.knob import MissingState, Scope
from torchrepro.messages import Problem, near, shown, some
from torchrepro.process_state import (
    HARDWARE,
    absent_hardware,
    closed_doors,
    present_kinds,
    set_before_start,
)
from torchrepro.profile.needs import NEEDS, WEAKER, Need
from torchrepro.seeding import streams
from torchrepro.seeding.seeding_calls import given_by_program
from torchrepro.verbosity import BOTH_SET, Verbosity, asked_for, verbosity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torchrepro.console import Part
    from torchrepro.knobs.knob import Knob
    from torchrepro.policies.policy import Effect
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.seeding.uncontrolled import SourceRead

NONE = "none"
"""What is held where not even the random numbers are."""

_REASONS = 3
"""The number of reasons for a lower guarantee that a line has room for."""

STANDINGS: Mapping[str, tuple[str, bool]] = {
    "applied": ("green", False),
    "unchanged": ("dim", False),
    "unchanged, unverified": ("yellow", True),
    "unsupported": ("dim", False),
    "unsupported, refused": ("yellow", True),
    "too_late": ("yellow", True),
    "ineffective": ("bold red", True),
    "conflict": ("bold red", True),
    "failed": ("bold red", True),
    "drifted": ("bold red", True),
    "lowered": ("yellow", True),
}
"""What a report says of a knob: the style in which it does, and whether it needs attention."""


class Outcome(StrEnum):
    """What became of a knob."""

    APPLIED = "applied"
    """Written, read back, and in force."""

    UNCHANGED = "unchanged"
    """Already so, or the user's own value is as good."""

    TOO_LATE = "too_late"
    """Past its phase: not written, because it would change nothing."""

    UNSUPPORTED = "unsupported"
    """Does not exist in this process; or is for hardware that is not here, and set if it can be."""

    INEFFECTIVE = "ineffective"
    """Written, but reading it back gave something else, or nothing here acts on it."""

    CONFLICT = "conflict"
    """The user exported another value, which was kept."""

    FAILED = "failed"
    """The library refused the write."""


STOPPING = (Outcome.CONFLICT, Outcome.INEFFECTIVE, Outcome.FAILED)
"""The outcomes with which a strict profile does not go on."""


@dataclass(frozen=True, slots=True)
class Row:
    """One knob's outcome."""

    knob: str
    outcome: Outcome
    before: Any = None
    after: Any = None
    why: str = ""
    unverified: bool = False
    """Whether nobody can tell that a variable, which is set as asked, is in effect here."""

    absent: str = ""
    """Why the hardware that the knob is for is not here, in words; empty where it is."""

    @property
    def is_written(self) -> bool:
        """Whether the profile has written it.

        A late one is written where its hardware is not here, so that nothing in this process would
        have read it: the processes that this one starts may.
        """
        late = self.outcome is Outcome.TOO_LATE
        return self.outcome is Outcome.APPLIED or (late and self.after != self.before)

    @property
    def is_set(self) -> bool:
        """Whether the knob has the value of the profile, whatever acts on it here."""
        return is_set(self.outcome, self.after, self.absent)

    @property
    def state(self) -> Any:
        """The value that the knob has, or the outcome if it was not set."""
        return self.after if self.is_set else str(self.outcome)

    @property
    def standing(self) -> str:
        """What is said of it, one of `STANDINGS`."""
        marks = {", unverified": self.unverified, ", refused": _is_refused(self)}
        return str(self.outcome) + next((mark for mark, true in marks.items() if true), "")

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        return {
            "knob": self.knob,
            "outcome": str(self.outcome),
            "before": _json_or_text(self.before),
            "after": _json_or_text(self.after),
            "why": self.why,
            "unverified": self.unverified,
            "absent": self.absent,
        }


def is_set(outcome: Any, after: Any, absent: Any) -> bool:
    """Whether `after` is the value that a profile has given to a knob.

    A knob for absent hardware has one where the profile could set it, whatever its outcome: a lock
    from a machine with that hardware has the same.
    """
    return outcome in (Outcome.APPLIED, Outcome.UNCHANGED) or bool(absent and after is not None)


class Drift(NamedTuple):
    """A knob that later code has changed while its profile was in force."""

    knob: str
    was: Any
    """What it read when the profile had set it."""

    now: Any
    when: str
    """The first moment at which it was seen, such as `before step 4`; steps count from 0."""

    where: str = ""
    """``file:line`` of the first write that left the profile's value, where that was seen."""

    called: str = ""
    """``file:line`` of the program's own code that led there, where `where` is a library's."""

    by: str = ""
    """The framework's determinism switch that made that write, if one did."""

    moved_on: bool = False
    """Whether the value of now is another one than that write gave."""

    def __str__(self) -> str:
        return in_words([self])

    @property
    def problem(self) -> Problem:
        """What a message says of it."""
        note = "" if self.where else "; the line that wrote it was not seen"
        if self.moved_on:
            note = "; the line was the first to change it, another has written since"
        by = f"; by {self.by}" if self.by else ""
        return Problem(
            f"the profile had set {shown(self.was)} (seen {self.when}{note}{by})",
            where=self.where,
            key=self.knob,
            found=shown(self.now),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the drift as plain JSON values."""
        return {
            "knob": self.knob,
            "was": _json_or_text(self.was),
            "now": _json_or_text(self.now),
            "when": self.when,
            "where": self.where,
            "called": self.called,
            "by": self.by,
            "moved_on": self.moved_on,
        }


def in_words(written: Sequence[Drift]) -> str:
    """Return in a line what one write has changed."""
    first = written[0]
    changes = ", ".join(f"{it.knob} was {shown(it.was)}, is {shown(it.now)}" for it in written)
    verb = "first changed" if first.moved_on else "set"
    place = f"; {verb} at {first.where}" if first.where else ""
    called = f", called from {first.called}" if first.called else ""
    return f"{changes} ({first.when}{place}{called})"


class Rewrite(NamedTuple):
    """A knob to which later code has given another value that is as good as the profile's."""

    knob: str
    was: Any
    """What it read when the profile had set it."""

    now: Any
    """The value in effect."""

    why: str
    """Why that is no drift."""

    when: str
    """The first moment at which it was seen, as with `Drift`."""

    where: str = ""
    """``file:line`` of the write, where that was seen."""

    called: str = ""
    """``file:line`` of the program's own code that led there, where `where` is a library's."""

    by: str = ""
    """The framework's determinism switch that wrote it, or that writes such values."""

    @property
    def words(self) -> str:
        """Why the knob has another value than the profile's, in words."""
        unseen = f"as {self.by} writes it" if self.by else "written by the program"
        written = f"written by {self.by}" if self.by and self.where else unseen
        return f"the profile has {shown(self.was)}, and this is {self.why}; {written}"

    def to_json(self) -> dict[str, Any]:
        """Return the change as plain JSON values."""
        plain = {"was": _json_or_text(self.was), "now": _json_or_text(self.now)}
        return {**self._asdict(), **plain}


class Agreement(NamedTuple):
    """A determinism switch of a framework that has changed nothing of what a profile promises."""

    name: str
    """What its users call it."""

    where: str
    """``file:line`` of a write of it."""

    called: str = ""
    """``file:line`` of the program's own code that led there."""

    outcome: str = "unchanged"
    """What became of the profile's knobs."""

    def to_json(self) -> dict[str, Any]:
        """Return the agreement as plain JSON values."""
        return self._asdict()


class Lowered(NamedTuple):
    """A knob that keeps a guarantee from being held."""

    knob: str
    left_open: str
    """What may differ between two runs."""

    because: str

    @property
    def why(self) -> str:
        """What may differ, and the reason."""
        return f"{self.left_open}: {self.because}"


class Guarantee(NamedTuple):
    """What a profile asks for, and what of it is held."""

    asked: str
    held: str
    """The strongest guarantee, up to the one asked for, whose needs are all met; or `none`."""

    lowered: tuple[Lowered, ...] = ()
    """Why that is not the one asked for."""

    def __str__(self) -> str:
        """Return the guarantee by its name, with what it leaves open."""
        if not self.lowered:
            return self.asked
        reasons = self.reasons
        more = len(reasons) - _REASONS
        last = f", and {more} more" if more > 0 else ""
        return f"{self.asked}, except {', '.join(reasons[:_REASONS])}{last}"

    @property
    def reasons(self) -> list[str]:
        """What is left open, once for each reason, with the reason."""
        by_reason: dict[str, list[str]] = {}
        for each in self.lowered:
            by_reason.setdefault(each.because, []).append(each.left_open)
        return [
            f"{' and '.join(dict.fromkeys(left_open))} ({because})"
            for because, left_open in by_reason.items()
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the guarantee as plain JSON values."""
        lowered = [{"knob": each.knob, "why": each.why} for each in self.lowered]
        return {"asked": self.asked, "held": self.held, "lowered": lowered}


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What a guarantee depends on in a process that the profile itself does not set."""

    kinds: frozenset[str] = frozenset()
    """The kinds of device that are present."""

    readings: Mapping[str, Any] = field(default_factory=dict)
    """Knobs that the profile leaves alone, with what they read."""

    missing: Mapping[str, str] = field(default_factory=dict)
    """Knobs that the profile leaves alone and that do not exist here, with the reason."""

    seeded: bool = False
    """Whether a profile with a seed is in force, this one or another."""

    calls: frozenset[str] = frozenset()
    """The functions with which the program has given a seed itself."""

    absent: Mapping[str, str] = field(default_factory=dict)
    """The hardware that is not here, with the reason in words."""


@dataclass(frozen=True, slots=True)
class Report(Displayed):
    """The outcome of every knob that a profile names, in the order in which they were set."""

    profile: str
    guarantee: Guarantee
    """What the profile asks for, and what of it is held."""

    digest: str
    rows: tuple[Row, ...]
    planned: bool = False
    """Whether this is what would happen rather than what happened."""

    effects: tuple[Effect, ...] = ()
    """What the policies among the knobs have done so far, op by op and module by module."""

    unseen: tuple[str, ...] = ()
    """Custom ops and Triton kernels, which torch's deterministic flag cannot see."""

    drift: tuple[Drift, ...] = ()
    """Knobs that later code has changed, as they were last read: see `guard`."""

    unseeded: tuple[SourceRead, ...] = ()
    """Where the program has drawn numbers that no seed decides."""

    loading: tuple[str, ...] = ()
    """What a reader has to know of how the program's data was loaded, in a line for each."""

    as_good: tuple[Rewrite, ...] = ()
    """Knobs to which later code has given another value, as good as the profile's."""

    switches: tuple[Agreement, ...] = ()
    """Determinism switches of frameworks that agree with the profile, as far as writes are watched:
    see `guard: error`."""

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, knob: str) -> Row:
        for row in self.rows:
            if row.knob == knob:
                return row
        names = [row.knob for row in self.rows]
        close = near(knob, names)
        raise KeyError(
            f"no knob {knob!r} in this report" + (f"; did you mean {close!r}?" if close else "")
        )

    def having(self, *outcomes: Outcome) -> tuple[Row, ...]:
        """Return the rows with one of `outcomes`."""
        return tuple(row for row in self.rows if row.outcome in outcomes)

    @property
    def counts(self) -> Mapping[str, int]:
        """How many knobs had each outcome, most frequent first."""
        return dict(Counter(str(row.outcome) for row in self.rows).most_common())

    @property
    def summary(self) -> str:
        """One line: the profile, what of its guarantee is held, the number of knobs per outcome.

        Knobs for hardware that is not here are not among those numbers.
        """
        here = Counter(str(row.outcome) for row in self.rows if not row.absent).most_common()
        counts = ", ".join(f"{number} {outcome}" for outcome, number in here) or "nothing to set"
        if self.drift:
            state = "has drifted"
            counts += f"; drifted: {some([drift.knob for drift in self.drift])}"
        else:
            state = "would be in force" if self.planned else "is in force"
        if self.guarantee.lowered:
            return f"{self.profile} {state}: {self.guarantee}; {counts}"
        return f"{self.profile} ({self.guarantee}) {state}: {counts}"

    def table(self) -> str:
        """Return the report with every knob as a table, as ``--verbose`` shows it."""
        return as_text(*whole(self))

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
    rows: tuple[Row, ...],
    facts: ProcessFacts,
    drift: tuple[Drift, ...] = (),
    as_good: tuple[Rewrite, ...] = (),
    **more: Any,
) -> Report:
    """Return the report on `resolved` with these rows; `more` are further fields of it.

    The rows of knobs in `as_good` get the value in effect.
    """
    in_effect = {rewrite.knob: rewrite for rewrite in as_good}
    rows = tuple(_rewritten(row, in_effect.get(row.knob)) for row in rows)
    guarantee = judge(resolved.guarantee, rows, drift, facts)
    here = tuple(_row_here(row, facts.absent) for row in rows)
    more |= {"drift": drift, "as_good": as_good}
    return Report(resolved.name, guarantee, resolved.digest, here, **more)


def _rewritten(row: Row, rewrite: Rewrite | None) -> Row:
    if rewrite is None:
        return row
    why = "; ".join(filter(None, (row.why, rewrite.words)))
    return replace(row, after=rewrite.now, why=why)


def _words_for_set(row: Row, knob: Knob) -> str:
    reaches_children = knob.scope is Scope.PROCESS_AND_CHILDREN
    who = "for the processes that this one starts" if reaches_children else "and nothing reads it"
    return f"set {who}"


def _words_for_late(row: Row, knob: Knob) -> str:
    return _words_for_set(row, knob) if row.is_written else row.why


_WITHOUT_HARDWARE: Mapping[Outcome, Callable[[Row, Knob], str]] = {
    Outcome.APPLIED: _words_for_set,
    Outcome.UNCHANGED: lambda row, knob: row.why,
    Outcome.TOO_LATE: _words_for_late,
    Outcome.UNSUPPORTED: lambda row, knob: "",
}
"""What a knob came to that is `unsupported` where its hardware is absent, and what is said of it.

Any other outcome stays: a conflict is one for every process below, too.
"""


def _row_here(row: Row, absent: Mapping[str, str]) -> Row:
    """Return `row` as it is to be reported in a process without the hardware in `absent`."""
    knob = knobs_by_name().get(row.knob)
    words = absent.get(knob.hardware) if knob is not None else None
    if knob is None or not words or row.outcome not in _WITHOUT_HARDWARE:
        return row
    further = _WITHOUT_HARDWARE[row.outcome](row, knob)
    why = "; ".join(filter(None, (f"{knob.hardware}: {words}", further)))
    return replace(row, outcome=Outcome.UNSUPPORTED, why=why, unverified=False, absent=words)


def process_facts(
    resolved: ResolvedProfile, closed: Mapping[str, str] | None = None
) -> ProcessFacts:
    """Read what the guarantee of `resolved` depends on beside the knobs that it names.

    `closed` are the one-way doors that are closed, if not those of this moment. A variable that
    may have been set after its door was closed proves nothing, and is left out.
    """
    closed = closed_doors() if closed is None else closed
    kinds = present_kinds()
    asked = resolved.guarantee
    needed = {need.knob for each in (asked, *WEAKER[asked]) for need in _needs(each, kinds)}
    readings, missing = {}, {}
    for name in sorted(needed.difference(knob.name for knob, _ in resolved.settings())):
        if name.startswith("seed."):
            continue
        knob = knobs_by_name()[name]
        late = knob.variable and knob.door in closed and not set_before_start(knob.variable)
        if late or not knob.loaded:
            continue
        try:
            readings[name] = knob.access.read()
        except MissingState as absent:
            missing[name] = str(absent)
    seeded = streams.current_plan().seed is not None
    return ProcessFacts(kinds, readings, missing, seeded, given_by_program(), absent_hardware())


def judge(
    asked: str, rows: Iterable[Row], drift: Iterable[Drift], facts: ProcessFacts
) -> Guarantee:
    """Return what is held of the guarantee `asked` where a profile has come to `rows`."""
    outcomes = {row.knob: row for row in rows}
    drifted = {each.knob: each for each in drift}

    def lacking(guarantee: str) -> tuple[Lowered, ...]:
        found = {}
        for need in _needs(guarantee, facts.kinds):
            row, moved = outcomes.get(need.knob), drifted.get(need.knob)
            because = _lack(need, row, moved, facts)
            if because:
                found[need.knob] = Lowered(need.knob, need.left_open, because)
        return tuple(found.values())

    lowered = lacking(asked)
    if not lowered:
        return Guarantee(asked, asked)
    held = next((weaker for weaker in WEAKER[asked] if not lacking(weaker)), NONE)
    return Guarantee(asked, held, lowered)


def _needs(guarantee: str, kinds: frozenset[str]) -> Iterator[Need]:
    for need in NEEDS:
        if need.met_by and guarantee in need.guarantees and kinds.issuperset(need.kinds):
            yield need


def _lack(need: Need, row: Row | None, drift: Drift | None, facts: ProcessFacts) -> str:
    """Return why `need` is not met, or an empty string."""
    name = need.knob.rpartition(".")[2]
    if drift is not None:
        change = f"{name} was {shown(drift.was)}, is {shown(drift.now)}"
        return "" if _meets(need, drift.now) else change
    return _lack_in_process(need, name, facts) if row is None else _lack_in_row(need, name, row)


def _lack_in_row(need: Need, name: str, row: Row) -> str:
    """Return why what the profile came to does not meet `need`, or an empty string."""
    match row.outcome:
        case Outcome.UNCHANGED if row.unverified:
            return f"{name} is unverified: {row.why}; start with `torchrepro run`"
        case Outcome.APPLIED | Outcome.UNCHANGED:
            return "" if _meets(need, row.after) else f"{name} is {shown(row.after)}"
        case Outcome.TOO_LATE if _meets(need, row.after):
            return f"{name} is set and not in effect: {row.why}"
        case Outcome.TOO_LATE:
            return f"{name} is late: start with `torchrepro run`, or set `on_late: relaunch`"
        case Outcome.UNSUPPORTED if need.if_there:
            return ""
        case _:
            return f"{name} is {row.outcome}: {row.why}"


def _lack_in_process(need: Need, name: str, facts: ProcessFacts) -> str:
    """Return why a process does not meet `need` by itself, or an empty string."""
    if need.calls:
        given = facts.seeded or not facts.calls.isdisjoint(need.calls)
        who = "neither the profile nor, since it is in force, the program"
        return "" if given else f"{who} has given a seed"
    if need.knob in facts.missing:
        return "" if need.if_there else f"{name}: {facts.missing[need.knob]}"
    now = facts.readings.get(need.knob)
    if _meets(need, now):
        return ""
    reading = f", and it is {shown(now)}" if now is not None else ""
    return f"{name} is not set by the profile{reading}"


def _meets(need: Need, value: Any) -> bool:
    return value is not None and need.met_by is not None and need.met_by(value)


@parts.register(Report)
def _report_parts(report: Report) -> tuple[Part, ...]:
    """Return the summary, what needs attention, and what is for hardware that is not here."""
    said = (report.summary, *attention(report), *absent_lines(report))
    return *said, *_happened(report)


def whole(report: Report) -> tuple[Part, ...]:
    """Return all that a report says: its knobs, its summary, drift, what its policies have done."""
    return *knob_parts(report), report.summary, report.digest, *_happened(report)


def _happened(report: Report) -> tuple[Part, ...]:
    """Return what a report says of the time since the profile was put in force."""
    drift = (_drift_table(report.drift),) if report.drift else ()
    return *drift, *agreement_lines(report), *_effects_parts(report), *random_number_lines(report)


def agreement_lines(report: Report) -> list[str]:
    """Return a line for each change and each switch that leaves the profile's promise whole."""
    agreeing = [each for each in report.switches if each.name not in _writers(report.as_good)]
    return [
        *(
            f"unchanged: {rewrite.knob} is {shown(rewrite.now)}: {rewrite.words}{_seen_at(rewrite)}"
            for rewrite in report.as_good
        ),
        *(f"unchanged: {each.name} agrees with the profile{_seen_at(each)}" for each in agreeing),
    ]


def _writers(rewrites: Iterable[Rewrite]) -> set[str]:
    return {rewrite.by for rewrite in rewrites}


def _seen_at(written: Rewrite | Agreement) -> str:
    place = written.called or written.where
    return f" ({place})" if place else ""


def attention(report: Report) -> tuple[Part, ...]:
    """Return what needs a reader's attention and is not in the summary, in a line for each."""
    in_summary = {each.knob for each in report.guarantee.lowered}
    rows = [
        (each.standing, f"{each.knob}{_moved(each)}: {each.why}")
        for each in report
        if STANDINGS[each.standing][1] and each.knob not in in_summary
    ]
    rows += [("lowered", reason) for reason in report.guarantee.reasons[_REASONS:]]
    if not rows:
        return ()
    styled = ((Styled(f"  {word}", _style(word)), text) for word, text in rows)
    return (Table((), tuple(styled), fold=1),)


def _style(standing: str) -> str:
    return STANDINGS[standing][0]


def _moved(row: Row) -> str:
    return "" if row.before == row.after else f" {_change(row.before, row.after)}"


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


def _effects_parts(report: Report) -> tuple[Part, ...]:
    effects = (_effects_table(report.effects),) if report.effects else ()
    return *effects, *((_unseen_line(report),) if report.unseen else ())


def _unseen_line(report: Report) -> str:
    return f"torch's deterministic flag cannot see: {some(report.unseen)}"


def unseeded_lines(report: Report) -> list[str]:
    """Return a line for each function that drew without a seed: where first, and what to do."""
    first: dict[str, SourceRead] = {}
    for read in report.unseeded:
        first.setdefault(read.name, read)
    return [f"drew without a seed: {read} ({read.instead})" for read in first.values()]


def random_number_lines(report: Report) -> list[str]:
    """Return what a reader has to know of the random numbers of a run, in a line for each."""
    return [*unseeded_lines(report), *report.loading]


def _drift_table(drift: Iterable[Drift]) -> Table:
    """Return the table of the knobs that later code has changed, each write once."""
    rows = [
        (
            Styled("drifted", _style("drifted")),
            each.knob,
            _change(each.was, each.now),
            each.when,
            "the same line" if each is not written[0] else _written_at(each),
        )
        for written in by_write(drift)
        for each in written
    ]
    return table(("", "knob", "was -> is", "seen", "written at"), rows)


def _written_at(drift: Drift) -> str:
    called = f", called from {drift.called}" if drift.called else ""
    return f"{drift.where}{called}" if drift.where else "not seen"


def _effects_table(effects: Iterable[Effect]) -> Table:
    """Return the table of what policies have done, the most frequent first."""
    from rich.filesize import decimal

    rows = [
        (str(effect.calls), effect.policy, effect.subject, effect.what, effect.where, moved)
        for effect in sorted(effects, key=lambda effect: -effect.calls)
        for moved in [decimal(effect.moved) if effect.moved else ""]
    ]
    return table(("calls", "policy", "op or module", "what", "where", "moved"), rows, fold=4)


def knob_parts(report: Report) -> tuple[Part, ...]:
    """Return the table of a report or of a plan, and what is for hardware that is not here."""
    rows = [
        (
            Styled(row.standing, _style(row.standing)),
            row.knob,
            _change(row.before, row.after),
            row.why,
        )
        for row in report
        if not row.absent
    ]
    change = "now -> then" if report.planned else "before -> after"
    return table(("outcome", "knob", change, "why"), rows), *absent_lines(report)


def _change(before: Any, after: Any) -> str:
    then = "-" if after is None else shown(after)
    if before == after:
        return then
    return f"{'-' if before is None else shown(before)} -> {then}"


def _json_or_text(value: Any) -> Any:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return shown(value)
    return value


_announced: set[tuple[str, Guarantee]] = set()  # what this process has said, by digest


def announce(report: Report) -> None:
    """Tell standard error what was put in force: as much of it as the reader wants.

    A profile is announced once in a process, unless less of its guarantee is held than before;
    ranks but the first stay silent.
    """
    known = (report.digest, report.guarantee)
    if os.environ.get("RANK", "0") != "0" or known in _announced:
        return
    _announced.add(known)
    if len(asked_for()) > 1:
        say_once(BOTH_SET)
    first, *others = announcement(report) or ("",)
    if first:
        show_aside(f"torchrepro: {first}", *others)


def announcement(report: Report) -> tuple[Part, ...]:
    """Return what is said of a profile that is put in force: as much as the reader wants."""
    return _ANNOUNCED[verbosity()](report)


def start_up(report: Report) -> tuple[Part, ...]:
    """Return the line that a run starts with, and what needs attention."""
    return report.summary, *attention(report)


_ANNOUNCED: Mapping[Verbosity, Callable[[Report], tuple[Part, ...]]] = {
    Verbosity.QUIET: lambda report: start_up(report) if report.guarantee.lowered else (),
    Verbosity.NORMAL: start_up,
    Verbosity.VERBOSE: lambda report: (report.summary, report.digest, *knob_parts(report)),
}
"""What is said of a profile that is put in force: a line, and what follows it."""


def _is_refused(row: Row) -> bool:
    """Whether a policy was asked for that cannot be put in force."""
    knob = knobs_by_name().get(row.knob)
    return row.outcome is Outcome.UNSUPPORTED and knob is not None and knob.warn_if_unsupported


def announce_end(report: Report, announced: Report) -> None:
    """Tell standard error what did not stay at the end of a run as it was announced, in one line.

    Whoever wants all of it is also told what has changed to something as good.
    """
    if verbosity() is Verbosity.VERBOSE and os.environ.get("RANK", "0") == "0":
        note(*agreement_lines(report))
    if (report.guarantee, report.drift) == (announced.guarantee, announced.drift):
        return
    tell = note if report.guarantee == announced.guarantee else say
    if os.environ.get("RANK", "0") == "0":
        tell(f"at the end, {report.summary}")


def announce_random_numbers(report: Report) -> None:
    """Tell standard error what a reader has to know of the random numbers of a run."""
    if os.environ.get("RANK", "0") == "0":
        note(*random_number_lines(report))


def announce_effects(report: Report) -> None:
    """Tell standard error what the policies of a run have done, if they have done anything."""
    if os.environ.get("RANK", "0") != "0" or verbosity() is Verbosity.QUIET:
        return
    if not (report.effects or report.unseen):
        return
    if report.effects:
        title = f"torchrepro: {report.profile}, what its policies did:"
        show_aside(title, *_effects_parts(report))
    else:
        note(_unseen_line(report))
