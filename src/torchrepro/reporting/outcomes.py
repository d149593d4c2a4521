"""The outcome of each knob, the changes that later code made, and the resulting guarantee."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.ground.errors import Problem, shown
from torchrepro.knobs.catalogue import knobs_by_name
from torchrepro.knobs.knob import MissingState
from torchrepro.profile.needs import NEEDS, WEAKER, Need
from torchrepro.reporting.process_state import absent_hardware, present_kinds, set_before_start
from torchrepro.seeding import streams
from torchrepro.seeding.seeding_calls import seeding_calls

if TYPE_CHECKING:
    from torchrepro.knobs.knob import Knob
    from torchrepro.profile.resolved import ResolvedProfile

EQUIVALENT = "equivalent"

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
"""The standing of a knob in a report -> its style, and whether it needs attention."""


class Outcome(StrEnum):
    """The outcome of setting a knob."""

    APPLIED = "applied"
    """Written, read back, and in effect."""

    UNCHANGED = "unchanged"
    """It had the value already, or the user's own value is equivalent."""

    TOO_LATE = "too_late"
    """Its phase has ended: not written, because a write would have no effect."""

    UNSUPPORTED = "unsupported"
    """It does not exist in this process; or its hardware is absent, and it is set if possible."""

    INEFFECTIVE = "ineffective"
    """Written, but it reads back as another value, or nothing in this process uses it."""

    CONFLICT = "conflict"
    """The user exported another value, which was kept."""

    FAILED = "failed"
    """The library refused the write."""


STOPPING = (Outcome.CONFLICT, Outcome.INEFFECTIVE, Outcome.FAILED)
"""The outcomes that stop a strict profile."""


@dataclass(frozen=True, slots=True)
class KnobRow:
    """The outcome of one knob, with the value of the knob before and after."""

    knob: str
    outcome: Outcome
    before: Any = None
    after: Any = None
    why: str = ""
    unverified: bool = False
    """True for a variable that has the requested value, but may have got it too late."""

    absent: str = ""
    """Why the hardware of the knob is absent; empty if it is present."""

    @property
    def is_written(self) -> bool:
        """True if the profile wrote the knob.

        A `TOO_LATE` variable is written only if its hardware is absent: child processes may read
        it.
        """
        late = self.outcome is Outcome.TOO_LATE
        return self.outcome is Outcome.APPLIED or (late and self.after != self.before)

    @property
    def is_set(self) -> bool:
        """True if the knob has the profile's value, even if nothing in this process uses it."""
        return is_set(self.outcome, self.after, self.absent)

    @property
    def state(self) -> Any:
        """The value of the knob, or the outcome if it was not set."""
        return self.after if self.is_set else str(self.outcome)

    @property
    def standing(self) -> str:
        """The key of the knob in `STANDINGS`."""
        if self.unverified:
            return f"{self.outcome}, unverified"
        knob = knobs_by_name().get(self.knob)
        is_policy = knob is not None and knob.warn_if_unsupported
        refused = self.outcome is Outcome.UNSUPPORTED and is_policy
        return f"{self.outcome}, refused" if refused else str(self.outcome)

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        values = {name: _json_or_text(plain[name]) for name in ("before", "after")}
        return {**plain, "outcome": str(self.outcome), **values}


def is_set(outcome: Any, after: Any, absent: Any) -> bool:
    """Return whether a knob has the profile's value, so that `after` is this value.

    If the hardware of a knob is absent, the knob counts as set if the profile could write it,
    regardless of its outcome: a lock from a machine with that hardware has the same value.
    """
    return outcome in (Outcome.APPLIED, Outcome.UNCHANGED) or bool(absent and after is not None)


class Writer(NamedTuple):
    """The code that wrote a knob. All fields are empty if the write was not observed."""

    where: str = ""
    """``file:line`` of the nearest caller outside torch and Python."""

    called: str = ""
    """``file:line`` of the program's innermost frame, if `where` is in a library."""

    by: str = ""
    """The framework's determinism switch that made the write, by its public name, if one did."""

    def to_json(self) -> dict[str, Any]:
        """Return the writer, a switch that agrees with the profile, as plain JSON values."""
        writer = {"name": self.by, "where": self.where, "called": self.called}
        return {**writer, "outcome": str(Outcome.UNCHANGED)}


class KnobChange(NamedTuple):
    """A knob that later code changed while the profile was active.

    The change is called drift if the new value is not equivalent to the profile's value.
    """

    knob: str
    was: Any
    """Its value after the profile had set it."""

    now: Any
    when: str
    """When the change was first observed, such as `before step 4`; steps count from 0."""

    where: str = ""
    """``file:line`` of the first write of another value, if the write was observed."""

    called: str = ""
    """``file:line`` of the program's code that led to the write, if `where` is in a library."""

    by: str = ""
    """The framework's determinism switch that made that write, if one did."""

    moved_on: bool = False
    """For drift: true if the knob has been changed again since that write."""

    why: str = ""
    """For an equivalent value: why it is not drift."""

    def __str__(self) -> str:
        return in_words([self])

    @property
    def problem(self) -> Problem:
        """The message that reports the drift."""
        note = "" if self.where else "; the line that wrote it was not observed"
        if self.moved_on:
            note = "; that line changed it first, and another write followed"
        by = f"; by {self.by}" if self.by else ""
        return Problem(
            f"the profile had set {shown(self.was)} (seen {self.when}{note}{by})",
            where=self.where,
            key=self.knob,
            found=shown(self.now),
        )

    @property
    def words(self) -> str:
        """A sentence that explains why the knob has another, equivalent value."""
        writer = "written by the program"
        if self.by:
            writer = f"written by {self.by}" if self.where else f"as {self.by} writes it"
        return f"the profile has {shown(self.was)}, and this is {self.why}; {writer}"

    def to_json(self) -> dict[str, Any]:
        """Return the change as plain JSON values."""
        plain = {**self._asdict(), "was": _json_or_text(self.was), "now": _json_or_text(self.now)}
        del plain["moved_on" if self.why else "why"]
        return plain


def in_words(written: Sequence[KnobChange]) -> str:
    """Return one line about the knobs that a single write changed."""
    first = written[0]
    values = ", ".join(f"{it.knob} was {shown(it.was)}, is {shown(it.now)}" for it in written)
    verb = "first changed" if first.moved_on else "set"
    line = f"; {verb} at {first.where}" if first.where else ""
    caller = f", called from {first.called}" if first.called else ""
    return f"{values} ({first.when}{line}{caller})"


def why_equivalent(knob: Knob, value: Any) -> str:
    """Return why `value` is equivalent to the profile's value, or an empty string if it is not.

    Each of two equivalent values makes runs repeat, but the results under the two values may
    differ. This function judges exported variables, writes of the program, and drift.
    """
    if not isinstance(value, str):
        return ""
    if knob.enough is not None and knob.enough(value) and not knob.legal.complaint(value):
        return EQUIVALENT
    if value in knob.misspellings and knob.hardware in absent_hardware():
        return f"of no effect without {knob.hardware}, which refuses it"
    return ""


def _json_or_text(value: Any) -> Any:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return shown(value)
    return value


NONE = "none"  # every guarantee fails; even random numbers may differ between runs

ROOM = 40  # columns for the list of differing results; a longer list is replaced by a count


class Lowered(NamedTuple):
    """A knob that prevents a guarantee from being satisfied."""

    knob: str
    left_open: str
    """The results that may differ between two runs."""

    because: str

    @property
    def why(self) -> str:
        """The results that may differ, and the reason."""
        return f"{self.left_open}: {self.because}"


class Guarantee(NamedTuple):
    """The guarantee that a profile requests, and the strongest guarantee that is satisfied."""

    asked: str
    held: str
    """The strongest satisfied guarantee, at most the requested one; or `none`."""

    lowered: tuple[Lowered, ...] = ()
    """Why the requested guarantee is not satisfied, by knob."""

    def __str__(self) -> str:
        """Return the name of the guarantee, and the results that may differ in spite of it."""
        if not self.lowered:
            return self.asked
        left_open = dict.fromkeys(lowered.left_open for lowered in self.lowered)
        text = ", ".join(left_open)
        return f"{self.asked}, except {text if len(text) <= ROOM else f'{len(left_open)} things'}"

    @property
    def reasons(self) -> list[str]:
        """The results that may differ, grouped by reason."""
        by_reason: dict[str, list[str]] = {}
        for lowered in self.lowered:
            by_reason.setdefault(lowered.because, []).append(lowered.left_open)
        return [
            f"{' and '.join(dict.fromkeys(left_open))}: {because}"
            for because, left_open in by_reason.items()
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the guarantee as plain JSON values."""
        lowered = [{"knob": it.knob, "why": it.why} for it in self.lowered]
        return {"asked": self.asked, "held": self.held, "lowered": lowered}


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """Facts about a process, other than the profile's knobs, that affect a guarantee."""

    kinds: frozenset[str] = frozenset()  # the `KINDS` that are present
    readings: Mapping[str, Any] = field(default_factory=dict)
    """Values of knobs that the profile does not set."""

    missing: Mapping[str, str] = field(default_factory=dict)
    """Knobs that the profile does not set and that do not exist in this process -> the reason."""

    seeded: bool = False  # whether a profile with a seed is active, this one or another
    calls: frozenset[str] = frozenset()
    """The seeding functions that the program called itself."""

    absent: Mapping[str, str] = field(default_factory=dict)
    """Absent hardware -> the reason."""


def process_facts(resolved: ResolvedProfile, closed: Mapping[str, str]) -> ProcessFacts:
    """Read the facts about this process that affect the guarantee of `resolved`.

    `closed` are the closed latches: events that have ended a phase (see `LATCHES`). A variable that
    may have been set after its latch closed is skipped, because the variable may have no effect.
    """
    kinds = present_kinds()
    asked = resolved.guarantee
    levels = (asked, *WEAKER[asked])
    needed = {need.knob for guarantee in levels for need in _needs(guarantee, kinds)}
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
    return ProcessFacts(
        kinds, readings, missing, seeded, seeding_calls.functions(), absent_hardware()
    )


def judge(
    asked: str, rows: Iterable[KnobRow], drift: Iterable[KnobChange], facts: ProcessFacts
) -> Guarantee:
    """Return the strongest satisfied guarantee up to `asked`, and the reasons if it is weaker."""
    outcomes = {row.knob: row for row in rows}
    drifted = {change.knob: change for change in drift}

    def lacking(guarantee: str) -> tuple[Lowered, ...]:
        unmet = {}
        for need in _needs(guarantee, facts.kinds):
            because = _why_unmet(need, outcomes.get(need.knob), drifted.get(need.knob), facts)
            if because:
                unmet[need.knob] = Lowered(need.knob, need.left_open, because)
        return tuple(unmet.values())

    lowered = lacking(asked)
    if not lowered:
        return Guarantee(asked, asked)
    satisfied = next((weaker for weaker in WEAKER[asked] if not lacking(weaker)), NONE)
    return Guarantee(asked, satisfied, lowered)


def _needs(guarantee: str, kinds: frozenset[str]) -> Iterator[Need]:
    """Yield the needs of a guarantee that apply if `kinds` are present in this process."""
    for need in NEEDS:
        if need.met_by and guarantee in need.guarantees and kinds.issuperset(need.kinds):
            yield need


_IN_WORDS = {Outcome.FAILED: "could not be set", Outcome.CONFLICT: "is in conflict"}


def _why_unmet(
    need: Need, row: KnobRow | None, drift: KnobChange | None, facts: ProcessFacts
) -> str:
    """Return why a need of a guarantee is not met, or an empty string if it is met."""

    def met(value: Any) -> bool:
        return value is not None and need.met_by is not None and need.met_by(value)

    name = need.knob.rpartition(".")[2]
    if drift is not None:
        change = f"{name} was {shown(drift.was)}, is {shown(drift.now)}"
        return "" if met(drift.now) else change
    if row is not None:
        match row.outcome:
            case Outcome.UNCHANGED if row.unverified:
                return f"{name} is unverified: {row.why}; start with `torchrepro run`"
            case Outcome.APPLIED | Outcome.UNCHANGED:
                return "" if met(row.after) else f"{name} is {shown(row.after)}"
            case Outcome.TOO_LATE if met(row.after):
                return f"{name} is set and not in effect: {row.why}"
            case Outcome.TOO_LATE:
                return f"{name} is late: start with `torchrepro run`, or set `on_late: relaunch`"
            case Outcome.UNSUPPORTED if need.if_there:
                return ""
            case _:
                words = _IN_WORDS.get(row.outcome, f"is {row.outcome}")
                return f"{name} {words}: {row.why}"
    # The profile does not set the knob, so the value in the process counts.
    if need.calls:
        is_seeded = facts.seeded or not facts.calls.isdisjoint(need.calls)
        unseeded = "neither the profile nor the program, since the profile is active, set a seed"
        return "" if is_seeded else unseeded
    if need.knob in facts.missing:
        return "" if need.if_there else f"{name}: {facts.missing[need.knob]}"
    now = facts.readings.get(need.knob)
    reading = f", and it is {shown(now)}" if now is not None else ""
    return "" if met(now) else f"{name} is not set by the profile{reading}"
