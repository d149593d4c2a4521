"""Traces as they are read again."""

from __future__ import annotations

import re
import sqlite3
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrepro.errors import TraceError
from torchrepro.messages import Problem
from torchrepro.trace.integrity import (
    check_records,
    check_tables,
    connected,
    format_of,
    has_begun,
    meta_of,
    steps_of,
)
from torchrepro.trace.store import SCHEMAS, SUFFIX, WITHOUT_SEALS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrepro.trace.store import StepRow

INPUT = 8
"""Bytes of the fingerprint of an input: the first half of the whole one."""

OUTPUT = 16
"""Bytes of the fingerprint of an output."""

UNINITIALISED = b"not set "
"""Stands for an input whose memory nothing had written."""

PARTLY = b"part"
"""How the fingerprint begins of memory that ops had written in part: the rest of it is of what
was written, where, and not of the bytes."""


@dataclass(frozen=True, slots=True)
class Site:
    """A place of the program that computes: what records of one kind have in common."""

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
        """What two runs have in common where they do the same."""
        return self.phase, self.module, self.op


@dataclass(frozen=True, slots=True)
class Record:
    """An op that ran: in a trace's order, by its place, with what it read and wrote."""

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


class Trace:
    """One process of a recorded run, as it is when it is opened.

    Raises `TraceError` for a file that is no trace, one that is not whole, and one of a later
    format. Without `records`, what belongs to single records is neither checked nor to be read.
    """

    def __init__(self, path: Path, *, records: bool = True) -> None:
        self.path = path
        try:
            with connected(path) as self.connection:
                self._read(records=records)
        except TraceError:
            raise
        except ValueError as error:
            raise TraceError(Problem(f"a damaged trace: {error}", str(path))) from None
        except sqlite3.Error as error:
            raise TraceError(Problem(f"cannot be read as a trace: {error}", str(path))) from None

    def _read(self, *, records: bool) -> None:
        its = format_of(self.connection)
        if its is None:
            raise TraceError(
                Problem(
                    "a trace of another format",
                    str(self.path),
                    legal=" or ".join(map(str, sorted(SCHEMAS))),
                    todo="read it with the version of torchrepro that wrote it",
                )
            )
        self.sealed = its != WITHOUT_SEALS
        """Whether it has digests, which show damage."""
        self.meta: Mapping[str, Any] = meta_of(self.connection)
        check_tables(self.connection, its, records=records)
        self.steps: Mapping[int, StepRow] = steps_of(self.connection, self.meta)
        """Every step by its number, in order."""
        if records:
            check_records(self.connection, self.steps, sealed=self.sealed)

    def close(self) -> None:
        """Let go of the file."""
        self.connection.close()

    @property
    def rank(self) -> int:
        """The rank of the process."""
        return int(self.meta["rank"])

    @property
    def is_cut(self) -> bool:
        """Whether the process did not come to write the end of it."""
        return not self.meta.get("finished")

    @cached_property
    def sites(self) -> Mapping[int, Site]:
        """Every site by its id."""
        rows = self.connection.execute("select id, phase, module, op, source, outputs from site")
        return {number: Site(*rest) for number, *rest in rows}

    @cached_property
    def arguments(self) -> Mapping[int, str]:
        """The text of arguments that are not tensors, by its id; 0 stands for none."""
        return {0: "", **dict(self.connection.execute("select id, text from argument"))}

    @cached_property
    def threads(self) -> Mapping[int, str]:
        """The name of each thread by its id; 0 is the main thread."""
        return dict(self.connection.execute("select id, name from thread"))

    @cached_property
    def losses(self) -> list[Loss]:
        """Every loss in its order."""
        rows = self.connection.execute(
            "select step, position, value, fingerprint, source from loss order by step, position"
        )
        return [Loss(*row) for row in rows]

    def rows(self, step: int) -> list[tuple[int, int, int, int, bytes, bytes]]:
        """Return the records of a step in order: id, thread, site, argument, inputs, outputs."""
        its = self.steps[step]
        return self.connection.execute(
            "select id, thread, site, argument, inputs, outputs from record"
            " where id >= ? and id < ? order by id",
            (its.first, its.first + its.records),
        ).fetchall()

    def records(self, step: int) -> list[Record]:
        """Return the records of a step in order."""
        return [Record(*row) for row in self.rows(step)]

    def statistics(self, record: int) -> list[tuple[int, int, float, float, float, float]]:
        """Return position, count, mean, norm, low and high of each output of a record."""
        return self.connection.execute(
            "select position, count, mean, norm, low, high from statistics"
            " where record = ? order by position",
            (record,),
        ).fetchall()

    def tensors(self, record: int) -> list[tuple[str, int, str, str, bytes]]:
        """Return role (``input``, ``output``), position, dtype, shape, bytes of what was kept."""
        return self.connection.execute(
            "select role, position, dtype, shape, data from tensor"
            " where record = ? order by role, position",
            (record,),
        ).fetchall()


def read_run(folder: Path | str, *, records: bool = True) -> list[Trace]:
    """Return the traces of a recorded run, by rank and by the order in which they began.

    Raises `TraceError` for a folder that is not there or holds no trace, or one that is not whole.
    Without `records` they are good for what they say of the run and its steps.
    """
    place = Path(folder)
    if place.is_file():
        raise TraceError(
            Problem("is a file", found=str(folder), todo="name the folder of the recording")
        )
    if not place.is_dir():
        raise TraceError(Problem("no such folder", found=str(folder)))
    files = sorted(filter(_begun, place.glob(f"rank*{SUFFIX}")), key=_order)
    if not files:
        raise TraceError(
            Problem(
                "holds no trace",
                found=str(folder),
                todo="record one: torchrepro run PROFILE --record DIR -- COMMAND; "
                "a run that ended before its first step leaves none",
            )
        )
    return [Trace(path, records=records) for path in files]


def _begun(path: Path) -> bool:
    """Whether a process has written anything to its file.

    A file that cannot be read as a trace at all counts as begun; whoever opens it says why.
    """
    try:
        with connected(path) as connection:
            begun = has_begun(connection)
    except (ValueError, sqlite3.Error):
        return True
    connection.close()
    return begun


def _order(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.name)]
