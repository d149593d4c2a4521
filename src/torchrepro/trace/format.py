"""The format of a trace: the tables, the values in their rows, and the encoding of records."""

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
"""Who started a recording: ``torchrepro run --record``, or the program, by calling `record`."""

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
"""The classes below document the columns. Tables have no indexes, so each value is stored
once, and a changed value is always read.

`step` has a row for each step. Its `seal` covers the row and, by the digests in it, all rows of the
step in other tables, so a row that was changed, moved or removed is detected. In a finished trace,
`meta` has the number of steps. Each step is written in one transaction.
"""

DETAILS = ("statistics", "tensor")
"""Tables with details of single records; rows are ordered by the first three columns."""

SEAL = "seal"
"""The key of `meta` whose value is a digest of all its other rows."""

MANY = 1 << 16
"""The most records in a part."""

INPUT = 8
"""Bytes of the digest of an input: the first half of the tensor's fingerprint."""

OUTPUT = 16
"""Bytes of the fingerprint of an output."""

MAIN = 0
"""The number of the main thread. Only the records of this thread have a fixed order."""

UNINITIALIZED_INPUT = b"not set "
"""Placeholder for the digest of an uninitialized input."""

PARTLY = b"part"
"""The first bytes of the fingerprint of partly uninitialized memory. The remaining bytes depend on
the values and regions that ops wrote, not on the memory itself."""

NEW_TENSOR = "new tensor"
"""The op of a record of a tensor that was created from Python or numpy values."""

OPTIMIZER_STEP = ".step()"
"""The end of the op in a record of an optimizer. The record has the optimizer's arguments as JSON,
with one mapping per group."""

ARGUMENTS = "the arguments of "
"""The beginning of the name of an optimizer's arguments in the end state."""


@dataclass(frozen=True, slots=True)
class Site:
    """The op, source line, module, phase and output shapes that many records share."""

    phase: str
    """``forward``, ``backward``, ``optimizer``, ``data`` or ``collective``."""
    module: str
    """Path of the module within its model, or the class of a model. Empty outside modules."""
    op: str
    source: str
    """``file:line`` of the user's code."""
    outputs: str
    """Dtype and shape of each output, such as ``float32[32, 64], int64[]``."""

    @property
    def key(self) -> tuple[str, str, str]:
        """The fields of a site that must be equal to align records of two runs."""
        return self.phase, self.module, self.op


@dataclass(frozen=True, slots=True)
class Record:
    """The record of an op that ran, with digests of the op's inputs and outputs."""

    id: int
    thread: int
    site: int
    argument: int
    inputs: bytes
    """The first 8 bytes of each input tensor's fingerprint, concatenated."""
    outputs: bytes
    """16 bytes per output tensor; empty for a view, which shares the memory of its base."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A tensor that a backward pass started from."""

    step: int
    value: float | None
    fingerprint: bytes
    source: str
    thread: int = MAIN

    @property
    def is_finite(self) -> bool:
        """Whether the loss has a value and the value is finite."""
        return self.value is not None and math.isfinite(self.value)


Fingerprint = bytes


@dataclass(frozen=True, slots=True)
class StepRow:
    """The summary of one step, as a row of the table `step`."""

    step: int
    first: int
    """The id of its first record; ids are consecutive."""
    records: int
    bytes: int
    """The size of all tensors that were read to compute the step's fingerprints."""
    parameters: Fingerprint
    gradients: Fingerprint
    arguments: Fingerprint
    """A digest of the arguments of the optimizers, such as the learning rate."""
    random: Mapping[str, str]
    """A fingerprint of the state of each generator at the end of the step."""
    finished: bool
    """Whether an optimizer, or the program itself, has ended the step.

    The last row of a trace is unfinished if the program ran ops after its last step. It is not
    counted as a step; its number is the one that the next step would have had.
    """
    level: str = "op"
    """The level of the recording in this step."""
    digest: Fingerprint = b""
    """A digest of the records of the step; the store fills it in."""
    details: Fingerprint = b""
    """A digest of the statistics and tensors of the step, if any; the store fills it in."""
    parts: int = 0
    """The number of rows of `part` with the records of the step; the store fills it in."""
    thread: int = MAIN
    """The thread that ended the step."""

    @property
    def dropped(self) -> bool:
        """Whether the records of the step were deleted. The other facts about the step stay."""
        return bool(self.records) and not self.parts


@dataclass(frozen=True, eq=False)
class Outline:
    """Threads, sites, arguments and digest lengths of consecutive records, without the digests.

    Steps repeat, so many parts have equal outlines. Such parts mostly share one object, which can
    serve as the key of a cache.
    """

    digest: bytes
    threads: Sequence[int]
    sites: Sequence[int]
    arguments: Sequence[int]
    input_lengths: Sequence[int]
    """The number of bytes of input digests of each record."""
    output_lengths: Sequence[int]

    def __len__(self) -> int:
        return len(self.sites)

    @cached_property
    def input_ends(self) -> Sequence[int]:
        """For each record, the position in `Part.inputs` where its input digests end."""
        return _ends(self.input_lengths)

    @cached_property
    def output_ends(self) -> Sequence[int]:
        """For each record, the position in `Part.outputs` where its output digests end."""
        return _ends(self.output_lengths)

    @cached_property
    def limits(self) -> tuple[int, int, int, int]:
        """The largest thread number, the smallest and largest site, and the largest argument."""
        threads, sites, arguments = map(np.asarray, (self.threads, self.sites, self.arguments))
        return int(threads.max()), int(sites.min()), int(sites.max()), int(arguments.max())


def _ends(lengths: Sequence[int]) -> Sequence[int]:
    return array("Q", np.cumsum(lengths, dtype=np.uint64).tobytes())


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive records of a step. A step has one part, or several if it is long."""

    first: int
    """The id of its first record; ids are consecutive."""
    outline: Outline
    """In the file, five numbers for each record, compressed with zlib."""
    inputs: bytes
    """The first 8 bytes of each input tensor's fingerprint, record by record."""
    outputs: bytes
    """16 bytes per output tensor, record by record; nothing for a view."""

    def __len__(self) -> int:
        return len(self.outline)

    @property
    def ids(self) -> range:
        return range(self.first, self.first + len(self))

    def record(self, number: int) -> Record:
        outline, index = self.outline, number - self.first
        end, output_end = outline.input_ends[index], outline.output_ends[index]
        return Record(
            *(number, outline.threads[index], outline.sites[index], outline.arguments[index]),
            self.inputs[end - outline.input_lengths[index] : end],
            self.outputs[output_end - outline.output_lengths[index] : output_end],
        )

    def last_writer(self, value: bytes, before: int) -> int | None:
        """Return the last id below `before` of a record that outputs `value`, or None."""
        ends, lengths = self.outline.output_ends, self.outline.output_lengths
        index = min(before - self.first, len(self))
        end = ends[index - 1] if index > 0 else 0
        while (position := self.outputs.rfind(value, 0, end)) >= 0:
            index = bisect_right(ends, position)
            if (position - ends[index] + lengths[index]) % OUTPUT == 0:  # not across two digests
                return self.first + index
            end = position + len(value) - 1
        return None


Row = tuple[int, int, int, bytes, bytes]
"""A new record: thread, site, argument, inputs, outputs."""

_WIDTH = 20
"""Bytes per record of an outline: five numbers of 32 bits, little-endian."""


def packed(columns: Sequence[Sequence[int]]) -> bytes:
    """Return the columns of an outline as bytes, column by column."""
    return b"".join(struct.pack(f"<{len(column)}I", *column) for column in columns)


@lru_cache(maxsize=32)
def unpacked(content: bytes) -> Outline:
    """Return the outline that `content` encodes. Raises `ValueError` if `content` is invalid."""
    unpacking = zlib.decompressobj()
    try:
        plain = unpacking.decompress(content, _WIDTH * MANY + 1)
    except zlib.error:
        plain = b""
    count, remainder = divmod(len(plain), _WIDTH)
    if remainder or not 0 < count <= MANY or not unpacking.eof or unpacking.unused_data:
        raise ValueError("the outline of its records is not valid")
    numbers = np.frombuffer(plain, "<u4").astype(np.uint32).reshape(-1, count)
    columns = (array("I", column.tobytes()) for column in numbers)
    return Outline(xxhash.xxh3_128_digest(plain), *columns)


def digest_of(rows: Iterable[tuple[Any, ...]]) -> bytes:
    """Return a digest of the values in `rows` and of their types, or empty bytes without rows.

    Version 2 of marshal encodes equal values as equal bytes, and different types differently.
    """
    digest, row = xxhash.xxh3_128(), None
    for row in rows:
        digest.update(marshal.dumps(row, 2))
    return b"" if row is None else digest.digest()
