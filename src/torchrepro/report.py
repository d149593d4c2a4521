"""What happened to every knob that a profile names: one row each, as a table and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from torchrepro.display import Displayed
from torchrepro.messages import Problem, near, shown, some

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torchrepro.display import Part
    from torchrepro.guarantee import Guarantee
    from torchrepro.policies.effects import Effect


class Outcome(StrEnum):
    """What became of a knob."""

    APPLIED = "applied"
    """Written, read back, and in force."""

    UNCHANGED = "unchanged"
    """Already so, or the user's own value is as good."""

    TOO_LATE = "too_late"
    """Past its phase: not written, because it would change nothing."""

    UNSUPPORTED = "unsupported"
    """Does not exist in this process: another torch, absent hardware."""

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

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        return {
            "knob": self.knob,
            "outcome": str(self.outcome),
            "before": _json_or_text(self.before),
            "after": _json_or_text(self.after),
            "why": self.why,
            "unverified": self.unverified,
        }


@dataclass(frozen=True, slots=True)
class Drift:
    """A knob that later code has changed while its profile was in force."""

    knob: str
    was: Any
    """What it read when the profile had set it."""

    now: Any
    when: str
    """The first moment at which it was seen, such as `before step 4`; steps count from 0."""

    where: str = ""
    """``file:line`` of the code that wrote it, where that was seen."""

    def __str__(self) -> str:
        place = f"; set at {self.where}" if self.where else ""
        change = f"was {shown(self.was)}, is {shown(self.now)}"
        return f"{self.knob} {change} ({self.when}{place})"

    @property
    def problem(self) -> Problem:
        """What a message says of it."""
        unseen = "" if self.where else "; the line that wrote it was not seen"
        return Problem(
            f"the profile had set {shown(self.was)} (seen {self.when}{unseen})",
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
        }


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
        """One line: the profile, what of its guarantee is held, the number of knobs per outcome."""
        counts = ", ".join(f"{number} {outcome}" for outcome, number in self.counts.items())
        counts = counts or "nothing to set"
        if self.drift:
            state = "has drifted"
            counts += f"; drifted: {some([drift.knob for drift in self.drift])}"
        else:
            state = "would be in force" if self.planned else "is in force"
        if self.guarantee.lowered:
            return f"{self.profile} {state}: {self.guarantee}; {counts}"
        return f"{self.profile} ({self.guarantee}) {state}: {counts}"

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
        }

    def parts(self) -> tuple[Part, ...]:
        """Return the report as tables and lines."""
        from torchrepro.tables import report_parts

        return report_parts(self)


def _json_or_text(value: Any) -> Any:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return shown(value)
    return value
