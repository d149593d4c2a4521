"""The format of a trace: its tables, the values of their rows, the digests in them."""

from __future__ import annotations

import marshal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT = 3
SUFFIX = ".sqlite"

BY_RUN, BY_PROGRAM = "run", "program"
"""Who asked for a recording: ``torchrepro run --record``, or the program by a call of `record`."""

_OF_EVERY_FORMAT = """
create table meta (key text primary key, value text not null) without rowid;
create table site (
    id integer primary key, phase text not null, module text not null, op text not null,
    source text not null, outputs text not null
);
create table argument (id integer primary key, text text not null);
create table thread (id integer primary key, name text not null);
create table loss (
    step integer not null, position integer not null, value real, fingerprint blob not null,
    source text not null
);
create table statistics (
    record integer not null, position integer not null, count integer not null,
    mean real, norm real, low real, high real, primary key (record, position)
) without rowid;
create table tensor (
    record integer not null, role text not null, position integer not null,
    dtype text not null, shape text not null, data blob not null
);
"""
_WITH_ROWS = """
create table step (
    step integer primary key, first integer not null, records integer not null,
    bytes integer not null,
    digest blob not null, parameters blob not null, gradients blob not null,
    random text not null, finished integer not null
);
create table record (
    id integer primary key, step integer not null, thread integer not null,
    site integer not null, argument integer not null, inputs blob not null, outputs blob not null
);
"""
_WITH_PARTS = """
create table step (
    step integer primary key, first integer not null, records integer not null,
    bytes integer not null,
    digest blob not null, details blob not null, parameters blob not null, gradients blob not null,
    random text not null, finished integer not null, level text not null
);
create table dropped (step integer not null);
create table part (
    first integer primary key, thread integer not null, site integer not null,
    argument integer not null, input_lengths integer not null, output_lengths integer not null,
    inputs blob not null, outputs blob not null
);
create table sequence (id integer primary key, numbers blob not null);
"""
_SEAL = "create table seal (name text primary key, digest blob not null) without rowid;"

WITHOUT_SEALS = 1
"""The format of 0.2.0."""

WITH_ROWS = 2
"""The last format that has a row for each record."""

SCHEMA = f"{_OF_EVERY_FORMAT}{_WITH_PARTS}{_SEAL}"
"""The values of the rows below say what the tables hold.

A step differs from the one before in its digests, and hardly ever in its ops. So a `part` holds the
digests of many records, and says by numbers of `sequence` what these records are: rows there are
written once. The digests of a `step` cover its parts and the sequences that they refer to, its
statistics and its tensors. `seal` has a digest of the rows of every other table. All of them are
written in the same transaction as what they cover.
"""

SCHEMAS = {
    WITHOUT_SEALS: f"{_OF_EVERY_FORMAT}{_WITH_ROWS}"
    "create index tensor_of_record on tensor (record);",
    WITH_ROWS: f"{_OF_EVERY_FORMAT}{_WITH_ROWS}{_SEAL}",
    FORMAT: SCHEMA,
}
"""The tables of every format that is still read."""

OF_RUN = ("meta", "site", "argument", "thread", "step", "loss")
"""Tables of the run as a whole and of its steps."""

DETAILS = ("statistics", "tensor")
"""Tables with details of single records. Since format 3 their step has a digest of them."""

SEALED: Mapping[int, tuple[str, ...]] = {
    WITHOUT_SEALS: (),
    WITH_ROWS: (*OF_RUN, *DETAILS),
    FORMAT: (*OF_RUN, "dropped"),
}
"""The tables of each format that have a digest of their own."""

MANY = 1 << 16
"""Records of a part at most."""

INPUT = 8
"""Bytes of the fingerprint of an input: the first half of the whole one."""

OUTPUT = 16
"""Bytes of the fingerprint of an output."""

UNINITIALISED = b"not set "
"""Stands for an input whose memory nothing had written."""

PARTLY = b"part"
"""Begins the fingerprint of memory that ops had written in part. The rest of it is of what was
written and where, not of the bytes."""

RETURNED = "()"
"""Ends the op of a record that says what a function of the program returned."""

SAMPLE = "sample "
"""Begins the argument of such a record where it is known which sample was loaded."""

BETWEEN = "; "
"""Stands between the sample and the numbers that the function was given."""


NEW_TENSOR = "new tensor"
"""The op of a record of a tensor that the program made from values of Python or numpy."""

OPTIMIZER_STEP = ".step()"
"""Ends the op of a record of the arguments of an optimizer, which are JSON: one mapping a group."""


@dataclass(frozen=True, slots=True)
class Site:
    """What records of one kind have in common: a place of the program that computes."""

    phase: str
    """``forward``, ``backward``, ``optimizer``, ``data`` or ``collective``."""
    module: str
    """Path of the module within its model; the class of a model itself; empty outside of all."""
    op: str
    source: str
    """``file:line`` of the user's code."""
    outputs: str
    """Dtype and shape of each output, as in ``float32[32, 64], int64[]``."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What aligned records of two runs have in common."""
        return self.phase, self.module, self.op


@dataclass(frozen=True, slots=True)
class Record:
    """An op that ran, with what it read and wrote."""

    id: int
    thread: int
    site: int
    argument: int
    inputs: bytes
    """The first 8 bytes of each input tensor's fingerprint, one after the other."""
    outputs: bytes
    """16 bytes per output tensor; none for a view, whose memory is another's."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What a backward pass began from."""

    step: int
    position: int
    value: float | None
    fingerprint: bytes
    source: str


Fingerprint = bytes


@dataclass(frozen=True, slots=True)
class StepRow:
    """The summary of a step."""

    step: int
    first: int
    """The id of its first record; the others follow."""
    records: int
    bytes: int
    """Bytes of all tensors that were read for the step's fingerprints."""
    parameters: Fingerprint
    gradients: Fingerprint
    random: Mapping[str, str]
    finished: bool
    """Whether an optimizer, or the program itself, has ended the step.

    The last row of a trace is unfinished where the program did anything after its last step. That
    part is no step. Its number is the one that the next step would have had.
    """
    level: str = "op"
    """The level at which it was recorded."""
    digest: Fingerprint = b""
    """Of its records; the store fills it in."""
    details: Fingerprint = b""
    """Of its statistics and tensors; the store fills it in. Empty if it has none."""
    dropped: bool = False
    """Whether its records are no longer there. All else of it is, their number included."""


@dataclass(frozen=True, slots=True)
class PartRow:
    """Records of a step that follow one another. A step has one part, or several if it is long."""

    first: int
    """The id of its first record; the others follow."""
    thread: int
    """The number of the sequence that has the thread of each record."""
    site: int
    """Likewise for their sites."""
    argument: int
    """Likewise for their arguments; 0 in that sequence stands for none."""
    input_lengths: int
    """Likewise for how many bytes of `inputs` belong to each record."""
    output_lengths: int
    """Likewise for `outputs`."""
    inputs: bytes
    """The first 8 bytes of each input tensor's fingerprint, record by record."""
    outputs: bytes
    """16 bytes per output tensor, record by record; none for a view, whose memory is another's."""


Row = tuple[int, int, int, bytes, bytes]
"""A record as it is taken: thread, site, argument, inputs, outputs."""

_HEAD = len(marshal.dumps([], 2))


def as_bytes(rows: list[Any]) -> memoryview:
    """Return rows as bytes for a digest; those of two lists are those of one after the other.

    Version 2 of marshal writes equal values as equal bytes, and values of different types as
    different ones.
    """
    return memoryview(marshal.dumps(rows, 2))[_HEAD:]
