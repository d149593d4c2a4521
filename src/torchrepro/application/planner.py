"""Decides what applying a profile does to each knob of this process, and changes nothing.

A plan has one step per knob, in the order in which `apply` sets the knobs. A step has an expected
outcome, which `apply` carries out and reports. If the library of a knob is not loaded, its step
awaits the import. `apply` then imports the library and gets a second plan from `after_import`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.ground.console import Displayed, Part, parts
from torchrepro.ground.errors import ApplyError, shown, some
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
    awaits_import: bool = False
    """True if the outcome is decided only after the knob's library is imported."""


class ProcessProfiles:
    """The profiles of this process. The only object of this class lives as long as the process.

    A profile becomes active before its first knob is set. It stops being active when it is
    restored, or when a knob of a strict profile cannot be set. Its name is never removed: after the
    first profile, a relaunch would lose work.
    """

    def __init__(self) -> None:
        self.active: list[Any] = []  # of `applier.Applied`, outermost first
        self.names: list[str] = []

    def variables(self) -> dict[str, str]:
        """Return the variables that active profiles have set, directly or through a flag.

        A variable that has been changed since then is omitted.
        """
        variables = {}
        for step, row in chain.from_iterable(applied.executed for applied in self.active):
            name = _variable_row(step.knob).variable if row.is_written else ""
            text = os.environ.get(name)
            if name and text is not None and _value_of(step.knob, text) == step.value:
                variables[name] = text
        return variables


profiles = ProcessProfiles()


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
    def late(self) -> tuple[Step, ...]:
        """The steps of knobs that it is too late to set. Knobs of absent hardware are omitted."""
        late = [step for step in self.steps if step.expected.outcome is Outcome.TOO_LATE]
        return tuple(step for step in late if step.knob.hardware not in self.facts.absent)

    @property
    def variables(self) -> dict[str, str]:
        """The variables to set before a process starts, except variables that the user exported."""
        to_set = (Outcome.APPLIED, Outcome.TOO_LATE)
        return {
            step.knob.variable: step.value
            for step in self.steps
            if step.knob.variable and step.expected.outcome in to_set
        }

    def after_import(self, steps: Iterable[Step]) -> list[Step]:
        """Import the libraries that `steps` await, and return the steps as decided after that."""
        wanted = {step.knob.name: step.value for step in self.steps}
        decided = []
        for step in steps:
            row = step.expected
            if step.awaits_import:
                try:
                    import_module(step.knob.library)
                    row = _decide_flag(step.knob, step.value, wanted)
                except Exception as error:  # noqa: BLE001 - any error of a library is an outcome
                    row = failed(row, error)
            decided.append(Step(step.knob, step.value, row))
        return decided

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
    from_profiles |= profiles.variables()
    ours = {name for name in names if from_profiles.get(name) == os.environ[name]}
    facts = process_facts(resolved, closed)
    circumstances = _Circumstances(
        wanted={knob.name: value for knob, value in settings},
        exported={name: os.environ[name] for name in names - ours},
        in_time=ours | set(filter(set_before_start, names)),
        closed=closed,
        absent=facts.absent,
    )
    steps = [_step(knob, value, circumstances) for knob, value in settings]
    return Plan(resolved, tuple(steps), facts)


def feasible_plan(resolved: ResolvedProfile, closed: Mapping[str, str] | None = None) -> Plan:
    """Return the same plan as `make_plan`, or raise `ApplyError` as `refuse_if_stopping` does."""
    plan = make_plan(resolved, closed)
    refuse_if_stopping(resolved, [step.expected for step in plan.steps], lambda: plan.report)
    return plan


class _Circumstances(NamedTuple):
    """What the outcome of a knob depends on, other than the knob itself."""

    wanted: Mapping[str, Any]  # the values that the profile requests, by the name of the knob
    exported: Mapping[str, str]  # the variables that the user exported
    in_time: Collection[str]  # the variables that were set before a library read them
    closed: Mapping[str, str]  # the closed latches
    absent: Mapping[str, str]  # absent hardware -> the reason


def _step(knob: Knob, value: Any, circumstances: _Circumstances) -> Step:
    row = KnobRow(knob.name, Outcome.APPLIED, None, value, f"{knob.library} is not loaded yet")
    try:
        if knob.loaded and knob.variable:
            row = _decide_variable(knob, value, circumstances)
        elif knob.loaded:
            row = _decide_flag(knob, value, circumstances.wanted)
    except MissingState as missing:
        row = failed(row, missing)
    if row.outcome is not Outcome.UNSUPPORTED:
        conflict = _conflict(knob, value, circumstances.exported)
        if conflict:
            row = KnobRow(knob.name, Outcome.CONFLICT, row.before, row.before, conflict)
    if unmet := _unmet_need(knob, circumstances.wanted):
        row = replace(row, outcome=Outcome.UNSUPPORTED, after=row.before, why=unmet)
    return Step(knob, value, row, not knob.loaded and row.outcome is Outcome.APPLIED)


def refuse_if_stopping(
    resolved: ResolvedProfile, rows: Iterable[KnobRow], report: Callable[[], Report]
) -> None:
    """Raise `ApplyError` if `resolved` is strict and a knob has a `STOPPING` outcome."""
    stopping = [row for row in rows if row.outcome in STOPPING]
    if resolved.strict and stopping:
        head = (
            f"profile '{resolved.name}' promises {resolved.guarantee} and cannot be applied; "
            "the process is unchanged:"
        )
        lines = [f"  {row.knob}: {row.outcome}: {row.why}" for row in stopping]
        raise ApplyError("\n".join([head, *lines]), report())


def failed(row: KnobRow, error: Exception) -> KnobRow:
    """Return the outcome of a knob whose library raised `error`; `row` was expected."""
    if isinstance(error, (MissingState, ImportError)):
        return KnobRow(row.knob, Outcome.UNSUPPORTED, why=str(error))
    first_line = str(error).strip().partition("\n")[0]
    why = f"{type(error).__name__}: {first_line}"
    if "disable_global_flags" in first_line:
        why += "; apply the profile before the program calls that function"
    return replace(row, outcome=Outcome.FAILED, after=None, why=why)


def _decide_flag(knob: Knob, value: Any, wanted: Mapping[str, Any]) -> KnobRow:
    """Return the expected outcome of a knob that is not a variable. Its library must be loaded.

    The outcome `ineffective` means that the knob can be set, but has no effect in this process.
    Raises `MissingState` if the state behind the knob does not exist.
    """
    now = knob.access.read()
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


def _decide_variable(knob: Knob, value: str, circumstances: _Circumstances) -> KnobRow:
    """Return the expected outcome of a variable that does not contradict an exported one.

    Raises `MissingState` if the state behind the variable does not exist.
    """
    name, late = knob.variable, circumstances.closed.get(knob.door, "")
    text = os.environ.get(name)
    row = KnobRow(knob.name, Outcome.APPLIED, knob.access.read(), value)
    equivalent = why_equivalent(knob, circumstances.exported.get(name))
    if text is None or not (text == value or equivalent):
        if not late:
            return row
        # A late variable stays unchanged. If its hardware is absent, this process does not read
        # the variable, and it is set for child processes.
        after = value if knob.hardware in circumstances.absent else row.before
        why = f"{late}; `torchrepro run` sets it in time"
        return replace(row, outcome=Outcome.TOO_LATE, after=after, why=why)
    kept = replace(row, after=row.before)
    in_effect, instead = None, ""
    if knob.effect and (late or not knob.door):
        # The check makes the library read the variable, so it runs only after the library did so.
        in_effect, instead = knob.effect.check(text)
    in_time = name in circumstances.in_time
    if in_effect is False:
        if not late:
            return row  # the state that the variable initialized can still be set
        todo = "" if in_time else "; `torchrepro run` sets it in time"
        return replace(kept, outcome=Outcome.TOO_LATE, why=f"{late}, and {instead}{todo}")
    if late and in_effect is None and not in_time:
        why = f"{late}, and it is unknown whether the variable was set before that"
        return replace(kept, outcome=Outcome.UNCHANGED, why=why, unverified=True)
    why = "" if text == value else f"exported, and {equivalent}"
    return replace(kept, outcome=Outcome.UNCHANGED, why=why)


def _conflict(knob: Knob, value: Any, exported: Mapping[str, str]) -> str:
    """Return why the profile contradicts a variable that the user exported, or an empty string."""
    row = _variable_row(knob)
    text = exported.get(row.variable)
    if text is None or _value_of(knob, text) == value:
        return ""
    if row is knob and why_equivalent(knob, text):
        return ""
    why = f"{row.variable} is exported as {text}, the profile wants {shown(value)}: unset it, or "
    return f"{why}override {knob.name}"


def _unmet_need(knob: Knob, wanted: Mapping[str, Any]) -> str:
    """Return why `knob` has no effect because a knob that it needs is not set, or ""."""
    if not knob.needs or not knob.needing(wanted[knob.name]):
        return ""
    needed = knobs_by_name()[knob.needs]
    present = wanted.get(needed.name)
    if present is None and needed.loaded:
        present = needed.access.read()
    if present in knob.needed if knob.needed else present is not None:
        return ""
    words = f"set to {' or '.join(knob.needed)}" if knob.needed else "set"
    return f"it acts on `{needed.profile_key}`, which the profile does not {words}"


def _variable_row(knob: Knob) -> Knob:
    """Return the knob of the variable that sets the same state as `knob`, or `knob` itself."""
    aliases = (knobs_by_name().get(name) for name in knob.aliases)
    return next((alias for alias in aliases if alias and alias.variable), knob)


def _value_of(knob: Knob, text: str) -> Any:
    row = _variable_row(knob)
    return text if row is knob or row.effect is None else row.effect.means(text)
