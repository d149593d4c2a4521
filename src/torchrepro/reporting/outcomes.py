"""What becomes of a knob, what changed it later, and what that leaves of the guarantee."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.ground.messages import Problem, shown
from torchrepro.knobs.catalogue import knobs_by_name
from torchrepro.knobs.knob import MissingState
from torchrepro.profile.needs import NEEDS, WEAKER, Need
from torchrepro.reporting.process_state import absent_hardware, present_kinds, set_before_start
from torchrepro.seeding import streams
from torchrepro.seeding.seeding_calls import given_by_program

if TYPE_CHECKING:
    from torchrepro.knobs.knob import Knob
    from torchrepro.profile.resolved import ResolvedProfile

AS_GOOD = "as good"

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
    """Already so, or the user's own value is equivalent."""

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
class KnobRow:
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
        if self.unverified:
            return f"{self.outcome}, unverified"
        knob = knobs_by_name().get(self.knob)
        is_policy = knob is not None and knob.warn_if_unsupported
        refused = self.outcome is Outcome.UNSUPPORTED and is_policy
        return f"{self.outcome}, refused" if refused else str(self.outcome)

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


class Writer(NamedTuple):
    """Who made a write; all of it is empty where that was not seen."""

    where: str = ""
    """``file:line`` of the nearest caller outside torch and Python."""

    called: str = ""
    """``file:line`` of the program's own innermost code, where `where` is a library's."""

    by: str = ""
    """The framework's determinism switch that wrote, if one did, as its users call it."""

    def to_json(self) -> dict[str, Any]:
        """Return a switch that agrees with the profile, as plain JSON values."""
        its = {"name": self.by, "where": self.where, "called": self.called}
        return {**its, "outcome": str(Outcome.UNCHANGED)}


class KnobChange(NamedTuple):
    """A knob to which later code has given another value while its profile was in force.

    That is drift, unless the value is equivalent to the profile's.
    """

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
    """Of drift: whether the knob has another value by now than that write gave."""

    why: str = ""
    """Of an equivalent value: why it is not drift."""

    def __str__(self) -> str:
        return in_words([self])

    @property
    def problem(self) -> Problem:
        """What a message says of drift."""
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

    @property
    def words(self) -> str:
        """Why the knob has another, equivalent value, in words."""
        unseen = f"as {self.by} writes it" if self.by else "written by the program"
        written = f"written by {self.by}" if self.by and self.where else unseen
        return f"the profile has {shown(self.was)}, and this is {self.why}; {written}"

    def to_json(self) -> dict[str, Any]:
        """Return the change as plain JSON values."""
        plain = {**self._asdict(), "was": _json_or_text(self.was), "now": _json_or_text(self.now)}
        del plain["moved_on" if self.why else "why"]
        return plain


def in_words(written: Sequence[KnobChange]) -> str:
    """Return in a line what one write has changed."""
    first = written[0]
    changes = ", ".join(f"{it.knob} was {shown(it.was)}, is {shown(it.now)}" for it in written)
    verb = "first changed" if first.moved_on else "set"
    place = f"; {verb} at {first.where}" if first.where else ""
    called = f", called from {first.called}" if first.called else ""
    return f"{changes} ({first.when}{place}{called})"


def why_equivalent(knob: Knob, value: Any) -> str:
    """Return in words why `value` serves the guarantee as the profile's does, or an empty string.

    The one judgement of it: of what a user has exported, of what the program writes, and so of
    what is drift. Two such values each repeat, and may give different numbers.
    """
    if not isinstance(value, str):
        return ""
    if knob.enough is not None and knob.enough(value) and not knob.legal.complaint(value):
        return AS_GOOD
    if value in knob.misspelt and knob.hardware in absent_hardware():
        return f"of no effect without {knob.hardware}, which refuses it"
    return ""


def _json_or_text(value: Any) -> Any:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return shown(value)
    return value


NONE = "none"  # what is held where not even the random numbers are

ROOM = 40  # columns of a line for what a guarantee leaves open; else it says how much that is


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
        left_open = dict.fromkeys(each.left_open for each in self.lowered)
        text = ", ".join(left_open)
        return f"{self.asked}, except {text if len(text) <= ROOM else f'{len(left_open)} things'}"

    @property
    def reasons(self) -> list[str]:
        """What is left open, and why: once for each reason."""
        by_reason: dict[str, list[str]] = {}
        for each in self.lowered:
            by_reason.setdefault(each.because, []).append(each.left_open)
        return [
            f"{' and '.join(dict.fromkeys(left_open))}: {because}"
            for because, left_open in by_reason.items()
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the guarantee as plain JSON values."""
        lowered = [{"knob": each.knob, "why": each.why} for each in self.lowered]
        return {"asked": self.asked, "held": self.held, "lowered": lowered}


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What a guarantee depends on in a process that the profile itself does not set."""

    kinds: frozenset[str] = frozenset()  # the kinds of device that are present
    readings: Mapping[str, Any] = field(default_factory=dict)
    """Knobs that the profile leaves alone, with what they read."""

    missing: Mapping[str, str] = field(default_factory=dict)
    """Knobs that the profile leaves alone and that do not exist here, with the reason."""

    seeded: bool = False  # whether a profile with a seed is in force, this one or another
    calls: frozenset[str] = frozenset()
    """The functions with which the program has given a seed itself."""

    absent: Mapping[str, str] = field(default_factory=dict)
    """The hardware that is not here, with the reason in words."""


def process_facts(resolved: ResolvedProfile, closed: Mapping[str, str]) -> ProcessFacts:
    """Read what the guarantee of `resolved` depends on beside the knobs that it names.

    `closed` are the one-way doors that are closed. A variable that may have been set after its
    door was closed proves nothing, and is left out.
    """
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
    asked: str, rows: Iterable[KnobRow], drift: Iterable[KnobChange], facts: ProcessFacts
) -> Guarantee:
    """Return what is held of the guarantee `asked` where a profile has come to `rows`."""
    outcomes = {row.knob: row for row in rows}
    drifted = {each.knob: each for each in drift}

    def lacking(guarantee: str) -> tuple[Lowered, ...]:
        found = {}
        for need in _needs(guarantee, facts.kinds):
            because = _lack(need, outcomes.get(need.knob), drifted.get(need.knob), facts)
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


def _lack(need: Need, row: KnobRow | None, drift: KnobChange | None, facts: ProcessFacts) -> str:
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
            case Outcome.FAILED:
                return f"{name} could not be set: {row.why}"
            case Outcome.CONFLICT:
                return f"{name} is in conflict: {row.why}"
            case _:
                return f"{name} is {row.outcome}: {row.why}"
    # The profile leaves the knob alone: what the process has by itself counts.
    if need.calls:
        given = facts.seeded or not facts.calls.isdisjoint(need.calls)
        who = "neither the profile nor, since it is in force, the program"
        return "" if given else f"{who} has given a seed"
    if need.knob in facts.missing:
        return "" if need.if_there else f"{name}: {facts.missing[need.knob]}"
    now = facts.readings.get(need.knob)
    reading = f", and it is {shown(now)}" if now is not None else ""
    return "" if met(now) else f"{name} is not set by the profile{reading}"
