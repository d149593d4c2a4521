"""What a recording cannot hear is found in the program's text, and where a seed comes from."""

import os
from pathlib import Path

import pytest

from torchrepro.seeding.uncontrolled import (
    ADDRESS,
    CLOCK,
    ENTROPY,
    GIVEN_SEED,
    OWN_GENERATOR,
    PROCESS,
    SET_ORDER,
    THREADS,
    UNWRITTEN,
)
from torchrepro.verdict.program_text import scan, varying_seeds, with_source
from torchrepro.verdict.value import UncontrolledRead

HEAD = """
import datetime as dt, time, numpy as np, torch
from datetime import date, datetime
from time import perf_counter as tick
from concurrent.futures import as_completed
words = set("ab")
order = ["a"]
class Model:
    names = ()
    def __init__(self):
        self.names = {1, 2}
"""

SAID = {
    "x = dt.datetime.now()": [("datetime.datetime.now", CLOCK)],
    "x = datetime.utcnow(), date.today()": [
        ("datetime.date.today", CLOCK),
        ("datetime.datetime.utcnow", CLOCK),
    ],
    "x = tick()": [("time.perf_counter", CLOCK)],
    "x = time.sleep(1), datetime(2024, 1, 1), date(2024, 1, 1)": [],
    "for x in words: print(x)": [("set", SET_ORDER)],
    "x = list(words)": [("set", SET_ORDER)],
    "x = ','.join(words | {'c'})": [("set", SET_ORDER)],
    "x = {word: at for at, word in enumerate(words)}": [("set", SET_ORDER)],
    "x = [word for word in set(order)]": [("set", SET_ORDER)],
    "x = [*frozenset(order)]": [("set", SET_ORDER)],
    "x, y = words": [("set", SET_ORDER)],
    "x = words.pop()": [("set", SET_ORDER)],
    "order.extend(words.union('c'))": [("set", SET_ORDER)],
    "x = sorted(words, key=len), sorted(order, key=len)": [("sorted", SET_ORDER)],
    "x = min(words, key=len)": [("min", SET_ORDER)],
    "x = sorted(words), len(words), 'a' in words, max(words), words | {1}": [],
    "x = sorted(list(words)), sorted(word for word in words), {word for word in words}": [],
    "x = list(order), [a for a in order], order.pop(), ','.join(order)": [],
    "def f(words):\n    other = {1}\ndef g(other): return list(other)": [],
    "def f():\n    return list(words)": [("set", SET_ORDER)],
    "class A(Model):\n    def f(self): return list(self.names)": [],
    "x = {id(order): 1}": [("id", ADDRESS)],
    "for x in as_completed([]): pass": [("concurrent.futures.as_completed", THREADS)],
    "x = order.imap_unordered(f, [])": [("order.imap_unordered", THREADS)],
    "x = torch.empty(3)": [("torch.empty", UNWRITTEN)],
    "x = np.empty_like(order)": [("numpy.empty_like", UNWRITTEN)],
    "torch.Generator().seed()": [(".seed", ENTROPY)],
    "x = np.random.RandomState()": [("numpy.random.RandomState", ENTROPY)],
    "x = np.random.PCG64(5)": [("numpy.random.PCG64", GIVEN_SEED)],
    "torch.Generator().manual_seed(5)": [(".manual_seed", GIVEN_SEED)],
    "class B:\n    def __init__(self): self.s = {1}\n    def f(self): return tuple(self.s)": [
        ("set", SET_ORDER)
    ],
}


@pytest.mark.parametrize("code", SAID)
def test_a_line_says_what_may_vary(code: str, tmp_path: Path) -> None:
    """By the names of imports. A set only where it is read in order, and the order is kept."""
    program = tmp_path / "program.py"
    program.write_text(HEAD + code)
    found = scan([str(program), str(program)])

    assert [(line.name, line.what) for line in found] == SAID[code]
    first = HEAD.count("\n") + 1
    assert all(int(line.where.rpartition(":")[2]) >= first for line in found)
    assert all(line.code in code for line in found)


def test_what_is_no_program_of_then_has_no_line(tmp_path: Path) -> None:
    """Gone, changed since, no Python, too large, nested too deep, a folder or a device: none."""
    texts = {
        "wrong.py": "x = id(",
        "zero.py": "x = id(1)\0",
        "bytes.py": "x = id('\xff')",
        "deep.py": f"x = {'-' * 100_000}1",
        "large.py": f"x = id(1){' ' * (1 << 20)}",
        "text.txt": "x = id(1)",
        "good.py": "x = id(1)",
    }
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    (tmp_path / "folder.py").mkdir()
    os.mkfifo(tmp_path / "pipe.py")
    names = [*texts, "folder.py", "pipe.py", "gone.py", ""]

    found = scan(str(tmp_path / name) for name in names)
    changed = (tmp_path / "good.py").stat().st_mtime

    assert [line.where for line in found] == [f"{tmp_path}/good.py:1"]
    assert scan([str(tmp_path / "good.py")], changed - 1) == ()


SEEDS = """
import time, torch
from datetime import datetime
began = time.time()
def make_seed(): return time.time_ns()
torch.manual_seed(make_seed())
torch.manual_seed(int(datetime.now().timestamp()))
noise = torch.Generator().manual_seed(int(time.time()))
x = torch.rand(2, generator=noise)
"""


def test_a_seed_is_known_by_what_it_was_made_from(tmp_path: Path) -> None:
    """By a read of its line, heard or in the text; or one that speaks of a seed; or the last."""
    program = tmp_path / "program.py"
    program.write_text(SEEDS)

    def read(name: str, line: int, what: str = CLOCK, **more: str) -> UncontrolledRead:
        return UncontrolledRead(name, what, f"{program}:{line}", "", 0, **more)

    def seeded(name: str, line: int, *reads: UncontrolledRead) -> tuple[str, int, bool] | None:
        given = read(name, line, GIVEN_SEED, left="1", right="2")
        found = with_source(given, (*reads, given), None)
        its = found.source
        at = int(found.where.rpartition(":")[2])
        assert at == (8 if line == 9 else line)
        return its and (its.name, int(its.where.rpartition(":")[2]), its.is_sure)

    began, made, own = read("time.time", 4), read("time.time_ns", 5), read("time.time", 8)
    assert seeded("torch.manual_seed", 6, made, began) == ("time.time_ns", 5, True)
    assert seeded("torch.manual_seed", 6, began) == ("time.time", 4, False)
    assert seeded("torch.manual_seed", 7, began) == ("datetime.datetime.now", 7, True)
    assert seeded("torch.manual_seed", 6) is None
    assert seeded(OWN_GENERATOR, 9, began, own) == ("time.time", 8, True)


def test_a_seed_that_no_recording_hears_is_known_by_its_line(tmp_path: Path) -> None:
    """Where the line of a seed reads what varies, by its text or as a recording has heard it."""
    program = tmp_path / "program.py"
    code = "x = np.random.RandomState({}), np.random.PCG64(5)\n"
    program.write_text(HEAD + "".join(map(code.format, ("tick()", "other()", "7"))))
    first = HEAD.count("\n") + 1
    heard = UncontrolledRead("os.getpid", PROCESS, f"{program}:{first + 1}", "", 0)

    found = varying_seeds(scan([str(program)]), (heard,))

    assert {(seed.name, seed.where, source.name) for seed, source in found} == {
        (f"numpy.random.{name}", f"{program}:{at}", source)
        for name in ("RandomState", "PCG64")
        for at, source in ((first, "time.perf_counter"), (first + 1, "os.getpid"))
    }
