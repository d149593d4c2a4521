"""Damaged, truncated or hostile traces never count as equal, and never cause a traceback."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sqlite3
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import torchrepro
from torchrepro import TraceError
from torchrepro.trace.format import DETAILS, MANY, digest_of
from torchrepro.trace.reader import read_run

from .conftest import Net, train
from .cut_off import WHOLE, record

STEPS = 3
SOON = 2.0
"""Seconds."""

TRIES = 3
"""How often a refusal is timed; the fastest counts, because other load only adds time."""

FILE = "rank0.sqlite"
INFO = "pragma_table_info(?)"
ANOTHER_FORMAT = "another format"
TABLES = {
    "meta": "key",
    "step": "step",
    "part": "first",
    "statistics": "record",
    "tensor": "record",
}
"""Each table with the column that says which row it is."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The recordings of two equal runs, with every kind of content."""
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
    """A folder that examples use one after the other."""
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


def _plain(outline: Any) -> bytes:
    try:
        return zlib.decompressobj().decompress(outline, 20 * MANY + 1)
    except (TypeError, zlib.error):
        return b""


def _resealed(path: Path) -> None:
    """Recompute the digests of a trace from its records and steps."""
    for step, first, records in _ask(path, "select step, first, records from step"):
        which = first, min(first + records, 2**63 - 1)
        digest = xxhash.xxh3_128()
        parts = "select * from part where first >= ? and first < ? order by first"
        for _, outline, *values in _ask(path, parts, *which):
            for content in (_plain(outline), *values):
                found = content.encode() if isinstance(content, str) else content
                digest.update(xxhash.xxh3_128_digest(found))
        rows = "select * from {} where record >= ? and record < ? order by 1, 2, 3"
        details = [row for table in DETAILS for row in _ask(path, rows.format(table), *which)]
        new = digest.digest(), digest_of(details), step
        _ask(path, "update step set digest = ?, details = ? where step = ?", *new)
    for row in _ask(path, "select * from step"):
        _ask(path, "update step set seal = ? where step = ?", digest_of([row[:-1]]), row[0])
    meta = _ask(path, "select * from meta where key != 'seal' order by key")
    seal = json.dumps(digest_of(meta).hex())
    _ask(path, "update meta set value = ? where key = 'seal'", seal)


# Random damage.


def _flip(path: Path, draw: Callable[..., Any]) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(draw(st.integers(1, 8))):
        content[draw(st.integers(0, len(content) - 1))] ^= draw(st.integers(1, 255))
    path.write_bytes(content)


def _truncate(path: Path, draw: Callable[..., Any]) -> None:
    os.truncate(path, draw(st.integers(0, path.stat().st_size - 1)))


def _delete(path: Path, draw: Callable[..., Any]) -> None:
    table = draw(st.sampled_from(sorted(TABLES)))
    row = draw(st.sampled_from(_ask(path, f"select * from {table}")))
    _ask(path, f"delete from {table} where {TABLES[table]} = ?", row[0])


def _edit(path: Path, draw: Callable[..., Any]) -> None:
    """Replace a cell by another value of any type, or by the cell of another row."""
    table = draw(st.sampled_from(sorted(TABLES)))
    columns = [name for (name,) in _ask(path, f"select name from {INFO}", table)]
    column = draw(st.sampled_from(columns))
    row = draw(st.sampled_from(_ask(path, f"select * from {table}")))
    values = (
        st.sampled_from([cell for (cell,) in _ask(path, f"select {column} from {table}")])
        | st.integers(-(2**63), 2**63 - 1)
        | st.text(st.characters(exclude_categories=("Cs",)), max_size=9)
        | st.binary(max_size=32)
        | st.floats(allow_nan=False)
        | st.none()
    )
    with suppress(sqlite3.IntegrityError):
        change = f"update {table} set {column} = ? where {TABLES[table]} = ?"
        _ask(path, change, draw(values), row[0])


@pytest.mark.parametrize("damage", [_flip, _truncate, _delete, _edit])
@given(st.data())
@settings(max_examples=25)
def test_no_damaged_trace_is_the_same(
    pair: tuple[Path, Path], work: Path, damage: Callable[..., None], data: st.DataObject
) -> None:
    """A randomly changed trace is refused, or differs, or still has the same content."""
    one, two = pair
    path = _copy(two, work / "changed")
    damage(path, data.draw)
    try:
        same = torchrepro.compare(one, path.parent).same
    except TraceError:
        return
    assert not same or _content(path) == _content(two / FILE)


# Files in place of a trace.

Change = Callable[[Path], object]


def _statements(*statements: str) -> Change:
    return lambda path: [_ask(path, statement) for statement in statements]


def _sealed(change: Change | str) -> Change:
    """Return a change of a trace that also recomputes its digests."""

    def make(path: Path) -> None:
        (_statements(change) if isinstance(change, str) else change)(path)
        _resealed(path)

    return make


def _outline(change: Callable[[bytes], bytes]) -> Change:
    """Return a change of the outline of the first part that also recomputes the digests."""

    def make(path: Path) -> None:
        ((old,),) = _ask(path, "select outline from part where first = 1")
        _ask(path, "update part set outline = ? where first = 1", change(old))

    return _sealed(make)


def _numbers(change: Callable[[list[int]], object]) -> Change:
    """Return a change of the numbers of an outline: threads, sites, arguments, two lengths."""

    def changed(old: bytes) -> bytes:
        numbers = [each for (each,) in struct.iter_unpack("<I", _plain(old))]
        change(numbers)
        return zlib.compress(struct.pack(f"<{len(numbers)}I", *numbers))

    return _outline(changed)


def _set(place: int, number: int) -> Change:
    return _numbers(lambda numbers: numbers.__setitem__(place * len(numbers) // 5, number))


def _fifo(name: str) -> Change:
    def make(path: Path) -> None:
        (path.parent / name).unlink(missing_ok=True)
        os.mkfifo(path.parent / name)

    return make


def _another_database(statement: str) -> Change:
    return lambda path: (path.unlink(), _ask(path, statement))


def _many_records_in_few_bytes(path: Path) -> None:
    """Write a step with a huge number of records, whose parts have a few bytes each."""
    ((step, first),) = _ask(path, "select max(step), first from step")
    column = struct.pack("<I", 0) * MANY
    sites = struct.pack("<I", 1) * MANY
    outline = zlib.compress(b"".join((column, sites, column, column, column)))
    _ask(path, "delete from part where first >= ?", first)
    new = TIMES * MANY, TIMES, step
    _ask(path, "update step set records = ?, parts = ? where step = ?", *new)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executemany(
            "insert into part values (?, ?, x'', x'')",
            [(first + number * MANY, outline) for number in range(TIMES)],
        )


TIMES = 300
LOST = {
    "a step in the middle": "delete from step where step = 1",
    "the last step": f"delete from step where step = {STEPS - 1}",
    "the number of a step": f"update step set step = {STEPS} where step = {STEPS - 1}",
    "records": "delete from part where first = 1",
    "the number of parts": "update step set parts = 0 where step = 1",
    "outputs of a record": "update part set outputs = zeroblob(length(outputs)) where first = 1",
    "the outline of records": "update part set outline = zeroblob(length(outline)) where first = 1",
    "the first record of a part": "update part set first = 2 where first = 1",
    "a loss": "update step set losses = '[]' where step = 1",
    "a table": "drop table statistics",
    "statistics": "delete from statistics where record = 5",
    "all statistics": "delete from statistics",
    "kept tensors": "update tensor set data = zeroblob(length(data))",
    "a fact about the run": "delete from meta where key = 'versions'",
    "the mark of a complete trace": "update meta set value = 'false' where key = 'finished'",
    "how many steps it has": "delete from meta where key = 'rows'",
    "its seal": "delete from meta where key = 'seal'",
}
TEXTS = {  # of a step: column, text
    "invalid generators": ("random", "3"),
    "deep generators": ("random", "[" * 50_000),
    "invalid names": ("names", "3"),
    "a site of another type": ("names", '{"sites": [["forward", "", "", "", 3]]}'),
    "a site too short": ("names", '{"sites": [["forward"]]}'),
    "an argument of another type": ("names", '{"arguments": [{}]}'),
    "half a character": ("names", r'{"threads": ["\ud800"]}'),
    "invalid losses": ("losses", "[[1.0]]"),
    "a loss without a number": ("losses", '[[[], "00", "x"]]'),
    "a loss without a fingerprint": ("losses", '[[1.0, "xyz", "x"]]'),
}
IMPOSSIBLE = {  # with recomputed digests
    "an invalid format": "update meta set value = '[1]' where key = 'format'",
    "much JSON": "insert into meta values ('more', hex(zeroblob(50000000)))",
    "deep JSON": "insert into meta values ('x', replace(hex(zeroblob(50000)), '0', '['))",
    "an invalid rank": "update meta set value = '[]' where key = 'rank'",
    "no rank": "delete from meta where key = 'rank'",
    "an invalid interval": "update meta set value = '\"x\"' where key = 'every'",
    "an invalid number of ranks": "update meta set value = '0' where key = 'world_size'",
    "invalid modules": "update meta set value = '3' where key = 'keep'",
    "too many records": f"update step set records = {2**62} where step = 2",
    "a negative number of records": "update step set records = -1 where step = 0",
    "too many parts": f"update step set parts = {2**62} where step = 0",
    "an invalid level": "update step set level = 'x' where step = 0",
    "a step number that is too large": f"update step set step = {2**62} where step = {STEPS - 1}",
    "a lost step, sealed": "delete from step where step = 1",
    "a lost last step, sealed": f"delete from step where step = {STEPS - 1}",
    "digests without a record": "update part set inputs = cast(inputs || x'00' as blob)",
    "texts for digests": "update part set inputs = hex(zeroblob(length(inputs) / 2))",
    "a part without a step": f"insert into part select {2**40}, outline, inputs, outputs from part"
    " where first = 1",
    "dropped records that still exist": "update step set parts = 0 where step = 1",
    "statistics without a record": f"insert into statistics values ({2**40}, 0, 1, 1, 1, 1, 1)",
    "a word for a number": "update statistics set mean = 'x' where record = 5",
    "a number for a shape": "update tensor set shape = x'00'",
}
REFUSED: dict[str, Change] = {
    **{what: _statements(statement) for what, statement in LOST.items()},
    **{what: _sealed(statement) for what, statement in IMPOSSIBLE.items()},
    **{
        what: _sealed(f"update step set {column} = '{text}' where step = 1")
        for what, (column, text) in TEXTS.items()
    },
    "records without end": _statements(
        "drop table part",
        "create view part as with recursive n(i) as (select 1 union all select i + 1 from n)"
        " select i as first, i as outline, i as inputs, i as outputs from n",
    ),
    ANOTHER_FORMAT: _sealed("update meta set value = '7' where key = 'format'"),
    "no database": lambda path: path.write_bytes(b"SQLite format 3\0" + bytes(5000)),
    "a text": lambda path: path.write_text("loss 0.5\n" * 999),
    "another database": _another_database("create table loss (step, value)"),
    "another table of its name": _another_database("create table meta (key, value)"),
    "a trigger": _statements("create trigger t after insert on part begin delete from part; end"),
    "a FIFO": _fifo(FILE),
    "a FIFO as its log": _fifo(f"{FILE}-wal"),
    "invalid text": _statements("update step set names = cast(x'ff' as text) where step = 1"),
    "too many dropped records": _sealed(
        _statements(
            f"update step set first = 1 + {2**62} * step, records = {2**62}, parts = 0",
            *(f"delete from {table}" for table in (*DETAILS, "part")),
        )
    ),
    "an invalid outline": _outline(lambda old: old[::-1]),
    "half an outline": _outline(lambda old: old[:-5]),
    "more than an outline": _outline(lambda old: old + b"x"),
    "no numbers": _numbers(list.clear),
    "a number too many": _numbers(lambda numbers: numbers.append(0)),
    "an outline longer than any": _outline(lambda _: zlib.compress(bytes(20 * (MANY + 1)))),
    "a bomb": _outline(lambda _: zlib.compress(bytes(1 << 28))),
    "a thread that does not exist": _set(0, 99),
    "a site that does not exist": _set(1, 2**32 - 1),
    "site 0": _set(1, 0),
    "an argument that does not exist": _set(2, 2**32 - 1),
    "lengths that do not add up": _set(3, 800),
    "many records in few bytes": _sealed(_many_records_in_few_bytes),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", REFUSED)
def test_a_file_that_is_not_a_valid_trace_is_refused_quickly(
    pair: tuple[Path, Path], tmp_path: Path, command: Callable[..., Any], what: str
) -> None:
    """For a trace with a missing or replaced part, the status is 2, with one line, quickly."""
    path = _copy(pair[1], tmp_path / "refused")
    REFUSED[what](path)
    torchrepro.compare(*pair)  # imports
    took: list[float] = []
    while len(took) < TRIES and min(took, default=SOON) >= SOON:
        began = time.perf_counter()
        status, out, err = command("compare", pair[0], path.parent)
        took.append(time.perf_counter() - began)

        assert (status, out) == (2, "")
        assert str(path) in err
        # The other format has two lines more: the legal format, and what to do.
        assert err.count("\n") == (3 if what == ANOTHER_FORMAT else 1)
    assert min(took) < SOON


def test_a_trace_with_recomputed_digests_is_read(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """The traces above are refused because of the change, not because of their digests."""
    path = _copy(pair[1], tmp_path / "sealed")
    _resealed(path)

    assert _content(path) == _content(pair[1] / FILE)
    assert torchrepro.compare(pair[0], path.parent).same


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of a killed process: its file and the log."""
    folder = tmp_path_factory.mktemp("cut")
    with torchrepro.record(folder / "run", statistics=True, keep=("layers.0",)):
        train(Net(), steps=STEPS)
        shutil.copytree(folder / "run", folder / "cut")
    assert (folder / "cut" / f"{FILE}-wal").stat().st_size
    return folder / "cut"


@given(st.data())
@settings(max_examples=20)
def test_a_damaged_log_of_a_trace_causes_no_traceback(
    cut: Path, work: Path, data: st.DataObject
) -> None:
    """The complete part of the log of a killed process is read."""
    _copy(cut, work / "log")
    data.draw(st.sampled_from([_flip, _truncate]))(work / "log" / f"{FILE}-wal", data.draw)
    with suppress(TraceError):
        assert not torchrepro.compare(cut, work / "log").same


def test_a_folder_of_any_name_is_read(
    net: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is resolved when the recording begins; its name may have any characters."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    for name in ("run#1", "100%25", "x?mode=rwc", "a&b=c", "ü b", "%41"):
        monkeypatch.chdir(tmp_path)
        with torchrepro.record(name):
            monkeypatch.chdir(tmp_path / "elsewhere")
            train(net, steps=1)

        assert len(read_run(tmp_path / name)[0].steps) == 1
    assert list((tmp_path / "elsewhere").iterdir()) == []


# An interrupted recording has complete steps only, as if the process had been killed.


@pytest.mark.slow
def test_an_interrupt_at_any_line_leaves_complete_steps(fork_python: Callable[..., Any]) -> None:
    """After ^C at any line of the recorder, the trace has complete, unchanged steps."""
    done = fork_python(Path(__file__).with_name("cut_off.py"))

    assert done.returncode == 0, done.stderr
    wrong, lengths = json.loads(done.stdout)
    assert wrong == []
    assert lengths == [*range(WHOLE + 1)]


@pytest.mark.slow
def test_a_full_disk_is_reported_in_one_line(tmp_path: Path) -> None:
    """With any free space, the trace is complete or the recording reports that it failed."""
    answers = Counter()
    for room in range(0, 400, 20):
        child = os.fork()
        if not child:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room << 10, room << 10))
            try:
                record(tmp_path / str(room))
            except TraceError:
                os._exit(3)
            except BaseException:  # noqa: BLE001 - what the test is about
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        answers[os.waitstatus_to_exitcode(status)] += 1

    assert answers.keys() == {0, 3}
