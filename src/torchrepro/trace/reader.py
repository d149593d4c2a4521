"""Reads traces: the runs in a folder, and what is in the file of a process."""

from __future__ import annotations

import re
import sqlite3
from bisect import bisect_right
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrepro.errors import TraceError
from torchrepro.messages import Problem, near, some
from torchrepro.trace import integrity
from torchrepro.trace.format import FORMAT, SUFFIX, Part, unpacked
from torchrepro.trace.request import LEVELS, level_of_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torchrepro.trace.format import Loss, Outline, Record, Site, StepRow


class Trace:
    """One process of a recorded run, as its file is when it is opened.

    Raises `TraceError` for a file that is no trace, is damaged, or has another format. Without
    `records`, the records and their details are not checked and must not be read.
    """

    def __init__(self, path: Path, *, records: bool = True) -> None:
        self.path = path
        try:
            with integrity.connected(path) as self._connection:
                self._read(records=records)
        except TraceError:
            raise
        except ValueError as error:
            raise TraceError(Problem(f"a damaged trace: {error}", str(path))) from None
        except sqlite3.Error as error:
            raise TraceError(Problem(f"cannot be read as a trace: {error}", str(path))) from None

    def _read(self, *, records: bool) -> None:
        if not integrity.is_of_format(self._connection):
            raise TraceError(
                Problem(
                    "a trace of another format",
                    str(self.path),
                    legal=str(FORMAT),
                    todo="read it with the version of torchrepro that wrote it",
                )
            )
        self.meta: Mapping[str, Any] = integrity.meta_of(self._connection)
        found = integrity.Contents(self._connection, self.meta, integrity.size_of(self.path))
        if records:
            found.check_records()
            found.check_details()
        self.steps: Mapping[int, StepRow] = found.steps
        """Every step by its number, in order."""
        self.sites: Mapping[int, Site] = dict(enumerate(found.sites, 1))
        """Every site by its number."""
        self.arguments: Mapping[int, str] = dict(enumerate(["", *found.arguments]))
        """The text of arguments that are not tensors, by its number; 0 stands for none."""
        self.threads: Mapping[int, str] = dict(enumerate(found.threads))
        """The name of each thread by its number; 0 is the main thread."""
        self.losses: Sequence[Loss] = found.losses
        """Every loss in its order."""
        self._last_part: Part | None = None

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    @property
    def rank(self) -> int:
        """The rank of the process."""
        return int(self.meta["rank"])

    @property
    def is_truncated(self) -> bool:
        """Whether the process ended before it had written the end of the trace."""
        return not self.meta.get("finished")

    @property
    def ended_steps(self) -> int:
        """How many steps of the program are in it: what came after the last one is none."""
        return sum(row.finished for row in self.steps.values())

    def level_of(self, number: int) -> str:
        """Return the level at which a step was recorded, or would have been."""
        row = self.steps.get(number)
        if row is not None:
            return row.level
        return level_of_step(
            number, self.meta.get("level") or LEVELS[-1], self.meta.get("every") or 1
        )

    def ends_before(self, number: int) -> bool:
        """Whether it shows that the program ended no step of this number."""
        asked = self.meta.get("steps")
        row = self.steps.get(number)
        return not (
            self.is_truncated
            or (row and row.finished)
            or (asked and not asked[0] <= number <= asked[1])
        )

    def outlines(self, step: int) -> Iterator[Outline]:
        """Yield what the records of a step are, without their values; nothing if dropped."""
        row = self.steps[step]
        rows = self._connection.execute(
            "select outline from part where first >= ? and first < ? order by first",
            (row.first, row.first + row.records),
        )
        return (unpacked(content) for (content,) in rows)

    def parts(self, step: int) -> Iterator[Part]:
        """Yield the records of a step in parts that fit into memory; nothing if dropped."""
        row = self.steps[step]
        which = "where first >= ? and first < ? order by first"
        return self._parts(which, row.first, row.first + row.records)

    def parts_before(self, record: int) -> Iterator[Part]:
        """Yield all that came before a record, the last first; a part may go on after it."""
        return self._parts("where first < ? order by first desc", record)

    def _parts(self, which: str, *values: int) -> Iterator[Part]:
        rows = self._connection.execute(f"select * from part {which}", values)  # noqa: S608 - ours
        return (Part(first, unpacked(content), *rest) for first, content, *rest in rows)

    def records(self, step: int) -> list[Record]:
        """Return the records of a step in order."""
        return [part.record(number) for part in self.parts(step) for number in part.ids]

    def record(self, number: int) -> Record:
        """Return a record by its id."""
        part = self._last_part
        if part is None or number not in part.ids:
            part = self._last_part = next(self.parts_before(number + 1))
        return part.record(number)

    def step_of(self, record: int) -> int:
        """Return the step of a record by its id."""
        return self._steps[bisect_right(self._firsts, record) - 1]

    @cached_property
    def _steps(self) -> list[int]:
        return [row.step for row in self.steps.values() if row.records]

    @cached_property
    def _firsts(self) -> list[int]:
        return [self.steps[step].first for step in self._steps]

    def statistics(self, record: int) -> list[tuple[int, int, float, float, float, float]]:
        """Return position, count, mean, norm, low and high of each output of a record."""
        return self._connection.execute(
            "select position, count, mean, norm, low, high from statistics"
            " where record = ? order by position",
            (record,),
        ).fetchall()

    def statistics_of(self, records: range) -> Iterator[tuple[Any, ...]]:
        """Yield record, count, mean, norm, low and high of each output of some records."""
        return self._connection.execute(
            "select record, count, mean, norm, low, high from statistics"
            " where record >= ? and record < ? order by record, position",
            (records.start, records.stop),
        )

    def tensors(self, record: int) -> list[tuple[str, int, str, str, bytes]]:
        """Return role (``input``, ``output``), position, dtype, shape, bytes of kept tensors."""
        return self._connection.execute(
            "select role, position, dtype, shape, data from tensor"
            " where record = ? order by role, position",
            (record,),
        ).fetchall()


def read_run(folder: Path | str, *, records: bool = True) -> list[Trace]:
    """Return the traces of a recorded run, by rank and by the order in which they began.

    Raises `TraceError` for a folder that does not exist, holds no trace, or holds a damaged one.
    Without `records` the traces are for reading what they say of the run and its steps only.
    """
    place = Path(folder)
    if place.is_file():
        raise TraceError(
            Problem("is a file", found=str(folder), todo="name the folder of the recording")
        )
    if not place.is_dir():
        raise TraceError(Problem("no such folder", found=str(folder), **_beside(place)))
    files = sorted(place.glob(f"rank*{SUFFIX}"), key=_order)
    begun = list(filter(_begun, files))
    if not begun:
        todo = (
            "copy the whole folder: until a run ends, its steps may be in files that end in -wal; "
            "one that was killed before its first step ended has none"
            if files
            else "record one: torchrepro run PROFILE --record DIR -- COMMAND"
        )
        raise TraceError(Problem("holds no trace", found=str(folder), todo=todo))
    return [Trace(path, records=records) for path in begun]


def steps_so_far(folder: Path) -> int:
    """Return how many steps a run that may go on has ended, in the process that is furthest.

    A file is looked at only once its write-ahead log is there: a reader does not hold up who
    writes to it from then on (https://sqlite.org/wal.html#concurrency).
    """
    return max(map(_ended_steps, folder.glob(f"rank*{SUFFIX}-wal")), default=0)


def _ended_steps(log: Path) -> int:
    try:
        with integrity.connected(log.with_name(log.name.removesuffix("-wal"))) as connection:
            (number,) = connection.execute("select count(*) from step where finished").fetchone()
    except (ValueError, OSError, sqlite3.Error):
        return 0  # the process has ended meanwhile, or has not got so far
    connection.close()
    return int(number)


def _beside(place: Path) -> dict[str, str]:
    """Return the folder beside `place` whose name is nearest, or all that hold a recording."""
    above = place.parent
    others = sorted(each.name for each in above.iterdir()) if above.is_dir() else []
    recorded = [each for each in others if any((above / each).glob(f"rank*{SUFFIX}"))]
    close = near(place.name, recorded)
    if close:
        return {"near": str(above / close)}
    if recorded:
        return {"legal": some(str(above / each) for each in recorded)}
    return {"todo": "record one: torchrepro run PROFILE --record DIR -- COMMAND"}


def _begun(path: Path) -> bool:
    """Whether a process has written anything to its file.

    A file that cannot be read as a trace counts as begun, so that opening it says why.
    """
    try:
        with integrity.connected(path) as connection:
            begun = integrity.has_begun(connection)
    except (ValueError, sqlite3.Error):
        return True
    connection.close()
    return begun


def _order(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.name)]
