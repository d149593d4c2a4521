"""What a profile promises, what of that is held in this process, and what lowers it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.knobs.catalogue import knobs_by_name
from torchrepro.knobs.knob import MissingState
from torchrepro.messages import shown
from torchrepro.outcomes import Change, Outcome, Row
from torchrepro.process_state import absent_hardware, closed_doors, present_kinds, set_before_start
from torchrepro.profile.needs import NEEDS, WEAKER, Need
from torchrepro.seeding import streams
from torchrepro.seeding.seeding_calls import given_by_program

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torchrepro.profile.resolved import ResolvedProfile


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
    asked: str, rows: Iterable[Row], drift: Iterable[Change], facts: ProcessFacts
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


def _lack(need: Need, row: Row | None, drift: Change | None, facts: ProcessFacts) -> str:
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
