"""Decides what applying a profile does to each knob of this process, and changes nothing.

A plan has one step per knob, in the order in which `apply` sets the knobs. A step has an expected
outcome, which `apply` carries out and reports. `apply` decides the outcome again if the library of
the knob was not loaded during planning, or if another step can change the knob (`Knob.reread`).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from torchrepro.ground.console import Displayed, Part, parts
from torchrepro.ground.errors import ApplyError
from torchrepro.ground.messages import shown, some
from torchrepro.knobs.catalogue import knobs_by_name
from torchrepro.knobs.knob import Knob, MissingState, Scope
from torchrepro.profile.load import resolve
from torchrepro.reporting.outcomes import (
    STOPPING,
    KnobRow,
    Outcome,
    ProcessFacts,
    process_facts,
    why_equivalent,
)
from torchrepro.reporting.process_state import (
    closed_latches,
    inherited,
    other_threads_in_torch,
    set_before_start,
)
from torchrepro.reporting.report import Report, make_report, verbose_parts

if TYPE_CHECKING:
    from torchrepro.profile.resolved import ResolvedProfile


@dataclass(frozen=True, slots=True)
class Step:
    """One knob, the requested value, and the expected outcome."""

    knob: Knob
    value: Any
    expected: KnobRow
    wanted: Mapping[str, Any] = field(repr=False)
    """The values that the profile requests, by the name of the knob."""

    decided: bool = True
    """Whether `expected` is final; if not, `decide` is called once the library is loaded."""


executed: list[list[tuple[Step, KnobRow]]] = []
"""The executed steps of each active profile with their outcomes, outermost profile first."""


@dataclass(frozen=True, slots=True)
class Plan(Displayed):
    """The effect of applying a profile, knob by knob, in order."""

    resolved: ResolvedProfile
    steps: tuple[Step, ...]
    facts: ProcessFacts

    @property
    def report(self) -> Report:
        """The report of the expected outcomes."""
        rows = tuple(step.expected for step in self.steps)
        return make_report(self.resolved, rows, self.facts, planned=True)

    @property
    def late(self) -> tuple[KnobRow, ...]:
        """The knobs that it is too late to set. Knobs of absent hardware are omitted."""
        return tuple(
            step.expected
            for step in self.steps
            if step.expected.outcome is Outcome.TOO_LATE
            and step.knob.hardware not in self.facts.absent
        )

    @property
    def variables(self) -> dict[str, str]:
        """The variables to set before a process starts, except variables that the user exported."""
        to_set = (Outcome.APPLIED, Outcome.TOO_LATE)
        return {
            step.knob.variable: step.value
            for step in self.steps
            if step.knob.variable and step.expected.outcome in to_set
        }

    @property
    def late_variables(self) -> dict[str, str]:
        """The variables of the profile that it is too late to set in this process."""
        late = {row.knob for row in self.late}
        return {
            step.knob.variable: step.value
            for step in self.steps
            if step.knob.variable and step.knob.name in late
        }

    def refuse_if_stopping(self) -> None:
        """Raise `ApplyError` if the profile is strict and a knob has a `STOPPING` outcome."""
        rows = [step.expected for step in self.steps]
        if self.resolved.strict and any(row.outcome in STOPPING for row in rows):
            raise ApplyError(refusal(self.resolved, rows), self.report)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return self.report.to_json()


@parts.register(Plan)
def _plan_parts(plan: Plan) -> tuple[Part, ...]:
    return verbose_parts(plan.report)


def plan(profile: Any, overrides: Sequence[str] = ()) -> Plan:
    """Return what applying `profile` in this process would do. Changes and imports nothing.

    `profile` is any value that `apply` accepts. If the library of a knob is not loaded yet, the
    plan shows no current value of the knob. Raises `ProfileError` if the profile is invalid.
    """
    return make_plan(resolve(profile, overrides))


def make_plan(resolved: ResolvedProfile, closed: Mapping[str, str] | None = None) -> Plan:
    """Return the plan for `resolved` in this process. Imports nothing.

    By default, `closed` contains the events in this process after which some knobs can no longer be
    set, such as the import of torch. An empty `closed` plans for a process that has not started.
    """
    started_under = inherited()
    closed = closed_latches() if closed is None else closed
    settings = resolved.settings()
    names = {_variable_row(knob).variable for knob, _ in settings} & set(os.environ)
    from_profiles = dict(started_under.environment()) if started_under else {}
    from_profiles |= _variables_of_profiles()
    ours = {name for name in names if from_profiles.get(name) == os.environ[name]}
    exported = {name: os.environ[name] for name in names - ours}  # by the user
    in_time = ours | set(filter(set_before_start, names))  # set before a library read them
    facts = process_facts(resolved, closed)
    wanted = {knob.name: value for knob, value in settings}
    steps = []
    for knob, value in settings:
        if not knob.loaded:
            row = KnobRow(
                knob.name, Outcome.APPLIED, None, value, f"{knob.library} is not loaded yet"
            )
        elif knob.variable:
            late, is_absent = closed.get(knob.door, ""), knob.hardware in facts.absent
            row = _decide_variable(knob, value, exported, in_time, late, is_absent=is_absent)
        else:
            row = decide(knob, value, wanted)
        if not knob.variable and row.outcome is not Outcome.UNSUPPORTED:
            row = _conflict(knob, value, exported, row.before) or row
        if unmet := _unmet_need(knob, value, wanted):
            row = replace(row, outcome=Outcome.UNSUPPORTED, after=row.before, why=unmet)
        decided = knob.loaded or row.outcome is not Outcome.APPLIED
        steps.append(Step(knob, value, row, wanted, decided))
    return Plan(resolved, tuple(steps), facts)


def refusal(resolved: ResolvedProfile, rows: Sequence[KnobRow]) -> str:
    """Return the error message for a strict profile that cannot be applied because of `rows`."""
    head = (
        f"profile '{resolved.name}' promises {resolved.guarantee} and cannot be applied; "
        "the process is unchanged:"
    )
    stopping = [row for row in rows if row.outcome in STOPPING]
    return "\n".join([head, *(f"  {row.knob}: {row.outcome}: {row.why}" for row in stopping)])


def lateness(plan: Plan, why: str) -> str:
    """Return the error message for a profile with knobs that it is too late to set."""
    head = f"profile '{plan.resolved.name}' has knobs past their phase"
    lines = [f"  {row.knob}: {row.why}" for row in plan.late]
    if why:
        lines.append(f"  no relaunch, because {why}")
    todo = "  start the program with `torchrepro run`, which sets them before Python starts"
    return "\n".join([f"{head} (on_late: {plan.resolved.on_late})", *lines, todo])


def decide(knob: Knob, value: Any, wanted: Mapping[str, Any]) -> KnobRow:
    """Return the expected outcome of a knob that is not a variable. Its library must be loaded.

    The outcome `ineffective` means that the knob can be set, but has no effect in this process.
    """
    try:
        now = knob.access.read()
    except MissingState as missing:
        return KnobRow(knob.name, Outcome.UNSUPPORTED, why=str(missing))
    holds = knob.holds(value)
    if not holds and (refusal := knob.refusal(value)):
        return KnobRow(knob.name, Outcome.UNSUPPORTED, now, now, refusal)
    if inert := knob.inert(value, wanted):
        return KnobRow(knob.name, Outcome.INEFFECTIVE, now, value, inert)
    if knob.changes_with_use:  # seeding a generator again always has an effect
        return KnobRow(knob.name, Outcome.APPLIED, now, value)
    reached = knob.scope is Scope.EVERY_THREAD and other_threads_in_torch()
    why = f"it reaches threads that run torch now: {some(reached)}" if reached else ""
    if holds:
        return KnobRow(knob.name, Outcome.UNCHANGED, value, value, why)
    return KnobRow(knob.name, Outcome.APPLIED, now, value, why)


def _decide_variable(
    knob: Knob,
    value: str,
    exported: Mapping[str, str],
    in_time: Collection[str],
    late: str,
    *,
    is_absent: bool,
) -> KnobRow:
    """Return the expected outcome of a variable. `late` is empty, or says why it is too late."""
    name = knob.variable
    text = os.environ.get(name)
    try:
        row = KnobRow(knob.name, Outcome.APPLIED, knob.access.read(), value)
    except MissingState as missing:
        return KnobRow(knob.name, Outcome.UNSUPPORTED, why=str(missing))
    equivalent = why_equivalent(knob, text) if name in exported else ""
    if text is None or not (text == value or equivalent):
        if conflict := _conflict(knob, value, exported, row.before):
            return conflict
        if not late:
            return row
        # A late variable stays unchanged. If its hardware is absent, this process does not read
        # the variable, and it is set for child processes.
        after = value if is_absent else row.before
        why = f"{late}; `torchrepro run` sets it in time"
        return replace(row, outcome=Outcome.TOO_LATE, after=after, why=why)
    kept = replace(row, after=row.before)
    in_effect, instead = None, ""
    if knob.effect and (late or not knob.door):
        # The check makes the library read the variable, so it runs only after the library did so.
        in_effect, instead = knob.effect.check(text)
    if in_effect is False:
        if not late:
            return row  # the state that the variable initialized can still be set
        todo = "" if name in in_time else "; `torchrepro run` sets it in time"
        return replace(kept, outcome=Outcome.TOO_LATE, why=f"{late}, and {instead}{todo}")
    if late and in_effect is None and name not in in_time:
        why = f"{late}, and it is unknown whether the variable was set before that"
        return replace(kept, outcome=Outcome.UNCHANGED, why=why, unverified=True)
    why = "" if text == value else f"exported, and {equivalent}"
    return replace(kept, outcome=Outcome.UNCHANGED, why=why)


def _conflict(knob: Knob, value: Any, exported: Mapping[str, str], before: Any) -> KnobRow | None:
    name = _variable_row(knob).variable
    text = exported.get(name)
    if text is None or _value_of(knob, text) == value:
        return None
    why = f"{name} is exported as {text}, the profile wants {shown(value)}: unset it, or override "
    return KnobRow(knob.name, Outcome.CONFLICT, before, before, why + knob.name)


def _unmet_need(knob: Knob, value: Any, wanted: Mapping[str, Any]) -> str:
    """Return why `value` has no effect because a knob that it needs is not set, or ""."""
    if not knob.needs or not knob.needing(value):
        return ""
    needed = knobs_by_name()[knob.needs]
    present = wanted.get(needed.name)
    if present is None and needed.loaded:
        present = needed.access.read()
    if present in knob.needed if knob.needed else present is not None:
        return ""
    words = f"set to {' or '.join(knob.needed)}" if knob.needed else "set"
    return f"it acts on `{needed.profile_key}`, which the profile does not {words}"


def _variables_of_profiles() -> dict[str, str]:
    """Return the variables that active profiles have set, directly or through a flag.

    A variable that has been changed since then is omitted.
    """
    variables = {}
    for step, row in chain.from_iterable(executed):
        name = _variable_row(step.knob).variable if row.is_written else ""
        text = os.environ.get(name)
        if name and text is not None and _value_of(step.knob, text) == step.value:
            variables[name] = text
    return variables


def _variable_row(knob: Knob) -> Knob:
    """Return the knob of the variable that sets the same state as `knob`, or `knob` itself."""
    aliases = (knobs_by_name().get(name) for name in knob.aliases)
    return next((alias for alias in aliases if alias and alias.variable), knob)


def _value_of(knob: Knob, text: str) -> Any:
    row = _variable_row(knob)
    return text if row is knob or row.effect is None else row.effect.means(text)
