"""Decides what putting a profile in force does to each knob of this process, and changes nothing.

A plan is a step for each knob, in the order in which they are set. `apply` carries out these steps.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.as_good import why_as_good
from torchrepro.console import Displayed, parts
from torchrepro.errors import ApplyError
from torchrepro.guarantee import ProcessFacts, process_facts
from torchrepro.knobs.catalogue import knobs_by_name
from torchrepro.knobs.knob import Knob, MissingState, Scope
from torchrepro.messages import shown, some
from torchrepro.outcomes import STOPPING, Outcome, Row
from torchrepro.process_state import (
    closed_doors,
    inherited,
    other_threads_in_torch,
    set_before_start,
)
from torchrepro.profile.load import resolve
from torchrepro.report import Report, make_report, whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torchrepro.console import Part
    from torchrepro.profile.resolved import ResolvedProfile


class Action(Enum):
    """What carrying out a step does to its knob."""

    LEAVE = "leave"
    """Nothing: it cannot be set, or the variable is the user's own to take away."""

    KEEP = "keep"
    """It holds its value already: it is only put back in the end."""

    WRITE = "write"


@dataclass(frozen=True, slots=True)
class Step:
    """One knob, the value asked for, and what is expected to become of it."""

    knob: Knob
    value: Any
    expected: Row
    wanted: Mapping[str, Any] = field(repr=False)
    """The values that the whole profile asks for, by the name of the knob."""

    @property
    def untouched(self) -> bool:
        """Whether the plan leaves the knob alone, whatever it reads by now."""
        left = (Outcome.TOO_LATE, Outcome.CONFLICT, Outcome.UNSUPPORTED)
        return self.expected.outcome in left and not self.expected.is_written

    def at_present(self) -> tuple[Action, Row]:
        """Return what is to be done now, and what becomes of it, decided as the plan was.

        The library of the knob has to be loaded. Earlier steps, and libraries that were loaded
        since, may have moved the knob.
        """
        planned = self.expected
        reading = _read(self.knob, self.value)
        if planned.outcome is Outcome.UNCHANGED and self.knob.variable:
            return Action.LEAVE, replace(planned, before=reading.value)
        if planned.outcome is Outcome.TOO_LATE:
            return Action.WRITE, replace(planned, before=reading.value)
        row = _decided(self.knob, self.value, reading)
        if row.outcome is Outcome.APPLIED:
            return Action.WRITE, row
        if row.outcome is Outcome.UNSUPPORTED:
            return Action.LEAVE, row
        if planned.outcome is Outcome.APPLIED and planned.before is not None:
            row = planned  # older torch has one switch for two knobs: the first has moved both
        return Action.KEEP, row

    def judged(self, row: Row) -> Row:
        """Return `row`, or that nothing here acts on the knob although its value reads back."""
        if row.outcome not in (Outcome.APPLIED, Outcome.UNCHANGED):
            return row
        why = self.knob.inert(self.value, self.wanted)
        ineffective = replace(row, outcome=Outcome.INEFFECTIVE, why=why, unverified=False)
        return ineffective if why else row

    @property
    def variable_in_force(self) -> dict[str, str]:
        """The variable that is the same state as the knob, if its text now means the value."""
        name = _variable_row(self.knob).variable
        text = os.environ.get(name) if name else None
        if text is None or _value_of(self.knob, text) != self.value:
            return {}
        return {name: text}


@dataclass(frozen=True, slots=True)
class Plan(Displayed):
    """What putting a profile in force would do, knob by knob, in order."""

    resolved: ResolvedProfile
    steps: tuple[Step, ...]
    facts: ProcessFacts

    @property
    def report(self) -> Report:
        """The expected outcomes."""
        rows = tuple(step.expected for step in self.steps)
        return make_report(self.resolved, rows, self.facts, planned=True)

    @property
    def late(self) -> tuple[Row, ...]:
        """The knobs that are past their phase, but for those of hardware that is not here."""
        return tuple(step.expected for step in self._late_steps())

    @property
    def variables(self) -> dict[str, str]:
        """The variables to set for a process that has not started, the user's own left alone."""
        to_set = (Outcome.APPLIED, Outcome.TOO_LATE)
        return {
            step.knob.variable: step.value
            for step in self.steps
            if step.knob.variable and step.expected.outcome in to_set
        }

    @property
    def late_variables(self) -> dict[str, str]:
        """Those of them that are late."""
        return {step.knob.variable: step.value for step in self._late_steps() if step.knob.variable}

    def _late_steps(self) -> Iterator[Step]:
        for step in self.steps:
            late = step.expected.outcome is Outcome.TOO_LATE
            if late and step.knob.hardware not in self.facts.absent:
                yield step

    def refuse_if_stopping(self) -> None:
        """Raise `ApplyError` if the profile is strict and a knob would come to a `STOPPING` end."""
        stopping = [step.expected for step in self.steps if step.expected.outcome in STOPPING]
        if stopping and self.resolved.strict:
            raise ApplyError(refusal(self.resolved, stopping), self.report)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return self.report.to_json()


@parts.register(Plan)
def _plan_parts(plan: Plan) -> tuple[Part, ...]:
    """Return the expected outcome of every knob."""
    return whole(plan.report)


def plan(profile: Any, overrides: Sequence[str] = ()) -> Plan:
    """Return what applying `profile` in this process would do; changes and imports nothing.

    `profile` is whatever `apply` takes. Knobs of a library that is not loaded yet show no present
    value. Raises `ProfileError` for a profile that is not valid.
    """
    return make_plan(resolve(profile, overrides))


def make_plan(
    resolved: ResolvedProfile,
    own_variables: Mapping[str, str] | None = None,
    closed: Mapping[str, str] | None = None,
) -> Plan:
    """Return the plan for `resolved` in this process, without importing anything.

    `own_variables` are those that profiles in force have set. `closed` stands in for the doors as
    they are now, to plan for a process before it began.
    """
    started_under = inherited()
    closed = closed_doors() if closed is None else closed
    settings = resolved.settings()
    names = {_variable_row(knob).variable for knob, _ in settings} & set(os.environ)
    own = {**(started_under.environment() if started_under else {}), **(own_variables or {})}
    ours = {name for name in names if own.get(name) == os.environ[name]}
    facts = process_facts(resolved, closed)
    variables = _Variables(
        closed=closed,
        absent=facts.absent,
        exported={name: os.environ[name] for name in names - ours},
        in_time=frozenset(ours | set(filter(set_before_start, names))),
    )
    wanted = {knob.name: value for knob, value in settings}
    steps = tuple(_step(knob, value, wanted, variables) for knob, value in settings)
    return Plan(resolved, steps, facts)


def refusal(resolved: ResolvedProfile, rows: Iterable[Row]) -> str:
    """Return what to tell a user whose strict profile stops because of `rows`."""
    head = (
        f"profile '{resolved.name}' promises {resolved.guarantee} and cannot be put in force; "
        "the process is as it was:"
    )
    return "\n".join([head, *(f"  {row.knob}: {row.outcome}: {row.why}" for row in rows)])


def lateness(plan: Plan, why: str) -> str:
    """Return what to tell a user whose profile stops because knobs are past their phase."""
    head = f"profile '{plan.resolved.name}' has knobs past their phase"
    lines = [f"  {row.knob}: {row.why}" for row in plan.late]
    if why:
        lines.append(f"  no relaunch, because {why}")
    todo = "  start the program with `torchrepro run`, which sets them before Python starts"
    return "\n".join([f"{head} (on_late: {plan.resolved.on_late})", *lines, todo])


class _Variables(NamedTuple):
    """What a plan has to know of the environment beside the texts of its variables."""

    closed: Mapping[str, str]
    """The one-way doors that are closed, each with the words for it."""

    absent: Mapping[str, str]
    """The hardware that is not here, with the reason in words."""

    exported: Mapping[str, str]
    """Variables that are set by the user's word, and not by torchrepro."""

    in_time: frozenset[str]
    """Variables that are known to have been set before whatever reads them."""


class _Reading(NamedTuple):
    """What a knob shows."""

    value: Any = None
    holds: bool = False
    missing: str = ""
    """Why the state does not exist here, or why the value asked for cannot be set."""


def _read(knob: Knob, value: Any) -> _Reading:
    """Read `knob`, whose library is loaded."""
    try:
        now = knob.access.read()
    except MissingState as missing:
        return _Reading(missing=str(missing))
    holds = knob.holds(value)
    return _Reading(now, holds, "" if holds else knob.refusal(value))


def _decided(knob: Knob, value: Any, reading: _Reading) -> Row:
    """Decide on state that is free to be set, by what it reads."""
    row = Row(knob.name, Outcome.APPLIED, reading.value, value)
    if reading.missing:
        return replace(row, outcome=Outcome.UNSUPPORTED, after=reading.value, why=reading.missing)
    if knob.moves_on:
        return row  # a generator has moved on since it was seeded: seeding again is never idle
    if knob.scope is Scope.EVERY_THREAD and (reached := other_threads_in_torch()):
        row = replace(row, why=f"it reaches threads that run torch now: {some(reached)}")
    return replace(row, outcome=Outcome.UNCHANGED, before=value) if reading.holds else row


def _step(knob: Knob, value: Any, wanted: Mapping[str, Any], variables: _Variables) -> Step:
    row = _expected(knob, value, variables)
    step = Step(knob, value, row, wanted)
    if not _lacks(step):
        return replace(step, expected=step.judged(row))
    needed = knobs_by_name()[knob.needs].profile_key
    words = f"set to {' or '.join(knob.needed)}" if knob.needed else "set"
    why = f"it acts on `{needed}`, which the profile does not {words}"
    unsupported = replace(row, outcome=Outcome.UNSUPPORTED, after=row.before, why=why)
    return replace(step, expected=unsupported)


def _lacks(step: Step) -> bool:
    """Whether nothing sets the knob on which the value acts, here or around this profile."""
    knob = step.knob
    if not knob.needs or step.value not in knob.needing:
        return False
    needed = knobs_by_name()[knob.needs]
    present = step.wanted.get(needed.name)
    if present is None and needed.loaded:
        present = needed.access.read()
    return present not in knob.needed if knob.needed else present is None


def _expected(knob: Knob, value: Any, variables: _Variables) -> Row:
    reading = _read(knob, value) if knob.loaded else _Reading()
    if reading.missing:
        return _decided(knob, value, reading)
    row = Row(knob.name, Outcome.APPLIED, reading.value, value)
    if knob.variable:
        return _expected_variable(knob, value, variables, row)
    if conflict := _conflict(knob, value, variables, row):
        return conflict
    if not knob.loaded:
        return replace(row, why=f"{knob.library} is not loaded yet")
    return _decided(knob, value, reading)


def _expected_variable(knob: Knob, value: str, variables: _Variables, row: Row) -> Row:
    name, late = knob.variable, variables.closed.get(knob.door, "")
    text = os.environ.get(name)
    exported = name in variables.exported
    as_good = why_as_good(knob, text) if exported else ""
    if text is None or not (text == value or as_good):
        if conflict := _conflict(knob, value, variables, row):
            return conflict
        if late:
            # It stays as it is where it is read here. Where its hardware is not here, it is set for
            # the processes that this one starts.
            after = row.after if knob.hardware in variables.absent else row.before
            why = f"{late}; `torchrepro run` sets it in time"
            row = replace(row, outcome=Outcome.TOO_LATE, after=after, why=why)
        return row
    kept = replace(row, after=row.before)
    in_effect, instead = None, ""
    if knob.effect and (late or not knob.door):
        # Asking a library makes it read the variable: it is only asked once it has.
        in_effect, instead = knob.effect.look(text)
    if in_effect is False:
        if not late:
            return row  # what went by the variable can still be set
        todo = "" if name in variables.in_time else "; `torchrepro run` sets it in time"
        why = f"{late}, and {instead}{todo}"
        return replace(kept, outcome=Outcome.TOO_LATE, why=why)
    why = "" if text == value else f"exported, and {as_good}"
    if late and in_effect is None and name not in variables.in_time:
        why = f"{late}, and nobody can tell whether it was set before that"
        return replace(kept, outcome=Outcome.UNCHANGED, why=why, unverified=True)
    return replace(kept, outcome=Outcome.UNCHANGED, why=why)


def _conflict(knob: Knob, value: Any, variables: _Variables, row: Row) -> Row | None:
    """Return the conflict with what the user has exported for the same state, if there is one."""
    name = _variable_row(knob).variable
    text = variables.exported.get(name)
    if text is None or _value_of(knob, text) == value:
        return None
    why = f"{name} is exported as {text}, the profile wants {shown(value)}: unset it, or override "
    return replace(row, outcome=Outcome.CONFLICT, after=row.before, why=why + knob.name)


def _variable_row(knob: Knob) -> Knob:
    """Return the row of the variable that is the same state as `knob`, or `knob` itself."""
    others = (knobs_by_name().get(alias) for alias in knob.aliases)
    return next((other for other in others if other and other.variable), knob)


def _value_of(knob: Knob, text: str) -> Any:
    """Return the value of `knob` that `text` of its `_variable_row` stands for."""
    row = _variable_row(knob)
    return text if row is knob or row.effect is None else row.effect.means(text)
