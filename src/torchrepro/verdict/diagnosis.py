"""Why two runs diverge: the table `diagnosis.yaml`, the predicates that it names, and the advice.

With the cause comes the edit against it. Levels of stricter settings are for what has none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import yaml

from torchrepro.ground.errors import ProfileError
from torchrepro.ground.messages import some
from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.policies.deterministic_ops import row_of
from torchrepro.profile.resolved import flatten
from torchrepro.seeding.nondeterministic_calls import GIVEN_SEED, SUSPECTS, THREADS
from torchrepro.trace.format import (
    BY_PROGRAM,
    NEW_TENSOR,
    OPTIMIZER_STEP,
    PARTLY,
    UNINITIALISED,
)
from torchrepro.verdict.libraries import library_row
from torchrepro.verdict.program_text import edit_of
from torchrepro.verdict.render import short
from torchrepro.verdict.value import UNKNOWN_PROGRAM, Advice, Kind

if TYPE_CHECKING:
    from torchrepro.trace.format import Site
    from torchrepro.verdict.value import (
        Divergence,
        LineOfOrigin,
        Loader,
        Program,
        RunAtDivergence,
        SeedSource,
        Setting,
        UncontrolledRead,
        Verdict,
    )

Suspect: TypeAlias = "UncontrolledRead | SeedSource"
"""A line that may be why runs differ: what was heard of it, or what its text says."""

_TABLE: Mapping[str, Any] = yaml.load(
    Path(__file__).with_name("diagnosis.yaml").read_text(encoding="utf-8"),
    getattr(yaml, "CSafeLoader", yaml.SafeLoader),  # noqa: S506 - both are safe, one is quick
)

OPS = {name: frozenset(text.split()) for name, text in _TABLE["ops"].items()}
"""Families of ops by name, as in `drawing`."""

DRAWING, DROPPING, MASKING, DROPPING_INSIDE, OVERWRITING, PLAIN = (
    OPS[name]
    for name in ("drawing", "dropping", "masking", "dropping_inside", "overwriting", "plain")
)

_SUMMING: Mapping[str, str] = _TABLE["patterns"]
_IS_OF: Mapping[str, Callable[[str], object]] = {
    **{name: ops.__contains__ for name, ops in OPS.items()},
    **{
        name: re.compile("".join(text.split())).fullmatch
        for name, text in {
            **_SUMMING,
            "summing": "|".join(f"(?:{text})" for text in _SUMMING.values()),
        }.items()
    },
}  # whether the op of a name is of a family


@dataclass(frozen=True, slots=True)
class Fix:
    """A key of a profile and the value that helps."""

    key: str
    value: str  # as an override writes it: a word that YAML takes for a boolean is in quotes
    enough: Sequence[str] = ()  # other values that help as well; ``*`` for any
    needs: str = ""  # the feature without which the program cannot feel it (see `FEATURES`)

    def is_met_by(self, value: str | None) -> bool:
        return value is not None and ("*" in self.enough or value in (self.value, *self.enough))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A reason for two runs to diverge, and when it applies. The table says what fields mean."""

    cause: str
    kinds: Sequence[str] = tuple(Kind.__members__)
    ops: Sequence[str] = ()
    device: str = ""
    fits: Sequence[str] = ()
    fixes: Sequence[Fix] = ()
    knobs: Sequence[str] = ()
    by_program: bool = False
    rerecord: bool = True
    kernel: bool = False  # whether an op gave two results for equal inputs


@dataclass(frozen=True, slots=True)
class EscalationRow:
    """Settings that are tried together."""

    name: str
    fixes: Sequence[Fix]
    helps: str  # the predicate that says whether it can help
    needs: str = ""  # as of a `Fix`; an accelerator is ``device``
    of_module: bool = False  # whether its key is a module, that of the divergence


def _values(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "fixes": [Fix(**each) for each in row.get("fixes", ())]}


RULES = (
    *(Rule(**_values(row)) for row in _TABLE["rules"]),
    *(Rule(**_values(row), kernel=True) for row in _TABLE["kernel_rules"]),
)
ESCALATION = tuple(EscalationRow(**_values(row)) for row in _TABLE["escalation"])
"""What `verify --escalate` tries, the mildest settings first."""

DATALOADER = "DataLoader"
COARSE = {
    "parameter": "parameters",
    "gradient": "gradients",
    "module": "outputs of modules",
    "parameters": "parameters",
    "gradients": "gradients",
    "loss": "losses",
}
"""What recordings of a level above ops hold in their place, and what several of it are called."""


def op_name(op: str) -> str:
    """Return the name of an op without namespace and overload, as in ``add``."""
    return op.rpartition("::")[2].partition(".")[0]


LOADER, WORKERS, DROPOUT, RANDOM_OPS = "loader", "loader workers", "dropout", "random ops"
FEATURES: Mapping[str, Callable[[Site], bool]] = {
    LOADER: lambda site: site.op == DATALOADER,
    DROPOUT: lambda site: op_name(site.op) in DROPPING | MASKING | DROPPING_INSIDE,
    RANDOM_OPS: lambda site: op_name(site.op) in DRAWING | DROPPING | DROPPING_INSIDE,
    "collectives": lambda site: site.phase == "collective",
}
"""What a program may use, and how the records of its ops show it. `WORKERS` are known from what
the trace says of loaders."""

DEVICE = "device"
DEVICES = (DEVICE, "cuda", "npu")  # any accelerator, and the types of them that settings are about


def uses(program: Program, feature: str) -> bool:
    """Whether a program uses a feature, or may; an empty name stands for what all have."""
    if feature in DEVICES:
        return feature == program.accelerator or (feature == DEVICE and bool(program.accelerator))
    return not feature or program.features is None or feature in program.features


def accelerator(meta: Mapping[str, Any]) -> str:
    """Return the type of device that a recorded process had besides the CPU, or nothing."""
    hardware = meta.get("hardware") or {}
    return str(hardware.get("accelerator", "")).partition(" ")[0]


MAIN_THREADS = ("", "MainThread", "main")
PROGRAM_TEXT, RESUMED = "program_text", "resumed"
NOT_ALIKE = (PROGRAM_TEXT, RESUMED)
"""Settings that no profile makes equal: the runs are of other programs, or begin elsewhere."""

DECLARED = ("guarantee", "profile", "digest", "program", "level", *NOT_ALIKE)
"""Settings that say what was run and requested. Their effects are other settings."""

SET_BY = {"hardware: threads": "env.OMP_NUM_THREADS"}
"""Observed settings that a knob decides, with that knob."""

_NOT_SET, _PARTLY_SET = UNINITIALISED.hex(), PARTLY.hex()
_PROBABILITY = re.compile(r"(?<![=\w.])0?\.\d*[1-9]\d*")
NO_VALUE = (None, "", "-", "null", "None")


@dataclass(frozen=True, slots=True)
class Evidence:
    """The first divergence and what is known of the two runs."""

    first: Divergence
    settings: tuple[Setting, ...] = ()  # the settings in which the runs differ
    meta: Mapping[str, Any] = field(default_factory=dict)  # of one of the traces
    tolerance: bool = False  # whether statistics were compared rather than bits
    program: Program = UNKNOWN_PROGRAM
    origin: LineOfOrigin | None = None

    @property
    def op(self) -> str:
        return op_name(self.first.op)

    @property
    def namespace(self) -> str:
        """``aten`` in ``aten::add.Tensor``; empty for records that are not ops of torch."""
        return self.first.op.rpartition("::")[0]

    @property
    def sides(self) -> tuple[RunAtDivergence, ...]:
        return tuple(side for side in (self.first.left, self.first.right) if side is not None)

    @property
    def read(self) -> set[str]:
        """The fingerprints of the op's inputs in both runs."""
        return {text for side in self.sides for text in side.input_fingerprints}

    @property
    def earlier_reads(self) -> tuple[UncontrolledRead, ...]:
        """What the program had read until the divergence, the last read first."""
        place = self.first.step, self.first.record
        earlier = [each for each in self.program.reads if (each.step, each.record) <= place]
        return tuple(reversed(earlier))

    @property
    def other_seeds(self) -> tuple[UncontrolledRead, ...]:
        """The places at which the runs had given a generator different seeds."""
        return tuple(each for each in self.earlier_reads if each.is_other_seed)

    @property
    def suspects(self) -> list[UncontrolledRead]:
        """What the program had read that no seed decides: what it reads at the line first.

        Where the line is known at which the difference began, only what that line has read, and
        those that passed it on: what differs there need not be what makes the runs differ.
        """
        lines = {short(side.source) for side in self.sides}
        found = [each for each in self.earlier_reads if each.what in SUSPECTS]
        if self.origin is not None:
            if self.origin.is_sure:
                path = (*self.origin.path, *self.origin.within)
                found = [each for each in found if each.where in path]
                return sorted(found, key=lambda each: path.index(each.where))
            lines = {short(each) for each in self.origin.lines}
        return sorted(
            found, key=lambda each: (short(each.where) not in lines, SUSPECTS.index(each.what))
        )

    @property
    def own_worker_init(self) -> Loader | None:
        """The loader of the batch, if its workers have a `worker_init_fn` of the program."""
        loaders = self.program.loaders
        own = (each for each in loaders if each.workers and each.worker_init_fn)
        return next((each for each in own if each.where == self.first.source), None)

    @property
    def differing_knobs(self) -> tuple[Setting, ...]:
        """The settings that are knobs of the catalogue, or that one of them sets."""
        keys = {name for knob in CATALOGUE for name in (knob.name, knob.profile_key)}
        return tuple({each.name: each for each in self.settings if each.name in keys}.values())

    @property
    def differing_platform(self) -> tuple[Setting, ...]:
        """The settings that differ and that no profile sets: versions and hardware."""
        known = {*DECLARED, *(each.name for each in self.differing_knobs)}
        return tuple(each for each in self.settings if each.name not in known)

    def differing_knobs_of(self, patterns: Iterable[str]) -> list[Setting]:
        return [
            each
            for each in self.differing_knobs
            if any(fnmatchcase(each.name, pattern) for pattern in patterns)
        ]

    def holds(self, predicate: str) -> bool:
        """Whether a predicate holds; ``not`` before its name asks whether it does not."""
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
        """Return the value in force of a knob, or of a key of a profile; None if there is none.

        ``True`` and ``true`` count as one value.
        """
        knobs = self.meta.get("knobs") or {}
        names = [key, *(knob.name for knob in CATALOGUE if knob.profile_key == key)]
        texts = [str(knobs[name]) for name in names if name in knobs]
        given = [text for text in texts if text not in NO_VALUE]
        return {"True": "true", "False": "false"}.get(given[0], given[0]) if given else None


def _is_race(its: Evidence) -> bool:
    first, writers = its.first, set(its.first.writers)
    # An op may run on the main thread, on one of autograd's, or on another.
    on_another = first.thread not in MAIN_THREADS and first.phase != "backward"
    in_place = its.op.endswith("_") and not its.op.startswith("__")
    return (
        (on_another or bool(writers - set(MAIN_THREADS)))
        and (len(its.program.threads) != 1 or len({first.thread, *writers}) > 1)
        and (in_place or bool(writers) or first.kind in (Kind.INPUT, Kind.DATA))
        and not its.holds("is_made_outside")
    )


PREDICATES: Mapping[str, Callable[[Evidence], object]] = {
    # What record it is.
    "is_coarse": lambda its: its.first.op in COARSE or its.first.is_at_the_latest,
    "is_batch": lambda its: its.first.op == DATALOADER,
    "is_made_outside": lambda its: its.first.op in (DATALOADER, NEW_TENSOR),
    "is_optimizer_step": lambda its: (
        its.first.phase == "optimizer" and its.first.op.endswith(OPTIMIZER_STEP)
    ),
    "is_collective": lambda its: its.first.phase == "collective" or "c10d" in its.namespace,
    "carries_bytes": lambda its: any(side.outputs.startswith("uint8[") for side in its.sides),
    "is_compiled": lambda its: its.op == "compiled region" or its.namespace == "inductor",
    "is_custom_op": lambda its: its.namespace not in ("", "aten", "prims"),
    "known_nondeterministic": lambda its: row_of(its.op),  # torch lists it
    "drops": lambda its: (
        its.op in DROPPING | MASKING
        or (
            its.op in DROPPING_INSIDE
            and any(_PROBABILITY.search(side.argument) for side in its.sides)
        )
    ),
    "own_generator": lambda its: any("generator=Generator" in each.argument for each in its.sides),
    "nothing_is_seeded": lambda its: (
        its.value("seed.torch") is None
        and not any(each.what == GIVEN_SEED for each in its.earlier_reads)
    ),
    "is_race": _is_race,
    # What it read and wrote.
    "some_outputs_agree": lambda its: any(
        len(values) > 1 and len(set(values)) == 1
        for values in zip(*(side.output_fingerprints for side in its.sides), strict=False)
    ),
    "reads_unwritten_memory": lambda its: (
        not (its.op in OVERWRITING or its.first.op.endswith("out"))
        and any(text.startswith((_NOT_SET, _PARTLY_SET)) for text in its.read)
    ),
    "reads_written_memory": lambda its: its.read - {_NOT_SET},
    "has_other_dtypes": lambda its: (
        len({tuple(re.findall(r"(\w+)\[", side.outputs)) for side in its.sides}) > 1
    ),
    # In what else the runs differ, and how they were compared.
    "own_worker_init": lambda its: its.own_worker_init,
    "differing_platform": lambda its: its.differing_platform,
    "differs_beyond_random_numbers": lambda its: (
        len(its.differing_knobs_of(_TABLE["knobs"]["random_numbers"])) < len(its.differing_knobs)
    ),
    "is_other_program": lambda its: any(each.name == PROGRAM_TEXT for each in its.settings),
    "is_resumed": lambda its: any(each.name == RESUMED for each in its.settings),
    # For another instruction set kernels are chosen differently.
    "is_other_processor": lambda its: any(
        each.name == "hardware: instruction set" for each in its.settings
    ),
    "both_were_cut": lambda its: its.first.both_were_cut,
    "tolerance": lambda its: its.tolerance,
    # What escalation can help against: it draws, or the states of generators are known to differ;
    # a kernel or a collective gave another result; the program or a loader brings it in.
    "is_random": lambda its: its.first.kind is Kind.RANDOM or its.op in DRAWING | DROPPING,
    "is_computed": lambda its: (
        its.first.phase == "collective"
        or (its.first.kind is Kind.OUTPUTS and not its.holds("is_random"))
    ),
    "is_brought_in": lambda its: its.first.kind in (Kind.DATA, Kind.ARGUMENT, Kind.ONLY_ONE),
    "is_of_program": lambda its: its.holds("is_brought_in") or its.holds("is_random"),
    "is_of_loader": lambda its: its.first.op == DATALOADER or its.first.kind is Kind.RANDOM,
}
"""What `fits` and `helps` of the table name."""


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
    cause = cause_by_evidence(evidence)
    if may_hide_a_change:
        cause = f"{cause.removesuffix('.')}; or an input was changed outside torch in mid-step."
    started = next((each for each in evidence.earlier_reads if each.what == THREADS), None)
    if rule.kernel and started is not None:
        cause = f"{cause.removesuffix('.')}; or a thread ({short(started.where)}) changed it."
    return Advice(cause=cause, closer=closer)


def rule_of(evidence: Evidence) -> Rule:
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


def cause_by_line(origin: LineOfOrigin) -> str:
    """Return as a sentence what a line has done at which a difference began."""
    out_of = [
        f"{each.name}{f', made at {short(each.made)}' if each.made else ''}"
        f"{f', changed at {short(each.changed)}' if each.changed else ''}"
        for each in origin.opaque
    ]
    given = "for the same arguments" if origin.same else "from what is no argument of it"
    if origin.took_another_path:
        sentence = "The runs went on with other lines after this one, which had read the same"
    elif origin.came_in:
        sentence = f"{origin.changed[0]} is other as this line reads it, and no line that was "
        sentence += "followed has changed it"
    else:
        row = library_row(origin.called)
        sentence = f"{origin.called or 'This line'} gave another result {given}"
        sentence += f": {row.leaves_open}" if row else ""
    return f"{sentence}{f'; out of {some(out_of)}' if out_of else ''}."


def open_fixes(evidence: Evidence) -> list[Fix]:
    """Return the settings that may help by the rule that fits, the likeliest first."""
    fixes = (fix for fix in rule_of(evidence).fixes if uses(evidence.program, fix.needs))
    return [fix for fix in fixes if not fix.is_met_by(evidence.value(fix.key))]


def evidence_of(verdict: Verdict, meta: Mapping[str, Any]) -> Evidence:
    """Return the first divergence of `verdict`, which has one, with what `meta` holds."""
    if verdict.first is None:
        raise ValueError("the runs do not diverge")
    settings = (replace(its, name=SET_BY.get(its.name, its.name)) for its in verdict.settings)
    within = verdict.tolerance is not None
    return Evidence(verdict.first, tuple(settings), meta, within, verdict.program, verdict.origin)


def cause_by_evidence(evidence: Evidence) -> str:
    """Return as a sentence what the line did where it began, or else the cause of the rule."""
    return cause_by_line(evidence.origin) if evidence.origin else _cause_by_rule(evidence)


def _cause_by_rule(evidence: Evidence) -> str:
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
    program = str(evidence.meta.get("program") or "")
    return rule.cause.format(
        op=first.op or "it",
        values=COARSE.get(first.op, "values"),
        module=first.module,
        threads=f"thread{'s' * (len(others) > 1)} {', '.join(others)}",
        accelerator=accelerator(evidence.meta),
        instead=known.instead if known else "",
        settings=_listed(evidence.differing_knobs_of(rule.knobs) or evidence.differing_platform),
        what=first.what,
        programs=" and ".join(sorted(files)) or f"two texts of {short(program)}",
        worker_init=worker_init_sentence(loader.worker_init_fn, seeded=seeded) if loader else "",
    )


def worker_init_sentence(worker_init_fn: str, *, seeded: bool) -> str:
    """Return what a program's own `worker_init_fn`, ``name at file:line``, means for its seeds.

    `seeded` says whether torchrepro seeds the loaders whose author seeded nothing.
    """
    name, _, where = worker_init_fn.partition(" at ")
    left = ", so torchrepro leaves the workers' seeds to it" if seeded else ""
    return f"{name}{f' at {short(where)}' if where else ''} is its worker_init_fn{left}."


_FEW = 3  # settings that a sentence names


def _listed(settings: Sequence[Setting]) -> str:
    values = [["not set" if x is None else x for x in (e.left, e.right)] for e in settings]
    shown = [f"{e.name} {' and '.join(x)}" for e, x in zip(settings, values, strict=True)]
    rest = [f"{len(shown) - _FEW} more"] if len(shown) > _FEW else []
    return "; ".join([*shown[:_FEW], *rest])


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
    # They begin with a step in which the runs agree: what it leaves behind tells a change between
    # two steps from one within a step.
    begins = max(first.step - 1, 0)
    if agreed is not None and first.kind is Kind.UNSEEN:
        begins = agreed.in_full or 0
    elif agreed is not None and first.op in COARSE:
        begins = agreed.step
    folder, steps = verdict.left.rstrip("/") + "-closer", (begins, first.step + 1)
    if meta.get("recorded_by") == BY_PROGRAM and not command:
        more = f", keep={[keep]!r}" if keep else ""
        return f"torchrepro.record({folder!r}, steps={steps}{more}{', detail=True' * detail})"
    return (
        f"torchrepro run {quote(str(meta.get('profile') or 'PROFILE'))}"
        f" --record {quote(folder)} --steps {steps[0]}:{steps[1]}"
        f"{f' --keep {quote(keep)}' if keep else ''}{' --detail' * detail}"
        f" -- {command or meta.get('command_hint') or 'COMMAND'}"
    )


_NOT_IN_A_KEY = re.compile(r"[^A-Za-z0-9_.-]")
"""Characters that Hydra's grammar does not take in the key of a mapping."""


class EscalationLevel(NamedTuple):
    """What to add to a profile."""

    name: str
    overrides: tuple[str, ...]  # of this level and of all below it, where not in force yet


def levels_above(
    profile_values: Mapping[str, Any], divergence: Divergence, program: Program = UNKNOWN_PROGRAM
) -> Iterator[EscalationLevel]:
    """Yield the levels above a profile from the lowest, each with the overrides of those below."""
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
    # As a key of `device.modules` it is a pattern, in which ? is any character.
    pattern = _NOT_IN_A_KEY.sub("?", module)
    if not _is_read_as_it_is(pattern):
        pattern = f"{pattern[:-1]}?"
    decided = pattern in (values.get(fix.key) or {})
    return () if decided else (f"{fix.key}={{{pattern}: {fix.value}}}",)


def _is_read_as_it_is(key: str) -> bool:
    # Unlike `0.`, which is read as 0.0, null, and an instruction such as `_target_`.
    from torchrepro.profile.load import parsed  # of no use where runs are only compared

    try:
        return [*parsed(f"read={{{key}: 0}}")["read"]] == [key]
    except ProfileError:
        return False


def _is_set(fix: Fix, values: Mapping[str, Any]) -> bool:
    value = values.get(fix.key)
    if value is None or isinstance(value, Mapping):
        return value is not None  # a mapping was decided op by op
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text == "null" or fix.is_met_by(text)  # null: there is no such knob here
