"""A guarantee that is held to its substance: what was asked for, what is held, what lowers it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchrepro.messages import shown
from torchrepro.profile.needs import NEEDS, WEAKER, Need
from torchrepro.report import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torchrepro.report import Drift, Row

NONE = "none"
"""What is held where not even the random numbers are."""

_TOLD = 3  # reasons that a line has room for


@dataclass(frozen=True, slots=True)
class Lowered:
    """A knob that keeps a guarantee from being held."""

    knob: str
    left_open: str
    """What may differ between two runs."""

    because: str

    @property
    def why(self) -> str:
        """What may differ, and the reason."""
        return f"{self.left_open}: {self.because}"


@dataclass(frozen=True, slots=True)
class Guarantee:
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
        by_reason: dict[str, list[str]] = {}
        for each in self.lowered:
            by_reason.setdefault(each.because, []).append(each.left_open)
        told = [
            f"{' and '.join(dict.fromkeys(left_open))} ({because})"
            for because, left_open in by_reason.items()
        ]
        more = len(told) - _TOLD
        last = f", and {more} more" if more > 0 else ""
        return f"{self.asked}, except {', '.join(told[:_TOLD])}{last}"

    def to_json(self) -> dict[str, Any]:
        """Return the guarantee as plain JSON values."""
        lowered = [{"knob": each.knob, "why": each.why} for each in self.lowered]
        return {"asked": self.asked, "held": self.held, "lowered": lowered}


@dataclass(frozen=True, slots=True)
class Beside:
    """What a guarantee depends on beside the knobs of a profile: a process as it was read."""

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


def needs_beside(asked: str, kinds: frozenset[str], named: Iterable[str]) -> set[str]:
    """Return the knobs to read for `asked`: needed where `kinds` are present, and not `named`."""
    wanted = {need.knob for each in (asked, *WEAKER[asked]) for need in _needs(each, kinds)}
    return {knob for knob in wanted.difference(named) if not knob.startswith("seed.")}


def judge(asked: str, rows: Iterable[Row], drift: Iterable[Drift], beside: Beside) -> Guarantee:
    """Return what is held of the guarantee `asked` where a profile has come to `rows`."""
    outcomes = {row.knob: row for row in rows}
    drifted = {each.knob: each for each in drift}

    def lacking(guarantee: str) -> tuple[Lowered, ...]:
        found = {}
        for need in _needs(guarantee, beside.kinds):
            row, moved = outcomes.get(need.knob), drifted.get(need.knob)
            because = _lack(need, row, moved, beside)
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


def _lack(need: Need, row: Row | None, drift: Drift | None, beside: Beside) -> str:
    """Return why `need` is not met, or an empty string."""
    name = need.knob.rpartition(".")[2]
    if drift is not None:
        change = f"{name} was {shown(drift.was)}, is {shown(drift.now)}"
        return "" if _meets(need, drift.now) else change
    return _lack_beside(need, name, beside) if row is None else _lack_here(need, name, row)


def _lack_here(need: Need, name: str, row: Row) -> str:
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


def _lack_beside(need: Need, name: str, beside: Beside) -> str:
    """Return why a process does not meet `need` by itself, or an empty string."""
    if need.calls:
        given = beside.seeded or not beside.calls.isdisjoint(need.calls)
        who = "neither the profile nor, since it is in force, the program"
        return "" if given else f"{who} has given a seed"
    if need.knob in beside.missing:
        return "" if need.if_there else f"{name}: {beside.missing[need.knob]}"
    now = beside.readings.get(need.knob)
    if _meets(need, now):
        return ""
    reading = f", and it is {shown(now)}" if now is not None else ""
    return f"{name} is not set by the profile{reading}"


def _meets(need: Need, value: Any) -> bool:
    return value is not None and need.met_by is not None and need.met_by(value)
