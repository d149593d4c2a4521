"""The likely cause of a divergence, the knob against it, and levels of stricter settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from shlex import quote
from typing import TYPE_CHECKING, Any

from torchrepro.knobs.catalogue import CATALOGUE, knobs_by_name
from torchrepro.policies.deterministic_ops import row_of
from torchrepro.profile.resolved import flatten
from torchrepro.seeding.uncontrolled import ENTROPY
from torchrepro.trace.format import BY_PROGRAM
from torchrepro.verdict.evidence import (
    COARSE,
    ESCALATION,
    HASHES,
    MAIN_THREADS,
    NO_VALUE,
    NOT_ALIKE,
    RULES,
    Evidence,
    Fix,
    accelerator,
    short,
    uses,
)
from torchrepro.verdict.value import UNKNOWN_PROGRAM, Advice, Kind

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from torchrepro.verdict.evidence import Rule
    from torchrepro.verdict.value import Divergence, Program, Setting, UncontrolledRead, Verdict


_FEW, _FEW_SUSPECTS = 3, 2  # settings and suspects that a sentence names

_LEFT_OPEN = {
    "seeded": "promises the same random numbers and no more",
    "aligned": "promises the same numbers within a tolerance, not the same bits",
}
"""What a guarantee leaves open."""

_STRICT = "`debug-strict` (repeatable) promises the same bits on one machine"


def advice(
    verdict: Verdict, meta: Mapping[str, Any] | None = None, command: str = ""
) -> Advice | None:
    """Return the likely cause of the first divergence and what to try; None if there is none.

    `meta` is that of one of the traces: it names the profile and the knobs that were in force.
    `command` is the program's command line, as a shell takes it.
    """
    if verdict.first is None:
        return None
    meta = meta or {}
    evidence = evidence_of(verdict, meta)
    rule = next(row for row in RULES if evidence.fits(row))
    suspicion = _suspicion(evidence)
    cause, edit = (
        _worded(text, rule, evidence, suspected=suspicion is not None)
        for text in (rule.cause, rule.edit)
    )
    # A recording without `detail` fingerprints what an op writes once in a step.
    may_hide_a_change = (
        rule.kernel
        and not (rule.knobs or evidence.tolerance or evidence.holds("has_other_dtypes"))
        and evidence.holds("reads_written_memory")
        and "detail" in meta
        and not meta["detail"]
    )
    if may_hide_a_change:
        cause = f"{cause.removesuffix('.')}; or an input was changed outside torch in mid-step."
    started = evidence.started_threads
    if rule.kernel and started is not None:
        edit = edit or edit_at(started)
        cause = f"{cause.removesuffix('.')}; or a thread ({short(started.where)}) changed it."
    fixes = (*_common_values(rule, evidence), *rule.fixes)
    fixes = tuple(fix for fix in fixes if uses(evidence.program, fix.needs))
    open_fixes = [fix for fix in fixes if not _in_force(fix, evidence)]
    if rule.by_program and suspicion is not None:
        sentence, suspected_edit, is_sure = suspicion
        cause = f"{cause} {sentence}"
        open_fixes = [] if is_sure else open_fixes
        edit = edit if open_fixes else suspected_edit
    elif fixes and not open_fixes:
        cause += f" Already set, without effect: {', '.join(fix.key for fix in fixes)}."
    fix = open_fixes[0] if open_fixes else None
    closer = ""
    if rule.rerecord:
        closer = _rerecord_command(verdict, meta, command, detail=may_hide_a_change)
    return Advice(
        cause=cause,
        knob=fix.key if fix else "",
        setting=f"{fix.key}={fix.value}" if fix else "",
        closer=closer,
        promise=_promise(verdict, meta),
        edit=edit,
    )


def evidence_of(verdict: Verdict, meta: Mapping[str, Any]) -> Evidence:
    """Return the first divergence of `verdict`, which has one, with what `meta` holds."""
    if verdict.first is None:
        raise ValueError("the runs do not diverge")
    return Evidence(
        verdict.first,
        verdict.settings,
        meta.get("knobs") or {},
        accelerator(meta),
        tolerance=verdict.tolerance is not None,
        program=verdict.program,
        file=str(meta.get("program") or ""),
    )


def _suspicion(evidence: Evidence) -> tuple[str, str, bool] | None:
    """Return what the program had read that may explain the difference.

    This is a sentence, what to write instead, and whether a setting cannot help: most programs
    read a clock, and only to measure.
    """
    if evidence.other_seeds:
        seed = evidence.other_seeds[0]
        sentence = (
            f"{seed.name} at {short(seed.where)} was given another seed in each run: "
            f"{seed.left} and {seed.right}."
        )
        return sentence, edit_at(seed), True
    suspects = evidence.suspects[:_FEW_SUSPECTS]
    if not suspects:
        return None
    read = " and ".join(f"{one.what} ({one.name} at {short(one.where)})" for one in suspects)
    is_sure = suspects[0].what == ENTROPY or evidence.is_at(suspects[0])
    return f"It reads {read}.", edit_at(suspects[0]), is_sure


def edit_at(read: UncontrolledRead) -> str:
    """Return what to write instead of a read that no seed decides, and where."""
    return f"{read.instead} ({short(read.where)})"


def _promise(verdict: Verdict, meta: Mapping[str, Any]) -> str:
    """Return which profile promises equal runs, if the profile of one of them does not."""
    first = verdict.first
    if first is None or first.kind in (Kind.ENDED, Kind.RANDOM, Kind.INCOMPARABLE):
        return ""
    left = {name: meta.get(name) for name in ("guarantee", "profile")}
    unequal = {each.name: each.right for each in verdict.settings}
    for its in (left, {name: unequal.get(name, value) for name, value in left.items()}):
        if its["guarantee"] is None:
            return f"no profile was in force, so nothing was promised; {_STRICT}"
        if its["guarantee"] == "seeded" or (
            its["guarantee"] == "aligned" and verdict.tolerance is None
        ):
            profile = f"`{its['profile']}` ({its['guarantee']})"
            return f"{profile} {_LEFT_OPEN[its['guarantee']]}; {_STRICT}"
    return ""


def _common_values(rule: Rule, evidence: Evidence) -> list[Fix]:
    found = []
    for setting in evidence.differing_knobs_of(rule.knobs):
        knob = knobs_by_name().get(setting.name)
        values = [str(each) for each in (setting.left, setting.right) if each not in NO_VALUE]
        if values:
            is_text = knob is not None and knob.variable and not values[0].isdigit()
            value = f'"{values[0]}"' if is_text else values[0]
            found.append(Fix(knob.profile_key if knob else setting.name, value))
    return found


def _in_force(fix: Fix, evidence: Evidence) -> bool:
    if any(setting.name == fix.key for setting in evidence.differing_knobs):
        return False  # in force in one run only, or with two values
    return fix.is_met_by(evidence.value(fix.key))


def _worded(sentence: str, rule: Rule, evidence: Evidence, *, suspected: bool) -> str:
    known, first = row_of(evidence.op), evidence.first
    threads = [first.thread, *first.writers]
    others = dict.fromkeys(name for name in threads if name not in MAIN_THREADS)
    loader = evidence.own_worker_init
    seeded = evidence.value("dataloader.seeding") == "auto"
    sets = "" if _in_force(HASHES, evidence) else ", the order of a set"
    generic = f": a generator of its own, the clock, an address, the order of files{sets}"
    return sentence.format(
        op=first.op or "it",
        values=COARSE.get(first.op, "values"),
        module=first.module,
        threads=f"thread{'s' * (len(others) > 1)} {', '.join(others)}",
        accelerator=evidence.accelerator,
        instead=known.instead if known else "",
        settings=_listed(evidence.differing_knobs_of(rule.knobs) or evidence.differing_platform),
        what=first.what,
        programs=_programs(evidence),
        worker_init=worker_init_sentence(loader.worker_init_fn, seeded=seeded) if loader else "",
        worker_init_edit=worker_init_edit(seeded=seeded),
        generic="" if suspected else generic,
    )


def worker_init_sentence(worker_init_fn: str, *, seeded: bool) -> str:
    """Return what a program's own `worker_init_fn`, ``name at file:line``, means for its seeds.

    `seeded` says whether torchrepro seeds the loaders whose author seeded nothing.
    """
    name, _, where = worker_init_fn.partition(" at ")
    left = ", so torchrepro leaves the workers' seeds to it" if seeded else ""
    return f"{name}{f' at {short(where)}' if where else ''} is its worker_init_fn{left}."


def worker_init_edit(*, seeded: bool) -> str:
    """Return what to do about a `worker_init_fn` that seeds from something that varies."""
    seeds = "torchrepro then seeds the workers" if seeded else "torch seeds the workers"
    return (
        f"remove `worker_init_fn=` from the loader ({seeds}), or have it seed from "
        "torch.initial_seed()"
    )


def _programs(evidence: Evidence) -> str:
    named = next((each for each in evidence.settings if each.name == "program"), None)
    files = {short(each) for each in (named and named.left, named and named.right) if each}
    return " and ".join(sorted(files)) if len(files) > 1 else f"two texts of {short(evidence.file)}"


def _listed(settings: Sequence[Setting]) -> str:
    values = [["not set" if x is None else x for x in (e.left, e.right)] for e in settings]
    shown = [f"{e.name} {' and '.join(x)}" for e, x in zip(settings, values, strict=True)]
    rest = [f"{len(shown) - _FEW} more"] if len(shown) > _FEW else []
    return "; ".join([*shown[:_FEW], *rest])


def steps_to_record(verdict: Verdict) -> tuple[int, int]:
    """Return the first and the last step that show a divergence if they are recorded in full.

    They begin with a step in which the runs agree: what it leaves behind tells a change between
    two steps from one within a step. They end with the step after the divergence.
    """
    first, agreed = verdict.first, verdict.agreed
    if first is None:
        raise ValueError("the runs do not diverge")
    begins = max(first.step - 1, 0)
    if agreed is not None and first.kind is Kind.UNSEEN:
        begins = agreed.in_full or 0
    elif agreed is not None and first.op in COARSE:
        begins = agreed.step
    return begins, first.step + 1


def _is_seen_in_full(verdict: Verdict, first: Divergence) -> bool:
    """Whether both runs hold all ops of the step of the divergence and of the one before it."""
    agreed = verdict.agreed
    if verdict.compared.level != "op" or first.is_at_the_latest or first.kind is Kind.UNSEEN:
        return False
    if agreed is None:
        return first.step == 0
    return agreed.then_in_full and agreed.in_full == first.step - 1


def _rerecord_command(
    verdict: Verdict, meta: Mapping[str, Any], command: str, *, detail: bool
) -> str:
    first = verdict.first
    if first is None or (first.elements and not detail) or first.kind is Kind.ENDED:
        return ""
    if meta.get("detail"):
        return ""  # these recordings are the closer look
    if command and not meta.get("profile"):
        return ""  # `verify` ran it as it is, which `run` cannot
    keep = ""
    if _is_seen_in_full(verdict, first):
        # Where the step is still to be found, whole tensors of many steps would fill the disk.
        kept = any(fnmatchcase(first.module, str(each)) for each in meta.get("keep") or ())
        keep = "" if kept else first.module
        if not (keep or detail):
            return ""
    folder, steps = verdict.left.rstrip("/") + "-closer", steps_to_record(verdict)
    if meta.get("recorded_by") == BY_PROGRAM and not command:
        more = f", keep={[keep]!r}" if keep else ""
        return f"torchrepro.record({folder!r}, steps={steps}{more}{', detail=True' * detail})"
    return (
        f"torchrepro run {quote(str(meta.get('profile') or 'PROFILE'))}"
        f" --record {quote(folder)} --steps {steps[0]}:{steps[1]}"
        f"{f' --keep {quote(keep)}' if keep else ''}{' --detail' * detail}"
        f" -- {command or meta.get('command_hint') or 'COMMAND'}"
    )


NO_EFFECT = "null"
"""What a trace has for a knob that was requested and did not exist where it was recorded."""

_NOT_IN_A_KEY = re.compile(r"[^A-Za-z0-9_.-]")
"""Characters that Hydra's grammar does not take in the key of a mapping."""

_MISREAD = re.compile(r".*_|true|false|null|nan|inf|.*\de[0-9-]+", re.IGNORECASE)
"""Keys that are taken for another value, or for an instruction such as ``_target_``."""


@dataclass(frozen=True, slots=True)
class EscalationLevel:
    """What to add to a profile."""

    name: str
    overrides: tuple[str, ...]
    """The overrides of this level and of all below it that are not in force yet."""

    why: str


def next_level(
    profile_values: Mapping[str, Any],
    divergence: Divergence | None = None,
    program: Program = UNKNOWN_PROGRAM,
    done: Collection[str] = (),
) -> EscalationLevel | None:
    """Return the first level that a profile does not reach and that can help; None if none can.

    `profile_values` are those of a resolved profile; levels named in `done` are left out. A level
    can help if it is about the kind of `divergence`, and about something that `program` uses.
    """
    levels = levels_above(profile_values, divergence, program)
    return next((level for level in levels if level.name not in done), None)


def next_level_of_recording(verdict: Verdict, meta: Mapping[str, Any]) -> EscalationLevel | None:
    """Return the first level that a recorded run did not reach, by the meta of its trace.

    None for runs that no profile can make equal.
    """
    if any(each.name in NOT_ALIKE for each in verdict.settings):
        return None
    knobs = meta.get("knobs") or {}
    values: dict[str, str] = {}
    for knob in CATALOGUE:  # several knobs may have one key: one with an effect says most
        text = knobs.get(knob.name)
        if text is not None and values.get(knob.profile_key, NO_EFFECT) == NO_EFFECT:
            values[knob.profile_key] = text
    return next_level(values, verdict.first, verdict.program)


def levels_above(
    profile_values: Mapping[str, Any],
    divergence: Divergence | None = None,
    program: Program = UNKNOWN_PROGRAM,
) -> Iterator[EscalationLevel]:
    """Yield the levels above a profile from the lowest, each with the overrides of those below."""
    values = flatten(profile_values)
    overrides: tuple[str, ...] = ()
    may_be_any = divergence and (divergence.op in COARSE or divergence.kind is Kind.ENDED)
    for row in ESCALATION:
        if not uses(program, row.needs):
            continue
        if not (divergence is None or may_be_any or Evidence(divergence).holds(row.helps)):
            continue
        if row.of_module:
            missing = _module_override(row.fixes[0], values, divergence)
        else:
            felt = (fix for fix in row.fixes if uses(program, fix.needs))
            missing = tuple(f"{fix.key}={fix.value}" for fix in felt if not _is_set(fix, values))
        if missing:
            overrides += missing
            yield EscalationLevel(row.name, overrides, row.why)


def _module_override(
    fix: Fix, values: Mapping[str, Any], divergence: Divergence | None
) -> tuple[str, ...]:
    module = divergence.module if divergence else ""
    if not module or ("." not in module and module[0].isupper()):
        return ()
    # As a key of `device.modules` it is a pattern, in which ? is any character.
    pattern = _NOT_IN_A_KEY.sub("?", module)
    if _MISREAD.fullmatch(pattern):
        pattern = f"{pattern[:-1]}?"
    decided = pattern in (values.get(fix.key) or {})
    return () if decided else (f"{fix.key}={{{pattern}: {fix.value}}}",)


def _is_set(fix: Fix, values: Mapping[str, Any]) -> bool:
    value = values.get(fix.key)
    if value is None or isinstance(value, Mapping):
        return value is not None  # a mapping was decided op by op
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text == NO_EFFECT or fix.is_met_by(text)
