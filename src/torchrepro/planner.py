"""From a profile and the facts of a process to a plan; pure, and the very plan that is applied."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from torchrepro.console import Displayed, parts
from torchrepro.knobs.catalogue import knobs_by_name
from torchrepro.knobs.knob import Knob, MissingState, Scope
from torchrepro.messages import shown, some
from torchrepro.process_state import (
    closed_doors,
    inherited,
    other_threads_in_torch,
    present_kinds,
    set_before_start,
)
from torchrepro.profile.load import resolve
from torchrepro.report import (
    STOPPING,
    Beside,
    Drift,
    Outcome,
    Report,
    Row,
    judge,
    needs_beside,
)
from torchrepro.seeding import streams
from torchrepro.seeding.seeding_calls import given_by_program

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrepro.console import Part
    from torchrepro.profile.resolved import ResolvedProfile


@dataclass(frozen=True, slots=True)
class Reading:
    """What a knob showed when the process was observed."""

    value: Any = None
    holds: bool = False
    missing: str = ""
    """Why the state does not exist here, or why the value asked for cannot be set."""

    known: bool = True
    """False where the knob's library is not loaded, so that nothing could be read."""

    text: str | None = None
    """What the variable behind the knob is set to, if it is one."""

    in_effect: bool | None = None
    """Whether the library that has read the variable goes by it; None where that is not known."""

    instead: str = ""
    """What the library does, in words."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything about a process that a plan depends on."""

    closed: Mapping[str, str]
    """The one-way doors that are closed, each with the words for it."""

    readings: Mapping[str, Reading]
    exported: Mapping[str, str]
    """Variables that are set by the user's word, and not by torchrepro."""

    in_time: frozenset[str]
    """Variables that are known to have been set before whatever reads them."""

    beside: Beside = field(default_factory=Beside)
    """What the profile's guarantee depends on beside its knobs."""


class Action(Enum):
    """What carrying out a step does to its knob."""

    LEAVE = "leave"
    """Nothing: it cannot be set, or the variable is the user's own to take away."""

    KEEP = "keep"
    """It holds its value already: it is only put back in the end."""

    WRITE = "write"


LEFT_ALONE = (Outcome.TOO_LATE, Outcome.CONFLICT, Outcome.UNSUPPORTED)
"""The outcomes of knobs that are not touched."""


@dataclass(frozen=True, slots=True)
class Step:
    """One knob, the value asked for, and what is expected to become of it."""

    knob: Knob
    value: Any
    expected: Row

    @property
    def action(self) -> Action:
        """What is to be done, as far as the plan can tell."""
        outcome = self.expected.outcome
        if outcome in LEFT_ALONE or (outcome is Outcome.UNCHANGED and self.knob.variable):
            return Action.LEAVE
        return Action.KEEP if outcome is Outcome.UNCHANGED else Action.WRITE

    def at_present(self) -> tuple[Action, Row]:
        """Return what is to be done now, and what becomes of it, decided as the plan was.

        Earlier steps, and libraries that were loaded since, may have moved the knob, whose library
        has to be loaded.
        """
        planned = self.expected
        reading = _present(self.knob, self.value)
        if self.action is Action.LEAVE:
            return Action.LEAVE, replace(planned, before=reading.value)
        row = _decided(self.knob, self.value, reading)
        if row.outcome is Outcome.APPLIED:
            return Action.WRITE, row
        if row.outcome is Outcome.UNSUPPORTED:
            return Action.LEAVE, row
        if planned.outcome is Outcome.APPLIED and planned.before is not None:
            row = planned  # older torch has one switch for two knobs: the first has moved both
        return Action.KEEP, row


@dataclass(frozen=True, slots=True)
class Plan(Displayed):
    """What putting a profile in force would do, knob by knob, in order."""

    resolved: ResolvedProfile
    steps: tuple[Step, ...]
    beside: Beside = field(default_factory=Beside)

    @property
    def report(self) -> Report:
        """The expected outcomes."""
        rows = tuple(step.expected for step in self.steps)
        return report_of(self.resolved, rows, self.beside, planned=True)

    def judged(self, step: Step, row: Row) -> Row:
        """Return what carrying out `step` came to, or that it is set and acts on nothing here."""
        if not step.knob.can_be_inert:
            return row
        asked = {other.knob.name: other.value for other in self.steps}
        return _judged(row, step.knob, step.value, asked)

    @property
    def late(self) -> tuple[Row, ...]:
        """The knobs that are past their phase."""
        return self._expecting(Outcome.TOO_LATE)

    @property
    def variables(self) -> dict[str, str]:
        """The variables to set for a process that has not started, the user's own left alone."""
        return self._variables(Outcome.APPLIED, Outcome.TOO_LATE)

    @property
    def late_variables(self) -> dict[str, str]:
        """Those of them that this process is past."""
        return self._variables(Outcome.TOO_LATE)

    def _variables(self, *outcomes: Outcome) -> dict[str, str]:
        return {
            step.knob.variable: step.value
            for step in self.steps
            if step.knob.variable and step.expected.outcome in outcomes
        }

    @property
    def stopping(self) -> tuple[Row, ...]:
        """The outcomes with which a strict profile does not start."""
        return self._expecting(*STOPPING) if self.resolved.strict else ()

    def _expecting(self, *outcomes: Outcome) -> tuple[Row, ...]:
        return tuple(step.expected for step in self.steps if step.expected.outcome in outcomes)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return self.report.to_json()


@parts.register(Plan)
def _plan_parts(plan: Plan) -> tuple[Part, ...]:
    """Return the expected outcomes, as a report shows them."""
    return parts(plan.report)


def plan(profile: Any, overrides: Sequence[str] = ()) -> Plan:
    """Return what applying `profile` in this process would do; changes and imports nothing.

    `profile` is whatever `apply` takes. Knobs of a library that is not loaded yet show no present
    value. Raises `ProfileError` for a profile that is not valid.
    """
    resolved = resolve(profile, overrides)
    return make_plan(resolved, observe(resolved))


def make_plan(resolved: ResolvedProfile, facts: Facts) -> Plan:
    """Return the plan for `resolved` in a process described by `facts`."""
    settings = resolved.settings()
    asked = {knob.name: value for knob, value in settings}
    steps = (Step(knob, value, _expected(knob, value, asked, facts)) for knob, value in settings)
    return Plan(resolved, tuple(steps), facts.beside)


def observe(
    resolved: ResolvedProfile,
    own_variables: Mapping[str, str] | None = None,
    closed: Mapping[str, str] | None = None,
) -> Facts:
    """Return the facts of this process that matter for `resolved`, without importing anything.

    `own_variables` are those that profiles in force have set. `closed` stands in for the doors as
    they are now, to plan for a process before it began.
    """
    started_under = inherited()
    closed = closed_doors() if closed is None else closed
    around = beside(resolved, closed)
    own = {**(started_under.environment() if started_under else {}), **(own_variables or {})}
    settings = resolved.settings()
    names = {variable_row(knob).variable for knob, _ in settings} & set(os.environ)
    ours = {name for name in names if own.get(name) == os.environ[name]}
    return Facts(
        closed=closed,
        readings={knob.name: _reading(knob, value, closed) for knob, value in settings},
        exported={name: os.environ[name] for name in names - ours},
        in_time=frozenset(ours | set(filter(set_before_start, names))),
        beside=around,
    )


def variable_row(knob: Knob) -> Knob:
    """Return the row of the variable that is the same state as `knob`, or `knob` itself."""
    others = (knobs_by_name().get(alias) for alias in knob.aliases)
    return next((other for other in others if other and other.variable), knob)


def value_of(knob: Knob, text: str) -> Any:
    """Return the value of `knob` that `text` of its `variable_row` stands for."""
    row = variable_row(knob)
    return text if row is knob or row.effect is None else row.effect.means(text)


def beside(resolved: ResolvedProfile, closed: Mapping[str, str]) -> Beside:
    """Return what the guarantee of `resolved` depends on beside the knobs that it names.

    A variable that came after its door was `closed` says nothing of what holds.
    """
    kinds = present_kinds()
    named = [knob.name for knob, _ in resolved.settings()]
    readings, missing = {}, {}
    for name in sorted(needs_beside(resolved.guarantee, kinds, named)):
        knob = knobs_by_name()[name]
        late = knob.variable and knob.door in closed and not set_before_start(knob.variable)
        if late or not knob.loaded:
            continue
        try:
            readings[name] = knob.access.read()
        except MissingState as absent:
            missing[name] = str(absent)
    seeded = streams.current_plan().seed is not None
    return Beside(kinds, readings, missing, seeded, given_by_program())


def report_of(
    resolved: ResolvedProfile,
    rows: tuple[Row, ...],
    beside: Beside,
    drift: tuple[Drift, ...] = (),
    **more: Any,
) -> Report:
    """Return the report on `resolved` with these rows; `more` are further fields of it."""
    guarantee = judge(resolved.guarantee, rows, drift, beside)
    return Report(resolved.name, guarantee, resolved.digest, rows, drift=drift, **more)


def refusal(resolved: ResolvedProfile, rows: Sequence[Row]) -> str:
    """Return what to tell a user whose strict profile stops because of `rows`."""
    head = (
        f"profile '{resolved.name}' promises {resolved.guarantee} and cannot be put in force; "
        "the process is as it was:"
    )
    return "\n".join([head, *(f"  {row.knob}: {row.outcome}: {row.why}" for row in rows)])


def lateness(plan: Plan, why: str) -> str:
    """Return what to tell a user whose profile stops because knobs are past their phase."""
    lines = [f"  {row.knob}: {row.why}" for row in plan.late]
    asked = plan.resolved
    head = f"profile '{asked.name}' has knobs past their phase (on_late: {asked.on_late})"
    no_relaunch = f"  no relaunch, because {why}" if why else ""
    todo = "  start the program with `torchrepro run`, which sets them before Python starts"
    return "\n".join(line for line in (head, *lines, no_relaunch, todo) if line)


def _aside(knob: Knob) -> str:
    """Return what a reader should know about a flag that was set, or an empty string."""
    if knob.scope is Scope.EVERY_THREAD:
        reached = other_threads_in_torch()
        return f"it reaches threads that run torch now: {some(reached)}" if reached else ""
    torch = sys.modules.get("torch")
    if knob.cuda_only and torch is not None and not torch.version.cuda:
        return "" if torch.version.hip else "this torch is not built for CUDA: nothing reads it"
    return ""


def _reading(knob: Knob, value: Any, closed: Mapping[str, str]) -> Reading:
    if not knob.loaded:
        return Reading(known=False)
    text = os.environ.get(knob.variable) if knob.variable else None
    reading = replace(_present(knob, value), text=text)
    # What a library will read, it may read when it is asked: so not before it has.
    if reading.missing or text is None or knob.effect is None:
        return reading
    if knob.door and knob.door not in closed:
        return reading
    in_effect, instead = knob.effect.look(text)
    return replace(reading, in_effect=in_effect, instead=instead)


def _present(knob: Knob, value: Any) -> Reading:
    """Read `knob`, whose library is loaded."""
    try:
        now = knob.access.read()
    except MissingState as missing:
        return Reading(missing=str(missing))
    holds = knob.holds(value)
    return Reading(now, holds, "" if holds else knob.refusal(value))


def _expected(knob: Knob, value: Any, asked: Mapping[str, Any], facts: Facts) -> Row:
    row = _expected_alone(knob, value, facts)
    if not _lacks(knob, value, asked):
        return _judged(row, knob, value, asked)
    needed = knobs_by_name()[knob.needs].profile_key
    words = f"set to {' or '.join(knob.needed)}" if knob.needed else "set"
    why = f"it acts on `{needed}`, which the profile does not {words}"
    return replace(row, outcome=Outcome.UNSUPPORTED, after=row.before, why=why)


def _expected_alone(knob: Knob, value: Any, facts: Facts) -> Row:
    reading = facts.readings[knob.name]
    if reading.missing:
        return _decided(knob, value, reading)
    row = Row(knob.name, Outcome.APPLIED, reading.value, value)
    if knob.variable:
        return _expected_variable(knob, value, facts, row)
    if conflict := _conflict(knob, value, facts, row):
        return conflict
    if not reading.known:
        return replace(row, why=f"{knob.library} is not loaded yet")
    return _decided(knob, value, reading)


def _decided(knob: Knob, value: Any, reading: Reading) -> Row:
    """Decide on state that is free to be set, by what it reads."""
    row = Row(knob.name, Outcome.APPLIED, reading.value, value)
    if reading.missing:
        return replace(row, outcome=Outcome.UNSUPPORTED, after=reading.value, why=reading.missing)
    if knob.moves_on:
        return row  # a generator has moved on since it was seeded: seeding again is never idle
    row = replace(row, why=_aside(knob))
    return replace(row, outcome=Outcome.UNCHANGED, before=value) if reading.holds else row


def _judged(row: Row, knob: Knob, value: Any, asked: Mapping[str, Any]) -> Row:
    """Return `row`, or that the knob is ineffective although `value` can be read back.

    `asked` holds what the whole profile asks for, by the name of the knob.
    """
    if row.outcome not in (Outcome.APPLIED, Outcome.UNCHANGED):
        return row
    why = knob.inert(value, asked)
    return replace(row, outcome=Outcome.INEFFECTIVE, why=why) if why else row


def _lacks(knob: Knob, value: Any, asked: Mapping[str, Any]) -> bool:
    """Whether nothing sets the knob that `value` of `knob` acts on, here or around this profile."""
    if not knob.needs or value not in knob.needing:
        return False
    needed = knobs_by_name()[knob.needs]
    wanted = asked.get(needed.name)
    present = needed.access.read() if wanted is None and needed.loaded else wanted
    return present not in knob.needed if knob.needed else present is None


def _expected_variable(knob: Knob, value: str, facts: Facts, row: Row) -> Row:
    reading, name = facts.readings[knob.name], knob.variable
    text, exported = reading.text, name in facts.exported
    late = facts.closed.get(knob.door, "")
    serves = text == value or bool(exported and text and knob.enough and knob.enough(text))
    if not serves:
        if conflict := _conflict(knob, value, facts, row):
            return conflict
        why = f"{late}; `torchrepro run` sets it in time" if late else ""
        return replace(row, outcome=Outcome.TOO_LATE, after=row.before, why=why) if late else row
    kept = replace(row, after=row.before)
    if reading.in_effect is False:
        if not late:
            return row  # what went by the variable can still be set
        todo = "" if name in facts.in_time else "; `torchrepro run` sets it in time"
        why = f"{late}, and {reading.instead}{todo}"
        return replace(kept, outcome=Outcome.TOO_LATE, why=why)
    why = "" if text == value else "exported, and as good"
    if late and reading.in_effect is None and name not in facts.in_time:
        why = f"{late}, and nobody can tell whether it was set before that"
        return replace(kept, outcome=Outcome.UNCHANGED, why=why, unverified=True)
    return replace(kept, outcome=Outcome.UNCHANGED, why=why)


def _conflict(knob: Knob, value: Any, facts: Facts, row: Row) -> Row | None:
    """Return the conflict with what the user has exported for the same state, if there is one."""
    name = variable_row(knob).variable
    text = facts.exported.get(name)
    if text is None or value_of(knob, text) == value:
        return None
    why = f"{name} is exported as {text}, the profile wants {shown(value)}: unset it, or override "
    return replace(row, outcome=Outcome.CONFLICT, after=row.before, why=why + knob.name)
