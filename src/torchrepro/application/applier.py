"""Executes a plan, reads every write back, and restores the knobs. No other module writes knobs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from torchrepro import WORKERS
from torchrepro.application.guard import (
    Guard,
    check,
    final_check,
    set_baseline,
    track_moved_knobs,
)
from torchrepro.application.planner import (
    Plan,
    Step,
    failed,
    feasible_plan,
    profiles,
    refuse_if_stopping,
)
from torchrepro.frameworks.hooking import ActiveProfile
from torchrepro.frameworks.known_frameworks import hook_frameworks
from torchrepro.ground.console import Verbosity, say, say_once, verbosity
from torchrepro.ground.errors import DriftError, LateError, TorchreproError
from torchrepro.ground.fork_safety import applying
from torchrepro.ground.imports import AfterImport, deferred_callbacks, named
from torchrepro.knobs.knob import unfrozen
from torchrepro.policies.policy import counts_so_far, effects, handle_with, reset_counts
from torchrepro.profile.load import resolve
from torchrepro.reporting.outcomes import KnobRow, Outcome, process_facts
from torchrepro.reporting.process_state import closed_latches, original_profile, other_than_started
from torchrepro.reporting.report import Report, make_report
from torchrepro.seeding import streams
from torchrepro.seeding.nondeterministic_reads import Watch, watch_unseeded
from torchrepro.seeding.seeding_calls import seeding_calls
from torchrepro.seeding.streams import world

if TYPE_CHECKING:
    from torchrepro.application.rank_agreement import Agreement
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.seeding.call_records import ObservedCall


class Applied:
    """A profile that was applied to this process, with a report and a method to undo the profile.

    `restore`, or the end of a `with` block, restores the state before the profile was applied.
    Restoring an outer profile first restores all profiles that were applied after the outer one.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.refuse: Callable[[TorchreproError], None] = _raise
        """Called when an active profile is no longer satisfied, on this rank or on all."""
        self._undo = ExitStack()
        self.executed: list[tuple[Step, KnobRow]] = []
        self._calls: tuple[ObservedCall, ...] = ()
        self._counts_before = counts_so_far()
        self._last: Report | None = None
        self._agreement: Agreement | None = None
        self._noting = False
        self._observing = False
        self._unseeded: Watch | None = None
        self._guard = Guard(self._refuse)
        self._undo.callback(handle_with(self._refuse))
        libraries = AfterImport(WORKERS, self._reach_workers)
        libraries.watch_all()
        self._undo.callback(libraries.unwatch)

    def _reach_workers(self, library: str) -> None:
        leave = named(WORKERS[library])(lambda: self.resolved, self._refuse)
        self._undo.callback(leave)

    def _refuse(self, error: TorchreproError) -> None:
        self.refuse(error)  # looked up at each call, since the attribute may have been replaced

    @property
    def resolved(self) -> ResolvedProfile:
        """The plain values of the applied profile."""
        return self.plan.resolved

    @property
    def digest(self) -> str:
        """SHA-256 of the values that the profile requests."""
        return self.resolved.digest

    @property
    def report(self) -> Report:
        """The outcome of each knob, how far the guarantee is satisfied, and the drift so far."""
        if not self.active:
            return self._last or self._make_report()
        check([self._guard])
        unseen: tuple[str, ...] = ()
        if self.resolved.strict:
            from torchrepro.policies.deterministic_ops import unseen_kernels

            unseen = unseen_kernels()
        loader: Any = sys.modules.get("torchrepro.seeding.loader")  # None if no loader was seeded
        knobs = {step.knob.name for step, _ in self.executed}
        return self._make_report(
            drift=tuple(self._guard.drift.values()),
            as_good=tuple(self._guard.equivalents.values()),
            switches=self._guard.agreeing,
            effects=tuple(use for use in effects(self._counts_before) if use.policy in knobs),
            unseen=unseen,
            unseeded=self._unseeded.reads() if self._unseeded is not None else (),
            loading=() if loader is None else tuple(loader.loaders.register.notes.values()),
        )

    @property
    def seeding_calls(self) -> tuple[ObservedCall, ...]:
        """The lines on which the program seeded a global generator while the profile was active."""
        return seeding_calls.calls() if self.active else self._calls

    @property
    def active(self) -> bool:
        """Whether the profile is still active."""
        return self in profiles.active

    def restore(self) -> None:
        """Restore the state of every knob before the profile. A second call does nothing.

        If restoring a knob fails, all other knobs are still restored, and the error is raised at
        the end. Raises `DriftError` if knobs have drifted and the profile has `guard: error`.
        """
        with applying, unfrozen(), ExitStack() as all_scopes:
            active = profiles.active
            scopes = active[active.index(self) :] if self.active else []
            all_scopes.callback(final_check([scope._guard for scope in scopes]))  # noqa: SLF001 - the same class
            for scope in scopes:  # outermost first: the stack unwinds in reverse order
                scope._calls, scope._last = seeding_calls.calls(), scope.report  # noqa: SLF001 - the same class
                all_scopes.callback(scope._undo.close)  # noqa: SLF001 - the same class
            del active[len(active) - len(scopes) :]

    def _make_report(self, **observed: Any) -> Report:
        rows = tuple(row for _, row in self.executed)
        facts = process_facts(self.resolved, closed_latches())
        return make_report(self.resolved, rows, facts, **observed)

    def carry_out(self, steps: Sequence[Step]) -> None:
        """Set the knobs of `steps` in order.

        Sets the knobs before the first step that awaits an import. Then imports the libraries, and
        sets the other knobs as the second plan decides (`Plan.after_import`). So the variables of
        the profile are set before a library reads them.
        With `guard: error`, `refuse` is called with a `DriftError` if a knob drifts later. If a
        strict profile cannot set a knob, restores all knobs and raises `ApplyError`.
        """
        with ExitStack() as until_done:
            until_done.callback(self._undo_all)
            moved, begins = track_moved_knobs(), len(self.executed)
            before_import = list(takewhile(lambda step: not step.awaits_import, steps))
            self.executed += [(step, self._set(step)) for step in before_import]
            if len(before_import) < len(steps):
                after_import = self.plan.after_import(steps[len(before_import) :])
                self.executed += [(step, self._set(step)) for step in after_import]
            self._check_moved_by_others(begins)
            self._note_seeds_of_the_program()
            rows = [row for _, row in self.executed]
            refuse_if_stopping(self.resolved, rows, self._make_report)
            self._agree_with_other_ranks()
            if not self._observing:
                self._observing = True
                self._observe_program()
            set_by_profile = (  # a generator is not guarded: each draw changes its state
                step.knob
                for step, row in self.executed
                if step.knob.guarded and (row.is_written or row.outcome is Outcome.UNCHANGED)
            )
            self._undo.enter_context(set_baseline(self._guard, (*moved(), *set_by_profile)))
            until_done.pop_all()

    def _observe_program(self) -> None:
        if self.resolved.strict:
            self._unseeded = watch_unseeded()
            self._undo.callback(self._unseeded.stop)
        profile = ActiveProfile(self.resolved, lambda: self.report)
        self._undo.callback(hook_frameworks(profile))

    def _check_moved_by_others(self, begins: int) -> None:
        """Correct the outcome of a knob that a later step has changed (`Knob.reread`)."""
        for position, (step, row) in enumerate(self.executed[begins:], begins):
            set_so = row.outcome in (Outcome.APPLIED, Outcome.UNCHANGED)
            if step.knob.reread and set_so and not step.knob.holds(step.value):
                why = "set, but another knob of the profile has changed it again"
                now = step.knob.access.read()
                moved = replace(row, outcome=Outcome.INEFFECTIVE, after=now, why=why)
                self.executed[position] = step, moved

    def _note_seeds_of_the_program(self) -> None:
        if "guarantee" not in self.resolved.values or "seed" in self.resolved.values:
            return
        if self._noting:
            seeding_calls.note_new_modules()
        elif streams.current_plan().seed is None:
            self._undo.callback(seeding_calls.begin())
            self._noting = True

    def _agree_with_other_ranks(self) -> None:
        if self._agreement is not None or "torch.distributed" not in sys.modules:
            return
        from torchrepro.application.rank_agreement import Agreement

        self._agreement = Agreement(lambda: self.report, self._refuse)
        self._undo.callback(self._agreement.close)

    def _undo_all(self) -> None:
        try:
            with unfrozen():
                self._undo.close()
        finally:
            if self.active:
                profiles.active.remove(self)

    def _set(self, step: Step) -> KnobRow:
        row, knob, access = step.expected, step.knob, step.knob.access
        try:
            if knob.reread and row.outcome is Outcome.UNCHANGED and not knob.holds(step.value):
                row = replace(row, outcome=Outcome.APPLIED)  # an earlier step has changed it
            if row.outcome is Outcome.UNCHANGED and not knob.variable:
                self._undo.callback(access.restore, access.save())
            if not row.is_written and row.outcome is not Outcome.INEFFECTIVE:
                return row  # the user exported the variable, so `restore` does not remove it
            saved = access.save()
            # Read again: an outer profile may have been applied after the plan was made.
            row = replace(row, before=access.read())
            try:
                access.write(step.value)
            except BaseException:
                # Some of torch's setters assign first and raise afterwards.
                if knob.changes_with_use or access.read() != row.before:
                    with unfrozen():
                        access.restore(saved)
                raise
            self._undo.callback(access.restore, saved)
            after = access.read()
            if not knob.holds(step.value):
                why = "written, but reading it back gives another value"
                return replace(row, outcome=Outcome.INEFFECTIVE, after=after, why=why)
            return replace(row, after=step.value if after is None else after)
        except Exception as error:  # noqa: BLE001 - any error of a library becomes the outcome
            return failed(row, error)

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.restore()
        except DriftError as drift:  # printed if raising it would hide the error of the block
            if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
                raise
            if not isinstance(error, DriftError):  # a DriftError has already reported the drift
                say(drift)

    def __repr__(self) -> str:
        state = "active" if self.active else "restored"
        return f"<torchrepro.Applied {self.resolved.name} {self.digest[:19]} {state}>"

    def __str__(self) -> str:
        return str(self.report)

    def _repr_html_(self) -> str:
        return self.report._repr_html_()


def apply(profile: Any, overrides: Sequence[str] = ()) -> Applied:
    """Apply a profile to this process, and return the object that restores the process.

    `profile` is a name, a path, a `Profile`, a DictConfig or a dict. In the whole config of a
    program, only the section `repro` is used. Sets the knobs that the profile names: first
    environment variables, then flags, then seeds. Other knobs stay unchanged. Imports torch if a
    knob needs torch. With `on_late: relaunch`, the first call may start the program again. If the
    process runs under `torchrepro run` with another profile, a line on stderr names that profile.

    Raises `ProfileError` if the profile is invalid, and `LateError` if it is too late to set a knob
    and `on_late` does not allow that. Raises `ApplyError` if the profile is strict and a write of a
    knob fails, has no effect or contradicts an exported variable. An error leaves no changes.
    """
    with applying:  # reading the profile imports modules
        resolved = original_profile(profile, overrides) or resolve(profile, overrides)
        applied = apply_resolved(resolved, "")
        line = other_than_started(resolved)
        if line and world().rank == 0 and verbosity() is not Verbosity.QUIET:
            say_once(line)
        return applied


def apply_resolved(resolved: ResolvedProfile, obstacle: str) -> Applied:
    """Apply `resolved` like `apply`. A non-empty `obstacle` is a reason not to relaunch."""
    with applying:
        past = len(profiles.names)
        for begin_now in deferred_callbacks:
            begin_now()
        del profiles.names[past:]  # these profiles begin only now: a relaunch would lose no work
        applied = begin(resolved, obstacle)
        applied.carry_out(applied.plan.steps)
        return applied


def begin(resolved: ResolvedProfile, obstacle: str) -> Applied:
    """Return `resolved` as an active profile whose knobs are not set yet. Raises like `apply`."""
    plan = feasible_plan(resolved)
    stop_or_relaunch(plan, obstacle)
    profiles.names.append(plan.resolved.name)
    if not profiles.active:
        reset_counts()  # earlier uses of policies do not count for this profile
    applied = Applied(plan)
    profiles.active.append(applied)
    return applied


def stop_or_relaunch(plan: Plan, obstacle: str, *, by_itself: bool = False) -> str:
    """Return if it is not too late for the plan. If it is, raise an error or relaunch the process.

    `on_late` decides between an error and a relaunch. A non-empty `obstacle` is a reason not to
    relaunch. `on_late: relaunch_or_warn` only relaunches if `by_itself` is true. Returns why the
    process was not relaunched, or an empty string.
    """
    on_late = plan.resolved.on_late
    if not plan.late or on_late == "warn" or (on_late == "relaunch_or_warn" and not by_itself):
        return ""
    why = ""
    if on_late != "error":
        from torchrepro.application.launch import obstacle_to_relaunch, relaunch

        earlier = "a profile was applied before in this process" if profiles.names else ""
        why = obstacle or earlier or obstacle_to_relaunch(insists=on_late == "relaunch")
        if not why:
            # The new process sets and restores all other knobs.
            relaunch({step.knob.variable: step.value for step in plan.late if step.knob.variable})
    if on_late == "relaunch_or_warn":
        return why
    lines = [f"profile '{plan.resolved.name}' has knobs past their phase (on_late: {on_late})"]
    lines += [f"  {step.knob.name}: {step.expected.why}" for step in plan.late]
    if why:
        lines.append(f"  no relaunch, because {why}")
    lines.append("  start the program with `torchrepro run`, which sets them before Python starts")
    raise LateError("\n".join(lines), plan.report)


def active_profiles() -> tuple[Applied, ...]:
    """Return the active profiles, outermost first."""
    return tuple(profiles.active)


def _raise(error: TorchreproError) -> None:
    raise error
