"""Diagnosis of a divergence: finds the likely cause by the table of rules in `diagnosis.yaml`.

The advice names the cause, and an edit of the program that removes it. If no such edit is known,
`verify --escalate` re-runs the program with settings that become stricter from level to level.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from torchrepro.ground.errors import ProfileError, some
from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.policies.deterministic_ops import row_of
from torchrepro.profile.resolved import flatten
from torchrepro.seeding.nondeterministic_calls import EXPLICIT_SEED, SUSPECTS, THREADS
from torchrepro.trace.format import (
    BY_PROGRAM,
    NEW_TENSOR,
    OPTIMIZER_STEP,
    PARTLY,
    UNINITIALIZED_INPUT,
)
from torchrepro.verdict.libraries import library_row, table_of
from torchrepro.verdict.program_text import edit_of
from torchrepro.verdict.render import short
from torchrepro.verdict.value import UNKNOWN_PROGRAM, Advice, Cause, Kind

if TYPE_CHECKING:
    from torchrepro.seeding.call_records import ObservedCall
    from torchrepro.trace.format import Site
    from torchrepro.verdict.value import (
        Divergence,
        LineOfOrigin,
        Loader,
        NondeterministicRead,
        Program,
        RunAtDivergence,
        Setting,
        Verdict,
    )

Suspect: TypeAlias = "ObservedCall"
"""A line that may be the cause, from an observed read or from a scan of the source."""

_TABLE = table_of("diagnosis.yaml")

OPS = {name: frozenset(text.split()) for name, text in _TABLE["ops"].items()}
"""Families of ops by name, as in `drawing`."""

DRAWING, DROPPING, MASKING, DROPPING_INSIDE, OVERWRITING, PLAIN = (
    OPS[name]
    for name in ("drawing", "dropping", "masking", "dropping_inside", "overwriting", "plain")
)

_IS_OF: Mapping[str, Callable[[str], object]] = {
    name: re.compile("".join(text.split())).fullmatch for name, text in _TABLE["patterns"].items()
} | {name: ops.__contains__ for name, ops in OPS.items()}
"""Family -> function that returns whether an op of this name belongs to the family."""


@dataclass(frozen=True, slots=True)
class Fix:
    """A setting that may remove a divergence: a key of a profile, and a value for it."""

    key: str
    value: str  # in the syntax of an override: words that YAML reads as booleans are quoted
    enough: Sequence[str] = ()  # other values that help too; ``*`` for any
    needs: str = ""  # the setting affects only programs with this feature (see `FEATURES`)

    def is_met_by(self, value: str | None) -> bool:
        return value is not None and ("*" in self.enough or value in (self.value, *self.enough))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A cause of divergences, with its conditions. `diagnosis.yaml` documents the fields."""

    cause: str
    page: str
    kinds: Sequence[str] = tuple(Kind.__members__)
    ops: Sequence[str] = ()
    device: str = ""
    fits: Sequence[str] = ()
    fixes: Sequence[Fix] = ()
    knobs: Sequence[str] = ()
    by_program: bool = False
    rerecord: bool = True
    kernel: bool = False  # whether an op returned two results for equal inputs


@dataclass(frozen=True, slots=True)
class EscalationRow:
    """A row of `ESCALATION`: settings that `verify --escalate` tries together."""

    name: str
    fixes: Sequence[Fix]
    helps: str  # the predicate for divergences that these settings may remove
    needs: str = ""  # as in `Fix`; ``device`` is any accelerator
    of_module: bool = False  # whether the setting is only for the module of the divergence


def _values(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "fixes": [Fix(**fix) for fix in row.get("fixes", ())]}


RULES = (
    *(Rule(**_values(row)) for row in _TABLE["rules"]),
    *(Rule(**_values(row), kernel=True) for row in _TABLE["kernel_rules"]),
)
ESCALATION = tuple(EscalationRow(**_values(row)) for row in _TABLE["escalation"])
"""Levels that `verify --escalate` tries, the mildest settings first."""

PAGES: Mapping[str, str] = _TABLE["pages"]
"""Causes that no rule states, such as a source of nondeterminism -> the names of their pages."""

OTHER_PATH, LIBRARY, CAME_IN = "another path", "a library call", "data from outside"
UNSEEDED, OWN_STATE, IS_COMPILED = "no seed", "the program's own state", "torch.compile"
"""Further keys of `PAGES`."""

DATALOADER = "DataLoader"
COARSE = {
    "parameter": "parameters",
    "gradient": "gradients",
    "module": "outputs of modules",
    "parameters": "parameters",
    "gradients": "gradients",
    "loss": "losses",
}
"""Records of the levels `module` and `step`, which have no ops, and their plurals in sentences."""


def op_name(op: str) -> str:
    """Return an op's name without namespace and overload: ``add`` for ``aten::add.Tensor``."""
    return op.rpartition("::")[2].partition(".")[0]


LOADER, WORKERS, DROPOUT, RANDOM_OPS = "loader", "loader workers", "dropout", "random ops"
FEATURES: Mapping[str, Callable[[Site], bool]] = {
    LOADER: lambda site: site.op == DATALOADER,
    DROPOUT: lambda site: op_name(site.op) in DROPPING | MASKING | DROPPING_INSIDE,
    RANDOM_OPS: lambda site: op_name(site.op) in DRAWING | DROPPING | DROPPING_INSIDE,
    "collectives": lambda site: site.phase == "collective",
}
"""Features of a program, and which records show that it uses them. Only `WORKERS` is missing: the
trace lists loaders with their workers."""

DEVICE = "device"
DEVICES = (DEVICE, "cuda", "npu")  # any accelerator, and the types that have their own settings


def uses(program: Program, feature: str) -> bool:
    """Whether a program may use a feature or a device. True for an empty name."""
    if feature in DEVICES:
        return feature == program.accelerator or (feature == DEVICE and bool(program.accelerator))
    return not feature or program.features is None or feature in program.features


def accelerator(meta: Mapping[str, Any]) -> str:
    """Return the type of accelerator of a recorded process, as in ``cuda``; empty if none."""
    hardware = meta.get("hardware") or {}
    return str(hardware.get("accelerator", "")).partition(" ")[0]


MAIN_THREADS = ("", "MainThread", "main")
PROGRAM_TEXT, RESUMED = "program_text", "resumed"
NOT_ALIKE = (PROGRAM_TEXT, RESUMED)
"""Settings that no profile makes equal: the runs have different programs or first steps."""

DECLARED = ("guarantee", "profile", "digest", "program", "level", *NOT_ALIKE)
"""Settings that name the program and the request. Their effects are separate settings."""

SET_BY = {"hardware: threads": "env.OMP_NUM_THREADS"}
"""Observed settings, and the knobs that set them."""

_NOT_SET, _PARTLY_SET = UNINITIALIZED_INPUT.hex(), PARTLY.hex()
_PROBABILITY = re.compile(r"(?<![=\w.])0?\.\d*[1-9]\d*")
NO_VALUE = (None, "", "-", "null", "None")


@dataclass(frozen=True, slots=True)
class Evidence:
    """The first divergence, with the facts about the two runs that diagnosis uses."""

    first: Divergence
    settings: tuple[Setting, ...] = ()  # the settings in which the runs differ
    meta: Mapping[str, Any] = field(default_factory=dict)  # metadata of one of the traces
    tolerance: bool = False  # whether statistics were compared rather than bits
    program: Program = UNKNOWN_PROGRAM
    origin: LineOfOrigin | None = None

    @property
    def op(self) -> str:
        return op_name(self.first.op)

    @property
    def namespace(self) -> str:
        """The namespace of the op, as in ``aten``; empty if the record is not an op of torch."""
        return self.first.op.rpartition("::")[0]

    @property
    def sides(self) -> tuple[RunAtDivergence, ...]:
        return tuple(run for run in (self.first.left, self.first.right) if run is not None)

    @property
    def read(self) -> set[str]:
        """The fingerprints of all inputs that the op read in the two runs."""
        return {text for run in self.sides for text in run.input_fingerprints}

    @property
    def earlier_reads(self) -> tuple[NondeterministicRead, ...]:
        """Nondeterministic reads before the divergence, the latest first."""
        position = self.first.step, self.first.record
        earlier = [read for read in self.program.reads if (read.step, read.record) <= position]
        return tuple(reversed(earlier))

    @property
    def differing_seeds(self) -> tuple[NondeterministicRead, ...]:
        """Lines whose seeds differ between the runs, up to the divergence, the latest first."""
        return tuple(read for read in self.earlier_reads if read.is_differing_seed)

    @property
    def suspects(self) -> list[NondeterministicRead]:
        """Nondeterministic reads that may have caused the divergence, the likeliest first.

        Reads on the line of origin come first. If no origin is known, reads on the line of the
        divergence come first. If the origin is certain, reads that are not on the path from the
        origin to the divergence are skipped, because they may differ without an effect.
        """
        lines = {short(run.source) for run in self.sides}
        reads = [read for read in self.earlier_reads if read.what in SUSPECTS]
        if self.origin is not None:
            if self.origin.is_sure:
                path = (*self.origin.path, *self.origin.within)
                reads = [read for read in reads if read.where in path]
                return sorted(reads, key=lambda read: path.index(read.where))
            lines = {short(location) for location in self.origin.lines}
        return sorted(
            reads, key=lambda read: (short(read.where) not in lines, SUSPECTS.index(read.what))
        )

    @property
    def own_worker_init(self) -> Loader | None:
        """The loader of the differing batch, if the program passed a `worker_init_fn` to it."""
        loaders = self.program.loaders
        with_init = (loader for loader in loaders if loader.workers and loader.worker_init_fn)
        return next((loader for loader in with_init if loader.where == self.first.source), None)

    @property
    def differing_knobs(self) -> tuple[Setting, ...]:
        """Differing settings that a profile can set: the knobs of the catalogue."""
        keys = {name for knob in CATALOGUE for name in (knob.name, knob.profile_key)}
        return tuple(
            {setting.name: setting for setting in self.settings if setting.name in keys}.values()
        )

    @property
    def differing_platform(self) -> tuple[Setting, ...]:
        """Differing settings that no profile can set: versions and hardware."""
        known = {*DECLARED, *(setting.name for setting in self.differing_knobs)}
        return tuple(setting for setting in self.settings if setting.name not in known)

    def differing_knobs_of(self, patterns: Iterable[str]) -> list[Setting]:
        return [
            setting
            for setting in self.differing_knobs
            if any(fnmatchcase(setting.name, pattern) for pattern in patterns)
        ]

    def holds(self, predicate: str) -> bool:
        """Whether a predicate of the table is true. ``not `` before the name negates it."""
        name = predicate.removeprefix("not ")
        return bool(PREDICATES[name](self)) == (name == predicate)

    def fits(self, rule: Rule) -> bool:
        device = accelerator(self.meta)
        return (
            self.first.kind.name in rule.kinds
            and (not rule.ops or any(_IS_OF[name](self.op) for name in rule.ops))
            and rule.device in ("", device or "cpu", "accelerator" if device else "")
            and (not rule.knobs or bool(self.differing_knobs_of(rule.knobs)))
            and all(map(self.holds, rule.fits))
        )

    def value(self, key: str) -> str | None:
        """Return the effective value of a knob or a profile key; None if it is not set.

        Booleans are returned as ``true`` and ``false``.
        """
        knobs = self.meta.get("knobs") or {}
        names = [key, *(knob.name for knob in CATALOGUE if knob.profile_key == key)]
        texts = [str(knobs[name]) for name in names if name in knobs]
        known = [text for text in texts if text not in NO_VALUE]
        return {"True": "true", "False": "false"}.get(known[0], known[0]) if known else None


def _is_race(case: Evidence) -> bool:
    first, writers = case.first, set(case.first.writers)
    # Backward ops normally run on a thread of autograd.
    on_another = first.thread not in MAIN_THREADS and first.phase != "backward"
    in_place = case.op.endswith("_") and not case.op.startswith("__")
    return (
        (on_another or bool(writers - set(MAIN_THREADS)))
        and (len(case.program.threads) != 1 or len({first.thread, *writers}) > 1)
        and (in_place or bool(writers) or first.kind in (Kind.INPUT, Kind.DATA))
        and not case.holds("is_made_outside")
    )


PREDICATES: Mapping[str, Callable[[Evidence], object]] = {
    "is_coarse": lambda case: case.first.op in COARSE or case.first.is_at_the_latest,
    "is_batch": lambda case: case.first.op == DATALOADER,
    "is_made_outside": lambda case: case.first.op in (DATALOADER, NEW_TENSOR),
    "is_optimizer_step": lambda case: (
        case.first.phase == "optimizer" and case.first.op.endswith(OPTIMIZER_STEP)
    ),
    "is_collective": lambda case: case.first.phase == "collective" or "c10d" in case.namespace,
    "carries_bytes": lambda case: any(run.outputs.startswith("uint8[") for run in case.sides),
    "is_compiled": lambda case: case.op == "compiled region" or case.namespace == "inductor",
    "is_custom_op": lambda case: case.namespace not in ("", "aten", "prims"),
    "known_nondeterministic": lambda case: row_of(case.op),  # torch lists it
    "drops": lambda case: (
        case.op in DROPPING | MASKING
        or (
            case.op in DROPPING_INSIDE
            and any(_PROBABILITY.search(run.argument) for run in case.sides)
        )
    ),
    "own_generator": lambda case: any("generator=Generator" in run.argument for run in case.sides),
    "nothing_is_seeded": lambda case: (
        case.value("seed.torch") is None
        and not any(read.what == EXPLICIT_SEED for read in case.earlier_reads)
    ),
    "is_race": _is_race,
    "some_outputs_agree": lambda case: any(
        len(values) > 1 and len(set(values)) == 1
        for values in zip(*(run.output_fingerprints for run in case.sides), strict=False)
    ),
    "reads_unwritten_memory": lambda case: (
        not (case.op in OVERWRITING or case.first.op.endswith("out"))
        and any(text.startswith((_NOT_SET, _PARTLY_SET)) for text in case.read)
    ),
    "reads_written_memory": lambda case: case.read - {_NOT_SET},
    "has_other_dtypes": lambda case: (
        len({tuple(re.findall(r"(\w+)\[", run.outputs)) for run in case.sides}) > 1
    ),
    "own_worker_init": lambda case: case.own_worker_init,
    "differing_platform": lambda case: case.differing_platform,
    "differs_beyond_random_numbers": lambda case: (
        len(case.differing_knobs_of(_TABLE["knobs"]["random_numbers"])) < len(case.differing_knobs)
    ),
    "is_other_program": lambda case: any(setting.name == PROGRAM_TEXT for setting in case.settings),
    "is_resumed": lambda case: any(setting.name == RESUMED for setting in case.settings),
    # Libraries choose kernels by instruction set.
    "is_other_processor": lambda case: any(
        setting.name == "hardware: instruction set" for setting in case.settings
    ),
    "both_were_cut": lambda case: case.first.both_were_cut,
    "tolerance": lambda case: case.tolerance,
    # Divergences that levels of escalation can remove: random numbers, results of kernels or
    # collectives, and data from the program or a loader.
    "is_random": lambda case: case.first.kind is Kind.RANDOM or case.op in DRAWING | DROPPING,
    "is_computed": lambda case: (
        case.first.phase == "collective"
        or (case.first.kind is Kind.OUTPUTS and not case.holds("is_random"))
    ),
    "is_brought_in": lambda case: case.first.kind in (Kind.DATA, Kind.ARGUMENT, Kind.ONLY_ONE),
    "is_of_program": lambda case: case.holds("is_brought_in") or case.holds("is_random"),
    "is_of_loader": lambda case: case.first.op == DATALOADER or case.first.kind is Kind.RANDOM,
}
"""Predicates for `fits` and `helps` of the table, each a function of the evidence of a case."""


def advice(
    verdict: Verdict, meta: Mapping[str, Any] | None = None, command: str = ""
) -> Advice | None:
    """Return the likely cause of the first divergence, and an edit that removes it if one is known.

    Returns None if the runs are the same. `meta` is the metadata of one of the traces, which has
    the profile and the knobs. `command` is the command line of the program in shell syntax. An
    observed read takes precedence over the rules. The advice proposes no settings, because only a
    re-run shows whether they help.
    """
    if verdict.first is None:
        return None
    meta = meta or {}
    evidence = evidence_of(verdict, meta)
    rule = rule_of(evidence)
    # Without `detail`, a recording fingerprints each tensor only once in a step.
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
    if rule.by_program or (evidence.differing_seeds and rule.rerecord and not rule.kernel):
        suspect = prime_suspect(evidence)
    if suspect is not None:
        is_seed = bool(evidence.differing_seeds)
        cause = cause_of(suspect, evidence.differing_seeds[:1])
        edit = edit_of(suspect.what, suspect.name, suspect.where, is_seed=is_seed)
        return Advice(cause.sentence, edit, closer=closer, cause_id=cause.page)
    cause = cause_by_evidence(evidence)
    if may_hide_a_change:
        cause = cause.or_else("an input was changed outside torch within the step")
    started = next((read for read in evidence.earlier_reads if read.what == THREADS), None)
    if rule.kernel and started is not None:
        cause = cause.or_else(f"a thread ({short(started.where)}) changed it")
    return Advice(cause.sentence, closer=closer, cause_id=cause.page)


def rule_of(evidence: Evidence) -> Rule:
    return next(row for row in RULES if evidence.fits(row))


def prime_suspect(evidence: Evidence) -> Suspect | None:
    """Return the read that most likely caused the divergence; None if no read is suspect.

    The source of a differing seed comes first, or the seed itself if its source is unknown. Other
    reads follow in the order of `Evidence.suspects`.
    """
    for seed in evidence.differing_seeds:
        return seed.source or seed
    return next(iter(evidence.suspects), None)


def cause_of(read: Suspect, seeds: Sequence[NondeterministicRead] = ()) -> Cause:
    """Return the cause that `read` is, with the values of the differing `seeds`."""
    sentence = f"{read.what[:1].upper()}{read.what[1:]}: {read.name} at {short(read.where)}"
    for seed in seeds:
        at = "" if seed is read else f" {seed.name} at {short(seed.where)}"
        sentence += f"; the seed of{at or ' it'} is {seed.left} in A and {seed.right} in B"
    return Cause(f"{sentence}.", PAGES[read.what])


def cause_by_line(origin: LineOfOrigin) -> Cause:
    """Return how the difference began at the line of origin."""
    out_of = [
        f"{value.name}{f', made at {short(value.made)}' if value.made else ''}"
        f"{f', changed at {short(value.changed)}' if value.changed else ''}"
        for value in origin.opaque
    ]
    inputs = "for the same arguments" if origin.same else "from a source other than its arguments"
    page = OTHER_PATH if origin.took_another_path else CAME_IN if origin.came_in else LIBRARY
    if origin.took_another_path:
        sentence = "The runs took different paths after this line, which had read equal values"
    elif origin.came_in:
        sentence = f"{origin.changed[0]} differs when this line reads it, and no followed line "
        sentence += "changed it"
    else:
        row = library_row(origin.called)
        sentence = f"{origin.called or 'This line'} returned a different result {inputs}"
        sentence += f": {row.leaves_open}" if row else ""
    return Cause(f"{sentence}{f'; it read {some(out_of)}' if out_of else ''}.", PAGES[page])


def open_fixes(evidence: Evidence) -> list[Fix]:
    """Return the fixes of the matching rule that may help and are not set, likeliest first."""
    fixes = (fix for fix in rule_of(evidence).fixes if uses(evidence.program, fix.needs))
    return [fix for fix in fixes if not fix.is_met_by(evidence.value(fix.key))]


def evidence_of(verdict: Verdict, meta: Mapping[str, Any]) -> Evidence:
    """Return the evidence on the first divergence. Raises ValueError if the runs do not diverge."""
    if verdict.first is None:
        raise ValueError("the runs do not diverge")
    settings = (
        replace(setting, name=SET_BY.get(setting.name, setting.name))
        for setting in verdict.settings
    )
    within = verdict.tolerance is not None
    return Evidence(verdict.first, tuple(settings), meta, within, verdict.program, verdict.origin)


def cause_by_evidence(evidence: Evidence) -> Cause:
    """Return the cause, from the line of origin if known, or else from the rules."""
    return cause_by_line(evidence.origin) if evidence.origin else _cause_by_rule(evidence)


def _cause_by_rule(evidence: Evidence) -> Cause:
    """Return the cause that the matching rule states, with all placeholders filled in."""
    rule = rule_of(evidence)
    known, first = row_of(evidence.op), evidence.first
    threads = [first.thread, *first.writers]
    other_threads = dict.fromkeys(name for name in threads if name not in MAIN_THREADS)
    loader = evidence.own_worker_init
    seeded = evidence.value("dataloader.seeding") == "auto"
    named = next((setting for setting in evidence.settings if setting.name == "program"), None)
    files = {short(text) for text in (named and (named.left, named.right)) or () if text}
    files = files if len(files) > 1 else set()
    program = str(evidence.meta.get("program") or "")
    sentence = rule.cause.format(
        op=first.op or "it",
        values=COARSE.get(first.op, "values"),
        module=first.module,
        threads=f"thread{'s' * (len(other_threads) > 1)} {', '.join(other_threads)}",
        accelerator=accelerator(evidence.meta),
        instead=known.instead if known else "",
        settings=_listed(evidence.differing_knobs_of(rule.knobs) or evidence.differing_platform),
        what=first.what,
        programs=" and ".join(sorted(files)) or f"two versions of {short(program)}",
        worker_init=worker_init_sentence(loader.worker_init_fn, seeded=seeded) if loader else "",
    )
    return Cause(sentence, rule.page)


def worker_init_sentence(worker_init_fn: str, *, seeded: bool) -> str:
    """Return a sentence on `worker_init_fn` (``name at file:line``), which a loader's workers call.

    `seeded` is whether torchrepro would seed the workers if the loader had no such function.
    """
    name, _, location = worker_init_fn.partition(" at ")
    left = ", which seeds the workers in place of torchrepro" if seeded else ""
    return f"{name}{f' at {short(location)}' if location else ''} is its worker_init_fn{left}."


_FEW = 3  # how many settings a sentence names


def _listed(settings: Sequence[Setting]) -> str:
    def text(value: str | None) -> str:
        return "not set" if value is None else value

    shown = [f"{row.name} {text(row.left)} and {text(row.right)}" for row in settings]
    rest = [f"{len(shown) - _FEW} more"] if len(shown) > _FEW else []
    return "; ".join([*shown[:_FEW], *rest])


def _rerecord_command(
    verdict: Verdict, meta: Mapping[str, Any], command: str, *, detail: bool
) -> str:
    first = verdict.first
    if first is None or (first.elements and not detail) or first.kind is Kind.ENDED:
        return ""
    if meta.get("detail"):
        return ""  # no recording has more detail than this one
    if command and not meta.get("profile"):
        return ""  # `verify` ran the command without a profile, but `run` needs one
    keep = ""
    agreed = verdict.agreed
    # The step is known if both runs have all of its ops and all ops of the step before it.
    before = agreed.in_full if agreed and agreed.then_in_full else None
    is_known = verdict.compared.level == "op" and first.kind not in (Kind.VALUES, Kind.UNSEEN)
    if is_known and (before == first.step - 1 if agreed else first.step == 0):
        # Keep tensors only if the step is known: the tensors of many steps would fill the disk.
        kept = any(fnmatchcase(first.module, str(pattern)) for pattern in meta.get("keep") or ())
        keep = "" if kept else first.module
        if not (keep or detail):
            return ""
    # Begin with a step in which the runs agree. The values at its end show whether something
    # changed between this step and the next.
    begins = max(first.step - 1, 0)
    if agreed is not None and first.kind is Kind.UNSEEN:
        begins = agreed.in_full or 0
    elif agreed is not None and first.op in COARSE:
        begins = agreed.step
    folder, steps = verdict.left.rstrip("/") + "-closer", (begins, first.step + 1)
    if meta.get("recorded_by") == BY_PROGRAM and not command:
        keep_argument = f", keep={[keep]!r}" if keep else ""
        return (
            f"torchrepro.record({folder!r}, steps={steps}{keep_argument}{', detail=True' * detail})"
        )
    return (
        f"torchrepro run {quote(str(meta.get('profile') or 'PROFILE'))}"
        f" --record {quote(folder)} --steps {steps[0]}:{steps[1]}"
        f"{f' --keep {quote(keep)}' if keep else ''}{' --detail' * detail}"
        f" -- {command or meta.get('command_hint') or 'COMMAND'}"
    )


_NOT_IN_A_KEY = re.compile(r"[^A-Za-z0-9_.-]")
"""Characters that Hydra's grammar does not allow in the key of a mapping."""


class EscalationLevel(NamedTuple):
    """A level of escalation: overrides to add to a profile."""

    name: str
    overrides: tuple[str, ...]  # for this level and all lower levels, if not set yet


def levels_above(
    profile_values: Mapping[str, Any], divergence: Divergence, program: Program = UNKNOWN_PROGRAM
) -> Iterator[EscalationLevel]:
    """Yield the escalation levels that may help and would change a profile, the lowest first."""
    values = flatten(profile_values)
    overrides: tuple[str, ...] = ()
    may_be_any = divergence.op in COARSE or divergence.kind is Kind.ENDED
    for row in ESCALATION:
        helps = may_be_any or Evidence(divergence).holds(row.helps)
        if not (helps and uses(program, row.needs)):
            continue
        if row.of_module:
            missing = _module_override(row.fixes[0], values, divergence.module)
        else:
            felt = (fix for fix in row.fixes if uses(program, fix.needs))
            missing = tuple(f"{fix.key}={fix.value}" for fix in felt if not _is_set(fix, values))
        if missing:
            overrides += missing
            yield EscalationLevel(row.name, overrides)


def _module_override(fix: Fix, values: Mapping[str, Any], module: str) -> tuple[str, ...]:
    if not module or ("." not in module and module[0].isupper()):
        return ()
    # Keys of `device.modules` are patterns; ``?`` matches any character.
    pattern = _NOT_IN_A_KEY.sub("?", module)
    if not _is_read_as_it_is(pattern):
        pattern = f"{pattern[:-1]}?"
    decided = pattern in (values.get(fix.key) or {})
    return () if decided else (f"{fix.key}={{{pattern}: {fix.value}}}",)


def _is_read_as_it_is(key: str) -> bool:
    # False for `0.` (which is read as 0.0), for null, and for instructions such as `_target_`.
    from torchrepro.profile.load import parsed  # late: comparisons alone do not need it

    try:
        return [*parsed(f"read={{{key}: 0}}")["read"]] == [key]
    except ProfileError:
        return False


def _is_set(fix: Fix, values: Mapping[str, Any]) -> bool:
    value = values.get(fix.key)
    if value is None or isinstance(value, Mapping):
        return value is not None  # a mapping already decides for each op
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text == "null" or fix.is_met_by(text)  # null: this platform has no such knob
