"""Static search of a program: varying calls, sources of seeds, and suggested edits."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrepro.seeding.nondeterministic_calls import (
    ADDRESS,
    CLOCK,
    ENTROPY,
    EXPLICIT_SEED,
    FILES,
    FORKED,
    HASH,
    OWN_GENERATOR,
    PROCESS,
    SET_ORDER,
    THREADS,
    UNINITIALIZED_MEMORY,
)
from torchrepro.verdict.program_text import (
    edit_of,
    edit_of_sample,
    edits_of_other_lines,
    scan,
    varying_seeds,
    with_source,
)
from torchrepro.verdict.value import Edit, NondeterministicRead

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
    "x = torch.empty(3)": [("torch.empty", UNINITIALIZED_MEMORY)],
    "x = np.empty_like(order)": [("numpy.empty_like", UNINITIALIZED_MEMORY)],
    "torch.Generator().seed()": [(".seed", ENTROPY)],
    "x = np.random.RandomState()": [("numpy.random.RandomState", ENTROPY)],
    "x = np.random.PCG64(5)": [("numpy.random.PCG64", EXPLICIT_SEED)],
    "torch.Generator().manual_seed(5)": [(".manual_seed", EXPLICIT_SEED)],
    "class B:\n    def __init__(self): self.s = {1}\n    def f(self): return tuple(self.s)": [
        ("set", SET_ORDER)
    ],
}


@pytest.mark.parametrize("code", SAID)
def test_varying_calls_are_found_in_the_source(code: str, tmp_path: Path) -> None:
    """Names are resolved by imports. Sets are found only where their order affects a result."""
    program = tmp_path / "program.py"
    program.write_text(HEAD + code)
    found = scan([str(program), str(program)])

    assert [(line.name, line.what) for line in found] == SAID[code]
    first = HEAD.count("\n") + 1
    assert all(int(line.where.rpartition(":")[2]) >= first for line in found)


def test_files_that_are_not_the_recorded_program_are_skipped(tmp_path: Path) -> None:
    """Missing, changed, not Python, too large, nested too deeply, a folder or a device."""
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


def test_the_source_of_a_seed_is_found(tmp_path: Path) -> None:
    """It is a read on its line, or else a read on a line that mentions a seed, or the last read."""
    program = tmp_path / "program.py"
    program.write_text(SEEDS)

    def read(name: str, line: int, what: str = CLOCK, **more: str) -> NondeterministicRead:
        return NondeterministicRead(name, what, f"{program}:{line}", "", 0, **more)

    def seeded(name: str, line: int, *reads: NondeterministicRead) -> tuple[str, int, bool] | None:
        given = read(name, line, EXPLICIT_SEED, left="1", right="2")
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


def test_a_generator_is_traced_to_the_line_that_seeds_it(tmp_path: Path) -> None:
    """If the seeding call spans several lines, it is the first of them."""
    program = tmp_path / "program.py"
    drawing = "x = torch.rand(2, generator=noise)\n"
    program.write_text(f"noise = torch.Generator()\nnoise.manual_seed(\n    7,\n)\n{drawing}")
    drawn = NondeterministicRead(OWN_GENERATOR, EXPLICIT_SEED, f"{program}:5", "", 0)

    assert with_source(drawn, (drawn,), None).where == f"{program}:2"


def test_a_seed_that_no_recording_observes_is_found_by_its_line(tmp_path: Path) -> None:
    """Its line reads a varying source, according to the text or to a recorded read."""
    program = tmp_path / "program.py"
    code = "x = np.random.RandomState({}), np.random.PCG64(5)\n"
    program.write_text(HEAD + "".join(map(code.format, ("tick()", "other()", "7"))))
    first = HEAD.count("\n") + 1
    heard = NondeterministicRead("os.getpid", PROCESS, f"{program}:{first + 1}", "", 0)

    found = varying_seeds(scan([str(program)]), (heard,))

    assert {(seed.name, seed.where, source.name) for seed, source in found} == {
        (f"numpy.random.{name}", f"{program}:{at}", source)
        for name in ("RandomState", "PCG64")
        for at, source in ((first, "time.perf_counter"), (first + 1, "os.getpid"))
    }


IMPORTS = "import random, os, time, torch; import numpy as np; from glob import glob as find\n"
AT = "{}:2"

CASES = {
    "a seed from the clock": (
        (CLOCK, "time.time"),
        "torch.manual_seed(int(time.time() * 1000) % 2**31)",
        "torch.manual_seed(1234)",
    ),
    "a private generator": (
        (CLOCK, "time.time_ns"),
        "g = torch.Generator().manual_seed(time.time_ns())",
        "g = torch.Generator().manual_seed(1234)",
    ),
    "a seed beside a name": (
        (PROCESS, "os.getpid"),
        "np.random.seed(os.getpid() + worker)",
        "np.random.seed(1234 + worker)",
    ),
    "a clock that measures": ((CLOCK, "time.time"), "begun = time.time()", None),
    "no seed": ((ENTROPY, "numpy.random.default_rng"), "rng = np.random.default_rng()", "(1234)"),
    "torch.seed": ((ENTROPY, "torch.seed"), "torch.seed()", "torch.manual_seed(1234)"),
    "entropy": ((ENTROPY, "os.urandom"), "x = os.urandom(n)", "random.Random(1234).randbytes(n)"),
    "SystemRandom": ((ENTROPY, "random.SystemRandom"), "random.SystemRandom()", "random.Random("),
    "a list of files": (
        (FILES, "os.listdir"),
        "for name in os.listdir(folder):",
        "for name in sorted(os.listdir(folder)):",
    ),
    "under another name": ((FILES, "glob.glob"), "x = find('*.pt')", "x = sorted(find('*.pt'))"),
    "sorted already": ((FILES, "os.listdir"), "x = sorted(os.listdir(folder))", None),
    "scandir": ((FILES, "os.scandir"), "x = os.scandir(f)", ", key=lambda entry: entry.name)"),
    "a seed by a name": (
        (EXPLICIT_SEED, "torch.manual_seed"),
        "torch.manual_seed(s)",
        "seed(1234)",
    ),
    "a constant seed": ((EXPLICIT_SEED, "torch.manual_seed"), "torch.manual_seed(7)", None),
    "threads at once": ((THREADS, "threading.Thread.start"), "t.start()", "t.start(); t.join()"),
    "started elsewhere": ((THREADS, "threading.Thread.start"), "[t.start() for t in ts]", None),
    "a draw of a task": (
        (FORKED, "random.random"),
        "def task(x, y): return random.random()",
        "def task(x, y): random.seed(repr([x, y])); return random.random()",
    ),
    "as they come": (
        (THREADS, "submit"),
        "for job in as_completed(jobs):",
        "for job in jobs:",
    ),
    "imap": ((THREADS, "submit"), "x = list(pool.imap_unordered(f, y))", "pool.imap(f, y)"),
    "another call": ((FILES, "os.listdir"), "x = folder", None),
    "a hash": ((HASH, "builtins.hash"), "x = hash(word) % 7", None),
    "fresh memory": (
        (UNINITIALIZED_MEMORY, "torch.empty"),
        "x = torch.empty(3, 4)",
        "torch.zeros(3, 4)",
    ),
    **{
        line: ((SET_ORDER, "set"), line, after)
        for line, after in (
            ("names = list(set(words))", "names = list(dict.fromkeys(words))"),
            ("for p in {*a, *b}:", "for p in dict.fromkeys([*a, *b]):"),
            ("x = [w for w in {f(y) for y in z}]", "[w for w in dict.fromkeys(f(y) for y in z)]"),
            ("first, *rest = set(words)", "first, *rest = dict.fromkeys(words)"),
            ("x = list(zip(range(3), set(words)))", "zip(range(3), dict.fromkeys(words))"),
            ("x = set(words).pop()", None),
            ("x = sorted(set(words))", None),
            ("x = len(set(words))", None),
        )
    },
}


def written(folder: Path, line: str) -> str:
    """Write a program whose second line is `line`; return its ``file:line``."""
    body = "    pass\n" if line.endswith(":") else ""
    file = folder / f"program{len(list(folder.iterdir()))}.py"  # a file is read once
    file.write_text(f"{IMPORTS}{line}\n{body}", encoding="utf-8")
    return AT.format(file)


@pytest.mark.parametrize("name", CASES)
def test_an_edit_replaces_an_expression_of_the_line(name: str, tmp_path: Path) -> None:
    """It has the line before and after the change; without such an expression there is no edit."""
    (what, function), line, expected = CASES[name]
    where = written(tmp_path, line)
    edit = edit_of(what, function, where)

    if expected is None:
        assert edit is None
        return
    assert edit is not None
    assert (edit.where, edit.before) == (where, line)
    assert expected in edit.after


@pytest.mark.parametrize(
    ("line", "after"),
    [
        ("with ThreadPoolExecutor(n) as pool:", "with ThreadPoolExecutor(1) as pool:"),
        ("pool = Pool(processes=n)", "pool = Pool(processes=1)"),
        ("pool = get_context('fork').Pool()", "pool = get_context('fork').Pool(1)"),
        ("pool = f.ProcessPoolExecutor(initializer=g)", "f.ProcessPoolExecutor(1, initializer=g)"),
        ("pool = ThreadPool(1)", None),
        ("t = Trainer(max_time='00:00:00:03')", "t = Trainer(max_steps=40)"),
    ],
)
def test_parallel_or_timed_work_is_limited(line: str, after: str | None, tmp_path: Path) -> None:
    """A pool gets one worker; a trainer ends after as many steps as it made."""
    file = written(tmp_path, line).rpartition(":")[0]
    what = CLOCK if "time" in line else THREADS

    edits = [edit.after for edit in edits_of_other_lines(what, [file], 40)]
    assert [after in each for each in edits] == [True] * bool(after)


def test_a_sample_draws_from_its_own_generator(tmp_path: Path) -> None:
    """Code that loads a sample can use the sample's generator."""
    where = written(tmp_path, "rng = np.random.default_rng()")
    edit = edit_of_sample("numpy.random.default_rng", where)

    assert edit is not None
    assert edit.after == "import torchrepro; rng = torchrepro.sample_rng()"


def test_a_value_becomes_a_constant_only_if_it_became_a_seed(tmp_path: Path) -> None:
    """A clock read on a separate line is edited only if a seed was made from it."""
    where = written(tmp_path, "seed = int(time.time())")

    assert edit_of(CLOCK, "time.time", where) is None
    edit = edit_of(CLOCK, "time.time", where, is_seed=True)
    assert edit == Edit(where, "seed = int(time.time())", "seed = 1234")


ELSEWHERE = {
    "a set with a name": (
        (SET_ORDER, "set"),
        ("class A:", "  def f(self, net):", "    self.all = set(net)", "    x = list(self.all)"),
        ("program.py:3", "self.all = dict.fromkeys(net)"),
    ),
    "a difference of sets": (
        (SET_ORDER, "set"),
        ("some = set(net) - frozen", "for p in some:", "    p.step()"),
        (
            "program.py:1",
            "some = dict.fromkeys(each for each in net if each not in frozen)",
        ),
    ),
    "a set to which more is added": (
        (SET_ORDER, "set"),
        ("some = set(net)", "some.add(1)", "x = list(some)"),
        None,
    ),
    "a set of text": (
        (HASH, "set"),
        ("some = a.keys() & b.keys()", "x = [a[name] for name in some]"),
        ("program.py:2", "x = [a[name] for name in sorted(some)]"),
    ),
    "entries of a folder": (
        (FILES, "scandir"),
        ("with os.scandir(folder) as entries:", "    for entry in entries:", "        pass"),
        ("program.py:2", "for entry in sorted(entries, key=lambda entry: entry.name):"),
    ),
    "entries that nothing loops over": (
        (FILES, "scandir"),
        ("with os.scandir(folder) as entries:", "    use(entries)"),
        None,
    ),
}
"""What is read, the lines of a program, and the edit: its place and the line as it should be."""


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_edit_is_on_the_line_where_it_helps(name: str, tmp_path: Path) -> None:
    """For a name with a varying value, the edit is on the line that makes or uses the value."""
    (what, function), lines, expected = ELSEWHERE[name]
    file = tmp_path / "program.py"
    file.write_text("\n".join(lines), encoding="utf-8")
    each = (edit_of(what, function, f"{file}:{number + 1}") for number in range(len(lines)))
    found = {(edit.where.rpartition("/")[2], edit.after) for edit in each if edit}

    assert found == ({expected} if expected else set())


@given(text=st.text(max_size=60), what=st.sampled_from([CLOCK, ENTROPY, FILES, THREADS]))
def test_no_source_text_makes_an_edit_raise(
    text: str, what: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A line that is not Python, or is gone, raises nothing."""
    where = written(tmp_path_factory.mktemp("any"), text.replace("\n", " "))

    edit_of(what, "time.time", where, is_seed=True)
    edit_of(SET_ORDER, "set", where)
    assert edit_of(what, "time.time", "gone.py:3") is None
