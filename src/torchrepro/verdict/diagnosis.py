"""What to make of a divergence: its likely cause, the knob against it, stricter settings to try."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from shlex import quote
from typing import TYPE_CHECKING, Any

from torchrepro.knobs.catalogue import CATALOGUE, knobs_by_name
from torchrepro.policies.deterministic_ops import row_of
from torchrepro.profile.composition import flatten
from torchrepro.verdict.evidence import ANY_VALUE, NO_VALUE, Cause, Evidence, Fix
from torchrepro.verdict.rules import CAUSES, KERNEL_CAUSES
from torchrepro.verdict.value import Advice, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torchrepro.knobs.knob import Knob
    from torchrepro.verdict.value import Divergence, Setting, Verdict


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


def case_of(verdict: Verdict, meta: Mapping[str, Any]) -> Evidence:
    """Return the first divergence of `verdict`, which has one, with what `meta` knows."""
    if verdict.first is None:
        raise ValueError("the runs do not part")
    return Evidence(
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


def _fits(row: Cause, case: Evidence) -> bool:
    differing = not row.alike or bool(_differing(row, case))
    return case.first.kind in row.kinds and differing and row.fits(case)


def _differing(row: Cause, case: Evidence) -> list[Setting]:
    return [
        setting
        for setting in case.differing_knobs
        if any(fnmatchcase(setting.name, pattern) for pattern in row.alike)
    ]


def _alike(row: Cause, case: Evidence) -> list[Fix]:
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


def _holds(fix: Fix, case: Evidence) -> bool:
    if any(setting.name == fix.key for setting in case.differing_knobs):
        return False  # in force in one run only, or with two values
    value = case.value(fix.key)
    return fix.is_met_by(value)


def _sentence(row: Cause, case: Evidence) -> str:
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


def _may_hide_a_change(cause: Cause, case: Evidence, meta: Mapping[str, Any]) -> bool:
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


NO_EFFECT = "null"
"""What a trace has for a knob that was asked for and does not exist where it was recorded."""

_NOT_IN_A_KEY = re.compile(r"[^A-Za-z0-9_.-]")
"""What Hydra's grammar does not take in the key of a mapping."""

_MISREAD = re.compile(r".*_|true|false|null|nan|inf|.*\de[0-9-]+", re.IGNORECASE)
"""Keys that are taken for another value, or for an instruction such as ``_target_``."""


@dataclass(frozen=True, slots=True)
class Step:
    """A row of the ladder."""

    name: str
    values: tuple[Fix, ...]
    why: str
    """What it means if this makes the runs equal."""

    of_accelerator: bool = False
    """Whether it acts only where a device besides the CPU computes."""

    of_module: bool = False
    """Whether its key is a module, that of the divergence."""


@dataclass(frozen=True, slots=True)
class EscalationLevel:
    """What to add to a profile."""

    name: str
    overrides: tuple[str, ...]
    """Those of this rung and of all below it that are not in force yet."""

    why: str


LADDER: tuple[Step, ...] = (
    Step(
        "seeds",
        (
            Fix("seed", "1234", ANY_VALUE),
            Fix("dataloader.seeding", "auto"),
            Fix("env.PYTHONHASHSEED", "0", ANY_VALUE),
        ),
        "random numbers differed: something was not seeded",
    ),
    Step(
        "deterministic kernels",
        (
            Fix("backends.torch.deterministic_algorithms", "error"),
            Fix("backends.torch.fill_uninitialized_memory", "true"),
            Fix("backends.torch.inductor_deterministic", "true"),
            Fix("backends.cudnn.benchmark", "false"),
            Fix("backends.cudnn.deterministic", "true"),
            Fix("backends.cpu.mkldnn_deterministic", "true"),
            Fix("env.CUBLAS_WORKSPACE_CONFIG", ":4096:8", (":16:8",)),
            Fix("env.NCCL_ALGO", "Ring", ANY_VALUE),
            Fix("env.NCCL_PROTO", "Simple", ANY_VALUE),
            Fix("env.HCCL_DETERMINISTIC", '"true"', ("true", "strict")),
            # An op that raises would end the climb, and one that did not raise needs no other way.
            Fix("device.fallback", "cpu", ("error",)),
        ),
        "a kernel added up in varying order",
    ),
    Step(
        "no loader workers",
        (Fix("dataloader.num_workers", "0"),),
        "the loader's workers gave other data",
    ),
    Step(
        "no dropout",
        (Fix("dropout", "zero"),),
        "dropout drew other masks",
    ),
    Step(
        "random numbers from the host",
        (Fix("device.rng", "host"),),
        "the device's own generator gave other numbers",
        of_accelerator=True,
    ),
    Step(
        "the suspect module on the CPU",
        (Fix("device.modules", "cpu"),),
        "the device computes that module in varying order",
        of_accelerator=True,
        of_module=True,
    ),
)


def next_rung(
    profile_values: Mapping[str, Any], divergence: Divergence | None = None, accelerator: str = ""
) -> EscalationLevel | None:
    """Return the first rung that a profile is not on yet; None at the top.

    `profile_values` are those of a resolved profile; `accelerator` is the type of device that
    computes besides the CPU, or empty.
    """
    return next(rungs(profile_values, divergence, accelerator), None)


def rung_above_recording(
    meta: Mapping[str, Any], divergence: Divergence | None = None
) -> EscalationLevel | None:
    """Return the first rung that a recorded run was not on yet, by what its trace says of it."""
    return next_rung(_in_force(meta.get("knobs") or {}), divergence, accelerator(meta))


def _in_force(knobs: Mapping[str, str]) -> Mapping[str, str]:
    """Return the values of a profile by the text of its knobs, one of those that a key sets."""
    found: dict[str, str] = {}
    for knob in CATALOGUE:
        text = knobs.get(knob.name)
        if text is not None and found.get(knob.profile_key, NO_EFFECT) == NO_EFFECT:
            found[knob.profile_key] = text
    return found


def rungs(
    profile_values: Mapping[str, Any], divergence: Divergence | None = None, accelerator: str = ""
) -> Iterator[EscalationLevel]:
    """Yield the rungs above a profile from the lowest, each with the overrides of those below."""
    given = flatten(profile_values)
    climbed: tuple[str, ...] = ()
    for step in LADDER:
        missing = _overrides(step, given, divergence) if _helps(step, accelerator) else ()
        if missing:
            climbed += missing
            yield EscalationLevel(step.name, climbed, step.why)


def _helps(step: Step, accelerator: str) -> bool:
    return bool(accelerator) or not step.of_accelerator


def _overrides(
    step: Step, given: Mapping[str, Any], divergence: Divergence | None
) -> tuple[str, ...]:
    if step.of_module:
        return _of_module(step.values[0], given, divergence)
    return tuple(
        f"{each.key}={each.value}" for each in step.values if not _already_set(each, given)
    )


def _of_module(
    value: Fix, given: Mapping[str, Any], divergence: Divergence | None
) -> tuple[str, ...]:
    module = divergence.module if divergence else ""
    if not _can_be_placed(module) or _pattern(module) in (given.get(value.key) or {}):
        return ()
    return (f"{value.key}={{{_pattern(module)}: {value.value}}}",)


def _pattern(module: str) -> str:
    """Return `module` as a key of `device.modules`, a pattern in which ? is any letter."""
    key = _NOT_IN_A_KEY.sub("?", module)
    return f"{key[:-1]}?" if _MISREAD.fullmatch(key) else key


def _can_be_placed(module: str) -> bool:
    """Whether `module` is a path within a model; a model as a whole goes by its class."""
    return bool(module) and ("." in module or not module[:1].isupper())


def _already_set(each: Fix, given: Mapping[str, Any]) -> bool:
    value = given.get(each.key)
    if value is None:
        return False
    if isinstance(value, Mapping):
        return True  # decided op by op: whoever wrote that has decided
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return each.is_met_by(text, NO_EFFECT)
