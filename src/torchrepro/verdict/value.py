"""Result of a comparison: the verdict and the values that it consists of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

from torchrepro.ground.console import Displayed
from torchrepro.seeding.call_records import ObservedCall

BOTH_CUT = "both runs were cut off"
"""First words of the sentence if the recordings of both runs were cut off."""


class Kind(StrEnum):
    """A way in which two runs can diverge."""

    OUTPUTS = "equal inputs, unequal outputs"
    VALUES = "unequal values, inputs not recorded"
    ARGUMENT = "another argument"
    INPUT = "an input changed outside torch"
    DATA = "other data"
    ONLY_ONE = "only one run has it"
    RANDOM = "another state of a random generator"
    ENDED = "one run ended earlier"
    INCOMPARABLE = "not all could be compared"
    UNSEEN = "an input from steps whose ops were not recorded"


@dataclass(frozen=True, slots=True)
class RunAtDivergence:
    """The record of one run at the divergence."""

    run: str  #: The folder of the recording.
    source: str
    outputs: str  #: Dtype and shape of each output, as in ``float32[32, 64], int64[]``.
    argument: str  #: The arguments that are not tensors, as Python writes them.
    input_fingerprints: tuple[str, ...]
    output_fingerprints: tuple[str, ...]  #: In hexadecimal.


@dataclass(frozen=True, slots=True)
class Element:
    """An element of a kept tensor that differs between two runs."""

    tensor: str  #: ``output 0`` or ``input 1``.
    index: tuple[int, ...]
    left: str
    right: str
    ulp: int | None = None
    """Distance in units in the last place of their dtype; None if unknown."""


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance between a tensor of one run and the same tensor of the other run."""

    tensor: str
    max_abs: float | None
    max_rel: float | None
    cosine: float | None  #: Cosine similarity; None if only statistics were recorded.
    max_ulp: int | None = None
    differing: int | None = None
    """How many of `total` elements differ; None if only statistics were recorded."""
    total: int | None = None


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first divergence of two runs: a record or a digest that differs, or the end of a run."""

    rank: int
    step: int
    phase: str = ""  #: ``forward``, ``backward``, ``optimizer``, ``data`` or ``collective``.
    module: str = ""
    op: str = ""
    source: str = ""  #: ``file:line`` of the user's code; of A unless only B has the op.
    kind: Kind = field(kw_only=True)
    thread: str = ""
    left: RunAtDivergence | None = None
    right: RunAtDivergence | None = None  #: None for a run without the op.
    elements: tuple[Element, ...] = ()  #: The first differing elements, if tensors were kept.
    distances: tuple[Distance, ...] = ()
    what: str = ""
    """Details, such as which input or which generator differs; may be empty."""
    writers: tuple[str, ...] = ()
    """The threads that wrote the differing input, as far as known."""
    record: int = 0  #: The number of records before it.
    after_last: bool = False
    """Whether it is after the last step of both runs. Then `step` is the number of their steps, and
    0 if the programs have no steps."""
    before_model: bool = False
    """Whether it is before the program built its first model, and so before its first step."""
    called: str = ""
    """The program's name of the module, if it differs from its path."""

    @property
    def is_at_the_latest(self) -> bool:
        """Whether the runs may have diverged earlier in this step, in unrecorded computations."""
        return self.kind is Kind.VALUES

    @property
    def both_were_cut(self) -> bool:
        """Whether both recordings were cut off, so that it is unknown which run was shorter."""
        return self.kind is Kind.ENDED and self.what.startswith(BOTH_CUT)


AT_ONE_LEVEL = {
    "op": "op by op",
    "module": "module by module",
    "step": "by parameters, gradients and losses",
}
"""Level of both recordings -> how their steps are compared, if both have the records."""


@dataclass(frozen=True, slots=True)
class Compared:
    """The extent of a comparison: numbers of ranks, steps, ops and bytes, and the modes."""

    ranks: int
    steps: int  #: Steps that ended in both runs; 0 for programs without steps.
    ops: int  #: Compared records of `level`.
    bytes: int
    level: str  #: The coarser level of the two recordings: ``step``, ``module`` or ``op``.
    after_last: bool = False  #: Whether records after the last step were compared too.
    by: tuple[tuple[str, int], ...] = ()
    """The number of steps compared in each mode, such as ``op by op``, the finest mode first."""
    in_order: bool = True
    """Whether the main thread ended all steps. If not, timing decides into which step records fall,
    and all steps were compared as a whole."""

    @property
    def is_at_its_level(self) -> bool:
        """Whether all steps were compared at the level of their recording."""
        return all(words == AT_ONE_LEVEL.get(self.level) for words, _ in self.by)


@dataclass(frozen=True, slots=True)
class Agreed:
    """The last compared step before a divergence. Two runs are known to agree up to this step."""

    step: int  #: The last compared step before the divergence.
    by: str  #: How this step was compared, as in ``by parameters and losses``.
    in_full: int | None
    """The last step before the divergence with all results compared; None if there is none."""
    then_in_full: bool = False
    """Whether all results of the step of the divergence were compared."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The number of equal and of differing records of one module in one step."""

    step: int
    module: str
    same: int
    differing: int


@dataclass(frozen=True, slots=True)
class IgnoredLine:
    """A line whose records were ignored at the request of the user."""

    where: str  #: ``file:line``, as requested.
    records: int
    near: tuple[str, ...] = ()
    """If this line has no records: lines of the file that have, the nearest first."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A knob, a version or a property of the hardware that differs between the two runs."""

    name: str
    left: str | None
    right: str | None


@dataclass(frozen=True, slots=True)
class Loader:
    """A data loader over which a program iterates."""

    where: str  #: ``file:line`` of the loop.
    workers: int
    dataset: str
    worker_init_fn: str  #: The program's function as ``name at file:line``; empty if none.


@dataclass(frozen=True, slots=True)
class NondeterministicRead(ObservedCall):
    """A line of both runs that reads a source of nondeterminism, or seeds a generator."""

    left: str = ""
    right: str = ""
    """The explicit seed in each run; empty if none."""
    source: ObservedCall | None = None
    """The call that a differing seed comes from, if known."""

    @property
    def is_differing_seed(self) -> bool:
        """Whether both runs passed a seed on this line, and the seeds differ."""
        return bool(self.left and self.right) and self.left != self.right


@dataclass(frozen=True, slots=True)
class UninitializedRead:
    """A read of uninitialized memory."""

    allocated: str  #: ``file:line`` of its allocation, as by ``torch.empty``.
    read: str  #: ``file:line`` of the op that read it.
    op: str
    is_nan: bool  #: Whether the read made the result of the op NaN.


@dataclass(frozen=True, slots=True)
class NotFinite:
    """The first loss of a run that is not finite."""

    step: int
    value: str  #: ``nan``, ``inf`` or ``-inf``.
    on: bool  #: Whether all later losses are not finite either.


@dataclass(frozen=True)
class Program:
    """Facts about a program that may explain why its runs diverge."""

    features: tuple[str, ...] | None = None
    """Features in `diagnosis.FEATURES` that it may use; None if unknown."""
    accelerator: str = ""
    """The type of accelerator that it used, as in ``cuda``; empty if none."""
    loaders: tuple[Loader, ...] = ()
    reads: tuple[NondeterministicRead, ...] = ()  #: In the order of reading.
    threads: tuple[str, ...] = ()  #: Threads other than the main thread that computed something.
    unwritten: tuple[UninitializedRead, ...] = ()
    """Reads of uninitialized memory that made a loss NaN, or that are the divergence."""
    models: tuple[tuple[str, str], ...] = ()
    """The recording's and the program's name of each model, if there are several."""
    files: tuple[str, ...] = ()  #: The files of its modules, as far as recorded.
    began: float | None = None  #: When the earlier run began, in seconds since 1970.

    @cached_property
    def _names(self) -> Mapping[str, str]:
        return dict(self.models)

    def name_of(self, module: str) -> str:
        """Return the path of a module, beginning with the name that the program gave the model."""
        model, colon, path = module.partition(":")
        return f"{self._names.get(model) or model}{colon}{path}"


UNKNOWN_PROGRAM = Program()


@dataclass(frozen=True, slots=True)
class RunFacts:
    """When and where a run was recorded, and with which program. Unknown facts are empty."""

    date: str  #: When its first step was written, in UTC.
    host: str
    torch: str
    commit: str
    """Commit of the program with the number of files changed since, or the reason if unknown."""
    profile: str  #: The name of the profile, with its guarantee.


@dataclass(frozen=True, slots=True)
class OpaqueValue:
    """A value that has no digest, and so cannot be compared between two processes."""

    name: str
    made: str  #: ``file:line`` of the line that created it; empty if unknown.
    changed: str  #: ``file:line`` of the line that may have changed it since; empty if none.


@dataclass(frozen=True, slots=True)
class LineOfOrigin:
    """The line of the program where the difference between two runs began."""

    where: str  #: ``file:line``.
    changed: tuple[str, ...]  #: Names that it set to different values, as in ``self.index``.
    same: tuple[str, ...]  #: Names that it read with equal values in both runs.
    called: str = ""  #: The library function that it called, as in ``polars.DataFrame.group_by``.
    opaque: tuple[OpaqueValue, ...] = ()  #: Values that it read and that cannot be compared.
    is_set: bool = False  #: Whether it made a set, whose order counts as a part of its value.
    came_in: bool = False  #: Whether the difference came from outside the lines of the program.
    took_another_path: bool = False  #: Whether the runs executed different lines after it.
    path: tuple[str, ...] = ()
    """The lines that propagate the difference, from this line to the divergence."""
    within: tuple[str, ...] = ()  #: The lines that ran in the functions it called.

    @property
    def is_sure(self) -> bool:
        """Whether all values that the line read are known to be equal."""
        return not (self.came_in or self.opaque)

    @property
    def lines(self) -> tuple[str, ...]:
        """The line, and the lines that created or changed the opaque values that it read."""
        of_opaque = (line for value in self.opaque for line in (value.changed, value.made))
        return (self.where, *filter(None, of_opaque))


@dataclass(frozen=True, slots=True)
class Edit:
    """A suggested fix: a line of the program before and after a change."""

    where: str  #: ``file:line``.
    before: str
    after: str


class Cause(NamedTuple):
    """A cause of a divergence: a sentence, and the name of the page that explains it."""

    sentence: str
    page: str

    def or_else(self, alternative: str) -> Cause:
        """Return the cause with another possible cause at the end of its sentence."""
        return self._replace(sentence=f"{self.sentence.removesuffix('.')}; or {alternative}.")


@dataclass(frozen=True, slots=True)
class Advice:
    """The likely cause of a divergence, and an edit or a command that may help."""

    cause: str  #: A sentence.
    edit: Edit | None = None  #: The line to change; None if no known change helps.
    command: str = ""
    """A command line, in shell syntax, whose runs are the same; empty if none was found."""
    tried: str = ""
    """The controlled re-runs and their results; empty if there were none."""
    closer: str = ""
    """The exact command that records more detail; empty if there is no more detail."""
    cause_id: str = field(kw_only=True)  #: The name of the cause, for `torchrepro explain`.

    @property
    def keeps_tensors(self) -> bool:
        """Whether the command in `closer` records the values of tensors."""
        return " --keep " in self.closer or ", keep=[" in self.closer


@dataclass(frozen=True, slots=True)
class Verdict(Displayed):
    """The result of a comparison: the runs are the same, or where they diverge first."""

    same: bool
    left: str  #: The folder of the left recording.
    right: str  #: The folder of the right recording.
    compared: Compared
    first: Divergence | None = None
    reaches: bool = True
    """Whether the runs differ in a loss, in the parameters after a step, or in the number of steps;
    also True if this is unknown."""
    tolerance: tuple[float, float] | None = None
    """rtol and atol if statistics were compared; None if bits were."""
    propagated: int = 0  #: Later records that differ because their inputs differ.
    independent: int = 0
    """Later records that differ although their inputs are equal: there is more than one cause."""
    by_module: tuple[tuple[str, int], ...] = ()
    """The number of differing records of each module, in the order of their first difference."""
    map: tuple[Cell, ...] = ()
    losses: tuple[tuple[int, float | None, float | None], ...] = ()
    """Step, loss of the left run, loss of the right run; None for a run without this step."""
    settings: tuple[Setting, ...] = ()
    across_ranks: tuple[str, ...] = ()
    """A sentence for each rank of one run that should be a replica of the first rank but is not."""
    notes: tuple[str, ...] = ()
    """Sentences on the limits of the comparison, and other findings."""
    advice: Advice | None = None
    origin: LineOfOrigin | None = None
    """The line where the divergence began, if both runs followed their lines."""
    program: Program = UNKNOWN_PROGRAM  #: Facts about the program, as far as recorded.
    about: tuple[RunFacts, ...] = ()
    """The facts of the left and of the right run; empty if one of them was not recorded."""
    not_finite: tuple[NotFinite | None, ...] = (None, None)
    """The first loss of the left and the right run that is not finite; None if all are finite."""
    left_out: tuple[IgnoredLine, ...] = ()
    fed: int = 0
    """How many records were ignored because they differ only downstream of the lines `left_out`."""
    agreed: Agreed | None = None
    """Steps up to which the runs agree; None if they are the same or differ from the first step."""

    @property
    def repeats(self) -> bool:
        """Whether a command or an edit is known that makes the runs repeatable."""
        return self.advice is not None and bool(self.advice.command or self.advice.edit)

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as plain JSON values. The map only has cells with differing records.

        NaN and infinities become texts, because JSON lacks them.
        """
        differing = tuple(cell for cell in self.map if cell.differing)
        text = json.dumps(replace(self, map=differing), default=_to_json)
        plain: dict[str, Any] = json.loads(text, parse_constant=lambda name: str(float(name)))
        return plain


_KEYS_OF_CALLS = {
    ObservedCall: ("name", "what", "where", "is_sure"),
    NondeterministicRead: (
        *("name", "what", "where", "instead", "step", "record"),
        *("left", "right", "source", "in_sample"),
    ),
}
"""Type of a call -> its keys in a verdict."""


def _to_json(value: Any) -> dict[str, Any]:
    if isinstance(value, ObservedCall):
        return value.to_json(_KEYS_OF_CALLS[type(value)])
    return {field.name: getattr(value, field.name) for field in fields(value)}
