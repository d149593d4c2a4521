"""The table of diagnosis, `diagnosis.yaml`, and the predicates on a divergence that it names."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.policies.deterministic_ops import row_of
from torchrepro.seeding.uncontrolled import GIVEN_SEED, SUSPECTS, THREADS
from torchrepro.trace.format import NEW_TENSOR, OPTIMIZER_STEP, PARTLY, RETURNED, UNINITIALISED
from torchrepro.verdict.value import UNKNOWN_PROGRAM, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torchrepro.trace.format import Site
    from torchrepro.verdict.value import (
        Divergence,
        Loader,
        Program,
        Setting,
        Side,
        UncontrolledRead,
    )

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

_PATTERNS = {
    name: re.compile("".join(text.split()))
    for name, text in {
        **_TABLE["patterns"],
        "summing": "|".join(f"(?:{text})" for text in _TABLE["patterns"].values()),
    }.items()
}


@dataclass(frozen=True, slots=True)
class Fix:
    """A key of a profile and the value that helps."""

    key: str
    value: str  # as an override writes it: a word that YAML takes for a boolean is in quotes
    enough: tuple[str, ...] = ()  # other values that help as well; ``*`` for any
    needs: str = ""  # the feature without which the program cannot feel it (see `FEATURES`)

    def is_met_by(self, value: str | None) -> bool:
        """Whether `value` is one that helps."""
        return value is not None and (self.enough == ("*",) or value in (self.value, *self.enough))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A reason for two runs to diverge, and when it applies. The table says what fields mean."""

    cause: str
    kinds: tuple[str, ...] = tuple(Kind.__members__)
    ops: tuple[str, ...] = ()
    device: str = ""
    fits: tuple[str, ...] = ()
    fixes: tuple[Fix, ...] = ()
    knobs: tuple[str, ...] = ()
    by_program: bool = False
    rerecord: bool = True
    kernel: bool = False  # whether an op gave two results for equal inputs


@dataclass(frozen=True, slots=True)
class EscalationRow:
    """Settings that are tried together."""

    name: str
    fixes: tuple[Fix, ...]
    why: str  # what it means if these settings make the runs equal
    helps: str  # the predicate that says whether it can help
    needs: str = ""
    """The feature without which the program cannot feel it; an accelerator is ``device``."""

    of_module: bool = False  # whether its key is a module, that of the divergence


def _values(row: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: tuple(each) if isinstance(each, list) else each for name, each in row.items()}
    if "fixes" in found:
        found["fixes"] = tuple(Fix(**_values(each)) for each in found["fixes"])
    return found


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


def short(where: str) -> str:
    """Return ``file:line`` without the folders: the same program may run in another one."""
    return where.replace("\\", "/").rpartition("/")[2]


def is_at(site: Site, where: str) -> bool:
    """Whether a site is at a line, which may be named without some of its folders."""
    return site.source == where or site.source.endswith(f"/{where.removeprefix('./')}")


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
    knobs: Mapping[str, str] = field(default_factory=dict)  # the knobs that were in force, as text
    accelerator: str = ""
    """The type of device that computed besides the CPU; empty if there was none."""

    tolerance: bool = False  # whether statistics were compared rather than bits
    program: Program = UNKNOWN_PROGRAM
    file: str = ""  # the program's own file, as it was started

    @property
    def op(self) -> str:
        """The op's name without namespace and overload, as in ``add``."""
        return op_name(self.first.op)

    @property
    def namespace(self) -> str:
        """``aten`` in ``aten::add.Tensor``; empty for records that are not ops of torch."""
        return self.first.op.rpartition("::")[0]

    @property
    def sides(self) -> tuple[Side, ...]:
        """The sides of the runs that have the op."""
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
        """What the program had read that no seed decides: what it reads at the line first."""
        found = [each for each in self.earlier_reads if each.what in SUSPECTS]
        return sorted(found, key=lambda each: (not self.is_at(each), SUSPECTS.index(each.what)))

    def is_at(self, read: UncontrolledRead) -> bool:
        """Whether the line of the divergence reads it."""
        return short(read.where) in {short(side.source) for side in self.sides}

    @property
    def started_threads(self) -> UncontrolledRead | None:
        """Where the program had started a thread."""
        return next((each for each in self.earlier_reads if each.what == THREADS), None)

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
        named = [replace(each, name=SET_BY.get(each.name, each.name)) for each in self.settings]
        return tuple({each.name: each for each in named if each.name in keys}.values())

    @property
    def differing_platform(self) -> tuple[Setting, ...]:
        """The settings that differ and that no profile sets: versions and hardware."""
        known = {*DECLARED, *(each.name for each in self.differing_knobs)}
        return tuple(
            each
            for each in self.settings
            if each.name not in known and SET_BY.get(each.name, each.name) not in known
        )

    def differing_knobs_of(self, patterns: Iterable[str]) -> list[Setting]:
        return [
            each
            for each in self.differing_knobs
            if any(fnmatchcase(each.name, pattern) for pattern in patterns)
        ]

    def is_of(self, *families: str) -> bool:
        """Whether the op is of one of some families of the table."""
        return any(
            self.op in OPS[name] if name in OPS else _PATTERNS[name].fullmatch(self.op) is not None
            for name in families
        )

    def holds(self, predicate: str) -> bool:
        """Whether a predicate holds; ``not`` before its name asks whether it does not."""
        name = predicate.removeprefix("not ")
        return bool(PREDICATES[name](self)) == (name == predicate)

    def fits(self, rule: Rule) -> bool:
        """Whether a rule may say why the runs diverge."""
        devices = ("", self.accelerator or "cpu", "accelerator" if self.accelerator else "")
        return (
            self.first.kind.name in rule.kinds
            and (not rule.ops or self.is_of(*rule.ops))
            and rule.device in devices
            and (not rule.knobs or bool(self.differing_knobs_of(rule.knobs)))
            and all(map(self.holds, rule.fits))
        )

    def value(self, key: str) -> str | None:
        """Return the value in force of a knob, or of a key of a profile; None if there is none.

        ``True`` and ``true`` count as one value.
        """
        names = [key, *(knob.name for knob in CATALOGUE if knob.profile_key == key)]
        texts = [str(self.knobs[name]) for name in names if name in self.knobs]
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
    "is_made_outside": lambda its: (
        its.first.op in (DATALOADER, NEW_TENSOR) or its.first.op.endswith(RETURNED)
    ),
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
    "is_of_program": lambda its: (
        its.first.kind in (Kind.DATA, Kind.ARGUMENT, Kind.ONLY_ONE) or its.holds("is_random")
    ),
    "is_of_loader": lambda its: its.first.op == DATALOADER or its.first.kind is Kind.RANDOM,
}
"""What `fits` and `helps` of the table name."""


def accelerator(meta: Mapping[str, Any]) -> str:
    """Return the type of device that a recorded process had besides the CPU, or nothing."""
    hardware = meta.get("hardware") or {}
    return str(hardware.get("accelerator", "")).partition(" ")[0]
