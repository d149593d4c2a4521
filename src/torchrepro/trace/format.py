"""The format of a trace: its tables, the values of their rows, how records lie in them."""

from __future__ import annotations

import marshal
import math
import struct
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import xxhash

FORMAT = 1
SUFFIX = ".sqlite"

BY_RUN, BY_PROGRAM = "run", "program"
"""Who asked for a recording: ``torchrepro run --record``, or the program by a call of `record`."""

SCHEMA = """
create table meta (key text primary key, value text not null) without rowid;
create table step (
    step integer primary key, first integer not null, records integer not null,
    parts integer not null, bytes integer not null, level text not null, finished integer not null,
    digest blob not null, details blob not null, parameters blob not null, gradients blob not null,
    arguments blob not null, random text not null, names text not null, losses text not null,
    seal blob not null
);
create table part (
    first integer primary key, outline blob not null, inputs blob not null, outputs blob not null
);
create table statistics (
    record integer not null, position integer not null, count integer not null,
    mean real, norm real, low real, high real, primary key (record, position)
) without rowid;
create table tensor (
    record integer not null, role text not null, position integer not null,
    dtype text not null, shape text not null, data blob not null,
    primary key (record, role, position)
) without rowid;
"""
"""The values of the rows below say what the tables hold. No value stands in two places of a file,
as it would in an index: a changed one is always the one that is read.

`step` has a row for each step, whose `seal` covers the row and, by the digests in it, all that
belongs to the step in other tables: a row that was changed, moved or lost does not fit it. A trace
that is finished says in `meta` how many steps it has. All of a step is written in one transaction.
"""

DETAILS = ("statistics", "tensor")
"""Tables with details of single records, whose first three columns give the order of their rows."""

SEAL = "seal"
"""The key of `meta` whose value is a digest of all its other rows."""

MANY = 1 << 16
"""Records of a part at most."""

INPUT = 8
"""Bytes of the fingerprint of an input: the first half of the tensor's."""

OUTPUT = 16
"""Bytes of the fingerprint of an output."""

MAIN = 0
"""The number of the main thread. Its order is the program's own; that of all others an accident."""

UNINITIALISED = b"not set "
"""Stands for an input whose memory nothing had written."""

PARTLY = b"part"
"""Begins the fingerprint of memory that ops had written in part. The rest of it is of what was
written and where, not of the bytes."""

NEW_TENSOR = "new tensor"
"""The op of a record of a tensor that the program made from values of Python or numpy."""

OPTIMIZER_STEP = ".step()"
"""Ends the op of a record of the arguments of an optimizer, which are JSON: one mapping a group."""


ARGUMENTS = "the arguments of "
"""Begins the name of what is left of an optimizer at the end, besides its state: no tensors."""


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
    value: float | None
    fingerprint: bytes
    source: str
    thread: int = MAIN

    @property
    def is_finite(self) -> bool:
        """Whether it is a number, neither NaN nor infinite."""
        return self.value is not None and math.isfinite(self.value)


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
    arguments: Fingerprint
    """Of what its optimizers were given as arguments, as a learning rate is."""
    random: Mapping[str, str]
    """JSON: the state of each generator when it ended."""
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
    parts: int = 0
    """How many rows of `part` have its records; the store fills it in."""
    thread: int = MAIN
    """The thread that ended it."""

    @property
    def dropped(self) -> bool:
        """Whether its records are no longer there. All else of it is, their number included."""
        return bool(self.records) and not self.parts


@dataclass(frozen=True, eq=False)
class Outline:
    """What records that follow one another are, apart from their values.

    Steps are alike. Parts whose outlines are equal mostly share one, which is a key for whatever is
    worked out of it.
    """

    digest: bytes
    threads: Sequence[int]
    sites: Sequence[int]
    arguments: Sequence[int]
    input_lengths: Sequence[int]
    """How many bytes of digests each record read."""
    output_lengths: Sequence[int]

    def __len__(self) -> int:
        return len(self.sites)

    @cached_property
    def input_ends(self) -> Sequence[int]:
        """Where the digests that a record read end among those of the part."""
        return _ends(self.input_lengths)

    @cached_property
    def output_ends(self) -> Sequence[int]:
        """Where the digests that a record wrote end among those of the part."""
        return _ends(self.output_lengths)

    @cached_property
    def limits(self) -> tuple[int, int, int, int]:
        """The largest number of a thread, the least and the largest of a site, and of arguments."""
        threads, sites, arguments = map(np.asarray, (self.threads, self.sites, self.arguments))
        return int(threads.max()), int(sites.min()), int(sites.max()), int(arguments.max())


def _ends(lengths: Sequence[int]) -> Sequence[int]:
    return array("Q", np.cumsum(lengths, dtype=np.uint64).tobytes())


@dataclass(frozen=True, slots=True)
class Part:
    """Records of a step that follow one another. A step has one part, or several if it is long."""

    first: int
    """The id of its first record; the others follow."""
    outline: Outline
    """Five numbers for each record, compressed with zlib."""
    inputs: bytes
    """The first 8 bytes of each input tensor's fingerprint, record by record."""
    outputs: bytes
    """16 bytes per output tensor, record by record; none for a view, whose memory is another's."""

    def __len__(self) -> int:
        return len(self.outline)

    @property
    def ids(self) -> range:
        return range(self.first, self.first + len(self))

    def record(self, number: int) -> Record:
        its, place = self.outline, number - self.first
        end, other_end = its.input_ends[place], its.output_ends[place]
        return Record(
            *(number, its.threads[place], its.sites[place], its.arguments[place]),
            self.inputs[end - its.input_lengths[place] : end],
            self.outputs[other_end - its.output_lengths[place] : other_end],
        )

    def last_writer(self, value: bytes, before: int) -> int | None:
        """Return the id of the last record before another that wrote what `value` stands for."""
        ends, lengths = self.outline.output_ends, self.outline.output_lengths
        place = min(before - self.first, len(self))
        end = ends[place - 1] if place > 0 else 0
        while (at := self.outputs.rfind(value, 0, end)) >= 0:
            place = bisect_right(ends, at)
            if (at - ends[place] + lengths[place]) % OUTPUT == 0:  # not across two digests
                return self.first + place
            end = at + len(value) - 1
        return None


Row = tuple[int, int, int, bytes, bytes]
"""A record as it is taken: thread, site, argument, inputs, outputs."""

_WIDTH = 20
"""Bytes of an outline for each record: five numbers of 32 bits, the lowest byte first."""


def packed(columns: Sequence[Sequence[int]]) -> bytes:
    """Return the columns of an outline as bytes, one column after the other."""
    return b"".join(struct.pack(f"<{len(column)}I", *column) for column in columns)


@lru_cache(maxsize=32)
def unpacked(content: bytes) -> Outline:
    """Return the outline of a part. Raises `ValueError` for bytes that are none."""
    unpacking = zlib.decompressobj()
    try:
        plain = unpacking.decompress(content, _WIDTH * MANY + 1)
    except zlib.error:
        plain = b""
    count, rest = divmod(len(plain), _WIDTH)
    if rest or not 0 < count <= MANY or not unpacking.eof or unpacking.unused_data:
        raise ValueError("what records are is not valid")
    numbers = np.frombuffer(plain, "<u4").astype(np.uint32).reshape(-1, count)
    columns = (array("I", column.tobytes()) for column in numbers)
    return Outline(xxhash.xxh3_128_digest(plain), *columns)


def digest_of(rows: Iterable[tuple[Any, ...]]) -> bytes:
    """Return a digest of rows with the types of their values; nothing if there are none.

    Version 2 of marshal writes equal values as equal bytes, and values of different types as
    different ones.
    """
    digest, row = xxhash.xxh3_128(), None
    for row in rows:
        digest.update(marshal.dumps(row, 2))
    return b"" if row is None else digest.digest()
