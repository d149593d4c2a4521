"""How a trace stores records: what repeats is written once, and nothing is lost."""

from __future__ import annotations

import random
import sqlite3
import tempfile
import tracemalloc
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrepro.trace import sequences, store
from torchrepro.trace.format import FORMAT, WITH_ROWS, StepRow, as_bytes
from torchrepro.trace.reader import Trace
from torchrepro.trace.sequences import Recent, packed, unpacked

from ..older_traces import rewrite

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torchrepro.trace.format import Row

SITES = 300
GROWTH = 50_000
"""Bytes that 2,000 more steps may take in memory."""


def _written(folder: Path, steps: Sequence[Sequence[Row]]) -> Path:
    """Write records as the recorder does, and return their file."""
    path = folder / "rank0.sqlite"
    to = store.Store(path)
    to.write_meta({"format": FORMAT, "level": "op", "rank": 0, "finished": True})
    to.add_threads([(number, str(number)) for number in range(3)])
    to.add_sites((number, ("forward", "", "op", "", "")) for number in range(1, SITES + 1))
    to.add_arguments((number, str(number)) for number in range(1, 3))
    first = 1
    for number, rows in enumerate(steps):
        to.add_records(list(rows))
        to.end_step(StepRow(number, first, len(rows), 0, b"", b"", {}, finished=True))
        first += len(rows)
    to.close()
    return path


def _read(path: Path) -> list[list[Row]]:
    trace = Trace(path)
    with closing(trace):
        return [
            [(one.thread, one.site, one.argument, one.inputs, one.outputs) for one in records]
            for records in map(trace.records, trace.steps)
        ]


def _asked(path: Path, question: str) -> Any:
    with closing(sqlite3.connect(path)) as file:
        return file.execute(question).fetchone()[0]


def _step(number: int, length: int = 50) -> list[Row]:
    digests = random.Random(number)
    return [
        (0, 1 + at, at % 3, digests.randbytes(8), digests.randbytes(16)) for at in range(length)
    ]


row = st.tuples(
    *(st.integers(0, 2), st.integers(1, SITES), st.integers(0, 2)),
    *(st.sampled_from([b"", b"in" * 4, b"put" * 8]), st.sampled_from([b"", b"out." * 4])),
)


@pytest.mark.parametrize("version", [FORMAT, WITH_ROWS])
@given(steps=st.lists(st.lists(row, max_size=9), max_size=4), many=st.integers(1, 9))
@settings(max_examples=25)
def test_records_are_read_as_they_were_taken(
    version: int, steps: list[list[Row]], many: int
) -> None:
    """Whatever records a step has, and in how many parts they lie, every one is read again."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "MANY", many)
        path = _written(Path(folder), steps)
        if version != FORMAT:
            rewrite(path, version)

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


def test_what_repeats_is_written_once(tmp_path: Path) -> None:
    """Steps of the same ops share all that is not a digest, and one that differs adds its own."""
    steps = [_step(number) for number in range(20)]
    alike = _asked(_written(tmp_path, steps), "select count(*) from sequence")
    steps[7][3] = (0, 1 + 3, 2, *steps[7][3][3:])
    (tmp_path / "other").mkdir()
    path = _written(tmp_path / "other", steps)

    assert (alike, _asked(path, "select count(*) from sequence")) == (5, 6)
    assert _asked(path, "select count(*) from part") == len(steps)
    assert _read(path) == steps


def test_digests_that_are_too_much_for_a_part_become_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a reader has to hold at once is bounded, however many tensors an op reads."""
    monkeypatch.setattr(store, "LARGE", 1000)
    rows = [(0, 1 + at, 0, bytes(96 * at), bytes(16)) for at in range(20)]
    path = _written(tmp_path, [rows])
    largest = _asked(path, "select max(length(inputs)) from part")

    assert largest < 2000
    assert _read(path) == [rows]


def test_a_file_has_a_byte_for_each_record(tmp_path: Path) -> None:
    """Records without any digest take room too, so that a reader can bound what it reads."""
    steps = [[(0, 1, 0, b"", b"")] * 5000] * 40
    path = _written(tmp_path, steps)

    assert path.stat().st_size > sum(map(len, steps))
    assert _read(path) == steps


def test_records_that_were_dropped_are_not_counted_among_those_of_a_file(tmp_path: Path) -> None:
    """A file of a few bytes may say of a great many records that they are no longer there."""
    few = [_step(1)]
    path = _written(tmp_path, [*few, [(0, 1, 0, b"", b"")] * 200_000])
    with closing(sqlite3.connect(path)) as file:
        file.execute("delete from part where first > 50")
        file.execute("delete from sequence where id > 5")
        file.execute("insert into dropped values (1)")
        seal = xxhash.xxh3_128_digest(as_bytes([(1,)]))
        file.execute("update seal set digest = ? where name = 'dropped'", (seal,))
        file.commit()
        file.execute("vacuum")

    assert path.stat().st_size < 100_000
    assert _read(path) == [*few, []]


def test_sequences_are_forgotten_and_memory_stays_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program whose every step differs is recorded as any other, in bounded memory."""
    held = []

    class Watched(Recent[Any, Any]):
        def add(self, key: Any, value: Any, numbers: int) -> None:
            super().add(key, value, numbers)
            held.append(sum(map(len, (*self._used, *self._older))))

    monkeypatch.setattr(store, "Recent", lambda: Watched(1000))
    steps = [random.Random(number).sample(_step(number), 50) for number in range(60)]
    path = _written(tmp_path, steps)

    assert 500 < max(held) <= 1000
    assert _read(path) == steps


def test_a_long_run_whose_every_step_differs_takes_no_more_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a recorder holds of sequences does not grow with the number of steps."""
    monkeypatch.setattr(store, "Recent", lambda: Recent(1000))
    to = store.Store(tmp_path / "rank0.sqlite")
    rows, held = _step(0), []
    with _traced_memory():
        for number in range(3000):
            random.Random(number).shuffle(rows)
            to.add_records(rows)
            to.end_step(StepRow(number, 1 + 50 * number, 50, 0, b"", b"", {}, finished=True))
            if number % 1000 == 999:
                held.append(tracemalloc.get_traced_memory()[0])
    to.close()

    assert held[2] - held[0] < GROWTH


@contextmanager
def _traced_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_numbers_are_packed_into_as_few_bytes_as_the_largest_takes(numbers: list[int]) -> None:
    """A sequence is read as it was written, and has one way to be written."""
    content = packed(numbers)

    assert unpacked(content) == tuple(numbers)
    assert content[0] == next(width for width in (1, 2, 4) if max(numbers) < 1 << 8 * width)
    assert len(content) == 1 + content[0] * len(numbers)


@pytest.mark.parametrize("content", [b"", b"\1", b"\3abc", b"\2abc", b"\0a"])
def test_what_is_no_sequence_is_refused(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that no recorder writes are not read as numbers, nor more than a part can have."""
    with pytest.raises(ValueError, match="not valid"):
        unpacked(content)
    monkeypatch.setattr(sequences, "MANY", 2)
    with pytest.raises(ValueError, match="not valid"):
        unpacked(packed([1, 2, 3]))
