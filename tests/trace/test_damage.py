"""What is damaged, cut off or hostile is never the same as anything, and never a traceback."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import torchrepro
from torchrepro import TraceError
from torchrepro.trace.format import (
    DETAILS,
    FORMAT,
    MANY,
    OF_RUN,
    SEALED,
    WITH_ROWS,
    WITHOUT_SEALS,
    as_bytes,
)
from torchrepro.trace.reader import read_run
from torchrepro.verdict.value import Kind

from ..older_traces import rewrite
from .conftest import Net, train

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STEPS = 3
SOON = 2.0
"""Seconds."""

TRIES = 3
"""Answers of which the quickest counts: what else a machine does only adds to them."""

FILE = "rank0.sqlite"
TABLES = (*SEALED[FORMAT], *DETAILS, "part", "sequence", "seal")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The recordings of two runs that are the same, with all that a trace can hold."""
    folder = tmp_path_factory.mktemp("pair")
    for name in ("one", "two"):
        torch.manual_seed(0)
        net = Net()
        with torchrepro.record(folder / name, statistics=True, keep=("layers.0",)):
            train(net, steps=STEPS)
    assert torchrepro.compare(folder / "one", folder / "two").same
    return folder / "one", folder / "two"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that examples may write to one after the other."""
    return tmp_path_factory.mktemp("work")


def _copy(run: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(run, to)
    return to / FILE


def _ask(path: Path, statement: str, *values: Any) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection, connection:
        return connection.execute(statement, values).fetchall()


def _content(path: Path) -> list[list[Any]]:
    return [_ask(path, f"select * from {table}") for table in TABLES]


def _digest(content: bytes | str) -> bytes:
    return xxhash.xxh3_128_digest(content.encode() if isinstance(content, str) else content)


def _resealed(path: Path) -> None:
    """Give a trace the digests that fit its records and what it says of them."""
    for step, first, records in _ask(path, "select step, first, records from step"):
        digest = xxhash.xxh3_128()
        which = "where first >= ? and first < ? order by first"
        for row in _ask(
            path, f"select * from part {which}", first, min(first + records, 2**63 - 1)
        ):
            for number in row[1:6]:
                found = _ask(path, "select numbers from sequence where id = ?", number)
                digest.update(_digest(found[0][0] if found else b""))
            for content in row[6:]:
                digest.update(_digest(content))
        _ask(path, "update step set digest = ? where step = ?", digest.digest(), step)
    for table in SEALED[FORMAT]:
        rows = _ask(path, f"select * from {table} order by {'key' if table == 'meta' else 'rowid'}")
        seal = xxhash.xxh3_128_digest(as_bytes(rows))
        _ask(path, "update seal set digest = ? where name = ?", seal, table)


def _flip(path: Path, draw: Callable[..., Any]) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(draw(st.integers(1, 8))):
        content[draw(st.integers(0, len(content) - 1))] ^= draw(st.integers(1, 255))
    path.write_bytes(content)


def _overwrite(path: Path, draw: Callable[..., Any]) -> None:
    content = bytearray(path.read_bytes())
    start, noise = draw(st.integers(0, len(content) - 1)), draw(st.binary(min_size=1, max_size=64))
    content[start : start + len(noise)] = noise
    path.write_bytes(content)


def _truncate(path: Path, draw: Callable[..., Any]) -> None:
    os.truncate(path, draw(st.integers(0, path.stat().st_size - 1)))


def _drop(path: Path, draw: Callable[..., Any]) -> None:
    _ask(path, f"drop table {draw(st.sampled_from(TABLES))}")


def _delete(path: Path, draw: Callable[..., Any]) -> None:
    table, key, row = _row(path, draw)
    _ask(path, f"delete from {table} where {key} = ?", row[0])


def _edit(path: Path, draw: Callable[..., Any]) -> None:
    """Put another value, of whatever type, or that of another row, into a cell."""
    table, key, row = _row(path, draw)
    columns = [name for (name,) in _ask(path, "select name from pragma_table_info(?)", table)]
    column = draw(st.sampled_from(columns))
    found = _ask(path, f"select {column} from {table}")
    values = (
        st.sampled_from([cell for (cell,) in found])
        | st.integers(-(2**63), 2**63 - 1)
        | st.text(st.characters(exclude_categories=("Cs",)), max_size=9)
        | st.binary(max_size=32)
        | st.floats(allow_nan=False)
        | st.none()
    )
    with suppress(sqlite3.IntegrityError):
        _ask(path, f"update {table} set {column} = ? where {key} = ?", draw(values), row[0])


def _key(path: Path, table: str) -> str:
    """Return the first column of a table."""
    return str(_ask(path, "select name from pragma_table_info(?)", table)[0][0])


def _row(path: Path, draw: Callable[..., Any]) -> tuple[str, str, Any]:
    """Return a table that is not empty, its first column, and a row."""
    filled = [table for table in TABLES if _ask(path, f"select 1 from {table} limit 1")]
    table = draw(st.sampled_from(filled))
    key = _key(path, table)
    return table, key, draw(st.sampled_from(_ask(path, f"select * from {table}")))


@pytest.mark.parametrize("damage", [_flip, _overwrite, _truncate, _drop, _delete, _edit])
@given(st.data())
@settings(max_examples=25)
def test_no_damaged_trace_is_the_same(
    pair: tuple[Path, Path], work: Path, damage: Callable[..., None], data: st.DataObject
) -> None:
    """A trace that was changed at random is refused, or differs, or still has the same content."""
    one, two = pair
    path = _copy(two, work / "changed")
    damage(path, data.draw)
    try:
        same = torchrepro.compare(one, path.parent).same
    except TraceError:
        return
    assert not same or _content(path) == _content(two / FILE)


LOST = {
    "a step in the middle": "delete from step where step = 1",
    "the last step": f"delete from step where step = {STEPS - 1}",
    "records": "delete from part where first = 1",
    "what a record wrote": "update part set outputs = zeroblob(length(outputs)) where first = 1",
    "which part is which": "update part set first = 2 where first = 1",
    "a sequence": "delete from sequence where id = 2",
    "numbers of a sequence": "update sequence set numbers = zeroblob(length(numbers)) where id = 1",
    "that records are there": "insert into dropped values (1)",
    "a loss": "delete from loss where step = 1",
    "a table": "drop table loss",
    "a site": "update site set module = module || 'x' where id = 2",
    "statistics": "delete from statistics where record = 5",
    "kept tensors": "update tensor set data = zeroblob(length(data))",
    "the states of generators": """update step set random = '{"torch": "x"}' where step = 1""",
    "what it says of its run": "delete from meta where key = 'versions'",
    "that it has ended": "update meta set value = 'false' where key = 'finished'",
    "a seal": "delete from seal where name = 'loss'",
    "all seals": "drop table seal",
}


@pytest.mark.parametrize("what", LOST)
def test_what_was_lost_is_one_line_and_status_two(
    pair: tuple[Path, Path], tmp_path: Path, command: Callable[..., Any], what: str
) -> None:
    """A trace that lost a part is malformed: neither the same nor diverged."""
    path = _copy(pair[1], tmp_path / "lost")
    _ask(path, LOST[what])
    status, out, err = command("compare", pair[0], path.parent)

    assert (status, out, err.count("\n")) == (2, "", 1)
    assert str(path) in err


def _endless(table: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        columns = [name for (name,) in _ask(path, "select name from pragma_table_info(?)", table)]
        _ask(path, f"drop table {table}")
        rows = "with recursive n(i) as (select 1 union all select i + 1 from n) select {} from n"
        _ask(
            path, f"create view {table} as " + rows.format(", ".join(f"i as {c}" for c in columns))
        )

    return make


def _fifo(name: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        (path.parent / name).unlink(missing_ok=True)
        os.mkfifo(path.parent / name)

    return make


def _says(value: str) -> Callable[[Path], None]:
    """Return what has a trace say something of its run, under a seal that fits."""
    return _with(f"insert into meta values ('more', {value})")


def _with(*statements: str) -> Callable[[Path], None]:
    """Return what changes a trace, under digests that fit."""

    def make(path: Path) -> None:
        for statement in statements:
            _ask(path, statement)
        _resealed(path)

    return make


def _one_part_again_and_again(path: Path) -> None:
    """Have a step of a great many records, in few bytes."""
    numbers = {"sites": b"\1" * MANY, "others": b"\0" * MANY}
    for number, each in enumerate(numbers.values(), 1000):
        _ask(path, "insert into sequence values (?, ?)", number, b"\1" + each)
    ((step, first),) = _ask(path, "select max(step), first from step")
    _ask(path, "delete from part where first >= ?", first)
    _ask(path, "update step set records = ? where step = ?", TIMES * MANY, step)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executemany(
            "insert into part values (?, 1001, 1000, 1001, 1001, 1001, x'', x'')",
            [(first + number * MANY,) for number in range(TIMES)],
        )
    _resealed(path)


def _old_with(statement: str) -> Callable[[Path], None]:
    return lambda path: _ask(rewrite(path, WITHOUT_SEALS), statement) and None


def _other_numbers(column: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Return what gives the last part another sequence, made from its old one."""

    def make(path: Path) -> None:
        last = "where first = (select max(first) from part)"
        joined = f"select numbers from sequence join part on id = {column} {last}"
        ((numbers,),) = _ask(path, joined)
        _ask(path, "insert into sequence values (1000, ?)", change(numbers))
        _ask(path, f"update part set {column} = 1000 {last}")
        _ask(path, f"delete from sequence where id not in ({USED})")
        _resealed(path)

    return make


USED = " union ".join(
    f"select {column} from part"
    for column in ("thread", "site", "argument", "input_lengths", "output_lengths")
)
TIMES = 2000
HOSTILE: dict[str, Callable[[Path], None]] = {
    **{
        f"{name} without end": _endless(name)
        for name in ("meta", "loss", "part", "sequence", "seal")
    },
    "a trigger": lambda path: (
        _ask(path, "create trigger t after insert on loss begin delete from loss; end") and None
    ),
    "a FIFO": _fifo(FILE),
    "a FIFO as its log": _fifo(f"{FILE}-wal"),
    "much JSON": _says("""'"' || hex(zeroblob(50000000)) || '"'"""),
    "deep JSON": _says("replace(hex(zeroblob(50000)), '0', '[')"),
    "a rank that is none": _old_with("update meta set value = '[]' where key = 'rank'"),
    "no rank": _old_with("delete from meta where key = 'rank'"),
    "dropped records beyond all": _with(
        "insert into dropped select step from step where step < 2",
        f"update step set first = 1 + {2**62} * step, records = {2**62} where step < 2",
        "delete from step where step > 1",
        *(f"delete from {table}" for table in (*DETAILS, "part", "sequence")),
    ),
    "records beyond all": _old_with(f"update step set records = {2**62} where step = 0"),
    "fewer than no records": _old_with("update step set records = -1 where step = 0"),
    "sites that are not there": _old_with(f"update record set site = {2**40} where id = 3"),
    "a text for numbers": _old_with("update record set inputs = 'x' where id = 3"),
    "a width that is none": _other_numbers("site", lambda old: b"\3" + old[1:]),
    "no numbers": _other_numbers("site", lambda old: b""),
    "half a number": _other_numbers("thread", lambda old: b"\2" + old[1:] + bytes(len(old))),
    "a site that is not there": _other_numbers("site", lambda old: old[:-1] + b"\xff"),
    "a site too many": _other_numbers("site", lambda old: old + b"\1"),
    "lengths that do not add up": _other_numbers(
        "input_lengths", lambda old: b"\1" + bytes(len(old) - 1)
    ),
    "a sequence longer than any part": _other_numbers("thread", lambda old: b"\1" + bytes(2**25)),
    "digests of no record": _with(
        "update part set inputs = cast(inputs || x'00' as blob) where first = 1"
    ),
    "a sequence that is not there": _with(f"update part set site = {2**40} where first = 1"),
    "a sequence of no part": _with("insert into sequence values (1000, x'0101')"),
    "texts for digests": _with(
        "update part set inputs = hex(zeroblob(length(inputs) / 2)) where first = 1"
    ),
    "a text for a sequence": _with("update sequence set numbers = 'xx' where id = 1"),
    "a part of no step": _with(
        f"insert into part select {2**40}, thread, site, argument, input_lengths, output_lengths,"
        " inputs, outputs from part where first = 1"
    ),
    "records that are dropped and there": _with(
        "insert into dropped values (1)",
        *(
            f"delete from {table} where record >= (select first from step where step = 1)"
            " and record < (select first from step where step = 2)"
            for table in DETAILS
        ),
    ),
    "records dropped of no step": _with("insert into dropped values (77)"),
    "one part again and again": _one_part_again_and_again,
    "a lost step": _old_with("delete from step where step = 1"),
    "a step beyond all": _old_with(f"update step set step = {2**62} where step = {STEPS - 1}"),
    "generators that are none": _old_with("update step set random = '3' where step = 1"),
    "text that is none": _old_with("update site set op = cast(x'ff' as text) where id = 1"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_trace_is_refused_at_once(
    pair: tuple[Path, Path], tmp_path: Path, command: Callable[..., Any], what: str
) -> None:
    """Whatever somebody has put into the place of a trace, it is status 2 in one line, and soon."""
    path = _copy(pair[1], tmp_path / "hostile")
    HOSTILE[what](path)
    torchrepro.compare(*pair)  # imports
    took = []
    while len(took) < TRIES and min(took, default=SOON) >= SOON:
        began = time.perf_counter()
        status, out, err = command("compare", pair[0], path.parent)
        took.append(time.perf_counter() - began)

        assert (status, out, err.count("\n")) == (2, "", 1)
    assert min(took) < SOON


def test_a_trace_without_digests_is_read_with_a_note(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """What 0.2.0 has recorded is compared, and said to be less certain."""
    path = rewrite(_copy(pair[1], tmp_path / "old"), WITHOUT_SEALS)
    verdict = torchrepro.compare(pair[0], path.parent)

    assert verdict.same
    assert ["B" in note and "0.2.0" in note for note in verdict.notes] == [True]


def test_a_trace_with_rows_is_read_and_whole(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """What was recorded in format 2 is compared with what is now, and its digests hold."""
    path = rewrite(_copy(pair[1], tmp_path / "old"), WITH_ROWS)

    assert torchrepro.compare(pair[0], path.parent).same
    assert torchrepro.compare(path.parent, pair[0]).notes == ()
    for table in (*OF_RUN, *DETAILS, "record", "seal"):
        damaged = _copy(path.parent, tmp_path / table)
        key = _key(path, table)
        _ask(damaged, f"delete from {table} where {key} in (select max({key}) from {table})")
        with pytest.raises(TraceError, match="damaged"):
            read_run(damaged.parent)


def test_a_trace_whose_digests_fit_is_read(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """What is refused above is refused for what was changed, not for its digests."""
    path = _copy(pair[1], tmp_path / "sealed")
    _resealed(path)

    assert torchrepro.compare(pair[0], path.parent).same


def test_records_that_were_dropped_leave_their_step(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """A step whose records are no longer there says so; the others keep theirs, and their ids."""
    path = _copy(pair[1], tmp_path / "dropped")
    (whole,), digests = read_run(pair[1]), dict(_ask(path, "select step, digest from step"))
    row = whole.steps[1]
    for table, column in (("part", "first"), ("statistics", "record"), ("tensor", "record")):
        _ask(
            path,
            f"delete from {table} where {column} >= ? and {column} < ?",
            *(row.first, row.first + row.records),
        )
    _ask(path, "insert into dropped values (1)")
    _ask(path, f"delete from sequence where id not in ({USED})")
    rows = _ask(path, "select * from dropped")
    seal = xxhash.xxh3_128_digest(as_bytes(rows))
    _ask(path, "update seal set digest = ? where name = 'dropped'", seal)
    (trace,) = read_run(path.parent)

    assert [its.dropped for its in trace.steps.values()] == [False, True, False]
    assert {step: its.digest for step, its in trace.steps.items()} == digests
    assert trace.records(1) == []
    assert (trace.records(0), trace.records(2)) == (whole.records(0), whole.records(2))
    trace.close()
    whole.close()


@pytest.fixture(scope="module")
def cut(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a process that is killed leaves of the same run: its file and the log of it."""
    folder = tmp_path_factory.mktemp("cut")
    torch.manual_seed(0)
    net = Net()
    with torchrepro.record(folder / "run", statistics=True, keep=("layers.0",)):
        train(net, steps=STEPS)
        shutil.copytree(folder / "run", folder / "cut")
    assert (folder / "cut" / f"{FILE}-wal").stat().st_size
    return folder / "cut"


def test_a_run_that_was_cut_off_is_never_the_same(
    pair: tuple[Path, Path], cut: Path, command: Callable[..., Any]
) -> None:
    """A process that did not come to its end is compared as far as it went, and that is the answer.

    So it is with itself: what it would have done is not known.
    """
    for runs in ((pair[0], cut), (cut, pair[0]), (cut, cut)):
        verdict = torchrepro.compare(*runs)

        assert not verdict.same
        assert verdict.first is not None
        assert (verdict.first.kind, verdict.first.step) == (Kind.ENDED, STEPS)
        assert (verdict.compared.steps, verdict.propagated, verdict.independent) == (STEPS, 0, 0)
        assert command("compare", *runs)[0] == 1


@given(st.data())
@settings(max_examples=20)
def test_a_damaged_log_of_a_trace_is_no_traceback(
    cut: Path, work: Path, data: st.DataObject
) -> None:
    """What a killed process has not yet moved to its file is read as far as it is whole."""
    _copy(cut, work / "log")
    data.draw(st.sampled_from([_flip, _overwrite, _truncate]))(
        work / "log" / f"{FILE}-wal", data.draw
    )
    with suppress(TraceError):
        assert not torchrepro.compare(cut, work / "log").same


def test_a_folder_of_any_name_is_read(
    net: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording lies where its name led when it began, whatever characters are in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    for name in ("run#1", "100%25", "x?mode=rwc", "a&b=c", "ü b", "%41"):
        monkeypatch.chdir(tmp_path)
        with torchrepro.record(name):
            monkeypatch.chdir(tmp_path / "elsewhere")
            train(net, steps=1)

        assert len(read_run(tmp_path / name)[0].steps) == 1
    assert list((tmp_path / "elsewhere").iterdir()) == []
