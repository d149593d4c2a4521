"""What to make of a divergence: its likely cause, the knob against it, the way to see more."""

from __future__ import annotations

from fnmatch import fnmatchcase
from shlex import quote
from typing import TYPE_CHECKING, Any

from torchrepro.knobs.catalogue import knobs_by_name
from torchrepro.policies.fallback.nondeterministic_ops import row_of
from torchrepro.verdict.case import NO_VALUE, Case
from torchrepro.verdict.cause import Cause, Fix
from torchrepro.verdict.cause_rows import CAUSES
from torchrepro.verdict.kernel_cause_rows import KERNEL_CAUSES
from torchrepro.verdict.value import Advice, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrepro.knobs.knob import Knob
    from torchrepro.verdict.value import Setting, Verdict

_FEW = 3

_LEFT_OPEN = {
    "seeded": "promises the same random numbers and no more",
    "aligned": "promises the same numbers within a tolerance, not the same bits",
}
"""What a guarantee leaves open."""

_STRICT = "`debug-strict` (repeatable) promises the same bits on one machine"


def advice(
    verdict: Verdict, meta: Mapping[str, Any] | None = None, command: str = ""
) -> Advice | None:
    """Return what to make of the first divergence; None where there is none.

    `meta` is that of one of the traces: it names the profile and the knobs that were in force.
    `command` is the program's command line, as a shell takes it.
    """
    if verdict.first is None:
        return None
    known = meta or {}
    case = case_of(verdict, known)
    cause = next(row for row in CAUSES if _fits(row, case))
    fixes = (*_alike(cause, case), *cause.fixes)
    open_fixes = [fix for fix in fixes if not _holds(fix, case)]
    because = _sentence(cause, case)
    unseen = _may_hide_a_change(cause, case, known)
    if unseen:
        because = f"{because.removesuffix('.')}; or an input was changed outside torch in mid-step."
    if fixes and not open_fixes:
        because += f" Already in force, yet no help: {', '.join(fix.key for fix in fixes)}."
    fix = open_fixes[0] if open_fixes else None
    return Advice(
        cause=because,
        knob=fix.key if fix else "",
        setting=f"{fix.key}={fix.value}" if fix else "",
        closer=_closer(verdict, known, command, detail=unseen) if cause.closer else "",
        promise=_promise(verdict, known),
    )


def _promise(verdict: Verdict, meta: Mapping[str, Any]) -> str:
    """Return who promises what the runs lack, where the profile of one of them does not."""
    first = verdict.first
    if first is None or first.kind in (Kind.ENDED, Kind.RANDOM, Kind.INCOMPARABLE):
        return ""
    left = {name: meta.get(name) for name in ("guarantee", "profile")}
    unequal = {each.name: each.right for each in verdict.settings}
    for its in (left, {name: unequal.get(name, value) for name, value in left.items()}):
        if its["guarantee"] is None:
            return f"no profile was in force, so nobody promised this; {_STRICT}"
        if its["guarantee"] == "seeded" or (
            its["guarantee"] == "aligned" and verdict.tolerance is None
        ):
            profile = f"`{its['profile']}` ({its['guarantee']})"
            return f"{profile} {_LEFT_OPEN[its['guarantee']]}; {_STRICT}"
    return ""


def case_of(verdict: Verdict, meta: Mapping[str, Any]) -> Case:
    """Return the first divergence of `verdict`, which has one, with what `meta` knows."""
    if verdict.first is None:
        raise ValueError("the runs do not part")
    return Case(
        verdict.first,
        verdict.settings,
        meta.get("knobs") or {},
        accelerator(meta),
        tolerance=verdict.tolerance is not None,
    )


def accelerator(meta: Mapping[str, Any]) -> str:
    """Return the type of device that a recorded process had besides the CPU; empty if none."""
    hardware = meta.get("hardware") or {}
    return str(hardware.get("accelerator", "")).partition(" ")[0]


def _fits(row: Cause, case: Case) -> bool:
    differing = not row.alike or bool(_differing(row, case))
    return case.first.kind in row.kinds and differing and row.fits(case)


def _differing(row: Cause, case: Case) -> list[Setting]:
    return [
        setting
        for setting in case.differing_knobs
        if any(fnmatchcase(setting.name, pattern) for pattern in row.alike)
    ]


def _alike(row: Cause, case: Case) -> list[Fix]:
    """Return the settings in which the runs differ, each with a value for both of them."""
    found = []
    for setting in _differing(row, case):
        knob = knobs_by_name().get(setting.name)
        values = [each for each in (setting.left, setting.right) if each not in NO_VALUE]
        key = knob.profile_key if knob else setting.name
        found += [Fix(key, _written(str(each), knob)) for each in values[:1]]
    return found


def _written(value: str, knob: Knob | None) -> str:
    is_text = knob is not None and bool(knob.variable)
    return f'"{value}"' if is_text and not value.isdigit() else value


def _holds(fix: Fix, case: Case) -> bool:
    if any(setting.name == fix.key for setting in case.differing_knobs):
        return False  # in force in one run only, or with two values
    value = case.value(fix.key)
    return fix.is_met_by(value)


def _sentence(row: Cause, case: Case) -> str:
    known = row_of(case.op)
    settings = _differing(row, case) or case.differing_surroundings
    return row.because.format(
        op=case.first.op or "it",
        module=case.first.module,
        thread=case.first.thread,
        accelerator=case.accelerator,
        instead=known.instead if known else "",
        settings=_listed(settings),
    )


def _listed(settings: Sequence[Setting]) -> str:
    shown = [f"{each.name} {_or_none(each.left)} and {_or_none(each.right)}" for each in settings]
    rest = [f"{len(shown) - _FEW} more"] if len(shown) > _FEW else []
    return "; ".join([*shown[:_FEW], *rest])


def _or_none(value: str | None) -> str:
    return "not set" if value is None else value


def _may_hide_a_change(cause: Cause, case: Case, meta: Mapping[str, Any]) -> bool:
    """Whether inputs that count as equal may have been changed by something other than torch.

    A recording without `detail` remembers for the rest of a step what an op has written.
    """
    return (
        cause in KERNEL_CAUSES
        and not (cause.alike or case.tolerance or case.has_other_dtypes)
        and case.reads_something
        and "detail" in meta
        and not meta["detail"]
    )


def _closer(verdict: Verdict, meta: Mapping[str, Any], command: str, *, detail: bool) -> str:
    first = verdict.first
    if first is None or (first.elements and not detail) or first.kind is Kind.ENDED:
        return ""
    if command and not meta.get("profile"):
        return ""  # `verify` ran it as it is, which `run` cannot
    keep = f" --keep {quote(first.module)}" if first.module else ""
    return (
        f"torchrepro run {quote(str(meta.get('profile') or 'PROFILE'))}"
        f" --record {quote(verdict.left.rstrip('/') + '-closer')}"
        f" --steps {max(first.step - 1, 0)}:{first.step + 1}{keep}{' --detail' * detail}"
        f" -- {command or meta.get('command_hint') or 'COMMAND'}"
    )
