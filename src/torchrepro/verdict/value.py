"""What a comparison of two runs says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from torchrepro.ground.console import Displayed

BOTH_CUT = "both runs were cut off"
"""Begins the sentence of a divergence that is the end of two recordings that were cut off."""


class Kind(StrEnum):
    """How two runs can diverge."""

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
    """What one of two runs has at the place where they diverge."""

    run: str  #: The folder of the recording.
    source: str
    outputs: str  #: Dtype and shape of each output, as in ``float32[32, 64], int64[]``.
    argument: str  #: The arguments that are not tensors, as Python writes them.
    input_fingerprints: tuple[str, ...]
    output_fingerprints: tuple[str, ...]  #: In hexadecimal.


@dataclass(frozen=True, slots=True)
class Element:
    """An element in which kept tensors differ."""

    tensor: str  #: ``output 0`` or ``input 1``.
    index: tuple[int, ...]
    left: str
    right: str
    ulp: int | None = None
    """How many numbers of its type lie from the one to the other; None if that is not known."""


@dataclass(frozen=True, slots=True)
class Distance:
    """How far apart two tensors are."""

    tensor: str
    max_abs: float | None
    max_rel: float | None
    cosine: float | None  #: Cosine similarity; None where only statistics were recorded.
    max_ulp: int | None = None
    differing: int | None = None
    """How many elements differ, of how many; None where only statistics were recorded."""
    total: int | None = None


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two runs diverge: the first record in which they differ."""

    rank: int
    step: int
    phase: str = ""  #: ``forward``, ``backward``, ``optimizer``, ``data`` or ``collective``.
    module: str = ""
    op: str = ""
    source: str = ""  #: ``file:line`` of the user's code, in the run that has it.
    kind: Kind = field(kw_only=True)
    thread: str = ""
    left: RunAtDivergence | None = None
    right: RunAtDivergence | None = None  #: None for the run that does not have the op at all.
    elements: tuple[Element, ...] = ()  #: The first wrong elements, where tensors were kept.
    distances: tuple[Distance, ...] = ()
    what: str = ""
    """One more sentence, where there is more to say: which input, which generator."""
    writers: tuple[str, ...] = ()
    """The threads that wrote the input in which the runs differ, where they are known."""
    record: int = 0  #: How many records had been taken before it.
    after_last: bool = False
    """Whether it comes after the last step of both runs; `step` is then the number of their steps.

    Where that is 0, the programs have no steps.
    """
    before_model: bool = False
    """Whether the program had built no model yet, which is before its first step."""
    called: str = ""
    """What the program calls the module, where its path does not say that."""

    @property
    def is_at_the_latest(self) -> bool:
        """Whether the runs may have diverged before it in its step, in what was not recorded."""
        return self.kind is Kind.VALUES

    @property
    def both_were_cut(self) -> bool:
        """Whether both recordings were cut off, so that neither is known to be shorter."""
        return self.kind is Kind.ENDED and self.what.startswith(BOTH_CUT)


AT_ONE_LEVEL = {
    "op": "op by op",
    "module": "module by module",
    "step": "by parameters, gradients and losses",
}
"""How steps are compared whose records both runs have, by the level of both."""


@dataclass(frozen=True, slots=True)
class Compared:
    """How much was compared."""

    ranks: int
    steps: int  #: Steps that ended in both runs; 0 where all is outside of any step.
    ops: int  #: Records that were compared, at `level`.
    bytes: int
    level: str  #: ``step``, ``module`` or ``op``, the coarser of the two recordings.
    after_last: bool = False  #: Whether what comes after the last step was compared as well.
    by: tuple[tuple[str, int], ...] = ()
    """How many of the steps were compared in each mode, as in ``op by op``, the finest first."""
    in_order: bool = True
    """Whether the main thread ended all steps; else what belongs to which of them is an accident,
    and all of them were compared at once."""

    @property
    def is_at_its_level(self) -> bool:
        """Whether all steps were compared at the level at which they were recorded."""
        return all(words == AT_ONE_LEVEL.get(self.level) for words, _ in self.by)


@dataclass(frozen=True, slots=True)
class Agreed:
    """Up to which step two runs are known to agree that then diverge."""

    step: int  #: The last step before the divergence in which all agrees that both runs recorded.
    by: str  #: How it was compared, as in ``by parameters and losses``.
    in_full: int | None
    """The last one of which all that it computed was compared; None if there is none."""
    then_in_full: bool = False
    """Whether all that the step of the divergence computed was compared."""


@dataclass(frozen=True, slots=True)
class Cell:
    """How many records of one module in one step are the same, and how many differ."""

    step: int
    module: str
    same: int
    differing: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A line whose records were not compared, because somebody asked for that."""

    where: str  #: ``file:line``, as it was asked for.
    records: int
    near: tuple[str, ...] = ()
    """Lines of the same file that have records, the nearest first, where this one has none."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A knob, a version or a piece of hardware in which the two runs differ."""

    name: str
    left: str | None
    right: str | None


@dataclass(frozen=True, slots=True)
class Loader:
    """A loader of data that a program iterates."""

    where: str  #: ``file:line`` of the loop.
    workers: int
    dataset: str
    worker_init_fn: str  #: The program's own, as ``name at file:line``; empty if it has none.


@dataclass(frozen=True, slots=True)
class SeedSource:
    """What may give another result in each run, as what a seed was made from that differs."""

    name: str  #: What the program calls, as in ``time.time``.
    what: str  #: One of the words of `seeding.nondeterministic_calls`, as in ``the clock``.
    where: str
    is_sure: bool  #: Whether the line says so, and not only the order of reading.


@dataclass(frozen=True, slots=True)
class UncontrolledRead:
    """A place where a program reads what no seed decides, or gives a generator a seed."""

    name: str  #: The function, as in ``time.time_ns``.
    what: str  #: What it gives, as in ``the clock``.
    where: str
    instead: str  #: What to write instead.
    step: int  #: The step that was running at the first read; -1 before torch was imported.
    record: int = 0  #: How many records had been taken by then.
    left: str = ""
    right: str = ""
    """The seed that each run gave; empty where none was given."""
    source: SeedSource | None = None  #: Where a seed that differs comes from, if that is known.
    in_sample: bool = False
    """Whether it was read while a sample was loaded, for which a generator is at hand."""

    @property
    def is_other_seed(self) -> bool:
        """Whether both runs gave a seed here, and not the same one."""
        return bool(self.left and self.right) and self.left != self.right


@dataclass(frozen=True, slots=True)
class UninitializedRead:
    """A read of memory that nothing had written."""

    allocated: str  #: ``file:line`` of what allocated it, as ``torch.empty`` does.
    read: str  #: ``file:line`` of the op that read it.
    op: str
    is_nan: bool  #: Whether the result was NaN because of it.


@dataclass(frozen=True, slots=True)
class NotFinite:
    """The first loss that is no finite number."""

    step: int
    value: str  #: ``nan``, ``inf`` or ``-inf``.
    on: bool  #: Whether none after it is finite.


@dataclass(frozen=True)
class Program:
    """What a program has that may explain why its runs diverge."""

    features: tuple[str, ...] | None = None
    """Those of `diagnosis.FEATURES` that it uses, or may use; None where nothing is known."""
    accelerator: str = ""
    """The type of device that computed besides the CPU, as in ``cuda``; empty if none did."""
    loaders: tuple[Loader, ...] = ()
    reads: tuple[UncontrolledRead, ...] = ()  #: In the order of reading.
    threads: tuple[str, ...] = ()  #: Threads beside the main one that computed something.
    unwritten: tuple[UninitializedRead, ...] = ()
    """Reads of unwritten memory that made a loss NaN, or in which the runs diverge."""
    models: tuple[tuple[str, str], ...] = ()
    """What the recording calls each model and what the program does, where it has several."""
    files: tuple[str, ...] = ()  #: The files of its modules, as far as the recordings name them.
    began: float | None = None  #: When the earlier of the runs began, in seconds since 1970.

    @cached_property
    def _names(self) -> Mapping[str, str]:
        return dict(self.models)

    def name_of(self, module: str) -> str:
        """Return the path of a module with its model as the program calls it."""
        model, colon, path = module.partition(":")
        return f"{self._names.get(model) or model}{colon}{path}"


UNKNOWN_PROGRAM = Program()


@dataclass(frozen=True, slots=True)
class RunFacts:
    """When, where and from what a run was recorded; a fact that is not known is empty."""

    date: str  #: When its first step was written, in UTC.
    host: str
    torch: str
    commit: str
    """Of the program's repository, with the number of files changed since; or why there is none."""
    profile: str  #: With its guarantee.


@dataclass(frozen=True, slots=True)
class OpaqueValue:
    """A value of which nobody can tell whether it is the same in two processes."""

    name: str
    made: str  #: ``file:line`` of what made it; empty if that is not known.
    changed: str  #: ``file:line`` of what may have changed it since; empty if nothing has.


@dataclass(frozen=True, slots=True)
class LineOfOrigin:
    """The line of the program at which a difference began."""

    where: str  #: ``file:line``.
    changed: tuple[str, ...]  #: What it changed to another value, as in ``self.index``.
    same: tuple[str, ...]  #: What it read that was the same in both runs.
    called: str = ""  #: What of a library it called, as in ``polars.DataFrame.group_by``.
    opaque: tuple[OpaqueValue, ...] = ()  #: What it read that may be the same or not.
    is_set: bool = False  #: Whether it made a set, whose order is a part of its value.
    came_in: bool = False  #: Whether it was given what differs by what no line of the program is.
    took_another_path: bool = False  #: Whether the runs went on with other lines after it.
    path: tuple[str, ...] = ()
    """The lines that passed the difference on, from this one to that where it shows."""
    within: tuple[str, ...] = ()  #: The lines of what it called.

    @property
    def is_sure(self) -> bool:
        """Whether all that the line read is known to have been the same."""
        return not (self.came_in or self.opaque)

    @property
    def lines(self) -> tuple[str, ...]:
        """The line, and those that made or changed what it read and nobody can compare."""
        of_opaque = (where for each in self.opaque for where in (each.changed, each.made))
        return (self.where, *filter(None, of_opaque))


@dataclass(frozen=True, slots=True)
class Edit:
    """A line of the program as it is, and as it should be."""

    where: str  #: ``file:line``.
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Advice:
    """The cause of a divergence and what to do about it."""

    cause: str  #: In words.
    edit: Edit | None = None  #: The line to change; None if no line is known that helps.
    command: str = ""
    """The command line that repeats itself, as a shell takes it; empty if none was found."""
    tried: str = ""
    """What was tried to find that out, and how it went; empty if nothing was."""
    closer: str = ""
    """The exact command that records more detail; empty if there is no more to see."""

    @property
    def keeps_tensors(self) -> bool:
        """Whether the closer look records the values themselves."""
        return " --keep " in self.closer or ", keep=[" in self.closer


@dataclass(frozen=True, slots=True)
class Verdict(Displayed):
    """The answer: the same, or the first divergence."""

    same: bool
    left: str
    right: str  #: The folders of the two recordings.
    compared: Compared
    first: Divergence | None = None
    reaches: bool = True
    """Whether the runs differ in a loss, in the parameters after a step, or in how many steps they
    have; True as well where the recordings do not tell."""
    tolerance: tuple[float, float] | None = None
    """rtol and atol, where statistics were compared and not bits."""
    propagated: int = 0  #: Later records that differ because their inputs do.
    independent: int = 0
    """Later records that differ although their inputs are the same: more than one cause."""
    by_module: tuple[tuple[str, int], ...] = ()
    """Differing records of each module, in the order in which they first differ."""
    map: tuple[Cell, ...] = ()
    losses: tuple[tuple[int, float | None, float | None], ...] = ()
    """Step, loss of the left run, loss of the right one; None where a run has no such step."""
    settings: tuple[Setting, ...] = ()
    across_ranks: tuple[str, ...] = ()
    """Ranks of one run that should be replicas and are not, one sentence each."""
    notes: tuple[str, ...] = ()
    """What a reader has to know of the comparison itself, one sentence each."""
    advice: Advice | None = None
    origin: LineOfOrigin | None = None
    """The line at which the divergence began, where both runs have followed their lines."""
    program: Program = UNKNOWN_PROGRAM  #: What the program has, as far as the recordings tell.
    about: tuple[RunFacts, ...] = ()
    """The facts of the left run and of the right one; none where a run was not recorded."""
    not_finite: tuple[NotFinite | None, ...] = (None, None)
    """Of the left run and of the right one; None where all losses are finite."""
    left_out: tuple[LeftOut, ...] = ()
    fed: int = 0
    """How many records differ and were not compared, as what differs in them comes from those."""
    agreed: Agreed | None = None
    """Up to where the runs agree; None where they are the same, or differ from the first step."""

    @property
    def repeats(self) -> bool:
        """Whether a command is known that repeats itself, or a line to change."""
        return self.advice is not None and bool(self.advice.command or self.advice.edit)

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as plain JSON values; NaN and infinities, which JSON lacks, as text.

        Of the map only cells in which something differs are listed.
        """
        differing = tuple(cell for cell in self.map if cell.differing)
        return {key: _plain(each) for key, each in asdict(replace(self, map=differing)).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
