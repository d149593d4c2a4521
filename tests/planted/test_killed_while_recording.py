"""A process that is killed at any time leaves a trace of complete steps."""

import os
import random
import signal
import sqlite3
import struct
import subprocess
import sys
import time
import traceback
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
import torch

import torchrepro
from torchrepro import TraceError
from torchrepro.trace.format import SCHEMA, SUFFIX
from torchrepro.trace.reader import Trace, read_run
from torchrepro.verdict.value import Kind

from .small_models import perceptron, trained

MAGIC = bytes.fromhex("d9d505f920a163d7")
"""How a journal of SQLite begins: https://sqlite.org/fileformat2.html#the_rollback_journal."""

SECTOR, PAGE = 512, 4096
KILLS = 20
LONGEST = 0.5
MANY = 10
"""Steps that every second process has ended before its time begins, however slow the machine."""


def _killed(folder: Path, delay: float, *, after: int) -> None:
    """Train in a process that is killed some seconds after the end of some steps."""
    ends, ended = os.pipe()
    child = os.fork()
    if not child:
        try:
            with torchrepro.record(folder):
                trained(perceptron(), steps=10**9, after_step=lambda _: os.write(ended, b"."))
        except BaseException:  # noqa: BLE001 - what ends this process is shown
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(ended)
    for _ in range(after):
        os.read(ends, 1)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    os.close(ends)


def _kill_at_random(folder: Path, seed: int) -> None:
    """Record, in processes that are killed, runs with these numbers for names."""
    draw = random.Random(seed)
    with torchrepro.record(folder / "first"):
        trained(perceptron(), steps=2)  # imports what a step imports
    for number in range(KILLS):
        delay = draw.uniform(0.0, LONGEST)
        _killed(folder / str(number), delay, after=number % 2 * (MANY + 1))


def _opened(folder: Path) -> Trace | None:
    """Open a trace; None if the process was killed before it began one."""
    if not folder.is_dir():
        return None
    try:
        (trace,) = read_run(folder)
    except TraceError as error:
        if "contains no trace" in str(error):
            return None
        raise
    return trace


def _assert_whole_steps(trace: Trace) -> int:
    """Return how many steps a trace has, after checking that all are complete."""
    with closing(sqlite3.connect(f"{trace.path.as_uri()}?mode=ro", uri=True)) as file:
        assert file.execute("pragma integrity_check").fetchall() == [("ok",)]
    assert "finished" not in trace.meta
    records = {step: trace.records(step) for step in trace.steps}
    steps = {row.step: row.records for row in trace.steps.values()}
    assert {step: len(its) for step, its in records.items()} == steps
    assert list(steps) == list(range(len(steps)))
    assert all(row.finished for row in trace.steps.values())
    found = [one for its in records.values() for one in its]
    assert [one.id for one in found] == list(range(1, len(found) + 1))
    assert {one.site for one in found} <= trace.sites.keys()
    assert {one.thread for one in found} <= trace.threads.keys()
    return len(steps)


@pytest.mark.parametrize("begun", ["an empty file", "half of the tables", "all tables, no words"])
def test_a_process_killed_at_the_start_of_its_trace_leaves_no_trace(
    begun: str, tmp_path: Path
) -> None:
    """Its unfinished file does not count as a trace, and the message says so."""
    with closing(sqlite3.connect(tmp_path / f"rank0{SUFFIX}")) as store:
        if begun != "an empty file":
            tables = SCHEMA.split(";") if "all" in begun else SCHEMA.split(";")[1:4]
            store.executescript(";".join(tables))

    with pytest.raises(TraceError, match="contains no trace"):
        read_run(tmp_path)


def test_a_copy_without_the_log_file_asks_for_the_whole_folder(tmp_path: Path) -> None:
    """A copy of a running recording needs all files; otherwise the missing file is named."""
    with torchrepro.record(tmp_path / "run"):
        torch.ones(3).sin()
        torchrepro.end_step()
        copytree(tmp_path / "run", tmp_path / "whole")
        copytree(tmp_path / "run", tmp_path / "part", ignore=ignore_patterns("*-wal", "*-shm"))

    assert read_run(tmp_path / "whole")[0].ended_steps == 1
    with pytest.raises(TraceError, match=r"contains no trace(.|\n)*copy the whole folder"):
        read_run(tmp_path / "part")


@pytest.mark.parametrize("moment", ["as it begins", "as it ends"])
def test_a_trace_is_readable_despite_the_journal_of_a_killed_process(
    moment: str, tmp_path: Path
) -> None:
    """A process killed while SQLite changes its journal mode leaves an intact trace."""
    path = tmp_path / f"rank0{SUFFIX}"
    if moment == "as it ends":
        with torchrepro.record(tmp_path):
            torch.ones(3).exp()
    else:
        with closing(sqlite3.connect(path)) as store:
            store.executescript("create table half(x); drop table half")
    size = path.stat().st_size
    header = struct.pack(">IIIII", 1, 0, size // PAGE, SECTOR, PAGE)
    path.with_name(f"{path.name}-journal").write_bytes((MAGIC + header).ljust(SECTOR, b"\0"))
    reader = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    with closing(reader), pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.execute("select * from sqlite_schema")

    if moment == "as it ends":
        (trace,) = read_run(tmp_path)
        assert "finished" in trace.meta
        trace.close()
    else:
        with pytest.raises(TraceError, match="contains no trace"):
            read_run(tmp_path)
    assert path.stat().st_size == size


@pytest.mark.slow
def test_a_killed_process_leaves_complete_steps(tmp_path: Path) -> None:
    """After SIGKILL at random times, every trace opens, ends with a complete step, and compares."""
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    # In a Python of its own: torch refuses backward in what is forked from a process in which an
    # earlier test has started threads of autograd.
    code = f"import {__name__} as killing, pathlib, sys; "
    code += "killing._kill_at_random(pathlib.Path(sys.argv[1]), int(sys.argv[2]))"
    words = [sys.executable, "-c", code, str(tmp_path), str(seed)]
    subprocess.run(words, cwd=Path(__file__).parents[2], check=True)
    lengths = {}
    for number in range(KILLS):
        folder = tmp_path / str(number)
        trace = _opened(folder)
        if trace is not None:
            lengths[folder] = _assert_whole_steps(trace)
            trace.close()
    print(sorted(lengths.values()))
    assert max(lengths.values()) > MANY

    folders = sorted(lengths, key=lengths.__getitem__)
    for shorter, longer in pairwise(folders):
        verdict = torchrepro.compare(shorter, longer)
        assert verdict.compared.steps == lengths[shorter]
        assert not verdict.same  # nobody knows what a killed process would have done
        assert verdict.first is not None
        assert verdict.first.kind is Kind.ENDED
        assert verdict.propagated == verdict.independent == 0
