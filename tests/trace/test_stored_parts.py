"""How a trace stores records: nothing is lost, and what a reader has to hold at once is bounded."""

from __future__ import annotations

import random
import tempfile
import tracemalloc
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrepro.trace import store
from torchrepro.trace.format import FORMAT, StepRow
from torchrepro.trace.reader import LONGEST, Trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrepro.trace.format import Row

SITES = 300
GROWTH = 50_000
"""Bytes that 2,000 more steps may take in memory."""


def _written(folder: Path, steps: Sequence[Sequence[Row]], dropped: int | None = None) -> Path:
    """Write records as the recorder does, drop those of a step again, and return their file."""
    to = store.Store(folder / "rank0.sqlite", shrinks=True)
    to.write_meta({"format": FORMAT, "level": "op", "rank": 0})
    to.add_threads([str(number) for number in range(3)])
    to.add_sites([("forward", "", "op", "", "")] * SITES)
    to.add_arguments(["1", "2"])
    first = 1
    for number, rows in enumerate(steps):
        to.add_records(list(rows))
        to.end_step(StepRow(number, first, len(rows), 0, b"", b"", b"", {}, finished=True))
        first += len(rows)
    if dropped is not None:
        to.drop(dropped)
        to.shrink(file=True)
    to.finish({})
    return to.path


def _read(path: Path) -> list[list[Row]]:
    with closing(Trace(path)) as trace:
        return [
            [(one.thread, one.site, one.argument, one.inputs, one.outputs) for one in records]
            for records in map(trace.records, trace.steps)
        ]


def _step(number: int, length: int = 50) -> list[Row]:
    digests = random.Random(number)
    return [
        (0, 1 + at, at % 3, digests.randbytes(8), digests.randbytes(16)) for at in range(length)
    ]


row = st.tuples(
    *(st.integers(0, 2), st.integers(1, SITES), st.integers(0, 2)),
    *(st.sampled_from([b"", b"in" * 4, b"put" * 8]), st.sampled_from([b"", b"out." * 4])),
)


@given(steps=st.lists(st.lists(row, max_size=9), max_size=4), many=st.integers(1, 9))
@settings(max_examples=25)
def test_records_are_read_as_they_were_taken(steps: list[list[Row]], many: int) -> None:
    """Whatever records a step has, and in how many parts they lie, every one is read again."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "MANY", many)
        path = _written(Path(folder), steps)

        assert _read(path) == steps
        with closing(Trace(path)) as trace:
            records = [one for step in trace.steps for one in trace.records(step)]
            assert [trace.record(one.id) for one in records] == records
            assert [trace.step_of(one.id) for one in records] == [
                step for step, rows in enumerate(steps) for _ in rows
            ]
            for one in records:
                for value in {each.outputs[:8] for each in records if each.outputs}:
                    earlier = records[: one.id - 1]
                    writers = [each.id for each in earlier if each.outputs[:8] == value]
                    assert _last_writer(trace, value, one.id) == max(writers, default=None)


def _last_writer(trace: Trace, value: bytes, before: int) -> int | None:
    found = (part.last_writer(value, before) for part in trace.parts_before(before))
    return next((number for number in found if number is not None), None)


def test_what_records_are_takes_few_bytes(tmp_path: Path) -> None:
    """Besides its digests, a record of steps that are alike takes at most eight bytes on disk."""
    path = _written(tmp_path, [_step(number, 300) for number in range(200)])

    assert path.stat().st_size < 200 * 300 * (8 + 16 + 8)


def test_what_a_reader_holds_at_once_is_bounded(tmp_path: Path) -> None:
    """Many digests become several parts; records without any take room in the file too."""
    steps = [[(0, 1, 0, bytes(6 << 20), bytes(16))] * 5, *[[(0, 1, 0, b"", b"")] * 5000] * 40]
    path = _written(tmp_path, steps)

    with closing(Trace(path)) as trace:
        assert max(len(part.inputs) for part in trace.parts(0)) <= store.LARGE
    assert path.stat().st_size > sum(map(len, steps)) + 5 * (6 << 20)
    assert _read(path) == steps


def test_dropped_records_leave_their_step(tmp_path: Path) -> None:
    """A step whose records are gone says so and keeps its digest; the others keep records and ids.

    However many they were, they are not counted among those that a file of this size can hold.
    """
    steps = [_step(0), [(0, 1, 0, b"", b"")] * 200_000, _step(1)]
    path = _written(tmp_path, steps, dropped=1)

    assert path.stat().st_size < 100_000
    assert _read(path) == [steps[0], [], steps[2]]
    (tmp_path / "other").mkdir()
    complete = _written(tmp_path / "other", steps)
    with closing(Trace(path)) as trace, closing(Trace(complete)) as other:
        assert [row.dropped for row in trace.steps.values()] == [False, True, False]
        assert trace.records(2) == other.records(2)
        assert [(row.digest, row.first, row.records) for row in trace.steps.values()] == [
            (row.digest, row.first, row.records) for row in other.steps.values()
        ]


def test_a_long_run_whose_every_step_differs_takes_no_more_memory(tmp_path: Path) -> None:
    """What a recorder holds of steps that it has written does not grow with their number."""
    to = store.Store(tmp_path / "rank0.sqlite")
    rows, held = _step(0), []
    tracemalloc.start()
    try:
        for number in range(3000):
            random.Random(number).shuffle(rows)
            to.add_records(rows)
            to.end_step(StepRow(number, 1 + 50 * number, 50, 0, b"", b"", b"", {}, finished=True))
            if number % 1000 == 999:
                held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    to.close()

    assert held[2] - held[0] < GROWTH


def test_a_step_may_have_more_names_than_what_is_said_of_a_run(tmp_path: Path) -> None:
    """A program without an optimizer is one step, whose names take as much as they take."""
    to = store.Store(tmp_path / "rank0.sqlite", shrinks=False)
    to.write_meta({"format": FORMAT, "level": "op", "rank": 0})
    to.add_threads(["main"])
    to.add_sites([("forward", "", "op", "", "")])
    to.add_arguments([f"{number}".zfill(LONGEST // 64) for number in range(65)])
    to.add_records([(0, 1, 65, b"", b"out." * 4)])
    to.end_step(StepRow(0, 1, 1, 0, b"", b"", b"", {}, finished=True))
    to.finish({})

    with closing(Trace(to.path)) as trace:
        assert trace.arguments[65].lstrip("0") == "64"
