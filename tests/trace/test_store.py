"""The store of a trace: no record is lost, and its size on disk and in memory is bounded."""

from __future__ import annotations

import os
import random
import re
import signal
import tempfile
import threading
import tracemalloc
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchrepro
from torchrepro import TraceError
from torchrepro.ground.errors import size
from torchrepro.trace import store
from torchrepro.trace.format import FORMAT, StepRow
from torchrepro.trace.reader import LONGEST, Trace, read_run
from torchrepro.trace.request import SMALLEST, bytes_of

from .conftest import Net, weights_trained

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchrepro.trace.format import Row

SITES = 300
GROWTH = 50_000
"""Bytes that 2,000 more steps may take in memory."""


def _written(
    folder: Path,
    steps: Sequence[Sequence[Row]],
    dropped: int | None = None,
    arguments: Sequence[str] = ("1", "2"),
    clean: Callable[[Any], Any] = lambda text: text,
) -> Path:
    """Write records as the recorder does, drop those of a step, and return the file."""
    to = store.Store(folder / "rank0.sqlite", clean, shrinks=True)
    to.write_meta({"format": FORMAT, "level": "op", "rank": 0})
    to.add_threads([str(number) for number in range(3)])
    to.add_sites([("forward", "", "op", "", "")] * SITES)
    to.add_arguments(arguments)
    for number, rows in enumerate(steps):
        _write_step(to, number, rows)
    if dropped is not None:
        to.drop(dropped)
        to.shrink(file=True)
    to.finish({})
    return to.path


def _write_step(to: store.Store, number: int, rows: Sequence[Row]) -> None:
    first = to.records + 1
    to.add_records(list(rows))
    to.end_step(StepRow(number, first, len(rows), 0, b"", b"", b"", {}, finished=True))


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
def test_records_are_read_as_they_were_written(steps: list[list[Row]], many: int) -> None:
    """All records of a step are read again, in any number of parts."""
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


def test_the_outline_of_a_record_takes_few_bytes(tmp_path: Path) -> None:
    """If steps repeat, a record takes at most eight bytes on disk in addition to its digests."""
    path = _written(tmp_path, [_step(number, 300) for number in range(200)])

    assert path.stat().st_size < 200 * 300 * (8 + 16 + 8)


@pytest.mark.slow
def test_the_memory_of_a_reader_is_bounded(tmp_path: Path) -> None:
    """Many digests are split into parts; records without digests also take space in the file."""
    steps = [[(0, 1, 0, bytes(6 << 20), bytes(16))] * 5, *[[(0, 1, 0, b"", b"")] * 5000] * 40]
    path = _written(tmp_path, steps)

    with closing(Trace(path)) as trace:
        assert max(len(part.inputs) for part in trace.parts(0)) <= store.LARGE
    assert path.stat().st_size > sum(map(len, steps)) + 5 * (6 << 20)
    assert _read(path) == steps


def test_dropping_records_keeps_their_step(tmp_path: Path) -> None:
    """A dropped step is marked and keeps its digest; other steps keep their records and ids.

    Dropped records do not count for the limit of records that a file of a size can have.
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


@pytest.mark.slow
def test_memory_does_not_grow_if_every_step_differs(tmp_path: Path) -> None:
    """The memory of a recorder does not grow with the number of steps."""
    to = store.Store(tmp_path / "rank0.sqlite")
    rows, held = _step(0), []
    tracemalloc.start()
    try:
        for number in range(3000):
            random.Random(number).shuffle(rows)
            _write_step(to, number, rows)
            if number % 1000 == 999:
                held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    to.close()

    assert held[2] - held[0] < GROWTH


@pytest.mark.slow
def test_the_names_of_a_step_may_be_longer_than_a_value_of_meta(tmp_path: Path) -> None:
    """A program without an optimizer is one step, whose names may be long."""
    names = [f"{number}".zfill(LONGEST // 64) for number in range(65)]
    path = _written(tmp_path, [[(0, 1, 65, b"", b"out." * 4)]], arguments=names)

    with closing(Trace(path)) as trace:
        assert trace.arguments[65].lstrip("0") == "64"


def _with_a_mark(value: Any) -> Any:
    return [f"{text}*" for text in value] if isinstance(value, list) else value


def test_a_text_is_redacted_whatever_its_quotes(tmp_path: Path) -> None:
    """The arguments of an optimizer are JSON, all others have Python's syntax."""
    texts = ["'a'", '[{"lr": "a"}]', "1"]
    path = _written(tmp_path, [_step(0, 1)], arguments=texts, clean=_with_a_mark)

    with closing(Trace(path)) as trace:
        found = [trace.arguments[number] for number in (1, 2, 3)]
    assert found == ["'a'*", '[{"lr": "a"}]*', "1"]


# Recordings that may take so many bytes on disk.

STEPS = 150
MB = 10**6


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _trace(folder: Path) -> Trace:
    (trace,) = read_run(folder)
    return trace


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make this process rank 1 of a number of ranks."""

    def make(count: int) -> None:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", str(count))

    return make


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("most", "asked", "count"),
    [
        (MB, {}, 2),
        (MB, {"every": 3}, 2),
        (3 * MB // 4, {}, 4),
        (MB, {"keep": ["layers.0*"], "statistics": True}, 2),
        (2 * MB, {"level": "step"}, 2),
        (700_000, {"level": "module", "every": 2}, 2),
    ],
)
def test_a_recording_stays_within_its_share(
    tmp_path: Path,
    most: int,
    asked: dict[str, object],
    count: int,
    ranks: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After every step the folder is within the size; the last steps keep their records."""
    folder, sizes = tmp_path / "run", []
    steps = STEPS if asked.get("level") != "step" else 500

    ranks(count)
    with torchrepro.record(folder, max_size=count * most, **asked):
        weights = weights_trained(steps, lambda _: sizes.append(_bytes_in(folder)))

    assert max(sizes) <= most
    assert _bytes_in(folder) <= most
    assert weights == weights_trained(steps)
    trace = _trace(folder)
    for level in ("op", "module", "step"):
        rows = [row.dropped for row in trace.steps.values() if row.level == level]
        assert rows == sorted(rows, reverse=True)
    dropped = [step for step, row in trace.steps.items() if row.dropped]
    assert trace.meta["max_size"] == count * most
    assert bool(dropped) == ("dropped: the records of" in capsys.readouterr().err)
    for step, row in trace.steps.items():
        assert len(trace.records(step)) == (0 if row.dropped else row.records)
        assert not row.finished or (row.parameters and row.gradients)


@pytest.mark.parametrize(
    ("every", "most", "count"), [(1, 500_000, 150), (3, 480_000, 150), (50, 480_000, 450)]
)
def test_the_oldest_steps_in_full_are_dropped_first_and_the_last_two_at_the_end(
    tmp_path: Path, every: int, most: int, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Coarse steps are dropped only when at most two full ones are left; the end reports it."""
    folder = tmp_path / "run"
    with torchrepro.record(folder, max_size=most, every=every):
        weights_trained(count)

    steps = {step: row for step, row in _trace(folder).steps.items() if row.finished}
    in_full = [step for step, row in steps.items() if row.level == "op" and not row.dropped]
    others = [step for step, row in steps.items() if row.level == "step"]
    dropped = [step for step, row in steps.items() if row.dropped]
    lost = [step for step in others if steps[step].dropped]
    assert in_full == [step for step in steps if step % every == 0][-len(in_full) :]
    assert len(in_full) >= 2
    assert len(in_full) == 2 or not lost
    assert bool(lost) == (every == 50)
    said = capsys.readouterr().err
    assert f"takes {size(_bytes_in(folder))} of {size(most)}" in said
    assert f"kept in full: {_in_words(in_full)};" in said
    assert f"dropped: the records of {_in_words(dropped)};" in said
    assert ("kept at level step" in said) == (every > 1)


def _in_words(steps: list[int]) -> str:
    if len(steps) == 2:
        return f"steps {steps[0]} and {steps[1]}"
    ends = f"steps {steps[0]} to {steps[-1]}"
    return ends if len(steps) > steps[-1] - steps[0] else f"{len(steps)} of the {ends}"


def test_a_size_that_is_too_small_for_a_step_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: Callable[[int], None]
) -> None:
    """It is reported at once and at the end, with the size of a step and the share."""
    ranks(2)
    with torchrepro.record(tmp_path / "run", max_size=600_000, keep=["layers*"], statistics=True):
        weights_trained(40)
    said = capsys.readouterr().err

    assert all(row.dropped for row in _trace(tmp_path / "run").steps.values())
    assert len(re.findall(r"a step needs up to [\d.]+ kB: 300 kB \(its share of 600 kB", said)) == 2
    assert said.count("for 2 ranks) has room for no step in full") == 2
    assert "kept in full: none" in said


@pytest.mark.slow
def test_steps_that_grow_stay_within_the_size(tmp_path: Path) -> None:
    """If each step is larger than the one before it, the space of old steps is freed."""
    folder, sizes = tmp_path / "run", []
    with torchrepro.record(folder, max_size=2 * MB):
        for step in range(120):
            tensor = torch.ones(3)
            for _ in range(20 * step):
                tensor = tensor + 1
            torchrepro.end_step()
            sizes.append(_bytes_in(folder))

    assert max(sizes) <= 2 * MB
    rows = list(_trace(folder).steps.values())
    assert [row.dropped for row in rows] == sorted((row.dropped for row in rows), reverse=True)
    assert any(row.dropped for row in rows)
    assert not rows[-1].dropped


@pytest.mark.slow
def test_a_size_that_cannot_be_kept_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run continues without records, and every step is in the trace."""
    with torchrepro.record(tmp_path / "run", max_size=200_000, level="step"):
        weights_trained(400)

    assert capsys.readouterr().err.count("more than 200 kB: no records are left") == 1
    trace = _trace(tmp_path / "run")
    assert trace.ended_steps == 400
    assert all(row.dropped for row in trace.steps.values())


@pytest.mark.slow
def test_dropped_steps_are_compared_by_their_digests(tmp_path: Path) -> None:
    """A difference in a dropped step is found; the answer says which steps were compared how."""
    for name, at, asked in (
        ("whole", -1, {}),
        ("within", -1, {"max_size": MB * 3 // 4}),
        ("faulty", 20, {"max_size": MB * 3 // 4}),
        ("late", STEPS - 5, {"max_size": MB * 3 // 4}),
    ):
        with torchrepro.record(tmp_path / name, **asked):
            weights_trained(STEPS, lambda step, at=at: step == at and torch.randn(1))
    runs = {name: tmp_path / name for name in ("whole", "within", "faulty", "late")}

    same = torchrepro.compare(runs["whole"], runs["within"])
    early = torchrepro.compare(runs["within"], runs["faulty"])
    late = torchrepro.compare(runs["within"], runs["late"])

    assert same.same
    rows = _trace(runs["within"]).steps.values()
    left = sum(row.finished and not row.dropped for row in rows)
    state = "by parameters, gradients and losses"
    assert same.compared.by == (("op by op", left), (state, STEPS - left))
    dropped = (
        f"B dropped the records of {STEPS - left} steps (0 to {STEPS - left - 1}), to stay within"
    )
    assert any(note.startswith(f"{dropped} 750 kB: ") for note in same.notes)
    assert early.first is not None
    assert (early.first.step, early.first.op) == (20, "loss")
    assert early.agreed is not None
    assert (early.agreed.step, early.agreed.by, early.agreed.in_full) == (19, state, None)
    assert early.advice is not None
    assert "steps=(19, 21)" in early.advice.closer
    assert late.first is not None
    assert late.first.step == STEPS - 5
    assert late.first.op == "aten::randn"


def test_a_killed_recording_is_complete_and_within_its_size(tmp_path: Path) -> None:
    """Killed at any time, the trace marks dropped steps, and the others have their records."""
    weights_trained(1)
    for step in (3, 40, 41, 42, 100):
        folder = tmp_path / str(step)
        child = os.fork()
        if not child:
            torch.set_num_threads(1)
            with torchrepro.record(folder, max_size=MB, every=2):
                weights_trained(
                    STEPS,
                    lambda at, end=step + 1: at == end and os.kill(os.getpid(), signal.SIGKILL),
                )
        os.waitpid(child, 0)

        assert _bytes_in(folder) <= MB
        trace = _trace(folder)
        assert trace.is_truncated
        assert trace.ended_steps == step + 1
        assert all(row.dropped or trace.records(number) for number, row in trace.steps.items())


def test_every_accepted_size_has_room_for_a_trace_without_ops(
    tmp_path: Path, ranks: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a trace stays within the smallest size, which also limits the share of each rank."""
    folder, sizes = tmp_path / "run", []
    with torchrepro.record(folder, max_size=SMALLEST):
        for _ in range(9):
            torchrepro.end_step()
            sizes.append(_bytes_in(folder))

    assert SMALLEST / 4 < max(sizes) <= SMALLEST
    assert capsys.readouterr().err == ""
    ranks(3)
    with (
        pytest.raises(TraceError, match=r"each of 3 ranks has 200 kB of it(.|\n)*600 kB or more"),
        torchrepro.record(tmp_path / "ranks", max_size=3 * SMALLEST - 1),
    ):
        pass


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        *((500_000, 500_000), ("500000", 500_000), ("500MB", 500 * MB), ("2GiB", 2 << 30)),
        *(("1500.5 kB", 1_500_500), ("999TB", 999 * 10**12), ("700000 B", 700_000)),
        *(("500M", 500 * MB), ("2g", 2 * 10**9), ("2Gi", 2 << 30)),
    ],
)
def test_sizes_are_parsed_with_their_units(written: str | int, meant: int) -> None:
    """Decimal and binary units, in upper or lower case, with or without a B."""
    assert bytes_of(written) == meant


def test_each_step_stores_its_level(tmp_path: Path) -> None:
    """If steps end on other threads, no step is marked as recorded in full that was not."""
    with torchrepro.record(tmp_path / "run", every=2):
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(9):
            net(torch.ones(2, 4)).sum().backward()
            if step % 3:
                optimizer.step()
            else:
                thread = threading.Thread(target=optimizer.step)
                thread.start()
                thread.join()

    trace = _trace(tmp_path / "run")
    for step, row in trace.steps.items():
        forward = [one for one in trace.records(step) if trace.sites[one.site].phase == "forward"]
        assert (row.level == "op") == bool(forward), step
    assert {row.level for row in trace.steps.values()} == {"op", "step"}
