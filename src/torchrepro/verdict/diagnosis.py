"""The likely cause of a divergence, the edit against it, and levels of stricter settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from shlex import quote
from typing import TYPE_CHECKING, Any, TypeAlias

from torchrepro.policies.deterministic_ops import row_of
from torchrepro.profile.resolved import flatten
from torchrepro.trace.format import BY_PROGRAM
from torchrepro.verdict.evidence import (
    COARSE,
    ESCALATION,
    MAIN_THREADS,
    RULES,
    Evidence,
    Fix,
    accelerator,
    short,
    uses,
)
from torchrepro.verdict.program_text import VaryingLine, edit_of
from torchrepro.verdict.value import UNKNOWN_PROGRAM, Advice, Kind

if TYPE_CHECKING:
    from torchrepro.verdict.evidence import Rule
    from torchrepro.verdict.value import (
        Divergence,
        Program,
        SeedSource,
        Setting,
        UncontrolledRead,
        Verdict,
    )


Suspect: TypeAlias = "UncontrolledRead | SeedSource | VaryingLine"
"""A line that may be why runs differ: what was heard of it, or what its text says."""

_FEW = 3  # settings that a sentence names


def advice(
    verdict: Verdict, meta: Mapping[str, Any] | None = None, command: str = ""
) -> Advice | None:
    """Return the likely cause of the first divergence and the edit against it; None if none.

    `meta` is that of one of the traces: it names the profile and the knobs that were in force.
    `command` is the program's command line, as a shell takes it. What was heard to be read comes
    before any rule. No setting is proposed: whether one helps is known once it was tried.
    """
    if verdict.first is None:
        return None
    meta = meta or {}
    evidence = evidence_of(verdict, meta)
    rule = rule_of(evidence)
    # A recording without `detail` fingerprints what an op writes once in a step.
    may_hide_a_change = (
        rule.kernel
        and not (rule.knobs or evidence.tolerance or evidence.holds("has_other_dtypes"))
        and evidence.holds("reads_written_memory")
        and "detail" in meta
        and not meta["detail"]
    )
    closer = ""
    if rule.rerecord:
        closer = _rerecord_command(verdict, meta, command, detail=may_hide_a_change)
    suspect = None
    if rule.by_program or (evidence.other_seeds and rule.rerecord and not rule.kernel):
        suspect = prime_suspect(evidence)
    if suspect is not None:
        is_seed = bool(evidence.other_seeds)
        cause = cause_of(suspect, evidence.other_seeds[:1])
        edit = edit_of(suspect.what, suspect.name, suspect.where, is_seed=is_seed)
        return Advice(cause=cause, edit=edit, closer=closer)
    cause = cause_by_rule(evidence)
    if may_hide_a_change:
        cause = f"{cause.removesuffix('.')}; or an input was changed outside torch in mid-step."
    started = evidence.started_threads
    if rule.kernel and started is not None:
        cause = f"{cause.removesuffix('.')}; or a thread ({short(started.where)}) changed it."
    return Advice(cause=cause, closer=closer)


def rule_of(evidence: Evidence) -> Rule:
    """Return the first rule of the table that may say why the runs diverge."""
    return next(row for row in RULES if evidence.fits(row))


def prime_suspect(evidence: Evidence) -> Suspect | None:
    """Return the read that most likely explains a divergence that the program itself brings in.

    That is what a seed was made from that differs, then what the line of the divergence reads, and
    then all else, the surest first.
    """
    for seed in evidence.other_seeds:
        return seed.source or seed
    return next(iter(evidence.suspects), None)


def cause_of(read: Suspect, seeds: Sequence[UncontrolledRead] = ()) -> str:
    """Return as a sentence that a read explains a divergence, and the seed that came from it."""
    sentence = f"{read.what[:1].upper()}{read.what[1:]}: {read.name} at {short(read.where)}"
    for seed in seeds:
        at = "" if seed is read else f" {seed.name} at {short(seed.where)}"
        sentence += f"; the seed of{at or ' it'} is {seed.left} in A and {seed.right} in B"
    return f"{sentence}."


def open_fixes(evidence: Evidence) -> list[Fix]:
    """Return the settings that may help by the rule that fits, the likeliest first."""
    fixes = (fix for fix in rule_of(evidence).fixes if uses(evidence.program, fix.needs))
    return [fix for fix in fixes if not fix.is_met_by(evidence.value(fix.key))]


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


def cause_by_rule(evidence: Evidence) -> str:
    """Return the cause that the table knows for such a divergence, as a sentence."""
    rule = rule_of(evidence)
    known, first = row_of(evidence.op), evidence.first
    threads = [first.thread, *first.writers]
    others = dict.fromkeys(name for name in threads if name not in MAIN_THREADS)
    loader = evidence.own_worker_init
    seeded = evidence.value("dataloader.seeding") == "auto"
    named = next((each for each in evidence.settings if each.name == "program"), None)
    files = {short(each) for each in (named and (named.left, named.right)) or () if each}
    files = files if len(files) > 1 else set()
    return rule.cause.format(
        op=first.op or "it",
        values=COARSE.get(first.op, "values"),
        module=first.module,
        threads=f"thread{'s' * (len(others) > 1)} {', '.join(others)}",
        accelerator=evidence.accelerator,
        instead=known.instead if known else "",
        settings=_listed(evidence.differing_knobs_of(rule.knobs) or evidence.differing_platform),
        what=first.what,
        programs=" and ".join(sorted(files)) or f"two texts of {short(evidence.file)}",
        worker_init=worker_init_sentence(loader.worker_init_fn, seeded=seeded) if loader else "",
    )


def worker_init_sentence(worker_init_fn: str, *, seeded: bool) -> str:
    """Return what a program's own `worker_init_fn`, ``name at file:line``, means for its seeds.

    `seeded` says whether torchrepro seeds the loaders whose author seeded nothing.
    """
    name, _, where = worker_init_fn.partition(" at ")
    left = ", so torchrepro leaves the workers' seeds to it" if seeded else ""
    return f"{name}{f' at {short(where)}' if where else ''} is its worker_init_fn{left}."


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
    agreed = verdict.agreed
    # Whether both runs hold all ops of the step of the divergence and of the one before it.
    before = agreed.in_full if agreed and agreed.then_in_full else None
    is_known = verdict.compared.level == "op" and first.kind not in (Kind.VALUES, Kind.UNSEEN)
    if is_known and (before == first.step - 1 if agreed else first.step == 0):
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
