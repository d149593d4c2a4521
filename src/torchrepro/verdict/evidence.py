"""What is known of a divergence: the facts and predicates that the rules of diagnosis name."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.policies.deterministic_ops import row_of
from torchrepro.seeding.uncontrolled import SUSPECTS, THREADS
from torchrepro.trace.format import (
    NEW_TENSOR,
    OPTIMIZER_STEP,
    PARTLY,
    RETURNED,
    UNINITIALISED,
)
from torchrepro.verdict.rules import OPS, RANDOM_NUMBERS, is_of, one_of
from torchrepro.verdict.value import UNKNOWN_PROGRAM, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrepro.trace.format import Site
    from torchrepro.verdict.rules import Rule
    from torchrepro.verdict.value import (
        Divergence,
        Loader,
        Program,
        Setting,
        Side,
        UncontrolledRead,
    )

DRAWING, DROPPING, MASKING, DROPPING_INSIDE, OVERWRITING = (
    OPS[name] for name in ("drawing", "dropping", "masking", "dropping_inside", "overwriting")
)

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
DEVICES = (DEVICE, "cuda", "npu")
"""Any accelerator, and the types of them that settings are about."""


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
    settings: tuple[Setting, ...] = ()
    """The settings in which the runs differ."""

    knobs: Mapping[str, str] = field(default_factory=dict)
    """The knobs that were in force, as text."""

    accelerator: str = ""
    """The type of device that computed besides the CPU; empty if there was none."""

    tolerance: bool = False
    """Whether statistics were compared rather than bits."""

    program: Program = UNKNOWN_PROGRAM
    file: str = ""
    """The program's own file, as it was started."""

    @property
    def op(self) -> str:
        """The op's name without namespace and overload, as in ``add``."""
        return op_name(self.first.op)

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
    def suspects(self) -> tuple[UncontrolledRead, ...]:
        """What the program had read that no seed decides: what it reads at the line first."""
        found = [each for each in self.earlier_reads if each.what in SUSPECTS]
        return tuple(
            sorted(found, key=lambda each: (not self.is_at(each), SUSPECTS.index(each.what)))
        )

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
        return next(
            (
                each
                for each in self.program.loaders
                if each.workers and each.worker_init_fn and each.where == self.first.source
            ),
            None,
        )

    @property
    def some_outputs_agree(self) -> bool:
        """Whether the record has outputs that agree besides those that differ."""
        if len(self.sides) < 2:  # noqa: PLR2004 - both runs have the op
            return False
        pairs = zip(*(side.output_fingerprints for side in self.sides), strict=False)
        return any(one == other for one, other in pairs)

    @property
    def is_race(self) -> bool:
        """Whether threads wrote one tensor, of which one beside the main one computed it."""
        first, writers = self.first, set(self.first.writers)
        # An op may run on the main thread, on one of autograd's, or on another.
        on_another = first.thread not in MAIN_THREADS and first.phase != "backward"
        in_place = self.op.endswith("_") and not self.op.startswith("__")
        return (
            (on_another or bool(writers - set(MAIN_THREADS)))
            and (len(self.program.threads) != 1 or len({first.thread, *writers}) > 1)
            and (in_place or bool(writers) or first.kind in (Kind.INPUT, Kind.DATA))
            and not self.is_made_outside
        )

    @property
    def namespace(self) -> str:
        """``aten`` in ``aten::add.Tensor``; empty for records that are not ops of torch."""
        return self.first.op.rpartition("::")[0]

    @property
    def sides(self) -> tuple[Side, ...]:
        """The sides of the runs that have the op."""
        return tuple(side for side in (self.first.left, self.first.right) if side is not None)

    @property
    def reads_unwritten_memory(self) -> bool:
        """Whether an input of the op is memory that nothing, or not all, has been written of."""
        if self.op in OVERWRITING or self.first.op.endswith("out"):
            return False
        return any(
            text.startswith((_NOT_SET, _PARTLY_SET))
            for side in self.sides
            for text in side.input_fingerprints
        )

    @property
    def reads_written_memory(self) -> bool:
        """Whether the op has an input that something has written."""
        return any(text != _NOT_SET for side in self.sides for text in side.input_fingerprints)

    @property
    def drops_with_a_probability(self) -> bool:
        """Whether a positional argument lies between 0 and 1, as a probability does."""
        return any(_PROBABILITY.search(side.argument) for side in self.sides)

    @property
    def has_other_dtypes(self) -> bool:
        """Whether the two runs computed in other types."""
        return len({_dtypes(side.outputs) for side in self.sides}) > 1

    @property
    def differing_knobs(self) -> tuple[Setting, ...]:
        """The settings that are knobs of the catalogue, or that one of them sets."""
        keys = {name for knob in CATALOGUE for name in (knob.name, knob.profile_key)}
        named = [replace(each, name=SET_BY.get(each.name, each.name)) for each in self.settings]
        return tuple({each.name: each for each in named if each.name in keys}.values())

    @property
    def differing_platform(self) -> tuple[Setting, ...]:
        """The settings that differ and that no profile sets: versions and hardware."""
        known = {each.name for each in self.differing_knobs}
        return tuple(
            each
            for each in self.settings
            if each.name not in DECLARED and SET_BY.get(each.name, each.name) not in known
        )

    @property
    def differs_beyond_random_numbers(self) -> bool:
        """Whether the runs differ in a knob that is not about random numbers alone."""
        return any(not one_of(each.name, RANDOM_NUMBERS) for each in self.differing_knobs)

    @property
    def is_other_program(self) -> bool:
        """Whether the runs are of programs with another text."""
        return any(each.name == PROGRAM_TEXT for each in self.settings)

    @property
    def is_resumed(self) -> bool:
        """Whether one run went on from a checkpoint and the other did not."""
        return any(each.name == RESUMED for each in self.settings)

    @property
    def is_other_processor(self) -> bool:
        """Whether the runs had processors for which kernels are chosen differently."""
        return any(each.name == "hardware: instruction set" for each in self.settings)

    @property
    def both_were_cut(self) -> bool:
        """Whether both recordings were cut off."""
        return self.first.both_were_cut

    @property
    def is_coarse(self) -> bool:
        """Whether what differs is known, and not which op computed it."""
        return self.first.op in COARSE or self.first.is_at_the_latest

    @property
    def is_batch(self) -> bool:
        """Whether it is of a batch as it came out of a loader."""
        return self.first.op == DATALOADER

    @property
    def is_made_outside(self) -> bool:
        """Whether the record is of values that the program gave to torch."""
        return self.is_batch or self.first.op == NEW_TENSOR or self.first.op.endswith(RETURNED)

    @property
    def is_optimizer_step(self) -> bool:
        """Whether the record is of the arguments of an optimizer."""
        return self.first.phase == "optimizer" and self.first.op.endswith(OPTIMIZER_STEP)

    @property
    def is_collective(self) -> bool:
        """Whether ranks exchanged values."""
        return self.first.phase == "collective" or "c10d" in self.namespace

    @property
    def is_compiled(self) -> bool:
        """Whether inductor made the kernel."""
        return self.op == "compiled region" or self.namespace == "inductor"

    @property
    def is_custom_op(self) -> bool:
        """Whether the op is none of torch's own."""
        return self.namespace not in ("", "aten", "prims")

    @property
    def known_nondeterministic(self) -> bool:
        """Whether torch lists the op as one without a deterministic kernel."""
        return row_of(self.op) is not None

    @property
    def drops(self) -> bool:
        """Whether the op draws a mask."""
        inside = self.op in DROPPING_INSIDE and self.drops_with_a_probability
        return inside or self.op in DROPPING | MASKING

    @property
    def is_random(self) -> bool:
        """Whether the op draws, or only the states of generators are known to differ."""
        return self.first.kind is Kind.RANDOM or self.op in DRAWING | DROPPING

    @property
    def is_computed(self) -> bool:
        """Whether a kernel or a collective gave another result."""
        is_kernel = self.first.kind is Kind.OUTPUTS and not self.is_random
        return is_kernel or self.first.phase == "collective"

    @property
    def is_of_program(self) -> bool:
        """Whether the program itself may bring the difference in."""
        return self.is_random or self.first.kind in (Kind.DATA, Kind.ARGUMENT, Kind.ONLY_ONE)

    @property
    def is_of_loader(self) -> bool:
        """Whether the workers of a loader may bring the difference in."""
        return self.is_batch or self.first.kind is Kind.RANDOM

    def differing_knobs_of(self, rule: Rule) -> list[Setting]:
        """Return the knobs of a rule in which the runs differ."""
        return [each for each in self.differing_knobs if one_of(each.name, rule.knobs)]

    def fits(self, rule: Rule) -> bool:
        """Whether a rule may say why the runs diverge."""
        devices = ("", self.accelerator or "cpu", "accelerator" if self.accelerator else "")
        return (
            self.first.kind in rule.kinds
            and (not rule.ops or any(is_of(self.op, family) for family in rule.ops))
            and rule.device in devices
            and (not rule.knobs or bool(self.differing_knobs_of(rule)))
            and all(
                bool(getattr(self, name.removeprefix("not "))) != name.startswith("not ")
                for name in rule.fits
            )
        )

    def value(self, key: str) -> str | None:
        """Return the value in force of a knob, or of a key of a profile; None if there is none.

        ``True`` and ``true`` count as one value.
        """
        names = [key, *(knob.name for knob in CATALOGUE if knob.profile_key == key)]
        texts = [str(self.knobs[name]) for name in names if name in self.knobs]
        given = [text for text in texts if text not in NO_VALUE]
        return {"True": "true", "False": "false"}.get(given[0], given[0]) if given else None


def accelerator(meta: Mapping[str, Any]) -> str:
    """Return the type of device that a recorded process had besides the CPU, or nothing."""
    hardware = meta.get("hardware") or {}
    return str(hardware.get("accelerator", "")).partition(" ")[0]


def _dtypes(outputs: str) -> tuple[str, ...]:
    return tuple(re.findall(r"(\w+)\[", outputs))
