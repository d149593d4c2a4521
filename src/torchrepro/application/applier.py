"""Executes a plan, reads every write back, and restores the knobs. No other module writes knobs."""

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
    final_check,
    keep_error,
    set_baseline,
    track_moved_knobs,
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
from torchrepro.frameworks.hooking import ActiveProfile
from torchrepro.frameworks.known_frameworks import hook_frameworks
from torchrepro.ground.console import Verbosity, say_once, verbosity
from torchrepro.ground.errors import ApplyError, LateError, TorchreproError
from torchrepro.ground.fork_safety import applying
from torchrepro.ground.imports import deferred_callbacks
from torchrepro.knobs.knob import MissingState, unfrozen
from torchrepro.policies.policy import counts_so_far, effects, handle_with, reset_counts
from torchrepro.profile.load import resolve
from torchrepro.reporting.outcomes import STOPPING, KnobRow, Outcome, process_facts
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

_active: list[Applied] = []
_past: list[str] = []  # names of applied profiles; after the first, a relaunch would lose work


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
        self._executed: list[tuple[Step, KnobRow]] = []
        self._calls: tuple[ObservedCall, ...] = ()
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
        return self._current_report() if self.active else self._last or self._make_report()

    @property
    def seeding_calls(self) -> tuple[ObservedCall, ...]:
        """The lines on which the program seeded a global generator while the profile was active."""
        return seeding_calls.calls() if self.active else self._calls

    @property
    def active(self) -> bool:
        """Whether the profile is still active."""
        return self in _active

    def restore(self) -> None:
        """Restore the state of every knob before the profile. A second call does nothing.

        If restoring a knob fails, all other knobs are still restored, and the error is raised at
        the end. Raises `DriftError` if knobs have drifted and the profile has `guard: error`.
        """
        with applying, unfrozen(), ExitStack() as all_scopes:
            scopes = _active[_active.index(self) :] if self.active else []
            all_scopes.callback(final_check([scope._guard for scope in scopes]))  # noqa: SLF001 - the same class
            for scope in scopes:  # outermost first: the stack unwinds in reverse order
                scope._calls, scope._last = seeding_calls.calls(), scope._current_report()  # noqa: SLF001 - the same class
                all_scopes.callback(scope._undo.close)  # noqa: SLF001 - the same class
            del _active[len(_active) - len(scopes) :]
            del executed[len(_active) :]

    def _current_report(self) -> Report:
        check([self._guard])
        unseen: tuple[str, ...] = ()
        if self.resolved.strict:
            from torchrepro.policies.deterministic_ops import unseen_kernels

            unseen = unseen_kernels()
        loader: Any = sys.modules.get("torchrepro.seeding.loader")  # None if no loader was seeded
        knobs = {step.knob.name for step, _ in self._executed}
        return self._make_report(
            drift=tuple(self._guard.drift.values()),
            as_good=tuple(self._guard.equivalents.values()),
            switches=self._guard.agreeing,
            effects=tuple(use for use in effects(self._counts_before) if use.policy in knobs),
            unseen=unseen,
            unseeded=self._unseeded.reads() if self._unseeded is not None else (),
            loading=() if loader is None else tuple(loader.loaders.register.notes.values()),
        )

    def _make_report(self, **observed: Any) -> Report:
        rows = tuple(row for _, row in self._executed)
        facts = process_facts(self.resolved, closed_latches())
        return make_report(self.resolved, rows, facts, **observed)

    def carry_out(self, steps: Iterable[Step]) -> None:
        """Set the knobs of `steps` in order.

        With `guard: error`, `refuse` is called with a `DriftError` if a knob drifts later. If a
        strict profile cannot set a knob, restores all knobs and raises `ApplyError`.
        """
        with ExitStack() as until_done:
            until_done.callback(self._undo_all)
            moved, begins = track_moved_knobs(), len(self._executed)
            for step in steps:
                self._executed.append((step, self._execute(step)))
            for position, (step, row) in enumerate(self._executed[begins:], begins):
                set_so = row.outcome in (Outcome.APPLIED, Outcome.UNCHANGED)
                if step.knob.reread and set_so and not step.knob.holds(step.value):
                    why = "set, but another knob of the profile has changed it again"
                    now = step.knob.access.read()
                    row = replace(row, outcome=Outcome.INEFFECTIVE, after=now, why=why)  # noqa: PLW2901
                    self._executed[position] = step, row
            self._note_seeds_of_the_program()
            if self.resolved.strict:
                if self._unseeded is None:  # the first call of this method
                    self._unseeded = watch_unseeded()
                    self._undo.callback(self._unseeded.stop)
                rows = [row for _, row in self._executed]
                if any(row.outcome in STOPPING for row in rows):
                    raise ApplyError(refusal(self.resolved, rows), self._make_report())
            self._agree_with_other_ranks()
            if not self._hooked:
                self._hooked = True
                profile = ActiveProfile(self.resolved, lambda: self.report)
                self._undo.callback(hook_frameworks(profile))
            set_by_profile = (  # a generator is not guarded: each draw changes its state
                step.knob
                for step, row in self._executed
                if step.knob.guarded and (row.is_written or row.outcome is Outcome.UNCHANGED)
            )
            self._undo.enter_context(set_baseline(self._guard, (*moved(), *set_by_profile)))
            until_done.pop_all()

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
                executed.pop(_active.index(self))
                _active.remove(self)

    def _execute(self, step: Step) -> KnobRow:
        row, knob, access = step.expected, step.knob, step.knob.access
        try:
            if not step.decided or (knob.reread and row.outcome is Outcome.UNCHANGED):
                import_module(knob.library)
                row = decide(knob, step.value, step.wanted)
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
        except (MissingState, ImportError) as missing:
            return KnobRow(knob.name, Outcome.UNSUPPORTED, why=str(missing))
        except Exception as error:  # noqa: BLE001 - any error of a library becomes the outcome
            first_line = str(error).strip().partition("\n")[0]
            why = f"{type(error).__name__}: {first_line}"
            if "disable_global_flags" in first_line:
                why += "; apply the profile before the program calls that function"
            return replace(row, outcome=Outcome.FAILED, after=None, why=why)

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with keep_error(error):
            self.restore()

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
        past = len(_past)
        for begin_now in deferred_callbacks:
            begin_now()
        del _past[past:]  # these profiles begin only now, so a relaunch would lose no work
        applied = begin(resolved, obstacle)
        applied.carry_out(applied.plan.steps)
        return applied


def begin(resolved: ResolvedProfile, obstacle: str) -> Applied:
    """Return `resolved` as an active profile whose knobs are not set yet. Raises like `apply`."""
    plan = make_plan(resolved)
    stop_or_relaunch(plan, obstacle)
    _past.append(plan.resolved.name)
    if not _active:
        reset_counts()  # earlier uses of policies do not count for this profile
    applied = Applied(plan)
    _active.append(applied)
    executed.append(applied._executed)  # noqa: SLF001 - the same module
    return applied


def stop_or_relaunch(plan: Plan, obstacle: str, *, by_itself: bool = False) -> str:
    """Return if the plan may be executed. If not, raise an error, or relaunch the process.

    `on_late` decides between an error and a relaunch. A non-empty `obstacle` is a reason not to
    relaunch. `on_late: relaunch_or_warn` only relaunches if `by_itself` is true. Returns why the
    process was not relaunched, or an empty string.
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
            relaunch(plan.late_variables)  # the new process sets and restores all other knobs
    if on_late == "relaunch_or_warn":
        return why
    raise LateError(lateness(plan, why), plan.report)


def applied_names() -> tuple[str, ...]:
    """Return the names of all profiles that were ever applied in this process."""
    return tuple(_past)


def active_profiles() -> tuple[Applied, ...]:
    """Return the active profiles, outermost first."""
    return tuple(_active)


def _raise(error: TorchreproError) -> None:
    raise error
