"""Carries out a plan, reads every write back, and undoes it exactly: the only writer of knobs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrepro.application.guard import (
    Guard,
    check,
    drift_behind,
    final_check,
    moved_from_now,
    set_baseline,
)
from torchrepro.application.planner import (
    Plan,
    Step,
    decide,
    executed,
    lateness,
    make_plan,
    refusal,
)
from torchrepro.application.ray_workers import reach_workers
from torchrepro.frameworks.hooking import InForce
from torchrepro.frameworks.known_frameworks import hook_frameworks
from torchrepro.ground.console import Verbosity, say_once, verbosity
from torchrepro.ground.errors import ApplyError, LateError, TorchreproError
from torchrepro.ground.fork_safety import applying
from torchrepro.ground.imports import put_off
from torchrepro.knobs.knob import MissingState, unfrozen
from torchrepro.policies.policy import counts_so_far, effects, handle_with, reset_counts
from torchrepro.profile.load import resolve
from torchrepro.reporting.outcomes import STOPPING, KnobRow, Outcome, process_facts
from torchrepro.reporting.process_state import closed_doors, original_profile, other_than_started
from torchrepro.reporting.report import Report, make_report
from torchrepro.seeding import streams
from torchrepro.seeding.nondeterministic_reads import Watch, watch_unseeded
from torchrepro.seeding.seeding_calls import note_calls, note_calls_of_new_modules, seeding_calls
from torchrepro.seeding.streams import world

if TYPE_CHECKING:
    from torchrepro.application.rank_agreement import Agreement
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.seeding.seeding_calls import SeedingCall

_in_force: list[Applied] = []
_past: list[str] = []  # names; non-empty once a profile was applied: a relaunch would lose work


class Applied:
    """A profile in force: its report, and how to take it back.

    Leaving the `with` block, or `restore`, puts back what was there at entry. Profiles nest; one
    that is restored before those applied after it takes these back first.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.refuse: Callable[[TorchreproError], None] = _raise
        """What is done when a profile in force turns out not to hold, on this rank or for all."""
        self._undo = ExitStack()
        self._done: list[tuple[Step, KnobRow]] = []
        self._calls: tuple[SeedingCall, ...] = ()
        self._counts_before = counts_so_far()
        self._last: Report | None = None
        self._agreement: Agreement | None = None
        self._noting = False
        self._hooked = False
        self._unseeded: Watch | None = None
        self._guard = Guard(self._refuse)
        self._undo.callback(handle_with(self._refuse))
        self._undo.callback(reach_workers(lambda: self.resolved, self._refuse))

    def _refuse(self, error: TorchreproError) -> None:
        self.refuse(error)  # looked up when it is needed: whoever holds this may have set it since

    @property
    def resolved(self) -> ResolvedProfile:
        """The plain values of the profile in force."""
        return self.plan.resolved

    @property
    def digest(self) -> str:
        """SHA-256 of what the profile asks for."""
        return self.resolved.digest

    @property
    def report(self) -> Report:
        """One outcome per knob, what is held of the guarantee, and what has drifted up to now."""
        return self._present() if self.active else self._last or self._outcomes()

    @property
    def seeding_calls(self) -> tuple[SeedingCall, ...]:
        """The places from which the program seeded a global generator itself, while in force."""
        return seeding_calls() if self.active else self._calls

    @property
    def active(self) -> bool:
        """Whether the profile is still in force."""
        return self in _in_force

    def restore(self) -> None:
        """Put back what was there before; does nothing the second time.

        Every knob is put back even if one of them raises; that error is raised at the end, and so
        is `DriftError` where knobs have drifted under `guard: error`.
        """
        with applying, unfrozen(), ExitStack() as all_scopes:
            scopes = _in_force[_in_force.index(self) :] if self.active else []
            all_scopes.callback(final_check([scope._guard for scope in scopes]))  # noqa: SLF001 - the same class
            for scope in scopes:  # outermost first: the stack unwinds the other way round
                scope._calls, scope._last = seeding_calls(), scope._present()  # noqa: SLF001 - the same class
                all_scopes.callback(scope._undo.close)  # noqa: SLF001 - the same class
            del _in_force[len(_in_force) - len(scopes) :]
            del executed[len(_in_force) :]

    def _present(self) -> Report:
        check([self._guard])
        unseen: tuple[str, ...] = ()
        if self.resolved.strict:
            from torchrepro.policies.deterministic_ops import unseen_kernels

            unseen = unseen_kernels()
        loader: Any = sys.modules.get("torchrepro.seeding.loader")  # None where none was seeded
        knobs = {step.knob.name for step, _ in self._done}
        return self._outcomes(
            drift=tuple(self._guard.drift.values()),
            as_good=tuple(self._guard.as_good.values()),
            switches=self._guard.agreeing,
            effects=tuple(each for each in effects(self._counts_before) if each.policy in knobs),
            unseen=unseen,
            unseeded=self._unseeded.reads() if self._unseeded is not None else (),
            loading=() if loader is None else tuple(loader.loaders.register.notes.values()),
        )

    def _outcomes(self, **more: Any) -> Report:
        rows = tuple(row for _, row in self._done)
        facts = process_facts(self.resolved, closed_doors())
        return make_report(self.resolved, rows, facts, **more)

    def carry_out(self, steps: Iterable[Step]) -> None:
        """Set the knobs of `steps` in order; raises `ApplyError` for a strict profile, undone.

        Under `guard: error`, what drifts from then on goes to `refuse` as `DriftError`.
        """
        with ExitStack() as until_done:
            until_done.callback(self._abandon)
            moved, begins = moved_from_now(), len(self._done)
            for step in steps:
                self._done.append((step, self._execute(step)))
            for position, (step, row) in enumerate(self._done[begins:], begins):
                set_so = row.outcome in (Outcome.APPLIED, Outcome.UNCHANGED)
                if step.knob.reread and set_so and not step.knob.holds(step.value):
                    why = "set, and another knob of the profile has moved it since"
                    now = step.knob.access.read()
                    row = replace(row, outcome=Outcome.INEFFECTIVE, after=now, why=why)  # noqa: PLW2901
                    self._done[position] = step, row
            self._note_seeds_of_the_program()
            if self.resolved.strict:
                if self._unseeded is None:  # it promises the same bits
                    self._unseeded = watch_unseeded()
                    self._undo.callback(self._unseeded.stop)
                rows = [row for _, row in self._done]
                if any(row.outcome in STOPPING for row in rows):
                    raise ApplyError(refusal(self.resolved, rows), self._outcomes())
            self._agree_with_other_ranks()
            if not self._hooked:
                self._hooked = True
                self._undo.callback(hook_frameworks(InForce(self.resolved, lambda: self.report)))
            set_here = (  # what is to stay as it is: generators are there to move
                step.knob
                for step, row in self._done
                if step.knob.guarded and (row.is_written or row.outcome is Outcome.UNCHANGED)
            )
            self._undo.enter_context(set_baseline(self._guard, (*moved(), *set_here)))
            until_done.pop_all()

    def _note_seeds_of_the_program(self) -> None:
        if "guarantee" not in self.resolved.values or "seed" in self.resolved.values:
            return
        if self._noting:
            note_calls_of_new_modules()
        elif streams.current_plan().seed is None:
            self._undo.callback(note_calls())
            self._noting = True

    def _agree_with_other_ranks(self) -> None:
        if self._agreement is not None or "torch.distributed" not in sys.modules:
            return
        from torchrepro.application.rank_agreement import Agreement

        self._agreement = Agreement(lambda: self.report, self._refuse)
        self._undo.callback(self._agreement.close)

    def _abandon(self) -> None:
        try:
            with unfrozen():
                self._undo.close()
        finally:
            if self.active:
                executed.pop(_in_force.index(self))
                _in_force.remove(self)

    def _execute(self, step: Step) -> KnobRow:
        row, knob, access = step.expected, step.knob, step.knob.access
        try:
            if not step.decided or (knob.reread and row.outcome is Outcome.UNCHANGED):
                import_module(knob.library)
                row = decide(knob, step.value, step.wanted)
            if row.outcome is Outcome.UNCHANGED and not knob.variable:
                self._undo.callback(access.restore, access.save())
            if not row.is_written and row.outcome is not Outcome.INEFFECTIVE:
                return row  # a variable that is as it should be is the user's own to take away
            saved = access.save()
            # Read anew, as the profile around this one may have begun since the plan.
            row = replace(row, before=access.read())
            try:
                access.write(step.value)
            except BaseException:
                # Some of torch's setters assign first and refuse afterwards.
                if knob.moves_on or access.read() != row.before:
                    with unfrozen():
                        access.restore(saved)
                raise
            self._undo.callback(access.restore, saved)
            after = access.read()
            if not knob.holds(step.value):
                why = "written, but reading it back gives another value"
                return replace(row, outcome=Outcome.INEFFECTIVE, after=after, why=why)
            return replace(row, after=step.value if after is None else after)
        except (MissingState, ImportError) as missing:
            return KnobRow(knob.name, Outcome.UNSUPPORTED, why=str(missing))
        except Exception as error:  # noqa: BLE001 - whatever a library raises is the outcome
            first_line = str(error).strip().partition("\n")[0]
            why = f"{type(error).__name__}: {first_line}"
            if "disable_global_flags" in first_line:
                why += "; put the profile in force before that is called"
            return replace(row, outcome=Outcome.FAILED, after=None, why=why)

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with drift_behind(error):
            self.restore()

    def __repr__(self) -> str:
        state = "in force" if self.active else "restored"
        return f"<torchrepro.Applied {self.resolved.name} {self.digest[:19]} {state}>"

    def __str__(self) -> str:
        return str(self.report)

    def _repr_html_(self) -> str:
        return self.report._repr_html_()


def apply(profile: Any, overrides: Sequence[str] = ()) -> Applied:
    """Put a profile in force in this process, and return what takes it back.

    `profile` is a name, a path, a `Profile`, a DictConfig or a dict; of a program's config, its
    section `repro` is taken. Environment variables are set first, flags next, seeds last; torch is
    imported when a knob needs it. Changes exactly the knobs that the profile names. With `on_late:
    relaunch` the first call may replace the process; with `relaunch_or_warn` it never does. Under
    `torchrepro run` of another profile a line says what it replaces.

    Raises `ProfileError` for a profile that is not valid, `ApplyError` if a strict one has a
    conflict or a write that fails or does not hold, and `LateError` if a knob is past its phase and
    the profile's `on_late` is `error`; the process is as it was before.
    """
    with applying:  # the profile is read by modules that are imported only then
        resolved = original_profile(profile, overrides) or resolve(profile, overrides)
        applied = apply_resolved(resolved, "")
        line = other_than_started(resolved)
        if line and world().rank == 0 and verbosity() is not Verbosity.QUIET:
            say_once(line)
        return applied


def apply_resolved(resolved: ResolvedProfile, obstacle: str) -> Applied:
    """Put `resolved` in force, as `apply` does; `obstacle` says why it may not relaunch, if so."""
    with applying:
        past = len(_past)
        for begin_now in put_off:
            begin_now()
        del _past[past:]  # that has done no work yet, which a relaunch would lose
        applied = begin(resolved, obstacle)
        applied.carry_out(applied.plan.steps)
        return applied


def begin(resolved: ResolvedProfile, obstacle: str) -> Applied:
    """Plan for `resolved` and stop if it cannot be put in force; nothing is set yet."""
    plan = make_plan(resolved)
    stop_or_relaunch(plan, obstacle)
    _past.append(plan.resolved.name)
    if not _in_force:
        reset_counts()  # what policies did before is nobody's now
    applied = Applied(plan)
    _in_force.append(applied)
    executed.append(applied._done)  # noqa: SLF001 - the same module
    return applied


def stop_or_relaunch(plan: Plan, obstacle: str, *, by_itself: bool = False) -> str:
    """Return if the plan may be carried out; else raise, or relaunch where `on_late` says so.

    `obstacle` says why this is not the moment for a relaunch; `by_itself` that it is the moment for
    one that the profile does not insist on. Returns why there was none.
    """
    plan.refuse_if_stopping()
    on_late = plan.resolved.on_late
    if not plan.late or on_late == "warn" or (on_late == "relaunch_or_warn" and not by_itself):
        return ""
    why = ""
    if on_late != "error":
        from torchrepro.application.launch import obstacle_to_relaunch, relaunch

        earlier = "a profile was applied before in this process" if _past else ""
        why = obstacle or earlier or obstacle_to_relaunch(insists=on_late == "relaunch")
        if not why:
            # What is not late is set after the start as ever, and taken back after the job.
            relaunch(plan.late_variables)
    if on_late == "relaunch_or_warn":
        return why
    raise LateError(lateness(plan, why), plan.report)


def applied_names() -> tuple[str, ...]:
    """Return what the profiles that were ever applied in this process call themselves."""
    return tuple(_past)


def in_force() -> tuple[Applied, ...]:
    """Return the profiles in force, outermost first."""
    return tuple(_in_force)


def _raise(error: TorchreproError) -> None:
    raise error
